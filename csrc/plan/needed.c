/* What some of a backward's gradients need. */
#include <string.h>

#include "plan/plan.h"

static uint32_t root_of(const omc_plan *plan, uint32_t id) {
  while (plan->slots[id].alias != id) id = plan->slots[id].alias;
  return id;
}

static void note_read(const omc_plan *plan, uint32_t id, bool *reads_input, bool *reads_output) {
  const omc_slot *slot = &plan->slots[id];
  if (slot->place == OMC_AT_INPUT) reads_input[slot->index] = true;
  if (slot->place == OMC_AT_OUTPUT) reads_output[slot->index] = true;
}

/* Steps from the last to the first: who writes what is needed needs what it reads. What shares
 * memory is needed together. */
static void walk(const omc_plan *plan, const omc_part *part, bool *live, bool *needed,
                 bool *reads_input, bool *reads_output) {
  for (uint32_t s = part->end_step; s-- > part->step;) {
    const omc_step *step = &plan->steps[s];
    const uint32_t *in = step->values, *out = in + step->n_in;
    for (uint32_t k = 0; k < step->n_out; k++)
      needed[s] |= out[k] != UINT32_MAX && live[root_of(plan, out[k])];
    for (uint32_t i = 0; needed[s] && i < step->n_in; i++) {
      if (in[i] == UINT32_MAX) continue;
      live[root_of(plan, in[i])] = true;
      note_read(plan, in[i], reads_input, reads_output);
    }
  }
}

omc_status omc_plan_needed(const omc_plan *plan, uint32_t backward, const bool *wanted,
                           bool *needed, bool *reads_input, bool *reads_output) {
  const omc_graph *g = plan->graph;
  const omc_part *part = &plan->parts[OMC_BACKWARD + backward];
  bool *live = omc_alloc_zero(plan->allocator, g->n_values + 1, sizeof *live);
  if (!live) OMC_FAIL(ENOMEM, "no memory to tell what gradients need");
  memset(needed, 0, (size_t)plan->n_steps + plan->n_copies);
  memset(reads_input, 0, g->n_inputs);
  memset(reads_output, 0, g->n_outputs);
  for (uint32_t i = 0; i < g->n_inputs; i++) {
    const omc_value *v = omc_in(g->result, g->n_outputs + backward * g->n_inputs + i);
    if (v && wanted[i]) live[root_of(plan, v->id)] = true;
  }
  for (uint32_t c = part->copy; c < part->end_copy; c++) {
    const omc_copy *copy = &plan->copies[c];
    if (!wanted[(copy->to - g->n_outputs) % g->n_inputs]) continue;
    needed[plan->n_steps + c] = true;
    note_read(plan, copy->from, reads_input, reads_output);
  }
  walk(plan, part, live, needed, reads_input, reads_output);
  omc_free(plan->allocator, live, g->n_values + 1, sizeof *live);
  return OMC_OK;
}
