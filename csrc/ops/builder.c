#include "ops/builder.h"

#include <string.h>

#include "base/element.h"
#include "graph/edit.h"
#include "graph/schema.h"
#include "ops/op.h"

static void latch(omc_builder *b, omc_status status) {
  if (b->status == OMC_OK) b->status = status;
}

/* Latches a failure if `x`, needed for `what`, is NULL while nothing has failed before. */
static bool given(omc_builder *b, const omc_value *x, const char *what) {
  if (!x && b->status == OMC_OK)
    latch(b, omc_fail(OMC_EINTERNAL, "%s for '%s': an input is missing", what,
                      b->name ? b->name : ""));
  return x != NULL;
}

static omc_status build(omc_builder *b, const omc_node_spec *spec, omc_value **out) {
  omc_node *node;
  OMC_TRY(omc_graph_add_node(b->graph, spec, &node));
  for (uint32_t i = 0; i < node->n_out && i < 32; i++)
    if (omc_op_get(node->op)->updates >> i & 1 && !omc_in(node, i)) node->out[i] = NULL;
  omc_status status = omc_node_check(node);
  if (status == OMC_OK) status = omc_op_get(node->op)->infer(node);
  if (status != OMC_OK) {
    omc_erase_node(b->graph, node);
    return status;
  }
  for (uint32_t i = 0; i < node->n_out; i++) out[i] = node->out[i];
  return OMC_OK;
}

void omc_build(omc_builder *b, omc_op_id op, uint32_t n_in, omc_value *const *in, uint32_t optional,
               uint32_t n_attr, const omc_attr *attr, uint32_t n_out, omc_value **out) {
  for (uint32_t i = 0; i < n_out; i++) out[i] = NULL;
  for (uint32_t i = 0; i < n_in; i++)
    if (i >= 32 || !(optional & 1u << i)) given(b, in[i], omc_op_name(op));
  if (b->status != OMC_OK) return;
  const omc_node_spec spec = {.op = op,
                              .phase = b->phase,
                              .name = b->name,
                              .n_in = n_in,
                              .n_out = n_out,
                              .n_attr = n_attr,
                              .in = in,
                              .attr = attr,
                              .before = b->before};
  latch(b, build(b, &spec, out));
}

omc_value *omc_nary(omc_builder *b, omc_op_id op, uint32_t n_in, omc_value *const *in,
                    uint32_t n_attr, const omc_attr *attr) {
  omc_value *out;
  omc_build(b, op, n_in, in, 0, n_attr, attr, 1, &out);
  return out;
}

omc_value *omc_nary_like(omc_builder *b, omc_op_id op, uint32_t n_in, omc_value *const *in,
                         const omc_node *like, const omc_shape *shape) {
  uint32_t n = 0;
  omc_attr *attrs = OMC_NEW_ARRAY(&b->graph->arena, omc_attr, like->n_attr + 1);
  if (!attrs) {
    latch(b, omc_node_fail(like, OMC_ENOMEM, "no memory for the attributes of its gradient"));
    return NULL;
  }
  for (uint32_t i = 0; i < like->n_attr; i++)
    if (omc_schema_find(op, like->attr[i].name)) attrs[n++] = like->attr[i];
  if (shape) attrs[n++] = omc_attr_ints("shape", shape->dims, (uint32_t)shape->rank);
  return omc_nary(b, op, n_in, in, n, attrs);
}

omc_value *omc_unary(omc_builder *b, omc_op_id op, omc_value *x) {
  return omc_nary(b, op, 1, &x, 0, NULL);
}

omc_value *omc_binary(omc_builder *b, omc_op_id op, omc_value *x, omc_value *y) {
  omc_value *const in[] = {x, y};
  return omc_nary(b, op, 2, in, 0, NULL);
}

omc_value *omc_ternary(omc_builder *b, omc_op_id op, omc_value *x, omc_value *y, omc_value *z) {
  omc_value *const in[] = {x, y, z};
  return omc_nary(b, op, 3, in, 0, NULL);
}

uint32_t omc_attrs_without(const omc_node *node, const char *name, omc_attr *out) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < node->n_attr; i++)
    if (strcmp(node->attr[i].name, name) != 0) out[n++] = node->attr[i];
  return n;
}

omc_status omc_set_attr(omc_graph *g, omc_node *node, omc_attr value) {
  omc_attr *attr = OMC_NEW_ARRAY(&g->arena, omc_attr, node->n_attr + 1);
  if (!attr) OMC_NODE_FAIL(node, ENOMEM, "no memory for attribute %s", value.name);
  const uint32_t n = omc_attrs_without(node, value.name, attr);
  attr[n] = value;
  node->attr = attr;
  node->n_attr = n + 1;
  return OMC_OK;
}

omc_value *omc_product(omc_builder *b, omc_value *x, bool trans_x, omc_value *y, bool trans_y,
                       double alpha, omc_value *bias) {
  omc_value *const in[] = {x, y, bias};
  const omc_attr attr[] = {omc_attr_int("transA", trans_x), omc_attr_int("transB", trans_y),
                           omc_attr_float("alpha", alpha)};
  return omc_nary(b, OMC_OP_FusedMatMul, bias ? 3 : 2, in, 3, attr);
}

/* A constant whose zeroed elements, *data, the caller fills in. NULL after a failure. */
static omc_value *new_const(omc_builder *b, const omc_type *type, void **data) {
  if (b->status != OMC_OK) return NULL;
  omc_value *v = NULL;
  *data = omc_arena_elements(&b->graph->arena, (size_t)omc_shape_numel(&type->shape),
                             omc_dtype_size(type->dtype));
  if (!*data)
    latch(b, omc_fail(OMC_ENOMEM, "no memory for a constant"));
  else
    latch(b, omc_graph_add_const(b->graph, NULL, type, *data, &v));
  return v;
}

omc_value *omc_number(omc_builder *b, omc_dtype dtype, double x) {
  const omc_type type = {dtype, {0, {0}}};
  void *data;
  omc_value *v = new_const(b, &type, &data);
  if (v) omc_element_set_float(dtype, data, 0, x);
  return v;
}

omc_value *omc_scalar(omc_builder *b, const omc_value *like, double x) {
  return given(b, like, "a scalar") ? omc_number(b, like->type.dtype, x) : NULL;
}

omc_value *omc_ints(omc_builder *b, const int64_t *dims, int32_t n) {
  const omc_type type = {OMC_I64, {1, {n}}};
  void *data;
  omc_value *v = new_const(b, &type, &data);
  for (int32_t i = 0; v && i < n; i++) omc_element_set_int(OMC_I64, data, i, dims[i]);
  return v;
}

omc_value *omc_zeros(omc_builder *b, const omc_type *type) {
  return omc_expand(b, omc_number(b, type->dtype, 0), &type->shape);
}

omc_value *omc_reshape(omc_builder *b, omc_value *x, const omc_shape *shape) {
  if (x && omc_shape_equal(&x->type.shape, shape)) return x;
  omc_value *const in[] = {x, omc_ints(b, shape->dims, shape->rank)};
  const omc_attr allowzero = omc_attr_int("allowzero", 1);
  return omc_nary(b, OMC_OP_Reshape, 2, in, 1, &allowzero);
}

omc_value *omc_transpose(omc_builder *b, omc_value *x, const int64_t *perm) {
  const omc_attr attr = omc_attr_ints("perm", perm, x ? (uint32_t)x->type.shape.rank : 0);
  return omc_nary(b, OMC_OP_Transpose, 1, &x, 1, &attr);
}

omc_value *omc_expand(omc_builder *b, omc_value *x, const omc_shape *shape) {
  if (x && omc_shape_equal(&x->type.shape, shape)) return x;
  return omc_binary(b, OMC_OP_Expand, x, omc_ints(b, shape->dims, shape->rank));
}

omc_value *omc_reduce_sum(omc_builder *b, omc_value *x, const int64_t *axes, int32_t n,
                          bool keepdims) {
  if (n == 0) return x;
  omc_value *const in[] = {x, omc_ints(b, axes, n)};
  const omc_attr attr = omc_attr_int("keepdims", keepdims);
  return omc_nary(b, OMC_OP_ReduceSum, 2, in, 1, &attr);
}

omc_value *omc_sum_to(omc_builder *b, omc_value *x, const omc_shape *shape) {
  if (!given(b, x, "a sum") || omc_shape_equal(&x->type.shape, shape)) return x;
  const int32_t lead = x->type.shape.rank - shape->rank;
  int64_t axes[OMC_MAX_RANK];
  int32_t n = 0;
  for (int32_t i = 0; i < x->type.shape.rank; i++)
    if (i < lead || (shape->dims[i - lead] == 1 && x->type.shape.dims[i] != 1)) axes[n++] = i;
  return omc_reshape(b, omc_reduce_sum(b, x, axes, n, true), shape);
}

omc_value *omc_cast(omc_builder *b, omc_value *x, omc_dtype to) {
  if (x && x->type.dtype == to) return x;
  const omc_attr attr = omc_attr_int("to", omc_dtype_get(to)->onnx);
  return omc_nary(b, OMC_OP_Cast, 1, &x, 1, &attr);
}
