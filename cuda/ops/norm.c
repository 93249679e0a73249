/* LayerNormalization and RmsNorm by rows, and their gradients: those of the parameters are sums
 * over rows, by columns, or where rows stay in registers of the warps that go through them.
 * GroupNorm by groups of channels, which are rows: the parameters' gradients are sums over samples
 * of those over channels. */
#include "cuda/ops/norm.h"

#include <stdio.h>

#include "cuda/teams.h"
#include "ops/forms.h"
#include "ops/op.h"

enum { NAME_BYTES = 64 };

typedef struct params {
  bool centred, at_once;
  omc_cuda_kernel kernel, sums, join; /* the two of a gradient; at once: no sums apart */
  omc_cuda_grid grid, sums_grid, join_grid;
  omc_layer given; /* but for addresses, as the next two */
  omc_layer_sums summed, joined;
  size_t partial_bytes;
} params;

static const char *storage_of(const omc_node *node, uint32_t i) {
  const omc_value *v = omc_in(node, i);
  return v ? omc_cuda_storage(v->type.dtype) : "storage_t";
}

static bool is_rows_grad(const omc_node *node) {
  return node->op == OMC_OP_LayerNormGrad || node->op == OMC_OP_RmsNormGrad;
}

static omc_status kernel_of(omc_cuda_device *device, const omc_node *node, const char *of,
                            const char *team, omc_cuda_kernel *out) {
  const bool is_grad = is_rows_grad(node) || node->op == OMC_OP_GroupNormGrad;
  const omc_dtype y = is_grad ? omc_in(node, 0)->type.dtype : node->out[0]->type.dtype;
  char defines[3 * NAME_BYTES], name[NAME_BYTES];
  snprintf(defines, sizeof defines, "#define OMC_GAMMA %s\n#define OMC_BETA %s\n#define OMC_Y %s\n",
           storage_of(node, is_grad ? 2 : 1), is_grad ? "storage_t" : storage_of(node, 2),
           omc_cuda_storage(y));
  snprintf(name, sizeof name, "%s%s", of, omc_op_name(node->op));
  return omc_cuda_kernel_of(device, "norm", omc_node_dtype(node), defines, name, team, out);
}

static omc_status set_rows(omc_cuda_device *device, const omc_node *node, int64_t rows, int64_t n,
                           params *p) {
  p->given.lines.kept = omc_cuda_places(rows, n);
  p->given.lines.along = omc_cuda_places(n, 1);
  const size_t bytes = omc_dtype_size(omc_node_dtype(node));
  omc_cuda_team team = {0};
  if (is_rows_grad(node) && (omc_out(node, 1) || omc_out(node, 2)))
    team = omc_cuda_walk_of(&p->given.lines, bytes);
  p->at_once = team.name != NULL;
  if (!p->at_once) team = omc_cuda_team_of(&p->given.lines, bytes, false);
  p->grid = team.grid;
  return kernel_of(device, node, "", team.name, &p->kernel);
}

static omc_status params_rows(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                              void *params_) {
  (void)arena;
  params *p = params_;
  omc_shape shape, stats;
  omc_layer_form form;
  OMC_TRY(omc_layer_form_of(node, 0, &shape, &stats, &form)); /* dy and x have one shape */
  p->centred = node->op == OMC_OP_LayerNormalization || node->op == OMC_OP_LayerNormGrad;
  p->given.epsilon = form.epsilon;
  return set_rows(device, node, form.rows, form.n, p);
}

static omc_status params_groups(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                void *params_) {
  (void)arena;
  params *p = params_;
  omc_shape shape, stats;
  omc_group_form form;
  OMC_TRY(omc_group_form_of(node, 0, &shape, &stats, &form)); /* dy and x have one shape */
  p->centred = true;
  p->given.epsilon = form.epsilon;
  p->given.groups = p->summed.groups = form.groups;
  p->given.channels = p->summed.channels = form.channels;
  p->given.inner = omc_gpu_divisor_of(form.inner);
  return set_rows(device, node, form.batch * form.groups, form.channels * form.inner, p);
}

/* Sums of so many parts, or samples, of which `partial` has room for those of n parameters. */
static omc_status set_join(omc_cuda_device *device, const omc_node *node, int64_t parts, int64_t n,
                           params *p) {
  p->partial_bytes = (size_t)(parts * 2 * n) * omc_dtype_size(omc_dtype_acc(omc_node_dtype(node)));
  p->joined.lines.kept = omc_cuda_places(n, 1);
  p->joined.lines.along = omc_cuda_places(parts, 2 * n);
  const omc_cuda_team joining = omc_cuda_columns_of(&p->joined.lines);
  p->join_grid = joining.grid;
  return kernel_of(device, node, "join_sums_of_", joining.name, &p->join);
}

static omc_status params_grad(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                              void *params_) {
  params *p = params_;
  OMC_TRY(params_rows(device, node, arena, params_));
  const int64_t rows = p->given.lines.kept.n, n = p->given.lines.along.n;
  if (p->at_once)
    return p->grid.blocks == 1 ? OMC_OK : set_join(device, node, p->grid.blocks, n, p);
  p->summed.lines.kept = omc_cuda_places(n, 1);
  p->summed.lines.along = omc_cuda_places(rows, n);
  const size_t bytes = omc_dtype_size(omc_node_dtype(node));
  const omc_cuda_team team = omc_cuda_columns_by_parts(&p->summed.lines, bytes);
  p->sums_grid = team.grid;
  OMC_TRY(kernel_of(device, node, "sums_of_", team.name, &p->sums));
  const int64_t parts = p->summed.lines.parts;
  return parts == 1 ? OMC_OK : set_join(device, node, parts, n, p);
}

static omc_status params_groups_grad(omc_cuda_device *device, const omc_node *node,
                                     omc_arena *arena, void *params_) {
  params *p = params_;
  OMC_TRY(params_groups(device, node, arena, params_));
  const int64_t channels = p->given.groups * p->given.channels, inner = p->given.inner.by;
  const int64_t samples = omc_in(node, 0)->type.shape.dims[0];
  p->summed.lines.kept = omc_cuda_places(samples * channels, inner);
  p->summed.lines.along = omc_cuda_places(inner, 1);
  const size_t bytes = omc_dtype_size(omc_node_dtype(node));
  const omc_cuda_team team = omc_cuda_team_of(&p->summed.lines, bytes, false);
  p->sums_grid = team.grid;
  OMC_TRY(kernel_of(device, node, "sums_of_", team.name, &p->sums));
  return set_join(device, node, samples, channels, p);
}

static size_t grad_workspace(const void *params_) {
  return ((const params *)params_)->partial_bytes;
}

static omc_status run_rows(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_layer given = p->given;
  given.x = omc_cuda_in(args, 0);
  given.gamma = omc_cuda_in(args, 1);
  given.beta = omc_cuda_in(args, 2);
  given.out = omc_cuda_out(args, 0);
  given.mean = p->centred ? omc_cuda_out(args, 1) : NULL;
  given.rstd = omc_cuda_out(args, p->centred ? 2 : 1);
  return omc_cuda_launch(&p->kernel, p->grid, &given, args->queue);
}

/* Inputs: dy, x, gamma?, mean if centred, rstd. Sums apart come first: dx may be written over what
 * they are of. */
static omc_status run_grad(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_layer_grads given = {p->given, p->summed};
  omc_layer_sums joined = p->joined;
  given.rows.dy = given.sums.dy = omc_cuda_in(args, 0);
  given.rows.x = given.sums.x = omc_cuda_in(args, 1);
  given.rows.gamma = omc_cuda_in(args, 2);
  given.rows.mean = omc_cuda_in(args, 3);
  given.rows.rstd = omc_cuda_in(args, p->centred ? 4 : 3);
  given.rows.out = omc_cuda_out(args, 0);
  given.sums.mean = given.rows.mean;
  given.sums.rstd = given.rows.rstd;
  given.sums.dgamma = joined.dgamma = omc_cuda_out(args, 1);
  given.sums.dbeta = joined.dbeta = omc_cuda_out(args, 2);
  given.sums.partial = joined.partial = args->workspace;
  if (p->at_once) {
    OMC_TRY(omc_cuda_launch(&p->kernel, p->grid, &given, args->queue));
    return omc_cuda_launch(&p->join, p->join_grid, &joined, args->queue);
  }
  if (joined.dgamma || joined.dbeta) {
    OMC_TRY(omc_cuda_launch(&p->sums, p->sums_grid, &given.sums, args->queue));
    OMC_TRY(omc_cuda_launch(&p->join, p->join_grid, &joined, args->queue));
  }
  return omc_cuda_launch(&p->kernel, p->grid, &given.rows, args->queue);
}

#define NORM(name, ...) \
  const omc_cuda_op omc_cuda_##name = {.params_size = sizeof(params), __VA_ARGS__};
NORM(LayerNormalization, .params = params_rows, .run = run_rows)
NORM(RmsNorm, .params = params_rows, .run = run_rows)
NORM(GroupNorm, .params = params_groups, .run = run_rows)
NORM(LayerNormGrad, .params = params_grad, .run = run_grad, .workspace = grad_workspace)
NORM(RmsNormGrad, .params = params_grad, .run = run_grad, .workspace = grad_workspace)
NORM(GroupNormGrad, .params = params_groups_grad, .run = run_grad, .workspace = grad_workspace)
