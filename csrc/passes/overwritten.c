#include "graph/edit.h"
#include "ops/builder.h"
#include "ops/op.h"
#include "passes/passes.h"

/* Whether a backward, or an output other than number k, reads the value or a view of it. */
static bool read_late(const omc_graph *g, const omc_value *v, uint32_t k) {
  for (const omc_use *use = v->uses; use; use = use->next) {
    if (use->node == g->result ? use->index != k : use->node->phase != OMC_FORWARD) return true;
    if (use->node != g->result && omc_is_view(use->node) && read_late(g, use->node->out[0], k))
      return true;
  }
  return false;
}

/* Lets all that reads an input read a copy, which is made before anything else. */
static omc_status read_copy(omc_graph *g, omc_value *input) {
  omc_builder b = {.graph = g, .before = g->first, .phase = OMC_FORWARD};
  omc_value *dims = omc_ints(&b, input->type.shape.dims, input->type.shape.rank);
  omc_value *const in[] = {input, dims};
  omc_value *copy = omc_nary(&b, OMC_OP_Expand, 2, in, 0, NULL);
  OMC_TRY(b.status);
  omc_replace_uses(input, copy);
  omc_set_input(copy->producer, 0, input);
  return OMC_OK;
}

omc_status omc_save_overwritten(omc_graph *g) {
  for (uint32_t k = 0; k < g->n_outputs; k++)
    if (omc_over(g, k) && read_late(g, omc_over(g, k), k)) OMC_TRY(read_copy(g, omc_over(g, k)));
  return OMC_OK;
}
