/* Ops that read a table by index, and their gradients, which add by index.
 *
 * Gather, GatherND and Embedding are one thing: the table is [outer, dim, inner] and the result
 * [outer, n, inner] has row id of it for each of n ids. GatherElements picks single elements along
 * lines of an axis. Gather and GatherElements refuse ids below 0 if their attribute `strict` is 1.
 *
 * in[1] are the ids, i64 or i32. A gradient has the gradient of what was picked as in[0], the
 * op's attributes, and the table's shape as attribute `shape`, or as in[2] what it is added to.
 * With that it is an op by itself, which adds to a tensor by index. ScatterElements multiplies by
 * index, or keeps the largest or the least: in[0] is the tensor, in[2] what is put into it. */
#include <string.h>

#include "ops/forms.h"
#include "ops/infer.h"
#include "ops/op.h"

/* ---- rules: `table` is the shape of what is gathered from ---- */

/* Copies dims [from, to) of a shape to the end of *out. */
static omc_status append(const omc_node *node, const omc_shape *shape, int32_t from, int32_t to,
                         omc_shape *out) {
  for (int32_t i = from; i < to; i++) {
    if (out->rank == OMC_MAX_RANK)
      OMC_NODE_FAIL(node, EUNSUPPORTED, "the result has more than %d dims", OMC_MAX_RANK);
    out->dims[out->rank++] = shape->dims[i];
  }
  return OMC_OK;
}

/* Rows of `axis`, one for each id. */
static omc_status rows_shape(const omc_node *node, const omc_shape *table, int32_t axis,
                             omc_shape *out) {
  const omc_shape *of_ids = omc_in_shape(node, 1);
  *out = (omc_shape){0};
  OMC_TRY(append(node, table, 0, axis, out));
  OMC_TRY(append(node, of_ids, 0, of_ids->rank, out));
  return append(node, table, axis + 1, table->rank, out);
}

static omc_status gather_shape(const omc_node *node, const omc_shape *table, omc_shape *out) {
  int32_t axis;
  OMC_TRY(omc_need_axis(node, table->rank, &axis));
  return rows_shape(node, table, axis, out);
}

static bool takes_negative(const omc_node *node) { return omc_node_int(node, "strict") == 0; }

omc_status omc_gather_form_of(const omc_node *node, const omc_shape *table, omc_rows_form *p) {
  int32_t axis;
  OMC_TRY(omc_need_axis(node, table->rank, &axis));
  *p = (omc_rows_form){.outer = omc_shape_span(table, 0, axis),
                       .dim = table->dims[axis],
                       .inner = omc_shape_span(table, axis + 1, table->rank),
                       .n = omc_shape_numel(omc_in_shape(node, 1)),
                       .padding = -1,
                       .negative = takes_negative(node)};
  return OMC_OK;
}

/* Embedding: Gather of whole rows, ids from 0, some rows without gradient. */
static omc_status embedding_shape(const omc_node *node, const omc_shape *table, omc_shape *out) {
  OMC_TRY(omc_need_float(node, 0));
  if (table->rank != 2) OMC_NODE_FAIL(node, ESHAPE, "a table of rank %d, not 2", table->rank);
  return rows_shape(node, table, 0, out);
}

omc_status omc_embedding_form_of(const omc_node *node, const omc_shape *table, omc_rows_form *p) {
  *p = (omc_rows_form){
      .outer = 1,
      .dim = table->dims[0],
      .inner = table->dims[1],
      .n = omc_shape_numel(omc_in_shape(node, 1)),
      .padding = omc_node_int(node, "padding_idx"),
      .by_freq = node->op == OMC_OP_EmbeddingGrad && omc_node_int(node, "scale_grad_by_freq") != 0};
  return OMC_OK;
}

/* GatherND: the last axis of ids is an index into the `depth` axes after the batch axes, or from
 * `axis` on, which is 0 in ONNX: all that is before that one has the same ids. */
omc_status omc_gather_nd_form_of(const omc_node *node, const omc_shape *table, omc_rows_form *p) {
  const omc_shape *t = omc_in_shape(node, 1);
  const int64_t batch = omc_node_int(node, "batch_dims");
  const int64_t axis = omc_node_int(node, "axis"), before = batch ? batch : axis;
  const int64_t depth = t->rank ? t->dims[t->rank - 1] : 0;
  char a[OMC_TYPE_TEXT], b[OMC_TYPE_TEXT];
  if (batch && axis)
    OMC_NODE_FAIL(node, EUNSUPPORTED, "batch_dims is %lld and axis %lld, where one must be 0",
                  (long long)batch, (long long)axis);
  bool fits = batch < t->rank && depth >= 1 && before <= table->rank - depth;
  for (int32_t i = 0; fits && i < batch; i++) fits = t->dims[i] == table->dims[i];
  if (!fits)
    OMC_NODE_FAIL(node, ESHAPE, "ids %s with %lld batch dims do not index %s from axis %lld on",
                  omc_shape_text(t, a, sizeof a), (long long)batch,
                  omc_shape_text(table, b, sizeof b), (long long)axis);
  const int32_t from = (int32_t)before, to = (int32_t)(before + depth);
  const int64_t n = omc_shape_span(t, (int32_t)batch, t->rank - 1);
  *p = (omc_rows_form){.outer = omc_shape_span(table, 0, from),
                       .dim = omc_shape_span(table, from, to),
                       .inner = omc_shape_span(table, to, table->rank),
                       .n = n,
                       .outer_ids = batch ? n : 0,
                       .padding = -1,
                       .depth = to - from};
  memcpy(p->dims, table->dims + from, (size_t)p->depth * sizeof p->dims[0]);
  return OMC_OK;
}

static omc_status gather_nd_shape(const omc_node *node, const omc_shape *table, omc_shape *out) {
  const omc_shape *of_ids = omc_in_shape(node, 1);
  omc_rows_form p;
  OMC_TRY(omc_gather_nd_form_of(node, table, &p));
  const int32_t axis = (int32_t)omc_node_int(node, "axis");
  const int32_t batch = (int32_t)omc_node_int(node, "batch_dims");
  *out = (omc_shape){0};
  OMC_TRY(append(node, table, 0, axis, out));
  OMC_TRY(append(node, of_ids, 0, of_ids->rank - 1, out));
  return append(node, table, batch + axis + p.depth, table->rank, out);
}

/* GatherElements: ids have the table's rank and nowhere, but along the axis, more elements. */
static omc_status gather_elements_shape(const omc_node *node, const omc_shape *table,
                                        omc_shape *out) {
  int32_t axis;
  OMC_TRY(omc_need_axis(node, table->rank, &axis));
  *out = *omc_in_shape(node, 1);
  bool fits = out->rank == table->rank;
  for (int32_t i = 0; fits && i < out->rank; i++)
    fits = i == axis || out->dims[i] <= table->dims[i];
  if (fits) return OMC_OK;
  char a[OMC_TYPE_TEXT], b[OMC_TYPE_TEXT];
  OMC_NODE_FAIL(node, ESHAPE, "ids %s do not pick from %s along axis %d",
                omc_shape_text(out, a, sizeof a), omc_shape_text(table, b, sizeof b), axis);
}

/* How a ScatterElements joins, OMC_JOIN_SUM of any other op. */
static omc_join join_of(const omc_node *node) {
  static const char *const names[] = {
      [OMC_JOIN_PRODUCT] = "mul", [OMC_JOIN_MOST] = "max", [OMC_JOIN_LEAST] = "min"};
  if (node->op != OMC_OP_ScatterElements) return OMC_JOIN_SUM;
  const char *const said = omc_node_string(node, "reduction");
  omc_join join = OMC_JOIN_PRODUCT;
  while (join < OMC_JOIN_LEAST && strcmp(said, names[join]) != 0) join++;
  return join;
}

omc_status omc_gather_elements_form_of(const omc_node *node, const omc_shape *table,
                                       omc_lines_form *p) {
  const omc_shape *t = omc_in_shape(node, 1);
  int64_t table_strides[OMC_MAX_RANK], strides[OMC_MAX_RANK];
  int32_t axis;
  OMC_TRY(omc_need_axis(node, table->rank, &axis));
  omc_shape_strides(table, table_strides);
  omc_shape_strides(t, strides);
  *p = (omc_lines_form){.n = t->dims[axis],
                        .count = 1,
                        .axis = axis,
                        .dim = table->dims[axis],
                        .negative = takes_negative(node),
                        .join = join_of(node),
                        .table_step = table_strides[axis],
                        .picked_step = strides[axis]};
  for (int32_t i = 0; i < t->rank; i++) {
    if (i == axis) continue;
    p->dims[p->rank] = t->dims[i];
    p->table[p->rank] = table_strides[i];
    p->picked[p->rank++] = strides[i];
    p->count *= t->dims[i];
  }
  return OMC_OK;
}

static omc_status need_ids(const omc_node *node) {
  return omc_in(node, 1)->type.dtype == OMC_I32 ? OMC_OK : omc_need_dtype(node, 1, OMC_I64);
}

/* The shape of what a node picks from a table of shape `table`. */
typedef omc_status (*pick_rule)(const omc_node *node, const omc_shape *table, omc_shape *out);

static omc_status infer_pick(omc_node *node, pick_rule rule) {
  omc_shape shape;
  OMC_TRY(need_ids(node));
  OMC_TRY(rule(node, omc_in_shape(node, 0), &shape));
  omc_set_shape(node, &shape);
  return OMC_OK;
}

/* A third input is what the gradient is added to, and has the table's shape. */
static omc_status infer_pick_grad(omc_node *node, pick_rule rule) {
  omc_shape table, shape;
  OMC_TRY(need_ids(node));
  OMC_TRY(omc_need_shape(node, &table));
  if (table.rank == 0 && omc_in(node, 2)) table = *omc_in_shape(node, 2);
  OMC_TRY(rule(node, &table, &shape));
  OMC_TRY(omc_need_gradient(node, &shape));
  omc_set_shape(node, &table);
  return omc_need_type(node, 2, "base", omc_in(node, 0)->type.dtype, &table);
}

static omc_status grad_pick(omc_grad *g, omc_op_id op) {
  omc_value *const in[] = {g->grad_out[0], omc_in(g->node, 1)};
  g->grad_in[0] = omc_nary_like(&g->b, op, 2, in, g->node, omc_in_shape(g->node, 0));
  return g->b.status;
}

/* That of adding is picking. */
static omc_status grad_add(omc_grad *g, omc_op_id op) {
  omc_value *const in[] = {g->grad_out[0], omc_in(g->node, 1)};
  g->grad_in[0] = omc_nary_like(&g->b, op, 2, in, g->node, NULL);
  if (omc_in(g->node, 2)) g->grad_in[2] = g->grad_out[0];
  return g->b.status;
}

/* ---- ScatterElements ---- */

static omc_status infer_scatter(omc_node *node) {
  const omc_shape *x = omc_in_shape(node, 0);
  omc_shape picked;
  OMC_TRY(need_ids(node));
  OMC_TRY(gather_elements_shape(node, x, &picked));
  OMC_TRY(omc_need_type(node, 2, "what is put in", omc_in(node, 0)->type.dtype, &picked));
  omc_set_shape(node, x);
  return OMC_OK;
}

/* Of the places that are named, and what is added there. */
static omc_value *picked_by(omc_grad *g, omc_value *v) {
  omc_value *const in[] = {v, omc_in(g->node, 1)};
  return omc_nary_like(&g->b, OMC_OP_GatherElements, 2, in, g->node, NULL);
}
static omc_value *added_by(omc_grad *g, omc_value *v, omc_value *to) {
  omc_value *const in[] = {v, omc_in(g->node, 1), to};
  return omc_nary_like(&g->b, OMC_OP_GatherElementsGrad, 3, in, g->node, NULL);
}
static omc_value *multiplied_by(omc_grad *g, omc_value *v, omc_value *to) {
  omc_value *const in[] = {to, omc_in(g->node, 1), v};
  return omc_nary_like(&g->b, g->node->op, 3, in, g->node, NULL);
}

/* 1 where two are equal, else 0. */
static omc_value *are_equal(omc_grad *g, omc_value *v, omc_value *w) {
  omc_value *const equal = omc_binary(&g->b, OMC_OP_Equal, v, w);
  return omc_cast(&g->b, equal, omc_in(g->node, 0)->type.dtype);
}

/* All that are the extreme share its gradient. */
static omc_status grad_extreme(omc_grad *g) {
  omc_value *const x = omc_in(g->node, 0), *const put = omc_in(g->node, 2);
  omc_value *const y = omc_out(g->node, 0);
  omc_value *const is_x = are_equal(g, x, y), *const is_put = are_equal(g, put, picked_by(g, y));
  omc_value *const share = omc_binary(&g->b, OMC_OP_Div, g->grad_out[0], added_by(g, is_put, is_x));
  g->grad_in[0] = omc_binary(&g->b, OMC_OP_Mul, is_x, share);
  g->grad_in[2] = omc_binary(&g->b, OMC_OP_Mul, is_put, picked_by(g, share));
  return g->b.status;
}

static omc_value *product(omc_grad *g, omc_value *v, omc_value *w) {
  return omc_binary(&g->b, OMC_OP_Mul, v, w);
}
static omc_value *ones_where(omc_grad *g, omc_value *mask, omc_value *v) {
  return omc_ternary(&g->b, OMC_OP_Where, mask, omc_scalar(&g->b, v, 1), v);
}
static omc_value *is_number(omc_grad *g, omc_value *v, double number) {
  return omc_binary(&g->b, OMC_OP_Equal, v, omc_scalar(&g->b, v, number));
}

/* The product of all others is that of all divided by the element, unless that is 0: then it is
 * made of all with a 1 in its place, but where several that are put in are 0. */
static omc_status grad_product(omc_grad *g) {
  omc_builder *b = &g->b;
  omc_value *const x = omc_in(g->node, 0), *const put = omc_in(g->node, 2);
  omc_value *const dy = g->grad_out[0], *const y = omc_out(g->node, 0);
  omc_value *const some_x = ones_where(g, is_number(g, x, 0), x);
  g->grad_in[0] = omc_binary(b, OMC_OP_Div, product(g, dy, multiplied_by(g, put, some_x)), some_x);
  if (!g->needs[2]) return b->status;
  omc_value *const is_zero = is_number(g, put, 0);
  omc_value *const zero = omc_cast(b, is_zero, x->type.dtype);
  omc_value *const zeros = picked_by(g, added_by(g, zero, omc_zeros(b, &x->type)));
  omc_value *const alone = omc_binary(b, OMC_OP_And, is_zero, is_number(g, zeros, 1));
  omc_value *const others = multiplied_by(g, ones_where(g, alone, put), x);
  omc_value *const divided =
      omc_binary(b, OMC_OP_Div, picked_by(g, product(g, dy, y)), ones_where(g, is_zero, put));
  g->grad_in[2] =
      omc_ternary(b, OMC_OP_Where, alone, picked_by(g, product(g, dy, others)), divided);
  return b->status;
}

static omc_status grad_scatter(omc_grad *g) {
  return join_of(g->node) == OMC_JOIN_PRODUCT ? grad_product(g) : grad_extreme(g);
}

OMC_RECORD(ScatterElements, 3, 3, 1, .flags = OMC_OP_FAILS, .in_place = 1u << 0,
           .infer = infer_scatter, .grad = grad_scatter)

/* ---- records: an op that picks, and its gradient ---- */

#define PICK_OPS(name, id, grad_of_grad)                                                        \
  static omc_status infer_##id(omc_node *node) { return infer_pick(node, id##_shape); }         \
  static omc_status infer_##id##_grad(omc_node *node) {                                         \
    return infer_pick_grad(node, id##_shape);                                                   \
  }                                                                                             \
  static omc_status grad_##id(omc_grad *g) { return grad_pick(g, OMC_OP_##name##Grad); }        \
  OMC_RECORD(name, 2, 2, 1, .flags = OMC_OP_FAILS, .infer = infer_##id, .cost = omc_cost_moved, \
             .grad = grad_##id)                                                                 \
  OMC_RECORD(name##Grad, 2, 3, 1, .flags = OMC_OP_FAILS, .in_place = 1u << 2,                   \
             .infer = infer_##id##_grad, .grad = grad_of_grad)
#define PICK_AND_ADD_OPS(name, id)                                                       \
  static omc_status grad_##id##_grad(omc_grad *g) { return grad_add(g, OMC_OP_##name); } \
  PICK_OPS(name, id, grad_##id##_grad)
PICK_AND_ADD_OPS(Gather, gather)
PICK_AND_ADD_OPS(GatherND, gather_nd)
PICK_AND_ADD_OPS(GatherElements, gather_elements)
PICK_OPS(Embedding, embedding, NULL) /* which leaves rows out */
