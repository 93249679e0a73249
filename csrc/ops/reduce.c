/* Reductions over axes. */
#include "ops/forms.h"
#include "ops/infer.h"
#include "ops/op.h"

/* The axes of input 1; all if there are none, unless noop_with_empty_axes. */
omc_status omc_reduced_axes(const omc_node *node, bool *reduced) {
  const int32_t rank = omc_in_shape(node, 0)->rank;
  int64_t axes[OMC_MAX_RANK];
  int32_t n = 0, axis;
  if (omc_in(node, 1)) OMC_TRY(omc_need_ints(node, 1, OMC_MAX_RANK, axes, &n));
  const bool all = n == 0 && !omc_node_int(node, "noop_with_empty_axes");
  for (int32_t i = 0; i < rank; i++) reduced[i] = all;
  for (int32_t i = 0; i < n; i++) {
    OMC_TRY(omc_node_axis(node, axes[i], rank, &axis));
    reduced[axis] = true;
  }
  return OMC_OK;
}

/* The shape of the result, reduced axes being 1 or left out. */
static omc_shape reduced_shape(const omc_node *node, const bool *reduced, bool keepdims) {
  const omc_shape *x = omc_in_shape(node, 0);
  omc_shape shape = {0};
  for (int32_t i = 0; i < x->rank; i++)
    if (!reduced[i] || keepdims) shape.dims[shape.rank++] = reduced[i] ? 1 : x->dims[i];
  return shape;
}

static omc_status infer_reduce(omc_node *node) {
  bool reduced[OMC_MAX_RANK];
  OMC_TRY(omc_reduced_axes(node, reduced));
  const omc_shape shape = reduced_shape(node, reduced, omc_node_int(node, "keepdims") != 0);
  omc_set_type(node, 0, omc_in(node, 0)->type.dtype, &shape);
  return OMC_OK;
}

/* Of 16 bits, sums may be kept as numbers of what they are computed in, rounded all the same. */
static omc_status infer_sum(omc_node *node) {
  const omc_dtype dtype = omc_in(node, 0)->type.dtype;
  OMC_TRY(infer_reduce(node));
  if (!omc_node_attr(node, "to")) return OMC_OK;
  const omc_dtype to = omc_node_to_dtype(node, "to");
  if (to != omc_dtype_acc(dtype) || omc_dtype_size(dtype) != 2 || !omc_dtype_is_float(dtype))
    OMC_NODE_FAIL(node, EDTYPE, "sums of %s are not kept as %s", omc_dtype_get(dtype)->text,
                  omc_dtype_get(to)->text);
  node->out[0]->type.dtype = to;
  return OMC_OK;
}

static omc_status infer_mean(omc_node *node) {
  OMC_TRY(omc_need_float(node, 0));
  return infer_reduce(node);
}

/* The largest of nothing does not exist. */
static omc_status infer_extreme(omc_node *node) {
  bool reduced[OMC_MAX_RANK];
  OMC_TRY(omc_reduced_axes(node, reduced));
  for (int32_t i = 0; i < omc_in_shape(node, 0)->rank; i++)
    if (reduced[i] && omc_in_shape(node, 0)->dims[i] == 0)
      OMC_NODE_FAIL(node, ESHAPE, "axis %d has no elements", i);
  return infer_reduce(node);
}

/* ---- gradients of reductions ---- */

typedef struct reduction {
  bool reduced[OMC_MAX_RANK];
  int64_t axes[OMC_MAX_RANK];
  int32_t n;
  omc_shape kept; /* of the result with reduced axes as 1 */
} reduction;

static omc_status reduction_of(const omc_node *node, reduction *r) {
  OMC_TRY(omc_reduced_axes(node, r->reduced));
  r->kept = reduced_shape(node, r->reduced, true);
  r->n = 0;
  for (int32_t i = 0; i < r->kept.rank; i++)
    if (r->reduced[i]) r->axes[r->n++] = i;
  return OMC_OK;
}

static omc_status grad_sum(omc_grad *g) {
  reduction r;
  OMC_TRY(reduction_of(g->node, &r));
  omc_value *dy = omc_cast(&g->b, g->grad_out[0], omc_in(g->node, 0)->type.dtype);
  g->grad_in[0] = omc_expand(&g->b, omc_reshape(&g->b, dy, &r.kept), omc_in_shape(g->node, 0));
  return g->b.status;
}

/* x / y in y's dtype, rounded once: the number of many elements is no bf16 and no f16. */
static omc_value *wide_quotient(omc_builder *b, omc_value *x, omc_value *y) {
  if (!x || !y) return NULL;
  return omc_cast(b, omc_binary(b, OMC_OP_Div, omc_cast(b, x, y->type.dtype), y), x->type.dtype);
}

static omc_status grad_mean(omc_grad *g) {
  const omc_shape *x = omc_in_shape(g->node, 0);
  reduction r;
  OMC_TRY(reduction_of(g->node, &r));
  int64_t count = 1;
  for (int32_t i = 0; i < r.n; i++) count *= x->dims[r.axes[i]];
  omc_value *dy = omc_reshape(&g->b, g->grad_out[0], &r.kept);
  if (!dy) return g->b.status;
  omc_value *n = omc_number(&g->b, omc_dtype_acc(dy->type.dtype), (double)count);
  g->grad_in[0] = omc_expand(&g->b, wide_quotient(&g->b, dy, n), x);
  return g->b.status;
}

/* All elements that are the extreme one share the gradient evenly. If the attribute `nan_ties` is
 * 1, those that are NaN do where the extreme is NaN; else the gradient is NaN there. */
static omc_status grad_extreme(omc_grad *g) {
  omc_builder *b = &g->b;
  omc_value *x = omc_in(g->node, 0);
  reduction r;
  OMC_TRY(omc_need_saved(g, 1));
  OMC_TRY(reduction_of(g->node, &r));
  omc_value *y = omc_reshape(b, omc_out(g->node, 0), &r.kept);
  omc_value *is_hit = omc_binary(b, OMC_OP_Equal, x, y);
  if (omc_node_int(g->node, "nan_ties"))
    is_hit = omc_binary(b, OMC_OP_Or, is_hit, omc_unary(b, OMC_OP_IsNaN, x));
  omc_value *hits = omc_cast(b, is_hit, omc_dtype_acc(x->type.dtype));
  hits = omc_reduce_sum(b, hits, r.axes, r.n, true);
  if (omc_shape_numel(&r.kept) != 1) hits = omc_cast(b, hits, x->type.dtype); /* as in PyTorch */
  omc_value *share = wide_quotient(b, omc_reshape(b, g->grad_out[0], &r.kept), hits);
  g->grad_in[0] = omc_binary(b, OMC_OP_Mul, omc_cast(b, is_hit, x->type.dtype), share);
  return b->status;
}

/* For each element the product of the others that it is reduced with. */
static omc_value *other_products(omc_builder *b, omc_value *x, const reduction *r) {
  const omc_shape *shape = &x->type.shape;
  const int32_t kept = shape->rank - r->n;
  int64_t perm[OMC_MAX_RANK], inverse[OMC_MAX_RANK];
  omc_shape moved = {.rank = shape->rank}, rows = {.rank = kept + 1};
  for (int32_t i = 0, k = 0, m = kept; i < shape->rank; i++) perm[r->reduced[i] ? m++ : k++] = i;
  for (int32_t i = 0; i < shape->rank; i++) {
    inverse[perm[i]] = i;
    moved.dims[i] = shape->dims[perm[i]];
    if (i < kept) rows.dims[i] = moved.dims[i];
  }
  rows.dims[kept] = omc_shape_span(&moved, kept, shape->rank);
  const omc_attr last = omc_attr_int("axis", kept), own = omc_attr_int("axis", r->axes[0]);
  if (r->n == 1) return omc_nary(b, OMC_OP_OtherProducts, 1, &x, 1, &own);
  omc_value *v = omc_reshape(b, omc_transpose(b, x, perm), &rows);
  v = omc_nary(b, OMC_OP_OtherProducts, 1, &v, 1, &last);
  return omc_transpose(b, omc_reshape(b, v, &moved), inverse);
}

/* As PyTorch: y / x, unless there is a zero anywhere. */
static omc_status grad_prod(omc_grad *g) {
  omc_builder *b = &g->b;
  omc_value *x = omc_in(g->node, 0);
  reduction r;
  OMC_TRY(omc_need_saved(g, 1));
  OMC_TRY(reduction_of(g->node, &r));
  omc_value *dy = omc_reshape(b, g->grad_out[0], &r.kept);
  if (r.n == 0 || omc_shape_numel(&x->type.shape) == 0) {
    g->grad_in[0] = omc_expand(b, dy, &x->type.shape);
    return b->status;
  }
  omc_value *zero = omc_scalar(b, x, 0);
  omc_value *is_zero = omc_cast(b, omc_binary(b, OMC_OP_Equal, x, zero), x->type.dtype);
  const omc_attr drop = omc_attr_int("keepdims", 0);
  omc_value *zeros = omc_nary(b, OMC_OP_ReduceSum, 1, &is_zero, 1, &drop);
  omc_value *quotient = omc_binary(b, OMC_OP_Div, omc_reshape(b, omc_out(g->node, 0), &r.kept), x);
  omc_value *others = omc_ternary(b, OMC_OP_Where, omc_binary(b, OMC_OP_Greater, zeros, zero),
                                  other_products(b, x, &r), quotient);
  g->grad_in[0] = omc_binary(b, OMC_OP_Mul, dy, others);
  if (!omc_in(g->node, 1)) { /* of all elements: two zeros silence infinities and NaN */
    omc_value *many = omc_binary(b, OMC_OP_Greater, zeros, omc_scalar(b, x, 1));
    g->grad_in[0] = omc_ternary(b, OMC_OP_Where, many, zero, g->grad_in[0]);
  }
  return b->status;
}

/* ---- records ---- */

OMC_RECORD(ReduceSum, 1, 2, 1, .infer = infer_sum, .grad = grad_sum)
OMC_RECORD(ReduceMean, 1, 2, 1, .infer = infer_mean, .grad = grad_mean)
OMC_RECORD(ReduceMax, 1, 2, 1, .infer = infer_extreme, .grad = grad_extreme)
OMC_RECORD(ReduceMin, 1, 2, 1, .infer = infer_extreme, .grad = grad_extreme)
OMC_RECORD(ReduceProd, 1, 2, 1, .infer = infer_reduce, .grad = grad_prod)
