/* Units of panels, made of operands as they are stored: variant part only. */
#ifndef OMC_CPU_GEMM_UNITS_H
#define OMC_CPU_GEMM_UNITS_H

#include "cpu/gemm_kernel.h"
#include "cpu/rows.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT && OMC_GEMM_COMPILED

/* What an operand is stored in, and is rounded to. It is known where the functions below are
 * inlined. */
typedef enum { ITSELF, BF16, F16, ROUNDED_BF16, ROUNDED_F16, N_SOURCES } source;

static inline source source_of(const omc_matrix *x) {
  return x->dtype == OMC_BF16     ? BF16
         : x->dtype == OMC_F16    ? F16
         : x->read_as == OMC_BF16 ? ROUNDED_BF16
         : x->read_as == OMC_F16  ? ROUNDED_F16
                                  : ITSELF;
}

OMC_INLINE bool is_half(source s) { return s == BF16 || s == F16; }
OMC_INLINE size_t bytes_of(source s) { return is_half(s) ? sizeof(uint16_t) : sizeof(acc_t); }

/* Those of the variant. */
#if OMC_DEPTH == 2 && defined(OMC_STORAGE_IS_BF16)
#define OMC_SOURCES(X) X(BF16) X(ROUNDED_BF16)
#elif OMC_DEPTH == 2
#define OMC_SOURCES(X) X(F16) X(ROUNDED_F16)
#elif defined(OMC_COMPUTE_F32)
#define OMC_SOURCES(X) X(ITSELF) X(BF16) X(F16) X(ROUNDED_BF16) X(ROUNDED_F16)
#else
#define OMC_SOURCES(X) X(ITSELF)
#endif
/* ---- units ---- */

#if OMC_DEPTH == 2

/* Rounding of two vectors to one. To bf16 it flushes denormals, as products do. */
#if defined(OMC_STORAGE_IS_BF16)
OMC_INLINE omc_vunit rounded_both(vacc_t low, vacc_t high) {
  return (omc_vunit)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}
#else
OMC_INLINE omc_vunit rounded_both(vacc_t low, vacc_t high) {
  const __m512i both = _mm512_castsi256_si512((__m256i)omc_vto_f16(low));
  return (omc_vunit)_mm512_inserti64x4(both, (__m256i)omc_vto_f16(high), 1);
}
#endif

/* Units of the next n elements of a line; the rest 0. */
OMC_INLINE omc_vunit units_along(source s, const char *p, int64_t n) {
  const int64_t low = omc_min(n, OMC_VL), high = n - low;
  if (is_half(s)) {
    const __mmask32 all = n < 2 * OMC_VL ? (__mmask32)((1u << n) - 1u) : ~(__mmask32)0;
    return (omc_vunit)_mm512_maskz_loadu_epi16(all, p);
  }
  const float *x = (const float *)(const void *)p;
  return rounded_both(vldr_upto(x, low), vldr_upto(x + low, high));
}

/* The elements of x and y in turn, from the first on or from the middle. */
OMC_INLINE omc_vunit zip_halves(omc_vunit x, omc_vunit y, int which) {
  static const uint16_t first[2 * OMC_VL] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                             37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                             11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i places =
      _mm512_add_epi16(_mm512_loadu_si512(first), _mm512_set1_epi16((short)(which * OMC_VL)));
  return (omc_vunit)_mm512_permutex2var_epi16((__m512i)x, places, (__m512i)y);
}

/* Units of the same elements of n lines side by side; `more`: `next` bytes on lies the second. */
OMC_INLINE void units_across(source s, const char *p, int64_t next, bool more, int64_t n,
                             omc_vunit out[OMC_DEPTH]) {
  const omc_vunit x = units_along(s, p, n), y = more ? units_along(s, p + next, n) : (omc_vunit){0};
  out[0] = zip_halves(x, y, 0);
  out[1] = zip_halves(x, y, 1);
}

#else

OMC_INLINE vacc_t load(source s, const char *p, int64_t n) {
  const vacc_t x = vld_as(s == BF16 ? OMC_BF16 : s == F16 ? OMC_F16 : OMC_ACC, p, 0, n);
#if defined(OMC_COMPUTE_F32)
  if (s == ROUNDED_BF16) return omc_vfrom_bf16(omc_vto_bf16(x));
  if (s == ROUNDED_F16) return omc_vfrom_f16(omc_vto_f16(x));
#endif
  return x;
}

OMC_INLINE omc_vunit units_along(source s, const char *p, int64_t n) { return load(s, p, n); }
OMC_INLINE void units_across(source s, const char *p, int64_t next, bool more, int64_t n,
                             omc_vunit out[OMC_DEPTH]) {
  (void)next, (void)more;
  out[0] = load(s, p, n);
}

#endif

/* One unit of a line whose elements lie `next` bytes apart. */
OMC_INLINE omc_unit unit_of(source s, const char *p, int64_t next, bool more) {
  omc_vunit units[OMC_DEPTH];
  units_across(s, p, next, more, 1, units);
  return units[0][0];
}

OMC_INLINE void store_units(omc_unit *p, omc_vunit x) { memcpy(p, &x, sizeof x); }
OMC_INLINE void store_some_units(omc_unit *p, omc_vunit x, int64_t n) {
  vstrn((acc_t *)(void *)p, (vacc_t)x, n);
}
OMC_INLINE omc_vunit load_units(const omc_unit *p) {
  omc_vunit x;
  memcpy(&x, p, sizeof x);
  return x;
}

/* A unit in every lane, and the products of units added to c. */
#if OMC_DEPTH == 2
OMC_INLINE omc_vunit spread(omc_unit x) { return (omc_vunit)_mm512_set1_epi32(x); }
#else
OMC_INLINE omc_vunit spread(omc_unit x) { return vset(x); }
#endif
#if OMC_DEPTH == 2 && defined(OMC_STORAGE_IS_BF16)
OMC_INLINE vacc_t add_products(omc_vunit a, omc_vunit b, vacc_t c) {
  return (vacc_t)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
}
#elif OMC_DEPTH == 2
OMC_INLINE vacc_t half_of(omc_vunit x, int which) {
  const __m512i bits = (__m512i)x;
  return omc_vfrom_f16(
      (omc_half_bits)(which ? _mm512_extracti64x4_epi64(bits, 1) : _mm512_castsi512_si256(bits)));
}
OMC_INLINE vacc_t add_products(omc_vunit a, omc_vunit b, vacc_t c) {
  return vfma(half_of(a, 1), half_of(b, 1), vfma(half_of(a, 0), half_of(b, 0), c));
}
#else
OMC_INLINE vacc_t add_products(omc_vunit a, omc_vunit b, vacc_t c) { return vfma(a, b, c); }
#endif

#endif

#endif
