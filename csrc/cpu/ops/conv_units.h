/* Elements of images as units of a product: one each, or of 16 bits two, the second of which lies
 * `next` further on, or if that is 0 is none. Included by variants. */
#ifndef OMC_CPU_OPS_CONV_UNITS_H
#define OMC_CPU_OPS_CONV_UNITS_H

#include <string.h>

#include "cpu/ops/conv.h"
#include "cpu/rows.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT && OMC_GEMM_KNOWN

#if OMC_DEPTH == 2
/* Units of at most a vector of elements (stored_units: of a whole one) and, unless `next` is 0,
 * those `next` further on. */
OMC_INLINE omc_vunit units_of(const conv_element *p, int64_t next, int64_t n) {
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)omc_vldh(p, n));
  if (!next) return (omc_vunit)low;
  const __m512i high = _mm512_cvtepu16_epi32((__m256i)omc_vldh(p + next, n));
  return (omc_vunit)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}
/* Those of two vectors of elements. */
OMC_INLINE void pack_two_vectors(const conv_element *p, int64_t next, omc_unit *out) {
  const __m512i first = _mm512_loadu_si512(p);
  const __m512i second = next ? _mm512_loadu_si512(p + next) : _mm512_setzero_si512();
  const __m512i low = _mm512_set_epi32(0x2f000f, 0x2e000e, 0x2d000d, 0x2c000c, 0x2b000b, 0x2a000a,
                                       0x290009, 0x280008, 0x270007, 0x260006, 0x250005, 0x240004,
                                       0x230003, 0x220002, 0x210001, 0x200000);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(OMC_VL));
  _mm512_storeu_si512(out, _mm512_permutex2var_epi16(first, low, second));
  _mm512_storeu_si512(out + OMC_VL, _mm512_permutex2var_epi16(first, high, second));
}
OMC_INLINE omc_unit unit_of(const conv_element *p, int64_t next) {
  const uint32_t second = next ? p[next].bits : 0;
  return (omc_unit)(p->bits | second << 16);
}
OMC_INLINE omc_vunit stored_units(const storage_t *p, int64_t next) {
  return units_of(p, next, OMC_VL);
}
OMC_INLINE void copy_run(const storage_t *from, int64_t next, omc_unit *to, int64_t n) {
  for (int64_t i = 0; i < n; i += OMC_VL) {
    const int64_t some = omc_min(n - i, OMC_VL);
    vstr_upto((acc_t *)(void *)(to + i), (vacc_t)units_of(from + i, next, some), some);
  }
}
/* The same of n elements and the n that follow them. */
OMC_INLINE void copy_both(const storage_t *from, omc_unit *to, int64_t n) {
  if (n > OMC_VL) {
    copy_run(from, n, to, n);
    return;
  }
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i second = _mm512_add_epi32(lane, _mm512_set1_epi32((int)n));
  const __m512i places = _mm512_or_si512(lane, _mm512_slli_epi32(second, 16));
  const __mmask32 all = ~(__mmask32)0 >> (2 * (OMC_VL - n));
  const __m512i x = _mm512_maskz_loadu_epi16(all, from);
  vstr_upto((acc_t *)(void *)to, (vacc_t)_mm512_permutexvar_epi16(places, x), n);
}
#else
OMC_INLINE omc_vunit units_of(const conv_element *p, int64_t next, int64_t n) {
  (void)next;
  return vldr_upto(p, n);
}
OMC_INLINE void pack_two_vectors(const conv_element *p, int64_t next, omc_unit *out) {
  (void)next;
  memcpy(out, p, 2 * OMC_VL * sizeof *out);
}
OMC_INLINE omc_unit unit_of(const storage_t *p, int64_t next) {
  (void)next;
  return ld(p);
}
OMC_INLINE omc_vunit stored_units(const storage_t *p, int64_t next) {
  (void)next;
  return vld(p);
}
OMC_INLINE void copy_run(const storage_t *from, int64_t next, omc_unit *to, int64_t n) {
  (void)next;
  for (int64_t i = 0; i < n; i += OMC_VL) vstr_upto(to + i, vld_fill(from + i, n - i, 0), n - i);
}
OMC_INLINE void copy_both(const storage_t *from, omc_unit *to, int64_t n) {
  copy_run(from, 0, to, n);
}
#endif

#endif

#endif
