/* Ops that move elements. */
#include <string.h>

#include "base/int.h"
#include "ops/forms.h"
#include "ops/infer.h"
#include "ops/op.h"

/* ---- Transpose ---- */

omc_status omc_perm_of(const omc_node *node, int32_t *perm) {
  uint32_t n;
  const int64_t *given = omc_node_ints(node, "perm", &n);
  const int32_t rank = omc_in_shape(node, 0)->rank;
  uint32_t seen = 0;
  if (given && (int64_t)n != rank)
    OMC_NODE_FAIL(node, ESHAPE, "perm has %u entries for rank %d", n, rank);
  for (int32_t i = 0; i < rank; i++) {
    OMC_TRY(omc_node_axis(node, given ? given[i] : rank - 1 - i, rank, &perm[i]));
    if (seen & 1u << perm[i]) OMC_NODE_FAIL(node, ESHAPE, "perm has axis %d twice", perm[i]);
    seen |= 1u << perm[i];
  }
  return OMC_OK;
}

static omc_status infer_transpose(omc_node *node) {
  int32_t perm[OMC_MAX_RANK];
  OMC_TRY(omc_perm_of(node, perm));
  omc_shape shape = *omc_in_shape(node, 0);
  for (int32_t i = 0; i < shape.rank; i++) shape.dims[i] = omc_in_shape(node, 0)->dims[perm[i]];
  omc_set_shape(node, &shape);
  return OMC_OK;
}

static omc_status grad_transpose(omc_grad *g) {
  int32_t perm[OMC_MAX_RANK];
  int64_t inverse[OMC_MAX_RANK];
  OMC_TRY(omc_perm_of(g->node, perm));
  for (int32_t i = 0; i < omc_in_shape(g->node, 0)->rank; i++) inverse[perm[i]] = i;
  g->grad_in[0] = omc_transpose(&g->b, g->grad_out[0], inverse);
  return g->b.status;
}

/* ---- Expand ---- */

static omc_status infer_expand(omc_node *node) {
  omc_shape to;
  char text[OMC_NODE_TEXT];
  OMC_TRY(omc_need_ints(node, 1, OMC_MAX_RANK, to.dims, &to.rank));
  for (int32_t i = 0; i < to.rank; i++)
    if (to.dims[i] < 0)
      OMC_NODE_FAIL(node, ESHAPE, "dim %d of the target shape is %lld", i, (long long)to.dims[i]);
  OMC_TRY(
      omc_shape_broadcast(omc_in_shape(node, 0), &to, omc_node_text(node, text, sizeof text), &to));
  omc_set_shape(node, &to);
  return OMC_OK;
}

static omc_status grad_expand(omc_grad *g) {
  g->grad_in[0] = g->grad_out[0]; /* the sweep sums it back */
  return g->b.status;
}

/* ---- Concat and Split ---- */

static omc_status infer_concat(omc_node *node) {
  omc_shape shape = *omc_in_shape(node, 0);
  int32_t axis;
  char a[OMC_TYPE_TEXT], b[OMC_TYPE_TEXT];
  OMC_TRY(omc_need_axis(node, shape.rank, &axis));
  for (uint32_t i = 1; i < node->n_in; i++) {
    OMC_TRY(omc_need_dtype(node, i, omc_in(node, 0)->type.dtype));
    OMC_TRY(omc_need_rank(node, i, shape.rank));
    const omc_shape *x = omc_in_shape(node, i);
    for (int32_t d = 0; d < shape.rank; d++)
      if (d != axis && x->dims[d] != shape.dims[d])
        OMC_NODE_FAIL(node, ESHAPE, "input %u is %s and input 0 is %s, unequal beside axis %d", i,
                      omc_shape_text(x, a, sizeof a),
                      omc_shape_text(omc_in_shape(node, 0), b, sizeof b), axis);
    shape.dims[axis] += x->dims[axis];
  }
  omc_set_shape(node, &shape);
  return OMC_OK;
}

static omc_status grad_concat(omc_grad *g) {
  const omc_node *node = g->node;
  int32_t axis;
  OMC_TRY(omc_need_axis(node, omc_in_shape(node, 0)->rank, &axis));
  int64_t *sizes = OMC_NEW_ARRAY(&g->b.graph->arena, int64_t, node->n_in);
  if (!sizes) OMC_NODE_FAIL(node, ENOMEM, "no memory for %u sizes", node->n_in);
  for (uint32_t i = 0; i < node->n_in; i++) sizes[i] = omc_in_shape(node, i)->dims[axis];
  omc_value *const in[] = {g->grad_out[0], omc_ints(&g->b, sizes, (int32_t)node->n_in)};
  const omc_attr attr = omc_attr_int("axis", axis);
  omc_build(&g->b, OMC_OP_Split, 2, in, 0, 1, &attr, node->n_in, g->grad_in);
  return g->b.status;
}

static omc_status infer_split(omc_node *node) {
  omc_shape shape = *omc_in_shape(node, 0);
  int32_t axis;
  OMC_TRY(omc_need_axis(node, shape.rank, &axis));
  OMC_TRY(omc_need_const(node, 1));
  const omc_value *sizes = omc_in(node, 1);
  const int64_t n = omc_shape_numel(&sizes->type.shape), dim = shape.dims[axis];
  if (n != node->n_out)
    OMC_NODE_FAIL(node, ESHAPE, "%lld sizes for %u outputs", (long long)n, node->n_out);
  int64_t left = dim;
  for (uint32_t k = 0; k < node->n_out; k++) {
    shape.dims[axis] = omc_const_int(sizes, k);
    if (shape.dims[axis] < 0 || shape.dims[axis] > left) break;
    left -= shape.dims[axis];
    omc_set_type(node, k, omc_in(node, 0)->type.dtype, &shape);
    if (k + 1 == node->n_out && left == 0) return OMC_OK;
  }
  OMC_NODE_FAIL(node, ESHAPE, "the sizes do not make up axis %d of %lld", axis, (long long)dim);
}

static omc_status grad_split(omc_grad *g) {
  const omc_node *node = g->node;
  omc_value **parts = OMC_NEW_ARRAY(&g->b.graph->arena, omc_value *, node->n_out);
  if (!parts) OMC_NODE_FAIL(node, ENOMEM, "no memory for %u gradients", node->n_out);
  omc_type zeros = omc_in(node, 0)->type;
  int32_t axis;
  OMC_TRY(omc_need_axis(node, zeros.shape.rank, &axis));
  for (uint32_t k = 0; k < node->n_out; k++) {
    zeros.shape.dims[axis] = omc_const_int(omc_in(node, 1), k);
    parts[k] = g->grad_out[k] ? g->grad_out[k] : omc_zeros(&g->b, &zeros);
  }
  const omc_attr attr = omc_attr_int("axis", axis);
  g->grad_in[0] = omc_nary(&g->b, OMC_OP_Concat, node->n_out, parts, 1, &attr);
  return g->b.status;
}

/* ---- Slice and SliceGrad: starts, ends, axes and steps are inputs 1 to 4 ---- */

/* Elements from `start` to before `end` as ONNX bounds them; *start becomes the first index. */
static int64_t slice_dim(int64_t dim, int64_t *start, int64_t end, int64_t step) {
  const int64_t low = step > 0 ? 0 : -1, high = step > 0 ? dim : dim - 1;
  if (*start < 0) *start += dim;
  if (end < 0) end += dim;
  *start = omc_clamp(*start, step > 0 ? 0 : low + (dim > 0), high);
  end = omc_clamp(end, low, high);
  if (step > 0) return end > *start ? (end - *start - 1) / step + 1 : 0;
  return end < *start ? (*start - end - 1) / -step + 1 : 0;
}

/* The slice that a node's inputs take of a tensor of shape `of`. */
omc_status omc_slice_form_of(const omc_node *node, const omc_shape *of, omc_slice_form *s) {
  int64_t list[4][OMC_MAX_RANK];
  int32_t n[4] = {0};
  for (uint32_t i = 0; i < 4; i++)
    if (omc_in(node, i + 1)) OMC_TRY(omc_need_ints(node, i + 1, OMC_MAX_RANK, list[i], &n[i]));
  for (uint32_t i = 1; i < 4; i++)
    if ((omc_in(node, i + 1) || i == 1) && n[i] != n[0])
      OMC_NODE_FAIL(node, ESHAPE, "%d starts, but input %u has %d elements", n[0], i + 1, n[i]);
  s->shape = *of;
  for (int32_t i = 0; i < of->rank; i++) s->start[i] = 0, s->step[i] = 1;
  for (int32_t i = 0; i < n[0]; i++) {
    int32_t axis;
    OMC_TRY(omc_node_axis(node, omc_in(node, 3) ? list[2][i] : i, of->rank, &axis));
    const int64_t step = omc_in(node, 4) ? list[3][i] : 1;
    if (step == 0 || step == INT64_MIN)
      OMC_NODE_FAIL(node, ESHAPE, "step %lld along axis %d", (long long)step, axis);
    s->start[axis] = list[0][i];
    s->step[axis] = step;
    s->shape.dims[axis] = slice_dim(of->dims[axis], &s->start[axis], list[1][i], step);
  }
  return OMC_OK;
}

static omc_status infer_slice(omc_node *node) {
  omc_slice_form s;
  OMC_TRY(omc_slice_form_of(node, omc_in_shape(node, 0), &s));
  omc_set_shape(node, &s.shape);
  return OMC_OK;
}

/* A slicing node of `dy` with the same starts, ends, axes and steps. */
static omc_status slice_like(omc_grad *g, omc_op_id op, uint32_t n_attr, const omc_attr *attr) {
  const omc_node *node = g->node;
  omc_value *const in[] = {g->grad_out[0], omc_in(node, 1), omc_in(node, 2), omc_in(node, 3),
                           omc_in(node, 4)};
  omc_build(&g->b, op, 5, in, 1u << 3 | 1u << 4, n_attr, attr, 1, &g->grad_in[0]);
  return g->b.status;
}

static omc_status grad_slice(omc_grad *g) {
  const omc_shape *x = omc_in_shape(g->node, 0);
  const omc_attr attr = omc_attr_ints("shape", x->dims, (uint32_t)x->rank);
  return slice_like(g, OMC_OP_SliceGrad, 1, &attr);
}

static omc_status infer_slice_grad(omc_node *node) {
  omc_shape shape;
  omc_slice_form s;
  OMC_TRY(omc_need_shape(node, &shape));
  OMC_TRY(omc_slice_form_of(node, &shape, &s));
  OMC_TRY(omc_need_gradient(node, &s.shape));
  omc_set_shape(node, &shape);
  return OMC_OK;
}

static omc_status grad_slice_grad(omc_grad *g) { return slice_like(g, OMC_OP_Slice, 0, NULL); }

/* ---- Pad: pads[i] before and pads[rank + i] after axis i ---- */

omc_status omc_pads_of(const omc_node *node, int64_t *pads) {
  const int32_t rank = omc_in_shape(node, 0)->rank;
  int32_t n;
  OMC_TRY(omc_need_ints(node, 1, 2 * OMC_MAX_RANK, pads, &n));
  if (n == 2 * rank) return OMC_OK;
  OMC_NODE_FAIL(node, ESHAPE, "%d pads for rank %d", n, rank);
}

static omc_status infer_pad(omc_node *node) {
  omc_shape shape = *omc_in_shape(node, 0);
  int64_t pads[2 * OMC_MAX_RANK];
  OMC_TRY(omc_pads_of(node, pads));
  for (int32_t i = 0; i < shape.rank; i++) {
    int64_t *dim = &shape.dims[i];
    if (__builtin_add_overflow(*dim, pads[i], dim) ||
        __builtin_add_overflow(*dim, pads[shape.rank + i], dim) || *dim < 0)
      OMC_NODE_FAIL(node, ESHAPE, "axis %d of %lld is padded by %lld and %lld", i,
                    (long long)omc_in_shape(node, 0)->dims[i], (long long)pads[i],
                    (long long)pads[shape.rank + i]);
  }
  const omc_value *value = omc_in(node, 2);
  if (value) {
    OMC_TRY(omc_need_dtype(node, 2, omc_in(node, 0)->type.dtype));
    if (omc_shape_numel(&value->type.shape) != 1)
      OMC_NODE_FAIL(node, ESHAPE, "the value is not a single element");
  }
  omc_set_shape(node, &shape);
  return OMC_OK;
}

static omc_status grad_pad(omc_grad *g) {
  int64_t pads[2 * OMC_MAX_RANK];
  const int32_t n = 2 * omc_in_shape(g->node, 0)->rank;
  OMC_TRY(omc_pads_of(g->node, pads));
  for (int32_t i = 0; i < n; i++) pads[i] = -pads[i];
  g->grad_in[0] = omc_binary(&g->b, OMC_OP_Pad, g->grad_out[0], omc_ints(&g->b, pads, n));
  return g->b.status;
}

/* ---- Tile ---- */

static omc_status infer_tile(omc_node *node) {
  omc_shape shape = *omc_in_shape(node, 0);
  int64_t repeats[OMC_MAX_RANK];
  int32_t n;
  OMC_TRY(omc_need_ints(node, 1, OMC_MAX_RANK, repeats, &n));
  if (n != shape.rank) OMC_NODE_FAIL(node, ESHAPE, "%d repeats for rank %d", n, shape.rank);
  for (int32_t i = 0; i < n; i++)
    if (repeats[i] < 0 || __builtin_mul_overflow(shape.dims[i], repeats[i], &shape.dims[i]))
      OMC_NODE_FAIL(node, ESHAPE, "%lld repeats of axis %d", (long long)repeats[i], i);
  omc_set_shape(node, &shape);
  return OMC_OK;
}

static omc_status grad_tile(omc_grad *g) {
  const omc_shape *x = omc_in_shape(g->node, 0);
  omc_value *dx = g->grad_out[0];
  for (int32_t i = 0; i < x->rank && dx; i++) {
    const omc_shape *shape = &dx->type.shape;
    const int64_t repeats = omc_const_int(omc_in(g->node, 1), i), one = 1;
    if (repeats == 1) continue;
    const omc_shape split = {4,
                             {omc_shape_span(shape, 0, i), repeats, x->dims[i],
                              omc_shape_span(shape, i + 1, shape->rank)}};
    omc_shape reduced = *shape;
    reduced.dims[i] = x->dims[i];
    dx = omc_reduce_sum(&g->b, omc_reshape(&g->b, dx, &split), &one, 1, false);
    dx = omc_reshape(&g->b, dx, &reduced);
  }
  g->grad_in[0] = dx;
  return g->b.status;
}

/* ---- records ---- */

#define MOVE_OP(name, min, max, outs, id) \
  OMC_RECORD(name, min, max, outs, .cost = omc_cost_moved, .infer = infer_##id, .grad = grad_##id)
MOVE_OP(Concat, 1, OMC_VARIADIC, 1, concat)
MOVE_OP(Expand, 2, 2, 1, expand)
MOVE_OP(Pad, 2, 3, 1, pad)
MOVE_OP(Slice, 3, 5, 1, slice)
MOVE_OP(SliceGrad, 3, 5, 1, slice_grad)
MOVE_OP(Split, 2, 2, OMC_VARIADIC, split)
MOVE_OP(Tile, 2, 2, 1, tile)
MOVE_OP(Transpose, 1, 1, 1, transpose)
