/* Losses row by row, and what they are reduced to: in parts, where there are many rows. */
#include <stdio.h>

#include "base/int.h"
#include "cuda/ops/losses.h"
#include "cuda/teams.h"
#include "ops/forms.h"
#include "ops/op.h"

/* ---- launches ---- */

omc_status omc_cuda_loss_of(omc_cuda_device *device, const omc_node *node,
                            const omc_loss_form *form, omc_dtype dtype, omc_dtype weights,
                            int64_t sample, const char *name, bool by_lines, omc_cuda_loss *out) {
  const int64_t rows = form->outer * form->inner;
  char defines[64] = "";
  out->given = (omc_loss){.classes = omc_cuda_places(form->classes, 1),
                          .ignore_index = form->ignore_index,
                          .hard = 1 - form->smoothing,
                          .soft = form->smoothing / (double)form->classes,
                          .by_row = form->reduction == OMC_LOSS_NONE,
                          .is_mean = form->reduction == OMC_LOSS_MEAN};
  OMC_TRY(omc_cuda_sender_of(device, node, &out->given.sender));
  omc_gpu_lines *lines = &out->given.lines;
  lines->kept = omc_cuda_places(form->outer, sample);
  if (form->inner != 1) omc_cuda_add_group(&lines->kept, form->inner, 1);
  lines->along = omc_cuda_places(form->classes, form->inner);
  const omc_cuda_team team =
      by_lines ? omc_cuda_team_of(lines, omc_dtype_size(dtype), false)
               : (omc_cuda_team){"", {omc_ceil_div(rows, OMC_LINE_THREADS), OMC_LINE_THREADS, 0}};
  out->grid = team.grid;
  if (weights != dtype)
    snprintf(defines, sizeof defines, "#define OMC_WEIGHTS %s\n", omc_cuda_storage(weights));
  return omc_cuda_kernel_of(device, "loss", dtype, defines, name, team.name, &out->kernel);
}

omc_status omc_cuda_loss_sums_of(omc_cuda_device *device, const omc_loss_form *form,
                                 omc_dtype dtype, omc_cuda_loss_sums *out) {
  out->reduced = (omc_loss_total){.classes = form->classes,
                                  .ignore_index = form->ignore_index,
                                  .is_mean = form->reduction == OMC_LOSS_MEAN};
  out->reduced.lines.kept = omc_cuda_places(1, 0);
  out->reduced.lines.along = omc_cuda_places(form->outer * form->inner, 1);
  out->rows_grid = omc_cuda_block_of(&out->reduced.lines, omc_dtype_size(dtype), true).grid;
  out->joined = out->reduced;
  out->joined.lines.along = omc_cuda_places(out->reduced.lines.parts, 1);
  out->parts_grid = omc_cuda_block_of(&out->joined.lines, omc_dtype_size(dtype), false).grid;
  OMC_TRY(omc_cuda_kernel_of(device, "loss", dtype, "", "sum_rows", "_block", &out->rows));
  return omc_cuda_kernel_of(device, "loss", dtype, "", "sum_parts", "_block", &out->parts);
}

size_t omc_cuda_loss_sums_bytes(const omc_cuda_loss_sums *sums) {
  return 2 * (size_t)sums->reduced.lines.parts * sizeof(double);
}

omc_status omc_cuda_loss_sums_run(omc_cuda_loss_sums *sums, const omc_loss_total *of, void *queue) {
  omc_loss_total reduced = sums->reduced, joined;
  reduced.target = of->target, reduced.weight = of->weight;
  reduced.rows = of->rows, reduced.partial = of->partial;
  reduced.out = of->out, reduced.total = of->total;
  OMC_TRY(omc_cuda_launch(&sums->rows, sums->rows_grid, &reduced, queue));
  if (reduced.lines.parts == 1) return OMC_OK;
  joined = reduced;
  joined.lines = sums->joined.lines;
  return omc_cuda_launch(&sums->parts, sums->parts_grid, &joined, queue);
}

/* ---- plan time ---- */

typedef struct params {
  omc_cuda_loss loss;
  omc_cuda_loss_sums sums; /* of a forward, as the next */
  size_t rows_bytes;       /* of scratch memory, before the parts */
} params;

static omc_status params_of(omc_cuda_device *device, const omc_node *node,
                            const omc_loss_form *form, bool by_lines, params *p) {
  const omc_dtype dtype = omc_node_dtype(node);
  return omc_cuda_loss_of(device, node, form, dtype, dtype, form->classes * form->inner,
                          omc_op_name(node->op), by_lines, &p->loss);
}

static omc_status params_forward(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                 void *params_) {
  (void)arena;
  params *p = params_;
  omc_loss_form form;
  omc_shape shape;
  const omc_dtype dtype = omc_in(node, 0)->type.dtype;
  OMC_TRY(omc_loss_form_of(node, &form, &shape));
  OMC_TRY(params_of(device, node, &form, node->op == OMC_OP_CrossEntropy, p));
  p->rows_bytes = (size_t)omc_ceil_div(form.outer * form.inner, 2) * 2 *
                  omc_dtype_size(omc_dtype_acc(dtype)); /* whole doubles */
  return omc_cuda_loss_sums_of(device, &form, dtype, &p->sums);
}

static size_t forward_workspace(const void *params_) {
  const params *p = params_;
  return p->rows_bytes + omc_cuda_loss_sums_bytes(&p->sums);
}

static omc_status params_cross_entropy_grad(omc_cuda_device *device, const omc_node *node,
                                            omc_arena *arena, void *params_) {
  (void)arena;
  omc_loss_form form;
  OMC_TRY(omc_cross_entropy_grad_form_of(node, &form));
  return params_of(device, node, &form, true, params_);
}

static omc_status params_nll_grad(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                  void *params_) {
  (void)arena;
  omc_loss_form form;
  omc_type of;
  OMC_TRY(omc_nll_grad_form_of(node, &form, &of));
  return params_of(device, node, &form, true, params_);
}

/* ---- run time ---- */

/* Reduces the losses of rows, which are there unless they are all that is wanted. */
static omc_status reduce_rows(const omc_kernel_args *args, params *p, void *total) {
  const bool by_row = p->loss.given.by_row;
  if (by_row && !total) return OMC_OK;
  const omc_loss_total of = {.target = omc_cuda_in(args, 1),
                             .weight = omc_cuda_in(args, 2),
                             .rows = args->workspace,
                             .partial = (void *)((char *)args->workspace + p->rows_bytes),
                             .out = by_row ? NULL : omc_cuda_out(args, 0),
                             .total = total};
  return omc_cuda_loss_sums_run(&p->sums, &of, args->queue);
}

/* Inputs: logits, target, weight?. Outputs: loss, top, log_sum, total; the two in the middle are
 * those of CrossEntropy alone. */
static omc_status run_forward(const omc_kernel_args *args, bool keeps) {
  params *p = (params *)(uintptr_t)args->params;
  omc_loss given = p->loss.given;
  given.logits = omc_cuda_in(args, 0);
  given.target = omc_cuda_in(args, 1);
  given.weight = omc_cuda_in(args, 2);
  given.rows = args->workspace;
  given.out = omc_cuda_out(args, 0);
  given.top = keeps ? omc_cuda_out(args, 1) : NULL;
  given.log_sum = keeps ? omc_cuda_out(args, 2) : NULL;
  OMC_TRY(omc_cuda_launch(&p->loss.kernel, p->loss.grid, &given, args->queue));
  return reduce_rows(args, p, omc_cuda_out(args, keeps ? 3 : 1));
}

static omc_status run_cross_entropy(const omc_kernel_args *args) { return run_forward(args, true); }
static omc_status run_nll(const omc_kernel_args *args) { return run_forward(args, false); }

/* Inputs: dloss, logits, target, top, log_sum, total, weight?. */
static omc_status run_cross_entropy_grad(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_loss given = p->loss.given;
  given.dloss = omc_cuda_in(args, 0);
  given.logits = omc_cuda_in(args, 1);
  given.target = omc_cuda_in(args, 2);
  given.top = omc_cuda_in(args, 3);
  given.log_sum = omc_cuda_in(args, 4);
  given.total = omc_cuda_in(args, 5);
  given.weight = omc_cuda_in(args, 6);
  given.dlogits = omc_cuda_out(args, 0);
  return omc_cuda_launch(&p->loss.kernel, p->loss.grid, &given, args->queue);
}

/* Inputs: dloss, target, total, weight?. */
static omc_status run_nll_grad(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_loss given = p->loss.given;
  given.dloss = omc_cuda_in(args, 0);
  given.target = omc_cuda_in(args, 1);
  given.total = omc_cuda_in(args, 2);
  given.weight = omc_cuda_in(args, 3);
  given.dlogits = omc_cuda_out(args, 0);
  return omc_cuda_launch(&p->loss.kernel, p->loss.grid, &given, args->queue);
}

#define LOSS(name, ...) \
  const omc_cuda_op omc_cuda_##name = {.params_size = sizeof(params), __VA_ARGS__};
LOSS(CrossEntropy, .params = params_forward, .run = run_cross_entropy,
     .workspace = forward_workspace)
LOSS(CrossEntropyGrad, .params = params_cross_entropy_grad, .run = run_cross_entropy_grad)
LOSS(NegativeLogLikelihoodLoss, .params = params_forward, .run = run_nll,
     .workspace = forward_workspace)
LOSS(NegativeLogLikelihoodLossGrad, .params = params_nll_grad, .run = run_nll_grad)

/* ---- probabilities ---- */

typedef struct unit_params {
  omc_cuda_kernel kernel;
  omc_unit_interval given;
} unit_params;

static omc_status params_unit(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                              void *params_) {
  (void)arena;
  unit_params *p = params_;
  p->given.n = omc_shape_numel(&omc_in(node, 0)->type.shape);
  OMC_TRY(omc_cuda_sender_of(device, node, &p->given.sender));
  return omc_cuda_kernel_of(device, "loss", omc_in(node, 0)->type.dtype, "", omc_op_name(node->op),
                            "", &p->kernel);
}

static omc_status run_unit(const omc_kernel_args *args) {
  unit_params *p = (unit_params *)(uintptr_t)args->params;
  omc_unit_interval given = p->given;
  given.x = omc_cuda_in(args, 0);
  given.y = omc_cuda_out(args, 0);
  const omc_cuda_grid grid = {omc_ceil_div(given.n, OMC_LINE_THREADS), OMC_LINE_THREADS, 0};
  return omc_cuda_launch(&p->kernel, grid, &given, args->queue);
}

const omc_cuda_op omc_cuda_UnitInterval = {
    .params_size = sizeof(unit_params), .params = params_unit, .run = run_unit};
