/* Patterns of joint graphs that have a better kernel. */
#include <string.h>

#include "graph/edit.h"
#include "ops/op.h"
#include "passes/rewrite.h"

/* A product like `node`, of another right operand, with a result of another dtype. */
static omc_value *product_of(omc_builder *b, const omc_node *node, omc_value *right, omc_dtype to) {
  omc_value *in[] = {omc_in(node, 0), right, omc_in(node, 2)};
  omc_attr *attr = OMC_NEW_ARRAY(&b->graph->arena, omc_attr, node->n_attr + 1);
  if (!attr) {
    b->status = omc_fail(OMC_ENOMEM, "no memory for the attributes of a product");
    return NULL;
  }
  uint32_t n_attr = omc_attrs_without(node, "to", attr);
  if (to != in[0]->type.dtype) attr[n_attr++] = omc_attr_int("to", omc_dtype_get(to)->onnx);
  return omc_nary(b, OMC_OP_FusedMatMul, in[2] ? 3 : 2, in, n_attr, attr);
}

/* Whether a float32 is rounded to 16 bits. */
static bool is_narrowed(omc_dtype from, omc_dtype to) {
  return from == OMC_F32 && omc_dtype_size(to) == 2 && omc_dtype_acc(to) == OMC_F32;
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

/* Whether all that read `v`, or it as another shape, widen what they read of 16 bits. */
static bool is_read_narrow(const omc_value *v) {
  for (const omc_use *u = v->uses; u; u = u->next) {
    const omc_op_id op = u->node->op;
    const bool is_norm_grad = op == OMC_OP_LayerNormGrad || op == OMC_OP_RmsNormGrad;
    const bool widens = op != OMC_N_OPS && omc_op_get(op)->imm;
    const bool views = op == OMC_OP_Reshape && is_read_narrow(u->node->out[0]);
    if (!widens && !views && !(is_norm_grad && u->index == 0)) return false;
  }
  return true;
}

/* Captures 1: the product. Its sums are of f32, and are kept as they are, unless half as much
 * memory serves those who read them. */
static omc_value *cast_matmul(omc_match *m) {
  const omc_value *y = m->capture[1];
  const omc_node *node = y->producer;
  if (y->type.dtype != OMC_BF16 || m->capture[0]->type.dtype != OMC_F32 || omc_in(node, 2) ||
      is_read_narrow(m->capture[0]))
    return NULL;
  omc_value *wide = product_of(m->b, node, omc_in(node, 1), OMC_F32);
  return wide ? omc_reshape(m->b, wide, &m->capture[0]->type.shape) : NULL;
}

/* Whether `v` is y of a norm, of one use. */
static bool is_norm_read_once(const omc_value *v) {
  const omc_node *node = v->producer;
  return node && (node->op == OMC_OP_LayerNormalization || node->op == OMC_OP_RmsNorm) &&
         v->index == 0 && omc_has_one_use(v);
}

static bool is_sum_read_once(const omc_value *v) {
  return v->producer && v->producer->op == OMC_OP_ReduceSum && omc_has_one_use(v);
}

/* Captures 1: what an elementwise op, a norm or a sum computes, viewed before it is cast. Cast
 * before it is viewed, it is fused with that. */
static omc_value *cast_view(omc_match *m) {
  omc_value *x = m->capture[1];
  if (!is_norm_read_once(x) && !is_sum_read_once(x) &&
      !(x->producer && omc_op_get(x->producer->op)->imm))
    return NULL;
  return omc_reshape(m->b, omc_cast(m->b, x, m->capture[0]->type.dtype),
                     &m->capture[0]->type.shape);
}

/* The result `y` of a node that stores it as another dtype now. */
static omc_value *stored_as(omc_match *m, omc_value *y, omc_dtype dtype) {
  const omc_attr to = omc_attr_int("to", omc_dtype_get(dtype)->onnx);
  m->b->status = omc_set_attr(m->b->graph, y->producer, to);
  if (m->b->status == OMC_OK) m->b->status = omc_op_get(y->producer->op)->infer(y->producer);
  return y;
}

/* Captures 1: y of a norm of float32, which is rounded as it is stored. */
static omc_value *cast_norm(omc_match *m) {
  omc_value *y = m->capture[1];
  const omc_dtype to = m->capture[0]->type.dtype;
  return is_norm_read_once(y) && is_narrowed(y->type.dtype, to) ? stored_as(m, y, to) : NULL;
}

/* Captures 1: a sum of 16 bits, which is widened as it is stored. */
static omc_value *cast_sum(omc_match *m) {
  omc_value *y = m->capture[1];
  const omc_dtype to = m->capture[0]->type.dtype;
  return is_sum_read_once(y) && is_narrowed(to, y->type.dtype) ? stored_as(m, y, to) : NULL;
}

/* The gradient of y is widened as it is read. */
static omc_value *norm_grad_cast(omc_match *m) {
  omc_value *dy = omc_in(m->root, 0);
  const omc_node *cast = dy->producer;
  if (cast && cast->op == OMC_OP_Reshape) cast = omc_in(cast, 0)->producer;
  if (!cast || cast->op != OMC_OP_Cast) return NULL;
  if (!is_narrowed(dy->type.dtype, omc_in(cast, 0)->type.dtype)) return NULL;
  omc_value *narrow = omc_reshape(m->b, omc_in(cast, 0), &dy->type.shape);
  if (!narrow) return NULL;
  omc_set_input(m->root, 0, narrow);
  return m->capture[0];
}

static const omc_rule rules[] = {
    {"detach", OMC_EXACT, OMC_P_OP(Detach, 0, OMC_P_ANY(1)), omc_match_identity},
    {"with_gradient_of", OMC_EXACT, OMC_P_OP(WithGradientOf, 0, OMC_P_ANY(1), OMC_P_ANY(2)),
     omc_match_identity},
    {"placed_gradients", OMC_SUMS, OMC_P_OP(Add, 0, OMC_P_ANY(1), OMC_P_ANY(2)),
     omc_place_gradients},
    {"matmul_cast", OMC_EXACT, OMC_P_NODE(MatMul, 0), matmul_cast},
    {"fused_matmul_cast", OMC_EXACT, OMC_P_NODE(FusedMatMul, 0), matmul_cast},
    {"cast_view", OMC_EXACT, OMC_P_OP(Cast, 0, OMC_P_OP(Reshape, 0, OMC_P_ANY(1), OMC_P_ANY(2))),
     cast_view},
    {"cast_norm", OMC_EXACT, OMC_P_OP(Cast, 0, OMC_P_ANY(1)), cast_norm},
    {"cast_sum", OMC_EXACT, OMC_P_OP(Cast, 0, OMC_P_NODE(ReduceSum, 1)), cast_sum},
    {"layer_norm_grad_cast", OMC_EXACT, OMC_P_NODE(LayerNormGrad, 0), norm_grad_cast},
    {"rms_norm_grad_cast", OMC_EXACT, OMC_P_NODE(RmsNormGrad, 0), norm_grad_cast},
    {"cast_matmul", OMC_UNROUNDED,
     OMC_P_EITHER(OMC_P_OP(Cast, 0, OMC_P_PRODUCT(1)),
                  OMC_P_OP(Cast, 0, OMC_P_OP(Reshape, 0, OMC_P_PRODUCT(1), OMC_P_ANY(2)))),
     cast_matmul},
};

const omc_rules omc_fuse_rules = {rules, sizeof rules / sizeof *rules};
