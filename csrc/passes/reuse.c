/* Gradients that a device computes from what forward gave, rather than again from what it was
 * given. */
#include "graph/edit.h"
#include "ops/builder.h"
#include "ops/op.h"
#include "passes/passes.h"

enum { LSE = 4, MASK = 5, Y = 6 };

/* Of 16 bits: the sum of probabilities times their gradients is that of y times its own. Where a
 * mask is added, as by the least number there is, scores may be so large that lse has rounded a
 * row's sum away, which has to be made again. */
static bool reads_result(const omc_node *node) {
  if (node->op != OMC_OP_AttentionGrad || omc_in(node, Y)) return false;
  const omc_value *mask = omc_in(node, MASK);
  return omc_dtype_size(omc_node_dtype(node)) == 2 && omc_in(node, LSE)->producer &&
         (!mask || mask->type.dtype == OMC_BOOL);
}

static omc_status give_result(omc_graph *g, omc_node *node) {
  omc_value *in[Y + 1], *out[3];
  for (uint32_t i = 0; i < Y; i++) in[i] = omc_in(node, i);
  in[Y] = omc_out(in[LSE]->producer, 0);
  omc_builder b = {.graph = g, .before = node, .phase = node->phase, .name = node->name};
  uint32_t left_out = 0;
  for (uint32_t i = 0; i < Y; i++)
    if (!in[i]) left_out |= 1u << i;
  omc_build(&b, OMC_OP_AttentionGrad, Y + 1, in, left_out, node->n_attr, node->attr, node->n_out,
            out);
  OMC_TRY(b.status);
  for (uint32_t k = 0; k < node->n_out; k++)
    if (omc_out(node, k)) omc_replace_uses(omc_out(node, k), out[k]);
  omc_erase_node(g, node);
  return OMC_OK;
}

omc_status omc_reuse_results(omc_graph *g, const omc_provider *provider) {
  for (omc_node *node = g->first, *next; node && provider->reuses_results; node = next) {
    next = node->next;
    if (reads_result(node)) OMC_TRY(give_result(g, node));
  }
  return OMC_OK;
}
