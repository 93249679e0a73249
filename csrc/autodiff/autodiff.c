#include "autodiff/autodiff.h"

#include <string.h>

#include "graph/edit.h"
#include "ops/grad.h"
#include "ops/op.h"

/* Both arrays are indexed by the ids of forward values. */
typedef struct sweep_state {
  omc_graph *graph;
  omc_phase phase;   /* of the backward under way */
  bool *active;      /* float, and depends on an input whose gradient is wanted */
  omc_value **grads; /* sum of the contributions so far, see accumulate; NULL: zero */
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

/* Adds a contribution to the gradient of `v`, brought to v's shape. Of a 16-bit float the sum is
 * kept as it is computed: it is rounded once, when it is read, where eager PyTorch rounds after
 * every addition. */
static void accumulate(sweep_state *s, omc_builder *b, const omc_value *v, omc_value *grad) {
  const omc_dtype wide = omc_dtype_acc(v->type.dtype);
  if (grad->type.dtype != wide) grad = omc_cast(b, grad, v->type.dtype);
  grad = omc_sum_to(b, grad, &v->type.shape);
  omc_value **sum = &s->grads[v->id];
  *sum = *sum ? omc_binary(b, OMC_OP_Add, omc_cast(b, *sum, wide), omc_cast(b, grad, wide)) : grad;
}

/* The gradient of `v`, of its type, once all contributions have been added; NULL: zero. */
static omc_value *gradient_of(const sweep_state *s, omc_builder *b, const omc_value *v) {
  omc_value *sum = s->grads[v->id];
  return sum ? omc_cast(b, sum, v->type.dtype) : NULL;
}

static omc_status seed(sweep_state *s, const bool *out_grads) {
  omc_graph *g = s->graph;
  omc_builder b = {g, NULL, s->phase, NULL, OMC_OK};
  for (uint32_t k = 0; k < g->n_outputs; k++) {
    const omc_value *v = omc_in(g->result, k);
    if (!out_grads[k] || !is_active(s, v)) continue;
    omc_value *grad = k < g->cap_grads ? g->grads[k] : NULL; /* of an earlier backward */
    if (!grad) OMC_TRY(omc_graph_add_grad(g, k, &grad));
    accumulate(s, &b, v, grad);
  }
  return b.status;
}

static omc_status differentiate_node(sweep_state *s, const omc_node *node) {
  const uint32_t n_in = node->n_in, n_out = node->n_out;
  const uint8_t max_in = omc_op_get(node->op)->max_in;
  const uint32_t most_in = max_in == OMC_VARIADIC ? n_in : max_in;
  omc_arena *arena = &s->graph->arena;
  omc_value **grad_out = OMC_NEW_ARRAY(arena, omc_value *, n_out);
  omc_value **grad_in = OMC_NEW_ARRAY(arena, omc_value *, most_in);
  bool *needs = OMC_NEW_ARRAY(arena, bool, most_in);
  if (!grad_out || !grad_in || !needs) OMC_NODE_FAIL(node, ENOMEM, "no memory for its gradient");
  omc_grad g = {
      {s->graph, NULL, s->phase, node->name, OMC_OK}, node, grad_out, grad_in, needs, false};
  bool given = false;
  for (uint32_t k = 0; k < n_out; k++) {
    grad_out[k] = is_active(s, node->out[k]) ? gradient_of(s, &g.b, node->out[k]) : NULL;
    given |= grad_out[k] != NULL;
  }
  if (!given) return g.b.status;
  for (uint32_t i = 0; i < n_in; i++) needs[i] = is_active(s, omc_in(node, i));
  OMC_TRY(omc_op_get(node->op)->grad(&g));
  for (uint32_t i = 0; i < n_in; i++)
    if (needs[i] && grad_in[i]) accumulate(s, &g.b, omc_in(node, i), grad_in[i]);
  return g.b.status;
}

/* One reverse sweep from the last forward node; `results` gets the gradient of each input. */
static omc_status sweep(sweep_state *s, omc_node *last, const bool *out_grads, const bool *in_grads,
                        omc_value **results) {
  OMC_TRY(seed(s, out_grads));
  for (omc_node *node = last; node; node = node->prev) OMC_TRY(differentiate_node(s, node));
  omc_builder b = {s->graph, NULL, s->phase, NULL, OMC_OK};
  for (uint32_t i = 0; i < s->graph->n_inputs; i++)
    if (in_grads[i]) results[i] = gradient_of(s, &b, s->graph->inputs[i]);
  return b.status;
}

static omc_status run(sweep_state *s, uint32_t n_backwards, const bool *out_grads,
                      const bool *in_grads) {
  omc_graph *g = s->graph;
  omc_node *last = g->last; /* backward nodes go after it */
  const uint32_t n_out = g->n_outputs, n_in = g->n_inputs, n_values = g->n_values;
  omc_value **results = OMC_NEW_ARRAY(&g->arena, omc_value *, n_out + n_backwards * n_in + 1);
  if (!results) OMC_FAIL(ENOMEM, "no memory for the results of %u backwards", n_backwards);
  for (uint32_t k = 0; k < n_out; k++) results[k] = omc_in(g->result, k);
  mark_active(s, in_grads);
  for (uint32_t b = 0; b < n_backwards; b++) {
    s->phase = OMC_BACKWARD + b;
    for (uint32_t v = 0; v < n_values; v++) s->grads[v] = NULL;
    OMC_TRY(sweep(s, last, out_grads + b * n_out, in_grads, results + n_out + b * n_in));
  }
  OMC_TRY(omc_graph_set_result(g, results, n_out, n_backwards * n_in));
  omc_erase_unused(g);
  return OMC_OK;
}

omc_status omc_differentiate(omc_graph *g, uint32_t n_backwards, const bool *out_grads,
                             const bool *in_grads) {
  const omc_allocator *a = g->arena.allocator;
  const size_t n = g->n_values + 1;
  sweep_state s = {g, OMC_BACKWARD, omc_alloc_zero(a, n, sizeof *s.active),
                   omc_alloc_zero(a, n, sizeof *s.grads)};
  const omc_status status = s.active && s.grads
                                ? run(&s, n_backwards, out_grads, in_grads)
                                : omc_fail(OMC_ENOMEM, "no memory to differentiate %zu values", n);
  omc_free(a, s.active, n, sizeof *s.active);
  omc_free(a, s.grads, n, sizeof *s.grads);
  return status;
}
