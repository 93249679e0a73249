#include "graph/edit.h"
#include "ops/op.h"
#include "passes/passes.h"

/* A template's type admits a concrete one: same dtype and rank, and dims equal where bound. */
static bool admits(const omc_type *template_type, const omc_type *type) {
  if (template_type->dtype != type->dtype) return false;
  if (template_type->shape.rank != type->shape.rank) return false;
  for (int32_t i = 0; i < type->shape.rank; i++) {
    const int64_t dim = template_type->shape.dims[i];
    if (type->shape.dims[i] < 0 || (dim >= 0 && dim != type->shape.dims[i])) return false;
  }
  return true;
}

static omc_status specialize_input(omc_value *input, uint32_t i, const omc_type *type) {
  if (!admits(&input->type, type)) {
    char want[OMC_TYPE_TEXT], got[OMC_TYPE_TEXT];
    const omc_status code = input->type.dtype != type->dtype ? OMC_EDTYPE : OMC_ESHAPE;
    return omc_fail(code, "input %u '%s' is %s, the graph takes %s", i,
                    input->name ? input->name : "", omc_type_text(type, got, sizeof got),
                    omc_type_text(&input->type, want, sizeof want));
  }
  input->type = *type;
  return OMC_OK;
}

/* Only Python knows what an ATen op gives. */
static omc_status infer_by_callback(omc_node *node, const omc_callbacks *callbacks,
                                    const omc_allocator *allocator) {
  if (!callbacks || !callbacks->infer)
    OMC_NODE_FAIL(node, EUNSUPPORTED, "nobody to ask for its types");
  const size_t n = (size_t)node->n_in + node->n_out + 1;
  omc_type *types = omc_alloc_zero(allocator, n, sizeof *types);
  if (!types) OMC_NODE_FAIL(node, ENOMEM, "no memory for %zu types", n);
  for (uint32_t i = 0; i < node->n_in; i++)
    if (omc_in(node, i)) types[i] = omc_in(node, i)->type;
  omc_type *out = types + node->n_in;
  const omc_status status = callbacks->infer(callbacks->ctx, omc_node_int(node, "index"), types,
                                             node->n_in, out, node->n_out);
  for (uint32_t k = 0; k < node->n_out && status == OMC_OK; k++)
    if (node->out[k]) node->out[k]->type = out[k];
  omc_free(allocator, types, n, sizeof *types);
  return status;
}

static omc_status check_types(const omc_node *node) {
  for (uint32_t k = 0; k < node->n_out; k++) {
    size_t bytes;
    if (node->out[k]) OMC_TRY(omc_type_bytes(&node->out[k]->type, &bytes));
  }
  return OMC_OK;
}

omc_status omc_infer_node(omc_node *node, const omc_callbacks *callbacks,
                          const omc_allocator *allocator) {
  OMC_TRY(omc_node_check(node));
  if (node->op == OMC_OP_TorchCall)
    OMC_TRY(infer_by_callback(node, callbacks, allocator));
  else
    OMC_TRY(omc_op_get(node->op)->infer(node));
  return check_types(node);
}

/* Shape rules read constant inputs, so each node is folded before the next is inferred. */
static omc_status specialize_nodes(omc_graph *g, const omc_callbacks *callbacks) {
  for (omc_node *node = g->first, *next; node; node = next) {
    next = node->next;
    OMC_TRY(omc_infer_node(node, callbacks, g->arena.allocator));
    OMC_TRY(omc_fold_node(g, node));
  }
  omc_erase_unused(g);
  return OMC_OK;
}

static omc_status specialize(omc_graph *g, const omc_type *inputs, const omc_callbacks *callbacks) {
  for (uint32_t i = 0; i < g->n_inputs; i++) OMC_TRY(specialize_input(g->inputs[i], i, &inputs[i]));
  OMC_TRY(specialize_nodes(g, callbacks));
  OMC_TRY(omc_graph_check_grads(g));
  return omc_graph_check_over(g);
}

omc_status omc_specialize(const omc_graph *from, const omc_type *inputs,
                          const omc_callbacks *callbacks, const omc_allocator *allocator,
                          omc_graph **out) {
  omc_graph *g;
  OMC_TRY(omc_graph_clone(from, allocator, &g));
  const omc_status status = specialize(g, inputs, callbacks);
  if (status == OMC_OK)
    *out = g;
  else
    omc_graph_destroy(g);
  return status;
}
