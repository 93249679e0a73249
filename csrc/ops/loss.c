/* Losses of [N, C, d...] against class indices [N, d...], and their gradients: CrossEntropy of
 * logits, NegativeLogLikelihoodLoss of log probabilities, LinearCrossEntropy of logits that are
 * never there as a whole. And UnitInterval, which sees to it that probabilities, and what they are
 * compared with, are some.
 *
 * With w the class weights (1 if absent), t the target of a row, e the label smoothing and log p =
 * x - top - log_sum, a row's loss is (1-e) * w[t] * -log p[t] + e/C * sum over c of w[c] * -log
 * p[c]. "mean" divides the sum by the w[t] of all rows. Rows whose target is ignore_index do not
 * count. Of the forward only top, the largest of a row, and log_sum are kept: apart, since their
 * sum would lose what is small beside large logits. */
#include <string.h>

#include "graph/schema.h"
#include "ops/forms.h"
#include "ops/infer.h"
#include "ops/op.h"

static const char *const reduction_names[] = {"none", "mean", "sum"}; /* by omc_loss_reduction */

static int32_t class_axis(const omc_shape *logits) { return logits->rank > 1 ? 1 : 0; }

static void read_attributes(const omc_node *node, omc_loss_form *p) {
  p->ignore_index = omc_node_int(node, "ignore_index");
  if (omc_schema_find(node->op, "label_smoothing"))
    p->smoothing = omc_node_float(node, "label_smoothing");
  const char *reduction = omc_node_string(node, "reduction");
  while (strcmp(reduction, reduction_names[p->reduction]) != 0) p->reduction++;
}

/* Reads the attributes and checks that logits, target and weight, if there is one, go together;
 * *rows is the shape of target. */
static omc_status check(const omc_node *node, const omc_type *logits, uint32_t target,
                        uint32_t weight, omc_loss_form *p, omc_shape *rows) {
  const omc_shape *x = &logits->shape;
  if (x->rank == 0) OMC_NODE_FAIL(node, ESHAPE, "logits have no class axis");
  const int32_t axis = class_axis(x);
  *rows = (omc_shape){.rank = 0};
  for (int32_t i = 0; i < x->rank; i++)
    if (i != axis) rows->dims[rows->rank++] = x->dims[i];
  OMC_TRY(omc_need_type(node, target, "target", OMC_I64, rows));
  OMC_TRY(omc_need_type(node, weight, "weight", logits->dtype, &(omc_shape){1, {x->dims[axis]}}));
  *p = (omc_loss_form){.outer = axis ? x->dims[0] : 1,
                       .classes = x->dims[axis],
                       .inner = omc_shape_span(x, axis + 1, x->rank)};
  read_attributes(node, p);
  return OMC_OK;
}

static const omc_shape scalar = {.rank = 0};

static const omc_shape *result_shape(const omc_loss_form *p, const omc_shape *rows) {
  return p->reduction == OMC_LOSS_NONE ? rows : &scalar;
}

omc_status omc_loss_form_of(const omc_node *node, omc_loss_form *p, omc_shape *rows) {
  OMC_TRY(omc_need_float(node, 0));
  return check(node, &omc_in(node, 0)->type, 1, 2, p, rows);
}

static omc_status infer_forward(omc_node *node) {
  omc_loss_form p;
  omc_shape rows;
  OMC_TRY(omc_loss_form_of(node, &p, &rows));
  const omc_dtype dtype = omc_in(node, 0)->type.dtype;
  omc_set_type(node, 0, dtype, result_shape(&p, &rows));
  omc_set_type(node, 1, omc_dtype_acc(dtype), &rows);
  omc_set_type(node, 2, omc_dtype_acc(dtype), &rows);
  omc_set_type(node, 3, omc_dtype_acc(dtype), &scalar);
  return OMC_OK;
}

static omc_status grad_cross_entropy(omc_grad *g) {
  const omc_node *node = g->node;
  OMC_TRY(omc_need_saved(g, 4));
  if (!g->grad_out[0]) return OMC_OK;
  omc_value *in[] = {g->grad_out[0],   omc_in(node, 0),  omc_in(node, 1), omc_out(node, 1),
                     omc_out(node, 2), omc_out(node, 3), omc_in(node, 2)};
  omc_build(&g->b, OMC_OP_CrossEntropyGrad, in[6] ? 7 : 6, in, 0, node->n_attr, node->attr, 1,
            &g->grad_in[0]);
  return g->b.status;
}

omc_status omc_cross_entropy_grad_form_of(const omc_node *node, omc_loss_form *p) {
  OMC_TRY(omc_need_float(node, 1));
  const omc_type *logits = &omc_in(node, 1)->type;
  omc_shape rows;
  OMC_TRY(check(node, logits, 2, 6, p, &rows));
  const omc_dtype wide = omc_dtype_acc(logits->dtype);
  OMC_TRY(omc_need_type(node, 0, "dloss", logits->dtype, result_shape(p, &rows)));
  OMC_TRY(omc_need_type(node, 3, "top", wide, &rows));
  OMC_TRY(omc_need_type(node, 4, "log_sum", wide, &rows));
  return omc_need_type(node, 5, "total", wide, &scalar);
}

static omc_status infer_backward(omc_node *node) {
  omc_loss_form p;
  OMC_TRY(omc_cross_entropy_grad_form_of(node, &p));
  omc_set_type(node, 0, omc_in(node, 1)->type.dtype, &omc_in(node, 1)->type.shape);
  return OMC_OK;
}

/* ---- of logits that are not kept ----
 *
 * Inputs: x [n, k], w [classes, k], target [n], bias [classes]?, weight [classes]?. Outputs: the
 * loss, and its gradients for x, w and bias. The reduced loss scales them all alike, so they are
 * computed where the logits are, a block of rows at a time, and no logits outlive their block; the
 * backward only multiplies. Rows that do not count are left out of all products. */

omc_status omc_linear_loss_form_of(const omc_node *node, omc_linear_loss_form *p) {
  OMC_TRY(omc_need_float(node, 0));
  const omc_type *x = &omc_in(node, 0)->type, *w = &omc_in(node, 1)->type;
  if (x->shape.rank != 2) OMC_NODE_FAIL(node, ESHAPE, "x has %d dims, not 2", (int)x->shape.rank);
  if (w->shape.rank != 2) OMC_NODE_FAIL(node, ESHAPE, "w has %d dims, not 2", (int)w->shape.rank);
  const int64_t n = x->shape.dims[0], k = x->shape.dims[1], classes = w->shape.dims[0];
  const omc_shape rows = {1, {n}}, columns = {1, {classes}};
  OMC_TRY(omc_need_type(node, 1, "w", x->dtype, &(omc_shape){2, {classes, k}}));
  OMC_TRY(omc_need_type(node, 2, "target", OMC_I64, &rows));
  OMC_TRY(omc_need_type(node, 3, "bias", x->dtype, &columns));
  /* Class weights may be as wide as the logits are computed. */
  const bool wide = omc_in(node, 4) && omc_in(node, 4)->type.dtype != x->dtype;
  OMC_TRY(omc_need_type(node, 4, "weight", wide ? omc_dtype_acc(x->dtype) : x->dtype, &columns));
  *p = (omc_linear_loss_form){.n = n, .k = k, .loss = {.outer = n, .classes = classes, .inner = 1}};
  read_attributes(node, &p->loss);
  if (p->loss.reduction == OMC_LOSS_NONE)
    OMC_NODE_FAIL(node, EINVALID, "reduction is none, expected mean or sum");
  return OMC_OK;
}

static omc_status infer_linear(omc_node *node) {
  omc_linear_loss_form p;
  OMC_TRY(omc_linear_loss_form_of(node, &p));
  const omc_dtype wide = omc_dtype_acc(omc_in(node, 0)->type.dtype);
  omc_set_type(node, 0, wide, &scalar);
  omc_set_type(node, 1, wide, &omc_in(node, 0)->type.shape);
  omc_set_type(node, 2, wide, &omc_in(node, 1)->type.shape);
  omc_set_type(node, 3, wide, &(omc_shape){1, {p.loss.classes}});
  return OMC_OK;
}

static omc_status grad_linear(omc_grad *g) {
  static const uint32_t input_of[] = {0, 0, 1, 3}; /* that output k is the gradient for */
  if (!g->grad_out[0]) return OMC_OK;
  for (uint32_t k = 1; k < 4; k++) {
    if (!g->needs[input_of[k]]) continue;
    OMC_TRY(omc_need_output(g, k));
    g->grad_in[input_of[k]] = omc_binary(&g->b, OMC_OP_Mul, omc_out(g->node, k), g->grad_out[0]);
  }
  return g->b.status;
}

static omc_status linear_cost(const omc_node *node, omc_cost *cost) {
  omc_linear_loss_form p;
  OMC_TRY(omc_linear_loss_form_of(node, &p));
  const int products = 1 + (omc_out(node, 1) != NULL) + (omc_out(node, 2) != NULL);
  cost->flops = 2.0 * products * (double)p.n * (double)p.k * (double)p.loss.classes;
  return OMC_OK;
}

/* ---- of log probabilities ---- */

static omc_status infer_nll(omc_node *node) {
  omc_loss_form p;
  omc_shape rows;
  OMC_TRY(omc_loss_form_of(node, &p, &rows));
  const omc_dtype dtype = omc_in(node, 0)->type.dtype;
  omc_set_type(node, 0, dtype, result_shape(&p, &rows));
  omc_set_type(node, 1, omc_dtype_acc(dtype), &scalar);
  return OMC_OK;
}

static omc_status grad_nll(omc_grad *g) {
  const omc_node *node = g->node;
  OMC_TRY(omc_need_saved(g, 2));
  if (!g->grad_out[0]) return OMC_OK;
  omc_value *in[] = {g->grad_out[0], omc_in(node, 1), omc_out(node, 1), omc_in(node, 2)};
  g->grad_in[0] = omc_nary_like(&g->b, OMC_OP_NegativeLogLikelihoodLossGrad, in[3] ? 4 : 3, in,
                                node, omc_in_shape(node, 0));
  return g->b.status;
}

omc_status omc_nll_grad_form_of(const omc_node *node, omc_loss_form *p, omc_type *of) {
  omc_shape rows;
  OMC_TRY(omc_need_float(node, 0));
  *of = (omc_type){.dtype = omc_in(node, 0)->type.dtype};
  OMC_TRY(omc_need_shape(node, &of->shape));
  OMC_TRY(check(node, of, 1, 3, p, &rows));
  return omc_need_gradient(node, result_shape(p, &rows));
}

static omc_status infer_nll_grad(omc_node *node) {
  omc_loss_form p;
  omc_type of;
  OMC_TRY(omc_nll_grad_form_of(node, &p, &of));
  omc_set_type(node, 0, of.dtype, &of.shape);
  return OMC_OK;
}

/* ---- records ---- */

#define LOSS(name, min, max, outputs, ...) \
  OMC_RECORD(name, min, max, outputs, .flags = OMC_OP_FAILS, __VA_ARGS__)
LOSS(CrossEntropy, 2, 3, 4, .infer = infer_forward, .grad = grad_cross_entropy)
LOSS(CrossEntropyGrad, 6, 7, 1, .infer = infer_backward, .in_place = 1u << 1)
LOSS(LinearCrossEntropy, 3, 5, 4, .spared = 1u << 1 | 1u << 2 | 1u << 3, .infer = infer_linear,
     .grad = grad_linear, .cost = linear_cost)
LOSS(NegativeLogLikelihoodLoss, 2, 3, 2, .infer = infer_nll, .grad = grad_nll)
LOSS(NegativeLogLikelihoodLossGrad, 3, 4, 1, .infer = infer_nll_grad)
LOSS(UnitInterval, 1, 1, 1, .infer = omc_infer_float, .in_place = 1u << 0)
