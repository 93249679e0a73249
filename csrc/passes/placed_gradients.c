/* A sum of gradients of which some are zeros but in a place: of slices, and of what was picked by
 * index. Those side by side are joined, the others are added into the rest of the sum, so that a
 * loop over the steps of a tensor takes one pass over its gradient in place of one for each. */
#include "base/element.h"
#include "ops/forms.h"
#include "ops/op.h"
#include "passes/rewrite.h"

/* ---- the summands of a tree of Adds, of one use each but the root ---- */

typedef struct summand {
  const omc_node *node; /* an Add */
  uint32_t index;       /* its input */
} summand;

static omc_value *value_of(summand s) { return omc_in(s.node, s.index); }

/* Whether v is the sum of further summands. */
static bool is_sum(const omc_value *v, const omc_value *root) {
  const omc_node *node = v->producer;
  return node && node->op == OMC_OP_Add && omc_type_equal(&v->type, &root->type) &&
         omc_has_one_use(v);
}

static summand first_of(summand s, const omc_node *root) {
  for (omc_value *v; v = value_of(s), is_sum(v, root->out[0]);) s = (summand){v->producer, 0};
  return s;
}

/* The next one, in the order in which they are written; node NULL: there is none. */
static summand next_of(summand s, const omc_node *root) {
  while (s.index == 1) {
    if (s.node == root) return (summand){0};
    const omc_use *use = s.node->out[0]->uses;
    s = (summand){use->node, use->index};
  }
  return first_of((summand){s.node, 1}, root);
}

/* ---- what a summand is ---- */

typedef struct gradient {
  omc_value *value;
  omc_value *dy; /* all of it that is not 0 lies in a stretch; NULL: it is no such thing */
  omc_axis_range at;
  int32_t before, after; /* summands beside it, -1: none */
  bool taken;
  const omc_node *pick; /* what adds dy by index to nothing; NULL: no such thing */
} gradient;

static bool adds_by_index(omc_op_id op) {
  return op == OMC_OP_EmbeddingGrad || op == OMC_OP_GatherGrad || op == OMC_OP_GatherNDGrad ||
         op == OMC_OP_GatherElementsGrad;
}

/* Of gradients that are read here only, maybe cast. What is rounded after it has been added up is
 * none that could be widened before. */
static gradient gradient_of(omc_value *v, const omc_value *sum) {
  gradient g = {.value = v, .before = -1, .after = -1};
  const omc_node *node = v->producer;
  if (!node || !omc_has_one_use(v) || !omc_type_equal(&v->type, &sum->type)) return g;
  const bool is_cast = node->op == OMC_OP_Cast;
  if (is_cast) {
    if (!omc_has_one_use(omc_in(node, 0))) return g;
    node = omc_in(node, 0)->producer;
  }
  const omc_shape *shape = &sum->type.shape;
  if (node && node->op == OMC_OP_SliceGrad && omc_is_slice(node, shape, &g.at))
    g.dy = omc_in(node, 0);
  if (!node || !adds_by_index(node->op) || omc_in(node, 2)) return g;
  if (node->op == OMC_OP_GatherGrad && omc_is_row(node, shape, &g.at)) g.dy = omc_in(node, 0);
  if (!is_cast || omc_shape_numel(&omc_in(node, 1)->type.shape) <= 1) g.pick = node;
  return g;
}

/* ---- joining ---- */

/* Finds out which lie side by side; returns whether any do. */
static bool find_neighbours(gradient *g, int32_t n) {
  bool any = false;
  for (int32_t i = 0; i < n; i++)
    for (int32_t k = 0; g[i].dy && g[i].after < 0 && k < n; k++)
      if (g[k].dy && g[k].before < 0 && g[k].at.axis == g[i].at.axis &&
          g[k].at.start == g[i].at.end)
        g[i].after = k, g[k].before = i, any = true;
  return any;
}

/* dy as a slice of the sum. */
static omc_value *slice_of(omc_builder *b, const gradient *g, const omc_value *sum) {
  omc_shape shape = sum->type.shape;
  shape.dims[g->at.axis] = g->at.end - g->at.start;
  return omc_reshape(b, g->dy, &shape);
}

/* The sum of all in a row of which i is one; takes them. */
static omc_value *join(omc_builder *b, gradient *g, int32_t i, const omc_value *sum) {
  while (g[i].before >= 0) i = g[i].before;
  const gradient *first = &g[i], *last = first;
  uint32_t n = 0;
  bool alike = true;
  for (int32_t k = i; k >= 0; k = g[k].after, n++) {
    alike &= g[k].dy->type.dtype == first->dy->type.dtype;
    g[k].taken = true;
    last = &g[k];
  }
  omc_value **parts = OMC_NEW_ARRAY(&b->graph->arena, omc_value *, n);
  if (!parts) {
    b->status = omc_fail(OMC_ENOMEM, "no memory for %u gradients of slices", n);
    return NULL;
  }
  const omc_dtype dtype = alike ? first->dy->type.dtype : sum->type.dtype;
  for (uint32_t k = 0; k < n; k++, i = g[i].after)
    parts[k] = omc_cast(b, slice_of(b, &g[i], sum), dtype);
  const omc_shape *shape = &sum->type.shape;
  const int64_t axis = first->at.axis;
  const omc_attr along = omc_attr_int("axis", axis);
  omc_value *joined = omc_nary(b, OMC_OP_Concat, n, parts, 1, &along);
  if (first->at.start > 0 || last->at.end < shape->dims[axis]) {
    const omc_attr whole = omc_attr_ints("shape", shape->dims, (uint32_t)shape->rank);
    omc_value *const in[] = {joined, omc_ints(b, &first->at.start, 1),
                             omc_ints(b, &last->at.end, 1), omc_ints(b, &axis, 1)};
    joined = omc_nary(b, OMC_OP_SliceGrad, 4, in, 1, &whole);
  }
  return omc_cast(b, joined, sum->type.dtype);
}

/* One is added by index to what there is of the sum. */
static omc_value *add_by_index(omc_builder *b, const gradient *g, omc_value *to) {
  const omc_node *node = g->pick;
  omc_value *const in[] = {omc_cast(b, omc_in(node, 0), to->type.dtype), omc_in(node, 1), to};
  return omc_nary(b, node->op, 3, in, node->n_attr, node->attr);
}

static bool is_alone(const gradient *g) { return g->before < 0 && g->after < 0; }

/* If nothing else is as large as the sum, the first that could be added to it is what the others
 * are added to. Returns how many are. */
static int32_t choose_picks(gradient *g, int32_t n, const omc_value *sum) {
  int32_t first = -1, picks = 0;
  bool has_base = false;
  for (int32_t i = 0; i < n; i++) {
    if (!is_alone(&g[i])) g[i].pick = NULL;
    if (!g[i].pick) has_base |= omc_type_equal(&g[i].value->type, &sum->type);
    if (g[i].pick && picks++ == 0) first = i;
  }
  if (has_base || picks == 0) return picks;
  g[first].pick = NULL;
  return picks - 1;
}

omc_value *omc_place_gradients(omc_match *m) {
  const omc_node *root = m->root;
  omc_value *const sum = m->capture[0];
  omc_builder *b = m->b;
  if (omc_has_one_use(sum) && sum->uses->node->op == OMC_OP_Add &&
      omc_type_equal(&sum->uses->node->out[0]->type, &sum->type))
    return NULL; /* a part of another */
  int32_t n = 0, placed = 0;
  for (summand s = first_of((summand){root, 0}, root); s.node; s = next_of(s, root), n++) {
    const gradient g = gradient_of(value_of(s), sum);
    placed += g.dy || g.pick;
  }
  if (placed == 0) return NULL;
  gradient *g = OMC_NEW_ARRAY(&b->graph->arena, gradient, n);
  if (!g) {
    b->status = omc_fail(OMC_ENOMEM, "no memory for %d summands", n);
    return NULL;
  }
  n = 0;
  for (summand s = first_of((summand){root, 0}, root); s.node; s = next_of(s, root))
    g[n++] = gradient_of(value_of(s), sum);
  const bool joins = find_neighbours(g, n);
  if (choose_picks(g, n, sum) == 0 && !joins) return NULL;
  omc_value *result = NULL;
  for (int32_t i = 0; i < n; i++) {
    if (g[i].taken || g[i].pick) continue;
    omc_value *v = is_alone(&g[i]) ? g[i].value : join(b, g, i, sum);
    result = result ? omc_binary(b, OMC_OP_Add, result, v) : v;
  }
  for (int32_t i = 0; i < n; i++)
    if (g[i].pick) result = add_by_index(b, &g[i], result);
  return result;
}
