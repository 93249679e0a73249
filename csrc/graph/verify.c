#include "graph/verify.h"

#include <string.h>

#include "graph/names.h"
#include "graph/schema.h"

/* Checks one graph; `seen` and `used` are by value id. */
typedef struct verifier {
  const omc_graph *graph;
  bool typed;
  bool *seen;     /* defined before the node being checked; at the end: uses not yet checked */
  uint32_t *used; /* inputs of nodes that use the value */
  omc_names names;
} verifier;

#define VERIFY(ok, node, ...)                               \
  do {                                                      \
    if (!(ok)) OMC_NODE_FAIL(node, EINTERNAL, __VA_ARGS__); \
  } while (0)

static const char *name_of(const omc_value *v) { return v->name ? v->name : "(unnamed)"; }

static omc_status check_type(const verifier *f, const omc_value *v, const omc_node *at) {
  if (!f->typed) return OMC_OK;
  const omc_shape *shape = &v->type.shape;
  char text[OMC_TYPE_TEXT];
  VERIFY(shape->rank >= 0 && shape->rank <= OMC_MAX_RANK, at, "value %u %%%s has rank %d", v->id,
         name_of(v), shape->rank);
  for (int32_t i = 0; i < shape->rank; i++)
    VERIFY(shape->dims[i] >= 0, at, "value %u %%%s is %s", v->id, name_of(v),
           omc_type_text(&v->type, text, sizeof text));
  return OMC_OK;
}

/* Enters a value where it is defined; `at` is its node, or the result node for the others. */
static omc_status define(verifier *f, omc_value *v, const omc_node *at) {
  VERIFY(v->id < f->graph->n_values, at, "value id %u of %u", v->id, f->graph->n_values);
  VERIFY(!f->seen[v->id], at, "value %u %%%s is defined twice", v->id, name_of(v));
  f->seen[v->id] = true;
  OMC_TRY(check_type(f, v, at));
  if (!v->name) return OMC_OK;
  const omc_value *other = omc_names_find(&f->names, v->name, strlen(v->name));
  VERIFY(!other, at, "values %u and %u are both named %%%s", other->id, v->id, v->name);
  return omc_names_add(&f->names, v);
}

static omc_status check_listed(verifier *f, omc_value *v, omc_role role, uint32_t index) {
  const omc_node *at = f->graph->result;
  VERIFY(v && v->role == role && v->index == index && !v->producer, at, "%s %u is not in its place",
         role == OMC_ROLE_GRAD ? "gradient" : "input", index);
  return define(f, v, at);
}

static omc_status check_inputs(verifier *f, const omc_node *node) {
  for (uint32_t i = 0; i < node->n_in; i++) {
    const omc_use *use = &node->in[i];
    omc_value *v = use->value;
    VERIFY(use->node == node && use->index == i, node, "use %u is not its own", i);
    if (!v) continue;
    VERIFY(v->id < f->graph->n_values, node, "value id %u of %u", v->id, f->graph->n_values);
    if (v->role == OMC_ROLE_CONST && !f->seen[v->id]) {
      VERIFY((v->data || omc_shape_numel(&v->type.shape) == 0) && !v->producer, node,
             "constant %u %%%s has no data", v->id, name_of(v));
      OMC_TRY(define(f, v, node));
    }
    VERIFY(f->seen[v->id], node, "input %u, value %u %%%s, is used before it is defined", i, v->id,
           name_of(v));
    const omc_phase phase = node == f->graph->result ? omc_result_phase(f->graph, i) : node->phase;
    VERIFY(omc_may_read(phase, v), node, "%s reads backward value %u %%%s",
           phase == OMC_FORWARD ? "forward" : "another backward", v->id, name_of(v));
    f->used[v->id]++;
  }
  return OMC_OK;
}

static omc_status check_outputs(verifier *f, const omc_node *node) {
  for (uint32_t i = 0; i < node->n_out; i++) {
    omc_value *v = node->out[i];
    if (!v) continue;
    VERIFY(v->producer == node && v->role == OMC_ROLE_NODE && v->index == i, node,
           "output %u does not point back", i);
    OMC_TRY(define(f, v, node));
  }
  return OMC_OK;
}

/* Every link of the value's list is an input that names it, and there are as many as inputs. */
static omc_status check_uses(verifier *f, const omc_value *v) {
  if (!v || !f->seen[v->id]) return OMC_OK;
  f->seen[v->id] = false;
  const omc_use *prev = NULL;
  uint32_t n = 0;
  for (const omc_use *use = v->uses; use; prev = use, use = use->next, n++)
    VERIFY(n < f->used[v->id] && use->value == v && use->prev == prev, use->node,
           "the list of uses of value %u %%%s is broken", v->id, name_of(v));
  VERIFY(n == f->used[v->id], f->graph->result, "value %u %%%s lists %u of %u uses", v->id,
         name_of(v), n, f->used[v->id]);
  return OMC_OK;
}

static omc_status check_uses_of(verifier *f, const omc_node *node) {
  for (uint32_t i = 0; i < node->n_in; i++) OMC_TRY(check_uses(f, omc_in(node, i)));
  for (uint32_t i = 0; i < node->n_out; i++) OMC_TRY(check_uses(f, omc_out(node, i)));
  return OMC_OK;
}

static omc_status check_all_uses(verifier *f) {
  const omc_graph *g = f->graph;
  for (uint32_t i = 0; i < g->n_inputs; i++) OMC_TRY(check_uses(f, g->inputs[i]));
  for (uint32_t i = 0; i < g->cap_grads; i++) OMC_TRY(check_uses(f, g->grads[i]));
  for (const omc_node *n = g->first; n; n = n->next) OMC_TRY(check_uses_of(f, n));
  return check_uses_of(f, g->result);
}

static omc_status check_result(const verifier *f) {
  const omc_graph *g = f->graph;
  const omc_node *result = g->result;
  VERIFY(result->op == OMC_N_OPS && result->n_out == 0, result, "no result node");
  VERIFY(result->n_in == g->n_outputs + g->n_grads, result,
         "%u results for %u outputs and %u gradients", result->n_in, g->n_outputs, g->n_grads);
  VERIFY(g->n_grads == omc_n_backwards(g) * g->n_inputs, result, "%u gradients for %u inputs",
         g->n_grads, g->n_inputs);
  for (uint32_t i = 0; i < g->n_outputs; i++)
    VERIFY(omc_in(result, i), result, "output %u is left out", i);
  for (uint32_t i = 0; i < g->n_outputs; i++) {
    const omc_value *input = omc_over(g, i);
    VERIFY(!input || (input->index < g->n_inputs && g->inputs[input->index] == input), result,
           "output %u is written over what is no input", i);
    for (uint32_t k = 0; input && k < i; k++)
      VERIFY(omc_over(g, k) != input, result, "outputs %u and %u are written over one input", k, i);
  }
  if (!f->typed) return OMC_OK;
  OMC_TRY(omc_graph_check_grads(g));
  return omc_graph_check_over(g);
}

static omc_status check_graph(verifier *f) {
  const omc_graph *g = f->graph;
  OMC_TRY(check_result(f));
  for (uint32_t i = 0; i < g->n_inputs; i++)
    OMC_TRY(check_listed(f, g->inputs[i], OMC_ROLE_INPUT, i));
  for (uint32_t i = 0; i < g->cap_grads; i++)
    if (g->grads[i]) OMC_TRY(check_listed(f, g->grads[i], OMC_ROLE_GRAD, i));
  const omc_node *prev = NULL;
  for (const omc_node *n = g->first; n; prev = n, n = n->next) {
    VERIFY(n->prev == prev && n->op < OMC_N_OPS, n, "the list of nodes is broken");
    OMC_TRY(omc_schema_check(n));
    OMC_TRY(check_inputs(f, n));
    OMC_TRY(check_outputs(f, n));
  }
  VERIFY(g->last == prev, g->result, "the list of nodes does not end at its last");
  OMC_TRY(check_inputs(f, g->result));
  return check_all_uses(f);
}

omc_status omc_graph_verify(const omc_graph *g, bool typed) {
  const omc_allocator *allocator = g->arena.allocator;
  verifier f = {.graph = g, .typed = typed};
  f.seen = omc_alloc_zero(allocator, g->n_values, sizeof *f.seen);
  f.used = omc_alloc_zero(allocator, g->n_values, sizeof *f.used);
  omc_names_init(&f.names, allocator);
  const omc_status status =
      f.seen && f.used ? check_graph(&f) : omc_fail(OMC_ENOMEM, "no memory to verify the graph");
  omc_names_deinit(&f.names);
  omc_free(allocator, f.seen, g->n_values, sizeof *f.seen);
  omc_free(allocator, f.used, g->n_values, sizeof *f.used);
  return status;
}
