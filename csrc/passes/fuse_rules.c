/* Patterns of joint graphs that have a better kernel. */
#include <string.h>

#include "ops/op.h"
#include "passes/rewrite.h"

/* A tied table's gradient is added into the other contribution instead of beside it. */
static omc_value *embedding_grad_base(omc_match *m) {
  const omc_node *node = m->capture[1]->producer;
  if (omc_in(node, 2) || !omc_type_equal(&m->capture[2]->type, &m->capture[0]->type)) return NULL;
  omc_value *in[] = {omc_in(node, 0), omc_in(node, 1), m->capture[2]};
  return omc_nary(m->b, OMC_OP_EmbeddingGrad, 3, in, node->n_attr, node->attr);
}

/* A product like `node`, of another right operand, with a result of another dtype. */
static omc_value *product_of(omc_builder *b, const omc_node *node, omc_value *right, omc_dtype to) {
  omc_value *in[] = {omc_in(node, 0), right, omc_in(node, 2)};
  omc_attr attr[8];
  uint32_t n_attr = 0;
  for (uint32_t i = 0; i < node->n_attr && n_attr < 7; i++)
    if (strcmp(node->attr[i].name, "to") != 0) attr[n_attr++] = node->attr[i];
  if (to != in[0]->type.dtype) attr[n_attr++] = omc_attr_int("to", omc_dtype_get(to)->onnx);
  return omc_nary(b, OMC_OP_FusedMatMul, in[2] ? 3 : 2, in, n_attr, attr);
}

static bool is_product(const omc_node *node) {
  return node && (node->op == OMC_OP_MatMul || node->op == OMC_OP_FusedMatMul);
}

/* What the caller has in f32 is rounded as it is read. Only if nobody is left who reads a copy, and
 * none in backward, where PyTorch has one that changes in place do not reach. */
static omc_value *matmul_cast(omc_match *m) {
  const omc_node *cast = omc_in(m->root, 1)->producer;
  const omc_dtype dtype = omc_in(m->root, 0)->type.dtype;
  if (!cast || cast->op != OMC_OP_Cast || dtype == omc_dtype_acc(dtype)) return NULL;
  omc_value *given = omc_in(cast, 0);
  if (given->producer || given->type.dtype != omc_dtype_acc(dtype)) return NULL;
  for (const omc_use *u = cast->out[0]->uses; u; u = u->next)
    if (!is_product(u->node) || u->index != 1 || u->node->phase != OMC_FORWARD) return NULL;
  return product_of(m->b, m->root, given, m->capture[0]->type.dtype);
}

/* Captures 1: the product. Its sums are of f32, and are kept as they are. */
static omc_value *cast_matmul(omc_match *m) {
  const omc_value *y = m->capture[1];
  const omc_node *node = y->producer;
  if (y->type.dtype != OMC_BF16 || m->capture[0]->type.dtype != OMC_F32 || omc_in(node, 2))
    return NULL;
  omc_value *wide = product_of(m->b, node, omc_in(node, 1), OMC_F32);
  return wide ? omc_reshape(m->b, wide, &m->capture[0]->type.shape) : NULL;
}

/* Captures 1: what an elementwise op computes, viewed before it is cast. Cast before it is viewed,
 * it is fused with that. */
static omc_value *cast_view(omc_match *m) {
  omc_value *x = m->capture[1];
  if (!x->producer || !omc_op_get(x->producer->op)->imm) return NULL;
  return omc_reshape(m->b, omc_cast(m->b, x, m->capture[0]->type.dtype),
                     &m->capture[0]->type.shape);
}

#define PRODUCT OMC_P_EITHER(OMC_P_NODE(MatMul, 1), OMC_P_NODE(FusedMatMul, 1))

static const omc_rule rules[] = {
    {"detach", OMC_EXACT, OMC_P_OP(Detach, 0, OMC_P_ANY(1)), omc_match_identity},
    {"with_gradient_of", OMC_EXACT, OMC_P_OP(WithGradientOf, 0, OMC_P_ANY(1), OMC_P_ANY(2)),
     omc_match_identity},
    {"embedding_grad_base", OMC_SUMS, OMC_P_OP(Add, 0, OMC_P_NODE(EmbeddingGrad, 1), OMC_P_ANY(2)),
     embedding_grad_base},
    {"matmul_cast", OMC_EXACT, OMC_P_NODE(MatMul, 0), matmul_cast},
    {"fused_matmul_cast", OMC_EXACT, OMC_P_NODE(FusedMatMul, 0), matmul_cast},
    {"cast_view", OMC_EXACT, OMC_P_OP(Cast, 0, OMC_P_OP(Reshape, 0, OMC_P_ANY(1), OMC_P_ANY(2))),
     cast_view},
    {"cast_matmul", OMC_UNROUNDED,
     OMC_P_EITHER(OMC_P_OP(Cast, 0, PRODUCT),
                  OMC_P_OP(Cast, 0, OMC_P_OP(Reshape, 0, PRODUCT, OMC_P_ANY(2)))),
     cast_matmul},
};

const omc_rules omc_fuse_rules = {rules, sizeof rules / sizeof *rules};
