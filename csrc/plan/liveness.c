/* Where values live and for how long.
 *
 * An alias set is a value together with its views: it lives as one. The tables below are kept at a
 * alias set's root, the value that a step, the caller or a constant gives. */
#include "plan/plan.h"

typedef struct alias_sets {
  uint32_t *root; /* by value id */
  uint32_t *born; /* by root: the step that writes it; UINT32_MAX: not written by a step */
  uint32_t *last; /* by root: the last step that reads it */
  bool *given_up; /* by root: another alias set has taken over its memory */
} alias_sets;

static omc_status no_memory(const omc_plan *plan) {
  OMC_FAIL(ENOMEM, "no memory to plan %u values", plan->graph->n_values);
}

static omc_status place(omc_plan *plan, const omc_value *v, omc_place at) {
  omc_slot *slot = &plan->slots[v->id];
  slot->place = at;
  slot->index = at == OMC_AT_ARENA ? 0 : v->index;
  return omc_type_bytes(&v->type, &slot->bytes);
}

/* Gives every value of the graph its first place: caller's memory, a constant, or the arena. */
static omc_status place_values(omc_plan *plan) {
  const omc_graph *g = plan->graph;
  for (uint32_t i = 0; i < g->n_inputs; i++) OMC_TRY(place(plan, g->inputs[i], OMC_AT_INPUT));
  for (uint32_t k = 0; g->grads && k < g->n_outputs; k++)
    if (g->grads[k]) OMC_TRY(place(plan, g->grads[k], OMC_AT_GRAD));
  for (const omc_node *node = g->first; node; node = node->next) {
    for (uint32_t i = 0; i < node->n_in; i++)
      if (omc_is_const(omc_in(node, i))) OMC_TRY(place(plan, omc_in(node, i), OMC_AT_CONST));
    for (uint32_t k = 0; k < node->n_out; k++)
      if (node->out[k]) OMC_TRY(place(plan, node->out[k], OMC_AT_ARENA));
  }
  for (uint32_t r = 0; r < g->result->n_in; r++)
    if (omc_is_const(omc_in(g->result, r)))
      OMC_TRY(place(plan, omc_in(g->result, r), OMC_AT_CONST));
  return OMC_OK;
}

static void find_alias_sets(omc_plan *plan, const alias_sets *f) {
  for (uint32_t v = 0; v < plan->graph->n_values; v++) {
    plan->slots[v].alias = f->root[v] = v;
    f->born[v] = UINT32_MAX;
    f->last[v] = 0;
  }
  for (const omc_node *node = plan->graph->first; node; node = node->next)
    if (omc_op_get(node->op)->flags & OMC_OP_VIEW) {
      const uint32_t out = node->out[0]->id, in = node->in[0].value->id;
      plan->slots[out].alias = in;
      f->root[out] = f->root[in];
    }
  for (uint32_t s = 0; s < plan->n_steps; s++) {
    const omc_step *step = &plan->steps[s];
    for (uint32_t i = 0; i < step->n_in + step->n_out; i++) {
      const uint32_t v = step->values[i];
      if (v == UINT32_MAX) continue;
      f->last[f->root[v]] = s;
      if (i >= step->n_in) f->born[v] = s;
    }
  }
}

/* A result is computed right into the caller's memory if a step of its phase makes it and no other
 * result has it already; otherwise it is copied there when its phase ends. */
static omc_status place_results(omc_plan *plan, const alias_sets *f) {
  const omc_graph *g = plan->graph;
  plan->copies = OMC_NEW_ARRAY(&plan->memory, omc_copy, g->result->n_in);
  if (!plan->copies) return no_memory(plan);
  for (uint32_t r = 0; r < g->result->n_in; r++) {
    const omc_value *v = omc_in(g->result, r);
    if (!v) continue;
    const omc_phase phase = omc_result_phase(g, r);
    omc_part *part = &plan->parts[phase];
    const uint32_t root = f->root[v->id], born = f->born[root];
    omc_slot *slot = &plan->slots[root];
    if (slot->place == OMC_AT_ARENA && born >= part->step && born < part->end_step) {
      slot->place = phase == OMC_FORWARD ? OMC_AT_OUTPUT : OMC_AT_RESULT;
      slot->index = phase == OMC_FORWARD ? r : (r - g->n_outputs) % g->n_inputs;
      continue;
    }
    if (part->end_copy == 0) part->copy = plan->n_copies;
    plan->copies[plan->n_copies++] = (omc_copy){v->id, r};
    part->end_copy = plan->n_copies;
    if (part->end_step > 0 && f->last[root] < part->end_step - 1)
      f->last[root] = part->end_step - 1;
  }
  return OMC_OK;
}

static void mark_read(const omc_plan *plan, const alias_sets *f, omc_part *part, uint32_t value) {
  const omc_slot *slot = &plan->slots[f->root[value]];
  if (slot->place == OMC_AT_INPUT) part->reads_input[slot->index] = true;
  if (slot->place == OMC_AT_OUTPUT) part->reads_output[slot->index] = true;
}

static omc_status find_reads(omc_plan *plan, const alias_sets *f) {
  for (omc_phase p = OMC_BACKWARD; p < plan->n_phases; p++) {
    omc_part *part = &plan->parts[p];
    part->reads_input = OMC_NEW_ARRAY(&plan->memory, bool, plan->graph->n_inputs);
    part->reads_output = OMC_NEW_ARRAY(&plan->memory, bool, plan->graph->n_outputs);
    if (!part->reads_input || !part->reads_output) return no_memory(plan);
    for (uint32_t s = part->step; s < part->end_step; s++)
      for (uint32_t i = 0; i < plan->steps[s].n_in; i++)
        if (plan->steps[s].values[i] != UINT32_MAX)
          mark_read(plan, f, part, plan->steps[s].values[i]);
    for (uint32_t c = part->copy; c < part->end_copy; c++)
      mark_read(plan, f, part, plan->copies[c].from);
  }
  return OMC_OK;
}

static bool is_saved(const omc_plan *plan, const alias_sets *f, uint32_t root) {
  return f->born[root] < plan->n_forward && f->last[root] >= plan->n_forward;
}

/* Whether another input of the step reads the memory of input i. */
static bool read_twice(const omc_step *step, const alias_sets *f, uint32_t i) {
  for (uint32_t j = 0; j < step->n_in; j++)
    if (j != i && step->values[j] != UINT32_MAX &&
        f->root[step->values[j]] == f->root[step->values[i]])
      return true;
  return false;
}

/* Whether the op allows output k in the memory of input i. */
static bool op_allows(const omc_step *step, const alias_sets *f, uint32_t i, uint32_t k) {
  const omc_value *in = omc_in(step->node, i), *out = omc_out(step->node, k);
  if (omc_shape_numel(&in->type.shape) != omc_shape_numel(&out->type.shape)) return false;
  if (step->op->flags & OMC_OP_POINTWISE) return true;
  return k == 0 && i < 32 && step->op->in_place >> i & 1 && !read_twice(step, f, i);
}

/* Lets output k take over the memory of an input that this step is the last to read. */
static void take_over(omc_plan *plan, const alias_sets *f, uint32_t s, uint32_t k) {
  const omc_step *step = &plan->steps[s];
  const uint32_t out = step->values[step->n_in + k];
  if (out == UINT32_MAX || plan->slots[out].place != OMC_AT_ARENA) return;
  for (uint32_t i = 0; i < step->n_in; i++) {
    const uint32_t in = step->values[i];
    if (in == UINT32_MAX) continue;
    const uint32_t root = f->root[in];
    if (plan->slots[root].place != OMC_AT_ARENA || f->last[root] != s || f->given_up[root] ||
        plan->slots[root].bytes != plan->slots[out].bytes || !op_allows(step, f, i, k))
      continue;
    if (plan->retain_graph && is_saved(plan, f, root)) continue;
    plan->slots[out].alias = in;
    f->given_up[root] = true;
    return;
  }
}

/* Copies place and life of each alias set's root to its views. */
static void fill_slots(omc_plan *plan, const alias_sets *f) {
  for (uint32_t v = 0; v < plan->graph->n_values; v++) {
    omc_slot *slot = &plan->slots[v];
    const uint32_t root = f->root[v];
    slot->place = plan->slots[root].place;
    slot->index = plan->slots[root].index;
    slot->begin = f->born[root] == UINT32_MAX ? 0 : f->born[root];
    slot->end = f->last[root];
  }
}

omc_status omc_plan_liveness(omc_plan *plan, omc_arena *scratch) {
  const uint32_t n = plan->graph->n_values;
  const alias_sets f = {OMC_NEW_ARRAY(scratch, uint32_t, n), OMC_NEW_ARRAY(scratch, uint32_t, n),
                        OMC_NEW_ARRAY(scratch, uint32_t, n), OMC_NEW_ARRAY(scratch, bool, n)};
  plan->slots = OMC_NEW_ARRAY(&plan->memory, omc_slot, n);
  if (!plan->slots || !f.root || !f.born || !f.last || !f.given_up) return no_memory(plan);

  OMC_TRY(place_values(plan));
  find_alias_sets(plan, &f);
  OMC_TRY(place_results(plan, &f));
  OMC_TRY(find_reads(plan, &f));
  for (uint32_t v = 0; plan->retain_graph && v < n; v++)
    if (f.root[v] == v && is_saved(plan, &f, v)) f.last[v] = plan->n_steps - 1;
  for (uint32_t s = 0; s < plan->n_steps; s++)
    for (uint32_t k = 0; k < plan->steps[s].n_out; k++) take_over(plan, &f, s, k);
  fill_slots(plan, &f);
  return OMC_OK;
}
