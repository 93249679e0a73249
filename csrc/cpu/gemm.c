#include "cpu/gemm.h"

#include "base/env.h"
#include "base/int.h"
#include "cpu/gemm_kernel.h"
#include "cpu/parallel.h"
#include "cpu/torch_shims.h"

typedef void (*serial_fn)(const omc_gemm_args *g, void *workspace);

typedef enum { PACKED, FEW_ROWS, FEW_COLUMNS } gemm_way;

#define DECLARE(name) extern const omc_gemm_fns name;
OMC_VARIANT_DECLARE(products, DECLARE, omc_gemm_fns)

static omc_dtype computed_in(const omc_gemm_args *g) { return omc_dtype_acc(g->c.dtype); }

static bool holds(const omc_matrix *x, omc_dtype dtype) {
  return x->dtype == dtype || (x->dtype == OMC_F32 && x->read_as == dtype);
}

/* Few lines may lie as they like: where dims are 1, strides say nothing. */
static gemm_way way_of(const omc_gemm_args *g) {
  const bool few_rows = g->m < g->n;
  const bool along = few_rows ? g->b.rs == 1 : g->a.cs == 1;
  if (!along || omc_min(g->m, g->n) > OMC_GEMM_FEW || g->k < OMC_GEMM_LONG) return PACKED;
  return few_rows ? FEW_ROWS : FEW_COLUMNS;
}

/* By the dtype whose numbers are multiplied: 16 bits only where there are instructions for it. */
static const omc_gemm_fns *fns_for(const omc_gemm_args *g) {
  static const omc_gemm_fns *const fns[OMC_N_DTYPE][OMC_N_ISA] = {
      OMC_VARIANT_TABLE(products, omc_gemm_fns)};
  const omc_gemm_fns *best = NULL;
  OMC_PICK_ISA(best, fns[computed_in(g)])
  static const omc_dtype halves[] = {OMC_BF16, OMC_F16};
  for (size_t i = 0; i < sizeof halves / sizeof *halves; i++)
    if (holds(&g->a, halves[i]) && holds(&g->b, halves[i])) OMC_PICK_ISA(best, fns[halves[i]])
  return best;
}

static serial_fn serial_for(const omc_gemm_args *g, gemm_way way) {
  const omc_gemm_fns *fns = fns_for(g);
  return way == FEW_ROWS ? fns->few_rows : way == FEW_COLUMNS ? fns->few_cols : fns->serial;
}

/* Bytes of one thread's packed blocks, and of what is not summed up in C itself. */
static size_t thread_bytes(omc_dtype dtype, int64_t m, int64_t n, int64_t k) {
  const omc_gemm_apart apart = omc_gemm_apart_of(m, n, k);
  const int64_t packed = omc_gemm_packed_a(m, k) + omc_gemm_packed_b(n, k);
  const size_t bytes = (size_t)packed * omc_acc_size(dtype) + omc_sums_bytes(dtype, apart.sums);
  const size_t few = (size_t)omc_gemm_few_lines(k) * omc_acc_size(dtype);
  return omc_round_up(bytes > few ? bytes : few, 64);
}

size_t omc_gemm_workspace(omc_dtype dtype, int64_t m, int64_t n, int64_t k, int threads) {
  return thread_bytes(dtype, m, n, k) * (size_t)threads;
}

void omc_gemm_serial(const omc_gemm_args *g, void *workspace) {
  serial_for(g, way_of(g))(g, workspace);
}

void omc_gemm_serial_part(const omc_gemm_args *g, void *workspace) {
  fns_for(g)->serial(g, workspace);
}

void omc_gemm_pack(const omc_gemm_args *g, void *out) { fns_for(g)->pack(g, out); }

size_t omc_gemm_packed_bytes(omc_dtype dtype, int64_t n, int64_t k) {
  return omc_round_up((size_t)omc_gemm_whole_b(n, k) * omc_acc_size(dtype), 64);
}

/* ---- own, on several threads: C is cut into a grid of rectangles ---- */

typedef struct grid {
  const omc_gemm_args *g;
  serial_fn serial;
  int64_t rows, cols; /* of the grid */
  char *workspace;
  size_t thread_bytes;
} grid;

enum { COLUMN_UNIT = OMC_MAX_VL };

static void run_rectangles(omc_range range, void *ctx) {
  const grid *p = ctx;
  const omc_gemm_args *g = p->g;
  const int64_t size = (int64_t)omc_dtype_size(g->c.dtype);
  const int64_t units = omc_ceil_div(g->n, COLUMN_UNIT);
  for (int64_t u = range.begin; u < range.end; u++) {
    const int64_t i0 = omc_cut(g->m, p->rows, u / p->cols),
                  i1 = omc_cut(g->m, p->rows, u / p->cols + 1);
    const int64_t j0 = omc_cut(units, p->cols, u % p->cols) * COLUMN_UNIT;
    const int64_t j1 = omc_min(omc_cut(units, p->cols, u % p->cols + 1) * COLUMN_UNIT, g->n);
    omc_gemm_args part = *g;
    part.m = i1 - i0;
    part.n = j1 - j0;
    part.a = omc_matrix_part(&g->a, i0, 0);
    part.b = omc_matrix_part(&g->b, 0, j0);
    part.c = omc_matrix_part(&g->c, i0, j0);
    if (g->bias) part.bias = (const char *)g->bias + j0 * size;
    if (g->row_bias) part.row_bias = (const char *)g->row_bias + i0 * size;
    p->serial(&part, p->workspace + (size_t)range.thread * p->thread_bytes);
  }
}

/* The grid of at most `threads` rectangles whose largest has least arithmetic and packing. */
static void choose_grid(const omc_gemm_args *g, int64_t threads, grid *out) {
  const int64_t pack_cost = 16; /* of an element, in multiply-adds */
  const int64_t units = omc_ceil_div(g->n, COLUMN_UNIT);
  int64_t best = INT64_MAX;
  for (int64_t rows = 1; rows <= omc_min(threads, g->m); rows++) {
    const int64_t cols = omc_min(threads / rows, units);
    const int64_t m = omc_ceil_div(g->m, rows), n = omc_ceil_div(units, cols) * COLUMN_UNIT;
    const int64_t cost = m * n + pack_cost * (m + n);
    if (cost >= best) continue;
    best = cost;
    out->rows = rows;
    out->cols = cols;
  }
}

static void gemm_own(const omc_gemm_args *g, int threads, void *workspace) {
  const int64_t work = g->m * g->n * (g->k ? g->k : 1) / OMC_GRAIN_PRODUCTS + 1;
  grid p = {.g = g,
            .serial = serial_for(g, way_of(g)), /* of the whole: its parts are computed alike */
            .workspace = workspace,
            .thread_bytes = thread_bytes(g->c.dtype, g->m, g->n, g->k)};
  choose_grid(g, omc_min(threads, work), &p);
  omc_parallel_for(p.rows * p.cols, 1, threads, run_rectangles, &p);
}

/* ---- torch's BLAS ---- */

/* C = A B in rows is C' = B' A' in columns: each operand must be dense in one direction. */
typedef struct blas_operand {
  char trans;
  int32_t ld;
} blas_operand;

static bool blas_describe(const omc_matrix *x, int64_t rows, int64_t cols, blas_operand *out) {
  const bool by_rows = x->cs == 1 && x->rs >= cols, by_cols = x->rs == 1 && x->cs >= rows;
  const int64_t ld = by_rows ? x->rs : x->cs;
  if ((!by_rows && !by_cols) || rows > INT32_MAX || cols > INT32_MAX || ld > INT32_MAX || ld < 1)
    return false;
  *out = (blas_operand){by_rows ? 'N' : 'T', (int32_t)ld};
  return true;
}

static bool is_plain(const omc_matrix *x, omc_dtype dtype) {
  return x->dtype == dtype && x->read_as != OMC_BF16 && x->read_as != OMC_F16;
}

static bool blas_fits(const omc_gemm_args *g) {
  const omc_torch_shims *torch = omc_torch_shims_get();
  const omc_dtype dtype = g->c.dtype;
  blas_operand a, b, c;
  return computed_in(g) == dtype && is_plain(&g->a, dtype) && is_plain(&g->b, dtype) &&
         (dtype == OMC_F64 ? torch->dgemm != NULL : torch->sgemm != NULL) &&
         blas_describe(&g->a, g->m, g->k, &a) && blas_describe(&g->b, g->k, g->n, &b) &&
         blas_describe(&g->c, g->m, g->n, &c) && c.trans == 'N';
}

#define ADD_BIAS(type)                                                       \
  static void add_bias_##type(omc_range range, void *ctx) {                  \
    const omc_gemm_args *g = ctx;                                            \
    for (int64_t i = range.begin; i < range.end; i++) {                      \
      type *c = (type *)g->c.data + i * g->c.rs;                             \
      const type *bias = g->bias;                                            \
      const type row = g->row_bias ? ((const type *)g->row_bias)[i] : 0;     \
      for (int64_t j = 0; j < g->n; j++) c[j] += bias ? bias[j] + row : row; \
    }                                                                        \
  }
ADD_BIAS(double)
ADD_BIAS(float)

static void gemm_torch(const omc_gemm_args *g, int threads) {
  const omc_torch_shims *torch = omc_torch_shims_get();
  blas_operand a, b;
  if (!blas_describe(&g->a, g->m, g->k, &a) || !blas_describe(&g->b, g->k, g->n, &b)) return;
  const int32_t m = (int32_t)g->m, n = (int32_t)g->n, k = (int32_t)g->k, ldc = (int32_t)g->c.rs;
  const int before = torch->set_num_threads_local ? torch->set_num_threads_local(threads) : 0;
  if (g->c.dtype == OMC_F64) {
    torch->dgemm(&b.trans, &a.trans, &n, &m, &k, &g->alpha, g->b.data, &b.ld, g->a.data, &a.ld,
                 &g->beta, g->c.data, &ldc);
  } else {
    const float alpha = (float)g->alpha, beta = (float)g->beta;
    torch->sgemm(&b.trans, &a.trans, &n, &m, &k, &alpha, g->b.data, &b.ld, g->a.data, &a.ld, &beta,
                 g->c.data, &ldc);
  }
  if (torch->set_num_threads_local) torch->set_num_threads_local(before);
  if (g->bias || g->row_bias)
    omc_parallel_for(g->m, omc_grain(OMC_GRAIN_ELEMENTS, g->n), threads,
                     g->c.dtype == OMC_F64 ? add_bias_double : add_bias_float,
                     (void *)(uintptr_t)g);
}

void omc_gemm(const omc_gemm_args *g, int threads, void *workspace) {
  if (g->m == 0 || g->n == 0) return;
  if (omc_env_get()->gemm == OMC_GEMM_TORCH && g->k > 0 && blas_fits(g))
    gemm_torch(g, threads);
  else
    gemm_own(g, threads, workspace);
}
