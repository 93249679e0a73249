#include "plan/plan.h"

#include <stdatomic.h>

static void destroy(omc_plan *plan) {
  if (plan->detach && plan->detach(plan->attached) != OMC_OK) return;
  omc_arena_deinit(&plan->memory);
  omc_graph_destroy(plan->graph);
  omc_free(plan->allocator, plan, 1, sizeof *plan);
}

/* ---- steps ---- */

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
                     .workspace_bytes = call.workspace_bytes,
                     .varies = call.varies};
  return OMC_OK;
}

static omc_status fill_steps(omc_plan *plan, const omc_liveness *l) {
  plan->steps = OMC_NEW_ARRAY(&plan->memory, omc_step, plan->n_steps);
  if (!plan->steps) OMC_FAIL(ENOMEM, "no memory for the %u steps of a plan", plan->n_steps);
  for (uint32_t s = 0; s < plan->n_steps; s++) {
    OMC_TRY(fill_step(plan, l->nodes[s], &plan->steps[s]));
    plan->random |= is_random(l->nodes[s]);
  }
  return OMC_OK;
}

/* ---- the whole ---- */

static omc_status build(omc_plan *plan, omc_arena *scratch) {
  omc_liveness l;
  OMC_TRY(omc_live_ranges(plan->graph, plan->retain_graph, &plan->memory, scratch, &l));
  plan->slots = l.slots;
  plan->parts = l.parts;
  plan->copies = l.copies;
  plan->n_copies = l.n_copies;
  plan->n_phases = l.n_phases;
  plan->n_forward = l.n_forward;
  plan->n_steps = l.n_steps;
  OMC_TRY(fill_steps(plan, &l));
  OMC_TRY(omc_plan_layout(plan, &l, scratch));
  return omc_plan_check(plan);
}

omc_status omc_plan_create(omc_graph *graph, const omc_provider *provider, bool retain_graph,
                           const omc_allocator *allocator, omc_plan **out) {
  omc_plan *plan = omc_alloc_zero(allocator, 1, sizeof *plan);
  if (!plan) {
    omc_graph_destroy(graph);
    OMC_FAIL(ENOMEM, "no memory for a plan");
  }
  plan->allocator = allocator;
  plan->provider = provider;
  plan->graph = graph;
  plan->retain_graph = retain_graph;
  plan->threads = provider->threads(provider->ctx);
  omc_arena_init(&plan->memory, allocator);
  atomic_init(&plan->references, 1);
  omc_arena scratch;
  omc_arena_init(&scratch, allocator);
  const omc_status status = build(plan, &scratch);
  omc_arena_deinit(&scratch);
  if (status != OMC_OK) {
    destroy(plan);
    return status;
  }
  *out = plan;
  return OMC_OK;
}

omc_plan *omc_plan_retain(omc_plan *plan) {
  atomic_fetch_add_explicit(&plan->references, 1, memory_order_relaxed);
  return plan;
}

void omc_plan_release(omc_plan *plan) {
  if (plan && atomic_fetch_sub_explicit(&plan->references, 1, memory_order_acq_rel) == 1)
    destroy(plan);
}
