/* SegmentSum adds up rows that follow each other, SegmentSpread repeats a row for each of a
 * segment: each is the other's gradient. in[1] are the offsets, i64, that segments begin at: the
 * first is 0, and none is less than the one before. */
#include "ops/forms.h"
#include "ops/infer.h"
#include "ops/op.h"

omc_status omc_segment_form_of(const omc_node *node, omc_segment_form *p) {
  omc_shape rows = omc_in(node, 0)->type.shape;
  OMC_TRY(omc_need_float(node, 0));
  OMC_TRY(omc_need_dtype(node, 1, OMC_I64));
  OMC_TRY(omc_need_rank(node, 1, 1));
  const bool spreads = node->op == OMC_OP_SegmentSpread, closed = omc_node_int(node, "closed") != 0;
  const int64_t offsets = omc_in_shape(node, 1)->dims[0];
  if (closed && offsets == 0) OMC_NODE_FAIL(node, ESHAPE, "closed segments without an offset");
  if (spreads) OMC_TRY(omc_need_shape(node, &rows));
  if (rows.rank == 0) OMC_NODE_FAIL(node, ESHAPE, "a scalar has no rows");
  *p = (omc_segment_form){.n = rows.dims[0],
                          .inner = omc_shape_span(&rows, 1, rows.rank),
                          .segments = offsets - closed};
  if (!spreads) return OMC_OK;
  rows.dims[0] = p->segments;
  return omc_need_gradient(node, &rows);
}

static omc_status infer_sum(omc_node *node) {
  omc_segment_form p = {0};
  OMC_TRY(omc_segment_form_of(node, &p));
  omc_shape out = *omc_in_shape(node, 0);
  out.dims[0] = p.segments;
  omc_set_shape(node, &out);
  return OMC_OK;
}

static omc_status infer_spread(omc_node *node) {
  omc_segment_form p = {0};
  omc_shape out;
  OMC_TRY(omc_segment_form_of(node, &p));
  OMC_TRY(omc_need_shape(node, &out));
  omc_set_shape(node, &out);
  return OMC_OK;
}

static omc_status grad_sum(omc_grad *g) {
  omc_value *in[] = {g->grad_out[0], omc_in(g->node, 1)};
  g->grad_in[0] =
      omc_nary_like(&g->b, OMC_OP_SegmentSpread, 2, in, g->node, omc_in_shape(g->node, 0));
  return g->b.status;
}

static omc_status grad_spread(omc_grad *g) {
  omc_value *in[] = {g->grad_out[0], omc_in(g->node, 1)};
  g->grad_in[0] = omc_nary_like(&g->b, OMC_OP_SegmentSum, 2, in, g->node, NULL);
  return g->b.status;
}

OMC_RECORD(SegmentSum, 2, 2, 1, .flags = OMC_OP_FAILS, .infer = infer_sum, .grad = grad_sum)
OMC_RECORD(SegmentSpread, 2, 2, 1, .flags = OMC_OP_FAILS, .infer = infer_spread,
           .grad = grad_spread)
