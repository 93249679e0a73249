/* Softmax and LogSoftmax over any axis, and their gradients. */
#include "ops/forms.h"
#include "ops/infer.h"
#include "ops/op.h"

/* A 0-d tensor is one slice of one element, as in PyTorch. */
static omc_status softmax_axis(const omc_node *node, const omc_shape *shape, int32_t *out) {
  *out = 0;
  return omc_need_axis(node, shape->rank > 0 ? shape->rank : 1, out);
}

omc_axis_form omc_axis_form_of(const omc_shape *x, int32_t axis) {
  if (x->rank == 0) return (omc_axis_form){.outer = 1, .n = 1, .inner = 1};
  return (omc_axis_form){.outer = omc_shape_span(x, 0, axis),
                         .n = x->dims[axis],
                         .inner = omc_shape_span(x, axis + 1, x->rank)};
}

omc_status omc_softmax_form_of(const omc_node *node, omc_axis_form *out) {
  int32_t axis;
  OMC_TRY(softmax_axis(node, omc_in_shape(node, 0), &axis));
  *out = omc_axis_form_of(omc_in_shape(node, 0), axis);
  return OMC_OK;
}

static omc_status infer_softmax(omc_node *node) {
  int32_t axis;
  OMC_TRY(omc_infer_float(node));
  return softmax_axis(node, &omc_in(node, 0)->type.shape, &axis);
}

static omc_status infer_softmax_grad(omc_node *node) {
  if (!omc_type_equal(&omc_in(node, 0)->type, &omc_in(node, 1)->type)) {
    char dy[OMC_TYPE_TEXT], y[OMC_TYPE_TEXT];
    OMC_NODE_FAIL(node, ESHAPE, "gradient %s does not fit output %s",
                  omc_type_text(&omc_in(node, 0)->type, dy, sizeof dy),
                  omc_type_text(&omc_in(node, 1)->type, y, sizeof y));
  }
  return infer_softmax(node);
}

static omc_status gradient(omc_grad *g, omc_op_id op) {
  omc_value *in[] = {g->grad_out[0], omc_out(g->node, 0)};
  g->grad_in[0] = omc_nary(&g->b, op, 2, in, g->node->n_attr, g->node->attr);
  return g->b.status;
}
static omc_status softmax_grad(omc_grad *g) { return gradient(g, OMC_OP_SoftmaxGrad); }
static omc_status log_softmax_grad(omc_grad *g) { return gradient(g, OMC_OP_LogSoftmaxGrad); }

#define SOFTMAX(name_, inputs, in_place_, infer_, grad_) \
  const omc_op omc_op_##name_ = {.name = #name_,         \
                                 .min_in = inputs,       \
                                 .max_in = inputs,       \
                                 .n_out = 1,             \
                                 .in_place = in_place_,  \
                                 .infer = infer_,        \
                                 .grad = grad_};

SOFTMAX(Softmax, 1, 1u << 0, infer_softmax, softmax_grad)
SOFTMAX(LogSoftmax, 1, 1u << 0, infer_softmax, log_softmax_grad)
SOFTMAX(SoftmaxGrad, 2, 1u << 0 | 1u << 1, infer_softmax_grad, NULL)
SOFTMAX(LogSoftmaxGrad, 2, 1u << 0 | 1u << 1, infer_softmax_grad, NULL)
