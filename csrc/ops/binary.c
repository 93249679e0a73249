/* Arithmetic of two inputs, with broadcasting. */
#include "ops/elementwise.h"

BINARY(Add, ANY, OMC_OP_COMMUTES, vadd(a, b), DY, DY)

BINARY(Sub, ANY, 0, vsub(a, b), DY, neg(g, DY))

BINARY(Mul, ANY, OMC_OP_COMMUTES, vmul(a, b), mul(g, DY, B), mul(g, DY, A))

BINARY(Div, ANY, OMC_OP_DIVIDES, vdiv(a, b), over(g, DY, B), mul(g, neg(g, DY), over(g, Y, B)))

#ifdef OMC_VARIANT
#if OMC_IS_FLOAT
/* The remainder has the sign of the divisor. It is NaN where the quotient overflows, as in
 * PyTorch's vectors, though not in the few elements that do not fill one. */
static inline acc_t modulo(acc_t a, acc_t b) {
  const acc_t overflows =
      sizeof(acc_t) == 4 ? (acc_t)0x1.000004p127 : (acc_t)0x1.0000000000002p1023;
  if (OMC_R(fabs)(a * (acc_t)0.5 / b) >= overflows) return (acc_t)NAN;
  const acc_t m = OMC_R(fmod)(a, b);
  return m != 0 && (b < 0) != (m < 0) ? m + b : m;
}
/* The quotient is taken of what is divisible, so that rounding cannot lift it over an integer. */
static inline acc_t floor_divide(acc_t a, acc_t b) {
  if (b == 0) return a / b;
  const acc_t m = OMC_R(fmod)(a, b);
  acc_t q = (a - m) / b;
  if (m != 0 && (b < 0) != (m < 0)) q -= 1;
  if (q == 0) return OMC_R(copysign)(0, a / b);
  const acc_t f = OMC_R(floor)(q);
  return q - f > (acc_t)0.5 ? f + 1 : f;
}
#else
static inline int64_t modulo(int64_t a, int64_t b) {
  if (b == 0 || b == -1) return 0;
  const int64_t m = a % b;
  return m != 0 && (b < 0) != (m < 0) ? m + b : m;
}
static inline int64_t floor_divide(int64_t a, int64_t b) {
  return omc_divide(a, b) - (modulo(a, b) != 0 && (a < 0) != (b < 0));
}
#endif
#endif
BINARY(Mod, ANY, OMC_OP_DIVIDES, OMC_LANES2(a, b, modulo), DY,
       neg(g, mul(g, DY, omc_binary(&g->b, OMC_OP_FloorDiv, A, B))))
BINARY(FloorDiv, ANY, OMC_OP_DIVIDES, OMC_LANES2(a, b, floor_divide), zeros(g), zeros(g))

#ifdef OMC_RECORDS
/* Equal inputs share the gradient; a NaN passes it to both. */
static omc_value *where_not_less(omc_grad *g, omc_value *v, omc_value *w) {
  omc_value *const shared = where(g, omc_binary(&g->b, OMC_OP_Equal, v, w), times(g, DY, 0.5), DY);
  return where(g, omc_binary(&g->b, OMC_OP_Less, v, w), zero(g), shared);
}
#endif
BINARY(Max, ANY, 0, vmax(a, b), where_not_less(g, A, B), where_not_less(g, B, A))
BINARY(Min, ANY, 0, vmin(a, b), where_not_less(g, B, A), where_not_less(g, A, B))

#if defined(OMC_VARIANT) && OMC_IS_FLOAT
/* a * a, of which a bfloat16 keeps its own bits only. */
OMC_INLINE vacc_t square_kept(vacc_t a, vacc_t bfloats) {
  const vacc_t square = a * a;
  const vmask bits = (vmask)square;
  const vacc_t kept = (vacc_t)((bits + 0x7fff + ((bits >> 16) & 1)) & ~(acc_bits_t)0xffff);
  return vblend(bfloats != vset(0), kept, square);
}
/* PyTorch has formulas of its own for these exponents where they are given as a number, and rounds
 * a bfloat16 after each step of them. */
OMC_INLINE vacc_t power(vacc_t a, vacc_t b, acc_t exponent, vacc_t bfloats) {
  if (exponent == 2) return a * a;
  if (exponent == 3) return square_kept(a, bfloats) * a;
  if (exponent == (acc_t)0.5) return vsqrt(a);
  if (exponent == (acc_t)-0.5) return vset(1) / vsqrt(a);
  if (exponent == -1) return vset(1) / a;
  if (exponent == -2) return vset(1) / square_kept(a, bfloats);
  return OMC_LANES2(a, b, OMC_R(pow));
}
#endif
#ifdef OMC_RECORDS
/* The exponent if it is one and the same constant, else 0; float16 has no formulas of its own. */
static double given_exponent(const omc_node *node) {
  const omc_value *b = omc_in(node, 1);
  const bool given = omc_is_const(b) && omc_shape_numel(&b->type.shape) == 1;
  return given && b->type.dtype != OMC_F16 ? omc_const_float(b, 0) : 0;
}
/* dy b a^(b-1) for an exponent that is one and the same constant. */
static omc_value *const_power_gradient(omc_grad *g, double b) {
  if (b == 0) return zeros(g);
  if (b == 2) return mul(g, DY, times(g, A, 2));
  return mul(g, DY, times(g, omc_binary(&g->b, OMC_OP_Pow, A, omc_scalar(&g->b, A, b - 1)), b));
}
/* dy b a^(b-1), and 0 where b is 0 whatever the others are. */
static omc_value *power_gradient(omc_grad *g) {
  if (omc_is_const(B) && omc_shape_numel(&B->type.shape) == 1)
    return const_power_gradient(g, omc_const_float(B, 0));
  omc_value *const slope = mul(g, B, omc_binary(&g->b, OMC_OP_Pow, A, plus(g, B, -1)));
  return where(g, compare(g, OMC_OP_Equal, B, 0), zero(g), mul(g, DY, slope));
}
/* y log a, and 0 where a is 0 and stays so when b changes a little. */
static omc_value *exponent_slope(omc_grad *g) {
  omc_value *const at_zero = omc_binary(&g->b, OMC_OP_And, compare(g, OMC_OP_Equal, A, 0),
                                        compare(g, OMC_OP_GreaterOrEqual, B, 0));
  return where(g, at_zero, zero(g), mul(g, Y, omc_unary(&g->b, OMC_OP_Log, A)));
}
#endif
BINARY(Pow, FLOAT, 0, power(a, b, (acc_t)blk->imm[0], i1), power_gradient(g),
       mul(g, DY, exponent_slope(g)), imm[0] = given_exponent(node),
       imm[1] = omc_in(node, 0)->type.dtype == OMC_BF16)

#if defined(OMC_VARIANT) && OMC_IS_FLOAT
/* From a to b by w, counted from the nearer end. */
OMC_INLINE vacc_t lerp(vacc_t a, vacc_t b, vacc_t w) {
  const vmask near_a = vabs(w) < vset((acc_t)0.5);
  return vfma(vblend(near_a, w, w - vset(1)), b - a, vblend(near_a, a, b));
}
#endif
TERNARY(Lerp, FLOAT, lerp(a, b, c), mul(g, DY, one_minus(g, C)), mul(g, DY, C),
        mul(g, DY, omc_binary(&g->b, OMC_OP_Sub, B, A)))

/* a b + c, rounded once where there is FMA, as PyTorch's vectors scale a summand. */
TERNARY(MulAdd, FLOAT, vfma(a, b, c), mul(g, DY, B), mul(g, DY, A), DY)
