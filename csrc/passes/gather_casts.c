/* Casts of the caller's tensors, such as all weights under autocast, become one node: on a GPU each
 * is a launch, which for most of them costs more than the cast. It stands where the first stood.
 * What only forward reads is not made so early, unless it is small: it would be kept meanwhile. */
#include "graph/edit.h"
#include "ops/builder.h"
#include "ops/op.h"
#include "passes/passes.h"

enum { SMALL_BYTES = 16 << 10 };

/* Whether backwards read it or a view of it. */
static bool is_kept(const omc_graph *g, const omc_value *v) {
  for (const omc_use *use = v->uses; use; use = use->next) {
    if (use->node == g->result ? use->index >= g->n_outputs
                               : use->node->phase != OMC_FORWARD ||
                                     (omc_is_view(use->node) && is_kept(g, use->node->out[0])))
      return true;
  }
  return false;
}

static bool is_gathered(const omc_graph *g, const omc_node *node) {
  if (node->op != OMC_OP_Cast || omc_in(node, 0)->role != OMC_ROLE_INPUT) return false;
  const omc_type *to = &node->out[0]->type;
  const int64_t most = SMALL_BYTES / (int64_t)omc_dtype_size(to->dtype);
  return omc_shape_numel(&to->shape) <= most || is_kept(g, node->out[0]);
}

static bool is_alike(const omc_node *a, const omc_node *b) {
  return omc_in(a, 0)->type.dtype == omc_in(b, 0)->type.dtype &&
         a->out[0]->type.dtype == b->out[0]->type.dtype;
}

/* The next of those that go with `node`; NULL: there is none. */
static omc_node *next_alike(const omc_graph *g, const omc_node *node) {
  for (omc_node *next = node->next; next && next->phase == OMC_FORWARD; next = next->next)
    if (is_gathered(g, next) && is_alike(node, next)) return next;
  return NULL;
}

/* The node that stands in the place of `first` and `n` - 1 after it; NULL: no memory. */
static omc_node *gather(omc_graph *g, omc_node *first, uint32_t n, omc_status *status) {
  omc_builder b = {.graph = g, .before = first, .phase = OMC_FORWARD, .name = first->name};
  omc_value **in = OMC_NEW_ARRAY(&g->arena, omc_value *, n);
  omc_value **out = OMC_NEW_ARRAY(&g->arena, omc_value *, n);
  omc_node **nodes = OMC_NEW_ARRAY(&g->arena, omc_node *, n);
  if (!in || !out || !nodes) {
    *status = omc_fail(OMC_ENOMEM, "no memory for %u casts", n);
    return NULL;
  }
  nodes[0] = first;
  for (uint32_t i = 1; i < n; i++) nodes[i] = next_alike(g, nodes[i - 1]);
  for (uint32_t i = 0; i < n; i++) in[i] = omc_in(nodes[i], 0);
  omc_build(&b, OMC_OP_Casts, n, in, 0, first->n_attr, first->attr, n, out);
  if ((*status = b.status) != OMC_OK) return NULL;
  for (uint32_t i = 0; i < n; i++) {
    omc_replace_uses(nodes[i]->out[0], out[i]);
    omc_erase_node(g, nodes[i]);
  }
  return out[0]->producer;
}

omc_status omc_gather_casts(omc_graph *g) {
  omc_status status = OMC_OK;
  for (omc_node *node = g->first; node && node->phase == OMC_FORWARD; node = node->next) {
    uint32_t n = 1;
    if (!is_gathered(g, node)) continue;
    for (const omc_node *next = node; (next = next_alike(g, next));) n++;
    if (n > 1 && !(node = gather(g, node, n, &status))) return status;
  }
  return OMC_OK;
}
