/* Resample: along an axis, each element of the result is a weighted sum of a few of in[0], as where
 * images are enlarged. in[1], i64 [to, most], are their places, one outside of the axis for none,
 * and in[2] their weights. in[3] and in[4] are the same the other way round, for the gradient: for
 * each element of in[0] where it went, and with which weight. */
#include "ops/forms.h"
#include "ops/infer.h"
#include "ops/op.h"

static omc_status check_tables(const omc_node *node, uint32_t places) {
  OMC_TRY(omc_need_rank(node, places, 2));
  OMC_TRY(omc_need_dtype(node, places, OMC_I64));
  OMC_TRY(omc_need_dtype(node, places + 1, omc_in(node, 0)->type.dtype));
  if (!omc_shape_equal(omc_in_shape(node, places), omc_in_shape(node, places + 1)))
    OMC_NODE_FAIL(node, ESHAPE, "places and weights are of different shapes");
  return OMC_OK;
}

omc_status omc_resample_form_of(const omc_node *node, omc_resample_form *out) {
  const omc_shape *x = omc_in_shape(node, 0);
  int32_t axis;
  OMC_TRY(omc_need_float(node, 0));
  OMC_TRY(omc_need_axis(node, x->rank, &axis));
  OMC_TRY(check_tables(node, 1));
  OMC_TRY(check_tables(node, 3));
  const omc_shape *places = omc_in_shape(node, 1);
  const int64_t from = omc_in_shape(node, 3)->dims[0];
  if (x->dims[axis] != from)
    OMC_NODE_FAIL(node, ESHAPE, "axis %d has %lld elements, the table %lld", axis,
                  (long long)x->dims[axis], (long long)from);
  *out = (omc_resample_form){.outer = omc_shape_span(x, 0, axis),
                             .from = from,
                             .to = places->dims[0],
                             .inner = omc_shape_span(x, axis + 1, x->rank),
                             .most = places->dims[1]};
  return OMC_OK;
}

static omc_status infer_resample(omc_node *node) {
  omc_resample_form form = {0};
  OMC_TRY(omc_resample_form_of(node, &form));
  omc_shape shape = *omc_in_shape(node, 0);
  int32_t axis;
  OMC_TRY(omc_need_axis(node, shape.rank, &axis));
  shape.dims[axis] = form.to;
  omc_set_shape(node, &shape);
  return OMC_OK;
}

static omc_status grad_resample(omc_grad *g) {
  omc_value *in[] = {g->grad_out[0], omc_in(g->node, 3), omc_in(g->node, 4), omc_in(g->node, 1),
                     omc_in(g->node, 2)};
  g->grad_in[0] = omc_nary_like(&g->b, OMC_OP_Resample, 5, in, g->node, NULL);
  return g->b.status;
}

OMC_RECORD(Resample, 5, 5, 1, .infer = infer_resample, .grad = grad_resample)
