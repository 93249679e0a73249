#include "ops/op.h"
#include "passes/passes.h"

void omc_trim(omc_graph *g) {
  for (omc_node *node = g->first; node; node = node->next) {
    const uint32_t spared = omc_op_get(node->op)->spared;
    for (uint32_t k = 0; spared && k < node->n_out; k++)
      if (spared >> k & 1 && node->out[k] && !node->out[k]->uses) node->out[k] = NULL;
  }
}
