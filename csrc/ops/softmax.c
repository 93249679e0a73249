/* Softmax and LogSoftmax over any axis, and their gradients. */
#include "ops/forms.h"
#include "ops/infer.h"
#include "ops/op.h"

static omc_status infer_softmax_grad(omc_node *node) {
  const omc_type *y = &omc_in(node, 1)->type;
  OMC_TRY(omc_need_type(node, 0, "dy", y->dtype, &y->shape));
  return omc_infer_along(node);
}

static omc_status gradient(omc_grad *g, omc_op_id op) {
  omc_value *in[] = {g->grad_out[0], omc_out(g->node, 0)};
  g->grad_in[0] = omc_nary(&g->b, op, 2, in, g->node->n_attr, g->node->attr);
  return g->b.status;
}
static omc_status grad_softmax(omc_grad *g) { return gradient(g, OMC_OP_SoftmaxGrad); }
static omc_status grad_log_softmax(omc_grad *g) { return gradient(g, OMC_OP_LogSoftmaxGrad); }

#define SOFTMAX(name, id)                                                                     \
  OMC_RECORD(name, 1, 1, 1, .in_place = 1u << 0, .infer = omc_infer_along, .grad = grad_##id) \
  OMC_RECORD(name##Grad, 2, 2, 1, .in_place = 1u << 0 | 1u << 1, .infer = infer_softmax_grad)
SOFTMAX(Softmax, softmax)
SOFTMAX(LogSoftmax, log_softmax)
