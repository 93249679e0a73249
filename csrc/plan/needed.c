/* What some of a backward's gradients need, and when the caller's tensors are done with. */
#include <string.h>

#include "plan/plan.h"

typedef struct needs {
  const omc_plan *plan;
  bool
      *live; /* by value id, of those with memory of their own: what shares it is needed together */
  bool *reads_input, *reads_output;
} needs;

static void need(const needs *n, uint32_t id) {
  const uint32_t root = omc_slot_root(n->plan->slots, id);
  const omc_slot *slot = &n->plan->slots[root];
  n->live[root] = true;
  if (slot->place == OMC_AT_INPUT) n->reads_input[slot->index] = true;
  if (slot->place == OMC_AT_OUTPUT) n->reads_output[slot->index] = true;
}

static bool is_needed(const needs *n, const omc_step *step) {
  const uint32_t *out = step->values + step->n_in;
  for (uint32_t k = 0; k < step->n_out; k++)
    if (out[k] != UINT32_MAX && n->live[omc_slot_root(n->plan->slots, out[k])]) return true;
  return false;
}

omc_status omc_plan_needed(const omc_plan *plan, uint32_t backward, const bool *wanted,
                           bool *needed, bool *reads_input, bool *reads_output) {
  const omc_graph *g = plan->graph;
  const omc_part *part = &plan->parts[OMC_BACKWARD + backward];
  const needs n = {plan, omc_alloc_zero(plan->allocator, g->n_values + 1, sizeof *n.live),
                   reads_input, reads_output};
  if (!n.live) OMC_FAIL(ENOMEM, "no memory to tell what gradients need");
  memset(needed, 0, ((size_t)plan->n_steps + plan->n_copies) * sizeof *needed);
  memset(reads_input, 0, g->n_inputs * sizeof *reads_input);
  memset(reads_output, 0, g->n_outputs * sizeof *reads_output);
  for (uint32_t i = 0; i < g->n_inputs; i++) {
    const omc_value *v = omc_in(g->result, g->n_outputs + backward * g->n_inputs + i);
    if (v && wanted[i]) need(&n, v->id);
  }
  for (uint32_t c = part->copy; c < part->end_copy; c++)
    needed[plan->n_steps + c] = wanted[(plan->copies[c].to - g->n_outputs) % g->n_inputs];
  for (uint32_t s = part->end_step; s-- > part->step;) {
    const omc_step *step = &plan->steps[s];
    needed[s] = is_needed(&n, step);
    for (uint32_t i = 0; needed[s] && i < step->n_in; i++)
      if (step->values[i] != UINT32_MAX) need(&n, step->values[i]);
  }
  omc_free(plan->allocator, n.live, g->n_values + 1, sizeof *n.live);
  return OMC_OK;
}

typedef struct uses {
  const omc_plan *plan;
  omc_uses *inputs;
  uint32_t *outputs, *grads;
} uses;

/* A value is used by step `step`, or by what comes after it, before `end`. */
static void use(const uses *u, uint32_t id, uint32_t step, uint32_t end) {
  const omc_slot *slot = &u->plan->slots[omc_slot_root(u->plan->slots, id)];
  switch (slot->place) {
    case OMC_AT_RESULT:
      if (u->inputs[slot->index].begin == UINT32_MAX) u->inputs[slot->index].begin = step;
      u->inputs[slot->index].end = end;
      break;
    case OMC_AT_INPUT:
      u->inputs[slot->index].read = u->inputs[slot->index].end = end;
      break;
    case OMC_AT_LENT:
      u->inputs[slot->index].end = end;
      break;
    case OMC_AT_OUTPUT:
      if (u->outputs) u->outputs[slot->index] = end;
      break;
    case OMC_AT_GRAD:
      if (u->grads) u->grads[slot->index] = end;
      break;
    default:
      break;
  }
}

void omc_plan_uses(const omc_plan *plan, uint32_t backward, omc_uses *inputs, uint32_t *outputs,
                   uint32_t *grads) {
  const omc_graph *g = plan->graph;
  const omc_part *part = &plan->parts[OMC_BACKWARD + backward];
  const uses u = {plan, inputs, outputs, grads};
  for (uint32_t i = 0; i < g->n_inputs; i++) inputs[i] = (omc_uses){.begin = UINT32_MAX};
  if (outputs) memset(outputs, 0, g->n_outputs * sizeof *outputs);
  if (grads) memset(grads, 0, g->n_outputs * sizeof *grads);
  for (uint32_t s = part->step; s < part->end_step; s++) {
    const omc_step *step = &plan->steps[s];
    for (uint32_t k = 0; k < step->n_in + step->n_out; k++)
      if (step->values[k] != UINT32_MAX) use(&u, step->values[k], s, s + 1);
  }
  for (uint32_t c = part->copy; c < part->end_copy; c++) {
    omc_uses *to = &inputs[(plan->copies[c].to - g->n_outputs) % g->n_inputs];
    use(&u, plan->copies[c].from, part->end_step, UINT32_MAX);
    if (to->begin == UINT32_MAX) to->begin = part->end_step;
    to->end = UINT32_MAX;
  }
}
