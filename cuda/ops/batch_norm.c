/* BatchNorm in training and its gradient: three launches, of parts of channels, of channels, of
 * elements. */
#include "cuda/ops/batch_norm.h"

#include <stdio.h>

#include "base/int.h"
#include "cuda/teams.h"
#include "ops/forms.h"
#include "ops/op.h"

enum { THREADS = OMC_LINE_THREADS, PACK_BYTES = 16 }; /* of blocks for packs, and of one */

typedef struct params {
  omc_cuda_kernel sums, join, elements;
  omc_cuda_grid sums_grid, join_grid, elements_grid;
  omc_gpu_lines sums_lines, join_lines, elements_lines;
  omc_batch_norm given; /* but for lines and addresses */
  size_t wide;          /* bytes of what is computed in */
} params;

static omc_status kernel_of(omc_cuda_device *device, const omc_node *node, const char *of,
                            omc_cuda_team team, omc_cuda_kernel *out, omc_cuda_grid *grid) {
  char name[64];
  snprintf(name, sizeof name, "%s%s", of, omc_op_name(node->op));
  *grid = team.grid;
  return omc_cuda_kernel_of(device, "batch_norm", omc_in(node, 0)->type.dtype, "", name, team.name,
                            out);
}

static omc_status params_channels(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                  void *params_) {
  (void)arena;
  params *p = params_;
  omc_shape shape;
  omc_batch_form form;
  const omc_dtype dtype = omc_in(node, 0)->type.dtype;
  const size_t bytes = omc_dtype_size(dtype);
  OMC_TRY(omc_batch_form_of(node, 0, &shape, &form)); /* dy and x have one shape */
  const int64_t batch = form.batch, channels = form.channels, inner = form.inner;
  const bool across = inner == 1;
  p->wide = omc_dtype_size(omc_dtype_acc(dtype));
  p->sums_lines.kept = omc_cuda_places(channels, inner);
  p->sums_lines.along = omc_cuda_places(batch, channels * inner);
  if (!across) omc_cuda_add_group(&p->sums_lines.along, inner, 1);
  omc_cuda_team team = across ? omc_cuda_columns_by_parts(&p->sums_lines, bytes)
                              : omc_cuda_team_of(&p->sums_lines, bytes, true);
  OMC_TRY(kernel_of(device, node, "sums_of_", team, &p->sums, &p->sums_grid));
  p->join_lines.kept = omc_cuda_places(channels, 1);
  p->join_lines.along = omc_cuda_places(p->sums_lines.parts, channels);
  OMC_TRY(kernel_of(device, node, "join_", omc_cuda_columns_of(&p->join_lines), &p->join,
                    &p->join_grid));
  const int64_t n = batch * channels * inner, pack = PACK_BYTES / (int64_t)bytes;
  if (inner >= pack) {
    team = (omc_cuda_team){"_packs", {omc_ceil_div(n, THREADS * pack), THREADS, 0}};
  } else if (across) { /* parts of channels again */
    p->elements_lines.kept = omc_cuda_places(channels, 1);
    p->elements_lines.along = omc_cuda_places(batch, channels);
    team = omc_cuda_columns_by_parts(&p->elements_lines, bytes);
  } else {
    p->elements_lines.kept = omc_cuda_places(batch * channels, inner);
    p->elements_lines.along = omc_cuda_places(inner, 1);
    team = omc_cuda_columns_of(&p->elements_lines);
  }
  p->given = (omc_batch_norm){.channels = channels,
                              .n = n,
                              .inner = omc_gpu_divisor_of(inner),
                              .by_channels = omc_gpu_divisor_of(channels),
                              .parts = p->sums_lines.parts,
                              .part = p->sums_lines.step,
                              .count = (double)(batch * inner),
                              .epsilon = form.epsilon,
                              .momentum = form.momentum,
                              .relu = form.relu};
  return kernel_of(device, node, "", team, &p->elements, &p->elements_grid);
}

/* Of partial sums, and of two means of each channel. */
static size_t channels_workspace(const void *params_) {
  const params *p = params_;
  return (size_t)(2 * (p->given.parts + 1) * p->given.channels) * p->wide;
}

static omc_channel_values values_of(const params *p, const omc_tensor *t) {
  if (!t->type) return (omc_channel_values){0};
  return (omc_channel_values){t->data, omc_dtype_size(t->type->dtype) == p->wide};
}

static omc_status run_steps(params *p, omc_batch_norm *given, void *queue) {
  given->lines = p->sums_lines;
  OMC_TRY(omc_cuda_launch(&p->sums, p->sums_grid, given, queue));
  given->lines = p->join_lines;
  OMC_TRY(omc_cuda_launch(&p->join, p->join_grid, given, queue));
  given->lines = p->elements_lines;
  return omc_cuda_launch(&p->elements, p->elements_grid, given, queue);
}

static omc_channel_values input(const omc_kernel_args *args, const params *p, uint32_t i) {
  return i < args->n_in ? values_of(p, &args->in[i]) : (omc_channel_values){0};
}
static omc_channel_values output(const omc_kernel_args *args, const params *p, uint32_t i) {
  return i < args->n_out ? values_of(p, &args->out[i]) : (omc_channel_values){0};
}

static omc_status run_forward(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_batch_norm given = p->given;
  given.x = omc_cuda_in(args, 0);
  given.gamma = input(args, p, 1);
  given.beta = input(args, p, 2);
  given.running_mean = input(args, p, 3);
  given.running_var = input(args, p, 4);
  given.out = omc_cuda_out(args, 0);
  given.mean = omc_cuda_out(args, 1);
  given.rstd = omc_cuda_out(args, 2);
  given.moved_mean = output(args, p, 3);
  given.moved_var = output(args, p, 4);
  given.added = omc_cuda_in(args, 5);
  given.shift = omc_cuda_out(args, 5);
  given.partial = args->workspace;
  return run_steps(p, &given, args->queue);
}

/* Inputs: dy, x, gamma?, mean, rstd, shift?, which is what beta was. */
static omc_status run_grad(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_batch_norm given = p->given;
  char *const means =
      (char *)args->workspace + (size_t)(2 * given.parts * given.channels) * p->wide;
  given.dy = omc_cuda_in(args, 0);
  given.x = omc_cuda_in(args, 1);
  given.gamma = input(args, p, 2);
  given.mean = omc_cuda_in(args, 3);
  given.rstd = omc_cuda_in(args, 4);
  given.beta = input(args, p, 5);
  given.out = omc_cuda_out(args, 0);
  given.dgamma = omc_cuda_out(args, 1);
  given.dbeta = omc_cuda_out(args, 2);
  given.partial = args->workspace;
  given.mean_dy = means;
  given.mean_dyx = means + (size_t)given.channels * p->wide;
  return run_steps(p, &given, args->queue);
}

#define NORM(name, run_)                                              \
  const omc_cuda_op omc_cuda_##name = {.run = run_,                   \
                                       .params_size = sizeof(params), \
                                       .params = params_channels,     \
                                       .workspace = channels_workspace};
NORM(BatchNorm, run_forward)
NORM(BatchNormGrad, run_grad)
