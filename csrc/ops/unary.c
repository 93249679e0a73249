/* Elementwise ops of one input, and the gradients that are worth an op of their own. */
#include <string.h>

#include "ops/elementwise.h"

UNARY(Abs, ANY, vabs(a), mul(g, DY, omc_unary(&g->b, OMC_OP_Sign, A)))

UNARY(Ceil, FLOAT, -vfloor(-a), zeros(g))

#ifdef OMC_VARIANT
OMC_INLINE vacc_t clip(vacc_t x, vacc_t low, vacc_t high, vacc_t has_low, vacc_t has_high) {
  x = vblend(has_low != vset(0), vmax(x, low), x);
  return vblend(has_high != vset(0), vmin(x, high), x);
}
#endif
#ifdef OMC_RECORDS
static omc_value *clip_gradient(omc_grad *g, const double *imm) {
  omc_value *da = DY;
  if (imm[2] != 0) da = where(g, compare(g, OMC_OP_GreaterOrEqual, A, imm[0]), da, zero(g));
  if (imm[3] != 0) da = where(g, compare(g, OMC_OP_LessOrEqual, A, imm[1]), da, zero(g));
  return da;
}
#endif
/* Bounds and whether there are any: an integer's bounds may not be infinite. */
UNARY(Clip, ANY, clip(a, i0, i1, i2, i3), clip_gradient(g, imm),
      imm[2] = omc_node_attr(node, "min") != NULL, imm[3] = omc_node_attr(node, "max") != NULL,
      imm[0] = imm[2] != 0 ? omc_node_float(node, "min") : 0,
      imm[1] = imm[3] != 0 ? omc_node_float(node, "max") : 0)

UNARY(Cos, FLOAT, vcos(a), neg(g, mul(g, DY, omc_unary(&g->b, OMC_OP_Sin, A))))

#ifdef OMC_RECORDS
static omc_value *elu_gradient(omc_grad *g, double alpha, double scale, double inner) {
  omc_value *const rise = omc_unary(&g->b, OMC_OP_Exp, times(g, A, inner));
  return where(g, compare(g, OMC_OP_Greater, A, 0), times(g, DY, scale),
               mul(g, times(g, times(g, DY, inner), alpha * scale), rise));
}
#endif
/* scale * x, and scale * alpha * (exp(input_scale * x) - 1) below 0. Its slope at NaN is NaN, as in
 * PyTorch's vectors, though not in the few elements that do not fill one. */
UNARY(Elu, FLOAT, vblend(a < vset(0), vexpm1(a *i2) * (i0 * i1), a *i1),
      AT_ONCE(elu_gradient(g, i0, i1, i2)), imm[0] = omc_node_float(node, "alpha"),
      imm[1] = omc_node_float(node, "scale"), imm[2] = omc_node_float(node, "input_scale"))

/* PyTorch's vectors of 16-bit numbers have an erf of their own, Abramowitz and Stegun's 7.1.26,
 * which is within 1.5e-7: in float16 that can be seen, and there is nothing left of denormals. */
#if defined(OMC_VARIANT) && OMC_IS_FLOAT
OMC_INLINE vacc_t erf_of_halves(vacc_t x) {
  const vacc_t t = vset(1) / vfma(vset((acc_t)0.3275911), vabs(x), vset(1));
  vacc_t p = vfma(vset((acc_t)1.061405429), t, vset((acc_t)-1.453152027));
  p = vfma(vfma(p, t, vset((acc_t)1.421413741)), t, vset((acc_t)-0.284496736));
  p = vfma(p, t, vset((acc_t)0.254829592));
  const vacc_t y = vfma(-vexp(-(x * x)) * t, p, vset(1));
  return (vacc_t)((vmask)y ^ omc_sign_bit(x));
}
#endif
#ifdef OMC_RECORDS
static bool is_half(const omc_value *v) { return omc_dtype_size(v->type.dtype) == 2; }
#endif
/* The slope is 2 / sqrt(pi) exp(-x^2). */
UNARY(Erf, FLOAT, blk->imm[0] != 0 ? erf_of_halves(a) : verf(a),
      mul(g, DY, times(g, omc_unary(&g->b, OMC_OP_Exp, neg(g, mul(g, A, A))), 1.1283791670955126)),
      imm[0] = is_half(omc_in(node, 0)))

UNARY(Exp, FLOAT, vexp(a), mul(g, DY, Y))

UNARY(Expm1, FLOAT, vexpm1(a), mul(g, DY, plus(g, Y, 1)))

UNARY(Floor, FLOAT, vfloor(a), zeros(g))

/* Of the normal distribution, or of what it is taken for. The tanh form is 0 and flat where tanh
 * rounds to -1, as PyTorch's is. */
typedef enum { NORMAL, TANH, NORMAL_OF_HALVES } gelu_form;
#if defined(OMC_VARIANT) && OMC_IS_FLOAT
#define BETA vset((acc_t)0.7978845608028654)
#define KAPPA ((acc_t)0.044715)
/* Added to 1, its relative error near 0 is of no interest. */
OMC_INLINE vacc_t gelu_tanh(vacc_t x) {
  const vacc_t u = BETA * vfma(vset(KAPPA), x * x * x, x), s = vexp(vset(-2) * vabs(u));
  return vsign(vset(1) - (s + s) / (vset(1) + s), u);
}
OMC_INLINE vacc_t below_of_halves(vacc_t x) {
  return vset((acc_t)0.5) * (vset(1) + erf_of_halves(x * vset((acc_t)0.7071067811865476)));
}
OMC_INLINE vacc_t gelu(vacc_t x, gelu_form form) {
  vacc_t density;
  if (form == TANH) return vset((acc_t)0.5) * x * (vset(1) + gelu_tanh(x));
  return x * (form == NORMAL ? vnormal(x, &density) : below_of_halves(x));
}
OMC_INLINE vacc_t gelu_slope(vacc_t x, gelu_form form) {
  if (form == TANH) {
    const vacc_t t = gelu_tanh(x), half = vset((acc_t)0.5);
    const vacc_t inner = BETA * vfma(vset(3 * KAPPA), x * x, vset(1));
    return half * (vset(1) + t) + half * x * (vset(1) - t * t) * inner;
  }
  vacc_t density;
  const vacc_t below = vnormal(x, &density);
  return vfma(x, density, form == NORMAL ? below : below_of_halves(x));
}
#endif
#ifdef OMC_RECORDS
static gelu_form read_form(const omc_node *node) {
  if (strcmp(omc_node_string(node, "approximate"), "tanh") == 0) return TANH;
  return is_half(omc_in(node, 0)) ? NORMAL_OF_HALVES : NORMAL;
}
static omc_value *gelu_gradient(omc_grad *g) {
  omc_value *const in[] = {DY, A};
  return omc_nary(&g->b, OMC_OP_GeluGrad, 2, in, g->node->n_attr, g->node->attr);
}
#endif
UNARY(Gelu, FLOAT, gelu(a, (gelu_form)blk->imm[0]), gelu_gradient(g), imm[0] = read_form(node))
BINARY_NO_GRAD(GeluGrad, FLOAT, 0, gelu_slope(b, (gelu_form)blk->imm[0]) * a,
               imm[0] = read_form(node))

/* The slope at NaN is that of Elu. */
UNARY(HardSwish, FLOAT, vmax(vset(0), vmin(vset(6), a + vset(3))) * a / vset(6),
      AT_ONCE(where(g, compare(g, OMC_OP_LessOrEqual, A, -3), zero(g),
                    where(g, compare(g, OMC_OP_GreaterOrEqual, A, 3), DY,
                          mul(g, DY, plus(g, over(g, A, omc_scalar(&g->b, A, 3)), 0.5))))))

UNARY_NO_GRAD(IsNaN, FLOAT_TO_BOOL, vbool(vnan(a)))

UNARY(LeakyRelu, FLOAT, vblend(a > vset(0), a, vmul(a, i0)),
      where(g, compare(g, OMC_OP_Greater, A, 0), DY, times(g, DY, i0)),
      imm[0] = omc_node_float(node, "alpha"))

UNARY(Log, FLOAT, vlog(a), over(g, DY, A))

UNARY(Log1p, FLOAT, vlog1p(a), over(g, DY, plus(g, A, 1)))

#ifdef OMC_RECORDS
/* z / (1 + z) with z = exp(-|x|), which is what is left of the slope above 0. PyTorch keeps z. */
static omc_value *log_sigmoid_slope(omc_grad *g) {
  omc_value *const z = omc_unary(&g->b, OMC_OP_Exp, neg(g, omc_unary(&g->b, OMC_OP_Abs, A)));
  omc_value *const kept = z ? widened(g, omc_cast(&g->b, z, g->node->out[0]->type.dtype)) : NULL;
  omc_value *const above = over(g, kept, plus(g, kept, 1));
  return where(g, compare(g, OMC_OP_Less, A, 0), one_minus(g, above), above);
}
#endif
UNARY(LogSigmoid, FLOAT, vmin(a, vset(0)) - vlog1p(vexp(-vabs(a))),
      AT_ONCE(mul(g, DY, log_sigmoid_slope(g))))

#ifdef OMC_RECORDS
/* With t = tanh(softplus(x)): t + x sigmoid(x) (1 - t^2). */
static omc_value *mish_slope(omc_grad *g) {
  omc_value *const softplus = omc_unary(&g->b, OMC_OP_Log1p, omc_unary(&g->b, OMC_OP_Exp, A));
  omc_value *const t = omc_unary(&g->b, OMC_OP_Tanh, softplus);
  omc_value *const rise = mul(g, A, omc_unary(&g->b, OMC_OP_Sigmoid, A));
  return omc_binary(&g->b, OMC_OP_Add, t, mul(g, rise, one_minus(g, mul(g, t, t))));
}
#endif
UNARY(Mish, FLOAT, a *vtanh(vlog1p(vexp(a))), AT_ONCE(mul(g, DY, mish_slope(g))))

UNARY(Neg, ANY, vneg(a), neg(g, DY))

UNARY_NO_GRAD(Not, BOOL, vbool(a == vset(0)))

UNARY(Reciprocal, FLOAT, vset(1) / a, neg(g, mul(g, DY, mul(g, Y, Y))))

UNARY(Relu, ANY, vblend(a < vset(0), vset(0), a), omc_binary(&g->b, OMC_OP_ReluGrad, DY, Y))
BINARY_NO_GRAD(ReluGrad, FLOAT, 0, vblend(b <= vset(0), vset(0), a))

UNARY(Round, FLOAT, vround(a), zeros(g))

UNARY(Rsqrt, FLOAT, vset(1) / vsqrt(a),
      mul(g, times(g, DY, -0.5), omc_binary(&g->b, OMC_OP_Pow, Y, omc_scalar(&g->b, Y, 3))))

#ifdef OMC_RECORDS
static omc_value *sigmoid_gradient(omc_grad *g) { return mul(g, mul(g, DY, one_minus(g, Y)), Y); }
#endif
/* Of float16, alone of all dtypes, PyTorch's kernel rounds every step. */
UNARY(Sigmoid, FLOAT, vsigmoid(a),
      Y->type.dtype == OMC_F16 ? sigmoid_gradient(g) : AT_ONCE(sigmoid_gradient(g)))

UNARY(Sign, ANY, vbool(a > vset(0)) - vbool(a < vset(0)), zeros(g))

#if defined(OMC_VARIANT) && OMC_IS_FLOAT
OMC_INLINE vacc_t silu_gradient(vacc_t dy, vacc_t x) {
  const vacc_t s = vsigmoid(x);
  return dy * s * (vset(1) + x * (vset(1) - s));
}
#endif
UNARY(Silu, FLOAT, a / (vset(1) + vexp(-a)), omc_binary(&g->b, OMC_OP_SiluGrad, DY, A))
BINARY_NO_GRAD(SiluGrad, FLOAT, 0, silu_gradient(a, b))

UNARY(Sin, FLOAT, vsin(a), mul(g, DY, omc_unary(&g->b, OMC_OP_Cos, A)))

#ifdef OMC_RECORDS
static omc_value *softplus_gradient(omc_grad *g, double beta, double threshold) {
  omc_value *const scaled = times(g, A, beta), *const z = omc_unary(&g->b, OMC_OP_Exp, scaled);
  return where(g, compare(g, OMC_OP_Greater, scaled, threshold), DY,
               over(g, mul(g, DY, z), plus(g, z, 1)));
}
#endif
/* log(1 + exp(beta x)) / beta, and x where beta x is above the threshold. */
UNARY(Softplus, FLOAT, vblend(a *i0 > i1, a, vlog1p(vexp(a *i0)) / i0),
      AT_ONCE(softplus_gradient(g, i0, i1)), imm[0] = omc_node_float(node, "beta"),
      imm[1] = omc_node_float(node, "threshold"))

UNARY(Sqrt, FLOAT, vsqrt(a), over(g, DY, times(g, Y, 2)))

UNARY(Tanh, FLOAT, vtanh(a), AT_ONCE(mul(g, DY, one_minus(g, mul(g, Y, Y)))))
