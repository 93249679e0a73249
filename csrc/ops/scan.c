/* Along one axis: running sums, for each element the product of all others, and the index of the
 * largest or the least. */
#include "ops/forms.h"
#include "ops/infer.h"
#include "ops/op.h"

static omc_status cumsum_axis(const omc_node *node, int32_t *out) {
  const int32_t rank = omc_in_shape(node, 0)->rank;
  int64_t axis;
  int32_t n;
  OMC_TRY(omc_need_ints(node, 1, 1, &axis, &n));
  if (n != 1) OMC_NODE_FAIL(node, ESHAPE, "no axis is given");
  return omc_node_axis(node, axis, rank ? rank : 1, out);
}

omc_status omc_cumsum_form_of(const omc_node *node, omc_axis_form *out) {
  int32_t axis;
  OMC_TRY(cumsum_axis(node, &axis));
  *out = omc_axis_form_of(omc_in_shape(node, 0), axis);
  return OMC_OK;
}

static omc_status infer_cumsum(omc_node *node) {
  int32_t axis;
  OMC_TRY(cumsum_axis(node, &axis));
  return omc_infer_same(node);
}

static omc_status grad_cumsum(omc_grad *g) {
  omc_value *const in[] = {g->grad_out[0], omc_in(g->node, 1)};
  const omc_attr attrs[] = {omc_attr_int("reverse", !omc_node_int(g->node, "reverse")),
                            omc_attr_int("exclusive", omc_node_int(g->node, "exclusive"))};
  g->grad_in[0] = omc_nary(&g->b, OMC_OP_CumSum, 2, in, 2, attrs);
  return g->b.status;
}

const omc_op omc_op_CumSum = {.name = "CumSum",
                              .min_in = 2,
                              .max_in = 2,
                              .n_out = 1,
                              .in_place = 1u << 0,
                              .infer = infer_cumsum,
                              .grad = grad_cumsum};

static omc_status others_axis(const omc_node *node, int32_t *out) {
  return omc_need_axis(node, omc_in_shape(node, 0)->rank, out);
}

omc_status omc_others_form_of(const omc_node *node, omc_axis_form *out) {
  int32_t axis;
  OMC_TRY(others_axis(node, &axis));
  *out = omc_axis_form_of(omc_in_shape(node, 0), axis);
  return OMC_OK;
}

static omc_status infer_others(omc_node *node) {
  int32_t axis;
  OMC_TRY(omc_infer_float(node));
  return others_axis(node, &axis);
}

const omc_op omc_op_OtherProducts = {
    .name = "OtherProducts", .min_in = 1, .max_in = 1, .n_out = 1, .infer = infer_others};

static omc_status arg_axis(const omc_node *node, int32_t *out) {
  const int32_t rank = omc_in_shape(node, 0)->rank;
  return omc_need_axis(node, rank ? rank : 1, out);
}

omc_status omc_arg_form_of(const omc_node *node, omc_axis_form *out) {
  int32_t axis;
  OMC_TRY(arg_axis(node, &axis));
  *out = omc_axis_form_of(omc_in_shape(node, 0), axis);
  return OMC_OK;
}

static omc_status infer_arg(omc_node *node) {
  const omc_shape *x = omc_in_shape(node, 0);
  const bool keepdims = omc_node_int(node, "keepdims") != 0;
  omc_shape shape = {0};
  int32_t axis;
  OMC_TRY(arg_axis(node, &axis));
  if (x->rank && x->dims[axis] == 0) OMC_NODE_FAIL(node, ESHAPE, "axis %d has no elements", axis);
  for (int32_t i = 0; i < x->rank; i++)
    if (i != axis || keepdims) shape.dims[shape.rank++] = i == axis ? 1 : x->dims[i];
  omc_set_type(node, 0, OMC_I64, &shape);
  return OMC_OK;
}

#define ARG(name_)                \
  const omc_op omc_op_##name_ = { \
      .name = #name_, .min_in = 1, .max_in = 1, .n_out = 1, .infer = infer_arg};

ARG(ArgMax)
ARG(ArgMin)
