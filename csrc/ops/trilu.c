/* Trilu: keeps the elements of matrices on one side of a diagonal. */
#include "ops/infer.h"
#include "ops/op.h"

static omc_status infer_trilu(omc_node *node) {
  int64_t k[1];
  int32_t n = 1;
  if (omc_in(node, 1)) OMC_TRY(omc_need_ints(node, 1, 1, k, &n));
  if (n != 1 || omc_in_shape(node, 0)->rank < 2)
    OMC_NODE_FAIL(node, ESHAPE, "needs matrices and one diagonal, got rank %d and %d",
                  omc_in_shape(node, 0)->rank, n);
  return omc_infer_same(node);
}

static omc_status grad_trilu(omc_grad *g) {
  omc_value *const in[] = {g->grad_out[0], omc_in(g->node, 1)};
  omc_build(&g->b, OMC_OP_Trilu, 2, in, 1u << 1, g->node->n_attr, g->node->attr, 1, &g->grad_in[0]);
  return g->b.status;
}

OMC_RECORD(Trilu, 1, 2, 1, .in_place = 1u << 0, .infer = infer_trilu, .grad = grad_trilu)
