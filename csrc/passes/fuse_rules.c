/* Patterns of joint graphs that have a better kernel. */
#include "passes/rewrite.h"

/* A tied table's gradient is added into the other contribution instead of beside it. */
static omc_value *embedding_grad_base(omc_match *m) {
  const omc_node *node = m->capture[1]->producer;
  if (omc_in(node, 2) || !omc_type_equal(&m->capture[2]->type, &m->capture[0]->type)) return NULL;
  omc_value *in[] = {omc_in(node, 0), omc_in(node, 1), m->capture[2]};
  return omc_bn(m->b, OMC_OP_EmbeddingGrad, 3, in, node->n_attr, node->attr);
}

/* The sum over what Expand repeated is a multiple of what it had; but a sum of nothing is 0, also
 * where that is NaN. */
static omc_value *reduce_sum_expand(omc_match *m) {
  omc_value *x = m->capture[1];
  const int64_t n = omc_shape_numel(&x->type.shape);
  const int64_t repeated = omc_shape_numel(&m->capture[2]->type.shape);
  if (n == 0 || repeated == 0 || n != omc_shape_numel(&m->capture[0]->type.shape) ||
      !omc_dtype_is_float(x->type.dtype))
    return NULL;
  const double times = (double)repeated / (double)n;
  omc_value *scaled = omc_b2(m->b, OMC_OP_Mul, x, omc_scalar(m->b, x, times));
  return scaled ? omc_reshape(m->b, scaled, &m->capture[0]->type.shape) : NULL;
}

static const omc_rule rules[] = {
    {"with_gradient_of", OMC_P_OP(WithGradientOf, 0, OMC_P_ANY(1), OMC_P_ANY(2)),
     omc_match_identity},
    {"embedding_grad_base", OMC_P_OP(Add, 0, OMC_P_NODE(EmbeddingGrad, 1), OMC_P_ANY(2)),
     embedding_grad_base},
    {"reduce_sum_expand",
     OMC_P_OP(ReduceSum, 0, OMC_P_SHARED(Expand, 2, OMC_P_ANY(1), OMC_P_ANY(3)), OMC_P_ANY(4)),
     reduce_sum_expand},
};

const omc_rules omc_fuse_rules = {"fuse", rules, sizeof rules / sizeof *rules};
