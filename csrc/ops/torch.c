/* An ATen op without a kernel: it runs in PyTorch through the callbacks. Its attribute
 * `index` tells the callbacks which op it is; what forward leaves for backward they keep with the
 * run. */
#include <string.h>

#include "ops/op.h"

static omc_status need_attr(const omc_attr *types, const omc_node *node) {
  if (types && types->kind == OMC_ATTR_STRINGS && types->n == node->n_out) return OMC_OK;
  OMC_NODE_FAIL(node, EINVALID, "attribute types is not a list of %u types", node->n_out);
}

static omc_status infer_grad(omc_node *node) {
  const omc_attr *types = omc_node_attr(node, "types");
  OMC_TRY(need_attr(types, node));
  for (uint32_t k = 0; k < node->n_out; k++) {
    omc_type type;
    size_t used;
    OMC_TRY(omc_type_parse(types->v.ss[k], strlen(types->v.ss[k]), &type, &used));
    if (node->out[k]) node->out[k]->type = type;
  }
  return OMC_OK;
}

/* The gradient has one output per input of the op; those that nobody needs are left out. */
static omc_status grad_torch(omc_grad *g) {
  enum { MAX_IN = 64 };
  const omc_node *node = g->node;
  omc_arena *memory = &g->b.graph->arena;
  const char *types[MAX_IN];
  omc_value *grad_in[MAX_IN];
  char text[OMC_TYPE_TEXT > OMC_NODE_TEXT ? OMC_TYPE_TEXT : OMC_NODE_TEXT];
  if (node->n_in > MAX_IN || node->n_out > 32)
    OMC_NODE_FAIL(node, EUNSUPPORTED, "gradient of %u inputs and %u outputs, at most %d and 32",
                  node->n_in, node->n_out, MAX_IN);
  for (uint32_t i = 0; i < node->n_in; i++) {
    static const omc_type none = {OMC_F32, {0, {0}}};
    omc_type_text(g->needs[i] ? &omc_in(node, i)->type : &none, text, sizeof text);
    types[i] = omc_arena_text(memory, text, strlen(text));
    if (!types[i]) OMC_FAIL(ENOMEM, "no memory for the types of a gradient");
  }
  const omc_attr attr[] = {omc_attr_int("index", omc_node_int(node, "index")),
                           {"types", OMC_ATTR_STRINGS, node->n_in, {.ss = types}}};
  omc_build(&g->b, OMC_OP_TorchCallGrad, node->n_out, g->grad_out, UINT32_MAX, 2, attr, node->n_in,
            grad_in);
  OMC_TRY(g->b.status);
  for (uint32_t i = 0; i < node->n_in; i++) {
    if (g->needs[i])
      g->grad_in[i] = grad_in[i];
    else
      grad_in[i]->producer->out[i] = NULL;
  }
  return OMC_OK;
}

OMC_RECORD(TorchCall, 0, OMC_VARIADIC, OMC_VARIADIC, .flags = OMC_OP_CALLBACK,
           .optional = UINT32_MAX, .grad = grad_torch)
OMC_RECORD(TorchCallGrad, 0, OMC_VARIADIC, OMC_VARIADIC, .flags = OMC_OP_CALLBACK,
           .optional = UINT32_MAX, .infer = infer_grad)
