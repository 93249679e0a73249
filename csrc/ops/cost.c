#include "ops/op.h"

static omc_status add_operand(const omc_value *v, omc_cost *cost) {
  size_t bytes;
  if (!v) return OMC_OK;
  OMC_TRY(omc_type_bytes(&v->type, &bytes));
  const double n = (double)omc_shape_numel(&v->type.shape);
  if (n > cost->flops) cost->flops = n;
  cost->bytes += (double)bytes;
  return OMC_OK;
}

omc_status omc_node_cost(const omc_node *node, omc_cost *out) {
  const omc_op *op = omc_op_get(node->op);
  *out = (omc_cost){0, 0};
  if (omc_is_view(node)) return OMC_OK;
  for (uint32_t i = 0; i < node->n_in; i++) OMC_TRY(add_operand(omc_in(node, i), out));
  for (uint32_t k = 0; k < node->n_out; k++) OMC_TRY(add_operand(omc_out(node, k), out));
  return op->cost ? op->cost(node, out) : OMC_OK;
}

omc_status omc_cost_moved(const omc_node *node, omc_cost *cost) {
  omc_cost written = {0, 0};
  for (uint32_t k = 0; k < node->n_out; k++) OMC_TRY(add_operand(omc_out(node, k), &written));
  *cost = (omc_cost){0, 2 * written.bytes};
  return OMC_OK;
}
