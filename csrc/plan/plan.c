#include "plan/plan.h"

#include <stdatomic.h>

static void destroy(omc_plan *plan) {
  if (plan->detach && plan->detach(plan->attached) != OMC_OK) return;
  omc_arena_deinit(&plan->memory);
  omc_graph_destroy(plan->graph);
  omc_free(plan->allocator, plan, 1, sizeof *plan);
}

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
  OMC_TRY(omc_plan_steps(plan, &l));
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
