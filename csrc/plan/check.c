/* The proof that a plan is safe: the steps are gone through in order, and for every byte of memory
 * it is known whose content it holds.
 *
 * A content is what one step, the caller or a constant gives; its views have the same content. It
 * is intact until something is written over it. */
#include <string.h>

#include "plan/plan.h"

typedef struct checker {
  const omc_plan *plan;
  uint32_t *content;        /* by value id: the value whose content it has */
  const omc_value **values; /* by value id; NULL: not in the graph */
  bool *written, *intact;   /* by content */
  bool *read_back;          /* by content: forward gave it and backward reads it, */
  bool *lost;               /* and a backward has written over it */
  bool *overwritten;        /* by input: an output is written over it */
  uint32_t *held; /* contents intact in the arena and in lent memory, which do not overlap,
                     in the order in which they lie there; none of no bytes */
  uint32_t n_held;
  bool *after_forward; /* by content: as `intact` was then, and `held` */
  uint32_t *held_after, n_held_after;
  uint32_t *in_output; /* by forward output: the content in the caller's tensor */
  uint32_t
      *in_result; /* by input: the content in the caller's gradient, of the backward under way */
  uint32_t *next_step;   /* by phase */
  uint32_t after_faults; /* no step of forward from this one on may fail */
  uint32_t step;         /* under way */
} checker;

#define NOTHING UINT32_MAX

static const char *step_text(const checker *c, char *buf, size_t n) {
  if (c->step < c->plan->n_steps) return omc_node_text(c->plan->steps[c->step].node, buf, n);
  return "the end";
}

static const char *value_name(const checker *c, uint32_t v) {
  const omc_value *value = v < c->plan->graph->n_values ? c->values[v] : NULL;
  return value && value->name ? value->name : "(no name)";
}

/* Fails naming the step under way and two values (`b` may be the same as `a`). */
static omc_status broken(const checker *c, const char *rule, uint32_t a, uint32_t b) {
  char text[OMC_NODE_TEXT];
  OMC_FAIL(EINTERNAL, "plan broken at step %u, %s: %s: value %u '%s', value %u '%s'", c->step,
           step_text(c, text, sizeof text), rule, a, value_name(c, a), b, value_name(c, b));
}

static bool overlap(size_t a, size_t a_bytes, size_t b, size_t b_bytes) {
  return a_bytes && b_bytes && (a < b ? b - a < a_bytes : a - b < b_bytes);
}

static bool inside(size_t offset, size_t bytes, size_t size) {
  return offset <= size && bytes <= size - offset;
}

static bool same_memory(const omc_slot *a, const omc_slot *b) {
  return a->place == b->place && a->index == b->index && a->offset == b->offset &&
         a->bytes == b->bytes;
}

/* Memory that the plan lays out: bytes of the arena or lent by the gradient of input `index`. */
static bool is_laid_out(omc_place place) { return place == OMC_AT_ARENA || place == OMC_AT_LENT; }

static omc_status check_bytes(const checker *c, const omc_value *v) {
  size_t bytes;
  OMC_TRY(omc_type_bytes(&v->type, &bytes));
  return bytes == c->plan->slots[v->id].bytes ? OMC_OK
                                              : broken(c, "slot of the wrong size", v->id, v->id);
}

/* A value of the caller or a constant: there from the start, in its own place. */
static omc_status add_given(checker *c, const omc_value *v, omc_place place) {
  const omc_slot *slot = &c->plan->slots[v->id];
  c->values[v->id] = v;
  c->written[v->id] = c->intact[v->id] = true;
  if (slot->place != place || slot->alias != v->id ||
      (place != OMC_AT_CONST && slot->index != v->index))
    return broken(c, "given value in another place", v->id, v->id);
  return check_bytes(c, v);
}

static omc_status add_consts(checker *c, const omc_node *node) {
  for (uint32_t i = 0; i < node->n_in; i++)
    if (omc_is_const(omc_in(node, i))) OMC_TRY(add_given(c, omc_in(node, i), OMC_AT_CONST));
  return OMC_OK;
}

static omc_status add_view(checker *c, const omc_node *node) {
  const uint32_t in = node->in[0].value->id, out = node->out[0]->id;
  c->content[out] = c->content[in];
  if (c->plan->slots[out].alias != in || !same_memory(&c->plan->slots[in], &c->plan->slots[out]))
    return broken(c, "view that is not in its input's memory", out, in);
  return OMC_OK;
}

/* Takes the values from the graph, and which content each has. */
static omc_status read_graph(checker *c) {
  const omc_graph *g = c->plan->graph;
  for (uint32_t v = 0; v < g->n_values; v++) c->content[v] = v;
  for (uint32_t i = 0; i < g->n_inputs; i++) OMC_TRY(add_given(c, g->inputs[i], OMC_AT_INPUT));
  for (uint32_t k = 0; k < g->n_outputs; k++)
    if (omc_over(g, k)) c->overwritten[omc_over(g, k)->index] = true;
  for (uint32_t k = 0; k < g->n_outputs; k++) {
    c->in_output[k] = NOTHING;
    if (g->grads && g->grads[k]) OMC_TRY(add_given(c, g->grads[k], OMC_AT_GRAD));
  }
  for (const omc_node *node = g->first; node; node = node->next) {
    OMC_TRY(add_consts(c, node));
    for (uint32_t k = 0; k < node->n_out; k++)
      if (node->out[k]) {
        c->values[node->out[k]->id] = node->out[k];
        OMC_TRY(check_bytes(c, node->out[k]));
      }
    if (omc_is_view(node)) OMC_TRY(add_view(c, node));
  }
  return add_consts(c, g->result);
}

/* The steps must be the nodes that are no views, each once; phases may be reordered as wholes. */
static omc_status check_steps(checker *c) {
  const omc_plan *plan = c->plan;
  uint32_t begin = 0;
  for (omc_phase p = 0; p < plan->n_phases; p++) {
    c->step = c->next_step[p] = begin;
    if (plan->parts[p].step != begin || plan->parts[p].end_step < begin)
      return broken(c, "phases that do not follow each other", NOTHING, NOTHING);
    begin = plan->parts[p].end_step;
  }
  if (begin != plan->n_steps || plan->n_forward != plan->parts[OMC_FORWARD].end_step)
    return broken(c, "steps without a phase", NOTHING, NOTHING);
  for (const omc_node *node = plan->graph->first; node; node = node->next) {
    if (omc_is_view(node)) continue;
    if (node->phase >= plan->n_phases) return broken(c, "unknown phase", NOTHING, NOTHING);
    c->step = c->next_step[node->phase]++;
    const omc_step *step = &plan->steps[c->step];
    bool same = c->step < plan->parts[node->phase].end_step && step->node == node && step->kernel &&
                step->n_in == node->n_in && step->n_out == node->n_out;
    for (uint32_t i = 0; same && i < node->n_in + node->n_out; i++) {
      const omc_value *v = i < node->n_in ? omc_in(node, i) : omc_out(node, i - node->n_in);
      same = step->values[i] == (v ? v->id : UINT32_MAX);
    }
    if (!same) return broken(c, "step that is not the graph's next node", NOTHING, NOTHING);
  }
  for (omc_phase p = 0; p < plan->n_phases; p++)
    if (c->next_step[p] != plan->parts[p].end_step)
      return broken(c, "nodes without a step", NOTHING, NOTHING);
  return OMC_OK;
}

/* Whether one of the plan's saved spans holds all of the slot. */
static bool is_saved(const omc_plan *plan, const omc_slot *slot) {
  const uint32_t lender = slot->place == OMC_AT_LENT ? slot->index : OMC_NO_LENDER;
  bool found = slot->bytes == 0;
  for (uint32_t i = 0; i < plan->n_saved && !found; i++) {
    const omc_span *span = &plan->saved[i];
    found = span->lender == lender && slot->offset >= span->offset &&
            inside(slot->offset - span->offset, slot->bytes, span->bytes);
  }
  return found;
}

/* Value v is read at the step under way, in that phase. */
static omc_status check_read(checker *c, uint32_t v, omc_phase phase, uint32_t step) {
  const omc_plan *plan = c->plan;
  const omc_slot *slot = &plan->slots[v];
  const uint32_t content = c->content[v];
  if (!c->values[v] || !c->written[content]) return broken(c, "read before written", v, content);
  if (!c->intact[content]) return broken(c, "read after something was written over it", v, content);
  if (plan->n_steps && (step < slot->begin || step > slot->end))
    return broken(c, "read outside its declared life", v, content);
  if (phase == OMC_FORWARD)
    return slot->place == OMC_AT_GRAD || slot->place == OMC_AT_RESULT
               ? broken(c, "backward memory read by forward", v, content)
               : OMC_OK;
  if (!omc_may_read(phase, c->values[content]))
    return broken(c, "made by another backward", v, content);
  if (slot->place == OMC_AT_INPUT && c->overwritten[slot->index])
    return broken(c, "read by backward where the next forward writes", v, content);
  const omc_part *part = &plan->parts[phase];
  if ((slot->place == OMC_AT_INPUT && !part->reads_input[slot->index]) ||
      (slot->place == OMC_AT_OUTPUT && !part->reads_output[slot->index]))
    return broken(c, "caller's memory read by backward and not asked for", v, content);
  if (!is_laid_out(slot->place) || slot->begin >= plan->n_forward) return OMC_OK;
  c->read_back[content] = true;
  return is_saved(plan, &plan->slots[content])
             ? OMC_OK
             : broken(c, "read by backward and not among what is saved", v, content);
}

static bool reads(const omc_step *step, uint32_t v) {
  for (uint32_t i = 0; i < step->n_in; i++)
    if (step->values[i] == v) return true;
  return false;
}

static bool reads_content(const checker *c, const omc_step *step, uint32_t content) {
  for (uint32_t i = 0; i < step->n_in; i++)
    if (step->values[i] != UINT32_MAX && c->content[step->values[i]] == content) return true;
  return false;
}

/* Whether the op of the step allows its output k to be written over `content`, one of its inputs.
 */
static bool may_overwrite(const checker *c, const omc_step *step, uint32_t k, uint32_t content) {
  const omc_value *out = c->values[step->values[step->n_in + k]];
  uint32_t inputs = 0, places = 0;
  for (uint32_t i = 0; i < step->n_in; i++) {
    if (step->values[i] == UINT32_MAX || c->content[step->values[i]] != content) continue;
    const omc_value *in = c->values[step->values[i]];
    if (omc_shape_numel(&in->type.shape) != omc_shape_numel(&out->type.shape)) return false;
    inputs++;
    places |= i < 32 ? 1u << i : 0;
  }
  return step->op->flags & OMC_OP_POINTWISE ||
         (inputs == 1 && ((k == 0 && places & step->op->in_place) ||
                          (k < 32 && places == 1u << k && places & step->op->updates)));
}

/* Input of the result node that is the first of a phase. */
static uint32_t first_result(const checker *c, omc_phase phase) {
  const omc_graph *g = c->plan->graph;
  return phase == OMC_FORWARD ? 0 : g->n_outputs + (phase - OMC_BACKWARD) * g->n_inputs;
}

/* Bytes of the gradient of an input, if it lends memory and every backward gives it; else 0. */
static size_t lent_bytes(const checker *c, uint32_t input) {
  const omc_graph *g = c->plan->graph;
  size_t bytes = 0;
  if (input >= g->n_inputs || !c->plan->lends[input]) return 0;
  for (uint32_t b = 0; b < omc_n_backwards(g); b++) {
    const omc_value *v = omc_in(g->result, first_result(c, OMC_BACKWARD + b) + input);
    if (!v || (b && c->plan->slots[v->id].bytes != bytes)) return 0;
    bytes = c->plan->slots[v->id].bytes;
  }
  return bytes;
}

/* That memory is about to be written which the plan lays out, and which is there. */
static omc_status check_region(const checker *c, const omc_slot *at, uint32_t v) {
  const bool lent = at->place == OMC_AT_LENT;
  if (!lent && at->index) return broken(c, "in another arena", v, v);
  if (at->offset & (c->plan->provider->alignment - 1)) return broken(c, "not aligned", v, v);
  if (!inside(at->offset, at->bytes, lent ? lent_bytes(c, at->index) : c->plan->arena_bytes))
    return broken(c, lent ? "outside of what is lent" : "outside the arena", v, v);
  if (lent && c->in_result[at->index] != NOTHING)
    return broken(c, "written over a gradient", v, c->in_result[at->index]);
  return OMC_OK;
}

/* Where in the list of those held the first lies that ends behind the start of `at`. */
static uint32_t first_behind(const checker *c, const omc_slot *at) {
  uint32_t low = 0, high = c->n_held;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    const omc_slot *slot = &c->plan->slots[c->held[middle]];
    const bool before = slot->place != at->place   ? slot->place < at->place
                        : slot->index != at->index ? slot->index < at->index
                                                   : slot->offset + slot->bytes <= at->offset;
    if (before)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

/* A content is now where nothing else is that is held. */
static void hold(checker *c, uint32_t content) {
  const omc_slot *slot = &c->plan->slots[content];
  if (slot->bytes == 0) return;
  uint32_t *at = c->held + first_behind(c, slot);
  memmove(at + 1, at, (size_t)(c->held + c->n_held++ - at) * sizeof *at);
  *at = content;
}

/* Memory is about to be written, for value v or, if it is NOTHING, as scratch memory: what lay
 * there is lost. It must be dead, or an input that `shared` says may be overwritten. A gradient may
 * be written over what later steps of other backwards read, but not what its own `step` reads, or
 * the copy that it is; those that are still to come find it lost. */
static omc_status overwrite(checker *c, const omc_slot *at, uint32_t v, uint32_t shared,
                            bool gradient, const omc_step *step) {
  const uint32_t first = first_behind(c, at);
  uint32_t end = first;
  for (; end < c->n_held; end++) {
    const uint32_t content = c->held[end];
    const omc_slot *slot = &c->plan->slots[content];
    if (slot->place != at->place || slot->index != at->index ||
        !overlap(at->offset, at->bytes, slot->offset, slot->bytes))
      break;
    const bool read =
        (v != NOTHING && content == c->content[v]) || (step && reads_content(c, step, content));
    const bool needed = gradient ? read || slot->begin == c->step : slot->end >= c->step;
    if (content != shared && needed)
      return broken(c, "written over a value that is live", v, content);
    c->intact[content] = false;
  }
  memmove(c->held + first, c->held + end, (c->n_held - end) * sizeof *c->held);
  c->n_held -= end - first;
  return OMC_OK;
}

/* The scratch memory of a step. */
static omc_slot scratch_of(const omc_step *step) {
  return (omc_slot){
      .place = OMC_AT_ARENA, .offset = step->workspace_offset, .bytes = step->workspace_bytes};
}

static omc_status write_laid_out(checker *c, const omc_step *step, uint32_t k, uint32_t v) {
  const omc_slot *slot = &c->plan->slots[v];
  OMC_TRY(check_region(c, slot, v));
  if (slot->place == OMC_AT_ARENA &&
      overlap(slot->offset, slot->bytes, step->workspace_offset, step->workspace_bytes))
    return broken(c, "output in scratch memory", v, v);
  uint32_t shared = NOTHING;
  if (slot->alias != v) {
    if (slot->alias >= c->plan->graph->n_values || !reads(step, slot->alias) ||
        !same_memory(slot, &c->plan->slots[slot->alias]))
      return broken(c, "alias of what is no input in the same memory", v, slot->alias);
    shared = c->content[slot->alias];
    if (!may_overwrite(c, step, k, shared))
      return broken(c, "op does not work in place", v, shared);
    if (c->plan->slots[shared].end > c->step)
      return broken(c, "takes over memory that is read later", v, shared);
  }
  OMC_TRY(overwrite(c, slot, v, shared, false, step));
  hold(c, v);
  return OMC_OK;
}

/* The gradient of an input is about to be written: what lay in its memory is lost. */
static omc_status end_lending(checker *c, uint32_t input, uint32_t v, const omc_step *step) {
  const omc_slot all = {.place = OMC_AT_LENT, .index = input, .bytes = lent_bytes(c, input)};
  return overwrite(c, &all, v, NOTHING, true, step);
}

/* Output k, of content v, is now where the input is that it is declared to be written over: what
 * the caller gave is lost. */
static omc_status write_over(checker *c, uint32_t k, uint32_t v) {
  const uint32_t input = c->plan->graph->over[k]->id;
  if (!c->intact[input]) return broken(c, "input written over twice", v, input);
  c->intact[input] = false;
  c->in_output[k] = v;
  return OMC_OK;
}

/* Output k of the step goes right into the memory of one of the graph's inputs. The input must be
 * declared to become just this, and no step from here on may fail: after a forward that fails the
 * caller has what was given. */
static omc_status write_input(checker *c, const omc_step *step, uint32_t k, uint32_t v) {
  const omc_plan *plan = c->plan;
  const omc_graph *g = plan->graph;
  const omc_slot *slot = &plan->slots[v];
  uint32_t output = 0;
  while (output < g->n_outputs &&
         (!omc_over(g, output) || omc_over(g, output)->index != slot->index))
    output++;
  if (output == g->n_outputs || c->content[omc_in(g->result, output)->id] != v ||
      step->node->phase != OMC_FORWARD || slot->alias != v)
    return broken(c, "written over an input that is not to become this", v, v);
  const uint32_t input = g->over[output]->id;
  for (uint32_t i = 0; i < step->n_in; i++)
    if (step->values[i] != UINT32_MAX && c->content[step->values[i]] == input &&
        !may_overwrite(c, step, k, input))
      return broken(c, "op does not work in place", v, input);
  if (c->step < c->after_faults)
    return broken(c, "written over an input by a forward that may fail yet", v, input);
  return write_over(c, output, v);
}

static omc_status write_caller(checker *c, const omc_step *step, uint32_t v) {
  const omc_plan *plan = c->plan;
  const omc_slot *slot = &plan->slots[v];
  const bool output = slot->place == OMC_AT_OUTPUT;
  const uint32_t n = output ? plan->graph->n_outputs : plan->graph->n_inputs;
  uint32_t *in = output ? c->in_output : c->in_result;
  if ((!output && slot->place != OMC_AT_RESULT) || slot->alias != v || slot->index >= n ||
      output != (step->node->phase == OMC_FORWARD))
    return broken(c, "written to a place that is not for it", v, v);
  const omc_value *wanted =
      omc_in(plan->graph->result, first_result(c, step->node->phase) + slot->index);
  if (!wanted || plan->slots[wanted->id].bytes != slot->bytes)
    return broken(c, "result of another size", v, wanted ? wanted->id : NOTHING);
  if (in[slot->index] != NOTHING) return broken(c, "result written twice", v, in[slot->index]);
  if (output && omc_over(plan->graph, slot->index))
    return broken(c, "result that has its place in an input", v, v);
  if (!output) OMC_TRY(end_lending(c, slot->index, v, step));
  in[slot->index] = v;
  return OMC_OK;
}

static omc_status check_step(checker *c) {
  const omc_step *step = &c->plan->steps[c->step];
  for (uint32_t i = 0; i < step->n_in; i++)
    if (step->values[i] != UINT32_MAX)
      OMC_TRY(check_read(c, step->values[i], step->node->phase, c->step));
  if (step->workspace_bytes) {
    const omc_slot scratch = scratch_of(step);
    OMC_TRY(check_region(c, &scratch, NOTHING));
    OMC_TRY(overwrite(c, &scratch, NOTHING, NOTHING, false, step));
  }
  for (uint32_t k = 0; k < step->n_out; k++) {
    const uint32_t v = step->values[step->n_in + k];
    if (v == UINT32_MAX) continue;
    const omc_slot *slot = &c->plan->slots[v];
    if (slot->begin != c->step || slot->end < c->step)
      return broken(c, "written outside its declared life", v, v);
    if (is_laid_out(slot->place))
      OMC_TRY(write_laid_out(c, step, k, v));
    else if (slot->place == OMC_AT_INPUT)
      OMC_TRY(write_input(c, step, k, v));
    else
      OMC_TRY(write_caller(c, step, v));
    c->written[v] = c->intact[v] = true;
  }
  return OMC_OK;
}

/* At the end of a phase: its copies are made and its results all there. */
static omc_status check_results(checker *c, omc_phase phase) {
  const omc_plan *plan = c->plan;
  const omc_graph *g = plan->graph;
  const omc_part *part = &plan->parts[phase];
  const bool forward = phase == OMC_FORWARD;
  const uint32_t end = part->end_step, first = first_result(c, phase);
  const uint32_t n = forward ? g->n_outputs : g->n_grads ? g->n_inputs : 0;
  uint32_t *in = forward ? c->in_output : c->in_result;
  c->step = end;
  for (uint32_t i = part->copy; i < part->end_copy; i++) {
    const omc_copy *copy = &plan->copies[i];
    if (copy->to < first || copy->to - first >= n || in[copy->to - first] != NOTHING)
      return broken(c, "copied to a place that is not for it", copy->from, copy->to);
    OMC_TRY(check_read(c, copy->from, phase, end ? end - 1 : 0));
    if (forward && omc_over(g, copy->to)) {
      OMC_TRY(write_over(c, copy->to, c->content[copy->from]));
      continue;
    }
    if (!forward) OMC_TRY(end_lending(c, copy->to - first, copy->from, NULL));
    in[copy->to - first] = c->content[copy->from];
  }
  for (uint32_t k = 0; k < n; k++) {
    const omc_value *v = omc_in(g->result, first + k);
    const omc_value *over = forward ? omc_over(g, k) : NULL;
    if (over && c->content[v->id] == over->id && c->intact[over->id]) continue; /* as it was */
    if (v && in[k] != c->content[v->id]) return broken(c, "result not given", v->id, in[k]);
  }
  return OMC_OK;
}

/* That what is saved is where there is memory, and what is lent adds up. */
static omc_status check_memory(checker *c) {
  const omc_plan *plan = c->plan;
  size_t saved = 0, lent = 0;
  bool any = false;
  for (uint32_t i = 0; i < plan->n_saved; i++) {
    const omc_span *span = &plan->saved[i];
    const bool in_arena = span->lender == OMC_NO_LENDER;
    if (!inside(span->offset, span->bytes,
                in_arena ? plan->arena_bytes : lent_bytes(c, span->lender)))
      return broken(c, "saved where there is no memory", NOTHING, NOTHING);
    saved += span->bytes;
  }
  for (uint32_t i = 0; i < plan->graph->n_inputs; i++)
    any |= plan->lends[i], lent += lent_bytes(c, i);
  if (saved != plan->forward_bytes || lent != plan->lent_bytes || any != plan->lends_any)
    return broken(c, "saved or lent bytes are miscounted", NOTHING, NOTHING);
  return OMC_OK;
}

/* Each backward begins where forward has ended. */
static void begin_phase(checker *c, omc_phase p) {
  const uint32_t n = c->plan->graph->n_values;
  for (uint32_t i = 0; i < c->plan->graph->n_inputs; i++) c->in_result[i] = NOTHING;
  if (p == OMC_BACKWARD) {
    memcpy(c->after_forward, c->intact, n * sizeof *c->intact);
    memcpy(c->held_after, c->held, c->n_held * sizeof *c->held);
    c->n_held_after = c->n_held;
  } else if (p > OMC_BACKWARD) {
    memcpy(c->intact, c->after_forward, n * sizeof *c->intact);
    memcpy(c->held, c->held_after, c->n_held_after * sizeof *c->held);
    c->n_held = c->n_held_after;
  }
}

static void end_backward(checker *c) {
  for (uint32_t v = 0; v < c->plan->graph->n_values; v++)
    c->lost[v] |= c->after_forward[v] && !c->intact[v];
}

static omc_status check_run(checker *c) {
  OMC_TRY(check_memory(c));
  OMC_TRY(read_graph(c));
  OMC_TRY(check_steps(c));
  for (uint32_t s = 0; s < c->plan->n_forward; s++)
    if (omc_node_flags(c->plan->steps[s].node) & OMC_OP_FAILS) c->after_faults = s + 1;
  for (omc_phase p = 0; p < c->plan->n_phases; p++) {
    begin_phase(c, p);
    for (c->step = c->plan->parts[p].step; c->step < c->plan->parts[p].end_step; c->step++)
      OMC_TRY(check_step(c));
    OMC_TRY(check_results(c, p));
    if (p != OMC_FORWARD) end_backward(c);
  }
  for (uint32_t v = 0; !c->plan->consumes && v < c->plan->graph->n_values; v++)
    if (c->read_back[v] && c->lost[v])
      return broken(c, "saved value lost in a plan that may run backward again", v, v);
  return OMC_OK;
}

omc_status omc_plan_check(const omc_plan *plan) {
  omc_arena scratch;
  omc_arena_init(&scratch, plan->allocator);
  const omc_graph *g = plan->graph;
  const uint32_t n = g->n_values;
  checker c = {.plan = plan,
               .content = OMC_NEW_ARRAY(&scratch, uint32_t, n),
               .values = OMC_NEW_ARRAY(&scratch, const omc_value *, n),
               .written = OMC_NEW_ARRAY(&scratch, bool, n),
               .intact = OMC_NEW_ARRAY(&scratch, bool, n),
               .read_back = OMC_NEW_ARRAY(&scratch, bool, n),
               .lost = OMC_NEW_ARRAY(&scratch, bool, n),
               .overwritten = OMC_NEW_ARRAY(&scratch, bool, g->n_inputs),
               .held = OMC_NEW_ARRAY(&scratch, uint32_t, n),
               .after_forward = OMC_NEW_ARRAY(&scratch, bool, n),
               .held_after = OMC_NEW_ARRAY(&scratch, uint32_t, n),
               .in_output = OMC_NEW_ARRAY(&scratch, uint32_t, g->n_outputs),
               .in_result = OMC_NEW_ARRAY(&scratch, uint32_t, g->n_inputs),
               .next_step = OMC_NEW_ARRAY(&scratch, uint32_t, plan->n_phases)};
  omc_status status = OMC_OK;
  if (!c.content || !c.values || !c.written || !c.intact || !c.read_back || !c.lost ||
      !c.overwritten || !c.held || !c.after_forward || !c.held_after || !c.in_output ||
      !c.in_result || !c.next_step)
    status = omc_fail(OMC_ENOMEM, "no memory to check a plan of %u values", n);
  else
    status = check_run(&c);
  omc_arena_deinit(&scratch);
  return status;
}
