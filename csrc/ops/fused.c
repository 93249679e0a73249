/* FusedElementwise, and the classes that programs compute in. */
#include <string.h>

#include "ops/infer.h"
#include "ops/op.h"
#include "ops/program.h"

/* The wider of a class and that of a value; OMC_BOOL: any will do. */
static omc_dtype wider_class(omc_dtype a, const omc_value *v) {
  if (!v || v->type.dtype == OMC_BOOL) return a;
  const omc_dtype b = omc_dtype_acc(v->type.dtype);
  if (a == OMC_F64 || b == OMC_F64) return OMC_F64;
  return a == OMC_F32 || b == OMC_F32 ? OMC_F32 : OMC_I64;
}

omc_dtype omc_ew_class(const omc_node *node) {
  omc_dtype cls = OMC_BOOL;
  for (uint32_t i = 0; i < node->n_in; i++) cls = wider_class(cls, omc_in(node, i));
  for (uint32_t k = 0; k < node->n_out; k++) cls = wider_class(cls, omc_out(node, k));
  return cls;
}

omc_dtype omc_ew_computed_in(omc_dtype cls) { return cls == OMC_BOOL ? OMC_F32 : cls; }

omc_dtype omc_ew_fused_class(const omc_node *node) {
  const char *name = omc_node_string(node, "class");
  omc_dtype cls;
  const bool is = omc_dtype_from_text(name, strlen(name), &cls) && omc_dtype_acc(cls) == cls;
  return is ? cls : OMC_N_DTYPE;
}

/* Outputs have the broadcast shape of all inputs and the dtypes that the node lists. */
static omc_status infer_fused(omc_node *node) {
  uint32_t n;
  const int64_t *codes = omc_node_ints(node, "dtypes", &n);
  if (n != node->n_out) OMC_NODE_FAIL(node, EINVALID, "%u dtypes for %u outputs", n, node->n_out);
  omc_shape shape;
  OMC_TRY(omc_broadcast_inputs(node, &shape));
  for (uint32_t k = 0; k < n; k++) {
    omc_dtype dtype;
    if (!omc_dtype_from_onnx(codes[k], &dtype))
      OMC_NODE_FAIL(node, EDTYPE, "there is no dtype with ONNX code %lld", (long long)codes[k]);
    omc_set_type(node, k, dtype, &shape);
  }
  return OMC_OK;
}

static omc_status fused_cost(const omc_node *node, omc_cost *cost) {
  const omc_attr *ops = omc_node_attr(node, "ops");
  cost->flops *= ops ? ops->n : 0;
  return OMC_OK;
}

OMC_RECORD(FusedElementwise, 1, OMC_EW_MAX_INPUTS, OMC_VARIADIC, .flags = OMC_OP_POINTWISE,
           .infer = infer_fused, .cost = fused_cost)
