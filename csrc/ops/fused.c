/* FusedElementwise: a program of elementwise ops run block by block. */
#include "cpu/elementwise.h"
#include "ops/infer.h"
#include "ops/op.h"

#ifdef OMC_RECORDS

/* Outputs have the broadcast shape of all inputs and the dtypes that the node lists. */
static omc_status infer_fused(omc_node *node) {
  char text[OMC_NODE_TEXT];
  uint32_t n;
  const int64_t *codes = omc_attr_ints(node, "dtypes", &n);
  if (n != node->n_out) OMC_NODE_FAIL(node, EINVALID, "%u dtypes for %u outputs", n, node->n_out);
  omc_shape shape = {0, {0}};
  for (uint32_t i = 0; i < node->n_in; i++)
    if (omc_in(node, i))
      OMC_TRY(omc_shape_broadcast(&shape, &omc_in(node, i)->type.shape,
                                  omc_node_text(node, text, sizeof text), &shape));
  for (uint32_t k = 0; k < n; k++) {
    omc_dtype dtype;
    if (!omc_dtype_from_onnx(codes[k], &dtype))
      OMC_NODE_FAIL(node, EDTYPE, "there is no dtype with ONNX code %lld", (long long)codes[k]);
    omc_set_type(node, k, dtype, &shape);
  }
  return OMC_OK;
}

static const omc_kernels omc_kernels_FusedElementwise = {omc_ew_run, {{NULL}}};
const omc_op omc_op_FusedElementwise = {.name = "FusedElementwise",
                                        .min_in = 1,
                                        .max_in = OMC_EW_MAX_INPUTS,
                                        .n_out = OMC_VARIADIC,
                                        .flags = OMC_OP_POINTWISE,
                                        .infer = infer_fused,
                                        .cpu = &omc_kernels_FusedElementwise};

#endif
