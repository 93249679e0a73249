/* Pooling. Averages of any kind are tables of windows along each axis. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/int.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "cpu/shuffle.h"
#include "ops/forms.h"

typedef struct max_params {
  omc_pool_form form;
  const int64_t *low, *high; /* by tap of a row: it is inside for the outputs [low, high) */
} max_params;

typedef struct max_grad_params {
  int64_t planes, in, out; /* elements of a plane */
} max_grad_params;

typedef struct average_params {
  int64_t planes, in[OMC_POOL_AXES], out[OMC_POOL_AXES];
  int64_t divisor;                               /* instead of the sizes, if not 0 */
  const omc_pool_window *windows[OMC_POOL_AXES]; /* `out` of them */
  bool of_rows;                                  /* whole rows, which lie one after the other */
} average_params;

/* Elements of all axes. */
static inline int64_t product_of(const int64_t *dims) { return dims[0] * dims[1] * dims[2]; }

/* Elements from one thread's row of columns to the next: whole cache lines. */
static inline int64_t columns_pitch(const average_params *p) { return omc_whole_vectors(p->in[2]); }

#ifdef OMC_VARIANT
#if OMC_IS_FLOAT

#define CHUNK 256 /* outputs of a row that are worked on together */

typedef struct pool_job {
  const void *params;
  const storage_t *x;
  storage_t *y;
  int64_t *indices;    /* NULL: not wanted */
  acc_t *scratch;      /* for each thread a row of columns, and then the sums of a plane */
  int threads;         /* gradient of averages */
  atomic_bool strayed; /* gradient of maxima: an index that is none of its plane */
} pool_job;

/* The first tap of a window, at `start` of the input or in the padding before it, that is inside.
 */
static int64_t first_inside(int64_t start, int64_t dilation) {
  return start < 0 ? omc_ceil_div(-start, dilation) : 0;
}

/* A row of outputs: row `y` of layer `z` of a plane. */
typedef struct out_row {
  int64_t plane, z, y;
} out_row;

static inline out_row out_row_of(const int64_t *out, int64_t r) {
  return (out_row){r / out[1] / out[0], r / out[1] % out[0], r % out[1]};
}

static inline void next_row(const int64_t *out, out_row *row) {
  if (++row->y < out[1]) return;
  row->y = 0;
  if (++row->z < out[0]) return;
  row->z = 0;
  row->plane++;
}

/* OMC_VL elements of a row, `step` (1 or 2) apart. */
OMC_INLINE vacc_t vld_step(const storage_t *p, int64_t step) {
  return step == 1 ? vld(p) : OMC_EVERY_SECOND(vld(p), vld(p + OMC_VL - 1));
}

/* Takes what is better of OMC_VL elements, the first of which is at `place` of its plane. */
OMC_INLINE void take_vector(const storage_t *x, int64_t step, acc_bits_t place, acc_t *best,
                            acc_bits_t *at) {
  vmask lane, places;
  for (int i = 0; i < OMC_VL; i++) lane[i] = i * (acc_bits_t)step;
  memcpy(&places, at, sizeof places);
  const vacc_t v = vld_step(x, step), most = vldr(best);
  const vmask better = (v > most) | vnan(v);
  vstr(best, vblend(better, v, most));
  places = (better & (lane + place)) | (~better & places);
  memcpy(at, &places, sizeof places);
}

/* Takes what is better of one row of a window: of `x`, which is at `start` of its plane, for the
 * outputs [from, from + n). Vectors may overlap: taking an element twice is taking it once. */
OMC_INLINE void take_better(const max_params *p, const storage_t *x, int64_t start, int64_t from,
                            int64_t n, acc_t *best, acc_bits_t *at) {
  const omc_pool_form *f = &p->form;
  const int64_t stride = f->stride[2], pad = f->before[2];
  for (int64_t kx = 0; kx < f->kernel[2]; kx++) {
    const int64_t left = from * stride + kx * f->dilation[2] - pad;
    const acc_bits_t base = (acc_bits_t)(start + left);
    const int64_t low = omc_clamp(p->low[kx] - from, 0, n);
    const int64_t high = omc_clamp(p->high[kx] - from, low, n);
    int64_t k = low;
    if (stride <= 2 && high - low >= OMC_VL)
      for (; k < high; k += OMC_VL) {
        k = omc_min(k, high - OMC_VL);
        const acc_bits_t place = base + (acc_bits_t)(k * stride);
        if (stride == 1)
          take_vector(x + left + k, 1, place, best + k, at + k);
        else
          take_vector(x + left + k * 2, 2, place, best + k, at + k);
      }
    for (; k < high; k++) {
      const acc_t v = ld(x + left + k * stride);
      const bool better = v > best[k] || v != v;
      best[k] = better ? v : best[k];
      at[k] = better ? base + (acc_bits_t)(k * stride) : at[k];
    }
  }
}

/* The outputs [from, from + n) of a row of the plane `x`. As in PyTorch, NaN is larger than all,
 * and of several the last is taken; an empty window would be -inf at its first place. */
static void max_row(const max_params *p, const storage_t *x, out_row row, int64_t from, int64_t n,
                    storage_t *y, int64_t *indices) {
  acc_t best[CHUNK];
  acc_bits_t at[CHUNK];
  const omc_pool_form *f = &p->form;
  const int64_t *step = f->dilation;
  const int64_t front = row.z * f->stride[0] - f->before[0],
                top = row.y * f->stride[1] - f->before[1];
  const int64_t z = first_inside(front, step[0]), first = first_inside(top, step[1]);
  const int64_t corner = ((front + z * step[0]) * f->in[1] + top + first * step[1]) * f->in[2];
  for (int64_t k = 0; k < n; k++) {
    best[k] = -(acc_t)INFINITY;
    at[k] = (acc_bits_t)(corner + (from + k) * f->stride[2] - f->before[2]);
  }
  for (int64_t k = 0, left; k < n && (left = (from + k) * f->stride[2] - f->before[2]) < 0; k++)
    at[k] += (acc_bits_t)(first_inside(left, step[2]) * step[2]);
  for (int64_t kz = z; kz < f->kernel[0] && front + kz * step[0] < f->in[0]; kz++)
    for (int64_t ky = first; ky < f->kernel[1] && top + ky * step[1] < f->in[1]; ky++) {
      const int64_t start = ((front + kz * step[0]) * f->in[1] + top + ky * step[1]) * f->in[2];
      take_better(p, x + start, start, from, n, best, at);
    }
  for (int64_t k = 0; k < n; k++) st(y + k, best[k]);
  for (int64_t k = 0; indices && k < n; k++) indices[k] = at[k];
}

static void max_rows(omc_range range, void *ctx) {
  const pool_job *j = ctx;
  const max_params *p = j->params;
  const omc_pool_form *f = &p->form;
  const int64_t size = product_of(f->in);
  out_row row = out_row_of(f->out, range.begin);
  for (int64_t r = range.begin; r < range.end; r++, next_row(f->out, &row))
    for (int64_t from = 0; from < f->out[2]; from += CHUNK) {
      const int64_t to = r * f->out[2] + from;
      max_row(p, j->x + row.plane * size, row, from, omc_min(CHUNK, f->out[2] - from), j->y + to,
              j->indices ? j->indices + to : NULL);
    }
}

OMC_KERNEL(MaxPool, args) {
  const max_params *p = args->params;
  const omc_pool_form *f = &p->form;
  pool_job j = {
      .params = p, .x = args->in[0].data, .y = args->out[0].data, .indices = omc_out_data(args, 1)};
  const int64_t unit = f->out[2] * product_of(f->kernel);
  omc_parallel_for(f->planes * f->out[0] * f->out[1], omc_grain(OMC_GRAIN_ELEMENTS, unit),
                   args->threads, max_rows, &j);
  return OMC_OK;
}

static bool strays(const int64_t *at, int64_t n, int64_t in) {
  bool any = false;
  for (int64_t i = 0; i < n; i++) any |= at[i] < 0 || at[i] >= in;
  return any;
}

static void max_grad_planes(omc_range range, void *ctx) {
  pool_job *j = ctx;
  const max_grad_params *p = j->params;
  for (int64_t plane = range.begin; plane < range.end; plane++) {
    storage_t *dx = j->y + plane * p->in;
    const storage_t *dy = j->x + plane * p->out;
    const int64_t *at = j->indices + plane * p->out;
    if (strays(at, p->out, p->in)) {
      atomic_store_explicit(&j->strayed, true, memory_order_relaxed);
      continue;
    }
    acc_t *sums = sums_of(dx, j->scratch + range.thread * p->in);
    memset(sums, 0, (size_t)p->in * sizeof *sums);
    for (int64_t i = 0; i < p->out; i++) sums[at[i]] += ld(dy + i);
    store_sums(sums, dx, p->in);
  }
}

OMC_KERNEL(MaxPoolGrad, args) {
  const max_grad_params *p = args->params;
  const int64_t *at = args->in[1].data;
  pool_job j = {.params = p,
                .x = args->in[0].data,
                .y = args->out[0].data,
                .indices = args->in[1].data,
                .scratch = args->workspace};
  omc_parallel_for(p->planes, omc_grain(OMC_GRAIN_ELEMENTS, p->in), args->threads, max_grad_planes,
                   &j);
  if (!atomic_load(&j.strayed)) return OMC_OK;
  int64_t i = 0;
  while (at[i] >= 0 && at[i] < p->in) i++;
  OMC_FAIL(EINDEX, "'%s': index %lld at position %lld is out of range for planes of %lld",
           args->node ? args->node : "", (long long)at[i], (long long)i, (long long)p->in);
}

/* ---- averages: rows of a window are added up to columns, then columns to results ---- */

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
    memset(columns, 0, (size_t)n * sizeof *columns);
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
  omc_parallel_for(p->planes, omc_grain(OMC_GRAIN_ELEMENTS, product_of(p->in)), args->threads,
                   average_grad_planes, &j);
  return OMC_OK;
}

#endif
#endif

#ifndef OMC_VARIANT

OMC_KERNELS(MaxPool)
OMC_KERNELS(MaxPoolGrad)
OMC_KERNELS(AveragePool)
OMC_KERNELS(AveragePoolGrad)

static omc_status no_memory(const omc_node *node) {
  OMC_NODE_FAIL(node, ENOMEM, "no memory for its windows");
}

/* Fills in where the taps of a row are inside; false: no memory. */
static bool new_taps(omc_arena *arena, max_params *p) {
  const int64_t taps = p->form.kernel[2], stride = p->form.stride[2];
  int64_t *low = OMC_NEW_ARRAY(arena, int64_t, 2 * taps);
  if (!low) return false;
  int64_t *high = low + taps;
  for (int64_t k = 0; k < taps; k++) {
    const int64_t first = p->form.before[2] - k * p->form.dilation[2];
    const int64_t last = first + p->form.in[2] - 1;
    low[k] = first > 0 ? omc_ceil_div(first, stride) : 0;
    high[k] = last < 0 ? 0 : last / stride + 1;
  }
  p->low = low;
  p->high = high;
  return true;
}

static omc_status params_max_pool(const omc_node *node, omc_arena *arena, void *params) {
  max_params *p = params;
  OMC_TRY(omc_pool_form_of(node, &omc_in(node, 0)->type.shape, &p->form));
  const int64_t plane = product_of(p->form.in);
  if (plane > INT32_MAX && omc_acc_size(omc_in(node, 0)->type.dtype) == sizeof(int32_t))
    OMC_NODE_FAIL(node, EUNSUPPORTED, "a plane of %lld elements: 32 bits count their places",
                  (long long)plane);
  return new_taps(arena, p) ? OMC_OK : no_memory(node);
}

static omc_status params_max_pool_grad(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  omc_pool_form g;
  OMC_TRY(omc_pool_form_of(node, &node->out[0]->type.shape, &g));
  *(max_grad_params *)params = (max_grad_params){g.planes, product_of(g.in), product_of(g.out)};
  return OMC_OK;
}

/* `x` is the shape of what is pooled. */
static omc_status average_params_of(const omc_node *node, const omc_shape *x, omc_arena *arena,
                                    average_params *p) {
  omc_pool_form g;
  OMC_TRY(omc_pool_form_of(node, x, &g));
  p->planes = g.planes;
  p->divisor = g.divisor;
  for (int32_t i = 0; i < OMC_POOL_AXES; i++) {
    omc_pool_window *w = OMC_NEW_ARRAY(arena, omc_pool_window, g.out[i]);
    if (!w) return no_memory(node);
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

static size_t max_grad_workspace(const omc_node *node, const void *params, int threads) {
  const max_grad_params *p = params;
  return omc_sums_bytes(omc_in(node, 0)->type.dtype, threads * p->in);
}

OMC_CPU_OP(MaxPool, MaxPool, OMC_PARAMS(max_params, params_max_pool))
OMC_CPU_OP(MaxPoolGrad, MaxPoolGrad, OMC_PARAMS(max_grad_params, params_max_pool_grad),
           .workspace = max_grad_workspace)

#define AVERAGE(name)                                                                      \
  OMC_CPU_OP(name, AveragePool, OMC_PARAMS(average_params, params_average),                \
             .workspace = average_workspace)                                               \
  OMC_CPU_OP(name##Grad, AveragePoolGrad, OMC_PARAMS(average_params, params_average_grad), \
             .workspace = average_grad_workspace)
AVERAGE(AveragePool)
AVERAGE(AdaptiveAvgPool)

#endif
