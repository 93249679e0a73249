/* Memory under a budget: what backwards read long after forward has made it is made once more.
 *
 * Where most is live, nodes of forward are looked for whose results are read before and after, not
 * meanwhile. Copies of such a node, and of those before it whose results are gone by then, come in
 * front of the first node of each backward that reads its results; those that free most for least
 * work go first. All nodes give the same bits when they run again: random numbers are counted. */
#include <stdlib.h>
#include <string.h>

#include "graph/edit.h"
#include "ops/builder.h"
#include "ops/op.h"
#include "plan/plan.h"

enum { MOST_COPIES = 32 }; /* for the results of one node, it and views among them */

/* Operations that take a device as long as a byte that it reads or writes, in order of magnitude.
 */
#define FLOPS_PER_BYTE 10.0

/* A copy of a node of forward. */
typedef struct copied {
  omc_node *node;
  omc_node *before;    /* which it was put in front of */
  struct copied *next; /* another one of the same */
} copied;

/* The graph as it was when a round began. */
typedef struct round {
  omc_graph *graph;
  omc_arena *scratch, *kept; /* for this round, for all */
  copied **copied;           /* by first value of a node of forward */
  omc_liveness l;
  uint32_t n_values;
  size_t *live; /* by step: bytes in the arena, as far as gradients lend no memory */
  uint32_t peak;
  size_t most;        /* more bytes than that no step should have, */
  size_t least;       /* and as many some step cannot do without */
  uint32_t *step;     /* by value id: that which makes it; of a view, that which comes next */
  uint32_t *place;    /* by value id: of the node in the graph's list */
  uint32_t *last;     /* by root: the last step that reads it */
  bool *touched;      /* by root: who reads it has changed meanwhile */
  omc_value **copies; /* by value id: what a backward has in its place */
} round;

/* A node that may run again, and what for. */
typedef struct candidate {
  omc_node *node;
  size_t freed; /* bytes at the peak */
  double work;  /* in bytes */
} candidate;

/* What runs again for a candidate, in order. */
typedef struct chain {
  omc_node *nodes[MOST_COPIES];
  uint32_t n, depth; /* how far from the candidate the search is */
  double work;
  size_t bytes;  /* of all results */
  size_t inputs; /* bytes of those that the caller keeps a copy of */
} chain;

static omc_status no_memory(void) { OMC_FAIL(ENOMEM, "no memory to keep to a budget of memory"); }

static const omc_slot *slot_of(const round *r, const omc_value *v) { return &r->l.slots[v->id]; }

/* The value whose elements a value is, through views. */
static omc_value *root_of(omc_value *v) {
  while (v->producer && omc_is_view(v->producer)) v = omc_in(v->producer, 0);
  return v;
}

/* ---- a round ---- */

/* By step, the bytes of gradients that are yet to be written, and of the largest of them all. A run
 * that may go back several times lends none. */
static size_t find_lent(const round *r, bool retain_graph, size_t *lent) {
  const omc_graph *g = r->graph;
  size_t largest = 0;
  uint32_t written;
  if (retain_graph || omc_n_backwards(g) != 1) return 0;
  for (uint32_t i = 0; i < g->n_inputs; i++) {
    if (!omc_gradient_written(g, r->l.slots, r->l.parts, 0, i, &written)) continue;
    const size_t bytes = slot_of(r, omc_in(g->result, g->n_outputs + i))->bytes;
    for (uint32_t s = 0; s < written; s++) lent[s] += bytes;
    if (bytes > largest) largest = bytes;
  }
  return largest;
}

static size_t bytes_of(const round *r, const omc_value *v) {
  return v && slot_of(r, v)->place == OMC_AT_ARENA ? slot_of(r, v)->bytes : 0;
}

/* The least that a node has in the arena while it runs: its largest operand or result, of which
 * one may take the memory of the other. */
static size_t own_bytes(const round *r, const omc_node *node) {
  size_t most = 0;
  for (uint32_t i = 0; i < node->n_in; i++)
    if (bytes_of(r, omc_in(node, i)) > most) most = bytes_of(r, omc_in(node, i));
  for (uint32_t k = 0; k < node->n_out; k++)
    if (bytes_of(r, omc_out(node, k)) > most) most = bytes_of(r, omc_out(node, k));
  return most;
}

/* Sets live[s]: scratch memory, what is larger than any gradient, and what all gradients together
 * have no room for; and the least that there has to be. */
static omc_status find_live(round *r, const omc_provider *p, bool retain_graph) {
  const uint32_t n = r->l.n_steps;
  size_t *lent = OMC_NEW_ARRAY(r->scratch, size_t, n + 1),
         *large = OMC_NEW_ARRAY(r->scratch, size_t, n + 1);
  if (!lent || !large) return no_memory();
  OMC_TRY(omc_live_bytes(&r->l, p->alignment, NULL, r->live)); /* no sum of some is too large */
  const size_t largest = find_lent(r, retain_graph, lent);
  for (uint32_t i = 0; i < r->l.n_ranges; i++) {
    const omc_live_range *x = &r->l.ranges[i];
    for (uint32_t s = x->begin; x->bytes > largest && s <= x->end; s++) large[s] += x->bytes;
  }
  for (uint32_t s = 0; s < n; s++) {
    omc_call call;
    OMC_TRY(p->prepare(p->ctx, r->l.nodes[s], p->threads(p->ctx), r->scratch, &call));
    const size_t small = r->live[s] - large[s];
    r->live[s] = large[s] + (small > lent[s] ? small - lent[s] : 0);
    if (!omc_add_size(r->live[s], call.workspace_bytes, &r->live[s])) return no_memory();
    size_t own = own_bytes(r, r->l.nodes[s]);
    own = call.workspace_bytes + (own > lent[s] ? own - lent[s] : 0);
    if (own > r->least) r->least = own;
  }
  return OMC_OK;
}

static omc_status find_steps(const round *r) {
  uint32_t *next = OMC_NEW_ARRAY(r->scratch, uint32_t, r->l.n_phases);
  if (!next) return no_memory();
  for (omc_phase p = 0; p < r->l.n_phases; p++) next[p] = r->l.parts[p].step;
  uint32_t place = 0;
  for (const omc_node *node = r->graph->first; node; node = node->next) {
    const uint32_t s = next[node->phase];
    next[node->phase] += !omc_is_view(node);
    place++;
    for (uint32_t k = 0; k < node->n_out; k++)
      if (node->out[k]) {
        r->step[node->out[k]->id] = s;
        r->place[node->out[k]->id] = place;
      }
    for (uint32_t i = 0; i < node->n_in && !omc_is_view(node); i++) {
      uint32_t *last = omc_in(node, i) ? &r->last[root_of(omc_in(node, i))->id] : NULL;
      if (last && *last < s) *last = s;
    }
  }
  return OMC_OK;
}

static omc_status begin(round *r, const omc_provider *provider, bool retain_graph) {
  const uint32_t n = r->n_values = r->graph->n_values;
  OMC_TRY(omc_live_ranges(r->graph, retain_graph, r->scratch, r->scratch, &r->l));
  r->live = OMC_NEW_ARRAY(r->scratch, size_t, r->l.n_steps + 1);
  r->step = OMC_NEW_ARRAY(r->scratch, uint32_t, n);
  r->place = OMC_NEW_ARRAY(r->scratch, uint32_t, n);
  r->last = OMC_NEW_ARRAY(r->scratch, uint32_t, n);
  r->touched = OMC_NEW_ARRAY(r->scratch, bool, n);
  r->copies = OMC_NEW_ARRAY(r->scratch, omc_value *, n);
  if (!r->live || !r->step || !r->place || !r->last || !r->touched || !r->copies)
    return no_memory();
  OMC_TRY(find_live(r, provider, retain_graph));
  r->peak = omc_live_peak(r->live, r->l.n_steps);
  return find_steps(r);
}

/* ---- what a node frees ---- */

static uint32_t first_id(const omc_node *node) {
  uint32_t k = 0;
  while (!node->out[k]) k++;
  return node->out[k]->id;
}

static bool is_new(const round *r, const omc_node *node) { return first_id(node) >= r->n_values; }
static uint32_t step_of(const round *r, const omc_node *node) { return r->step[first_id(node)]; }
static uint32_t place_of(const round *r, const omc_node *node) { return r->place[first_id(node)]; }

/* Whether forward reads `v` and its views before the peak only, and that backward in which the peak
 * is after it only; *first becomes the first step at which a backward does, if it is before that.
 */
static bool spans_peak(const round *r, const omc_value *v, uint32_t *first) {
  for (const omc_use *use = v->uses; use; use = use->next) {
    if (use->node == r->graph->result) return false;
    if (omc_is_view(use->node)) {
      if (!spans_peak(r, use->node->out[0], first)) return false;
      continue;
    }
    if (is_new(r, use->node)) return false;
    const uint32_t s = step_of(r, use->node);
    const omc_phase phase = use->node->phase;
    if (phase == OMC_FORWARD && s >= r->peak) return false;
    if (phase != OMC_FORWARD && phase == r->l.nodes[r->peak]->phase && s <= r->peak) return false;
    if (phase != OMC_FORWARD && s < *first) *first = s;
  }
  return true;
}

/* What a copy of the node reads and gives: all but what its op brings up to date, which is not
 * touched again. NULL: nothing. */
static bool is_update(const omc_node *node, uint32_t i) {
  return i < 32 && omc_op_get(node->op)->updates >> i & 1;
}
static omc_value *operand(const omc_node *node, uint32_t i) {
  return is_update(node, i) ? NULL : omc_in(node, i);
}
static omc_value *result(const omc_node *node, uint32_t k) {
  return is_update(node, k) ? NULL : omc_out(node, k);
}

/* The bytes that are free at the peak if backwards read a copy of output k; *first becomes the
 * first step that does, if it is before that. */
static size_t frees(const round *r, const omc_node *node, uint32_t k, uint32_t *first) {
  const omc_value *v = result(node, k);
  uint32_t s = UINT32_MAX;
  if (!v || slot_of(r, v)->place != OMC_AT_ARENA || r->touched[v->id] || !spans_peak(r, v, &s) ||
      s == UINT32_MAX)
    return 0;
  if (s < *first) *first = s;
  return slot_of(r, v)->bytes;
}

/* ---- what it takes to run it again ---- */

/* How many backwards read an input. */
static uint32_t readers(const round *r, const omc_value *input) {
  uint32_t n = 0;
  for (omc_phase p = OMC_BACKWARD; p < r->l.n_phases; p++)
    n += r->l.parts[p].reads_input[input->index];
  return n;
}

static bool is_overwritten(const omc_graph *g, const omc_value *input) {
  for (uint32_t k = 0; k < g->n_outputs; k++)
    if (omc_over(g, k) == input) return true;
  return false;
}

/* Whether the value is there at a step of a backward anyway. So is an input that all backwards
 * read, or none: a caller who lets such a one change keeps a copy of it. One that some read may
 * change once these have run. */
static bool stays(const round *r, omc_value *v, uint32_t step) {
  const omc_value *root = root_of(v);
  if (omc_is_const(root)) return true;
  if (root->role == OMC_ROLE_INPUT)
    return !is_overwritten(r->graph, root) &&
           (readers(r, root) == 0 || readers(r, root) == r->l.n_phases - OMC_BACKWARD);
  return slot_of(r, root)->place == OMC_AT_ARENA && r->last[root->id] >= step &&
         !r->touched[root->id];
}

static bool holds(const chain *c, const omc_node *node) {
  for (uint32_t i = 0; i < c->n; i++)
    if (c->nodes[i] == node) return true;
  return false;
}

static omc_status add_input(const round *r, const omc_value *v, chain *c) {
  size_t bytes;
  if (v->role != OMC_ROLE_INPUT || readers(r, v) > 0) return OMC_OK;
  OMC_TRY(omc_type_bytes(&v->type, &bytes));
  if (!omc_add_size(c->inputs, bytes, &c->inputs)) c->inputs = SIZE_MAX;
  return OMC_OK;
}

/* Adds a node, and before it those whose results it needs and that do not stay until `step`. */
static omc_status gather(const round *r, omc_node *node, uint32_t step, chain *c, bool *possible) {
  const uint32_t flags = omc_node_flags(node);
  omc_cost cost;
  size_t bytes;
  *possible &= !(flags & OMC_OP_CALLBACK) && c->depth < MOST_COPIES;
  c->depth++;
  for (uint32_t i = 0; *possible && i < node->n_in; i++) {
    omc_value *v = operand(node, i);
    if (!v || (v->producer && holds(c, v->producer))) continue;
    if (stays(r, v, step)) {
      OMC_TRY(add_input(r, root_of(v), c));
      continue;
    }
    *possible = v->producer != NULL;
    if (*possible) OMC_TRY(gather(r, v->producer, step, c, possible));
  }
  c->depth--;
  *possible &= c->n < MOST_COPIES;
  if (!*possible) return OMC_OK;
  c->nodes[c->n++] = node;
  if (omc_is_view(node)) return OMC_OK;
  OMC_TRY(omc_node_cost(node, &cost));
  c->work += cost.bytes + cost.flops / FLOPS_PER_BYTE;
  for (uint32_t k = 0; k < node->n_out; k++) {
    if (!result(node, k)) continue;
    OMC_TRY(omc_type_bytes(&node->out[k]->type, &bytes));
    if (!omc_add_size(c->bytes, bytes, &c->bytes)) *possible = false;
  }
  return OMC_OK;
}

/* Whether running the node again frees memory, and what for: what runs must not itself take as much
 * as there is at the peak. */
static omc_status consider(const round *r, omc_node *node, candidate *out, chain *c, bool *helps) {
  uint32_t first = UINT32_MAX;
  *out = (candidate){.node = node};
  *c = (chain){.n = 0};
  *helps = false;
  for (uint32_t k = 0; k < node->n_out; k++) out->freed += frees(r, node, k, &first);
  if (!out->freed) return OMC_OK;
  bool possible = true;
  OMC_TRY(gather(r, node, first, c, &possible));
  for (uint32_t i = 0; i + 1 < c->n; i++)
    for (uint32_t k = 0; k < c->nodes[i]->n_out; k++) {
      uint32_t then = UINT32_MAX;
      const size_t bytes = frees(r, c->nodes[i], k, &then);
      if (then >= first) out->freed += bytes;
    }
  if (!possible || out->freed <= c->inputs) return OMC_OK;
  size_t then; /* at the first step, where what it frees is live now */
  *helps = omc_add_size(r->live[first], c->bytes - out->freed, &then) && then < r->live[r->peak];
  out->freed -= c->inputs;
  out->work = c->work;
  return OMC_OK;
}

static int compare(const void *left, const void *right) {
  const candidate *a = left, *b = right;
  const double x = (double)a->freed * b->work, y = (double)b->freed * a->work;
  if (x != y) return x > y ? -1 : 1;
  return a->freed != b->freed ? (a->freed > b->freed ? -1 : 1) : 0;
}

/* ---- running it again ---- */

/* Whether from one step to another there is room for what a node of forward gives. */
static bool has_room(const round *r, const omc_node *node, uint32_t from, uint32_t to) {
  const size_t room = r->most > r->least ? r->most : r->least;
  size_t bytes = 0, then;
  for (uint32_t k = 0; k < node->n_out; k++)
    if (result(node, k)) bytes += slot_of(r, node->out[k])->bytes;
  for (uint32_t s = from; s < to; s++)
    if (!omc_add_size(r->live[s], bytes, &then) || then > room) return false;
  return true;
}

static copied *find_copy(const round *r, const omc_node *of, omc_phase phase) {
  copied *c = r->copied[first_id(of)];
  while (c && c->node->phase != phase) c = c->next;
  return c;
}

/* The node that a copy is, or is in front of if it is new. */
static const omc_node *at(const round *r, const copied *c) {
  return is_new(r, c->node) ? c->before : c->node;
}

/* Notes a new copy, which stands for an earlier one further on if it may be kept until then. */
static omc_status note(const round *r, const omc_node *of, omc_node *copy, omc_node *before) {
  copied *c = find_copy(r, of, copy->phase);
  if (c && place_of(r, at(r, c)) >= place_of(r, before) &&
      has_room(r, of, step_of(r, before), step_of(r, at(r, c)))) {
    for (uint32_t k = 0; k < copy->n_out; k++)
      if (copy->out[k]) omc_replace_uses(c->node->out[k], copy->out[k]);
    omc_erase_node(r->graph, c->node);
  }
  if (!c) {
    c = OMC_NEW(r->kept, copied);
    if (!c) return no_memory();
    c->next = r->copied[first_id(of)];
    r->copied[first_id(of)] = c;
  }
  c->node = copy;
  c->before = before;
  return OMC_OK;
}

/* The first step at which nobody needs a copy any more. */
static uint32_t end_of(const round *r, const copied *c) {
  uint32_t end = step_of(r, at(r, c));
  for (uint32_t k = 0; k < c->node->n_out && !is_new(r, c->node); k++)
    if (c->node->out[k] && r->last[c->node->out[k]->id] >= end)
      end = r->last[c->node->out[k]->id] + 1;
  return end;
}

/* Whether there is a copy in front of the builder that may be kept until then. */
static bool is_there(round *r, const omc_node *node, const omc_builder *b) {
  const copied *c = find_copy(r, node, b->phase);
  if (!c || c->node == b->before || place_of(r, at(r, c)) > place_of(r, b->before) ||
      !has_room(r, node, end_of(r, c), step_of(r, b->before)))
    return false;
  for (uint32_t k = 0; k < c->node->n_out; k++)
    if (node->out[k]) r->copies[node->out[k]->id] = c->node->out[k];
  return true;
}

/* A copy of the node where the builder is, which reads copies as far as there are some. */
static omc_status copy_node(round *r, const omc_node *node, omc_builder *b) {
  if (is_there(r, node, b)) return OMC_OK;
  uint32_t n_in = node->n_in, n_out = node->n_out, left_out = 0;
  while (n_in > 0 && is_update(node, n_in - 1)) n_in--;
  while (n_out > 0 && is_update(node, n_out - 1)) n_out--;
  omc_value **in = OMC_NEW_ARRAY(r->scratch, omc_value *, n_in + n_out), **out = in + n_in;
  if (!in) return no_memory();
  for (uint32_t i = 0; i < n_in; i++) {
    omc_value *v = operand(node, i);
    in[i] = v && r->copies[v->id] ? r->copies[v->id] : v;
    if (!v && i < 32) left_out |= 1u << i;
  }
  b->name = node->name;
  omc_build(b, node->op, n_in, in, left_out, node->n_attr, node->attr, n_out, out);
  OMC_TRY(b->status);
  for (uint32_t k = 0; k < n_out; k++) {
    if (result(node, k))
      r->copies[node->out[k]->id] = out[k];
    else if (out[k])
      out[k]->producer->out[k] = NULL;
  }
  omc_node *copy = r->copies[first_id(node)]->producer;
  return omc_is_view(node) ? OMC_OK : note(r, node, copy, b->before);
}

/* The first node of a phase, from a place on, that reads `v` or one of forward's views of it;
 * `so_far` if that comes before it. */
static omc_node *first_reader(const round *r, const omc_value *v, omc_phase phase, uint32_t from,
                              omc_node *so_far) {
  for (const omc_use *use = v->uses; use; use = use->next) {
    omc_node *node = use->node;
    if (node == r->graph->result) continue;
    if (node->phase == phase) {
      if (!is_new(r, node) && place_of(r, node) >= from &&
          (!so_far || place_of(r, node) < place_of(r, so_far)))
        so_far = node;
    } else if (omc_is_view(node)) {
      so_far = first_reader(r, node->out[0], phase, from, so_far);
    }
  }
  return so_far;
}

/* Lets the builder's phase read the copy of `v`, and of views of it, from a place on. */
static omc_status read_copy(round *r, omc_value *v, uint32_t from, omc_builder *b) {
  for (omc_use *use = v->uses, *next; use; use = next) {
    next = use->next;
    omc_node *node = use->node;
    if (node == r->graph->result) continue;
    if (node->phase == b->phase) {
      if (!is_new(r, node) && place_of(r, node) >= from)
        omc_set_input(node, use->index, r->copies[v->id]);
    } else if (omc_is_view(node) && first_reader(r, node->out[0], b->phase, from, NULL)) {
      if (!r->copies[node->out[0]->id]) OMC_TRY(copy_node(r, node, b));
      OMC_TRY(read_copy(r, node->out[0], from, b));
    }
  }
  return OMC_OK;
}

/* Puts copies in front of the first node of a phase that reads what the last of the chain frees;
 * from there on that phase reads all results of the copies. */
static omc_status run_again_in(round *r, const chain *c, omc_phase phase, const bool *freed) {
  const omc_node *node = c->nodes[c->n - 1];
  omc_node *before = NULL;
  for (uint32_t k = 0; k < node->n_out; k++)
    if (freed[k]) before = first_reader(r, node->out[k], phase, 0, before);
  if (!before) return OMC_OK;
  const uint32_t from = place_of(r, before);
  omc_builder b = {.graph = r->graph, .before = before, .phase = phase};
  memset(r->copies, 0, r->n_values * sizeof *r->copies);
  for (uint32_t i = 0; i < c->n; i++) OMC_TRY(copy_node(r, c->nodes[i], &b));
  for (uint32_t i = 0; i < c->n; i++)
    for (uint32_t k = 0; k < c->nodes[i]->n_out; k++)
      if (result(c->nodes[i], k)) OMC_TRY(read_copy(r, c->nodes[i]->out[k], from, &b));
  return OMC_OK;
}

static omc_status run_again(round *r, const chain *c) {
  const omc_node *node = c->nodes[c->n - 1];
  bool *freed = OMC_NEW_ARRAY(r->scratch, bool, node->n_out);
  if (!freed) return no_memory();
  uint32_t first = UINT32_MAX;
  for (uint32_t k = 0; k < node->n_out; k++) freed[k] = frees(r, node, k, &first) > 0;
  for (omc_phase p = OMC_BACKWARD; p < r->l.n_phases; p++) OMC_TRY(run_again_in(r, c, p, freed));
  for (uint32_t j = 0; j < c->n; j++) {
    for (uint32_t k = 0; k < c->nodes[j]->n_out; k++)
      if (c->nodes[j]->out[k]) r->touched[root_of(c->nodes[j]->out[k])->id] = true;
    for (uint32_t i = 0; i < c->nodes[j]->n_in; i++)
      if (omc_in(c->nodes[j], i)) r->touched[root_of(omc_in(c->nodes[j], i))->id] = true;
  }
  return OMC_OK;
}

/* Frees memory at the peak until that is no more than it should be, or nothing helps; *freed tells
 * whether anything did. */
static omc_status lower_peak(round *r, bool *freed) {
  candidate *all = OMC_NEW_ARRAY(r->scratch, candidate, r->l.n_forward + 1);
  if (!all) return no_memory();
  uint32_t n = 0;
  chain c;
  bool helps;
  for (omc_node *node = r->graph->first; node && node->phase == OMC_FORWARD; node = node->next) {
    if (omc_is_view(node) || step_of(r, node) >= r->peak) continue;
    OMC_TRY(consider(r, node, &all[n], &c, &helps));
    n += helps;
  }
  qsort(all, n, sizeof *all, compare);
  size_t live = r->live[r->peak];
  *freed = false;
  for (uint32_t i = 0; i < n && live > r->most; i++) {
    candidate now;
    OMC_TRY(consider(r, all[i].node, &now, &c, &helps));
    if (!helps) continue;
    OMC_TRY(run_again(r, &c));
    live -= now.freed < live ? now.freed : live;
    *freed = true;
  }
  return OMC_OK;
}

/* ---- the whole ---- */

typedef struct task {
  omc_graph *graph;
  const omc_provider *provider;
  bool retain_graph;
  const omc_allocator *allocator;
  omc_arena kept;
  copied **copied;
} task;

/* The arena of a plan of the graph as it is. */
static omc_status plan_bytes(const task *t, size_t *out) {
  omc_graph *clone;
  omc_plan *plan;
  OMC_TRY(omc_graph_clone(t->graph, t->allocator, &clone));
  OMC_TRY(omc_plan_create(clone, t->provider, t->retain_graph, t->allocator, &plan));
  *out = plan->arena_bytes;
  omc_plan_release(plan);
  return OMC_OK;
}

/* What rounds have come to. */
typedef struct progress {
  bool changed; /* something is computed again that was not */
  bool stuck;   /* nothing more would help */
  size_t live;  /* most bytes that a step should have, before the last round */
} progress;

static omc_status do_round(task *t, size_t most, omc_arena *scratch, progress *p) {
  round r = {
      .graph = t->graph, .scratch = scratch, .kept = &t->kept, .copied = t->copied, .most = most};
  OMC_TRY(begin(&r, t->provider, t->retain_graph));
  *p = (progress){.stuck = most == 0, .live = r.live[r.peak]};
  if (r.live[r.peak] <= most) return OMC_OK;
  OMC_TRY(lower_peak(&r, &p->changed));
  p->stuck = !p->changed;
  return OMC_OK;
}

/* Rounds, until no step should have more than `most`. */
static omc_status do_rounds(task *t, size_t most, progress *p) {
  progress now = {.changed = true};
  for (*p = (progress){false, false, 0}; now.changed; p->stuck = now.stuck, p->live = now.live) {
    omc_arena scratch;
    omc_arena_init(&scratch, t->allocator);
    const omc_status status = do_round(t, most, &scratch, &now);
    omc_arena_deinit(&scratch);
    OMC_TRY(status);
    p->changed |= now.changed;
  }
  return OMC_OK;
}

/* What steps should have is the least that a plan may reach: if it does not, they should have less.
 */
static omc_status keep_to(task *t, const omc_budget *budget) {
  size_t bytes;
  OMC_TRY(plan_bytes(t, &bytes));
  const double share = budget->share * (double)bytes;
  const size_t most = share < (double)budget->bytes ? (size_t)share : budget->bytes;
  progress p = {false, false, 0};
  for (size_t aim = most; bytes > most && !p.stuck;) {
    OMC_TRY(do_rounds(t, aim, &p));
    if (p.changed) OMC_TRY(plan_bytes(t, &bytes));
    if (bytes > most)
      aim = (size_t)((double)(p.live < aim ? p.live : aim) * (double)most / (double)bytes);
  }
  return OMC_OK;
}

omc_status omc_recompute(omc_graph *graph, const omc_provider *provider, bool retain_graph,
                         const omc_budget *budget, const omc_allocator *allocator) {
  task t = {graph, provider, retain_graph, allocator, .copied = NULL};
  omc_arena_init(&t.kept, allocator);
  t.copied = OMC_NEW_ARRAY(&t.kept, copied *, graph->n_values);
  const omc_status status = t.copied ? keep_to(&t, budget) : no_memory();
  omc_arena_deinit(&t.kept);
  return status;
}
