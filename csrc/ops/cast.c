/* Cast: another dtype for the same numbers. */
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

OMC_RECORD(Cast, 1, 1, 1, .flags = OMC_OP_POINTWISE | OMC_OP_CONVERTS, .infer = infer_cast,
           .grad = grad_cast, .imm = imm_cast)
