#include "cpu/convert.h"
#include "cpu/gemm_kernel.h"

#if OMC_IS_FLOAT && OMC_STORES_ACC

/* ---- micro-kernels ---- */

typedef struct tile {
  int64_t k;
  const acc_t *a;
  const acc_t *b;
  int64_t b_rs;
  acc_t *c;
  int64_t c_rs;
  acc_t alpha, beta;
  const acc_t *bias;
  const acc_t *row_bias;
} tile;

/* Visits the vectors of a tile: vector v of row r, which the caller names. */
#define EACH_VECTOR(r, v) \
  OMC_UNROLL for (int r = 0; r < rows; r++) OMC_UNROLL for (int v = 0; v < nv; v++)

/* A tile of `rows` x nv vectors; both are constants where this is inlined. */
OMC_INLINE void tile_product(const int rows, const int nv, const tile *t) {
  acc_t *const c = t->c;
  const int64_t c_rs = t->c_rs;
  vacc_t acc[OMC_MR][OMC_NV];
  EACH_VECTOR(r, v) { acc[r][v] = vset(0); }
  OMC_UNROLL for (int r = 0; r < rows; r++) __builtin_prefetch(c + r * c_rs, 1);

  const acc_t *a = t->a, *b = t->b;
  const int64_t b_rs = t->b_rs;
  for (int64_t k = t->k; k > 0; k--) {
    vacc_t row[OMC_NV];
    OMC_UNROLL for (int v = 0; v < nv; v++) row[v] = vldr(b + v * OMC_VL);
    OMC_UNROLL for (int r = 0; r < rows; r++) {
      const vacc_t x = vset(a[r]);
      OMC_UNROLL for (int v = 0; v < nv; v++) acc[r][v] = vfma(x, row[v], acc[r][v]);
    }
    a += rows;
    b += b_rs;
  }

  if (t->alpha != 1) {
    const vacc_t alpha = vset(t->alpha);
    EACH_VECTOR(r, v) { acc[r][v] *= alpha; }
  }
  if (t->beta == 1) {
    EACH_VECTOR(r, v) { acc[r][v] += vldr(c + r * c_rs + v * OMC_VL); }
  } else if (t->beta != 0) {
    const vacc_t beta = vset(t->beta);
    EACH_VECTOR(r, v) { acc[r][v] = vfma(beta, vldr(c + r * c_rs + v * OMC_VL), acc[r][v]); }
  }
  if (t->bias) {
    EACH_VECTOR(r, v) { acc[r][v] += vldr(t->bias + v * OMC_VL); }
  }
  if (t->row_bias) {
    EACH_VECTOR(r, v) { acc[r][v] += vset(t->row_bias[r]); }
  }
  EACH_VECTOR(r, v) { vstr(c + r * c_rs + v * OMC_VL, acc[r][v]); }
}

typedef void (*tile_fn)(const tile *t);

#define DEFINE_TILES(rows)                                                 \
  static void tile_##rows##_1(const tile *t) { tile_product(rows, 1, t); } \
  static void tile_##rows##_2(const tile *t) { tile_product(rows, 2, t); }
OMC_GEMM_ROWS(DEFINE_TILES)

#define TILE_ROW(rows) {tile_##rows##_1, tile_##rows##_2},
static const tile_fn tiles[OMC_MR][OMC_NV] = {OMC_GEMM_ROWS(TILE_ROW)};

/* A tile whose n columns do not fill its vectors goes through a local copy of its part of C. */
static void tile_edge(tile_fn fn, const tile *t, int64_t rows, int64_t n) {
  acc_t c[OMC_MR * OMC_NR], bias[OMC_NR];
  const size_t bytes = (size_t)n * sizeof(acc_t);
  tile local = *t;
  local.c = c;
  local.c_rs = OMC_NR;
  memset(c, 0, sizeof c);
  if (t->beta != 0)
    for (int64_t r = 0; r < rows; r++) memcpy(c + r * OMC_NR, t->c + r * t->c_rs, bytes);
  if (t->bias) {
    memset(bias, 0, sizeof bias);
    memcpy(bias, t->bias, bytes);
    local.bias = bias;
  }
  fn(&local);
  for (int64_t r = 0; r < rows; r++) memcpy(t->c + r * t->c_rs, c + r * OMC_NR, bytes);
}

void OMC_GEMM_NAME(multiply)(const omc_gemm_block *g) {
  const int64_t panels = omc_gemm_panels(g->m);
  for (int64_t j = 0; j < g->n; j += OMC_NR) {
    const int64_t n = g->n - j < OMC_NR ? g->n - j : OMC_NR;
    const bool in_place = g->b_rows && n == OMC_NR;
    const int64_t nv = omc_ceil_div(n, OMC_VL);
    tile t = {.k = g->k,
              .b = in_place ? g->b_rows + j : g->b + j * g->k,
              .b_rs = in_place ? g->b_rs : OMC_NR,
              .c_rs = g->c_rs,
              .alpha = g->alpha,
              .beta = g->beta,
              .bias = g->bias ? g->bias + j : NULL};
    for (int64_t p = 0; p < panels; p++) {
      const int64_t i = omc_cut(g->m, panels, p), rows = omc_cut(g->m, panels, p + 1) - i;
      const tile_fn fn = tiles[rows - 1][nv - 1];
      t.a = g->a + i * g->k;
      t.c = g->c + i * g->c_rs + j;
      t.row_bias = g->row_bias ? g->row_bias + i : NULL;
      if (n == nv * OMC_VL)
        fn(&t);
      else
        tile_edge(fn, &t, rows, n);
    }
  }
}

/* ---- packing ---- */

/* Transposes OMC_VL vectors: zipping the halves once per bit of the lane index. */
OMC_INLINE void transpose(vacc_t x[OMC_VL]) {
  OMC_UNROLL for (int bit = 1; bit < OMC_VL; bit *= 2) {
    vacc_t y[OMC_VL];
    OMC_UNROLL for (int i = 0; i < OMC_VL / 2; i++) {
      y[2 * i] = OMC_ZIP_LOW(x[i], x[i + OMC_VL / 2]);
      y[2 * i + 1] = OMC_ZIP_HIGH(x[i], x[i + OMC_VL / 2]);
    }
    OMC_UNROLL for (int i = 0; i < OMC_VL; i++) x[i] = y[i];
  }
}

/* A square of pack_lines: `lines` and n at most OMC_VL. Rows are written whole, in rising order,
 * unless `exact`. */
static void pack_square(const acc_t *src, int64_t stride, int64_t lines, int64_t n, int64_t width,
                        bool exact, acc_t *out) {
  vacc_t x[OMC_VL];
  if (lines == OMC_VL && n == OMC_VL && !exact) {
    OMC_UNROLL for (int i = 0; i < OMC_VL; i++) x[i] = vldr(src + i * stride);
    transpose(x);
    OMC_UNROLL for (int i = 0; i < OMC_VL; i++) vstr(out + i * width, x[i]);
    return;
  }
  OMC_UNROLL for (int i = 0; i < OMC_VL; i++) {
    const acc_t *line = src + i * stride;
    x[i] = i >= lines ? vset(0) : n == OMC_VL ? vldr(line) : vldn(line, n);
  }
  transpose(x);
  OMC_UNROLL for (int i = 0; i < OMC_VL; i++) {
    if (i >= n) return;
    if (exact)
      vstn(out + i * width, x[i], lines);
    else
      vstr(out + i * width, x[i]);
  }
}

void OMC_GEMM_NAME(pack_lines)(const acc_t *src, int64_t stride, int64_t lines, int64_t k,
                               int64_t width, acc_t *out) {
  for (int64_t k0 = 0; k0 < k; k0 += OMC_VL) {
    const int64_t n = k - k0 < OMC_VL ? k - k0 : OMC_VL;
    for (int64_t i = 0; i < lines; i += OMC_VL) {
      const int64_t some = lines - i < OMC_VL ? lines - i : OMC_VL;
      const bool exact = some < OMC_VL && lines > OMC_VL;
      pack_square(src + i * stride + k0, stride, some, n, width, exact, out + k0 * width + i);
    }
  }
}

static void pack_strided(const acc_t *src, int64_t line_stride, int64_t k_stride, int64_t lines,
                         int64_t k, int64_t width, acc_t *out) {
  for (int64_t x = 0; x < k; x++)
    for (int64_t i = 0; i < lines; i++) out[x * width + i] = src[i * line_stride + x * k_stride];
}

static void pack_a(const omc_matrix *a, int64_t m, int64_t k, acc_t *out) {
  const int64_t panels = omc_gemm_panels(m);
  for (int64_t p = 0; p < panels; p++) {
    const int64_t i = omc_cut(m, panels, p), rows = omc_cut(m, panels, p + 1) - i;
    const acc_t *src = (const acc_t *)a->data + i * a->rs;
    if (a->cs == 1)
      OMC_GEMM_NAME(pack_lines)(src, a->rs, rows, k, rows, out);
    else
      pack_strided(src, a->rs, a->cs, rows, k, rows, out);
    out += rows * k;
  }
}

static void pack_b(const omc_matrix *b, int64_t k, int64_t n, acc_t *out) {
  for (int64_t j = 0; j < n; j += OMC_NR, out += OMC_NR * k) {
    const int64_t cols = n - j < OMC_NR ? n - j : OMC_NR;
    const acc_t *src = (const acc_t *)b->data + j * b->cs;
    if (cols < OMC_NR) memset(out, 0, (size_t)(OMC_NR * k) * sizeof(acc_t));
    if (b->cs == 1 && cols == OMC_NR) {
      for (int64_t x = 0; x < k; x++)
        OMC_UNROLL for (int64_t v = 0; v < OMC_NR; v += OMC_VL)
            vstr(out + x * OMC_NR + v, vldr(src + x * b->rs + v));
    } else if (b->rs == 1) {
      OMC_GEMM_NAME(pack_lines)(src, b->cs, cols, k, OMC_NR, out);
    } else {
      pack_strided(src, b->cs, b->rs, cols, k, OMC_NR, out);
    }
  }
}

/* ---- operands that are stored in another dtype ---- */

extern const omc_convert OMC_PASTE3(omc_, convert, OMC_VARIANT);
static const omc_convert *const convert = &OMC_PASTE3(omc_, convert, OMC_VARIANT);

static omc_matrix block_of(const omc_matrix *x, int64_t row, int64_t col) {
  char *data = x->data;
  data += (row * x->rs + col * x->cs) * (int64_t)omc_dtype_size(x->dtype);
  return (omc_matrix){data, x->rs, x->cs, x->dtype};
}

/* A matrix as acc_t: itself, or a dense copy in `out` that is contiguous in the same direction. */
static omc_matrix widened(const omc_matrix *x, int64_t rows, int64_t cols, acc_t *out) {
  if (x->dtype == OMC_ACC) return *x;
  const bool by_cols = x->rs == 1 && x->cs != 1, by_rows = x->cs == 1;
  const int64_t lines = by_cols ? cols : rows, n = by_cols ? rows : cols;
  for (int64_t i = 0; i < lines; i++) {
    const omc_matrix line = by_cols ? block_of(x, 0, i) : block_of(x, i, 0);
    if (by_cols || by_rows)
      convert->load[x->dtype](line.data, out + i * n, n);
    else
      for (int64_t j = 0; j < n; j++)
        convert->load[x->dtype](block_of(&line, 0, j).data, out + i * n + j, 1);
  }
  return by_cols ? (omc_matrix){out, 1, rows, OMC_ACC} : (omc_matrix){out, cols, 1, OMC_ACC};
}

static const acc_t *widened_bias(const void *bias, omc_dtype dtype, int64_t at, int64_t n,
                                 acc_t *out) {
  if (!bias) return NULL;
  const omc_matrix all = {(void *)(uintptr_t)bias, n, 1, dtype}, part = block_of(&all, 0, at);
  return widened(&part, 1, n, out).data;
}

static void narrow(const acc_t *sums, int64_t rows, int64_t cols, const omc_matrix *out) {
  for (int64_t i = 0; i < rows; i++)
    convert->store[out->dtype](sums + i * cols, block_of(out, i, 0).data, cols);
}

/* ---- a whole product on one thread ---- */

/* Packing B pays off from this many rows on, if its rows are contiguous. */
#define PACK_ROWS (4 * OMC_MR)

/* All columns of some rows; where C is narrower than its sums, at most OMC_GEMM_SUMS of them. */
static void multiply_rows(const omc_gemm_args *g, void *workspace) {
  const int64_t m = g->m, n = g->n, k = g->k;
  const int64_t m_blocks = omc_ceil_div(m, OMC_GEMM_MC);
  const int64_t k_blocks = k ? omc_ceil_div(k, OMC_GEMM_KC) : 1;
  const bool in_place = g->b.cs == 1 && m <= PACK_ROWS, narrows = g->c.dtype != OMC_ACC;
  const omc_gemm_wide wide = omc_gemm_wide_of(m, n, k);
  acc_t *const packed_a = workspace;
  acc_t *const packed_b = packed_a + omc_gemm_packed_a(m, k);
  acc_t *const wide_a = packed_b + omc_gemm_packed_b(n, k), *const wide_b = wide_a + wide.a;
  acc_t *const sums = wide_b + wide.b, *const wide_bias = sums + wide.sums;
  acc_t *const wide_row_bias = wide_bias + wide.bias;
  const acc_t *const row_bias = widened_bias(g->row_bias, g->c.dtype, 0, m, wide_row_bias);
  for (int64_t j = 0; j < n; j += OMC_GEMM_NC) {
    const int64_t nb = n - j < OMC_GEMM_NC ? n - j : OMC_GEMM_NC;
    const omc_matrix out = block_of(&g->c, 0, j);
    const omc_matrix c = !narrows       ? out
                         : g->beta != 0 ? widened(&out, m, nb, sums)
                                        : (omc_matrix){sums, nb, 1, OMC_ACC};
    const acc_t *const bias = widened_bias(g->bias, g->c.dtype, j, nb, wide_bias);
    for (int64_t kb = 0; kb < k_blocks; kb++) {
      const int64_t k0 = omc_cut(k, k_blocks, kb), kn = omc_cut(k, k_blocks, kb + 1) - k0;
      const bool first = kb == 0, last = kb == k_blocks - 1;
      const omc_matrix stored_b = block_of(&g->b, k0, j), b = widened(&stored_b, kn, nb, wide_b);
      const int64_t whole = in_place ? nb - nb % OMC_NR : 0;
      const omc_matrix rest = block_of(&b, 0, whole);
      pack_b(&rest, kn, nb - whole, packed_b + whole * kn);
      for (int64_t ib = 0; ib < m_blocks; ib++) {
        const int64_t i = omc_cut(m, m_blocks, ib), mb = omc_cut(m, m_blocks, ib + 1) - i;
        const omc_matrix stored_a = block_of(&g->a, i, k0), a = widened(&stored_a, mb, kn, wide_a);
        pack_a(&a, mb, kn, packed_a);
        const omc_gemm_block block = {.m = mb,
                                      .n = nb,
                                      .k = kn,
                                      .a = packed_a,
                                      .b = packed_b,
                                      .b_rows = in_place ? b.data : NULL,
                                      .b_rs = b.rs,
                                      .c = (acc_t *)c.data + i * c.rs,
                                      .c_rs = c.rs,
                                      .alpha = (acc_t)g->alpha,
                                      .beta = first ? (acc_t)g->beta : 1,
                                      .bias = last ? bias : NULL,
                                      .row_bias = last && row_bias ? row_bias + i : NULL};
        OMC_GEMM_NAME(multiply)(&block);
      }
    }
    if (narrows) narrow(sums, m, nb, &out);
  }
}

void OMC_GEMM_NAME(serial)(const omc_gemm_args *, void *);
void OMC_GEMM_NAME(serial)(const omc_gemm_args *g, void *workspace) {
  if (g->c.dtype == OMC_ACC) {
    multiply_rows(g, workspace);
    return;
  }
  omc_gemm_args part = *g;
  for (int64_t i = 0; i < g->m; i += OMC_GEMM_SUMS) {
    part.m = omc_min(g->m - i, OMC_GEMM_SUMS);
    part.a = block_of(&g->a, i, 0);
    part.c = block_of(&g->c, i, 0);
    if (g->row_bias)
      part.row_bias = (const char *)g->row_bias + i * (int64_t)omc_dtype_size(g->c.dtype);
    multiply_rows(&part, workspace);
  }
}

#endif
