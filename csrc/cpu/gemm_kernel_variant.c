#include "cpu/gemm_kernel.h"

#if OMC_IS_FLOAT

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

/* Visits the vectors of a tile: row r, vector v of it. */
#define EACH_VECTOR \
  OMC_UNROLL for (int r = 0; r < rows; r++) OMC_UNROLL for (int v = 0; v < nv; v++)

/* A tile of `rows` x nv vectors; both are constants where this is inlined. */
OMC_INLINE void tile_product(const int rows, const int nv, const tile *t) {
  acc_t *const c = t->c;
  const int64_t c_rs = t->c_rs;
  vacc_t acc[OMC_MR][OMC_NV];
  EACH_VECTOR { acc[r][v] = vset(0); }
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
    EACH_VECTOR { acc[r][v] *= alpha; }
  }
  if (t->beta == 1) {
    EACH_VECTOR { acc[r][v] += vldr(c + r * c_rs + v * OMC_VL); }
  } else if (t->beta != 0) {
    const vacc_t beta = vset(t->beta);
    EACH_VECTOR { acc[r][v] = vfma(beta, vldr(c + r * c_rs + v * OMC_VL), acc[r][v]); }
  }
  if (t->bias) {
    EACH_VECTOR { acc[r][v] += vldr(t->bias + v * OMC_VL); }
  }
  if (t->row_bias) {
    EACH_VECTOR { acc[r][v] += vset(t->row_bias[r]); }
  }
  EACH_VECTOR { vstr(c + r * c_rs + v * OMC_VL, acc[r][v]); }
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

void OMC_GEMM_NAME(pack_a)(const omc_matrix *a, int64_t m, int64_t k, acc_t *out) {
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

void OMC_GEMM_NAME(pack_b)(const omc_matrix *b, int64_t k, int64_t n, acc_t *out) {
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

/* ---- a whole product on one thread ---- */

/* Packing B pays off from this many rows on, if its rows are contiguous. */
#define PACK_ROWS (4 * OMC_MR)

void OMC_GEMM_NAME(serial)(const omc_gemm_args *, void *);
void OMC_GEMM_NAME(serial)(const omc_gemm_args *g, void *workspace) {
  const int64_t m = g->m, n = g->n, k = g->k;
  const int64_t m_blocks = omc_ceil_div(m, OMC_GEMM_MC);
  const int64_t k_blocks = k ? omc_ceil_div(k, OMC_GEMM_KC) : 1;
  const bool in_place = g->b.cs == 1 && m <= PACK_ROWS;
  acc_t *const packed_a = workspace;
  acc_t *const packed_b = packed_a + omc_gemm_packed_a(m, k);
  for (int64_t j = 0; j < n; j += OMC_GEMM_NC) {
    const int64_t nb = n - j < OMC_GEMM_NC ? n - j : OMC_GEMM_NC;
    for (int64_t kb = 0; kb < k_blocks; kb++) {
      const int64_t k0 = omc_cut(k, k_blocks, kb), kn = omc_cut(k, k_blocks, kb + 1) - k0;
      const bool first = kb == 0, last = kb == k_blocks - 1;
      acc_t *const b0 = (acc_t *)g->b.data + k0 * g->b.rs + j * g->b.cs;
      const int64_t whole = in_place ? nb - nb % OMC_NR : 0;
      const omc_matrix rest = {b0 + whole * g->b.cs, g->b.rs, g->b.cs};
      OMC_GEMM_NAME(pack_b)(&rest, kn, nb - whole, packed_b + whole * kn);
      for (int64_t ib = 0; ib < m_blocks; ib++) {
        const int64_t i = omc_cut(m, m_blocks, ib), mb = omc_cut(m, m_blocks, ib + 1) - i;
        const omc_matrix a = {(acc_t *)g->a.data + i * g->a.rs + k0 * g->a.cs, g->a.rs, g->a.cs};
        OMC_GEMM_NAME(pack_a)(&a, mb, kn, packed_a);
        const omc_gemm_block block = {
            .m = mb,
            .n = nb,
            .k = kn,
            .a = packed_a,
            .b = packed_b,
            .b_rows = in_place ? b0 : NULL,
            .b_rs = g->b.rs,
            .c = (acc_t *)g->c.data + i * g->c.rs + j,
            .c_rs = g->c.rs,
            .alpha = (acc_t)g->alpha,
            .beta = first ? (acc_t)g->beta : 1,
            .bias = last && g->bias ? (const acc_t *)g->bias + j : NULL,
            .row_bias = last && g->row_bias ? (const acc_t *)g->row_bias + i : NULL};
        OMC_GEMM_NAME(multiply)(&block);
      }
    }
  }
}

#endif
