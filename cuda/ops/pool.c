/* Pooling by windows; an average of whole planes is a reduction of theirs, and its gradient the
 * same number for all of a plane. */
#include "cuda/ops/pool.h"

#include "base/int.h"
#include "cuda/ops/reduce.h"
#include "cuda/teams.h"
#include "ops/forms.h"
#include "ops/op.h"

enum { THREADS = OMC_POOL_THREADS, PACK_BYTES = 16 };

/* Elements that a thread of a gradient has, as OMC_ROW_PACK. */
static int64_t pack_of(omc_dtype dtype) { return PACK_BYTES / (int64_t)omc_dtype_size(dtype); }

typedef struct params {
  omc_cuda_kernel kernel;
  omc_cuda_grid grid;
  omc_pool given;      /* but for addresses, as the next */
  omc_reduce averaged; /* whole planes, if `whole` */
  omc_spread spread;   /* what flows back of them */
  bool whole;
} params;

static int64_t product_of(const int64_t *dims) { return dims[0] * dims[1] * dims[2]; }

static omc_pool_axis axis_of(const omc_pool_form *f, int32_t i) {
  return (omc_pool_axis){.in = f->in[i],
                         .out = f->out[i],
                         .kernel = f->kernel[i],
                         .stride = f->stride[i],
                         .dilation = f->dilation[i],
                         .before = f->before[i],
                         .after = f->after[i],
                         .by_in = omc_gpu_divisor_of(f->in[i]),
                         .by_out = omc_gpu_divisor_of(f->out[i]),
                         .by_stride = omc_gpu_divisor_of(f->stride[i]),
                         .by_dilation = omc_gpu_divisor_of(f->dilation[i]),
                         .by_kernel = omc_gpu_divisor_of(f->kernel[i])};
}

/* Whether 32 bits hold all elements, a number for each thread of the last block too, and what is
 * computed of places along each axis. */
static bool is_narrow(const omc_pool_form *f) {
  const double most = (double)omc_cuda_narrow() - THREADS,
               planes = (double)f->planes * (double)f->channels;
  bool narrow =
      planes * (double)product_of(f->in) < most && planes * (double)product_of(f->out) < most;
  for (int32_t i = 0; i < OMC_POOL_AXES; i++) {
    const double in = (double)f->in[i], out = (double)f->out[i];
    const double window = (double)f->kernel[i] * (double)f->dilation[i] + (double)f->stride[i];
    narrow = narrow && (in + 1) * (out + 1) < most;
    narrow = narrow && in + window + (out + 1) * (double)f->stride[i] < most;
  }
  return narrow;
}

/* What elements are counted in, and taps stored as. */
static const char *types_of(bool narrow, omc_dtype tap) {
#define TYPES(index, tap) "#define OMC_INDEX " #index "\n#define OMC_TAP " #tap "\n"
  if (tap == OMC_U8) return narrow ? TYPES(int32_t, uint8_t) : TYPES(int64_t, uint8_t);
  return narrow ? TYPES(int32_t, int32_t) : TYPES(int64_t, int32_t);
#undef TYPES
}

/* Threads are for so many neighbours each of planes of these sizes: channels where they are last.
 */
static void set_threads(params *p, int64_t planes, const int64_t *sizes, int64_t each, bool last) {
  omc_pool *g = &p->given;
  const int64_t threads[] = {sizes[0], sizes[1], last ? sizes[2] : omc_ceil_div(sizes[2], each)};
  const int64_t packs = last ? omc_ceil_div(g->channels, each) : 1;
  for (int32_t i = 0; i < OMC_POOL_AXES; i++) g->of[i] = omc_gpu_divisor_of(threads[i]);
  g->packs = omc_gpu_divisor_of(packs);
  g->n = planes * product_of(threads) * packs;
  p->grid = (omc_cuda_grid){omc_ceil_div(g->n, THREADS), THREADS, 0};
}

/* The kernel of one layout. */
static omc_status kernel_of(omc_cuda_device *device, const omc_node *node, bool narrow,
                            omc_dtype tap, const char *name, omc_cuda_kernel *out) {
  const char *const last = omc_is_channels_last(node) ? "_last" : "";
  return omc_cuda_kernel_of(device, "pool", omc_in(node, 0)->type.dtype, types_of(narrow, tap),
                            name, last, out);
}

static omc_status params_pool(omc_cuda_device *device, const omc_node *node, const omc_shape *x,
                              bool is_grad, const char *name, params *p) {
  omc_pool_form f;
  OMC_TRY(omc_pool_form_of(node, x, &f));
  const bool last = omc_is_channels_last(node);
  const omc_dtype dtype = omc_in(node, 0)->type.dtype;
  omc_pool *g = &p->given;
  for (int32_t i = 0; i < OMC_POOL_AXES; i++) g->axis[i] = axis_of(&f, i);
  g->divisor = f.divisor, g->adaptive = f.adaptive, g->with_pad = f.with_pad;
  g->channels = f.channels;
  set_threads(p, f.planes, is_grad ? f.in : f.out, is_grad || last ? pack_of(dtype) : 1, last);
  OMC_TRY(omc_cuda_sender_of(device, node, &g->sender));
  const omc_dtype tap = f.adaptive ? OMC_U8 : omc_pool_tap_dtype(&f);
  return kernel_of(device, node, is_narrow(&f), tap, name, &p->kernel);
}

static omc_status params_max(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                             void *p) {
  (void)arena;
  return params_pool(device, node, &omc_in(node, 0)->type.shape, false, "MaxPool", p);
}
static omc_status params_max_grad(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                  void *p) {
  (void)arena;
  return params_pool(device, node, &node->out[0]->type.shape, true, "MaxPoolGrad", p);
}
/* Whether a plane is one window; *size: what its average is divided by. */
static bool is_whole(const omc_node *node, const omc_shape *x, omc_pool_form *f, int64_t *size) {
  if (omc_pool_form_of(node, x, f) != OMC_OK) return false;
  *size = 1;
  for (int32_t i = 0; i < OMC_POOL_AXES; i++) {
    if (f->out[i] != 1) return false;
    const omc_pool_window w = omc_pool_window_at(f, i, 0);
    if (w.start > 0 || w.end < f->in[i]) return false;
    *size *= w.size;
  }
  if (f->divisor) *size = f->divisor;
  return product_of(f->in) > 0;
}

static omc_status params_average(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                 void *params_) {
  (void)arena;
  params *p = params_;
  omc_pool_form f;
  omc_reduce *r = &p->averaged;
  const omc_dtype dtype = omc_in(node, 0)->type.dtype;
  const omc_shape *x = &omc_in(node, 0)->type.shape;
  p->whole = is_whole(node, x, &f, &r->count);
  if (!p->whole) return params_pool(device, node, x, false, "AveragePool", p);
  const int64_t places = product_of(f.in);
  r->mean = true;
  r->lines.kept = omc_cuda_places(f.planes, places * f.channels);
  r->lines.along = omc_cuda_places(places, f.channels);
  if (f.channels != 1) omc_cuda_add_group(&r->lines.kept, f.channels, 1);
  const omc_cuda_team team = omc_cuda_team_of(&r->lines, omc_dtype_size(dtype), false);
  p->grid = team.grid;
  return omc_cuda_kernel_of(device, "reduce", dtype, "#define OMC_VERB omc_sum\n", "reduce",
                            team.name, &p->kernel);
}

static omc_status params_average_grad(omc_cuda_device *device, const omc_node *node,
                                      omc_arena *arena, void *params_) {
  (void)arena;
  omc_pool_form f;
  params *p = params_;
  omc_spread *s = &p->spread;
  const omc_dtype dtype = omc_in(node, 0)->type.dtype;
  const omc_shape *x = &node->out[0]->type.shape;
  p->whole = is_whole(node, x, &f, &s->count);
  if (!p->whole) return params_pool(device, node, x, true, "AveragePoolGrad", p);
  s->n = omc_shape_numel(x);
  s->channels = omc_gpu_divisor_of(f.channels);
  s->plane = omc_gpu_divisor_of(product_of(f.in) * f.channels);
  p->grid = (omc_cuda_grid){omc_ceil_div(s->n, THREADS * pack_of(dtype)), THREADS, 0};
  return kernel_of(device, node, s->n < INT32_MAX / 2, OMC_U8, "spread", &p->kernel);
}

static omc_status run_max(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_pool given = p->given;
  given.from = omc_cuda_in(args, 0);
  given.to = omc_cuda_out(args, 0);
  given.indices = omc_cuda_out(args, 1);
  given.taps = omc_cuda_out(args, 2);
  return omc_cuda_launch(&p->kernel, p->grid, &given, args->queue);
}

/* Inputs: dy, and taps of maxima. */
static omc_status run_grad(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_pool given = p->given;
  given.from = omc_cuda_in(args, 0);
  given.taps = omc_cuda_in(args, 1);
  given.to = omc_cuda_out(args, 0);
  return omc_cuda_launch(&p->kernel, p->grid, &given, args->queue);
}

static omc_status run_average(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_reduce averaged = p->averaged;
  if (!p->whole) return run_max(args);
  averaged.x = omc_cuda_in(args, 0);
  averaged.y = omc_cuda_out(args, 0);
  return omc_cuda_launch(&p->kernel, p->grid, &averaged, args->queue);
}

static omc_status run_average_grad(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_spread spread = p->spread;
  if (!p->whole) return run_grad(args);
  spread.from = omc_cuda_in(args, 0);
  spread.to = omc_cuda_out(args, 0);
  return omc_cuda_launch(&p->kernel, p->grid, &spread, args->queue);
}

#define POOL(name, id, run_)            \
  const omc_cuda_op omc_cuda_##name = { \
      .run = run_, .params_size = sizeof(params), .params = params_##id};
POOL(MaxPool, max, run_max)
POOL(MaxPoolGrad, max_grad, run_grad)
POOL(AveragePool, average, run_average)
POOL(AveragePoolGrad, average_grad, run_average_grad)
POOL(AdaptiveAvgPool, average, run_average)
POOL(AdaptiveAvgPoolGrad, average_grad, run_average_grad)
