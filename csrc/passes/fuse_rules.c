/* Patterns of joint graphs that have a better kernel. */
#include "passes/rewrite.h"

/* A tied table's gradient is added into the other contribution instead of beside it. */
static omc_value *embedding_grad_base(omc_match *m) {
  const omc_node *node = m->capture[1]->producer;
  if (omc_in(node, 2) || !omc_type_equal(&m->capture[2]->type, &m->capture[0]->type)) return NULL;
  omc_value *in[] = {omc_in(node, 0), omc_in(node, 1), m->capture[2]};
  return omc_bn(m->b, OMC_OP_EmbeddingGrad, 3, in, node->n_attr, node->attr);
}

static omc_value *product(omc_match *m, omc_value *x, omc_value *y, int64_t trans_a,
                          int64_t trans_b, double alpha) {
  omc_value *in[] = {x, y};
  const omc_attr attr[] = {omc_ai("transA", trans_a), omc_ai("transB", trans_b),
                           omc_af("alpha", alpha)};
  return omc_bn(m->b, OMC_OP_FusedMatMul, 2, in, 3, attr);
}

/* A product, without bias, of operands that are matrices of the same rank. */
static bool is_plain_product(const omc_node *node) {
  const int32_t a = omc_in(node, 0)->type.shape.rank, b = omc_in(node, 1)->type.shape.rank;
  return a >= 2 && a == b && !omc_in(node, 2);
}

static omc_value *matmul_alpha(omc_match *m) {
  const omc_node *node = m->capture[1]->producer;
  const omc_value *factor = m->capture[2];
  if (!is_plain_product(node) || omc_shape_numel(&factor->type.shape) != 1 ||
      !omc_type_equal(&m->capture[1]->type, &m->capture[0]->type))
    return NULL;
  return product(m, omc_in(node, 0), omc_in(node, 1), omc_attr_int(node, "transA", 0),
                 omc_attr_int(node, "transB", 0),
                 omc_attr_float(node, "alpha", 1) * omc_const_float(factor, 0));
}

/* (A B)' = B' A' */
static omc_value *transpose_matmul(omc_match *m) {
  const omc_node *node = m->capture[1]->producer;
  const int64_t rank = m->capture[0]->type.shape.rank;
  uint32_t n;
  const int64_t *perm = omc_attr_ints(m->root, "perm", &n);
  if (!is_plain_product(node) || (n == 0 && rank != 2)) return NULL;
  for (int64_t i = 0; i < (int64_t)n; i++)
    if (perm[i] != (i < rank - 2 ? i : 2 * rank - 3 - i)) return NULL;
  return product(m, omc_in(node, 1), omc_in(node, 0), !omc_attr_int(node, "transB", 0),
                 !omc_attr_int(node, "transA", 0), omc_attr_float(node, "alpha", 1));
}

/* The sum over what Expand repeated is a multiple of what it had. */
static omc_value *reduce_sum_expand(omc_match *m) {
  omc_value *x = m->capture[1];
  const int64_t n = omc_shape_numel(&x->type.shape);
  const int64_t repeated = omc_shape_numel(&m->capture[2]->type.shape);
  if (n == 0 || n != omc_shape_numel(&m->capture[0]->type.shape) ||
      !omc_dtype_is_float(x->type.dtype))
    return NULL;
  const double times = (double)repeated / (double)n;
  omc_value *scaled = omc_b2(m->b, OMC_OP_Mul, x, omc_scalar(m->b, x, times));
  return scaled ? omc_reshape(m->b, scaled, &m->capture[0]->type.shape) : NULL;
}

#define PRODUCT OMC_P_EITHER(OMC_P_NODE(MatMul, 1), OMC_P_NODE(FusedMatMul, 1))

static const omc_rule rules[] = {
    {"embedding_grad_base", OMC_P_OP(Add, 0, OMC_P_NODE(EmbeddingGrad, 1), OMC_P_ANY(2)),
     embedding_grad_base},
    {"matmul_alpha", OMC_P_OP(Mul, 0, PRODUCT, OMC_P_CONSTANT(2)), matmul_alpha},
    {"transpose_matmul", OMC_P_OP(Transpose, 0, PRODUCT), transpose_matmul},
    {"reduce_sum_expand",
     OMC_P_OP(ReduceSum, 0, OMC_P_SHARED(Expand, 2, OMC_P_ANY(1), OMC_P_ANY(3)), OMC_P_ANY(4)),
     reduce_sum_expand},
};

const omc_rules omc_fuse_rules = {"fuse", rules, sizeof rules / sizeof *rules};
