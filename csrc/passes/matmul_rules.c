/* Matrix products take in the transposes, factors and biases around them. */
#include <string.h>

#include "ops/forms.h"
#include "passes/rewrite.h"

/* What MatMul and FusedMatMul have in common: alpha x y, each maybe transposed, plus bias. */
typedef struct product {
  omc_value *x, *y, *bias;
  bool trans_x, trans_y;
  double alpha;
  omc_dtype to; /* of the result */
} product;

static product read_product(const omc_node *node) {
  product p = {.x = omc_in(node, 0),
               .y = omc_in(node, 1),
               .bias = omc_in(node, 2),
               .alpha = 1,
               .to = node->out[0]->type.dtype};
  if (node->op == OMC_OP_MatMul) return p;
  p.trans_x = omc_node_int(node, "transA") != 0;
  p.trans_y = omc_node_int(node, "transB") != 0;
  p.alpha = omc_node_float(node, "alpha");
  return p;
}

static omc_value *build_product(omc_builder *b, const product *p) {
  omc_value *const in[] = {p->x, p->y, p->bias};
  const omc_attr attr[] = {omc_attr_int("transA", p->trans_x), omc_attr_int("transB", p->trans_y),
                           omc_attr_float("alpha", p->alpha),
                           omc_attr_int("to", omc_dtype_get(p->to)->onnx)};
  const bool is_own = p->to == p->x->type.dtype;
  return omc_nary(b, OMC_OP_FusedMatMul, p->bias ? 3 : 2, in, is_own ? 3 : 4, attr);
}

static bool are_matrices(const product *p) {
  return p->x->type.shape.rank >= 2 && p->y->type.shape.rank >= 2;
}

/* Whether a Transpose swaps the last two axes and leaves the others in place. */
static bool swaps_last(const omc_node *node) {
  const int32_t rank = node->out[0]->type.shape.rank;
  int32_t perm[OMC_MAX_RANK];
  if (omc_perm_of(node, perm) != OMC_OK) return false;
  for (int32_t i = 0; i < rank; i++)
    if (perm[i] != (i < rank - 2 ? i : 2 * rank - 3 - i)) return false;
  return rank >= 2;
}

/* Reads through a transposition of an operand. */
static bool read_through(omc_value **operand, bool *trans) {
  const omc_node *node = (*operand)->producer;
  if (!node || node->op != OMC_OP_Transpose || !swaps_last(node)) return false;
  *operand = omc_in(node, 0);
  *trans = !*trans;
  return true;
}

static omc_value *matmul_transpose(omc_match *m) {
  product p = read_product(m->root);
  if (!are_matrices(&p)) return NULL;
  const bool x = read_through(&p.x, &p.trans_x), y = read_through(&p.y, &p.trans_y);
  return x || y ? build_product(m->b, &p) : NULL;
}

/* (X Y)' = Y' X' */
static omc_value *transpose_matmul(omc_match *m) {
  const product p = read_product(m->capture[1]->producer);
  if (!are_matrices(&p) || p.x->type.shape.rank != p.y->type.shape.rank || p.bias) return NULL;
  if (!swaps_last(m->root)) return NULL;
  const product swapped = {p.y, p.x, NULL, !p.trans_y, !p.trans_x, p.alpha, p.to};
  return build_product(m->b, &swapped);
}

/* Of 16 bits the product is rounded before anything else is done to it. */
static bool is_rounded(const omc_value *y) { return omc_dtype_acc(y->type.dtype) != y->type.dtype; }

/* Captures 1: the product; 2: what is added to it, maybe after a Reshape that keeps the columns. */
static omc_value *matmul_bias(omc_match *m) {
  if (is_rounded(m->capture[1])) return NULL;
  product p = read_product(m->capture[1]->producer);
  const omc_shape *shape = &m->capture[0]->type.shape, *inner = &m->capture[1]->type.shape;
  const omc_shape *bias = &m->capture[2]->type.shape;
  if (!are_matrices(&p) || p.bias || bias->rank < 1 || shape->rank < 1) return NULL;
  const int64_t columns = inner->dims[inner->rank - 1];
  if (bias->dims[bias->rank - 1] != columns || omc_shape_numel(bias) != columns) return NULL;
  if (shape->dims[shape->rank - 1] != columns || omc_shape_numel(shape) != omc_shape_numel(inner))
    return NULL;
  p.bias = omc_reshape(m->b, m->capture[2], &(omc_shape){1, {columns}});
  omc_value *y = build_product(m->b, &p);
  return y ? omc_reshape(m->b, y, shape) : NULL;
}

static omc_value *matmul_alpha(omc_match *m) {
  if (is_rounded(m->capture[1])) return NULL;
  product p = read_product(m->capture[1]->producer);
  const omc_value *factor = m->capture[2];
  if (!are_matrices(&p) || p.bias || omc_shape_numel(&factor->type.shape) != 1 ||
      !omc_type_equal(&m->capture[1]->type, &m->capture[0]->type))
    return NULL;
  const double alpha = omc_const_float(factor, 0);
  if (p.alpha != 1 || !isfinite(alpha)) return NULL; /* two factors are not their product */
  p.alpha = alpha;
  return build_product(m->b, &p);
}

/* Logits of fewer elements, or than their weight has, are not worth a gradient of the weight that
 * is kept for backward. */
enum { LEAST_LOGITS = 1 << 20 };

/* Captures 1: the product. The logits may be cast to what losses are computed in, and nothing else
 * looks at them, nor, before there are gradients, at what the loss keeps for its own. */
static omc_value *linear_cross_entropy(omc_match *m) {
  const omc_node *loss = m->root;
  const omc_value *logits = m->capture[1];
  const product p = read_product(logits->producer);
  const omc_dtype dtype = p.x->type.dtype, wide = omc_dtype_acc(dtype);
  const omc_dtype taken = omc_in(loss, 0)->type.dtype;
  for (uint32_t i = 1; i < loss->n_out; i++)
    if (omc_out(loss, i) && omc_out(loss, i)->uses) return NULL;
  if (!are_matrices(&p) || p.y->type.shape.rank != 2 || !p.trans_y || p.trans_x || p.alpha != 1 ||
      p.to != dtype || (taken != dtype && taken != wide) ||
      omc_shape_numel(&logits->type.shape) < LEAST_LOGITS || m->capture[0]->type.shape.rank != 0 ||
      strcmp(omc_node_string(loss, "reduction"), "none") == 0)
    return NULL;
  const int64_t k = p.y->type.shape.dims[1], classes = p.y->type.shape.dims[0];
  const omc_shape *shape = &omc_in(loss, 0)->type.shape;
  const int64_t n = omc_shape_numel(&logits->type.shape) / classes;
  if (shape->rank != 2 || shape->dims[1] != classes || shape->dims[0] != n || n < k) return NULL;
  omc_value *weight = omc_in(loss, 2);
  omc_value *in[] = {omc_reshape(m->b, p.x, &(omc_shape){2, {n, k}}), p.y, omc_in(loss, 1), p.bias,
                     weight};
  const uint32_t left_out = (p.bias ? 0u : 1u << 3) | (weight ? 0u : 1u << 4);
  omc_value *out[4];
  omc_build(m->b, OMC_OP_LinearCrossEntropy, 5, in, left_out, loss->n_attr, loss->attr, 4, out);
  return m->b->status == OMC_OK ? omc_cast(m->b, out[0], taken) : NULL;
}

/* The matrices of groups, too, are read as they lie. */
static omc_value *grouped_transpose(omc_match *m) {
  omc_value *in[] = {omc_in(m->root, 0), omc_in(m->root, 1), omc_in(m->root, 2)};
  bool trans_b = omc_node_int(m->root, "transB") != 0;
  if (!read_through(&in[1], &trans_b)) return NULL;
  const omc_attr attr = omc_attr_int("transB", trans_b);
  return omc_nary(m->b, OMC_OP_GroupedMatMul, 3, in, 1, &attr);
}

#define PRODUCT OMC_P_PRODUCT(1)
#define PRODUCT_OR_VIEW OMC_P_EITHER(PRODUCT, OMC_P_OP(Reshape, 0, PRODUCT, OMC_P_ANY(3)))
#define LOGITS                                                      \
  OMC_P_EITHER(PRODUCT_OR_VIEW, OMC_P_OP(Cast, 0, PRODUCT_OR_VIEW), \
               OMC_P_OP(Reshape, 0, OMC_P_OP(Cast, 0, PRODUCT), OMC_P_ANY(3)))

static const omc_rule rules[] = {
    {"matmul_transpose", OMC_SUMS, OMC_P_NODE(MatMul, 0), matmul_transpose},
    {"fused_matmul_transpose", OMC_SUMS, OMC_P_NODE(FusedMatMul, 0), matmul_transpose},
    {"transpose_matmul", OMC_SUMS, OMC_P_OP(Transpose, 0, PRODUCT), transpose_matmul},
    {"matmul_bias", OMC_SUMS, OMC_P_OP(Add, 0, PRODUCT_OR_VIEW, OMC_P_ANY(2)), matmul_bias},
    {"linear_cross_entropy", OMC_FINITE_SUMS,
     OMC_P_EITHER(OMC_P_OP(CrossEntropy, 0, LOGITS, OMC_P_ANY(2)),
                  OMC_P_OP(CrossEntropy, 0, LOGITS, OMC_P_ANY(2), OMC_P_ANY(4))),
     linear_cross_entropy},
    {"matmul_alpha", OMC_SUMS, OMC_P_OP(Mul, 0, PRODUCT, OMC_P_CONSTANT(2)), matmul_alpha},
    {"grouped_transpose", OMC_SUMS, OMC_P_NODE(GroupedMatMul, 0), grouped_transpose},
};

const omc_rules omc_matmul_rules = {rules, sizeof rules / sizeof *rules};
