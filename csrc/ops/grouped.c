/* GroupedMatMul multiplies rows [rows, k] by matrices [groups, k, n], with transB [groups, n, k]:
 * those from one of the ends in[2], i64, to the next one by the matrix of that group, those before
 * the first end by the first matrix. Rows after the last end give zeros. GroupedMatMulGradWeight
 * is the gradient of the matrices, of rows and the result's gradient. */
#include "ops/forms.h"
#include "ops/infer.h"
#include "ops/op.h"

omc_status omc_grouped_form_of(const omc_node *node, omc_grouped_form *out) {
  const bool product = node->op == OMC_OP_GroupedMatMul;
  OMC_TRY(omc_need_float(node, 0));
  OMC_TRY(omc_need_rank(node, 0, 2));
  OMC_TRY(omc_need_dtype(node, 1, omc_in(node, 0)->type.dtype));
  OMC_TRY(omc_need_rank(node, 1, product ? 3 : 2));
  OMC_TRY(omc_need_dtype(node, 2, OMC_I64));
  OMC_TRY(omc_need_rank(node, 2, 1));
  const omc_shape *x = omc_in_shape(node, 0), *b = omc_in_shape(node, 1);
  const bool trans_b = omc_node_int(node, "transB") != 0;
  const int64_t groups = omc_in_shape(node, 2)->dims[0];
  if (product && groups != b->dims[0])
    OMC_NODE_FAIL(node, ESHAPE, "%lld ends for %lld matrices", (long long)groups,
                  (long long)b->dims[0]);
  *out = (omc_grouped_form){.groups = groups,
                            .rows = x->dims[0],
                            .k = x->dims[1],
                            .n = product && !trans_b ? b->dims[2] : b->dims[1],
                            .trans_b = trans_b};
  const int64_t meets = product ? b->dims[trans_b ? 2 : 1] : b->dims[0];
  const int64_t expected = product ? out->k : out->rows;
  if (meets == expected) return OMC_OK;
  char tx[OMC_TYPE_TEXT], tb[OMC_TYPE_TEXT];
  OMC_NODE_FAIL(node, ESHAPE, "cannot multiply %s by groups with %s: %lld meet %lld",
                omc_shape_text(x, tx, sizeof tx), omc_shape_text(b, tb, sizeof tb),
                (long long)expected, (long long)meets);
}

static omc_status infer_product(omc_node *node) {
  omc_grouped_form f = {0};
  OMC_TRY(omc_grouped_form_of(node, &f));
  omc_set_shape(node, &(omc_shape){2, {f.rows, f.n}});
  return OMC_OK;
}

static omc_status infer_grad_weight(omc_node *node) {
  omc_grouped_form f = {0};
  OMC_TRY(omc_grouped_form_of(node, &f));
  omc_shape out = {3, {f.groups, f.k, f.n}};
  if (f.trans_b) out.dims[1] = f.n, out.dims[2] = f.k;
  omc_set_shape(node, &out);
  return OMC_OK;
}

static omc_status grad_product(omc_grad *g) {
  omc_value *const x = omc_in(g->node, 0), *const w = omc_in(g->node, 1);
  omc_value *const ends = omc_in(g->node, 2), *const dy = g->grad_out[0];
  const int64_t trans_b = omc_node_int(g->node, "transB");
  if (g->needs[0]) {
    omc_value *const in[] = {dy, w, ends};
    const omc_attr attr = omc_attr_int("transB", !trans_b);
    g->grad_in[0] = omc_nary(&g->b, OMC_OP_GroupedMatMul, 3, in, 1, &attr);
  }
  if (g->needs[1]) {
    omc_value *const in[] = {x, dy, ends};
    const omc_attr attr = omc_attr_int("transB", trans_b);
    g->grad_in[1] = omc_nary(&g->b, OMC_OP_GroupedMatMulGradWeight, 3, in, 1, &attr);
  }
  return g->b.status;
}

static omc_status cost(const omc_node *node, omc_cost *out) {
  omc_grouped_form f = {0};
  OMC_TRY(omc_grouped_form_of(node, &f));
  out->flops = 2 * (double)f.rows * (double)f.k * (double)f.n;
  return OMC_OK;
}

OMC_RECORD(GroupedMatMul, 3, 3, 1, .flags = OMC_OP_FAILS, .infer = infer_product, .cost = cost,
           .grad = grad_product)
OMC_RECORD(GroupedMatMulGradWeight, 3, 3, 1, .flags = OMC_OP_FAILS, .infer = infer_grad_weight,
           .cost = cost)
