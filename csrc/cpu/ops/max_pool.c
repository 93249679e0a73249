/* Maxima of windows, and where they are. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/int.h"
#include "cpu/kernel.h"
#include "cpu/ops/pool.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "cpu/shuffle.h"

typedef struct max_params {
  omc_pool_form form;
  int64_t taps;
  bool narrow;    /* numbers of taps are stored in 8 bits, else in 32 */
  int64_t *place; /* by tap, if they are: elements from where a window starts */
} max_params;

/* Elements from where a window starts to one of its taps. */
static inline int64_t place_of_tap(const omc_pool_form *f, int64_t tap) {
  const int64_t row = tap / f->kernel[2], kz = row / f->kernel[1], ky = row % f->kernel[1];
  return (kz * f->dilation[0] * f->in[1] + ky * f->dilation[1]) * f->in[2] +
         tap % f->kernel[2] * f->dilation[2];
}

#ifdef OMC_VARIANT
#if OMC_IS_FLOAT

#define CHUNK 256 /* outputs of a row that are worked on together */
#define AT_ONCE 4 /* vectors of them */

typedef struct pool_job {
  const void *params;
  const storage_t *x;
  storage_t *y;
  int64_t *indices; /* NULL: not wanted, as the next */
  void *taps;
  acc_t *scratch;      /* for each thread the sums of a plane: gradient only, as the next */
  atomic_bool strayed; /* a tap is not of its window, or not in its plane */
} pool_job;

/* The first tap of a window, at `start` of the input or in the padding before it, that is inside.
 */
static int64_t first_inside(int64_t start, int64_t dilation) {
  return start < 0 ? omc_ceil_div(-start, dilation) : 0;
}

/* OMC_VL elements of a row, `step` apart. */
OMC_INLINE vacc_t vld_step(const storage_t *p, int64_t step) {
  if (step == 1) return vld(p);
  if (step == 2) return OMC_EVERY_SECOND(vld(p), vld(p + OMC_VL - 1));
  if (step == 4) {
    const storage_t *const last = p + 2 * (OMC_VL - 1);
    return OMC_EVERY_SECOND(OMC_EVERY_SECOND(vld(p), vld(p + OMC_VL - 1)),
                            OMC_EVERY_SECOND(vld(last), vld(last + OMC_VL - 1)));
  }
  vacc_t v = {0};
  for (int i = 0; i < OMC_VL; i++) v[i] = ld(p + i * step);
  return v;
}

static inline int64_t place_from_start(const max_params *p, int64_t tap) {
  return p->narrow ? p->place[tap] : place_of_tap(&p->form, tap);
}

static inline int64_t load_tap(const max_params *p, const void *taps, int64_t i) {
  return p->narrow ? ((const uint8_t *)taps)[i] : ((const int32_t *)taps)[i];
}

/* Where window k of a row of outputs starts in its plane, perhaps in the padding. */
static inline int64_t window_start(const omc_pool_form *f, out_row row, int64_t k) {
  const int64_t z = row.z * f->stride[0] - f->before[0], y = row.y * f->stride[1] - f->before[1];
  return (z * f->in[1] + y) * f->in[2] + k * f->stride[2] - f->before[2];
}

/* The windows of a row of outputs: taps [z, z_end) and [y, y_end) of them are inside. */
typedef struct max_windows {
  const omc_pool_form *form;
  const storage_t *x; /* the plane */
  int64_t left;       /* elements from its start to the end of all planes */
  int64_t front, top; /* where they start, perhaps in the padding */
  int64_t z, z_end, y, y_end;
} max_windows;

/* Where the taps of one axis end that are inside, of a window at `start`. */
static int64_t inside_end(const omc_pool_form *f, int32_t axis, int64_t start) {
  const int64_t most = omc_ceil_div(omc_max(f->in[axis] - start, 0), f->dilation[axis]);
  return omc_min(most, f->kernel[axis]);
}

static max_windows windows_at(const omc_pool_form *f, const storage_t *x, int64_t left,
                              out_row row) {
  const int64_t front = row.z * f->stride[0] - f->before[0],
                top = row.y * f->stride[1] - f->before[1];
  return (max_windows){.form = f,
                       .x = x,
                       .left = left,
                       .front = front,
                       .top = top,
                       .z = first_inside(front, f->dilation[0]),
                       .z_end = inside_end(f, 0, front),
                       .y = first_inside(top, f->dilation[1]),
                       .y_end = inside_end(f, 1, top)};
}

/* The first tap of a row of them. */
static int64_t tap_at(const omc_pool_form *f, int64_t kz, int64_t ky) {
  return (kz * f->kernel[1] + ky) * f->kernel[2];
}

/* Where the row of the plane starts that taps kz and ky are in. */
static int64_t row_at(const max_windows *w, int64_t kz, int64_t ky) {
  const omc_pool_form *f = w->form;
  return ((w->front + kz * f->dilation[0]) * f->in[1] + w->top + ky * f->dilation[1]) * f->in[2];
}

/* As in PyTorch, NaN is larger than all, the last of several; of equal numbers the first is taken;
 * an empty window is -inf at what would be its first tap. Of the taps along the row, [first, end)
 * are inside. *tap is which it is. */
static void max_of(const max_windows *w, int64_t k, int64_t first, int64_t end, acc_t *best,
                   acc_bits_t *tap) {
  const omc_pool_form *f = w->form;
  const int64_t left = k * f->stride[2] - f->before[2], step = f->dilation[2];
  acc_t most = -(acc_t)INFINITY;
  int64_t found = tap_at(f, w->z, w->y) + first;
  for (int64_t kz = w->z; first < end && kz < w->z_end; kz++)
    for (int64_t ky = w->y; ky < w->y_end; ky++) {
      const storage_t *const x = w->x + row_at(w, kz, ky) + left;
      for (int64_t kx = first; kx < end; kx++) {
        const acc_t v = ld(x + kx * step);
        const bool better = v > most || v != v;
        most = better ? v : most;
        found = better ? tap_at(f, kz, ky) + kx : found;
      }
    }
  *best = most;
  *tap = (acc_bits_t)found;
}

static void max_at_border(const max_windows *w, int64_t k, acc_t *best, acc_bits_t *tap) {
  const omc_pool_form *f = w->form;
  const int64_t left = k * f->stride[2] - f->before[2];
  max_of(w, k, first_inside(left, f->dilation[2]), inside_end(f, 2, left), best, tap);
}

/* The same of `n` vectors, which do not wait for one another, of OMC_VL outputs from each of k on,
 * all of whose taps along the row are inside; they are `stride` apart. */
OMC_INLINE void max_vectors(const max_windows *w, int64_t from, const int64_t *k, int n,
                            int64_t stride, acc_t *best, acc_bits_t *taps) {
  const omc_pool_form *f = w->form;
  const vmask zero = {0};
  vacc_t most[AT_ONCE];
  vmask found[AT_ONCE];
  for (int i = 0; i < n; i++) {
    most[i] = vset(-(acc_t)INFINITY);
    found[i] = zero + (acc_bits_t)tap_at(f, w->z, w->y);
  }
  for (int64_t kz = w->z; kz < w->z_end; kz++)
    for (int64_t ky = w->y; ky < w->y_end; ky++) {
      const storage_t *x = w->x + row_at(w, kz, ky) + from * stride - f->before[2];
      for (int64_t kx = 0; kx < f->kernel[2]; kx++, x += f->dilation[2]) {
        const vmask here = zero + (acc_bits_t)(tap_at(f, kz, ky) + kx);
        for (int i = 0; i < n; i++) {
          const vacc_t v = vld_step(x + k[i] * stride, stride);
          const vmask better = (v > most[i]) | vnan(v);
          most[i] = vblend(better, v, most[i]);
          found[i] = (better & here) | (~better & found[i]);
        }
      }
    }
  for (int i = 0; i < n; i++) {
    vstr(best + k[i], most[i]);
    memcpy(taps + k[i], &found[i], sizeof found[i]);
  }
}

/* The same of strides that are known where shuffles are of use, see vld_step. */
OMC_INLINE void max_strided(const max_windows *w, int64_t from, const int64_t *k, int n,
                            acc_t *best, acc_bits_t *taps) {
  switch (w->form->stride[2]) {
    case 1:
      max_vectors(w, from, k, n, 1, best, taps);
      break;
    case 2:
      max_vectors(w, from, k, n, 2, best, taps);
      break;
    case 4:
      max_vectors(w, from, k, n, 4, best, taps);
      break;
    default:
      max_vectors(w, from, k, n, w->form->stride[2], best, taps);
  }
}

/* Outputs [low, high) of those from `from` on, by vectors, which may overlap. */
static void max_inside(const max_windows *w, int64_t from, int64_t low, int64_t high, acc_t *best,
                       acc_bits_t *at) {
  const int64_t last = omc_max(high - OMC_VL, low);
  while (low < high) {
    int64_t k[AT_ONCE];
    for (int i = 0; i < AT_ONCE; i++) k[i] = omc_min(low + i * OMC_VL, last);
    const bool many = high - low > AT_ONCE / 2 * OMC_VL;
    if (many)
      max_strided(w, from, k, AT_ONCE, best, at);
    else
      max_strided(w, from, k, 1, best, at);
    low += many ? AT_ONCE * OMC_VL : OMC_VL;
  }
}

/* Whether a vector from output k on, of which n lanes are wanted, takes less time than each output
 * by itself, and there are elements for all its lanes, whosever they are. Strides without
 * shuffles of their own, see vld_step, are read one by one. */
static bool has_vector(const max_windows *w, int64_t k, int64_t n) {
  const omc_pool_form *f = w->form;
  const bool shuffled = f->stride[2] <= 4 && f->stride[2] != 3;
  if (n < (shuffled ? OMC_VL / 4 : OMC_VL / 2)) return false;
  const int64_t last = row_at(w, w->z_end - 1, w->y_end - 1) - f->before[2] +
                       (f->kernel[2] - 1) * f->dilation[2] + (k + OMC_VL - 1) * f->stride[2];
  return last < w->left;
}

/* The outputs [from, from + n) of a row, at most CHUNK; of few outputs a vector has lanes to spare,
 * which are computed of what follows, and overwritten or dropped. */
static void max_row(const max_windows *w, int64_t from, int64_t n, acc_t *best, acc_bits_t *at) {
  const omc_pool_form *f = w->form;
  const int64_t stride = f->stride[2], before = f->before[2];
  const int64_t last = f->in[2] - 1 + before - (f->kernel[2] - 1) * f->dilation[2];
  int64_t low = omc_clamp(omc_ceil_div(before, stride) - from, 0, n);
  int64_t high = omc_clamp((last < 0 ? 0 : last / stride + 1) - from, low, n);
  const bool by_vectors = high - low >= OMC_VL || has_vector(w, from + low, high - low);
  for (int64_t k = 0; k < low; k++) max_at_border(w, from + k, best + k, at + k);
  for (int64_t k = low; !by_vectors && k < high; k++)
    max_of(w, from + k, 0, f->kernel[2], best + k, at + k);
  if (by_vectors) max_inside(w, from, low, high, best, at);
  for (int64_t k = high; k < n; k++) max_at_border(w, from + k, best + k, at + k);
}

/* Stores which taps n outputs are, from output `to` on; the first window starts at `start`. */
static void store_taps(const pool_job *j, const acc_bits_t *restrict at, int64_t n, int64_t start,
                       int64_t to) {
  const max_params *p = j->params;
  uint8_t *restrict const narrow = p->narrow && j->taps ? (uint8_t *)j->taps + to : NULL;
  int32_t *restrict const wide = !p->narrow && j->taps ? (int32_t *)j->taps + to : NULL;
  for (int64_t k = 0; narrow && k < n; k++) narrow[k] = (uint8_t)at[k];
  for (int64_t k = 0; wide && k < n; k++) wide[k] = (int32_t)at[k];
  for (int64_t k = 0; j->indices && k < n; k++)
    j->indices[to + k] = start + k * p->form.stride[2] + place_from_start(p, at[k]);
}

static void max_rows(omc_range range, void *ctx) {
  const pool_job *j = ctx;
  const omc_pool_form *f = &((const max_params *)j->params)->form;
  acc_t best[CHUNK + OMC_VL];
  acc_bits_t at[CHUNK + OMC_VL];
  out_row row = out_row_of(f->out, range.begin);
  for (int64_t r = range.begin; r < range.end; r++, next_row(f->out, &row)) {
    const int64_t plane = row.plane * product_of(f->in);
    const max_windows w = windows_at(f, j->x + plane, f->planes * product_of(f->in) - plane, row);
    for (int64_t from = 0; from < f->out[2]; from += CHUNK) {
      const int64_t to = r * f->out[2] + from, n = omc_min(CHUNK, f->out[2] - from);
      max_row(&w, from, n, best, at);
      for (int64_t k = 0; k < n; k++) st(j->y + to + k, best[k]);
      store_taps(j, at, n, window_start(f, row, from), to);
    }
  }
}

OMC_KERNEL(MaxPool, args) {
  const max_params *p = args->params;
  const omc_pool_form *f = &p->form;
  pool_job j = {.params = p,
                .x = args->in[0].data,
                .y = args->out[0].data,
                .indices = omc_out_data(args, 1),
                .taps = omc_out_data(args, 2)};
  const int64_t unit = f->out[2] * product_of(f->kernel);
  omc_parallel_for(f->planes * f->out[0] * f->out[1], omc_grain(OMC_GRAIN_ELEMENTS, unit),
                   args->threads, max_rows, &j);
  return OMC_OK;
}

/* Where tap number `tap` of a window is in its plane of `in` elements; -1: it is none of its taps,
 * or not inside. */
OMC_INLINE int64_t place_of(const max_params *p, int64_t start, int64_t tap, int64_t in) {
  if (tap < 0 || tap >= p->taps) return -1;
  const int64_t place = start + place_from_start(p, tap);
  return place < in ? place : -1;
}

/* Adds a row of a gradient, from output `first` on, to a plane; whether all of it has its place. */
OMC_INLINE bool add_maxima(const pool_job *j, out_row row, int64_t first, int64_t in, acc_t *sums) {
  const max_params *p = j->params;
  const int64_t start = window_start(&p->form, row, 0), stride = p->form.stride[2];
  for (int64_t k = 0; k < p->form.out[2]; k++) {
    const int64_t at = place_of(p, start + k * stride, load_tap(p, j->taps, first + k), in);
    if (at < 0) return false;
    sums[at] += ld(j->x + first + k);
  }
  return true;
}

static void max_grad_planes(omc_range range, void *ctx) {
  pool_job *j = ctx;
  const omc_pool_form *f = &((const max_params *)j->params)->form;
  const int64_t in = product_of(f->in), rows = f->out[0] * f->out[1];
  for (int64_t plane = range.begin; plane < range.end; plane++) {
    storage_t *dx = j->y + plane * in;
    acc_t *sums = sums_of(dx, j->scratch + range.thread * in);
    if (in > 0) memset(sums, 0, (size_t)in * sizeof *sums);
    out_row row = {0};
    bool stays = true;
    for (int64_t r = 0; r < rows && stays; r++, next_row(f->out, &row))
      stays = add_maxima(j, row, (plane * rows + r) * f->out[2], in, sums);
    if (!stays) atomic_store_explicit(&j->strayed, true, memory_order_relaxed);
    store_sums(sums, dx, in);
  }
}

static omc_status tell_stray(const omc_kernel_args *args, const max_params *p, const void *taps) {
  const omc_pool_form *f = &p->form;
  for (int64_t i = 0; i < f->planes * product_of(f->out); i++) {
    const out_row row = out_row_of(f->out, i / f->out[2]);
    const int64_t tap = load_tap(p, taps, i), start = window_start(f, row, i % f->out[2]);
    if (place_of(p, start, tap, product_of(f->in)) < 0)
      OMC_FAIL(EINDEX,
               "'%s': tap %lld at position %lld is none of the %lld of its window, or outside",
               args->node, (long long)tap, (long long)i, (long long)p->taps);
  }
  return OMC_OK;
}

OMC_KERNEL(MaxPoolGrad, args) {
  const max_params *p = args->params;
  const int64_t in = product_of(p->form.in);
  pool_job j = {.params = p,
                .x = args->in[0].data,
                .y = args->out[0].data,
                .taps = args->in[1].data,
                .scratch = args->workspace};
  omc_parallel_for(p->form.planes, omc_grain(OMC_GRAIN_ELEMENTS, in), args->threads,
                   max_grad_planes, &j);
  return atomic_load(&j.strayed) ? tell_stray(args, p, j.taps) : OMC_OK;
}

#endif
#endif

#ifndef OMC_VARIANT

OMC_KERNELS(MaxPool)
OMC_KERNELS(MaxPoolGrad)

/* `x` is the shape of what is pooled. */
static omc_status max_params_of(const omc_node *node, const omc_shape *x, omc_arena *arena,
                                max_params *p) {
  omc_pool_form *f = &p->form;
  OMC_TRY(omc_pool_form_of(node, x, f));
  p->taps = omc_pool_taps(f);
  p->narrow = omc_pool_tap_dtype(f) == OMC_U8;
  p->place = OMC_NEW_ARRAY(arena, int64_t, p->narrow ? p->taps : 0);
  if (!p->place) return omc_no_memory(node);
  for (int64_t t = 0; p->narrow && t < p->taps; t++) p->place[t] = place_of_tap(f, t);
  return OMC_OK;
}

static omc_status params_max_pool(const omc_node *node, omc_arena *arena, void *params) {
  return max_params_of(node, &omc_in(node, 0)->type.shape, arena, params);
}

static omc_status params_max_pool_grad(const omc_node *node, omc_arena *arena, void *params) {
  return max_params_of(node, &node->out[0]->type.shape, arena, params);
}

static size_t max_grad_workspace(const omc_node *node, const void *params, int threads) {
  const max_params *p = params;
  return omc_sums_bytes(omc_in(node, 0)->type.dtype, threads * product_of(p->form.in));
}

OMC_CPU_OP(MaxPool, MaxPool, OMC_PARAMS(max_params, params_max_pool))
OMC_CPU_OP(MaxPoolGrad, MaxPoolGrad, OMC_PARAMS(max_params, params_max_pool_grad),
           .workspace = max_grad_workspace)

#endif
