/* Products with few rows or few columns: sums along K of the larger operand as it lies.
 *
 * To pack it would take longer than to multiply it. If it is contiguous along K an element of C is
 * a sum over vectors of units: OMC_VL elements at a time, a tile of C, and in the end OMC_VL sums
 * across lanes, which come out as one vector. The few lines of the other operand, which every tile
 * reads, are made units first. An element's sum hangs on K alone. */
#include "cpu/gemm_units.h"

#if OMC_IS_FLOAT && OMC_GEMM_COMPILED

/* Elements of K in a vector of units, and in a block, whose sums are added up by themselves: long
 * chains lose bits. */
enum { STEP = OMC_DEPTH * OMC_VL, BLOCK = 256 * STEP };

/* Lane i is the sum of all lanes of x[i]; those that are furthest apart are added first. */
#define FOLD(half, x)                                    \
  OMC_UNROLL for (int i_ = 0; i_ < (half); i_++) x[i_] = \
      OMC_ZIP_LOW(x[i_], x[i_ + (half)]) + OMC_ZIP_HIGH(x[i_], x[i_ + (half)]);
OMC_INLINE vacc_t sums_across(vacc_t x[OMC_VL]) {
  OMC_HALVINGS(FOLD, x)
  return x[0];
}

typedef struct lines_job {
  const omc_gemm_args *g;
  const omc_unit *few; /* the few lines, one after the other */
  int64_t few_step;    /* units */
} lines_job;

/* Adds the products of n <= STEP elements of K to a tile's sums: of `many` stored lines, of which
 * lane vector e belongs to (t, f) with `f` of the `few`. */
#define SUM_OF(t, f) (few_rows ? (f) * many + (t) : (t) * few + (f))
OMC_INLINE void add_step(const int many, const int few, const bool few_rows, const source s,
                         const char *const *line, const omc_unit *const *unit, int64_t x, int64_t n,
                         vacc_t *acc) {
  omc_vunit y[OMC_VL];
  OMC_UNROLL for (int f = 0; f < few; f++) y[f] = load_units(unit[f] + x / OMC_DEPTH);
  OMC_UNROLL for (int t = 0; t < many; t++) {
    const omc_vunit z = units_along(s, line[t] + x * (int64_t)bytes_of(s), n);
    OMC_UNROLL for (int f = 0; f < few; f++) acc[SUM_OF(t, f)] =
        add_products(z, y[f], acc[SUM_OF(t, f)]);
  }
}

/* Sums of a tile of rows x cols elements of C, row by row. Lines past the last are the last again.
 * All but i and j are constants where this is inlined. */
OMC_INLINE vacc_t tile(const int rows, const int cols, const bool few_rows, const source s,
                       const lines_job *job, int64_t i, int64_t j) {
  const omc_gemm_args *g = job->g;
  const int many = few_rows ? cols : rows, few = few_rows ? rows : cols;
  const int64_t first = few_rows ? j : i, last = (few_rows ? g->n : g->m) - 1;
  const int64_t first_few = few_rows ? i : j, last_few = (few_rows ? g->m : g->n) - 1;
  const omc_matrix *stored = few_rows ? &g->b : &g->a;
  const int64_t next = (few_rows ? stored->cs : stored->rs) * (int64_t)bytes_of(s);
  const char *line[OMC_VL];
  const omc_unit *unit[OMC_VL];
  vacc_t total[OMC_VL];
  OMC_UNROLL for (int t = 0; t < many; t++) line[t] =
      (const char *)stored->data + omc_min(first + t, last) * next;
  OMC_UNROLL for (int f = 0; f < few; f++) unit[f] =
      job->few + omc_min(first_few + f, last_few) * job->few_step;
  OMC_UNROLL for (int e = 0; e < OMC_VL; e++) total[e] = vset(0);
  for (int64_t x = 0; x < g->k;) {
    const int64_t end = omc_min(x + BLOCK, g->k);
    vacc_t acc[OMC_VL];
    OMC_UNROLL for (int e = 0; e < OMC_VL; e++) acc[e] = vset(0);
    for (; x + STEP <= end; x += STEP) add_step(many, few, few_rows, s, line, unit, x, STEP, acc);
    if (x < end) add_step(many, few, few_rows, s, line, unit, x, end - x, acc);
    x = end;
    OMC_UNROLL for (int e = 0; e < OMC_VL; e++) total[e] += acc[e];
  }
  return sums_across(total);
}

/* A block of C: all of its few lines, by as many others as tiles are cut of without a rest. */
typedef struct block {
  int64_t i, j, rows, cols;
  acc_t sums[OMC_GEMM_FEW][OMC_GEMM_FEW];
} block;

/* alpha * sums + beta * C + bias. */
static void finish(const omc_gemm_args *g, const block *b) {
  for (int64_t r = 0; r < b->rows; r++)
    for (int64_t x = 0; x < b->cols; x += OMC_VL) {
      const int64_t i = b->i + r, j = b->j + x, n = b->cols - x;
      const omc_matrix c = omc_matrix_part(&g->c, i, j);
      vacc_t y = vldr(&b->sums[r][x]) * vset((acc_t)g->alpha);
      if (g->beta != 0) y = vfma(vset((acc_t)g->beta), vld_as(c.dtype, c.data, 0, n), y);
      if (g->bias) y += vld_as(c.dtype, g->bias, j, n);
      if (g->row_bias) y += vset(vld_as(c.dtype, g->row_bias, i, 1)[0]);
      vst_as(c.dtype, c.data, 0, y, n);
    }
}

/* C in blocks, these in tiles of rows x cols. The many lines are gone through once. */
OMC_INLINE void all_tiles(const int rows, const int cols, const bool few_rows, const source s,
                          const lines_job *job) {
  const omc_gemm_args *g = job->g;
  const int64_t most_rows = few_rows ? g->m : rows, most_cols = few_rows ? OMC_VL : g->n;
  block b;
  for (b.i = 0; b.i < g->m; b.i += most_rows)
    for (b.j = 0; b.j < g->n; b.j += most_cols) {
      b.rows = omc_min(most_rows, g->m - b.i), b.cols = omc_min(most_cols, g->n - b.j);
      for (int64_t j = 0; j < b.cols; j += cols)
        for (int64_t i = 0; i < b.rows; i += rows) {
          acc_t sums[OMC_VL];
          vstr(sums, tile(rows, cols, few_rows, s, job, b.i + i, b.j + j));
          OMC_UNROLL for (int r = 0; r < rows; r++)
              memcpy(&b.sums[i + r][j], sums + r * cols, (size_t)cols * sizeof *sums);
        }
      finish(g, &b);
    }
}

/* Units of a line of k elements, `next` bytes apart. */
static void make_units(source s, const char *line, int64_t next, int64_t k, omc_unit *out) {
  const bool dense = next == (int64_t)bytes_of(s);
  for (int64_t x = 0; dense && x < k; x += STEP)
    store_units(out + x / OMC_DEPTH, units_along(s, line + x * next, omc_min(k - x, STEP)));
  if (dense) return;
  memset(out, 0, (size_t)(omc_ceil_div(k, STEP) * OMC_VL) * sizeof *out);
  for (int64_t x = 0; x < k; x += OMC_DEPTH)
    out[x / OMC_DEPTH] = unit_of(s, line + x * next, next, x + 1 < k);
}

/* Makes units of the n lines of the smaller operand. */
static lines_job begin(const omc_gemm_args *g, const omc_matrix *lines, int64_t n,
                       void *workspace) {
  const source from = source_of(lines);
  const int64_t size = (int64_t)bytes_of(from), step = omc_ceil_div(g->k, STEP) * OMC_VL;
  omc_unit *const few = workspace;
  for (int64_t f = 0; f < n; f++)
    make_units(from, (const char *)lines->data + f * lines->rs * size, lines->cs * size, g->k,
               few + f * step);
  return (lines_job){g, few, step};
}

/* A line alone has tiles of its own. */
enum { SIDE = OMC_VL < 4 ? OMC_VL : 4 };
#define DEFINE_LINES(s)                                                                            \
  static void one_row_##s(const lines_job *job) { all_tiles(1, OMC_VL, true, s, job); }            \
  static void few_rows_##s(const lines_job *job) { all_tiles(SIDE, OMC_VL / SIDE, true, s, job); } \
  static void one_col_##s(const lines_job *job) { all_tiles(OMC_VL, 1, false, s, job); }           \
  static void few_cols_##s(const lines_job *job) { all_tiles(OMC_VL / SIDE, SIDE, false, s, job); }
OMC_SOURCES(DEFINE_LINES)

typedef void (*lines_fn)(const lines_job *job);

void OMC_GEMM_NAME(few_rows)(const omc_gemm_args *g, void *workspace) {
#define ROWS_ENTRY(s) [s] = {few_rows_##s, one_row_##s},
  static const lines_fn fns[N_SOURCES][2] = {OMC_SOURCES(ROWS_ENTRY)};
  const lines_job job = begin(g, &g->a, g->m, workspace);
  fns[source_of(&g->b)][g->m == 1](&job);
}

void OMC_GEMM_NAME(few_cols)(const omc_gemm_args *g, void *workspace) {
#define COLS_ENTRY(s) [s] = {few_cols_##s, one_col_##s},
  static const lines_fn fns[N_SOURCES][2] = {OMC_SOURCES(COLS_ENTRY)};
  omc_matrix lines = g->b;
  lines.rs = g->b.cs, lines.cs = g->b.rs;
  const lines_job job = begin(g, &lines, g->n, workspace);
  fns[source_of(&g->a)][g->n == 1](&job);
}

#endif
