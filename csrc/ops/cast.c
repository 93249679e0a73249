/* Cast: another dtype for the same numbers. */
#include "ops/infer.h"
#include "ops/op.h"

static omc_status cast_to(const omc_node *node, omc_dtype *to) {
  const int64_t code = omc_node_int(node, "to", 0);
  if (omc_dtype_from_onnx(code, to)) return OMC_OK;
  OMC_NODE_FAIL(node, EDTYPE, "there is no dtype with ONNX code %lld", (long long)code);
}

static omc_status cast_imm(const omc_node *node, double *imm) {
  omc_dtype to;
  OMC_TRY(cast_to(node, &to));
  imm[0] = to;
  return OMC_OK;
}

static omc_status infer_cast(omc_node *node) {
  omc_dtype to;
  OMC_TRY(cast_to(node, &to));
  omc_set_type(node, 0, to, &omc_in(node, 0)->type.shape);
  return OMC_OK;
}

static omc_status grad_cast(omc_grad *g) {
  g->grad_in[0] = omc_cast(&g->b, g->grad_out[0], omc_in(g->node, 0)->type.dtype);
  return g->b.status;
}

const omc_op omc_op_Cast = {.name = "Cast",
                            .min_in = 1,
                            .max_in = 1,
                            .n_out = 1,
                            .flags = OMC_OP_POINTWISE | OMC_OP_CONVERTS,
                            .infer = infer_cast,
                            .grad = grad_cast,
                            .imm = cast_imm};
