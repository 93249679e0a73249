/* Micro-kernels, and the whole product on one thread. */
#include "cpu/gemm_units.h"

#if OMC_IS_FLOAT && OMC_GEMM_COMPILED

/* ---- micro-kernels ---- */

typedef struct tile {
  int64_t rows, k;
  const omc_unit *a;
  const omc_unit *b;
  const omc_unit *b_tail; /* the last group of k units, if that is not whole, padded with zeros */
  int64_t b_rs;
  const acc_t *from;
  acc_t *to;
  int64_t from_rs, to_rs;
  acc_t alpha, beta;
  const acc_t *bias;
  const acc_t *row_bias;
} tile;

typedef void (*tile_fn)(const tile *t);

/* Visits the vectors of a tile: vector v of row r, which the caller names. */
#define EACH_VECTOR(r, v) \
  OMC_UNROLL for (int r = 0; r < rows; r++) OMC_UNROLL for (int v = 0; v < nv; v++)

/* Makes C of sums: rows x nv vectors, both constants where this is inlined, from row `first` on. */
OMC_INLINE void finish(const int rows, const int nv, vacc_t acc[][OMC_NV], const tile *t,
                       int64_t first) {
  const acc_t *const from = t->from + first * t->from_rs;
  acc_t *const to = t->to + first * t->to_rs;
  const int64_t from_rs = t->from_rs, to_rs = t->to_rs;
  if (t->alpha != 1) {
    const vacc_t alpha = vset(t->alpha);
    EACH_VECTOR(r, v) { acc[r][v] *= alpha; }
  }
  if (t->beta == 1) {
    EACH_VECTOR(r, v) { acc[r][v] += vldr(from + r * from_rs + v * OMC_VL); }
  } else if (t->beta != 0) {
    const vacc_t beta = vset(t->beta);
    EACH_VECTOR(r, v) { acc[r][v] = vfma(beta, vldr(from + r * from_rs + v * OMC_VL), acc[r][v]); }
  }
  if (t->bias) {
    EACH_VECTOR(r, v) { acc[r][v] += vldr(t->bias + v * OMC_VL); }
  }
  if (t->row_bias) {
    EACH_VECTOR(r, v) { acc[r][v] += vset(t->row_bias[first + r]); }
  }
  EACH_VECTOR(r, v) { vstr(to + r * to_rs + v * OMC_VL, acc[r][v]); }
}

#if defined(OMC_TILES)
#include "cpu/gemm_tiles.h"
#else

/* A tile of `rows` x nv vectors; both are constants where this is inlined. */
OMC_INLINE void tile_product(const int rows, const int nv, const tile *t) {
  vacc_t acc[OMC_MR][OMC_NV];
  EACH_VECTOR(r, v) { acc[r][v] = vset(0); }
  OMC_UNROLL for (int r = 0; r < rows; r++) __builtin_prefetch(t->to + r * t->to_rs, 1);

  const omc_unit *a = t->a, *b = t->b;
  const int64_t b_rs = t->b_rs;
  for (int64_t k = t->k; k > 0; k--) {
    omc_vunit row[OMC_NV];
    OMC_UNROLL for (int v = 0; v < nv; v++) row[v] = load_units(b + v * OMC_VL);
    OMC_UNROLL for (int r = 0; r < rows; r++) {
      const omc_vunit x = spread(a[r]);
      OMC_UNROLL for (int v = 0; v < nv; v++) acc[r][v] = add_products(x, row[v], acc[r][v]);
    }
    a += rows;
    b += b_rs;
  }
  finish(rows, nv, acc, t, 0);
}

#define DEFINE_TILES(rows)                                                 \
  static void tile_##rows##_1(const tile *t) { tile_product(rows, 1, t); } \
  static void tile_##rows##_2(const tile *t) { tile_product(rows, 2, t); }
OMC_GEMM_ROWS(DEFINE_TILES)

#define TILE_ROW(rows) {tile_##rows##_1, tile_##rows##_2},
static tile_fn tile_of(int64_t rows, int64_t nv) {
  static const tile_fn tiles[OMC_MR][OMC_NV] = {OMC_GEMM_ROWS(TILE_ROW)};
  return tiles[rows - 1][nv - 1];
}

/* What matrix tiles want. */
static const omc_unit *pad_group(const tile *t, omc_unit *out) { return (void)t, (void)out, NULL; }
static void set_height(int64_t rows) { (void)rows; }
static void release(void) {}

#endif

/* ---- tiles whose part of C is not whole vectors, or stored narrower ---- */

/* Part of C as it is stored. */
typedef struct stored {
  char *data;
  int64_t row, col; /* bytes from one to the next */
  omc_dtype dtype;
} stored;

static stored stored_of(const omc_matrix *c) {
  const int64_t size = (int64_t)omc_dtype_size(c->dtype);
  return (stored){c->data, c->rs * size, size, c->dtype};
}

OMC_INLINE void load_rows(omc_dtype dtype, const stored *c, int64_t rows, int64_t n, acc_t *out) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t v = 0; v < n; v += OMC_VL)
      vstr(out + r * OMC_NR + v, load_some(dtype, c->data + r * c->row + v * c->col, n - v));
}

OMC_INLINE void store_rows(omc_dtype dtype, const stored *c, int64_t rows, int64_t n,
                           const acc_t *in) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t v = 0; v < n; v += OMC_VL)
      store_some(dtype, c->data + r * c->row + v * c->col, vldr(in + r * OMC_NR + v), n - v);
}

/* Calls one of them with a dtype that it is inlined for. */
#define FOR_DTYPE(verb, c, ...)       \
  do {                                \
    if ((c)->dtype == OMC_BF16)       \
      verb(OMC_BF16, c, __VA_ARGS__); \
    else if ((c)->dtype == OMC_F16)   \
      verb(OMC_F16, c, __VA_ARGS__);  \
    else                              \
      verb(OMC_ACC, c, __VA_ARGS__);  \
  } while (0)

/* Goes through a copy of its n columns of C. */
static void tile_apart(tile_fn fn, const tile *t, const stored *from, const stored *to,
                       int64_t rows, int64_t n) {
  acc_t c[OMC_MR * OMC_NR], bias[OMC_NR];
  tile local = *t;
  local.from = local.to = c;
  local.from_rs = local.to_rs = OMC_NR;
  if (t->beta != 0) FOR_DTYPE(load_rows, from, rows, n, c);
  if (t->bias) {
    for (int64_t v = 0; v < n; v += OMC_VL) vstr(bias + v, vldr_upto(t->bias + v, n - v));
    local.bias = bias;
  }
  fn(&local);
  FOR_DTYPE(store_rows, to, rows, n, c);
}

/* Asks for part `part` of `parts` of a panel of B that is packed soon: n columns of k elements. */
static void prefetch_panel(const omc_matrix *b, int64_t k, int64_t n, int64_t part, int64_t parts) {
  const int64_t size = (int64_t)omc_dtype_size(b->dtype), line = 64;
  const bool by_rows = b->cs == 1;
  const int64_t lines = by_rows ? k : n, bytes = (by_rows ? n : k) * size;
  const int64_t next = (by_rows ? b->rs : b->cs) * size;
  for (int64_t i = omc_cut(lines, parts, part); i < omc_cut(lines, parts, part + 1); i++)
    for (int64_t at = 0; at < bytes; at += line)
      __builtin_prefetch((const char *)b->data + i * next + at, 0, 2);
}

void OMC_GEMM_NAME(multiply)(const omc_gemm_block *g) {
  const int64_t panels = omc_gemm_panels(g->m);
  const bool narrow = g->from.dtype != OMC_ACC || g->to.dtype != OMC_ACC;
  const stored all_from = stored_of(&g->from), all_to = stored_of(&g->to);
  omc_unit tail[OMC_GROUP * OMC_NR];
  int64_t height = 0;
  for (int64_t j = 0; j < g->n; j += OMC_NR) {
    const int64_t n = omc_min(g->n - j, OMC_NR), nv = omc_ceil_div(n, OMC_VL);
    const bool in_place = g->b_rows && n == OMC_NR;
    const int64_t next = g->b_packs ? omc_min(g->n - j - n, OMC_NR) : 0;
    omc_unit *const pack = g->b_packs ? g->b_packs + j / OMC_NR * g->b_pack_step : NULL;
    const omc_matrix b = omc_gemm_part(&g->b_stored, 0, j);
    const omc_matrix soon = omc_gemm_part(&g->b_stored, 0, j + n);
    if (pack) OMC_GEMM_NAME(pack_b)(&b, g->b_stored_k, n, pack);
    tile t = {.k = g->k,
              .b = in_place ? g->b_rows + j
                   : pack   ? pack
                            : g->b + j * g->k,
              .b_rs = in_place ? g->b_rs : OMC_NR,
              .from_rs = g->from.rs,
              .to_rs = g->to.rs,
              .alpha = g->alpha,
              .beta = g->beta,
              .bias = g->bias ? g->bias + j : NULL};
    t.b_tail = pad_group(&t, tail);
    for (int64_t p = 0; p < panels; p++) {
      const int64_t i = omc_gemm_row(g->m, p), rows = omc_gemm_row(g->m, p + 1) - i;
      const tile_fn fn = tile_of(rows, nv);
      if (rows != height) set_height(height = rows);
      stored from = all_from, to = all_to;
      from.data += i * from.row + j * from.col;
      to.data += i * to.row + j * to.col;
      t.rows = rows;
      t.a = g->a + i * omc_gemm_units(g->k);
      if (next > 0) prefetch_panel(&soon, g->b_stored_k, next, p, panels);
      t.row_bias = g->row_bias ? g->row_bias + i : NULL;
      if (narrow || n < nv * OMC_VL) {
        tile_apart(fn, &t, &from, &to, rows, n);
      } else {
        t.from = (acc_t *)(void *)from.data, t.to = (acc_t *)(void *)to.data;
        fn(&t);
      }
    }
  }
  release();
}

/* ---- a whole product on one thread ---- */

/* Floats of C's dtype as acc_t: themselves, or a copy in `out`; NULL stays NULL. */
static const acc_t *widened(const void *x, omc_dtype dtype, int64_t n, acc_t *out) {
  if (!x || dtype == OMC_ACC) return x;
  for (int64_t i = 0; i < n; i += OMC_VL)
    vstr_upto(out + i,
              load_some(dtype, (const char *)x + i * (int64_t)omc_dtype_size(dtype), n - i), n - i);
  return out;
}

/* Packing B pays off from this many rows on, if its rows are contiguous units. */
#define PACK_ROWS (4 * OMC_MR)

static bool stays_in_place(const omc_gemm_args *g) {
  return OMC_DEPTH == 1 && g->m <= PACK_ROWS && g->b.cs == 1 && g->b.dtype == OMC_ACC &&
         g->b.read_as != OMC_BF16 && g->b.read_as != OMC_F16;
}

/* If there are more K blocks than one and C is stored narrower, sums are kept apart. */
static bool sums_apart(const omc_gemm_args *g) {
  return g->c.dtype != OMC_ACC && omc_ceil_div(g->k, OMC_DEPTH) > OMC_GEMM_KC;
}

static void multiply_rows(const omc_gemm_args *g, void *workspace) {
  const int64_t m = g->m, n = g->n, k = g->k, units = omc_ceil_div(k, OMC_DEPTH);
  const int64_t m_blocks = omc_ceil_div(m, OMC_MC);
  const int64_t k_blocks = k ? omc_ceil_div(units, OMC_GEMM_KC) : 1;
  const bool in_place = stays_in_place(g), apart = sums_apart(g);
  const omc_gemm_apart sizes = omc_gemm_apart_of(m, n, k);
  omc_unit *const packed_a = workspace;
  omc_unit *const packed_b = packed_a + omc_gemm_packed_a(m, k);
  acc_t *const wide_bias = (acc_t *)(void *)(packed_b + omc_gemm_packed_b(n, k));
  acc_t *const wide_row_bias = wide_bias + sizes.bias, *const sums = wide_row_bias + sizes.row_bias;
  const size_t size = omc_dtype_size(g->c.dtype);
  const acc_t *const row_bias = widened(g->row_bias, g->c.dtype, m, wide_row_bias);
  for (int64_t j = 0; j < n; j += OMC_GEMM_NC) {
    const int64_t nb = omc_min(n - j, OMC_GEMM_NC);
    const omc_matrix c = omc_gemm_part(&g->c, 0, j), kept = apart ? omc_gemm_sums(sums, nb) : c;
    const void *const stored_bias = g->bias ? (const char *)g->bias + (size_t)j * size : NULL;
    const acc_t *const bias = widened(stored_bias, g->c.dtype, nb, wide_bias);
    for (int64_t kb = 0; kb < k_blocks; kb++) {
      const int64_t u0 = omc_gemm_cut(units, k_blocks, kb),
                    un = omc_gemm_cut(units, k_blocks, kb + 1) - u0;
      const int64_t k0 = u0 * OMC_DEPTH, kn = omc_min(un * OMC_DEPTH, k - k0);
      const bool first = kb == 0, last = kb == k_blocks - 1;
      const omc_matrix b = omc_gemm_part(&g->b, k0, j);
      if (in_place && nb % OMC_NR) {
        const int64_t whole = nb - nb % OMC_NR;
        const omc_matrix rest = omc_gemm_part(&b, 0, whole);
        OMC_GEMM_NAME(pack_b)(&rest, kn, nb - whole, packed_b + whole * un);
      }
      for (int64_t ib = 0; ib < m_blocks; ib++) {
        const int64_t i = omc_cut(m, m_blocks, ib), mb = omc_cut(m, m_blocks, ib + 1) - i;
        const omc_matrix a = omc_gemm_part(&g->a, i, k0);
        OMC_GEMM_NAME(pack_a)(&a, mb, kn, packed_a);
        const omc_gemm_block block = {.m = mb,
                                      .n = nb,
                                      .k = un,
                                      .a = packed_a,
                                      .b = packed_b,
                                      .b_packs = ib == 0 && !in_place ? packed_b : NULL,
                                      .b_pack_step = m_blocks > 1 ? un * OMC_NR : 0,
                                      .b_stored = b,
                                      .b_stored_k = kn,
                                      .b_rows = in_place ? b.data : NULL,
                                      .b_rs = b.rs,
                                      .from = omc_gemm_part(first ? &c : &kept, i, 0),
                                      .to = omc_gemm_part(last ? &c : &kept, i, 0),
                                      .alpha = (acc_t)g->alpha,
                                      .beta = first ? (acc_t)g->beta : 1,
                                      .bias = last ? bias : NULL,
                                      .row_bias = last && row_bias ? row_bias + i : NULL};
        OMC_GEMM_NAME(multiply)(&block);
      }
    }
  }
}

void OMC_GEMM_NAME(serial)(const omc_gemm_args *, void *);
void OMC_GEMM_NAME(serial)(const omc_gemm_args *g, void *workspace) {
  const int64_t rows = sums_apart(g) ? omc_gemm_apart_of(g->m, g->n, g->k).rows : g->m;
  omc_gemm_args part = *g;
  for (int64_t i = 0; i < g->m; i += rows) {
    part.m = omc_min(g->m - i, rows);
    part.a = omc_gemm_part(&g->a, i, 0);
    part.c = omc_gemm_part(&g->c, i, 0);
    if (g->row_bias)
      part.row_bias = (const char *)g->row_bias + i * (int64_t)omc_dtype_size(g->c.dtype);
    multiply_rows(&part, workspace);
  }
}

#endif
