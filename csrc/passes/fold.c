#include <string.h>

#include "graph/edit.h"
#include "ops/op.h"
#include "passes/passes.h"

#define MIB ((size_t)1 << 20)
#define MOST_OF_NODE (64 * MIB)
#define MOST_OF_SCRATCH (256 * MIB)
#define MOST_KEPT (1 * MIB) /* in one graph; what is tiny is kept beyond that */
enum {
  SMALL = 4096,  /* bytes */
  TINY = 128,    /* no shape is larger */
  DEEPEST = 1000 /* of recipes, which are followed by recursion */
};

/* Recipes one below the other, beginning with the node's inputs. */
static uint32_t depth_below(const omc_node *node) {
  uint32_t depth = 0;
  for (uint32_t i = 0; i < node->n_in; i++) {
    const omc_recipe *recipe = omc_in(node, i) ? omc_in(node, i)->recipe : NULL;
    if (recipe && recipe->depth > depth) depth = recipe->depth;
  }
  return depth;
}

/* Whether to fold, and the bytes of all results. */
static omc_status may_fold(const omc_graph *g, const omc_node *node, bool *out, size_t *bytes) {
  const uint32_t flags = omc_op_get(node->op)->flags;
  *out = false;
  *bytes = 0;
  if (flags & (OMC_OP_RANDOM | OMC_OP_CALLBACK)) return OMC_OK;
  for (uint32_t i = 0; i < node->n_in && !(flags & OMC_OP_SHAPE_ONLY); i++)
    if (omc_in(node, i) && !omc_is_const(omc_in(node, i))) return OMC_OK;
  for (uint32_t k = 0; k < node->n_out; k++) {
    size_t more = 0;
    if (node->out[k]) OMC_TRY(omc_type_bytes(&node->out[k]->type, &more));
    if (more > MOST_OF_NODE - *bytes) return OMC_OK;
    *bytes += more;
  }
  *out = g->scratch.used + *bytes <= MOST_OF_SCRATCH && depth_below(node) < DEEPEST;
  return OMC_OK;
}

static omc_status no_memory(const omc_node *node) {
  OMC_NODE_FAIL(node, ENOMEM, "no memory for its constant value");
}

/* Runs the node's kernel; data[k] is set to output k's elements in `memory`. */
static omc_status evaluate(const omc_node *node, omc_arena *memory, omc_arena *temporary,
                           const void **data) {
  const omc_provider *host = omc_provider_host();
  omc_call call;
  OMC_TRY(host->prepare(host->ctx, node, 1, temporary, &call));
  omc_tensor *in = OMC_NEW_ARRAY(temporary, omc_tensor, node->n_in + node->n_out + 1);
  void *workspace = omc_arena_elements(temporary, call.workspace_bytes + 1, 1);
  if (!in || !workspace) return no_memory(node);
  omc_tensor *out = in + node->n_in;
  for (uint32_t i = 0; i < node->n_in; i++) {
    const omc_value *v = omc_in(node, i);
    /* Kernels do not write to their inputs, but for outputs that share memory: not here. */
    if (v) in[i] = (omc_tensor){(void *)(uintptr_t)v->data, &v->type};
  }
  for (uint32_t k = 0; k < node->n_out; k++) {
    if (!node->out[k]) continue;
    size_t bytes;
    OMC_TRY(omc_type_bytes(&node->out[k]->type, &bytes));
    out[k] = (omc_tensor){omc_arena_elements(memory, bytes + 1, 1), &node->out[k]->type};
    data[k] = out[k].data;
    if (!data[k]) return no_memory(node);
  }
  const omc_kernel_args args = {.in = in,
                                .out = out,
                                .n_in = node->n_in,
                                .n_out = node->n_out,
                                .params = call.params,
                                .workspace = workspace,
                                .threads = 1,
                                .node = omc_node_name(node)};
  return call.kernel(&args);
}

static omc_recipe *new_recipe(omc_graph *g, omc_node *node) {
  omc_recipe *recipe = OMC_NEW(&g->arena, omc_recipe);
  omc_value **in = OMC_NEW_ARRAY(&g->arena, omc_value *, node->n_in);
  if (!recipe || !in) return NULL;
  for (uint32_t i = 0; i < node->n_in; i++) in[i] = omc_in(node, i);
  *recipe = (omc_recipe){node, in, 1 + depth_below(node), false};
  return recipe;
}

/* Whether results of that many bytes stay with the graph. */
static bool are_kept(const omc_graph *g, size_t bytes) {
  return bytes <= TINY || (bytes <= SMALL && g->constant_bytes + bytes <= MOST_KEPT);
}

/* A view has the elements of its input, for as long as they are there; else they are computed. */
static omc_status fold_outputs(omc_graph *g, omc_node *node, size_t bytes, omc_arena *temporary) {
  const void **data = OMC_NEW_ARRAY(temporary, const void *, node->n_out + 1);
  if (!data) return no_memory(node);
  bool stays;
  if (omc_is_view(node)) {
    data[0] = omc_in(node, 0)->data;
    stays = !omc_in(node, 0)->recipe;
  } else {
    stays = are_kept(g, bytes);
    if (stays) g->constant_bytes += bytes;
    OMC_TRY(evaluate(node, stays ? &g->arena : &g->scratch, temporary, data));
  }
  omc_recipe *recipe = stays ? NULL : new_recipe(g, node);
  if (!stays && !recipe) return no_memory(node);
  for (uint32_t k = 0; k < node->n_out; k++) {
    if (!node->out[k]) continue;
    omc_value *value;
    OMC_TRY(omc_graph_add_const(g, NULL, &node->out[k]->type, data[k], &value));
    value->index = k;
    value->recipe = recipe;
    omc_replace_uses(node->out[k], value);
  }
  omc_erase_node(g, node);
  return OMC_OK;
}

omc_status omc_fold_node(omc_graph *g, omc_node *node) {
  bool fold;
  size_t bytes;
  OMC_TRY(may_fold(g, node, &fold, &bytes));
  if (!fold) return OMC_OK;
  omc_arena temporary;
  omc_arena_init(&temporary, g->arena.allocator);
  const omc_status status = fold_outputs(g, node, bytes, &temporary);
  omc_arena_deinit(&temporary);
  return status;
}

omc_status omc_fold(omc_graph *g) {
  for (omc_node *node = g->first, *next; node; node = next) {
    next = node->next;
    OMC_TRY(omc_fold_node(g, node));
  }
  return OMC_OK;
}

/* ---- settling ---- */

/* Links what computes a constant, and what computes that from, in front of `before`. */
static omc_value *compute_again(omc_graph *g, const omc_value *v, omc_node *before,
                                omc_phase phase) {
  omc_recipe *recipe = v->recipe;
  omc_node *node = recipe->node;
  if (recipe->linked) return node->out[v->index];
  recipe->linked = true;
  node->phase = phase;
  for (uint32_t i = 0; i < node->n_in; i++) {
    omc_value *in = recipe->in[i];
    const bool again = in && in->recipe && !in->sets_shape;
    omc_set_input(node, i, again ? compute_again(g, in, before, phase) : in);
  }
  omc_link_node(g, node, before);
  return node->out[v->index];
}

/* Gives a constant memory that lasts as long as the graph. */
static omc_status keep(omc_graph *g, omc_value *v) {
  size_t bytes;
  OMC_TRY(omc_type_bytes(&v->type, &bytes));
  void *data = omc_arena_elements(&g->arena, bytes + 1, 1);
  if (!data) OMC_FAIL(ENOMEM, "no memory for a constant of %zu bytes", bytes);
  memcpy(data, v->data, bytes);
  g->constant_bytes += bytes;
  v->data = data;
  v->recipe = NULL;
  return OMC_OK;
}

static omc_status settle_input(omc_graph *g, omc_node *node, uint32_t i, omc_node *before,
                               omc_phase phase, bool *changed) {
  omc_value *v = omc_in(node, i);
  if (!omc_is_const(v) || !v->recipe) return OMC_OK;
  if (v->sets_shape) return keep(g, v);
  omc_set_input(node, i, compute_again(g, v, before, phase));
  *changed = true;
  return OMC_OK;
}

/* What only the backwards read is computed in theirs if there is one, else once in forward. */
omc_status omc_settle(omc_graph *g, bool *changed) {
  *changed = false;
  omc_node *node = g->first;
  for (; node && node->phase == OMC_FORWARD; node = node->next)
    for (uint32_t i = 0; i < node->n_in; i++)
      OMC_TRY(settle_input(g, node, i, node, OMC_FORWARD, changed));
  omc_node *const backward = node;
  for (uint32_t r = 0; r < g->n_outputs; r++)
    OMC_TRY(settle_input(g, g->result, r, backward, OMC_FORWARD, changed));
  const bool one = omc_n_backwards(g) <= 1;
  const omc_phase phase = one ? OMC_BACKWARD : OMC_FORWARD;
  for (; node; node = node->next)
    for (uint32_t i = 0; i < node->n_in; i++)
      OMC_TRY(settle_input(g, node, i, one ? node : backward, phase, changed));
  for (uint32_t r = g->n_outputs; r < g->result->n_in; r++)
    OMC_TRY(settle_input(g, g->result, r, one ? NULL : backward, phase, changed));
  omc_arena_deinit(&g->scratch);
  return OMC_OK;
}
