#include "passes/fold.h"

#include "graph/edit.h"
#include "ops/call.h"
#include "ops/op.h"
#include "passes/passes.h"

#define MAX_BYTES ((size_t)64 << 20)

static omc_status may_fold(const omc_node *node, bool *out) {
  const uint32_t flags = omc_op_get(node->op)->flags;
  *out = false;
  if (flags & (OMC_OP_RANDOM | OMC_OP_HOST)) return OMC_OK;
  for (uint32_t i = 0; i < node->n_in && !(flags & OMC_OP_SHAPE_ONLY); i++)
    if (omc_in(node, i) && !omc_is_const(omc_in(node, i))) return OMC_OK;
  size_t total = 0;
  for (uint32_t k = 0; k < node->n_out; k++) {
    size_t bytes = 0;
    if (node->out[k]) OMC_TRY(omc_type_bytes(&node->out[k]->type, &bytes));
    if (bytes > MAX_BYTES - total) return OMC_OK;
    total += bytes;
  }
  *out = true;
  return OMC_OK;
}

static omc_status no_memory(const omc_node *node) {
  OMC_NODE_FAIL(node, ENOMEM, "no memory for its constant value");
}

/* Runs the node's kernel; data[k] is set to output k's elements in the graph's arena. */
static omc_status evaluate(omc_graph *g, const omc_node *node, omc_arena *scratch, void **data) {
  const omc_provider *cpu = omc_cpu_provider();
  omc_call call;
  OMC_TRY(omc_call_prepare(node, cpu, scratch, 1, &call));
  omc_tensor *in = OMC_NEW_ARRAY(scratch, omc_tensor, node->n_in + node->n_out + 1);
  void *workspace = omc_arena_alloc(scratch, call.workspace_bytes + 1, 1);
  if (!in || !workspace) return no_memory(node);
  omc_tensor *out = in + node->n_in;
  for (uint32_t i = 0; i < node->n_in; i++) {
    const omc_value *v = omc_in(node, i);
    /* Kernels do not write to their inputs, but for outputs that share memory: not here. */
    if (v) in[i] = (omc_tensor){(void *)(uintptr_t)v->data, &v->type};
  }
  for (uint32_t k = 0; k < node->n_out; k++) {
    if (!node->out[k]) continue;
    size_t bytes;
    OMC_TRY(omc_type_bytes(&node->out[k]->type, &bytes));
    data[k] = omc_arena_alloc(&g->arena, bytes + 1, 1);
    if (!data[k]) return no_memory(node);
    out[k] = (omc_tensor){data[k], &node->out[k]->type};
  }
  const omc_kernel_args args = {.in = in,
                                .out = out,
                                .n_in = node->n_in,
                                .n_out = node->n_out,
                                .params = call.params,
                                .workspace = workspace,
                                .threads = 1,
                                .node = node->name};
  return call.kernel(&args);
}

/* The elements of every output: those of the input for a view, else computed. */
static omc_status fold_outputs(omc_graph *g, omc_node *node, omc_arena *scratch) {
  void **data = OMC_NEW_ARRAY(scratch, void *, node->n_out + 1);
  if (!data) return no_memory(node);
  if (omc_op_get(node->op)->flags & OMC_OP_VIEW)
    data[0] = (void *)(uintptr_t)omc_in(node, 0)->data;
  else
    OMC_TRY(evaluate(g, node, scratch, data));
  for (uint32_t k = 0; k < node->n_out; k++) {
    if (!node->out[k]) continue;
    omc_value *value;
    OMC_TRY(omc_graph_add_const(g, NULL, &node->out[k]->type, data[k], &value));
    omc_replace_uses(node->out[k], value);
  }
  omc_erase_node(g, node);
  return OMC_OK;
}

omc_status omc_fold_node(omc_graph *g, omc_node *node) {
  bool fold;
  OMC_TRY(may_fold(node, &fold));
  if (!fold) return OMC_OK;
  omc_arena scratch;
  omc_arena_init(&scratch, g->arena.allocator);
  const omc_status status = fold_outputs(g, node, &scratch);
  omc_arena_deinit(&scratch);
  return status;
}

omc_status omc_fold(omc_graph *g) {
  for (omc_node *node = g->first, *next; node; node = next) {
    next = node->next;
    OMC_TRY(omc_fold_node(g, node));
  }
  return OMC_OK;
}
