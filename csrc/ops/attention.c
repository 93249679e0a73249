/* Attention(q[B,H,T,D], k[B,Hkv,S,D], v[B,Hkv,S,Dv], mask?) -> y[B,H,T,Dv], lse[B,H,T], and its
 * gradient, of which the last input is y, where a kernel has a use for it. Attribute head_axes says
 * of q, k, v and y in turn where their heads are: at axis 1, or at axis 2 behind the tokens, as a
 * projection writes them. With attribute kv_heads, which is Hkv, k and v are left out, and q has
 * the heads of all three in turn, behind the tokens: [B,T,H+2Hkv,D]. Gradients are laid out as what
 * they are of. */
#include <math.h>

#include "ops/forms.h"
#include "ops/infer.h"
#include "ops/op.h"

omc_status omc_head_axes_of(const omc_node *node, int64_t axes[OMC_N_HEADS]) {
  return omc_node_list(node, "head_axes", OMC_N_HEADS, axes);
}

/* Axes 1 and 2 of a shape in the order heads, tokens, whichever order they are in. */
static omc_shape by_heads(const omc_shape *shape, int64_t head_axis) {
  omc_shape s = *shape;
  s.dims[1] = shape->dims[head_axis];
  s.dims[2] = shape->dims[3 - head_axis];
  return s;
}

static omc_head_strides strides_of(const omc_shape *shape, int64_t head_axis) {
  const int64_t inner = shape->dims[2] * shape->dims[3], last = shape->dims[3];
  return (omc_head_strides){.sample = shape->dims[1] * inner,
                            .head = head_axis == 1 ? inner : last,
                            .token = head_axis == 1 ? last : inner};
}

/* Without the attribute one over the root of the elements of a head. */
static double scale_of(const omc_node *node, const omc_value *q) {
  if (omc_node_attr(node, "scale")) return omc_node_float(node, "scale");
  return 1 / sqrt((double)q->type.shape.dims[3]);
}

/* The shapes of three tensors, by heads, of which `all` has the elements. */
static omc_status unpack(const omc_node *node, const omc_value *all, omc_shape *q, omc_shape *kv) {
  const int64_t kv_heads = omc_node_int(node, "kv_heads");
  char type[OMC_TYPE_TEXT];
  *q = *kv = by_heads(&all->type.shape, 2);
  kv->dims[1] = kv_heads;
  q->dims[1] -= 2 * kv_heads;
  if (q->dims[1] < 1)
    OMC_NODE_FAIL(node, ESHAPE, "input %s has no heads beside %lld of keys and of values",
                  omc_type_text(&all->type, type, sizeof type), (long long)kv_heads);
  return OMC_OK;
}

static omc_status misfit(const omc_node *node, const char *what, const omc_value *v) {
  char type[OMC_TYPE_TEXT], q[OMC_TYPE_TEXT];
  const uint32_t first = node->op == OMC_OP_AttentionGrad ? 1 : 0;
  OMC_NODE_FAIL(node, ESHAPE, "%s %s does not fit queries %s", what,
                omc_type_text(&v->type, type, sizeof type),
                omc_type_text(&omc_in(node, first)->type, q, sizeof q));
}

/* Checks that q and, unless it is all three, k and v are there, and their ranks and dtypes. */
static omc_status check_operands(const omc_node *node, uint32_t first, bool packed) {
  OMC_TRY(omc_need_float(node, first));
  for (uint32_t i = first; i < first + 3; i++) {
    if (i > first && packed == (omc_in(node, i) != NULL))
      OMC_NODE_FAIL(node, EINVALID, "input %u is %s, as kv_heads is %lld", i,
                    packed ? "one too many" : "missing", (long long)omc_node_int(node, "kv_heads"));
    if (!omc_in(node, i)) continue;
    OMC_TRY(omc_need_rank(node, i, 4));
    OMC_TRY(omc_need_dtype(node, i, omc_in(node, first)->type.dtype));
  }
  return OMC_OK;
}

/* Reads how a mask, which may be left out, lies along the scores. */
static omc_status read_mask(const omc_node *node, const omc_value *m, omc_attention_form *p) {
  const omc_shape full = {4, {p->batch, p->heads, p->queries, p->keys}};
  char text[OMC_NODE_TEXT];
  omc_shape both;
  if (!m) return OMC_OK;
  if (m->type.dtype != OMC_BOOL && m->type.dtype != p->dtype) return misfit(node, "mask", m);
  OMC_TRY(
      omc_shape_broadcast(&m->type.shape, &full, omc_node_text(node, text, sizeof text), &both));
  if (!omc_shape_equal(&both, &full)) return misfit(node, "mask", m);
  p->mask_is_bool = m->type.dtype == OMC_BOOL;
  omc_broadcast_strides(&m->type.shape, &full, p->mask_strides);
  return OMC_OK;
}

/* Reads attributes and shapes. q, k, v are the inputs from `first` on, the mask input `mask`. */
static omc_status check(const omc_node *node, uint32_t first, uint32_t mask,
                        omc_attention_form *p) {
  const bool packed = omc_node_int(node, "kv_heads") > 0;
  OMC_TRY(check_operands(node, first, packed));
  const omc_value *q = omc_in(node, first), *k = packed ? q : omc_in(node, first + 1),
                  *v = packed ? q : omc_in(node, first + 2);
  int64_t axes[OMC_N_HEADS];
  OMC_TRY(omc_head_axes_of(node, axes));
  for (int i = OMC_HEADS_OF_Q; i <= OMC_HEADS_OF_V && packed; i++) axes[i] = 2;
  omc_shape q_shape = by_heads(&q->type.shape, axes[OMC_HEADS_OF_Q]),
            k_shape = by_heads(&k->type.shape, axes[OMC_HEADS_OF_K]),
            v_shape = by_heads(&v->type.shape, axes[OMC_HEADS_OF_V]);
  if (packed) {
    OMC_TRY(unpack(node, q, &q_shape, &k_shape));
    v_shape = k_shape;
  }
  const int64_t *qd = q_shape.dims, *kd = k_shape.dims, *vd = v_shape.dims;
  if (kd[0] != qd[0] || kd[3] != qd[3] || kd[1] < 1 || qd[1] % kd[1] != 0)
    return misfit(node, "keys", k);
  if (vd[0] != kd[0] || vd[1] != kd[1] || vd[2] != kd[2]) return misfit(node, "values", v);
  *p = (omc_attention_form){.batch = qd[0],
                            .heads = qd[1],
                            .kv_heads = kd[1],
                            .queries = qd[2],
                            .keys = kd[2],
                            .dim = qd[3],
                            .value_dim = vd[3],
                            .q = strides_of(&q->type.shape, axes[OMC_HEADS_OF_Q]),
                            .k = strides_of(&k->type.shape, axes[OMC_HEADS_OF_K]),
                            .v = strides_of(&v->type.shape, axes[OMC_HEADS_OF_V]),
                            .packed = packed,
                            .k_start = packed ? qd[1] * qd[3] : 0,
                            .v_start = packed ? (qd[1] + kd[1]) * qd[3] : 0,
                            .dtype = q->type.dtype,
                            .scale = scale_of(node, q),
                            .p = omc_node_float(node, "p"),
                            .subsequence = (uint32_t)omc_node_int(node, "subsequence"),
                            .causal = omc_node_int(node, "is_causal") != 0};
  p->y_shape = by_heads(&(omc_shape){4, {p->batch, p->heads, p->queries, p->value_dim}},
                        axes[OMC_HEADS_OF_Y]);
  p->y = strides_of(&p->y_shape, axes[OMC_HEADS_OF_Y]);
  return read_mask(node, omc_in(node, mask), p);
}

omc_status omc_attention_form_of(const omc_node *node, omc_attention_form *out) {
  const bool gradient = node->op == OMC_OP_AttentionGrad;
  return check(node, gradient ? 1 : 0, gradient ? 5 : 3, out);
}

static omc_status infer_forward(omc_node *node) {
  omc_attention_form p;
  OMC_TRY(omc_attention_form_of(node, &p));
  const omc_shape lse = {3, {p.batch, p.heads, p.queries}};
  omc_set_type(node, 0, p.dtype, &p.y_shape);
  omc_set_type(node, 1, omc_dtype_acc(p.dtype), &lse);
  return OMC_OK;
}

static omc_status infer_backward(omc_node *node) {
  omc_attention_form p;
  OMC_TRY(omc_attention_form_of(node, &p));
  const omc_shape lse = {3, {p.batch, p.heads, p.queries}};
  OMC_TRY(omc_need_type(node, 0, "dy", p.dtype, &p.y_shape));
  OMC_TRY(omc_need_type(node, 4, "lse", omc_dtype_acc(p.dtype), &lse));
  OMC_TRY(omc_need_type(node, 6, "y", p.dtype, &p.y_shape));
  for (uint32_t i = 0; i < 3; i++)
    if (omc_in(node, i + 1)) omc_set_type(node, i, p.dtype, &omc_in(node, i + 1)->type.shape);
  return OMC_OK;
}

/* x with its heads at axis 1. */
static omc_value *heads_first(omc_builder *b, omc_value *x, int64_t head_axis) {
  const int64_t swapped[] = {0, 2, 1, 3};
  return x && head_axis == 2 ? omc_transpose(b, x, swapped) : x;
}

/* k or v with its heads repeated for the query heads of their group. */
static omc_value *each_query_head(omc_builder *b, omc_value *x, int64_t heads) {
  if (!x || x->type.shape.dims[1] == heads) return x;
  const int64_t *d = x->type.shape.dims;
  const omc_shape one = {5, {d[0], d[1], 1, d[2], d[3]}};
  const omc_shape each = {5, {d[0], d[1], heads / d[1], d[2], d[3]}};
  const omc_shape all = {4, {d[0], heads, d[2], d[3]}};
  return omc_reshape(b, omc_expand(b, omc_reshape(b, x, &one), &each), &all);
}

/* The gradient of an added mask is that of the scores, P * (dP - delta). Few models train one, so
 * it is made of plain ops and does hold T x S elements. */
static omc_status mask_gradient(omc_grad *g) {
  const omc_node *node = g->node;
  omc_builder *b = &g->b;
  int64_t axes[OMC_N_HEADS];
  OMC_TRY(omc_head_axes_of(node, axes));
  omc_value *lse = omc_out(node, 1);
  const omc_dtype wide = lse->type.dtype;
  omc_value *q = heads_first(b, omc_cast(b, omc_in(node, 0), wide), axes[OMC_HEADS_OF_Q]);
  omc_value *k = heads_first(b, omc_cast(b, omc_in(node, 1), wide), axes[OMC_HEADS_OF_K]);
  omc_value *v = heads_first(b, omc_cast(b, omc_in(node, 2), wide), axes[OMC_HEADS_OF_V]);
  omc_value *dy = heads_first(b, omc_cast(b, g->grad_out[0], wide), axes[OMC_HEADS_OF_Y]);
  omc_value *mask = omc_cast(b, omc_in(node, 3), wide);
  OMC_TRY(b->status);
  const int64_t heads = q->type.shape.dims[1], last[] = {-1};
  const double scale = scale_of(node, q);
  omc_shape column = lse->type.shape;
  column.dims[column.rank++] = 1;

  omc_value *scores = omc_product(b, q, false, each_query_head(b, k, heads), true, scale, NULL);
  scores = omc_binary(b, OMC_OP_Add, scores, mask);
  scores = omc_binary(b, OMC_OP_Sub, scores, omc_reshape(b, lse, &column));
  omc_value *probs = omc_unary(b, OMC_OP_Exp, scores);
  const omc_attr lower = omc_attr_int("upper", 0);
  if (omc_node_int(node, "is_causal")) probs = omc_nary(b, OMC_OP_Trilu, 1, &probs, 1, &lower);

  omc_value *dprobs = omc_product(b, dy, false, each_query_head(b, v, heads), true, 1, NULL);
  const double p = omc_node_float(node, "p");
  const omc_attr dropout[] = {omc_attr_float("p", p),
                              omc_attr_int("subsequence", omc_node_int(node, "subsequence"))};
  if (p > 0) dprobs = omc_nary(b, OMC_OP_Dropout, 1, &dprobs, 2, dropout);
  omc_value *delta = omc_reduce_sum(b, omc_binary(b, OMC_OP_Mul, probs, dprobs), last, 1, true);
  g->grad_in[3] = omc_binary(b, OMC_OP_Mul, probs, omc_binary(b, OMC_OP_Sub, dprobs, delta));
  return b->status;
}

static omc_status grad_attention(omc_grad *g) {
  const omc_node *node = g->node;
  OMC_TRY(omc_need_saved(g, 2));
  if (!g->grad_out[0]) return OMC_OK;
  omc_value *in[] = {g->grad_out[0],  omc_in(node, 0),  omc_in(node, 1),
                     omc_in(node, 2), omc_out(node, 1), omc_in(node, 3)};
  omc_build(&g->b, OMC_OP_AttentionGrad, in[5] ? 6 : 5, in, in[2] ? 0 : 1u << 2 | 1u << 3,
            node->n_attr, node->attr, in[2] ? 3 : 1, g->grad_in);
  if (!in[5] || !g->needs[3]) return g->b.status;
  if (!in[2]) OMC_NODE_FAIL(node, EUNSUPPORTED, "a mask has no gradient where kv_heads is not 0");
  return mask_gradient(g);
}

/* Pairs of a query and a key that it sees. */
static double pairs(const omc_attention_form *p) {
  const double t = (double)p->queries, s = (double)p->keys, least = t < s ? t : s;
  const double of_head = p->causal ? least * (least + 1) / 2 + (t - least) * s : t * s;
  return (double)(p->batch * p->heads) * of_head;
}

/* The products: for each pair, of the query with the key and of the weight with the value. Backward
 * does the first again and takes those of four gradients. */
static omc_status forward_cost(const omc_node *node, omc_cost *cost) {
  omc_attention_form p;
  OMC_TRY(omc_attention_form_of(node, &p));
  cost->flops = pairs(&p) * (double)(2 * p.dim + 2 * p.value_dim);
  return OMC_OK;
}
static omc_status backward_cost(const omc_node *node, omc_cost *cost) {
  omc_attention_form p;
  OMC_TRY(omc_attention_form_of(node, &p));
  cost->flops = pairs(&p) * (double)(6 * p.dim + 4 * p.value_dim);
  return OMC_OK;
}

OMC_RECORD(Attention, 3, 4, 2, .flags = OMC_OP_RANDOM, .spared = 1u << 1,
           .optional = 1u << 1 | 1u << 2, .infer = infer_forward, .grad = grad_attention,
           .cost = forward_cost)
OMC_RECORD(AttentionGrad, 5, 7, 3, .flags = OMC_OP_RANDOM, .optional = 1u << 2 | 1u << 3,
           .infer = infer_backward, .cost = backward_cost)
