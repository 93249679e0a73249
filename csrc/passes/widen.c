/* What forward has widened from 16 bits and backward's elementwise nodes read is widened there
 * again, which costs them nothing: so it is the narrow tensor that is kept. */
#include "graph/edit.h"
#include "ops/builder.h"
#include "ops/op.h"
#include "passes/passes.h"

/* Whether the caller is given it or a view of it. */
static bool is_given(const omc_graph *g, const omc_value *v) {
  for (const omc_use *use = v->uses; use; use = use->next) {
    if (use->node == g->result ? use->index < g->n_outputs
                               : omc_is_view(use->node) && is_given(g, omc_out(use->node, 0)))
      return true;
  }
  return false;
}

/* Whether it is memory of the graph's own, which nobody else writes to. */
static bool is_own(const omc_graph *g, const omc_value *v) {
  while (v->producer && omc_is_view(v->producer)) v = omc_in(v->producer, 0);
  return v->producer && !is_given(g, v);
}

static bool widens(const omc_graph *g, const omc_node *node) {
  return node->op == OMC_OP_Cast && node->phase == OMC_FORWARD &&
         omc_dtype_size(omc_in(node, 0)->type.dtype) == 2 && node->out[0]->type.dtype == OMC_F32 &&
         is_own(g, omc_in(node, 0));
}

static bool is_fused(const omc_use *use, const omc_graph *g, const omc_provider *provider) {
  return use->node != g->result && omc_op_get(use->node->op)->imm &&
         provider->fusible(provider->ctx, use->node);
}

static bool is_late(const omc_use *use, const omc_graph *g) {
  return use->node == g->result ? use->index >= g->n_outputs : use->node->phase != OMC_FORWARD;
}

/* A use of `v` in a backward; NULL: there are none, or one that would have it in memory. */
static const omc_use *late_use(const omc_graph *g, const omc_value *v,
                               const omc_provider *provider) {
  const omc_use *found = NULL;
  for (const omc_use *use = v->uses; use; use = use->next) {
    if (!is_late(use, g)) continue;
    if (!is_fused(use, g, provider)) return NULL;
    found = use;
  }
  return found;
}

omc_status omc_widen_again(omc_graph *g, const omc_provider *provider) {
  for (omc_node *node = g->first; node && node->phase == OMC_FORWARD; node = node->next) {
    if (!widens(g, node)) continue;
    omc_value *const wide = node->out[0];
    for (const omc_use *use; (use = late_use(g, wide, provider));) {
      omc_node *const user = use->node;
      omc_builder b = {.graph = g, .before = user, .phase = user->phase, .name = node->name};
      omc_value *const again = omc_cast(&b, omc_in(node, 0), OMC_F32);
      OMC_TRY(b.status);
      for (uint32_t i = 0; i < user->n_in; i++)
        if (omc_in(user, i) == wide) omc_set_input(user, i, again);
    }
  }
  return OMC_OK;
}
