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

/* ---- BatchNorm and what comes after it ---- */

enum { GAMMA = 1, ADDED = 5, SHIFT = 5, N_BATCH = 6 };

/* The value that `v` shows, perhaps in another shape. */
static omc_value *shown(omc_value *v) {
  while (v->producer && v->producer->op == OMC_OP_Reshape) v = omc_in(v->producer, 0);
  return v;
}

/* What makes `v`, or what `v` shows, if that is output 0 of such an op and nobody else reads it. */
static omc_node *made_by(omc_value *v, omc_op_id op) {
  while (omc_has_one_use(v) && v->producer && v->producer->op == OMC_OP_Reshape)
    v = omc_in(v->producer, 0);
  return omc_has_one_use(v) && v->index == 0 && v->producer && v->producer->op == op ? v->producer
                                                                                     : NULL;
}

/* A BatchNorm in place of another, where the builder is. Whoever reads what that gives but y reads
 * this. */
static const omc_node *in_place_of(omc_builder *b, const omc_node *node, omc_value *added,
                                   uint32_t n_out) {
  omc_value *in[N_BATCH] = {NULL}, *out[N_BATCH];
  uint32_t left_out = 0;
  for (uint32_t i = 0; i < N_BATCH; i++) {
    in[i] = i == ADDED && added ? added : omc_in(node, i);
    if (!in[i]) left_out |= 1u << i;
  }
  const uint32_t n_in = in[ADDED] ? N_BATCH : node->n_in;
  omc_build(b, OMC_OP_BatchNorm, n_in, in, left_out, node->n_attr, node->attr, n_out, out);
  if (b->status != OMC_OK) return NULL;
  for (uint32_t k = 1; k < node->n_out; k++)
    if (omc_out(node, k)) omc_replace_uses(omc_out(node, k), out[k]);
  return out[0]->producer;
}

/* Whether nobody reads a result of a node, but for y, before `end`. */
static bool is_read_after(const omc_node *node, const omc_node *end) {
  for (const omc_node *at = node->next; at != end; at = at->next)
    for (uint32_t i = 0; i < at->n_in; i++)
      if (omc_in(at, i) && omc_in(at, i)->producer == node && omc_in(at, i)->index > 0)
        return false;
  return true;
}

/* Whether a BatchNorm may add `added` to what is shown as y, where `sum` does. */
static bool may_add(const omc_node *node, const omc_value *y, const omc_value *added,
                    const omc_node *sum) {
  return node && node->phase == sum->phase && !omc_in(node, ADDED) && !omc_node_int(node, "relu") &&
         omc_type_equal(&y->type, &sum->out[0]->type) && omc_type_equal(&added->type, &y->type) &&
         is_read_after(node, sum);
}

/* Captures 1 and 2: what is added up, one of them y of BatchNorm. */
static omc_value *batch_norm_added(omc_match *m) {
  for (int k = 1; k <= 2; k++) {
    omc_value *const y = m->capture[k], *const added = m->capture[3 - k];
    const omc_node *node = made_by(y, OMC_OP_BatchNorm);
    if (!may_add(node, y, added, m->root)) continue;
    omc_value *const like = omc_reshape(m->b, added, &node->out[0]->type.shape);
    const omc_node *sum = like ? in_place_of(m->b, node, like, node->n_out) : NULL;
    return sum ? omc_reshape(m->b, sum->out[0], &y->type.shape) : NULL;
  }
  return NULL;
}

/* Captures 1: y of BatchNorm. */
static omc_value *batch_norm_relu(omc_match *m) {
  omc_node *node = made_by(m->capture[1], OMC_OP_BatchNorm);
  if (!node || node->phase != m->root->phase || omc_node_int(node, "relu")) return NULL;
  m->b->status = omc_set_attr(m->b->graph, node, omc_attr_int("relu", 1));
  return m->capture[1];
}

/* The same BatchNorm with a shift. */
static const omc_node *with_shift(omc_builder *b, const omc_node *node) {
  omc_builder here = {b->graph, node->next, node->phase, node->name, OMC_OK};
  const omc_node *same = in_place_of(&here, node, NULL, N_BATCH);
  if (same) omc_replace_uses(node->out[0], same->out[0]);
  b->status = here.status;
  return same;
}

/* The gradient of what comes before Relu: y, which was not above 0 where dy is not asked for, is
 * computed again as its elements pass by, from what forward kept. */
static omc_value *batch_norm_relu_grad(omc_match *m) {
  omc_node *const root = m->root;
  const omc_node *relu = made_by(omc_in(root, 0), OMC_OP_ReluGrad);
  if (!relu || omc_node_int(root, "relu")) return NULL;
  const omc_node *node = shown(omc_in(relu, 1))->producer;
  if (!node || shown(omc_in(relu, 1))->index != 0 || node->op != OMC_OP_BatchNorm ||
      !omc_node_int(node, "relu") || omc_in(node, ADDED) ||
      shown(omc_in(node, 0)) != shown(omc_in(root, 1)) ||
      !omc_type_equal(&omc_in(node, 0)->type, &omc_in(root, 1)->type) ||
      !omc_type_equal(&omc_in(relu, 0)->type, &relu->out[0]->type) ||
      omc_in(node, GAMMA) != omc_in(root, 2) || omc_out(node, 1) != omc_in(root, 3) ||
      omc_out(node, 2) != omc_in(root, 4))
    return NULL;
  if (!omc_out(node, SHIFT)) node = with_shift(m->b, node);
  if (!node) return NULL;
  omc_value *const dy = omc_reshape(m->b, omc_in(relu, 0), &omc_in(root, 0)->type.shape);
  omc_value *const in[] = {
      dy, omc_in(root, 1), omc_in(root, 2), omc_in(root, 3), omc_in(root, 4), omc_out(node, SHIFT)};
  omc_value *out[3] = {NULL};
  omc_attr *attr = OMC_NEW_ARRAY(&m->b->graph->arena, omc_attr, root->n_attr + 1);
  if (!attr) {
    m->b->status = omc_fail(OMC_ENOMEM, "no memory for the attributes of a gradient");
    return NULL;
  }
  const uint32_t n_attr = omc_attrs_without(root, "relu", attr);
  attr[n_attr] = omc_attr_int("relu", 1);
  omc_build(m->b, OMC_OP_BatchNormGrad, 6, in, in[2] ? 0 : 4u, n_attr + 1, attr, root->n_out, out);
  for (uint32_t k = 1; k < root->n_out && out[k]; k++)
    if (omc_out(root, k)) omc_replace_uses(omc_out(root, k), out[k]);
  return out[0];
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
    {"batch_norm_added", OMC_EXACT, OMC_P_OP(Add, 0, OMC_P_ANY(1), OMC_P_ANY(2)), batch_norm_added},
    {"batch_norm_relu", OMC_EXACT, OMC_P_OP(Relu, 0, OMC_P_ANY(1)), batch_norm_relu},
    {"batch_norm_relu_grad", OMC_EXACT, OMC_P_NODE(BatchNormGrad, 0), batch_norm_relu_grad},
    {"cast_matmul", OMC_UNROUNDED,
     OMC_P_EITHER(OMC_P_OP(Cast, 0, OMC_P_PRODUCT(1)),
                  OMC_P_OP(Cast, 0, OMC_P_OP(Reshape, 0, OMC_P_PRODUCT(1), OMC_P_ANY(2)))),
     cast_matmul},
};

const omc_rules omc_fuse_rules = {rules, sizeof rules / sizeof *rules};
