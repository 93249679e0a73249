/* Softmax and LogSoftmax over any axis, and their gradients. */
#include "ops/forms.h"
#include "ops/infer.h"
#include "ops/op.h"

static omc_status infer_softmax(omc_node *node) {
  omc_axis_form form;
  OMC_TRY(omc_infer_float(node));
  return omc_axis_form_of(node, &form);
}

static omc_status infer_softmax_grad(omc_node *node) {
  const omc_type *y = &omc_in(node, 1)->type;
  OMC_TRY(omc_need_type(node, 0, "dy", y->dtype, &y->shape));
  return infer_softmax(node);
}

static omc_status gradient(omc_grad *g, omc_op_id op) {
  omc_value *in[] = {g->grad_out[0], omc_out(g->node, 0)};
  g->grad_in[0] = omc_nary(&g->b, op, 2, in, g->node->n_attr, g->node->attr);
  return g->b.status;
}
static omc_status softmax_grad(omc_grad *g) { return gradient(g, OMC_OP_SoftmaxGrad); }
static omc_status log_softmax_grad(omc_grad *g) { return gradient(g, OMC_OP_LogSoftmaxGrad); }

#define SOFTMAX(name, id)                                                                   \
  OMC_RECORD(name, 1, 1, 1, .in_place = 1u << 0, .infer = infer_softmax, .grad = id##_grad) \
  OMC_RECORD(name##Grad, 2, 2, 1, .in_place = 1u << 0 | 1u << 1, .infer = infer_softmax_grad)
SOFTMAX(Softmax, softmax)
SOFTMAX(LogSoftmax, log_softmax)
