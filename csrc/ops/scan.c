/* Along one axis: running sums and products, for each element the product of all others, and the
 * index of the largest or the least. */
#include "ops/forms.h"
#include "ops/infer.h"
#include "ops/op.h"

static omc_axis_form along(const omc_shape *x, int32_t axis) {
  if (x->rank == 0) return (omc_axis_form){.outer = 1, .n = 1, .inner = 1};
  return (omc_axis_form){.outer = omc_shape_span(x, 0, axis),
                         .n = x->dims[axis],
                         .inner = omc_shape_span(x, axis + 1, x->rank)};
}

/* As in PyTorch, a 0-d tensor has one axis. */
static int32_t axes_of(const omc_node *node) {
  const int32_t rank = omc_in_shape(node, 0)->rank;
  return rank ? rank : 1;
}

omc_status omc_axis_form_of(const omc_node *node, omc_axis_form *out) {
  int32_t axis;
  OMC_TRY(omc_need_axis(node, axes_of(node), &axis));
  *out = along(omc_in_shape(node, 0), axis);
  return OMC_OK;
}

omc_status omc_running_form_of(const omc_node *node, omc_axis_form *out) {
  int64_t given;
  int32_t n, axis;
  OMC_TRY(omc_need_ints(node, 1, 1, &given, &n));
  if (n != 1) OMC_NODE_FAIL(node, ESHAPE, "no axis is given");
  OMC_TRY(omc_node_axis(node, given, axes_of(node), &axis));
  *out = along(omc_in_shape(node, 0), axis);
  return OMC_OK;
}

static omc_status infer_running(omc_node *node) {
  omc_axis_form form;
  OMC_TRY(omc_running_form_of(node, &form));
  return omc_infer_same(node);
}

static omc_status grad_cumsum(omc_grad *g) {
  omc_value *const in[] = {g->grad_out[0], omc_in(g->node, 1)};
  const omc_attr attrs[] = {omc_attr_int("reverse", !omc_node_int(g->node, "reverse")),
                            omc_attr_int("exclusive", omc_node_int(g->node, "exclusive"))};
  g->grad_in[0] = omc_nary(&g->b, OMC_OP_CumSum, 2, in, 2, attrs);
  return g->b.status;
}

/* Of dy, the axis, x and y. */
static omc_status infer_cumprod_grad(omc_node *node) {
  const omc_type *dy = &omc_in(node, 0)->type;
  OMC_TRY(omc_need_float(node, 0));
  OMC_TRY(omc_need_type(node, 2, "x", dy->dtype, &dy->shape));
  OMC_TRY(omc_need_type(node, 3, "y", dy->dtype, &dy->shape));
  return infer_running(node);
}

static omc_status grad_cumprod(omc_grad *g) {
  omc_value *const in[] = {g->grad_out[0], omc_in(g->node, 1), omc_in(g->node, 0),
                           omc_out(g->node, 0)};
  g->grad_in[0] = omc_nary(&g->b, OMC_OP_CumProdGrad, 4, in, 0, NULL);
  return g->b.status;
}

omc_status omc_infer_along(omc_node *node) {
  omc_axis_form form;
  OMC_TRY(omc_infer_float(node));
  return omc_axis_form_of(node, &form);
}

static omc_status infer_arg(omc_node *node) {
  const omc_shape *x = omc_in_shape(node, 0);
  const bool keepdims = omc_node_int(node, "keepdims") != 0;
  omc_shape shape = {0};
  int32_t axis;
  OMC_TRY(omc_need_axis(node, axes_of(node), &axis));
  if (x->rank && x->dims[axis] == 0) OMC_NODE_FAIL(node, ESHAPE, "axis %d has no elements", axis);
  for (int32_t i = 0; i < x->rank; i++)
    if (i != axis || keepdims) shape.dims[shape.rank++] = i == axis ? 1 : x->dims[i];
  omc_set_type(node, 0, OMC_I64, &shape);
  return OMC_OK;
}

OMC_RECORD(CumSum, 2, 2, 1, .in_place = 1u << 0, .infer = infer_running, .grad = grad_cumsum)
OMC_RECORD(CumProd, 2, 2, 1, .in_place = 1u << 0, .infer = infer_running, .grad = grad_cumprod)
OMC_RECORD(CumProdGrad, 4, 4, 1, .infer = infer_cumprod_grad)
OMC_RECORD(OtherProducts, 1, 1, 1, .infer = omc_infer_along)
OMC_RECORD(ArgMax, 1, 1, 1, .infer = infer_arg)
OMC_RECORD(ArgMin, 1, 1, 1, .infer = infer_arg)
