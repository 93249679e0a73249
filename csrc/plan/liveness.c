/* Live ranges, and the places that follow from the graph alone: views and what works in place share
 * memory. An alias set is a value and its views. Its root is the value that a step, the caller or a
 * constant gives. */
#include "plan/liveness.h"

#include "ops/op.h"

typedef struct alias_sets {
  const omc_graph *graph;
  omc_liveness *l;
  bool retain_graph;
  uint32_t *root;        /* by value id */
  uint32_t *born;        /* by root: the step that writes it; UINT32_MAX: not written by a step */
  uint32_t *last;        /* by root: the last step that reads it */
  bool *given_up;        /* by root: another alias set has taken over its memory */
  uint32_t after_faults; /* forward cannot fail from this step on */
} alias_sets;

static omc_status no_memory(const omc_graph *g) {
  OMC_FAIL(ENOMEM, "no memory for the live ranges of %u values", g->n_values);
}

/* Steps are the nodes that are no views, phase by phase. */
static omc_status number_steps(const omc_graph *g, omc_arena *kept, omc_arena *scratch,
                               omc_liveness *l) {
  const uint32_t backwards = omc_n_backwards(g);
  l->n_phases = OMC_BACKWARD + (backwards ? backwards : 1);
  l->parts = OMC_NEW_ARRAY(kept, omc_part, l->n_phases);
  if (!l->parts) return no_memory(g);
  for (const omc_node *node = g->first; node; node = node->next) {
    if (node->phase >= l->n_phases)
      OMC_NODE_FAIL(node, EINVALID, "it is in phase %u of %u", node->phase, l->n_phases);
    if (!omc_is_view(node)) l->parts[node->phase].end_step++;
  }
  for (omc_phase p = 0; p < l->n_phases; p++) {
    l->parts[p].step = l->n_steps;
    l->n_steps += l->parts[p].end_step;
    l->parts[p].end_step = l->parts[p].step;
  }
  l->nodes = OMC_NEW_ARRAY(scratch, const omc_node *, l->n_steps);
  if (!l->nodes) return no_memory(g);
  for (const omc_node *node = g->first; node; node = node->next)
    if (!omc_is_view(node)) l->nodes[l->parts[node->phase].end_step++] = node;
  l->n_forward = l->parts[OMC_FORWARD].end_step;
  return OMC_OK;
}

static omc_status place(omc_liveness *l, const omc_value *v, omc_place at) {
  omc_slot *slot = &l->slots[v->id];
  slot->place = at;
  slot->index = at == OMC_AT_ARENA ? 0 : v->index;
  return omc_type_bytes(&v->type, &slot->bytes);
}

/* Gives every value of the graph its first place: caller's memory, a constant, or the arena. */
static omc_status place_values(const omc_graph *g, omc_liveness *l) {
  for (uint32_t i = 0; i < g->n_inputs; i++) OMC_TRY(place(l, g->inputs[i], OMC_AT_INPUT));
  for (uint32_t k = 0; g->grads && k < g->n_outputs; k++)
    if (g->grads[k]) OMC_TRY(place(l, g->grads[k], OMC_AT_GRAD));
  for (const omc_node *node = g->first; node; node = node->next) {
    for (uint32_t i = 0; i < node->n_in; i++)
      if (omc_is_const(omc_in(node, i))) OMC_TRY(place(l, omc_in(node, i), OMC_AT_CONST));
    for (uint32_t k = 0; k < node->n_out; k++)
      if (node->out[k]) OMC_TRY(place(l, node->out[k], OMC_AT_ARENA));
  }
  for (uint32_t r = 0; r < g->result->n_in; r++)
    if (omc_is_const(omc_in(g->result, r))) OMC_TRY(place(l, omc_in(g->result, r), OMC_AT_CONST));
  return OMC_OK;
}

static void find_alias_sets(const alias_sets *f) {
  for (uint32_t v = 0; v < f->graph->n_values; v++) {
    f->l->slots[v].alias = f->root[v] = v;
    f->born[v] = UINT32_MAX;
    f->last[v] = 0;
  }
  for (const omc_node *node = f->graph->first; node; node = node->next)
    if (omc_is_view(node)) {
      const uint32_t out = node->out[0]->id, in = node->in[0].value->id;
      f->l->slots[out].alias = in;
      f->root[out] = f->root[in];
    }
  for (uint32_t s = 0; s < f->l->n_steps; s++) {
    const omc_node *node = f->l->nodes[s];
    for (uint32_t i = 0; i < node->n_in; i++)
      if (omc_in(node, i)) f->last[f->root[omc_in(node, i)->id]] = s;
    for (uint32_t k = 0; k < node->n_out; k++)
      if (node->out[k]) f->last[node->out[k]->id] = f->born[node->out[k]->id] = s;
  }
}

/* Whether another input of the node reads the memory of input i. */
static bool read_twice(const alias_sets *f, const omc_node *node, uint32_t i) {
  for (uint32_t j = 0; j < node->n_in; j++)
    if (j != i && omc_in(node, j) && f->root[omc_in(node, j)->id] == f->root[omc_in(node, i)->id])
      return true;
  return false;
}

/* Whether the op allows output k in the memory of input i. */
static bool op_allows(const alias_sets *f, const omc_node *node, uint32_t i, uint32_t k) {
  const omc_op *op = omc_op_get(node->op);
  const omc_value *in = omc_in(node, i), *out = omc_out(node, k);
  if (omc_shape_numel(&in->type.shape) != omc_shape_numel(&out->type.shape)) return false;
  if (op->flags & OMC_OP_POINTWISE) return true;
  if (i >= 32 || read_twice(f, node, i)) return false;
  return (k == 0 && op->in_place >> i & 1) || (k == i && op->updates >> i & 1);
}

/* ---- results ---- */

/* Whether the value may be computed right into the memory of an input: all that reads the input
 * is done by then, nobody reads the memory after forward, as the next one writes over it again, and
 * a forward that fails has not got there, as it leaves the input as it was. */
static bool may_write_over(const alias_sets *f, const omc_value *input, uint32_t root) {
  const uint32_t born = f->born[root], read = f->last[input->id];
  if (born < f->after_faults || f->last[root] >= f->l->n_forward || read > born) return false;
  if (read < born) return true;
  const omc_node *node = f->l->nodes[born];
  uint32_t k = 0;
  while (node->out[k] == NULL || node->out[k]->id != root) k++;
  for (uint32_t i = 0; i < node->n_in; i++)
    if (omc_in(node, i) && f->root[omc_in(node, i)->id] == input->id && !op_allows(f, node, i, k))
      return false;
  return true;
}

/* A result is computed right into the caller's memory if a step of its phase makes it and no other
 * result has it already; otherwise it is copied there when its phase ends. */
static void place_result(const alias_sets *f, uint32_t r) {
  const omc_graph *g = f->graph;
  const omc_value *v = omc_in(g->result, r), *over = omc_over(g, r);
  if (!v || (over && f->root[v->id] == over->id)) return;
  const omc_phase phase = omc_result_phase(g, r);
  omc_part *part = &f->l->parts[phase];
  const uint32_t root = f->root[v->id], born = f->born[root];
  omc_slot *slot = &f->l->slots[root];
  if (slot->place == OMC_AT_ARENA && born >= part->step && born < part->end_step &&
      (!over || may_write_over(f, over, root))) {
    slot->place = over ? OMC_AT_INPUT : phase == OMC_FORWARD ? OMC_AT_OUTPUT : OMC_AT_RESULT;
    slot->index = over ? over->index : phase == OMC_FORWARD ? r : (r - g->n_outputs) % g->n_inputs;
    return;
  }
  if (part->end_copy == 0) part->copy = f->l->n_copies;
  f->l->copies[f->l->n_copies++] = (omc_copy){v->id, r};
  part->end_copy = f->l->n_copies;
  if (part->end_step > 0 && f->last[root] < part->end_step - 1) f->last[root] = part->end_step - 1;
}

/* What is written over an input comes last: by then it is known who reads that. */
static void place_results(const alias_sets *f) {
  const omc_graph *g = f->graph;
  for (uint32_t r = g->n_outputs; r < g->result->n_in; r++) place_result(f, r);
  for (uint32_t k = 0; k < g->n_outputs; k++)
    if (!omc_over(g, k)) place_result(f, k);
  for (uint32_t k = 0; k < g->n_outputs; k++)
    if (omc_over(g, k)) place_result(f, k);
}

static void mark_read(const alias_sets *f, omc_part *part, uint32_t value) {
  const omc_slot *slot = &f->l->slots[f->root[value]];
  if (slot->place == OMC_AT_INPUT) part->reads_input[slot->index] = true;
  if (slot->place == OMC_AT_OUTPUT) part->reads_output[slot->index] = true;
}

static omc_status find_reads(const alias_sets *f, omc_arena *kept) {
  for (omc_phase p = OMC_BACKWARD; p < f->l->n_phases; p++) {
    omc_part *part = &f->l->parts[p];
    part->reads_input = OMC_NEW_ARRAY(kept, bool, f->graph->n_inputs);
    part->reads_output = OMC_NEW_ARRAY(kept, bool, f->graph->n_outputs);
    if (!part->reads_input || !part->reads_output) return no_memory(f->graph);
    for (uint32_t s = part->step; s < part->end_step; s++)
      for (uint32_t i = 0; i < f->l->nodes[s]->n_in; i++)
        if (omc_in(f->l->nodes[s], i)) mark_read(f, part, omc_in(f->l->nodes[s], i)->id);
    for (uint32_t c = part->copy; c < part->end_copy; c++) mark_read(f, part, f->l->copies[c].from);
  }
  return OMC_OK;
}

/* ---- the arena ---- */

static bool is_saved(const alias_sets *f, uint32_t root) {
  return f->born[root] < f->l->n_forward && f->last[root] >= f->l->n_forward;
}

/* Lets output k of a step take over the memory of an input that it is the last to read. */
static void take_over(const alias_sets *f, uint32_t s, uint32_t k) {
  const omc_node *node = f->l->nodes[s];
  omc_slot *slots = f->l->slots;
  if (!node->out[k] || slots[node->out[k]->id].place != OMC_AT_ARENA) return;
  omc_slot *out = &slots[node->out[k]->id];
  for (uint32_t i = 0; i < node->n_in; i++) {
    if (!omc_in(node, i)) continue;
    const uint32_t in = omc_in(node, i)->id, root = f->root[in];
    if (slots[root].place != OMC_AT_ARENA || f->last[root] != s || f->given_up[root] ||
        slots[root].bytes != out->bytes || !op_allows(f, node, i, k))
      continue;
    if (f->retain_graph && is_saved(f, root)) continue;
    out->alias = in;
    f->given_up[root] = true;
    return;
  }
}

/* Copies place and life of each alias set's root to its views. */
static void fill_slots(const alias_sets *f) {
  for (uint32_t v = 0; v < f->graph->n_values; v++) {
    omc_slot *slot = &f->l->slots[v];
    const uint32_t root = f->root[v];
    slot->place = f->l->slots[root].place;
    slot->index = f->l->slots[root].index;
    slot->begin = f->born[root] == UINT32_MAX ? 0 : f->born[root];
    slot->end = f->last[root];
  }
}

/* One range for each value with memory of its own, and for those that share it. */
static void fill_ranges(omc_liveness *l, uint32_t n_values) {
  for (uint32_t v = 0; v < n_values; v++) {
    const omc_slot *slot = &l->slots[v];
    if (slot->place != OMC_AT_ARENA || slot->alias != v) continue;
    l->range_of[v] = l->n_ranges;
    l->ranges[l->n_ranges++] =
        (omc_live_range){.begin = slot->begin, .end = slot->end, .bytes = slot->bytes};
  }
  for (uint32_t v = 0; v < n_values; v++) {
    const omc_slot *slot = &l->slots[v];
    if (slot->place != OMC_AT_ARENA) continue;
    l->range_of[v] = l->range_of[omc_slot_root(l->slots, v)];
    omc_live_range *range = &l->ranges[l->range_of[v]];
    if (slot->begin < range->begin) range->begin = slot->begin;
    if (slot->end > range->end) range->end = slot->end;
  }
}

/* Whether the value is in the arena, and `step` of the backward of `phase` reads or writes it. */
static void note_last(omc_liveness *l, const omc_value *v, omc_phase phase, uint32_t step) {
  if (v && l->slots[v->id].place == OMC_AT_ARENA)
    l->ranges[l->range_of[v->id]].last[phase - OMC_BACKWARD] = step;
}

/* By backward, when each range is last needed; with `retain_graph` what forward saved is to the
 * end.
 */
static omc_status fill_last(const alias_sets *f, omc_arena *scratch) {
  omc_liveness *l = f->l;
  const uint32_t n = l->n_phases - OMC_BACKWARD;
  uint32_t *last = OMC_NEW_ARRAY(scratch, uint32_t, (size_t)l->n_ranges *n);
  if (!last) return no_memory(f->graph);
  for (uint32_t r = 0; r < l->n_ranges; r++, last += n) {
    omc_live_range *range = &l->ranges[r];
    range->last = last;
    for (uint32_t b = 0; b < n; b++) last[b] = UINT32_MAX;
  }
  for (omc_phase p = OMC_BACKWARD; p < l->n_phases; p++) {
    const omc_part *part = &l->parts[p];
    for (uint32_t s = part->step; s < part->end_step; s++) {
      for (uint32_t i = 0; i < l->nodes[s]->n_in; i++) note_last(l, omc_in(l->nodes[s], i), p, s);
      for (uint32_t k = 0; k < l->nodes[s]->n_out; k++) note_last(l, l->nodes[s]->out[k], p, s);
    }
    for (uint32_t c = part->copy; c < part->end_copy; c++)
      note_last(l, omc_in(f->graph->result, l->copies[c].to), p, part->end_step - 1);
  }
  for (uint32_t r = 0; f->retain_graph && r < l->n_ranges; r++)
    if (l->ranges[r].begin < l->n_forward && l->ranges[r].end >= l->n_forward)
      for (uint32_t b = 0; b < n; b++) l->ranges[r].last[b] = l->ranges[r].end;
  return OMC_OK;
}

omc_status omc_live_ranges(const omc_graph *g, bool retain_graph, omc_arena *kept,
                           omc_arena *scratch, omc_liveness *l) {
  const uint32_t n = g->n_values;
  *l = (omc_liveness){.slots = OMC_NEW_ARRAY(kept, omc_slot, n),
                      .copies = OMC_NEW_ARRAY(kept, omc_copy, g->result->n_in),
                      .ranges = OMC_NEW_ARRAY(scratch, omc_live_range, n),
                      .range_of = OMC_NEW_ARRAY(scratch, uint32_t, n)};
  alias_sets f = {.graph = g,
                  .l = l,
                  .retain_graph = retain_graph,
                  .root = OMC_NEW_ARRAY(scratch, uint32_t, n),
                  .born = OMC_NEW_ARRAY(scratch, uint32_t, n),
                  .last = OMC_NEW_ARRAY(scratch, uint32_t, n),
                  .given_up = OMC_NEW_ARRAY(scratch, bool, n)};
  if (!l->slots || !l->copies || !l->ranges || !l->range_of || !f.root || !f.born || !f.last ||
      !f.given_up)
    return no_memory(g);
  OMC_TRY(number_steps(g, kept, scratch, l));
  OMC_TRY(place_values(g, l));
  find_alias_sets(&f);
  for (uint32_t s = 0; s < l->n_forward; s++)
    if (omc_node_flags(l->nodes[s]) & OMC_OP_FAILS) f.after_faults = s + 1;
  place_results(&f);
  OMC_TRY(find_reads(&f, kept));
  for (uint32_t v = 0; retain_graph && v < n; v++)
    if (f.root[v] == v && is_saved(&f, v)) f.last[v] = l->n_steps - 1;
  for (uint32_t s = 0; s < l->n_steps; s++)
    for (uint32_t k = 0; k < l->nodes[s]->n_out; k++) take_over(&f, s, k);
  fill_slots(&f);
  fill_ranges(l, n);
  return fill_last(&f, scratch);
}

bool omc_gradient_written(const omc_graph *g, const omc_slot *slots, const omc_part *parts,
                          uint32_t b, uint32_t i, uint32_t *step) {
  const omc_value *v = omc_in(g->result, g->n_outputs + b * g->n_inputs + i);
  const omc_part *part = &parts[OMC_BACKWARD + b];
  if (!v || part->step == part->end_step) return false;
  const omc_slot *slot = &slots[v->id];
  const bool direct = slot->place == OMC_AT_RESULT && slot->index == i;
  *step = direct && slot->begin >= part->step ? slot->begin : part->end_step - 1;
  return true;
}

/* ---- bytes ---- */

static bool add(size_t *live, size_t *total, uint32_t begin, uint32_t end, size_t bytes) {
  live[begin] += bytes; /* differences from step to step wrap around, their sums do not */
  live[end + 1] -= bytes;
  return omc_add_size(*total, bytes, total);
}

omc_status omc_live_bytes(const omc_liveness *l, size_t alignment, const size_t *workspace,
                          size_t *live) {
  size_t total = 0;
  bool fits = true;
  for (uint32_t s = 0; s <= l->n_steps; s++) live[s] = 0;
  for (uint32_t i = 0; i < l->n_ranges; i++) {
    const omc_live_range *r = &l->ranges[i];
    fits &= add(live, &total, r->begin, r->end, omc_round_up(r->bytes, alignment));
  }
  for (uint32_t s = 0; workspace && s < l->n_steps; s++)
    fits &= add(live, &total, s, s, omc_round_up(workspace[s], alignment));
  if (!fits) OMC_FAIL(ENOMEM, "the values of a plan are larger than memory can be");
  for (uint32_t s = 1; s < l->n_steps; s++) live[s] += live[s - 1];
  return OMC_OK;
}

uint32_t omc_live_peak(const size_t *live, uint32_t n_steps) {
  uint32_t peak = 0;
  for (uint32_t s = 1; s < n_steps; s++)
    if (live[s] > live[peak]) peak = s;
  return peak;
}
