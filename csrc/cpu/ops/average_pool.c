/* Averages of windows, of any kind: tables of windows along each axis. */
#include <string.h>

#include "base/int.h"
#include "cpu/kernel.h"
#include "cpu/ops/pool.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

typedef struct average_params {
  int64_t planes, in[OMC_POOL_AXES], out[OMC_POOL_AXES];
  int64_t divisor;                               /* instead of the sizes, if not 0 */
  const omc_pool_window *windows[OMC_POOL_AXES]; /* `out` of them */
  bool of_rows;                                  /* whole rows, which lie one after the other */
} average_params;

/* Elements from one thread's row of columns to the next: whole cache lines. */
static inline int64_t columns_pitch(const average_params *p) { return omc_whole_vectors(p->in[2]); }

#ifdef OMC_VARIANT
#if OMC_IS_FLOAT

typedef struct pool_job {
  const void *params;
  const storage_t *x;
  storage_t *y;
  acc_t *scratch; /* for each thread a row of columns, and then the sums of a plane */
  int threads;    /* gradient only */
} pool_job;

/* ---- rows of a window are added up to columns, then columns to results ---- */

static acc_t *columns_of(const pool_job *j, int thread) {
  const average_params *p = j->params;
  return j->scratch + thread * columns_pitch(p);
}

/* What the windows of a row of outputs have in common. */
typedef struct row_windows {
  omc_pool_window z, y;
} row_windows;

static inline row_windows windows_of(const average_params *p, out_row row) {
  return (row_windows){p->windows[0][row.z], p->windows[1][row.y]};
}

static inline acc_t divisor_of(const average_params *p, const row_windows *w, omc_pool_window x) {
  return (acc_t)(p->divisor ? p->divisor : w->z.size * w->y.size * x.size);
}

static void add_columns(acc_t *sum, const storage_t *row, int64_t n) {
  int64_t k = 0;
  for (; k + OMC_VL <= n; k += OMC_VL) vstr(sum + k, vldr(sum + k) + vld(row + k));
  for (; k < n; k++) sum[k] += ld(row + k);
}

static void add_to_row(acc_t *row, const acc_t *more, int64_t n) {
  int64_t k = 0;
  for (; k + OMC_VL <= n; k += OMC_VL) vstr(row + k, vldr(row + k) + vldr(more + k));
  for (; k < n; k++) row[k] += more[k];
}

static void add_to_all(acc_t *row, acc_t more, int64_t n) {
  int64_t k = 0;
  for (; k + OMC_VL <= n; k += OMC_VL) vstr(row + k, vldr(row + k) + vset(more));
  for (; k < n; k++) row[k] += more;
}

/* Averages of whole rows, by window: each of all planes in turn. */
static void average_blocks(omc_range range, void *ctx) {
  const pool_job *j = ctx;
  const average_params *p = j->params;
  const int64_t n = p->in[2], layer = p->in[1] * n, size = p->in[0] * layer;
  const int64_t rows = p->out[0] * p->out[1];
  for (int64_t first = range.begin; first < omc_min(range.begin + rows, range.end); first++) {
    const out_row row = out_row_of(p->out, first);
    const row_windows w = windows_of(p, row);
    const int64_t length = (w.y.end - w.y.start) * n;
    const acc_t divisor = divisor_of(p, &w, p->windows[2][0]);
    const storage_t *x = j->x + row.plane * size + w.y.start * n;
    for (int64_t r = first; r < range.end; r += rows, x += size) {
      acc_t sum = 0;
      for (int64_t z = w.z.start; z < w.z.end; z++) sum += row_sum(x + z * layer, length);
      st(j->y + r, sum / divisor);
    }
  }
}

static void average_rows(omc_range range, void *ctx) {
  const pool_job *j = ctx;
  const average_params *p = j->params;
  const int64_t n = p->in[2], size = product_of(p->in);
  acc_t *columns = columns_of(j, range.thread);
  out_row row = out_row_of(p->out, range.begin);
  for (int64_t r = range.begin; r < range.end; r++, next_row(p->out, &row)) {
    const row_windows w = windows_of(p, row);
    const storage_t *x = j->x + row.plane * size;
    if (n > 0) memset(columns, 0, (size_t)n * sizeof *columns);
    for (int64_t iz = w.z.start; iz < w.z.end; iz++)
      for (int64_t iy = w.y.start; iy < w.y.end; iy++)
        add_columns(columns, x + (iz * p->in[1] + iy) * n, n);
    for (int64_t ox = 0; ox < p->out[2]; ox++) {
      const omc_pool_window of = p->windows[2][ox];
      acc_t sum = 0;
      for (int64_t ix = of.start; ix < of.end; ix++) sum += columns[ix];
      st(j->y + r * p->out[2] + ox, sum / divisor_of(p, &w, of));
    }
  }
}

/* Adds a row of a gradient, shared out along the row, to the rows of its windows. */
OMC_INLINE void spread_row(const average_params *p, const storage_t *dy, row_windows w,
                           acc_t *columns, acc_t *sums) {
  const int64_t n = p->in[2];
  memset(columns, 0, (size_t)n * sizeof *columns);
  for (int64_t ox = 0; ox < p->out[2]; ox++) {
    const omc_pool_window of = p->windows[2][ox];
    const acc_t share = ld(dy + ox) / divisor_of(p, &w, of);
    for (int64_t ix = of.start; ix < of.end; ix++) columns[ix] += share;
  }
  for (int64_t iz = w.z.start; iz < w.z.end; iz++)
    for (int64_t iy = w.y.start; iy < w.y.end; iy++)
      add_to_row(sums + (iz * p->in[1] + iy) * n, columns, n);
}

/* The same of windows that are whole rows. */
OMC_INLINE void spread_block(const average_params *p, const storage_t *dy, row_windows w,
                             acc_t *sums) {
  const int64_t n = p->in[2];
  const acc_t share = ld(dy) / divisor_of(p, &w, p->windows[2][0]);
  for (int64_t iz = w.z.start; iz < w.z.end; iz++)
    add_to_all(sums + (iz * p->in[1] + w.y.start) * n, share, (w.y.end - w.y.start) * n);
}

static void average_grad_planes(omc_range range, void *ctx) {
  const pool_job *j = ctx;
  const average_params *p = j->params;
  const int64_t size = product_of(p->in);
  acc_t *columns = columns_of(j, range.thread);
  for (int64_t plane = range.begin; plane < range.end; plane++) {
    storage_t *dx = j->y + plane * size;
    const storage_t *dy = j->x + plane * product_of(p->out);
    acc_t *sums = sums_of(dx, j->scratch + j->threads * columns_pitch(p) + range.thread * size);
    memset(sums, 0, (size_t)size * sizeof *sums);
    out_row row = {0};
    for (int64_t r = 0; r < p->out[0] * p->out[1]; r++, next_row(p->out, &row), dy += p->out[2])
      if (p->of_rows)
        spread_block(p, dy, windows_of(p, row), sums);
      else
        spread_row(p, dy, windows_of(p, row), columns, sums);
    store_sums(sums, dx, size);
  }
}

OMC_KERNEL(AveragePool, args) {
  const average_params *p = args->params;
  pool_job j = {
      .params = p, .x = args->in[0].data, .y = args->out[0].data, .scratch = args->workspace};
  const int64_t rows = p->out[0] * p->out[1];
  const int64_t unit = p->in[2] * (1 + p->in[0] * p->in[1] / omc_max(rows, 1));
  omc_parallel_for(p->planes * rows, omc_grain(OMC_GRAIN_ELEMENTS, unit), args->threads,
                   p->of_rows ? average_blocks : average_rows, &j);
  return OMC_OK;
}

OMC_KERNEL(AveragePoolGrad, args) {
  const average_params *p = args->params;
  pool_job j = {.params = p,
                .x = args->in[0].data,
                .y = args->out[0].data,
                .scratch = args->workspace,
                .threads = args->threads};
  const int64_t size = product_of(p->in);
  if (size > 0)
    omc_parallel_for(p->planes, omc_grain(OMC_GRAIN_ELEMENTS, size), args->threads,
                     average_grad_planes, &j);
  return OMC_OK;
}

#endif
#endif

#ifndef OMC_VARIANT

OMC_KERNELS(AveragePool)
OMC_KERNELS(AveragePoolGrad)

/* `x` is the shape of what is pooled. */
static omc_status average_params_of(const omc_node *node, const omc_shape *x, omc_arena *arena,
                                    average_params *p) {
  omc_pool_form g;
  OMC_TRY(omc_pool_form_of(node, x, &g));
  p->planes = g.planes;
  p->divisor = g.divisor;
  for (int32_t i = 0; i < OMC_POOL_AXES; i++) {
    omc_pool_window *w = OMC_NEW_ARRAY(arena, omc_pool_window, g.out[i]);
    if (!w) return omc_no_memory(node);
    for (int64_t k = 0; k < g.out[i]; k++) w[k] = omc_pool_window_at(&g, i, k);
    p->in[i] = g.in[i];
    p->out[i] = g.out[i];
    p->windows[i] = w;
  }
  p->of_rows = p->out[2] == 1 && p->windows[2]->end - p->windows[2]->start == p->in[2];
  return OMC_OK;
}

static omc_status params_average(const omc_node *node, omc_arena *arena, void *params) {
  return average_params_of(node, &omc_in(node, 0)->type.shape, arena, params);
}

static omc_status params_average_grad(const omc_node *node, omc_arena *arena, void *params) {
  return average_params_of(node, &omc_out(node, 0)->type.shape, arena, params);
}

static size_t average_workspace(const omc_node *node, const void *params, int threads) {
  const average_params *p = params;
  return (size_t)(threads * columns_pitch(p)) * omc_acc_size(omc_in(node, 0)->type.dtype);
}

static size_t average_grad_workspace(const omc_node *node, const void *params, int threads) {
  const average_params *p = params;
  return average_workspace(node, params, threads) +
         omc_sums_bytes(omc_in(node, 0)->type.dtype, threads * product_of(p->in));
}

#define AVERAGE(name)                                                                      \
  OMC_CPU_OP(name, AveragePool, OMC_PARAMS(average_params, params_average),                \
             .workspace = average_workspace)                                               \
  OMC_CPU_OP(name##Grad, AveragePoolGrad, OMC_PARAMS(average_params, params_average_grad), \
             .workspace = average_grad_workspace)
AVERAGE(AveragePool)
AVERAGE(AdaptiveAvgPool)

#endif
