/* TopK: the first k elements of each line along an axis, in[1] being k, and their places as out[1]:
 * the largest or the least, NaN being larger than all. Equal ones are in the order of their places,
 * so that all n of a line are the line sorted. They are in order whatever the attribute `sorted`
 * says. */
#include "ops/forms.h"
#include "ops/infer.h"
#include "ops/op.h"

static omc_status read_count(const omc_node *node, int64_t n, int64_t *k) {
  int32_t given;
  OMC_TRY(omc_need_ints(node, 1, 1, k, &given));
  if (given != 1) OMC_NODE_FAIL(node, ESHAPE, "k is not given");
  if (*k < 0 || *k > n)
    OMC_NODE_FAIL(node, ESHAPE, "k is %lld of %lld elements", (long long)*k, (long long)n);
  if (n > INT32_MAX)
    OMC_NODE_FAIL(node, EUNSUPPORTED, "an axis of %lld elements, more than %d", (long long)n,
                  INT32_MAX);
  return OMC_OK;
}

omc_status omc_topk_form_of(const omc_node *node, omc_topk_form *out) {
  const omc_shape *x = omc_in_shape(node, 0);
  int32_t axis;
  OMC_TRY(omc_need_axis(node, x->rank, &axis));
  *out = (omc_topk_form){.outer = omc_shape_span(x, 0, axis),
                         .n = x->dims[axis],
                         .inner = omc_shape_span(x, axis + 1, x->rank),
                         .largest = omc_node_int(node, "largest") != 0};
  return read_count(node, out->n, &out->k);
}

static omc_status infer_topk(omc_node *node) {
  omc_topk_form form;
  OMC_TRY(omc_topk_form_of(node, &form));
  omc_shape shape = *omc_in_shape(node, 0);
  int32_t axis;
  OMC_TRY(omc_need_axis(node, shape.rank, &axis));
  shape.dims[axis] = form.k;
  omc_set_shape(node, &shape);
  omc_set_type(node, 1, OMC_I64, &shape);
  return OMC_OK;
}

static omc_status grad_topk(omc_grad *g) {
  OMC_TRY(omc_need_output(g, 1));
  const omc_shape *x = omc_in_shape(g->node, 0);
  omc_value *const in[] = {g->grad_out[0], omc_out(g->node, 1)};
  const omc_attr attrs[] = {omc_attr_int("axis", omc_node_int(g->node, "axis")),
                            omc_attr_ints("shape", x->dims, (uint32_t)x->rank)};
  g->grad_in[0] = omc_nary(&g->b, OMC_OP_GatherElementsGrad, 2, in, 2, attrs);
  return g->b.status;
}

OMC_RECORD(TopK, 2, 2, 2, .infer = infer_topk, .grad = grad_topk)
