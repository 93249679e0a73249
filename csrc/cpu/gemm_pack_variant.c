/* Packing of operands, each converted from what it is stored in as it is read. */
#include "cpu/gemm_units.h"

#if OMC_IS_FLOAT && OMC_GEMM_COMPILED

/* Units of K of all panels of a block that are packed in turn, where lines lie side by side. */
enum { PACKED_TOGETHER = 16 };

/* Bytes of a line that are asked for before it is their turn. */
enum { AHEAD = 256 };

/* ---- lines that are contiguous along K ---- */

/* n elements, at most a vector of units, of at most OMC_VL lines, `stride` bytes apart. Rows are
 * written whole, in rising order, unless `exact`. */
OMC_INLINE void pack_square(source s, const char *src, int64_t stride, int64_t lines, int64_t n,
                            int64_t width, bool exact, omc_unit *out) {
  omc_vunit x[OMC_VL];
  if (n == OMC_DEPTH * OMC_VL && !exact) {
    OMC_UNROLL for (int i = 0; i < OMC_VL; i++) {
      const char *line = src + omc_min(i, lines - 1) * stride;
      __builtin_prefetch(line + AHEAD);
      x[i] = units_along(s, line, OMC_DEPTH * OMC_VL);
    }
    OMC_TRANSPOSE(x);
    OMC_UNROLL for (int i = 0; i < OMC_VL; i++) store_units(out + i * width, x[i]);
    return;
  }
  OMC_UNROLL for (int i = 0; i < OMC_VL; i++) {
    const char *line = src + i * stride;
    x[i] = i >= lines ? (omc_vunit){0} : units_along(s, line, n);
  }
  OMC_TRANSPOSE(x);
  OMC_UNROLL for (int i = 0; i < OMC_VL; i++) {
    if (i * OMC_DEPTH >= n) return;
    if (exact)
      store_some_units(out + i * width, x[i], lines);
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
  enum { MOST = OMC_DEPTH * OMC_VL };
  const int64_t size = (int64_t)bytes_of(s), next = src->cs * size;
  const omc_unit *const end = out + omc_ceil_div(k, OMC_DEPTH) * width;
  for (int64_t x = 0; x < k; x += OMC_DEPTH, out += width) {
    const char *row = (const char *)src->data + x * next;
    const bool more = x + 1 < k;
    for (int64_t i = 0; i < lines; i += MOST) {
      omc_vunit units[OMC_DEPTH];
      for (int64_t d = 0; d < OMC_DEPTH; d++)
        __builtin_prefetch(row + i * size + (PACKED_TOGETHER * OMC_DEPTH + d) * next);
      if (lines - i >= MOST && more) {
        units_across(s, row + i * size, next, true, MOST, units);
        OMC_UNROLL for (int d = 0; d < OMC_DEPTH; d++) store_units(out + i + d * OMC_VL, units[d]);
        continue;
      }
      units_across(s, row + i * size, next, more, omc_min(lines - i, MOST), units);
      for (int64_t d = 0; d < OMC_DEPTH && lines - i > d * OMC_VL; d++) {
        omc_unit *const to = out + i + d * OMC_VL;
        const int64_t some = omc_min(lines - i - d * OMC_VL, OMC_VL);
        if (some < OMC_VL && (lines > OMC_VL || end - out < OMC_VL))
          store_some_units(to, units[d], some);
        else
          store_units(to, units[d]);
      }
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
      out[i] = unit_of(s, p, next, x + 1 < k);
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
OMC_SOURCES(DEFINE_PACK)

void OMC_GEMM_NAME(pack_lines)(const omc_matrix *src, int64_t lines, int64_t k, int64_t width,
                               omc_unit *out) {
#define PACK_ROW(source) [source] = pack_##source,
  static const pack_fn packs[N_SOURCES] = {OMC_SOURCES(PACK_ROW)};
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
      OMC_TRANSPOSE(x);
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
OMC_SOURCES(DEFINE_GROUPS)

/* A panel of h rows. */
static void pack_rows(const omc_matrix *src, int64_t h, int64_t k, omc_unit *out) {
#define GROUPS_ROW(source) [source] = pack_groups_##source,
  static const pack_fn packs[N_SOURCES] = {OMC_SOURCES(GROUPS_ROW)};
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
      const omc_matrix panel = omc_matrix_part(a, i, k0);
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
      const omc_matrix panel = omc_matrix_part(&lines, j, k0);
      OMC_GEMM_NAME(pack_lines)(&panel, omc_min(n - j, OMC_NR), omc_min(k - k0, some * OMC_DEPTH),
                                OMC_NR, out + j * units + u * OMC_NR);
    }
}

#endif
