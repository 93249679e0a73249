#include "ops/call.h"

#include "cpu/elementwise.h"
#include "ops/op.h"

static omc_status no_memory(const omc_node *node) {
  OMC_NODE_FAIL(node, ENOMEM, "no memory for kernel parameters");
}

/* The kernel of elementwise programs takes a pointer to the program. */
static omc_status prepare_elementwise(const omc_node *node, omc_arena *arena, int threads,
                                      omc_call *out) {
  omc_ew_program **program = OMC_NEW(arena, omc_ew_program *);
  if (!program) return no_memory(node);
  OMC_TRY(omc_ew_compile(node, arena, program));
  out->params = program;
  out->workspace_bytes = omc_ew_workspace(*program, threads);
  return OMC_OK;
}

omc_status omc_call_prepare(const omc_node *node, const omc_provider *provider, omc_arena *arena,
                            int threads, omc_call *out) {
  const omc_op *op = omc_op_get(node->op);
  const omc_dtype dtype = omc_node_dtype(node);
  *out = (omc_call){provider->kernel(provider->ctx, node->op, dtype), NULL, 0};
  if (!out->kernel)
    OMC_NODE_FAIL(node, EUNSUPPORTED, "%s has no kernel for %s", provider->name,
                  omc_dtype_get(dtype)->text);
  if (op->ew || node->op == OMC_OP_FusedElementwise)
    return prepare_elementwise(node, arena, threads, out);
  if (op->params) {
    void *params = omc_arena_alloc(arena, 1, op->params_size);
    if (!params) return no_memory(node);
    OMC_TRY(op->params(node, arena, params));
    out->params = params;
  }
  if (op->workspace) out->workspace_bytes = op->workspace(node, out->params, threads);
  return OMC_OK;
}
