/* Pooling: a thread for each element; an average of whole planes is a reduction of theirs. */
#include "cuda/ops/pool.h"

#include <string.h>

#include "base/int.h"
#include "cuda/ops/reduce.h"
#include "cuda/teams.h"
#include "ops/forms.h"
#include "ops/op.h"

enum { THREADS = 256 };

typedef struct params {
  omc_cuda_kernel kernel;
  omc_cuda_grid grid;
  omc_pool given;     /* but for addresses, as the next */
  omc_reduce reduced; /* whole planes, if there are any */
} params;

static int64_t product_of(const int64_t *dims) { return dims[0] * dims[1] * dims[2]; }

/* `by` are the sizes of what is written. */
static void set_places(omc_pool *p, const int64_t *by) {
  p->places = omc_cuda_places(p->planes, product_of(by));
  omc_cuda_add_group(&p->places, by[0], by[1] * by[2]);
  omc_cuda_add_group(&p->places, by[1], by[2]);
  omc_cuda_add_group(&p->places, by[2], 1);
}

static omc_status params_pool(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                              const omc_shape *x, bool is_grad, const char *name, params *p) {
  omc_pool_form f;
  OMC_TRY(omc_pool_form_of(node, x, &f));
  omc_pool *g = &p->given;
  g->planes = f.planes, g->divisor = f.divisor;
  g->adaptive = f.adaptive, g->with_pad = f.with_pad;
  memcpy(g->in, f.in, sizeof g->in);
  memcpy(g->out, f.out, sizeof g->out);
  memcpy(g->kernel, f.kernel, sizeof g->kernel);
  memcpy(g->stride, f.stride, sizeof g->stride);
  memcpy(g->dilation, f.dilation, sizeof g->dilation);
  memcpy(g->before, f.before, sizeof g->before);
  memcpy(g->after, f.after, sizeof g->after);
  set_places(g, is_grad ? g->in : g->out);
  OMC_TRY(omc_cuda_sender_of(device, node, &g->sender));
  const int64_t threads = omc_max(g->places.n, g->planes * product_of(g->out));
  p->grid = (omc_cuda_grid){omc_ceil_div(threads, THREADS), THREADS, 0};
  return omc_cuda_kernel_of(device, node, arena, "pool", omc_in(node, 0)->type.dtype, "", name, "",
                            &p->kernel);
}

static omc_status params_max(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                             void *p) {
  return params_pool(device, node, arena, &omc_in(node, 0)->type.shape, false, "MaxPool", p);
}
static omc_status params_max_grad(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                  void *p) {
  return params_pool(device, node, arena, &node->out[0]->type.shape, true, "MaxPoolGrad", p);
}
static omc_status params_average_grad(omc_cuda_device *device, const omc_node *node,
                                      omc_arena *arena, void *p) {
  return params_pool(device, node, arena, &node->out[0]->type.shape, true, "AveragePoolGrad", p);
}

/* Whether a plane is one window; *size: what its average is divided by. */
static bool is_whole(const omc_node *node, int64_t *size) {
  omc_pool_form f;
  if (omc_pool_form_of(node, &omc_in(node, 0)->type.shape, &f) != OMC_OK) return false;
  *size = 1;
  for (int32_t i = 0; i < OMC_POOL_AXES; i++) {
    if (f.out[i] != 1) return false;
    const omc_pool_window w = omc_pool_window_at(&f, i, 0);
    if (w.start > 0 || w.end < f.in[i]) return false;
    *size *= w.size;
  }
  if (f.divisor) *size = f.divisor;
  return product_of(f.in) > 0;
}

static omc_status params_average(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                 void *params_) {
  params *p = params_;
  omc_reduce *r = &p->reduced;
  const omc_dtype dtype = omc_in(node, 0)->type.dtype;
  const omc_shape *x = &omc_in(node, 0)->type.shape;
  if (!is_whole(node, &r->count))
    return params_pool(device, node, arena, x, false, "AveragePool", p);
  const int64_t planes = omc_shape_numel(&node->out[0]->type.shape), n = omc_shape_numel(x);
  r->mean = true;
  r->lines.kept = omc_cuda_places(planes, planes > 0 ? n / planes : 1);
  r->lines.along = omc_cuda_places(planes > 0 ? n / planes : 1, 1);
  const omc_cuda_team team = omc_cuda_team_of(&r->lines, omc_dtype_size(dtype), false);
  p->grid = team.grid;
  return omc_cuda_kernel_of(device, node, arena, "reduce", dtype, "#define OMC_VERB omc_sum\n",
                            "reduce", team.name, &p->kernel);
}

static omc_status run_max(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_pool given = p->given;
  given.from = omc_cuda_in(args, 0);
  given.to = omc_cuda_out(args, 0);
  given.indices = omc_cuda_out(args, 1);
  return omc_cuda_launch(&p->kernel, p->grid, &given, args->queue);
}

/* Inputs: dy, and indices of a maximum. */
static omc_status run_grad(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_pool given = p->given;
  given.from = omc_cuda_in(args, 0);
  given.indices = omc_cuda_in(args, 1);
  given.to = omc_cuda_out(args, 0);
  return omc_cuda_launch(&p->kernel, p->grid, &given, args->queue);
}

static omc_status run_average(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_reduce reduced = p->reduced;
  if (reduced.count == 0 || !reduced.mean) return run_max(args);
  reduced.x = omc_cuda_in(args, 0);
  reduced.y = omc_cuda_out(args, 0);
  return omc_cuda_launch(&p->kernel, p->grid, &reduced, args->queue);
}

#define POOL(name, id, run_)            \
  const omc_cuda_op omc_cuda_##name = { \
      .run = run_, .params_size = sizeof(params), .params = params_##id};
POOL(MaxPool, max, run_max)
POOL(MaxPoolGrad, max_grad, run_grad)
POOL(AveragePool, average, run_average)
POOL(AveragePoolGrad, average_grad, run_grad)
POOL(AdaptiveAvgPool, average, run_average)
POOL(AdaptiveAvgPoolGrad, average_grad, run_grad)
