/* Ops whose output is the input's elements in the same order under another shape: no step runs. */
#include "graph/graph.h"
#include "ops/infer.h"
#include "ops/op.h"

static omc_status bad_shape(const omc_node *node, const omc_shape *to) {
  char a[OMC_TYPE_TEXT], b[OMC_TYPE_TEXT];
  OMC_NODE_FAIL(node, ESHAPE, "%s does not fit shape %s",
                omc_type_text(&omc_in(node, 0)->type, a, sizeof a),
                omc_shape_text(to, b, sizeof b));
}

static omc_status set_shape(omc_node *node, const omc_shape *shape) {
  const omc_type *x = &omc_in(node, 0)->type;
  if (omc_shape_numel(shape) != omc_shape_numel(&x->shape)) return bad_shape(node, shape);
  omc_set_type(node, 0, x->dtype, shape);
  return OMC_OK;
}

/* Marks the axes that constant input i lists, counted in `rank`. */
static omc_status read_axes(const omc_node *node, uint32_t i, int32_t rank, bool *marked) {
  int64_t axes[OMC_MAX_RANK];
  int32_t n, axis;
  OMC_TRY(omc_need_ints(node, i, OMC_MAX_RANK, axes, &n));
  for (int32_t k = 0; k < n; k++) {
    OMC_TRY(omc_node_axis(node, axes[k], rank, &axis));
    if (marked[axis]) OMC_NODE_FAIL(node, EINVALID, "axis %d is listed twice", axis);
    marked[axis] = true;
  }
  return OMC_OK;
}

static omc_status infer_reshape(omc_node *node) {
  const omc_shape *x = &omc_in(node, 0)->type.shape;
  const bool copy_zero = omc_node_int(node, "allowzero") == 0;
  omc_shape shape = {0, {0}};
  int32_t inferred = -1;
  OMC_TRY(omc_need_ints(node, 1, OMC_MAX_RANK, shape.dims, &shape.rank));
  for (int32_t d = 0; d < shape.rank; d++) {
    if (shape.dims[d] == 0 && copy_zero && d < x->rank) shape.dims[d] = x->dims[d];
    if (shape.dims[d] < -1 || (shape.dims[d] == -1 && inferred >= 0))
      return bad_shape(node, &shape);
    if (shape.dims[d] == -1) inferred = d;
  }
  if (inferred >= 0) {
    shape.dims[inferred] = 1;
    const int64_t others = omc_shape_numel(&shape);
    if (others == 0) shape.dims[inferred] = -1;
    if (others == 0 || omc_shape_numel(x) % others != 0) return bad_shape(node, &shape);
    shape.dims[inferred] = omc_shape_numel(x) / others;
  }
  return set_shape(node, &shape);
}

static omc_status infer_flatten(omc_node *node) {
  const omc_shape *x = &omc_in(node, 0)->type.shape;
  int32_t axis = x->rank;
  const int64_t asked = omc_node_int(node, "axis");
  if (asked != x->rank) OMC_TRY(omc_node_axis(node, asked, x->rank, &axis));
  const omc_shape shape = {2, {omc_shape_span(x, 0, axis), omc_shape_span(x, axis, x->rank)}};
  return set_shape(node, &shape);
}

/* Without axes every dim of 1 goes. */
static omc_status infer_squeeze(omc_node *node) {
  const omc_shape *x = &omc_in(node, 0)->type.shape;
  bool gone[OMC_MAX_RANK] = {false};
  omc_shape shape = {0, {0}};
  if (omc_in(node, 1)) OMC_TRY(read_axes(node, 1, x->rank, gone));
  for (int32_t d = 0; d < x->rank; d++) {
    if (!omc_in(node, 1)) gone[d] = x->dims[d] == 1;
    if (!gone[d]) shape.dims[shape.rank++] = x->dims[d];
  }
  return set_shape(node, &shape);
}

static omc_status infer_unsqueeze(omc_node *node) {
  const omc_shape *x = &omc_in(node, 0)->type.shape;
  bool added[OMC_MAX_RANK] = {false};
  omc_shape shape = {x->rank, {0}};
  int64_t axes[OMC_MAX_RANK];
  int32_t n;
  OMC_TRY(omc_need_ints(node, 1, OMC_MAX_RANK, axes, &n));
  shape.rank += n;
  if (shape.rank > OMC_MAX_RANK)
    OMC_NODE_FAIL(node, EUNSUPPORTED, "rank %d is above %d", shape.rank, OMC_MAX_RANK);
  OMC_TRY(read_axes(node, 1, shape.rank, added));
  for (int32_t d = 0, from = 0; d < shape.rank; d++) shape.dims[d] = added[d] ? 1 : x->dims[from++];
  return set_shape(node, &shape);
}

static omc_status grad_view(omc_grad *g) {
  g->grad_in[0] = omc_reshape(&g->b, g->grad_out[0], &omc_in(g->node, 0)->type.shape);
  return g->b.status;
}

#define VIEW(name, least, most, infer_) \
  OMC_RECORD(name, least, most, 1, .flags = OMC_OP_VIEW, .infer = infer_, .grad = grad_view)
VIEW(Identity, 1, 1, omc_infer_same)
VIEW(Reshape, 2, 2, infer_reshape)
VIEW(Flatten, 1, 1, infer_flatten)
VIEW(Squeeze, 1, 2, infer_squeeze)
VIEW(Unsqueeze, 2, 2, infer_unsqueeze)

static omc_status infer_with_gradient(omc_node *node) {
  char a[OMC_TYPE_TEXT], b[OMC_TYPE_TEXT];
  const omc_type *x = &omc_in(node, 0)->type, *like = &omc_in(node, 1)->type;
  if (!omc_type_equal(x, like))
    OMC_NODE_FAIL(node, ESHAPE, "%s cannot have the gradient of %s", omc_type_text(x, a, sizeof a),
                  omc_type_text(like, b, sizeof b));
  return omc_infer_same(node);
}

static omc_status grad_with_gradient(omc_grad *g) {
  g->grad_in[1] = g->grad_out[0];
  return g->b.status;
}

/* The elements of in[0], differentiated as if they were in[1]: where PyTorch's formula for a slope
 * is not that of how the value is computed. Gone once the graph is differentiated. */
OMC_RECORD(WithGradientOf, 2, 2, 1, .flags = OMC_OP_VIEW, .infer = infer_with_gradient,
           .grad = grad_with_gradient)

/* Its gradient stops: the output is a constant to whatever lies before. */
OMC_RECORD(Detach, 1, 1, 1, .flags = OMC_OP_VIEW, .infer = omc_infer_same)
