/* Cast: another dtype for the same numbers. Casts: the same of several tensors of one dtype. */
#include "ops/infer.h"
#include "ops/op.h"

static omc_status imm_cast(const omc_node *node, double *imm) {
  imm[0] = omc_node_to_dtype(node, "to");
  return OMC_OK;
}

static omc_status infer_cast(omc_node *node) {
  omc_set_type(node, 0, omc_node_to_dtype(node, "to"), &omc_in(node, 0)->type.shape);
  return OMC_OK;
}

static omc_status grad_cast(omc_grad *g) {
  g->grad_in[0] = omc_cast(&g->b, g->grad_out[0], omc_in(g->node, 0)->type.dtype);
  return g->b.status;
}

static omc_status infer_casts(omc_node *node) {
  if (node->n_out != node->n_in)
    OMC_NODE_FAIL(node, EINVALID, "%u inputs are cast to %u outputs", node->n_in, node->n_out);
  for (uint32_t i = 0; i < node->n_in; i++) {
    OMC_TRY(omc_need_dtype(node, i, omc_in(node, 0)->type.dtype));
    omc_set_type(node, i, omc_node_to_dtype(node, "to"), omc_in_shape(node, i));
  }
  return OMC_OK;
}

static omc_status grad_casts(omc_grad *g) {
  for (uint32_t i = 0; i < g->node->n_in; i++)
    if (g->grad_out[i])
      g->grad_in[i] = omc_cast(&g->b, g->grad_out[i], omc_in(g->node, i)->type.dtype);
  return g->b.status;
}

OMC_RECORD(Cast, 1, 1, 1, .flags = OMC_OP_POINTWISE | OMC_OP_CONVERTS, .infer = infer_cast,
           .grad = grad_cast, .imm = imm_cast)
OMC_RECORD(Casts, 1, OMC_VARIADIC, OMC_VARIADIC, .infer = infer_casts, .grad = grad_casts)
