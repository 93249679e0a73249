#include "ops/infer.h"

#include "ops/op.h"

static omc_status input_missing(const omc_node *node, uint32_t i) {
  OMC_NODE_FAIL(node, EINVALID, "input %u is left out", i);
}

void omc_set_type(omc_node *node, uint32_t i, omc_dtype dtype, const omc_shape *shape) {
  omc_value *v = omc_out(node, i);
  if (v) v->type = (omc_type){dtype, *shape};
}

void omc_set_shape(omc_node *node, const omc_shape *shape) {
  omc_set_type(node, 0, omc_in(node, 0)->type.dtype, shape);
}

omc_status omc_need_const(const omc_node *node, uint32_t i) {
  omc_value *v = omc_in(node, i);
  if (!v) return input_missing(node, i);
  v->sets_shape = true;
  if (omc_is_const(v)) return OMC_OK;
  OMC_NODE_FAIL(node, EUNSUPPORTED, "input %u sets a shape and is not a constant", i);
}

omc_status omc_need_ints(const omc_node *node, uint32_t i, int32_t max, int64_t *out,
                         int32_t *n_out) {
  OMC_TRY(omc_need_const(node, i));
  const omc_value *v = omc_in(node, i);
  const int64_t n = omc_shape_numel(&v->type.shape);
  if (v->type.shape.rank > 1 || n > max || omc_dtype_get(v->type.dtype)->kind != OMC_KIND_INT) {
    char type[OMC_TYPE_TEXT];
    OMC_NODE_FAIL(node, ESHAPE, "input %u is %s, not a list of at most %d integers", i,
                  omc_type_text(&v->type, type, sizeof type), max);
  }
  for (int32_t k = 0; k < n; k++) out[k] = omc_const_int(v, k);
  *n_out = (int32_t)n;
  return OMC_OK;
}

omc_status omc_need_shape(const omc_node *node, omc_shape *out) {
  uint32_t n;
  const int64_t *dims = omc_node_ints(node, "shape", &n);
  if (n > OMC_MAX_RANK) OMC_NODE_FAIL(node, ESHAPE, "shape has %u dims", n);
  *out = (omc_shape){.rank = (int32_t)n};
  for (uint32_t i = 0; i < n; i++) out->dims[i] = dims[i];
  return OMC_OK;
}

omc_status omc_node_axis(const omc_node *node, int64_t axis, int32_t rank, int32_t *out) {
  char text[OMC_NODE_TEXT];
  return omc_axis(axis, rank, omc_node_text(node, text, sizeof text), out);
}

omc_status omc_need_axis(const omc_node *node, int32_t rank, int32_t *out) {
  return omc_node_axis(node, omc_node_int(node, "axis"), rank, out);
}

omc_status omc_need_dtype(const omc_node *node, uint32_t i, omc_dtype dtype) {
  const omc_value *v = omc_in(node, i);
  if (!v) return input_missing(node, i);
  if (v->type.dtype == dtype) return OMC_OK;
  OMC_NODE_FAIL(node, EDTYPE, "input %u is %s, not %s", i, omc_dtype_get(v->type.dtype)->text,
                omc_dtype_get(dtype)->text);
}

omc_status omc_need_float(const omc_node *node, uint32_t i) {
  const omc_value *v = omc_in(node, i);
  if (!v) return input_missing(node, i);
  if (omc_dtype_is_float(v->type.dtype)) return OMC_OK;
  OMC_NODE_FAIL(node, EDTYPE, "input %u is %s, not floating point", i,
                omc_dtype_get(v->type.dtype)->text);
}

omc_status omc_need_rank(const omc_node *node, uint32_t i, int32_t rank) {
  const omc_value *v = omc_in(node, i);
  if (!v) return input_missing(node, i);
  if (v->type.shape.rank == rank) return OMC_OK;
  char type[OMC_TYPE_TEXT];
  OMC_NODE_FAIL(node, ESHAPE, "input %u is %s, not of rank %d", i,
                omc_type_text(&v->type, type, sizeof type), rank);
}

omc_status omc_need_type(const omc_node *node, uint32_t i, const char *what, omc_dtype dtype,
                         const omc_shape *shape) {
  const omc_value *v = omc_in(node, i);
  const omc_type expected = {dtype, *shape};
  if (!v || omc_type_equal(&v->type, &expected)) return OMC_OK;
  char is[OMC_TYPE_TEXT], not[OMC_TYPE_TEXT];
  return omc_node_fail(node, v->type.dtype == dtype ? OMC_ESHAPE : OMC_EDTYPE, "%s is %s, not %s",
                       what, omc_type_text(&v->type, is, sizeof is),
                       omc_type_text(&expected, not, sizeof not));
}

omc_status omc_need_gradient(const omc_node *node, const omc_shape *shape) {
  const omc_shape *dy = omc_in_shape(node, 0);
  if (omc_shape_equal(shape, dy)) return OMC_OK;
  char a[OMC_TYPE_TEXT], b[OMC_TYPE_TEXT];
  OMC_NODE_FAIL(node, ESHAPE, "the gradient is %s, not %s", omc_shape_text(dy, a, sizeof a),
                omc_shape_text(shape, b, sizeof b));
}

omc_status omc_infer_same(omc_node *node) {
  const omc_value *x = omc_in(node, 0);
  if (!x) return input_missing(node, 0);
  for (uint32_t i = 0; i < node->n_out; i++) omc_set_type(node, i, x->type.dtype, &x->type.shape);
  return OMC_OK;
}

omc_status omc_broadcast_inputs(const omc_node *node, omc_shape *out) {
  char text[OMC_NODE_TEXT];
  const char *what = omc_node_text(node, text, sizeof text);
  *out = (omc_shape){0, {0}};
  for (uint32_t i = 0; i < node->n_in; i++)
    if (omc_in(node, i)) OMC_TRY(omc_shape_broadcast(out, omc_in_shape(node, i), what, out));
  return OMC_OK;
}

/* The common dtype of the inputs from `first` on, and the broadcast shape of all that are there. */
static omc_status broadcast_type(const omc_node *node, uint32_t first, omc_type *out) {
  const omc_value *v = omc_in(node, first);
  if (!v) return input_missing(node, first);
  out->dtype = v->type.dtype;
  for (uint32_t i = first + 1; i < node->n_in; i++)
    if (omc_in(node, i) || i < omc_op_get(node->op)->min_in)
      OMC_TRY(omc_need_dtype(node, i, out->dtype));
  return omc_broadcast_inputs(node, &out->shape);
}

omc_status omc_infer_broadcast(omc_node *node) {
  omc_type type;
  OMC_TRY(broadcast_type(node, 0, &type));
  omc_set_type(node, 0, type.dtype, &type.shape);
  return OMC_OK;
}

omc_status omc_infer_float(omc_node *node) {
  OMC_TRY(omc_need_float(node, 0));
  return omc_infer_broadcast(node);
}

omc_status omc_infer_integers(omc_node *node) {
  const omc_value *x = omc_in(node, 0);
  if (!x) return input_missing(node, 0);
  if (omc_dtype_get(x->type.dtype)->kind != OMC_KIND_INT)
    OMC_NODE_FAIL(node, EDTYPE, "input 0 is %s, no integer", omc_dtype_get(x->type.dtype)->text);
  return omc_infer_broadcast(node);
}

omc_status omc_infer_logic(omc_node *node) {
  OMC_TRY(omc_need_dtype(node, 0, OMC_BOOL));
  return omc_infer_broadcast(node);
}

omc_status omc_infer_compare(omc_node *node) {
  omc_type type;
  OMC_TRY(broadcast_type(node, 0, &type));
  omc_set_type(node, 0, OMC_BOOL, &type.shape);
  return OMC_OK;
}

omc_status omc_infer_test(omc_node *node) {
  OMC_TRY(omc_need_float(node, 0));
  return omc_infer_compare(node);
}

omc_status omc_infer_choice(omc_node *node) {
  omc_type type;
  OMC_TRY(omc_need_dtype(node, 0, OMC_BOOL));
  OMC_TRY(broadcast_type(node, 1, &type));
  omc_set_type(node, 0, type.dtype, &type.shape);
  return OMC_OK;
}
