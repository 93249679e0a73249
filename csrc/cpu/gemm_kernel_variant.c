/* Micro-kernels, and the whole product on one thread. */
#include "cpu/gemm_units.h"

#if OMC_IS_FLOAT && OMC_GEMM_COMPILED

/* ---- micro-kernels ---- */

/* Lines of memory that are asked for while tiles are computed, some every ASK_EVERY units of K: all
 * at once they would hold up a tile's own. */
typedef struct ahead {
  const char *line;           /* of a panel of B that is packed soon: a row, */
  int64_t at, bytes, step;    /* a place in it, its length, and the way to the next one */
  int64_t lines, each;        /* how many there are still, and how many are asked for at a time */
  const char *to, *from;      /* rows of C, and of what is read before if that is elsewhere */
  int64_t to_step, from_step; /* from one to the next, in bytes */
  int64_t rows, each_rows;
} ahead;

enum { LINE = 64, ASK_EVERY = OMC_GROUP > 1 ? OMC_GROUP : 8 };

OMC_INLINE void ask_ahead(ahead *x) {
  for (int64_t i = 0; i < x->each && x->lines > 0; i++, x->lines--) {
    __builtin_prefetch(x->line + x->at, 0, 2);
    x->at += LINE;
    if (x->at >= x->bytes) x->at = 0, x->line += x->step;
  }
  for (int64_t i = 0; i < x->each_rows && x->rows > 0; i++, x->rows--) {
    __builtin_prefetch(x->to, 1);
    __builtin_prefetch(x->to + LINE, 1);
    x->to += x->to_step;
    if (!x->from) continue;
    __builtin_prefetch(x->from);
    __builtin_prefetch(x->from + LINE);
    x->from += x->from_step;
  }
}

/* Sums of products of some rows of A and a panel of B. */
typedef struct tile {
  int64_t rows, k;
  const omc_unit *a;
  const omc_unit *b;
  const omc_unit *b_tail; /* the last group of k units, if that is not whole, padded with zeros */
  int64_t b_rs;
  const omc_places *b_at; /* or where its vectors lie, NULL: one after the other */
  acc_t *sums;            /* alpha times those, whole vectors of each row, sums_rs apart */
  int64_t sums_rs;
  acc_t alpha, beta;
  const acc_t *from; /* of which beta is added to them, NULL: nothing */
  int64_t from_rs;
  const acc_t *bias, *row_bias; /* NULL: none */
  ahead soon;
} tile;

typedef void (*tile_fn)(tile *t);

/* Visits the vectors of a tile: vector v of row r, which the caller names. */
#define EACH_VECTOR(r, v) \
  OMC_UNROLL for (int r = 0; r < rows; r++) OMC_UNROLL for (int v = 0; v < nv; v++)

/* What is made of sums of products: rows x nv vectors, both constants where this is inlined, from
 * row `first` of the tile on. */
OMC_INLINE void store_products(const int rows, const int nv, vacc_t acc[][OMC_NV], const tile *t,
                               int64_t first) {
  acc_t *const to = t->sums + first * t->sums_rs;
  if (t->alpha != 1) {
    const vacc_t alpha = vset(t->alpha);
    EACH_VECTOR(r, v) { acc[r][v] *= alpha; }
  }
  if (t->from) {
    const vacc_t beta = vset(t->beta);
    const acc_t *const from = t->from + first * t->from_rs;
    EACH_VECTOR(r, v) {
      acc[r][v] = vfma(beta, vldr(from + r * t->from_rs + v * OMC_VL), acc[r][v]);
    }
  }
  if (t->bias) {
    EACH_VECTOR(r, v) { acc[r][v] += vldr(t->bias + v * OMC_VL); }
  }
  if (t->row_bias) {
    EACH_VECTOR(r, v) { acc[r][v] += vset(t->row_bias[first + r]); }
  }
  EACH_VECTOR(r, v) { vstr(to + r * t->sums_rs + v * OMC_VL, acc[r][v]); }
}

#if defined(OMC_TILES)
#include "cpu/gemm_tiles.h"
#else

/* A tile of `rows` x nv vectors, whose rows of B lie apart or do not; all three are constants where
 * this is inlined. */
OMC_INLINE void tile_product(const int rows, const int nv, const bool apart, tile *t) {
  vacc_t acc[OMC_MR][OMC_NV];
  EACH_VECTOR(r, v) { acc[r][v] = vset(0); }

  const omc_unit *a = t->a, *b[OMC_NV];
  const int64_t *at[OMC_NV] = {0}, b_rs = t->b_rs;
  OMC_UNROLL for (int v = 0; v < nv; v++) b[v] = apart ? t->b_at[v].from : t->b + v * OMC_VL;
  OMC_UNROLL for (int v = 0; apart && v < nv; v++) at[v] = t->b_at[v].at;
  ahead soon = t->soon;
  for (int64_t k = t->k; k > 0; k -= ASK_EVERY) {
    ask_ahead(&soon);
    for (int64_t i = omc_min(k, ASK_EVERY); i > 0; i--) {
      omc_vunit row[OMC_NV];
      OMC_UNROLL for (int v = 0; v < nv; v++) {
        row[v] = load_units(apart ? b[v] + *at[v]++ : b[v]);
        if (!apart) b[v] += b_rs;
      }
      OMC_UNROLL for (int r = 0; r < rows; r++) {
        const omc_vunit x = spread(a[r]);
        OMC_UNROLL for (int v = 0; v < nv; v++) acc[r][v] = add_products(x, row[v], acc[r][v]);
      }
      a += rows;
    }
  }
  t->soon = soon;
  store_products(rows, nv, acc, t, 0);
}

#define DEFINE_TILES(rows)                                                  \
  static void tile_##rows##_1(tile *t) { tile_product(rows, 1, false, t); } \
  static void tile_##rows##_2(tile *t) { tile_product(rows, 2, false, t); } \
  static void tile_##rows##_apart(tile *t) { tile_product(rows, OMC_NV, true, t); }
OMC_GEMM_ROWS(DEFINE_TILES)

#define TILE_ROW(rows) {tile_##rows##_1, tile_##rows##_2, tile_##rows##_apart},
static tile_fn tile_of(int64_t rows, int64_t nv, bool apart) {
  static const tile_fn tiles[OMC_MR][OMC_NV + 1] = {OMC_GEMM_ROWS(TILE_ROW)};
  return tiles[rows - 1][apart ? OMC_NV : nv - 1];
}

/* What matrix tiles want. */
static const omc_unit *pad_group(const tile *t, omc_unit *out) { return (void)t, (void)out, NULL; }
static void set_height(int64_t rows) { (void)rows; }
static void release(void) {}

#endif

/* ---- what C is made of sums ---- */

/* A part of C: rows x n from row i and column j on. */
typedef struct c_part {
  int64_t i, j, rows, n;
} c_part;

static char *part_of(const omc_matrix *c, const c_part *p) {
  return omc_matrix_part(c, p->i, p->j).data;
}

static int64_t row_bytes(const omc_matrix *c) { return c->rs * (int64_t)omc_dtype_size(c->dtype); }

/* sums + beta * from + bias, stored as `dtype`, which is known where this is inlined. */
OMC_INLINE void finish(const omc_dtype dtype, const bool only_sums, const omc_gemm_block *g,
                       const c_part *p, const acc_t *sums) {
  const omc_dtype from_dtype = g->from.dtype;
  const char *from = part_of(&g->from, p), *const bias = g->bias, *const row_bias = g->row_bias;
  char *to = part_of(&g->to, p);
  const int64_t from_row = row_bytes(&g->from);
  const int64_t to_row = g->to.rs * (int64_t)omc_dtype_size(dtype);
  const vacc_t beta = vset(g->beta);
  for (int64_t r = 0; r < p->rows; r++) {
    for (int64_t x = 0; x < p->n; x += OMC_VL) {
      const int64_t n = p->n - x;
      vacc_t y = vldr(sums + r * OMC_NR + x);
      if (!only_sums) {
        if (g->beta != 0) y = vfma(beta, vld_as(from_dtype, from, x, n), y);
        if (bias) y += vld_as(dtype, bias, p->j + x, n);
        if (row_bias) y += vset(vld_as(dtype, row_bias, p->i + r, 1)[0]);
      }
      vst_as(dtype, to, x, y, n);
    }
    from += from_row, to += to_row;
  }
}

typedef void (*finish_fn)(const omc_gemm_block *g, const c_part *p, const acc_t *sums);

#define DEFINE_FINISH(dtype)                                                                \
  static void finish_##dtype(const omc_gemm_block *g, const c_part *p, const acc_t *sums) { \
    finish(dtype, false, g, p, sums);                                                       \
  }                                                                                         \
  static void store_##dtype(const omc_gemm_block *g, const c_part *p, const acc_t *sums) {  \
    finish(dtype, true, g, p, sums);                                                        \
  }
DEFINE_FINISH(OMC_ACC)
DEFINE_FINISH(OMC_BF16)
DEFINE_FINISH(OMC_F16)

static finish_fn finish_of(const omc_gemm_block *g) {
  const bool only_sums = g->beta == 0 && !g->bias && !g->row_bias;
  if (g->to.dtype == OMC_BF16) return only_sums ? store_OMC_BF16 : finish_OMC_BF16;
  if (g->to.dtype == OMC_F16) return only_sums ? store_OMC_F16 : finish_OMC_F16;
  return only_sums ? store_OMC_ACC : finish_OMC_ACC;
}

/* ---- a block ---- */

/* What `panels` tiles of a block ask for: n columns of B, and their rows of C. */
static ahead ahead_of(const omc_gemm_block *g, const omc_matrix *b, int64_t n, int64_t panels) {
  const int64_t asks = omc_ceil_div(g->k, ASK_EVERY);
  ahead x = {.to_step = row_bytes(&g->to),
             .from_step = row_bytes(&g->from),
             .each_rows = omc_ceil_div(OMC_MR, omc_max(asks, 1))};
  if (n <= 0 || asks == 0) return x;
  const int64_t size = (int64_t)omc_dtype_size(b->dtype);
  const bool by_rows = b->cs == 1;
  x.line = b->data;
  x.bytes = (by_rows ? n : g->b_stored_k) * size;
  x.step = (by_rows ? b->rs : b->cs) * size;
  x.lines = (by_rows ? g->b_stored_k : n) * omc_ceil_div(x.bytes, LINE);
  x.each = omc_ceil_div(x.lines, asks * panels);
  return x;
}

/* Whether tiles of whole vectors are C as it is stored. */
static bool are_stored(const omc_gemm_block *g) {
  return g->to.dtype == OMC_ACC && (g->beta == 0 || g->from.dtype == OMC_ACC);
}

void OMC_GEMM_NAME(multiply)(const omc_gemm_block *g) {
  const int64_t panels = omc_gemm_panels(g->m);
  const finish_fn end = finish_of(g);
  const bool elsewhere = g->beta != 0 && g->from.data != g->to.data;
  omc_unit tail[OMC_GROUP * OMC_NR];
  acc_t sums[OMC_MR * OMC_NR] __attribute__((aligned(64)));
  int64_t height = 0;
  for (int64_t j = 0; j < g->n; j += OMC_NR) {
    const int64_t n = omc_min(g->n - j, OMC_NR), nv = omc_ceil_div(n, OMC_VL);
    const bool in_place = g->b_rows && n == OMC_NR;
    const int64_t next = g->b_packs ? omc_min(g->n - j - n, OMC_NR) : 0;
    omc_unit *const pack = g->b_packs ? g->b_packs + j / OMC_NR * g->b_pack_step : NULL;
    const omc_matrix b = omc_matrix_part(&g->b_stored, 0, j);
    const omc_matrix soon = omc_matrix_part(&g->b_stored, 0, j + n);
    if (pack) OMC_GEMM_NAME(pack_b)(&b, g->b_stored_k, n, pack);
    const bool stored = are_stored(g) && n == nv * OMC_VL;
    tile t = {.k = g->k,
              .b = in_place ? g->b_rows + j
                   : pack   ? pack
                            : g->b + j * (g->b_units ? g->b_units : g->k),
              .b_rs = in_place ? g->b_rs : OMC_NR,
              .b_at = g->b_at,
              .sums = sums,
              .sums_rs = stored ? g->to.rs : OMC_NR,
              .alpha = g->alpha,
              .beta = g->beta,
              .from_rs = g->from.rs,
              .soon = ahead_of(g, &soon, next, panels)};
    t.b_tail = pad_group(&t, tail);
    for (int64_t p = 0; p < panels; p++) {
      const int64_t i = omc_gemm_row(g->m, p), rows = omc_gemm_row(g->m, p + 1) - i;
      const c_part c = {i, j, rows, n};
      if (rows != height) set_height(height = rows);
      t.rows = rows;
      t.a = g->a + i * omc_gemm_units(g->k);
      t.soon.to = part_of(&g->to, &c);
      t.soon.from = elsewhere ? part_of(&g->from, &c) : NULL;
      t.soon.rows = rows;
      if (stored) t.sums = (acc_t *)(void *)part_of(&g->to, &c);
      if (stored && g->bias) t.bias = (const acc_t *)g->bias + j;
      if (stored && g->row_bias) t.row_bias = (const acc_t *)g->row_bias + i;
      if (stored && g->beta != 0) t.from = (const acc_t *)(const void *)part_of(&g->from, &c);
      tile_of(rows, nv, g->b_at != NULL)(&t);
      if (!stored) end(g, &c, sums);
    }
  }
  release();
}

/* ---- a whole product on one thread ---- */

/* Packing B, if its rows are contiguous units, pays off from this many rows on; or for more panels
 * of rows than one from this many elements on, which come from memory rather than from L3, and are
 * asked for as they are packed. */
#define PACK_ROWS (8 * OMC_MR)
#define PACK_ELEMENTS (1 << 21)

static bool stays_in_place(const omc_gemm_args *g) {
  const bool pays = g->m > PACK_ROWS || (g->m > OMC_MR && g->k * g->n > PACK_ELEMENTS);
  return OMC_DEPTH == 1 && !pays && !g->b_packed.panels && g->b.cs == 1 && g->b.dtype == OMC_ACC &&
         g->b.read_as != OMC_BF16 && g->b.read_as != OMC_F16;
}

/* If there are more K blocks than one and C is stored narrower, sums are kept apart. */
static bool sums_apart(const omc_gemm_args *g) {
  return g->c.dtype != OMC_ACC && omc_ceil_div(g->k, OMC_DEPTH) > OMC_GEMM_KC;
}

/* Panels of B from unit u0 and column j on, if it is packed. */
static const omc_unit *panels_at(const omc_packed *b, int64_t u0, int64_t j) {
  return (const omc_unit *)b->panels + (b->col + j) * omc_ceil_div(b->rows, OMC_DEPTH) +
         (b->row / OMC_DEPTH + u0) * OMC_NR;
}

static void multiply_rows(const omc_gemm_args *g, void *workspace) {
  const int64_t m = g->m, n = g->n, k = g->k, units = omc_ceil_div(k, OMC_DEPTH);
  const int64_t m_blocks = omc_ceil_div(m, OMC_MC);
  const int64_t k_blocks = k ? omc_ceil_div(units, OMC_GEMM_KC) : 1;
  const bool in_place = stays_in_place(g), apart = sums_apart(g), packed = g->b_packed.panels;
  omc_unit *const packed_a = workspace;
  omc_unit *const packed_b = packed_a + omc_gemm_packed_a(m, k);
  acc_t *const sums = (acc_t *)(void *)(packed_b + omc_gemm_packed_b(n, k));
  const int64_t size = (int64_t)omc_dtype_size(g->c.dtype);
  const char *const bias = g->bias, *const row_bias = g->row_bias;
  for (int64_t j = 0; j < n; j += OMC_GEMM_NC) {
    const int64_t nb = omc_min(n - j, OMC_GEMM_NC);
    const omc_matrix c = omc_matrix_part(&g->c, 0, j),
                     kept = apart ? omc_matrix_rows(sums, nb, OMC_ACC) : c;
    for (int64_t kb = 0; kb < k_blocks; kb++) {
      const int64_t u0 = omc_gemm_cut(units, k_blocks, kb),
                    un = omc_gemm_cut(units, k_blocks, kb + 1) - u0;
      const int64_t k0 = u0 * OMC_DEPTH, kn = omc_min(un * OMC_DEPTH, k - k0);
      const bool first = kb == 0, last = kb == k_blocks - 1;
      const omc_matrix b = omc_matrix_part(&g->b, k0, j);
      if (in_place && nb % OMC_NR) {
        const int64_t whole = nb - nb % OMC_NR;
        const omc_matrix rest = omc_matrix_part(&b, 0, whole);
        OMC_GEMM_NAME(pack_b)(&rest, kn, nb - whole, packed_b + whole * un);
      }
      for (int64_t ib = 0; ib < m_blocks; ib++) {
        const int64_t i = omc_cut(m, m_blocks, ib), mb = omc_cut(m, m_blocks, ib + 1) - i;
        const omc_matrix a = omc_matrix_part(&g->a, i, k0);
        OMC_GEMM_NAME(pack_a)(&a, mb, kn, packed_a);
        const omc_gemm_block block = {
            .m = mb,
            .n = nb,
            .k = un,
            .a = packed_a,
            .b = packed ? panels_at(&g->b_packed, u0, j) : packed_b,
            .b_units = packed ? omc_ceil_div(g->b_packed.rows, OMC_DEPTH) : un,
            .b_packs = ib == 0 && !in_place && !packed ? packed_b : NULL,
            .b_pack_step = m_blocks > 1 ? un * OMC_NR : 0,
            .b_stored = b,
            .b_stored_k = kn,
            .b_rows = in_place ? b.data : NULL,
            .b_rs = b.rs,
            .from = omc_matrix_part(first ? &c : &kept, i, 0),
            .to = omc_matrix_part(last ? &c : &kept, i, 0),
            .alpha = (acc_t)g->alpha,
            .beta = first ? (acc_t)g->beta : 1,
            .bias = last && bias ? bias + j * size : NULL,
            .row_bias = last && row_bias ? row_bias + i * size : NULL};
        OMC_GEMM_NAME(multiply)(&block);
      }
    }
  }
}

static void multiply_all(const omc_gemm_args *g, void *workspace) {
  const int64_t rows = sums_apart(g) ? omc_gemm_apart_of(g->m, g->n, g->k).rows : g->m;
  omc_gemm_args part = *g;
  for (int64_t i = 0; i < g->m; i += rows) {
    part.m = omc_min(g->m - i, rows);
    part.a = omc_matrix_part(&g->a, i, 0);
    part.c = omc_matrix_part(&g->c, i, 0);
    if (g->row_bias)
      part.row_bias = (const char *)g->row_bias + i * (int64_t)omc_dtype_size(g->c.dtype);
    multiply_rows(&part, workspace);
  }
}

static void pack_whole(const omc_gemm_args *g, void *out) {
  OMC_GEMM_NAME(pack_b)(&g->b, g->k, g->n, out);
}

extern const omc_gemm_fns OMC_GEMM_NAME(fns);
const omc_gemm_fns OMC_GEMM_NAME(fns) = {multiply_all, OMC_GEMM_NAME(few_rows),
                                         OMC_GEMM_NAME(few_cols), pack_whole};

#endif
