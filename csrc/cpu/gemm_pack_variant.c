/* Packing of operands, each converted from what it is stored in as it is read. */
#include "cpu/gemm_kernel.h"
#include "cpu/rows.h"

#if OMC_IS_FLOAT && OMC_GEMM_COMPILED

/* What an operand is stored in, and is rounded to. It is known where the functions below are
 * inlined. */
typedef enum { ITSELF, BF16, F16, ROUNDED_BF16, ROUNDED_F16, N_SOURCES } source;

static source source_of(const omc_matrix *x) {
  return x->dtype == OMC_BF16     ? BF16
         : x->dtype == OMC_F16    ? F16
         : x->read_as == OMC_BF16 ? ROUNDED_BF16
         : x->read_as == OMC_F16  ? ROUNDED_F16
                                  : ITSELF;
}

OMC_INLINE bool is_half(source s) { return s == BF16 || s == F16; }
OMC_INLINE size_t bytes_of(source s) { return is_half(s) ? sizeof(uint16_t) : sizeof(acc_t); }

/* Units of K of all panels of a block that are packed in turn, where lines lie side by side. */
enum { PACKED_TOGETHER = 16 };

/* ---- units ---- */

#if OMC_DEPTH == 2

/* Rounding, and that of two vectors to one. To bf16 it flushes denormals, as products do. */
#if defined(OMC_STORAGE_IS_BF16)
OMC_INLINE omc_half_bits rounded(vacc_t x) { return (omc_half_bits)_mm512_cvtneps_pbh((__m512)x); }
OMC_INLINE omc_vunit rounded_both(vacc_t low, vacc_t high) {
  return (omc_vunit)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}
#else
OMC_INLINE omc_half_bits rounded(vacc_t x) { return omc_vto_f16(x); }
OMC_INLINE omc_vunit rounded_both(vacc_t low, vacc_t high) {
  const __m512i both = _mm512_castsi256_si512((__m256i)rounded(low));
  return (omc_vunit)_mm512_inserti64x4(both, (__m256i)rounded(high), 1);
}
#endif

/* Bits of up to OMC_VL elements as numbers of 16 bits. */
OMC_INLINE omc_acc_bits bits_at(source s, const char *p, int64_t n) {
  if (is_half(s)) return __builtin_convertvector(omc_vldh(p, n), omc_acc_bits);
  const vacc_t x = vldr_upto((const acc_t *)(const void *)p, n);
  return __builtin_convertvector(rounded(x), omc_acc_bits);
}

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

/* Units of the same elements of n lines side by side; `more`: `next` bytes on lies the second. */
OMC_INLINE omc_vunit units_across(source s, const char *p, int64_t next, bool more, int64_t n) {
  omc_acc_bits units = bits_at(s, p, n);
  if (more) units |= bits_at(s, p + next, n) << 16;
  return (omc_vunit)units;
}

#else

OMC_INLINE vacc_t load(source s, const char *p, int64_t n) {
#if defined(OMC_COMPUTE_F32)
  if (s == BF16) return omc_vfrom_bf16(omc_vldh(p, n));
  if (s == F16) return omc_vfrom_f16(omc_vldh(p, n));
#endif
  const vacc_t x = vldr_upto((const acc_t *)(const void *)p, n);
#if defined(OMC_COMPUTE_F32)
  if (s == ROUNDED_BF16) return omc_vfrom_bf16(omc_vto_bf16(x));
  if (s == ROUNDED_F16) return omc_vfrom_f16(omc_vto_f16(x));
#else
  (void)s;
#endif
  return x;
}

OMC_INLINE omc_vunit units_along(source s, const char *p, int64_t n) { return load(s, p, n); }
OMC_INLINE omc_vunit units_across(source s, const char *p, int64_t next, bool more, int64_t n) {
  (void)next, (void)more;
  return load(s, p, n);
}

#endif

OMC_INLINE void store_units(omc_unit *p, omc_vunit x) { memcpy(p, &x, sizeof x); }
OMC_INLINE void store_some(omc_unit *p, omc_vunit x, int64_t n) {
  vstrn((acc_t *)(void *)p, (vacc_t)x, n);
}

/* ---- lines that are contiguous along K ---- */

/* Transposes OMC_VL vectors: zipping the halves once per bit of the lane index. */
OMC_INLINE void transpose(omc_vunit x[OMC_VL]) {
  OMC_UNROLL for (int bit = 1; bit < OMC_VL; bit *= 2) {
    omc_vunit y[OMC_VL];
    OMC_UNROLL for (int i = 0; i < OMC_VL / 2; i++) {
      y[2 * i] = OMC_ZIP_LOW(x[i], x[i + OMC_VL / 2]);
      y[2 * i + 1] = OMC_ZIP_HIGH(x[i], x[i + OMC_VL / 2]);
    }
    OMC_UNROLL for (int i = 0; i < OMC_VL; i++) x[i] = y[i];
  }
}

/* n elements, at most a vector of units, of at most OMC_VL lines, `stride` bytes apart. Rows are
 * written whole, in rising order, unless `exact`. */
OMC_INLINE void pack_square(source s, const char *src, int64_t stride, int64_t lines, int64_t n,
                            int64_t width, bool exact, omc_unit *out) {
  omc_vunit x[OMC_VL];
  if (lines == OMC_VL && n == OMC_DEPTH * OMC_VL && !exact) {
    OMC_UNROLL for (int i = 0; i < OMC_VL; i++) x[i] =
        units_along(s, src + i * stride, OMC_DEPTH * OMC_VL);
    transpose(x);
    OMC_UNROLL for (int i = 0; i < OMC_VL; i++) store_units(out + i * width, x[i]);
    return;
  }
  OMC_UNROLL for (int i = 0; i < OMC_VL; i++) {
    const char *line = src + i * stride;
    x[i] = i >= lines ? (omc_vunit){0} : units_along(s, line, n);
  }
  transpose(x);
  OMC_UNROLL for (int i = 0; i < OMC_VL; i++) {
    if (i * OMC_DEPTH >= n) return;
    if (exact)
      store_some(out + i * width, x[i], lines);
    else
      store_units(out + i * width, x[i]);
  }
}

OMC_INLINE void pack_along(source s, const omc_matrix *src, int64_t lines, int64_t k, int64_t width,
                           omc_unit *out) {
  const int64_t size = (int64_t)bytes_of(s), stride = src->rs * size, most = OMC_DEPTH * OMC_VL;
  for (int64_t k0 = 0; k0 < k; k0 += most) {
    const int64_t n = omc_min(k - k0, most);
    for (int64_t i = 0; i < lines; i += OMC_VL) {
      const int64_t some = omc_min(lines - i, OMC_VL);
      const bool exact = some < OMC_VL && lines > OMC_VL;
      pack_square(s, (const char *)src->data + i * stride + k0 * size, stride, some, n, width,
                  exact, out + k0 / OMC_DEPTH * width + i);
    }
  }
}

/* ---- lines that lie side by side ---- */

/* Nothing is written past the end, for what comes there may have been packed before. */
OMC_INLINE void pack_across(source s, const omc_matrix *src, int64_t lines, int64_t k,
                            int64_t width, omc_unit *out) {
  const int64_t size = (int64_t)bytes_of(s), next = src->cs * size;
  const omc_unit *const end = out + omc_ceil_div(k, OMC_DEPTH) * width;
  for (int64_t x = 0; x < k; x += OMC_DEPTH, out += width) {
    const char *row = (const char *)src->data + x * next;
    const bool more = x + 1 < k;
    for (int64_t i = 0; i < lines; i += OMC_VL) {
      const int64_t some = omc_min(lines - i, OMC_VL);
      const omc_vunit units = units_across(s, row + i * size, next, more, some);
      if (some < OMC_VL && (lines > OMC_VL || end - out < OMC_VL))
        store_some(out + i, units, some);
      else
        store_units(out + i, units);
    }
  }
}

/* ---- any others ---- */

OMC_INLINE void pack_strided(source s, const omc_matrix *src, int64_t lines, int64_t k,
                             int64_t width, omc_unit *out) {
  const int64_t size = (int64_t)bytes_of(s), next = src->cs * size;
  for (int64_t x = 0; x < k; x += OMC_DEPTH, out += width)
    for (int64_t i = 0; i < lines; i++) {
      const char *p = (const char *)src->data + i * src->rs * size + x * next;
      out[i] = units_across(s, p, next, x + 1 < k, 1)[0];
    }
}

typedef void (*pack_fn)(const omc_matrix *src, int64_t lines, int64_t k, int64_t width,
                        omc_unit *out);

#define DEFINE_PACK(source)                                                                 \
  static void pack_##source(const omc_matrix *src, int64_t lines, int64_t k, int64_t width, \
                            omc_unit *out) {                                                \
    if (src->cs == 1)                                                                       \
      pack_along(source, src, lines, k, width, out);                                        \
    else if (src->rs == 1)                                                                  \
      pack_across(source, src, lines, k, width, out);                                       \
    else                                                                                    \
      pack_strided(source, src, lines, k, width, out);                                      \
  }
#if OMC_DEPTH == 2 && defined(OMC_STORAGE_IS_BF16)
#define SOURCES(X) X(BF16) X(ROUNDED_BF16)
#elif OMC_DEPTH == 2
#define SOURCES(X) X(F16) X(ROUNDED_F16)
#elif defined(OMC_COMPUTE_F32)
#define SOURCES(X) X(ITSELF) X(BF16) X(F16) X(ROUNDED_BF16) X(ROUNDED_F16)
#else
#define SOURCES(X) X(ITSELF)
#endif
SOURCES(DEFINE_PACK)

void OMC_GEMM_NAME(pack_lines)(const omc_matrix *src, int64_t lines, int64_t k, int64_t width,
                               omc_unit *out) {
#define PACK_ROW(source) [source] = pack_##source,
  static const pack_fn packs[N_SOURCES] = {SOURCES(PACK_ROW)};
  packs[source_of(src)](src, lines, k, width, out);
}

/* ---- panels of A ---- */

#if defined(OMC_TILES)

/* Turns squares of h columns of a group. */
void OMC_GEMM_NAME(group)(omc_unit *panel, int64_t h, int64_t k) {
  omc_unit columns[OMC_GROUP * OMC_MR];
  for (int64_t u = 0; u < k; u += OMC_GROUP, panel += OMC_GROUP * h) {
    const int64_t n = omc_min(k - u, OMC_GROUP);
    memcpy(columns, panel, (size_t)(n * h) * sizeof *panel);
    for (int64_t i = 0; i < h; i += OMC_VL) {
      omc_vunit x[OMC_VL];
      for (int64_t c = 0; c < OMC_GROUP; c++) {
        const acc_t *column = (const acc_t *)(const void *)(columns + c * h + i);
        x[c] = c < n ? (omc_vunit)vldr_upto(column, h - i) : (omc_vunit){0};
      }
      transpose(x);
      for (int64_t r = 0; r < omc_min(h - i, OMC_VL); r++)
        store_units(panel + (i + r) * OMC_GROUP, x[r]);
    }
  }
}

/* Rows that are contiguous along K are groups already. */
OMC_INLINE void pack_groups(source s, const omc_matrix *src, int64_t h, int64_t k, omc_unit *out) {
  const int64_t size = (int64_t)bytes_of(s), most = OMC_DEPTH * OMC_GROUP;
  for (int64_t k0 = 0; k0 < k; k0 += most)
    for (int64_t i = 0; i < h; i++, out += OMC_GROUP) {
      const char *row = (const char *)src->data + (i * src->rs + k0) * size;
      store_units(out, units_along(s, row, omc_min(k - k0, most)));
    }
}

#define DEFINE_GROUPS(source)                                                                  \
  static void pack_groups_##source(const omc_matrix *src, int64_t h, int64_t k, int64_t width, \
                                   omc_unit *out) {                                            \
    (void)width;                                                                               \
    pack_groups(source, src, h, k, out);                                                       \
  }
SOURCES(DEFINE_GROUPS)

/* A panel of h rows. */
static void pack_rows(const omc_matrix *src, int64_t h, int64_t k, omc_unit *out) {
#define GROUPS_ROW(source) [source] = pack_groups_##source,
  static const pack_fn packs[N_SOURCES] = {SOURCES(GROUPS_ROW)};
  if (src->cs == 1) {
    packs[source_of(src)](src, h, k, h, out);
  } else {
    OMC_GEMM_NAME(pack_lines)(src, h, k, h, out);
    OMC_GEMM_NAME(group)(out, h, omc_ceil_div(k, OMC_DEPTH));
  }
}

#else

static void pack_rows(const omc_matrix *src, int64_t h, int64_t k, omc_unit *out) {
  OMC_GEMM_NAME(pack_lines)(src, h, k, h, out);
}

#endif

/* ---- blocks ---- */

/* Units of K of all panels of a block that are packed in turn: lines that lie side by side a few at
 * a time, so that what lies together is read together. */
static int64_t packed_in_turn(const omc_matrix *lines, int64_t units) {
  return lines->cs == 1 ? omc_max(units, 1) : PACKED_TOGETHER;
}

void OMC_GEMM_NAME(pack_a)(const omc_matrix *a, int64_t m, int64_t k, omc_unit *out) {
  const int64_t units = omc_ceil_div(k, OMC_DEPTH), some = packed_in_turn(a, units);
  for (int64_t u = 0; u < units; u += some)
    for (int64_t p = 0; p < omc_gemm_panels(m); p++) {
      const int64_t i = omc_gemm_row(m, p), h = omc_gemm_row(m, p + 1) - i, k0 = u * OMC_DEPTH;
      const omc_matrix panel = omc_gemm_part(a, i, k0);
      pack_rows(&panel, h, omc_min(k - k0, some * OMC_DEPTH),
                out + i * omc_gemm_units(units) + u * h);
    }
}

void OMC_GEMM_NAME(pack_b)(const omc_matrix *b, int64_t k, int64_t n, omc_unit *out) {
  const int64_t units = omc_ceil_div(k, OMC_DEPTH), part = n % OMC_NR;
  omc_matrix lines = *b;
  lines.rs = b->cs, lines.cs = b->rs;
  if (part) memset(out + (n - part) * units, 0, (size_t)(OMC_NR * units) * sizeof *out);
  const int64_t some = packed_in_turn(&lines, units);
  for (int64_t u = 0; u < units; u += some)
    for (int64_t j = 0; j < n; j += OMC_NR) {
      const int64_t k0 = u * OMC_DEPTH;
      const omc_matrix panel = omc_gemm_part(&lines, j, k0);
      OMC_GEMM_NAME(pack_lines)(&panel, omc_min(n - j, OMC_NR), omc_min(k - k0, some * OMC_DEPTH),
                                OMC_NR, out + j * units + u * OMC_NR);
    }
}

#endif
