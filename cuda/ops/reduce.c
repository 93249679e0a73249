/* Reductions over axes: lines along those that are reduced, in groups of neighbours. */
#include "cuda/ops/reduce.h"

#include "cuda/teams.h"
#include "ops/forms.h"
#include "ops/op.h"

typedef struct params {
  omc_cuda_kernel kernel, join; /* the parts */
  omc_cuda_grid grid, join_grid;
  omc_reduce given, joined; /* but for addresses */
  size_t partial_bytes;
} params;

typedef struct group {
  int64_t size, stride;
  bool reduced;
} group;

/* Of axes of more than one element that are kept or reduced alike, innermost first. */
static int32_t collapse(const omc_shape *x, const bool *reduced, group *groups) {
  int32_t n = 0;
  int64_t stride = 1;
  for (int32_t i = x->rank - 1; i >= 0; stride *= x->dims[i--]) {
    if (x->dims[i] == 1) continue;
    if (n > 0 && groups[n - 1].reduced == reduced[i])
      groups[n - 1].size *= x->dims[i];
    else
      groups[n++] = (group){x->dims[i], stride, reduced[i]};
  }
  return n;
}

static omc_gpu_places places_of(const group *groups, int32_t n, bool reduced) {
  omc_gpu_places places = {.n = 1};
  for (int32_t i = n - 1; i >= 0; i--)
    if (groups[i].reduced == reduced) omc_cuda_add_group(&places, groups[i].size, groups[i].stride);
  return places.rank ? places : omc_cuda_places(1, 1);
}

static omc_status lay_out(const omc_node *node, omc_gpu_lines *lines) {
  const omc_shape *x = &omc_in(node, 0)->type.shape;
  bool reduced[OMC_MAX_RANK];
  group groups[OMC_MAX_RANK];
  OMC_TRY(omc_reduced_axes(node, reduced));
  if (omc_shape_numel(x) == 0) { /* lines of nothing */
    lines->kept = omc_cuda_places(omc_shape_numel(&node->out[0]->type.shape), 0);
    lines->along = omc_cuda_places(0, 1);
    return OMC_OK;
  }
  const int32_t n = collapse(x, reduced, groups);
  lines->kept = places_of(groups, n, false);
  lines->along = places_of(groups, n, true);
  return OMC_OK;
}

static const char *verb_of(const omc_node *node) {
  const omc_op_id op = node->op;
  if (node->out[0]->type.dtype != omc_in(node, 0)->type.dtype)
    return "#define OMC_VERB omc_sum\n#define OMC_WIDENED\n";
  return op == OMC_OP_ReduceMax    ? "#define OMC_VERB omc_most\n"
         : op == OMC_OP_ReduceMin  ? "#define OMC_VERB omc_least\n"
         : op == OMC_OP_ReduceProd ? "#define OMC_VERB omc_product\n"
                                   : "#define OMC_VERB omc_sum\n";
}

static omc_status params_reduce(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                void *params_) {
  (void)arena;
  params *p = params_;
  const omc_dtype dtype = omc_in(node, 0)->type.dtype;
  const char *const verb = verb_of(node);
  if (dtype != OMC_I64 && !omc_dtype_is_float(dtype))
    OMC_NODE_FAIL(node, EUNSUPPORTED, "cuda has no kernel for %s", omc_dtype_get(dtype)->text);
  omc_gpu_lines *lines = &p->given.lines;
  OMC_TRY(lay_out(node, lines));
  p->given.mean = node->op == OMC_OP_ReduceMean;
  p->given.count = lines->along.n;
  const omc_cuda_team team = omc_cuda_team_of(lines, omc_dtype_size(dtype), true);
  p->grid = team.grid;
  OMC_TRY(omc_cuda_kernel_of(device, "reduce", dtype, verb, "reduce", team.name, &p->kernel));
  if (lines->parts == 1) return OMC_OK;
  const int64_t n = lines->kept.n;
  p->partial_bytes = (size_t)(lines->parts * n) * omc_dtype_size(omc_dtype_acc(dtype));
  p->joined = p->given;
  p->joined.lines =
      (omc_gpu_lines){.kept = omc_cuda_places(n, 1), .along = omc_cuda_places(lines->parts, n)};
  const omc_cuda_team joining = omc_cuda_columns_of(&p->joined.lines);
  p->join_grid = joining.grid;
  return omc_cuda_kernel_of(device, "reduce", dtype, verb, "join", joining.name, &p->join);
}

static size_t reduce_workspace(const void *params_) {
  return ((const params *)params_)->partial_bytes;
}

static omc_status run_reduce(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_reduce given = p->given, joined = p->joined;
  given.x = args->in[0].data;
  given.y = joined.y = args->out[0].data;
  given.partial = args->workspace;
  joined.x = args->workspace;
  OMC_TRY(omc_cuda_launch(&p->kernel, p->grid, &given, args->queue));
  return given.lines.parts > 1 ? omc_cuda_launch(&p->join, p->join_grid, &joined, args->queue)
                               : OMC_OK;
}

#define REDUCE(name)                                                  \
  const omc_cuda_op omc_cuda_##name = {.run = run_reduce,             \
                                       .params_size = sizeof(params), \
                                       .params = params_reduce,       \
                                       .workspace = reduce_workspace};
REDUCE(ReduceSum)
REDUCE(ReduceMean)
REDUCE(ReduceMax)
REDUCE(ReduceMin)
REDUCE(ReduceProd)
