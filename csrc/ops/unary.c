/* Elementwise ops of one input, and the gradients that are worth an op of their own. */
#include "ops/elementwise.h"

UNARY(Abs, ANY, a, vabs(a), g, mul(g, dy(g), omc_unary(&g->b, OMC_OP_Sign, in(g, 0))))

#ifdef OMC_RECORDS
/* 1 / sqrt(1 - x^2) */
static omc_value *arc_slope(omc_grad *g) {
  return omc_unary(&g->b, OMC_OP_Rsqrt, one_minus(g, mul(g, in(g, 0), in(g, 0))));
}
/* 1 / sqrt(x^2 + by) */
static omc_value *area_slope(omc_grad *g, double by) {
  return omc_unary(&g->b, OMC_OP_Rsqrt, plus(g, mul(g, in(g, 0), in(g, 0)), by));
}
#endif
UNARY(Acos, FLOAT, a, vacos(a), g, mul(g, dy(g), neg(g, arc_slope(g))))

UNARY(Acosh, FLOAT, a, vacosh(a), g, mul(g, dy(g), area_slope(g, -1)))

UNARY(Asin, FLOAT, a, vasin(a), g, mul(g, dy(g), arc_slope(g)))

UNARY(Asinh, FLOAT, a, vasinh(a), g, mul(g, dy(g), area_slope(g, 1)))

UNARY(Atan, FLOAT, a, vatan(a), g, over(g, dy(g), plus(g, mul(g, in(g, 0), in(g, 0)), 1)))

UNARY(Atanh, FLOAT, a, vatanh(a), g, over(g, dy(g), one_minus(g, mul(g, in(g, 0), in(g, 0)))))

UNARY(Ceil, FLOAT, a, -vfloor(-a), g, zeros(g))

#ifdef OMC_VARIANT
/* Of zeros of both signs it is x's that stays. */
OMC_INLINE vacc_t clip(vacc_t x, vacc_t low, vacc_t high, vacc_t has_low, vacc_t has_high) {
  x = vblend(has_low != vset(0), vmax(low, x), x);
  return vblend(has_high != vset(0), vmin(high, x), x);
}
#endif
#ifdef OMC_RECORDS
static omc_value *clip_gradient(omc_grad *g) {
  omc_value *dx = dy(g);
  for (uint32_t i = 1; i < 3; i++) {
    const omc_op_id inside = i == 1 ? OMC_OP_GreaterOrEqual : OMC_OP_LessOrEqual;
    if (in(g, i)) dx = where(g, omc_binary(&g->b, inside, in(g, 0), in(g, i)), dx, zero(g));
  }
  return dx;
}
/* Where the bounds are crossed, all that comes out is the upper one. */
static omc_value *clip_low_gradient(omc_grad *g) {
  omc_value *const below = omc_binary(&g->b, OMC_OP_Less, in(g, 0), in(g, 1));
  omc_value *const dlow = where(g, below, dy(g), zero(g));
  if (!in(g, 2)) return dlow;
  return where(g, omc_binary(&g->b, OMC_OP_Less, in(g, 1), in(g, 2)), dlow, zero(g));
}
static omc_value *clip_high_gradient(omc_grad *g) {
  omc_value *const above = omc_binary(&g->b, OMC_OP_Greater, in(g, 0), in(g, 2));
  omc_value *const dhigh = where(g, above, dy(g), zero(g));
  if (!in(g, 1)) return dhigh;
  return where(g, omc_binary(&g->b, OMC_OP_Less, in(g, 2), in(g, 1)), dy(g), dhigh);
}
#endif
TERNARY_OPTIONAL_WITH(Clip, ANY, i, a, b, c, clip(a, b, c, i[0], i[1]), g, clip_gradient(g),
                      clip_low_gradient(g), clip_high_gradient(g), node, omc_in(node, 1) != NULL,
                      omc_in(node, 2) != NULL)

UNARY(Cos, FLOAT, a, vcos(a), g, neg(g, mul(g, dy(g), omc_unary(&g->b, OMC_OP_Sin, in(g, 0)))))

UNARY(Cosh, FLOAT, a, vcosh(a), g, mul(g, dy(g), omc_unary(&g->b, OMC_OP_Sinh, in(g, 0))))

#ifdef OMC_RECORDS
static omc_value *elu_gradient(omc_grad *g, double alpha, double scale, double inner) {
  omc_value *const rise = omc_unary(&g->b, OMC_OP_Exp, times(g, in(g, 0), inner));
  return where(g, compare(g, OMC_OP_Greater, in(g, 0), 0), times(g, dy(g), scale),
               mul(g, times(g, times(g, dy(g), inner), alpha * scale), rise));
}
#endif
/* scale * x, and scale * alpha * (exp(input_scale * x) - 1) below 0. Its slope at NaN is NaN, as in
 * PyTorch's vectors, though not in the few elements that do not fill one. */
UNARY_WITH(Elu, FLOAT, i, a, vblend(a < vset(0), vexpm1(a *i[2]) * (i[0] * i[1]), a *i[1]), g,
           AT_ONCE(g, elu_gradient(g, i[0], i[1], i[2])), node, omc_node_float(node, "alpha"),
           omc_node_float(node, "scale"), omc_node_float(node, "input_scale"))

/* PyTorch's vectors of 16-bit numbers have an erf of their own, Abramowitz and Stegun's 7.1.26,
 * which is within 1.5e-7: in float16 that can be seen, and there is nothing left of denormals. */
#if defined(OMC_VARIANT) && OMC_IS_FLOAT
OMC_INLINE vacc_t erf_of_halves_from(vacc_t x, vacc_t fall) { /* fall: exp(-x^2) */
  const vacc_t t = vratio(vset(1), vfma(vset((acc_t)0.3275911), vabs(x), vset(1)));
  vacc_t p = vfma(vset((acc_t)1.061405429), t, vset((acc_t)-1.453152027));
  p = vfma(vfma(p, t, vset((acc_t)1.421413741)), t, vset((acc_t)-0.284496736));
  p = vfma(p, t, vset((acc_t)0.254829592));
  const vacc_t y = vfma(-fall * t, p, vset(1));
  return (vacc_t)((vmask)y ^ omc_sign_bit(x));
}
OMC_INLINE vacc_t erf_of_halves(vacc_t x) { return erf_of_halves_from(x, vexp(-(x * x))); }
#endif
#ifdef OMC_RECORDS
static bool is_half(const omc_value *v) { return omc_dtype_size(v->type.dtype) == 2; }
#endif
/* The slope is 2 / sqrt(pi) exp(-x^2). */
UNARY_WITH(Erf, FLOAT, i, a, i[0][0] != 0 ? erf_of_halves(a) : verf(a), g,
           mul(g, dy(g),
               times(g, omc_unary(&g->b, OMC_OP_Exp, neg(g, mul(g, in(g, 0), in(g, 0)))),
                     1.1283791670955126)),
           node, is_half(omc_in(node, 0)))

UNARY(Exp, FLOAT, a, vexp(a), g, mul(g, dy(g), out(g)))

UNARY(Exp2, FLOAT, a, vexp2(a), g, times(g, mul(g, dy(g), out(g)), 0.6931471805599453))

UNARY(Expm1, FLOAT, a, vexpm1(a), g, mul(g, dy(g), plus(g, out(g), 1)))

UNARY(Floor, FLOAT, a, vfloor(a), g, zeros(g))

/* Of the normal distribution, or of what it is taken for. The tanh form is 0 and flat where tanh
 * rounds to -1, as PyTorch's is. */
typedef enum { NORMAL, TANH, NORMAL_OF_HALVES } gelu_form;
#if defined(OMC_VARIANT) && OMC_IS_FLOAT
#define BETA vset((acc_t)0.7978845608028654)
#define KAPPA ((acc_t)0.044715)
/* Added to 1, its relative error near 0 is of no interest. */
OMC_INLINE vacc_t gelu_tanh(vacc_t x) {
  const vacc_t u = BETA * vfma(vset(KAPPA), x * x * x, x), s = vexp(vset(-2) * vabs(u));
  return vsign(vset(1) - vratio(s + s, vset(1) + s), u);
}
/* As vnormal. */
OMC_INLINE vacc_t normal_of_halves(vacc_t x, vacc_t *density) {
  const vacc_t scaled = x * vset((acc_t)0.7071067811865476), fall = vexp(-(scaled * scaled));
  *density = vset((acc_t)0.3989422804014327) * fall;
  return vset((acc_t)0.5) * (vset(1) + erf_of_halves_from(scaled, fall));
}
OMC_INLINE vacc_t normal(vacc_t x, gelu_form form, vacc_t *density) {
  return form == NORMAL ? vnormal(x, density) : normal_of_halves(x, density);
}
OMC_INLINE vacc_t gelu(vacc_t x, gelu_form form) {
  vacc_t density;
  if (form == TANH) return vset((acc_t)0.5) * x * (vset(1) + gelu_tanh(x));
  return x * normal(x, form, &density);
}
OMC_INLINE vacc_t gelu_slope(vacc_t x, gelu_form form) {
  if (form == TANH) {
    const vacc_t t = gelu_tanh(x), half = vset((acc_t)0.5);
    const vacc_t inner = BETA * vfma(vset(3 * KAPPA), x * x, vset(1));
    return half * (vset(1) + t) + half * x * (vset(1) - t * t) * inner;
  }
  vacc_t density;
  const vacc_t below = normal(x, form, &density);
  return vfma(x, density, below);
}
#endif
#ifdef OMC_RECORDS
static gelu_form read_form(const omc_node *node) {
  if (strcmp(omc_node_string(node, "approximate"), "tanh") == 0) return TANH;
  return is_half(omc_in(node, 0)) ? NORMAL_OF_HALVES : NORMAL;
}
static omc_value *gelu_gradient(omc_grad *g) {
  omc_value *const operands[] = {dy(g), in(g, 0)};
  return omc_nary(&g->b, OMC_OP_GeluGrad, 2, operands, g->node->n_attr, g->node->attr);
}
#endif
UNARY_WITH(Gelu, FLOAT, i, a, gelu(a, (gelu_form)i[0][0]), g, gelu_gradient(g), node,
           read_form(node))
BINARY_NO_GRAD_WITH(GeluGrad, FLOAT, 0, i, a, b, gelu_slope(b, (gelu_form)i[0][0]) * a, node,
                    read_form(node))

/* The slope at NaN is that of Elu. */
UNARY(HardSwish, FLOAT, a, vmax(vset(0), vmin(vset(6), a + vset(3))) * a / vset(6), g,
      AT_ONCE(g,
              where(g, compare(g, OMC_OP_LessOrEqual, in(g, 0), -3), zero(g),
                    where(g, compare(g, OMC_OP_GreaterOrEqual, in(g, 0), 3), dy(g),
                          mul(g, dy(g),
                              plus(g, over(g, in(g, 0), omc_scalar(&g->b, in(g, 0), 3)), 0.5))))))

UNARY_NO_GRAD(IsNaN, FLOAT_TO_BOOL, a, vbool(vnan(a)))

UNARY_WITH(LeakyRelu, FLOAT, i, a, vblend(a > vset(0), a, vmul(a, i[0])), g,
           where(g, compare(g, OMC_OP_Greater, in(g, 0), 0), dy(g), times(g, dy(g), i[0])), node,
           omc_node_float(node, "alpha"))

UNARY(Log, FLOAT, a, vlog(a), g, over(g, dy(g), in(g, 0)))

UNARY(Log10, FLOAT, a, vlog10(a), g, over(g, dy(g), times(g, in(g, 0), 2.302585092994046)))

UNARY(Log2, FLOAT, a, vlog2(a), g, over(g, dy(g), times(g, in(g, 0), 0.6931471805599453)))

UNARY(Log1p, FLOAT, a, vlog1p(a), g, over(g, dy(g), plus(g, in(g, 0), 1)))

#ifdef OMC_RECORDS
/* z / (1 + z) with z = exp(-|x|), which is what is left of the slope above 0. PyTorch keeps z. */
static omc_value *log_sigmoid_slope(omc_grad *g) {
  omc_value *const z = omc_unary(&g->b, OMC_OP_Exp, neg(g, omc_unary(&g->b, OMC_OP_Abs, in(g, 0))));
  omc_value *const kept = z ? widened(g, omc_cast(&g->b, z, g->node->out[0]->type.dtype)) : NULL;
  omc_value *const above = over(g, kept, plus(g, kept, 1));
  return where(g, compare(g, OMC_OP_Less, in(g, 0), 0), one_minus(g, above), above);
}
#endif
UNARY(LogSigmoid, FLOAT, a, vmin(a, vset(0)) - vlog1p(vexp(-vabs(a))), g,
      AT_ONCE(g, mul(g, dy(g), log_sigmoid_slope(g))))

#ifdef OMC_RECORDS
/* With t = tanh(softplus(x)): t + x sigmoid(x) (1 - t^2). */
static omc_value *mish_slope(omc_grad *g) {
  omc_value *const softplus =
      omc_unary(&g->b, OMC_OP_Log1p, omc_unary(&g->b, OMC_OP_Exp, in(g, 0)));
  omc_value *const t = omc_unary(&g->b, OMC_OP_Tanh, softplus);
  omc_value *const rise = mul(g, in(g, 0), omc_unary(&g->b, OMC_OP_Sigmoid, in(g, 0)));
  return omc_binary(&g->b, OMC_OP_Add, t, mul(g, rise, one_minus(g, mul(g, t, t))));
}
#endif
UNARY(Mish, FLOAT, a, a *vtanh(vlog1p(vexp(a))), g, AT_ONCE(g, mul(g, dy(g), mish_slope(g))))

UNARY(Neg, ANY, a, vneg(a), g, neg(g, dy(g)))

UNARY_NO_GRAD(Not, BOOL, a, vbool(a == vset(0)))

UNARY(Reciprocal, FLOAT, a, vset(1) / a, g, neg(g, mul(g, dy(g), mul(g, out(g), out(g)))))

UNARY(Relu, ANY, a, vblend(a < vset(0), vset(0), a), g,
      omc_binary(&g->b, OMC_OP_ReluGrad, dy(g), out(g)))
BINARY_NO_GRAD(ReluGrad, FLOAT, 0, a, b, vblend(b <= vset(0), vset(0), a))

UNARY(Round, FLOAT, a, vround(a), g, zeros(g))

UNARY(Rsqrt, FLOAT, a, vset(1) / vsqrt(a), g,
      mul(g, times(g, dy(g), -0.5),
          omc_binary(&g->b, OMC_OP_Pow, out(g), omc_scalar(&g->b, out(g), 3))))

#ifdef OMC_RECORDS
static omc_value *sigmoid_gradient(omc_grad *g) {
  return mul(g, mul(g, dy(g), one_minus(g, out(g))), out(g));
}
#endif
/* Of float16, alone of all dtypes, PyTorch's kernel rounds every step. */
UNARY(Sigmoid, FLOAT, a, vsigmoid(a), g,
      out(g)->type.dtype == OMC_F16 ? sigmoid_gradient(g) : AT_ONCE(g, sigmoid_gradient(g)))

UNARY(Sign, ANY, a, vbool(a > vset(0)) - vbool(a < vset(0)), g, zeros(g))

#if defined(OMC_VARIANT) && OMC_IS_FLOAT
OMC_INLINE vacc_t silu_gradient(vacc_t dy, vacc_t x) {
  const vacc_t s = vsigmoid(x);
  return dy * s * (vset(1) + x * (vset(1) - s));
}
#endif
UNARY(Silu, FLOAT, a, a / (vset(1) + vexp(-a)), g,
      omc_binary(&g->b, OMC_OP_SiluGrad, dy(g), in(g, 0)))
BINARY_NO_GRAD(SiluGrad, FLOAT, 0, a, b, silu_gradient(a, b))

UNARY(Sin, FLOAT, a, vsin(a), g, mul(g, dy(g), omc_unary(&g->b, OMC_OP_Cos, in(g, 0))))

UNARY(Sinh, FLOAT, a, vsinh(a), g, mul(g, dy(g), omc_unary(&g->b, OMC_OP_Cosh, in(g, 0))))

#ifdef OMC_RECORDS
static omc_value *softplus_gradient(omc_grad *g, double beta, double threshold) {
  omc_value *const scaled = times(g, in(g, 0), beta), *const z =
                                                          omc_unary(&g->b, OMC_OP_Exp, scaled);
  return where(g, compare(g, OMC_OP_Greater, scaled, threshold), dy(g),
               over(g, mul(g, dy(g), z), plus(g, z, 1)));
}
#endif
/* log(1 + exp(beta x)) / beta, and x where beta x is above the threshold. */
UNARY_WITH(Softplus, FLOAT, i, a, vblend(a *i[0] > i[1], a, vlog1p(vexp(a *i[0])) / i[0]), g,
           AT_ONCE(g, softplus_gradient(g, i[0], i[1])), node, omc_node_float(node, "beta"),
           omc_node_float(node, "threshold"))

UNARY(Sqrt, FLOAT, a, vsqrt(a), g, over(g, dy(g), times(g, out(g), 2)))

UNARY(Tan, FLOAT, a, vtan(a), g, mul(g, dy(g), plus(g, mul(g, out(g), out(g)), 1)))

UNARY(Tanh, FLOAT, a, vtanh(a), g, AT_ONCE(g, mul(g, dy(g), one_minus(g, mul(g, out(g), out(g))))))
