#include <string.h>

#include "plan/plan.h"

static bool is_view(const omc_node *node) { return omc_op_get(node->op)->flags & OMC_OP_VIEW; }

/* A random op draws only where its probability `p` is above 0. A fused node is random if an op
 * inside it is. */
static bool is_random(const omc_node *node) {
  if (omc_op_get(node->op)->flags & OMC_OP_RANDOM) return omc_node_float(node, "p") > 0;
  const omc_attr *ops = omc_node_attr(node, "ops");
  if (!ops || ops->kind != OMC_ATTR_STRINGS) return false;
  for (uint32_t i = 0; i < ops->n; i++) {
    omc_op_id op;
    if (omc_op_from_name(ops->v.ss[i], strlen(ops->v.ss[i]), &op) &&
        omc_op_get(op)->flags & OMC_OP_RANDOM)
      return true;
  }
  return false;
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

omc_status omc_plan_steps(omc_plan *plan) {
  const uint32_t backwards = omc_n_backwards(plan->graph);
  plan->n_phases = OMC_BACKWARD + (backwards ? backwards : 1);
  plan->parts = OMC_NEW_ARRAY(&plan->memory, omc_part, plan->n_phases);
  if (!plan->parts) OMC_FAIL(ENOMEM, "no memory for the %u phases of a plan", plan->n_phases);
  for (const omc_node *node = plan->graph->first; node; node = node->next) {
    if (node->phase >= plan->n_phases)
      OMC_NODE_FAIL(node, EINVALID, "it is in phase %u of %u", node->phase, plan->n_phases);
    if (!is_view(node)) plan->parts[node->phase].end_step++;
  }
  for (omc_phase p = 0; p < plan->n_phases; p++) {
    plan->parts[p].step = plan->n_steps;
    plan->n_steps += plan->parts[p].end_step;
    plan->parts[p].end_step = plan->parts[p].step;
  }
  plan->steps = OMC_NEW_ARRAY(&plan->memory, omc_step, plan->n_steps);
  if (!plan->steps) OMC_FAIL(ENOMEM, "no memory for the %u steps of a plan", plan->n_steps);

  for (const omc_node *node = plan->graph->first; node; node = node->next) {
    if (is_view(node)) continue;
    OMC_TRY(fill_step(plan, node, &plan->steps[plan->parts[node->phase].end_step++]));
    plan->random |= is_random(node);
  }
  plan->n_forward = plan->parts[OMC_FORWARD].end_step;
  return OMC_OK;
}
