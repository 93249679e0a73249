#include "ops/op.h"

#include <string.h>

#pragma GCC visibility push(hidden)
#define OMC_OP(name, family, domain, ...) extern const omc_op omc_op_##name;
#include "ops.def"
#undef OMC_OP
#pragma GCC visibility pop

static const omc_op *const records[OMC_N_OPS] = {
#define OMC_OP(name, family, domain, ...) &omc_op_##name,
#include "ops.def"
#undef OMC_OP
};

const omc_op *omc_op_get(omc_op_id id) { return records[id]; }

static const omc_value *first_float(const omc_node *node) {
  const omc_value *chosen = omc_in(node, omc_op_get(node->op)->chosen_by);
  if (chosen && omc_dtype_is_float(chosen->type.dtype)) return chosen;
  for (uint32_t i = 0; i < node->n_in; i++) {
    const omc_value *v = omc_in(node, i);
    if (v && omc_dtype_is_float(v->type.dtype)) return v;
  }
  for (uint32_t i = 0; i < node->n_out; i++) {
    const omc_value *v = omc_out(node, i);
    if (v && omc_dtype_is_float(v->type.dtype)) return v;
  }
  return NULL;
}

omc_dtype omc_node_dtype(const omc_node *node) {
  const omc_value *v = first_float(node);
  if (!v) v = omc_in(node, 0);
  if (!v) v = omc_out(node, 0);
  return v ? v->type.dtype : OMC_F32;
}

uint32_t omc_node_flags(const omc_node *node) {
  uint32_t flags = omc_op_get(node->op)->flags;
  const omc_attr *ops = omc_node_attr(node, "ops");
  for (uint32_t i = 0; ops && ops->kind == OMC_ATTR_STRINGS && i < ops->n; i++) {
    omc_op_id op;
    if (omc_op_from_name(ops->v.ss[i], strlen(ops->v.ss[i]), &op)) flags |= omc_op_get(op)->flags;
  }
  return flags & (OMC_OP_CALLBACK | OMC_OP_DIVIDES) ? flags | OMC_OP_FAILS : flags;
}

omc_status omc_node_check(const omc_node *node) {
  const omc_op *op = omc_op_get(node->op);
  if (node->n_in < op->min_in || (op->max_in != OMC_VARIADIC && node->n_in > op->max_in))
    OMC_NODE_FAIL(node, EINVALID, "%u inputs, not %u to %u", node->n_in, op->min_in, op->max_in);
  for (uint32_t i = 0; i < op->min_in; i++)
    if (!omc_in(node, i) && !(op->optional & 1u << i))
      OMC_NODE_FAIL(node, EINVALID, "input %u is left out", i);
  if (op->n_out != OMC_VARIADIC && (node->n_out < 1 || node->n_out > op->n_out))
    OMC_NODE_FAIL(node, EINVALID, "%u outputs, not 1 to %u", node->n_out, op->n_out);
  return OMC_OK;
}
