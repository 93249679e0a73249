#include "autodiff/autodiff.h"

#include <string.h>

#include "graph/edit.h"
#include "ops/grad.h"
#include "ops/op.h"

/* Both arrays are indexed by the ids of forward values. */
typedef struct sweep_state {
  omc_graph *graph;
  bool *active;      /* float, and depends on an input whose gradient is wanted */
  omc_value **grads; /* sum of the contributions so far; NULL: zero */
} sweep_state;

static bool is_active(const sweep_state *s, const omc_value *v) { return v && s->active[v->id]; }

/* Marks what a change of a wanted input can reach through differentiable ops. */
static void mark_active(sweep_state *s, const bool *in_grads) {
  const omc_graph *g = s->graph;
  for (uint32_t i = 0; i < g->n_inputs; i++)
    s->active[g->inputs[i]->id] = in_grads[i] && omc_dtype_is_float(g->inputs[i]->type.dtype);
  for (const omc_node *node = g->first; node; node = node->next) {
    bool reached = false;
    for (uint32_t i = 0; i < node->n_in && !reached; i++) reached = is_active(s, omc_in(node, i));
    if (!reached || !omc_op_get(node->op)->grad) continue;
    for (uint32_t k = 0; k < node->n_out; k++)
      if (node->out[k] && omc_dtype_is_float(node->out[k]->type.dtype))
        s->active[node->out[k]->id] = true;
  }
}

/* Adds a contribution to the gradient of `v`, brought to v's type. */
static void accumulate(sweep_state *s, omc_builder *b, const omc_value *v, omc_value *grad) {
  grad = omc_sum_to(b, omc_cast(b, grad, v->type.dtype), &v->type.shape);
  omc_value **sum = &s->grads[v->id];
  *sum = *sum ? omc_b2(b, OMC_OP_Add, *sum, grad) : grad;
}

static omc_status seed(sweep_state *s, const bool *out_grads) {
  omc_graph *g = s->graph;
  omc_builder b = {g, NULL, OMC_BACKWARD, NULL, OMC_OK};
  for (uint32_t k = 0; k < g->n_outputs; k++) {
    const omc_value *v = omc_in(g->result, k);
    if (!out_grads[k] || !is_active(s, v)) continue;
    omc_value *grad;
    OMC_TRY(omc_graph_add_grad(g, k, &grad));
    accumulate(s, &b, v, grad);
  }
  return b.status;
}

static omc_status differentiate_node(sweep_state *s, const omc_node *node) {
  const uint32_t n_in = node->n_in, n_out = node->n_out;
  omc_arena *arena = &s->graph->arena;
  omc_value **dout = OMC_NEW_ARRAY(arena, omc_value *, n_out + 1);
  omc_value **din = OMC_NEW_ARRAY(arena, omc_value *, n_in + 1);
  bool *needs = OMC_NEW_ARRAY(arena, bool, n_in + 1);
  if (!dout || !din || !needs) OMC_NODE_FAIL(node, ENOMEM, "no memory for its gradient");
  bool given = false;
  for (uint32_t k = 0; k < n_out; k++) {
    dout[k] = is_active(s, node->out[k]) ? s->grads[node->out[k]->id] : NULL;
    given |= dout[k] != NULL;
  }
  if (!given) return OMC_OK;
  for (uint32_t i = 0; i < n_in; i++) needs[i] = is_active(s, omc_in(node, i));
  omc_grad g = {{s->graph, NULL, OMC_BACKWARD, node->name, OMC_OK}, node, dout, din, needs};
  OMC_TRY(omc_op_get(node->op)->grad(&g));
  for (uint32_t i = 0; i < n_in; i++)
    if (needs[i] && din[i]) accumulate(s, &g.b, omc_in(node, i), din[i]);
  return g.b.status;
}

static omc_status set_result(sweep_state *s, const bool *in_grads) {
  omc_graph *g = s->graph;
  const uint32_t n = g->n_outputs + g->n_inputs;
  omc_value **values = OMC_NEW_ARRAY(&g->arena, omc_value *, n + 1);
  if (!values) OMC_FAIL(ENOMEM, "no memory for a result of %u values", n);
  for (uint32_t k = 0; k < g->n_outputs; k++) values[k] = omc_in(g->result, k);
  for (uint32_t i = 0; i < g->n_inputs; i++)
    if (in_grads[i]) values[g->n_outputs + i] = s->grads[g->inputs[i]->id];
  return omc_graph_set_result(g, values, g->n_outputs, g->n_inputs);
}

static omc_status run(sweep_state *s, const bool *out_grads, const bool *in_grads) {
  omc_graph *g = s->graph;
  omc_node *last = g->last; /* backward nodes go after it */
  mark_active(s, in_grads);
  OMC_TRY(seed(s, out_grads));
  for (omc_node *node = last; node; node = node->prev) OMC_TRY(differentiate_node(s, node));
  OMC_TRY(set_result(s, in_grads));
  omc_erase_unused(g);
  return OMC_OK;
}

omc_status omc_differentiate(omc_graph *g, const bool *out_grads, const bool *in_grads) {
  const omc_allocator *a = g->arena.allocator;
  const size_t n = g->n_values + 1;
  sweep_state s = {g, omc_alloc_zero(a, n, sizeof *s.active),
                   omc_alloc_zero(a, n, sizeof *s.grads)};
  const omc_status status = s.active && s.grads
                                ? run(&s, out_grads, in_grads)
                                : omc_fail(OMC_ENOMEM, "no memory to differentiate %zu values", n);
  omc_free(a, s.active, n, sizeof *s.active);
  omc_free(a, s.grads, n, sizeof *s.grads);
  return status;
}
