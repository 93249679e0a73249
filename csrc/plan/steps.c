#include "plan/plan.h"

/* A random op draws only where its probability `p` is above 0; one in a fused node does. */
static bool is_random(const omc_node *node) {
  if (omc_op_get(node->op)->flags & OMC_OP_RANDOM) return omc_node_float(node, "p") > 0;
  return omc_node_flags(node) & OMC_OP_RANDOM;
}

static omc_status fill_step(omc_plan *plan, const omc_node *node, omc_step *step) {
  uint32_t *values = OMC_NEW_ARRAY(&plan->memory, uint32_t, node->n_in + node->n_out);
  if (!values) OMC_FAIL(ENOMEM, "no memory for the steps of a plan");
  for (uint32_t i = 0; i < node->n_in; i++)
    values[i] = node->in[i].value ? node->in[i].value->id : UINT32_MAX;
  for (uint32_t k = 0; k < node->n_out; k++)
    values[node->n_in + k] = node->out[k] ? node->out[k]->id : UINT32_MAX;

  omc_call call;
  const omc_provider *p = plan->provider;
  OMC_TRY(p->prepare(p->ctx, node, plan->threads, &plan->memory, &call));
  *step = (omc_step){.kernel = call.kernel,
                     .op = omc_op_get(node->op),
                     .node = node,
                     .params = call.params,
                     .n_in = node->n_in,
                     .n_out = node->n_out,
                     .values = values,
                     .workspace_bytes = call.workspace_bytes};
  return OMC_OK;
}

omc_status omc_plan_steps(omc_plan *plan, const omc_liveness *l) {
  plan->steps = OMC_NEW_ARRAY(&plan->memory, omc_step, plan->n_steps);
  if (!plan->steps) OMC_FAIL(ENOMEM, "no memory for the %u steps of a plan", plan->n_steps);
  for (uint32_t s = 0; s < plan->n_steps; s++) {
    OMC_TRY(fill_step(plan, l->nodes[s], &plan->steps[s]));
    plan->random |= is_random(l->nodes[s]);
  }
  return OMC_OK;
}
