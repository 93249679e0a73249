/* Layers written out as arithmetic, recognised. */
#include <string.h>

#include "ops/forms.h"
#include "passes/rewrite.h"

#define X OMC_P_ANY(1)
#define CONST(value) OMC_P_CONST(value)
#define ADD(a, b) OMC_P_OP(Add, 0, a, b)
#define MUL(a, b) OMC_P_OP(Mul, 0, a, b)

static bool keeps_type(const omc_match *m) {
  return omc_type_equal(&m->capture[1]->type, &m->capture[0]->type);
}

/* Whether the layer that the match writes out computes what PyTorch's own would: of the shape of
 * its input, and not rounded to half precision (nor out of its range) between the steps. */
static bool is_layer(const omc_match *m) {
  const omc_dtype dtype = m->capture[1]->type.dtype;
  return keeps_type(m) && omc_dtype_acc(dtype) == dtype;
}

/* ---- activations ---- */

#define SCALED(a, number) OMC_P_OF_HALVES(Mul, 0, a, CONST(number))

/* 0.5 x tail, however the factors are grouped. */
#define HALF_TIMES(tail) \
  OMC_P_EITHER(MUL(SCALED(X, 0.5), tail), MUL(X, SCALED(tail, 0.5)), SCALED(MUL(X, tail), 0.5))
#define SQRT_2_PI 0.7978845608028654
#define X_CUBED OMC_P_EITHER(OMC_P_OP(Pow, 0, X, CONST(3)), MUL(MUL(X, X), X))
#define TANH_ARGUMENT                                                \
  OMC_P_EITHER(SCALED(ADD(X, SCALED(X_CUBED, 0.044715)), SQRT_2_PI), \
               MUL(SCALED(X, SQRT_2_PI), ADD(CONST(1), MUL(SCALED(X, 0.044715), X))))
#define ERF_ARGUMENT \
  OMC_P_EITHER(OMC_P_OF_HALVES(Div, 0, X, CONST(1.4142135623730951)), SCALED(X, 0.7071067811865476))

/* Of 16 bits, where PyTorch rounds between the steps, it rounds once. */
static omc_value *gelu(omc_match *m, const char *approximate) {
  if (!keeps_type(m)) return NULL;
  const omc_attr attr = omc_attr_string("approximate", approximate);
  return omc_nary(m->b, OMC_OP_Gelu, 1, &m->capture[1], 1, &attr);
}

static omc_value *gelu_tanh(omc_match *m) { return gelu(m, "tanh"); }
static omc_value *gelu_erf(omc_match *m) { return gelu(m, "none"); }

/* Captures 6: what x is cast from, of 16 bits, as where autocast has powers computed in float32. */
static omc_value *gelu_tanh_of_halves(omc_match *m) {
  const omc_node *cast = m->capture[1]->producer;
  if (!cast || cast->op != OMC_OP_Cast || omc_in(cast, 0) != m->capture[6]) return NULL;
  return gelu(m, "tanh");
}

/* ---- softmax and norms ---- */

/* The axes a reduction runs over, as a bit set; 0 if it drops them. */
static uint32_t reduced_axes(const omc_value *result) {
  const omc_node *node = result->producer;
  bool reduced[OMC_MAX_RANK];
  uint32_t set = 0;
  if (omc_node_int(node, "keepdims") == 0 || omc_reduced_axes(node, reduced) != OMC_OK) return 0;
  for (int32_t i = 0; i < result->type.shape.rank; i++) set |= (uint32_t)reduced[i] << i;
  return set;
}

/* The only axis of a set, or -1. */
static int64_t only_axis(uint32_t set) {
  for (int32_t i = 0; i < OMC_MAX_RANK; i++)
    if (set == 1u << i) return i;
  return -1;
}

/* Captures 3: the maximum; 4: the sum. */
static omc_value *softmax(omc_match *m, omc_op_id op) {
  const uint32_t set = reduced_axes(m->capture[3]);
  const int64_t axis = only_axis(set);
  if (!is_layer(m) || axis < 0 || reduced_axes(m->capture[4]) != set) return NULL;
  const omc_attr attr = omc_attr_int("axis", axis);
  return omc_nary(m->b, op, 1, &m->capture[1], 1, &attr);
}

static omc_value *softmax_written(omc_match *m) { return softmax(m, OMC_OP_Softmax); }
static omc_value *log_softmax_written(omc_match *m) { return softmax(m, OMC_OP_LogSoftmax); }

#define LESS_MAX(cap) OMC_P_OP(Sub, cap, X, OMC_P_OP(ReduceMax, 3, X, OMC_P_CONSTANT(0)))
#define SUM(of) OMC_P_OP(ReduceSum, 4, of, OMC_P_CONSTANT(0))

/* A LayerNormalization or an RmsNorm, which has no beta. */
static omc_value *norm(omc_builder *b, omc_op_id op, omc_value *const *in, int64_t axis,
                       double epsilon) {
  omc_value *out[3];
  const uint32_t n = op == OMC_OP_RmsNorm ? 2 : 3; /* inputs, and outputs */
  const omc_attr attr[] = {omc_attr_int("axis", axis), omc_attr_float("epsilon", epsilon)};
  omc_build(b, op, n, in, (in[1] ? 0u : 2u) | (in[2] ? 0u : 4u), 2, attr, n, out);
  return b->status == OMC_OK ? out[0] : NULL;
}

/* Captures 4: the variance or mean square over `set`; 5: epsilon. */
static omc_value *norm_written(omc_match *m, omc_op_id op, uint32_t set) {
  const int32_t rank = m->capture[1]->type.shape.rank;
  int32_t axis = rank;
  while (axis > 0 && (set >> (axis - 1) & 1)) axis--;
  const bool trailing = set != 0 && set == (1u << rank) - (1u << axis);
  if (!is_layer(m) || !trailing || reduced_axes(m->capture[4]) != set) return NULL;
  if (omc_shape_numel(&m->capture[5]->type.shape) != 1) return NULL;
  omc_value *const in[3] = {m->capture[1]};
  const double epsilon = omc_const_float(m->capture[5], 0);
  if (op == OMC_OP_RmsNorm && !(epsilon > 0)) return NULL; /* rows whose squares vanish: infinite */
  return norm(m->b, op, in, axis, epsilon);
}

/* Capture 3: the mean. */
static omc_value *layer_norm_written(omc_match *m) {
  return norm_written(m, OMC_OP_LayerNormalization, reduced_axes(m->capture[3]));
}
static omc_value *rms_norm_written(omc_match *m) {
  return norm_written(m, OMC_OP_RmsNorm, reduced_axes(m->capture[4]));
}

/* Takes a factor (input 1 of the norm) or a summand (input 2) of the normalized shape in. */
static omc_value *norm_affine(omc_match *m, uint32_t place) {
  const omc_node *node = m->capture[1]->producer;
  const omc_shape *shape = &m->capture[1]->type.shape;
  omc_value *in[3] = {omc_in(node, 0), omc_in(node, 1), omc_in(node, 2)};
  const omc_value *given = m->capture[2];
  omc_shape normalized, stats;
  omc_layer_form form;
  if (omc_layer_form_of(node, 0, &normalized, &stats, &form) != OMC_OK) return NULL;
  if (!is_layer(m) || in[place] || in[2] || given->type.dtype != in[0]->type.dtype) return NULL;
  const int32_t extra = given->type.shape.rank - normalized.rank;
  if (extra < 0 || given->type.shape.rank > shape->rank) return NULL;
  for (int32_t i = 0; i < given->type.shape.rank; i++)
    if (given->type.shape.dims[i] != (i < extra ? 1 : normalized.dims[i - extra])) return NULL;
  in[place] = omc_reshape(m->b, m->capture[2], &normalized);
  return norm(m->b, (omc_op_id)node->op, in, shape->rank - normalized.rank, form.epsilon);
}

static omc_value *norm_scale(omc_match *m) { return norm_affine(m, 1); }
static omc_value *norm_shift(omc_match *m) { return norm_affine(m, 2); }

/* ---- losses ---- */

/* Captures 1: the logits; 2: their logarithms of probabilities, which may be cast for the loss. */
static omc_value *cross_entropy(omc_match *m, omc_dtype dtype) {
  const omc_node *loss = m->root, *log_softmax = m->capture[2]->producer;
  const int32_t rank = m->capture[1]->type.shape.rank;
  if (omc_out(loss, 1) && omc_out(loss, 1)->uses) return NULL;
  int64_t axis = omc_node_int(log_softmax, "axis");
  if (axis < 0) axis += rank;
  if (rank < 2 || axis != 1) return NULL;
  omc_value *const weight = omc_in(loss, 2);
  omc_value *in[] = {omc_cast(m->b, m->capture[1], dtype), omc_in(loss, 1), weight}, *out[4];
  omc_build(m->b, OMC_OP_CrossEntropy, weight ? 3 : 2, in, 0, loss->n_attr, loss->attr, 4, out);
  return m->b->status == OMC_OK ? out[0] : NULL;
}

static omc_value *nll_of_log_softmax(omc_match *m) {
  const omc_dtype dtype = m->capture[1]->type.dtype;
  return omc_dtype_acc(dtype) == dtype ? cross_entropy(m, dtype) : NULL;
}
/* Of 16 bits logarithms are not rounded to them. */
static omc_value *nll_of_cast_log_softmax(omc_match *m) {
  const omc_dtype dtype = m->capture[1]->type.dtype, taken = omc_in(m->root, 0)->type.dtype;
  return omc_dtype_acc(dtype) == taken ? cross_entropy(m, taken) : NULL;
}

/* ---- convolutions ---- */

/* Captures 1: what is padded by zeros before; the convolution pads it by as many more. */
static omc_value *conv_pad(omc_match *m) {
  const omc_node *pad = m->capture[1]->producer, *conv = m->root;
  const int32_t rank = m->capture[1]->type.shape.rank, space = rank - 2;
  int64_t own[2 * OMC_MAX_RANK], more[2 * OMC_MAX_RANK];
  if (omc_is_channels_last(conv)) return NULL;
  if (omc_in(pad, 2) && !omc_const_all(omc_in(pad, 2), 0)) return NULL;
  if (omc_pads_of(pad, more) != OMC_OK ||
      omc_node_list(conv, "pads", (uint32_t)(2 * space), own) != OMC_OK)
    return NULL;
  for (int32_t i = 0; i < 2 * rank; i++) {
    const int32_t axis = i % rank - 2, at = axis + (i < rank ? 0 : space);
    if (more[i] < 0 || (axis < 0 && more[i] > 0)) return NULL;
    if (axis >= 0 && (own[at] += more[i]) > INT32_MAX) return NULL;
  }
  omc_attr attr[8];
  if (conv->n_attr >= sizeof attr / sizeof *attr) return NULL;
  uint32_t n = omc_attrs_without(conv, "pads", attr);
  attr[n++] = omc_attr_ints("pads", own, (uint32_t)(2 * space));
  omc_value *const in[] = {omc_in(pad, 0), omc_in(conv, 1), omc_in(conv, 2)};
  return omc_nary(m->b, OMC_OP_Conv, in[2] ? 3 : 2, in, n, attr);
}

#define PADDED OMC_P_NODE(Pad, 1)

/* ---- pooling ---- */

/* The largest of a window, then what of it is above 0: of fewer elements, unless BatchNorm stores
 * them so (rule batch_norm_relu). Of zeros of both signs it may be another. A window that is all
 * padding, of which there are none of an axis that has elements, without dilation, is -inf, not 0;
 * and where places are asked for, those of numbers below 0 are not the first zero's. */
static omc_value *relu_after_pool(omc_match *m) {
  const omc_node *pool = m->root;
  omc_pool_form form;
  omc_value *x = omc_in(m->capture[1]->producer, 0), *out[3];
  if (omc_out(pool, 1) && omc_out(pool, 1)->uses) return NULL;
  if (x->producer && x->producer->op == OMC_OP_BatchNorm && omc_has_one_use(x)) return NULL;
  if (omc_pool_form_of(pool, &omc_in(pool, 0)->type.shape, &form) != OMC_OK) return NULL;
  for (int32_t i = 0; i < OMC_POOL_AXES; i++)
    if (form.dilation[i] != 1 || form.in[i] == 0) return NULL;
  omc_build(m->b, OMC_OP_MaxPool, 1, &x, 0, pool->n_attr, pool->attr, pool->n_out, out);
  return m->b->status == OMC_OK ? omc_unary(m->b, OMC_OP_Relu, out[0]) : NULL;
}

/* ---- patterns ---- */

#define CENTERED OMC_P_OP(Sub, 2, X, OMC_P_OP(ReduceMean, 3, X, OMC_P_CONSTANT(0)))
#define MEAN_SQUARE(of)                                                                  \
  ADD(OMC_P_OP(ReduceMean, 4, OMC_P_EITHER(OMC_P_OP(Pow, 0, of, CONST(2)), MUL(of, of)), \
               OMC_P_CONSTANT(0)),                                                       \
      OMC_P_CONSTANT(5))
#define ROOT_OF(square) OMC_P_OP(Sqrt, 0, square)
#define ONE_OVER_ROOT_OF(square) \
  OMC_P_EITHER(OMC_P_OP(Rsqrt, 0, square), OMC_P_OP(Reciprocal, 0, ROOT_OF(square)))
#define VARIANCE MEAN_SQUARE(OMC_P_ANY(2))
#define LOG_SOFTMAX OMC_P_OP(LogSoftmax, 2, X)
#define NLL(of)                                                          \
  OMC_P_EITHER(OMC_P_OP(NegativeLogLikelihoodLoss, 0, of, OMC_P_ANY(3)), \
               OMC_P_OP(NegativeLogLikelihoodLoss, 0, of, OMC_P_ANY(3), OMC_P_ANY(4)))

static const omc_rule rules[] = {
    {"gelu_tanh", OMC_LAYER, HALF_TIMES(ADD(CONST(1), OMC_P_OP(Tanh, 0, TANH_ARGUMENT))),
     gelu_tanh},
    {"gelu_tanh_of_halves", OMC_LAYER,
     MUL(OMC_P_OP(Cast, 0, SCALED(OMC_P_ANY(6), 0.5)),
         ADD(CONST(1), OMC_P_OP(Tanh, 0, TANH_ARGUMENT))),
     gelu_tanh_of_halves},
    {"gelu_erf", OMC_LAYER, HALF_TIMES(ADD(CONST(1), OMC_P_OP(Erf, 0, ERF_ARGUMENT))), gelu_erf},
    {"softmax_written", OMC_LAYER,
     OMC_P_OP(Div, 0, OMC_P_OP(Exp, 2, LESS_MAX(0)), SUM(OMC_P_ANY(2))), softmax_written},
    {"log_softmax_written", OMC_LAYER,
     OMC_P_OP(Sub, 0, LESS_MAX(2), OMC_P_OP(Log, 0, SUM(OMC_P_OP(Exp, 0, OMC_P_ANY(2))))),
     log_softmax_written},
    {"layer_norm_sqrt", OMC_LAYER, OMC_P_OP(Div, 0, CENTERED, ROOT_OF(VARIANCE)),
     layer_norm_written},
    {"layer_norm_rsqrt", OMC_LAYER, MUL(CENTERED, ONE_OVER_ROOT_OF(VARIANCE)), layer_norm_written},
    {"layer_norm_scale", OMC_LAYER, MUL(OMC_P_NODE(LayerNormalization, 1), OMC_P_ANY(2)),
     norm_scale},
    {"layer_norm_shift", OMC_LAYER, ADD(OMC_P_NODE(LayerNormalization, 1), OMC_P_ANY(2)),
     norm_shift},
    {"rms_norm_written", OMC_LAYER, MUL(X, ONE_OVER_ROOT_OF(MEAN_SQUARE(X))), rms_norm_written},
    {"rms_norm_scale", OMC_LAYER, MUL(OMC_P_NODE(RmsNorm, 1), OMC_P_ANY(2)), norm_scale},
    {"nll_of_log_softmax", OMC_LAYER, NLL(LOG_SOFTMAX), nll_of_log_softmax},
    {"nll_of_cast_log_softmax", OMC_UNROUNDED, NLL(OMC_P_OP(Cast, 0, LOG_SOFTMAX)),
     nll_of_cast_log_softmax},
    {"conv_pad", OMC_SUMS,
     OMC_P_EITHER(OMC_P_OP(Conv, 0, PADDED, OMC_P_ANY(2)),
                  OMC_P_OP(Conv, 0, PADDED, OMC_P_ANY(2), OMC_P_ANY(3))),
     conv_pad},
    {"relu_after_pool", OMC_SUMS, OMC_P_OP(MaxPool, 0, OMC_P_NODE(Relu, 1)), relu_after_pool},
};

const omc_rules omc_network_rules = {rules, sizeof rules / sizeof *rules};
