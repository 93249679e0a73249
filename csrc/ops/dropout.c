/* Dropout: its mask is never stored, backward draws it again. */
#include "ops/infer.h"
#include "ops/op.h"
#include "ops/random.h"

static omc_status imm_dropout(const omc_node *node, double *imm) {
  const double p = omc_node_float(node, "p");
  imm[0] = omc_drop_threshold(p);
  imm[1] = p < 1 ? 1 / (1 - p) : 0;
  imm[2] = (double)(uint32_t)omc_node_int(node, "subsequence");
  return OMC_OK;
}

static omc_status grad_dropout(omc_grad *g) {
  g->grad_in[0] = omc_nary(&g->b, OMC_OP_Dropout, 1, g->grad_out, g->node->n_attr, g->node->attr);
  return g->b.status;
}

OMC_RECORD(Dropout, 1, 1, 1, .flags = OMC_OP_POINTWISE | OMC_OP_RANDOM, .infer = omc_infer_float,
           .grad = grad_dropout, .imm = imm_dropout)
