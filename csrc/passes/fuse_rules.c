/* Patterns of joint graphs that have a better kernel. */
#include "passes/rewrite.h"

/* A tied table's gradient is added into the other contribution instead of beside it. */
static omc_value *embedding_grad_base(omc_match *m) {
  const omc_node *node = m->capture[1]->producer;
  if (omc_in(node, 2) || !omc_type_equal(&m->capture[2]->type, &m->capture[0]->type)) return NULL;
  omc_value *in[] = {omc_in(node, 0), omc_in(node, 1), m->capture[2]};
  return omc_nary(m->b, OMC_OP_EmbeddingGrad, 3, in, node->n_attr, node->attr);
}

static const omc_rule rules[] = {
    {"detach", OMC_EXACT, OMC_P_OP(Detach, 0, OMC_P_ANY(1)), omc_match_identity},
    {"with_gradient_of", OMC_EXACT, OMC_P_OP(WithGradientOf, 0, OMC_P_ANY(1), OMC_P_ANY(2)),
     omc_match_identity},
    {"embedding_grad_base", OMC_SUMS, OMC_P_OP(Add, 0, OMC_P_NODE(EmbeddingGrad, 1), OMC_P_ANY(2)),
     embedding_grad_base},
};

const omc_rules omc_fuse_rules = {rules, sizeof rules / sizeof *rules};
