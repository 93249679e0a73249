/* Arithmetic of two inputs, with broadcasting. */
#include "ops/elementwise.h"

BINARY(Add, ANY, OMC_OP_COMMUTES, a, b, vadd(a, b), g, dy(g), dy(g))

BINARY(Sub, ANY, 0, a, b, vsub(a, b), g, dy(g), neg(g, dy(g)))

BINARY(Mul, ANY, OMC_OP_COMMUTES, a, b, vmul(a, b), g, mul(g, dy(g), in(g, 1)),
       mul(g, dy(g), in(g, 0)))

BINARY(Div, ANY, OMC_OP_DIVIDES, a, b, vdiv(a, b), g, over(g, dy(g), in(g, 1)),
       mul(g, neg(g, dy(g)), over(g, out(g), in(g, 1))))

#ifdef OMC_VARIANT
#if OMC_IS_FLOAT
/* Where a remainder m has not the sign of the divisor. */
OMC_INLINE vmask differ(vacc_t m, vacc_t b) {
  return (m != vset(0)) & ((b < vset(0)) ^ (m < vset(0)));
}
/* NaN where the quotient overflows, as in PyTorch's vectors, though not in the few elements that do
 * not fill one; else the remainder. */
OMC_INLINE vacc_t within_range(vacc_t a, vacc_t b, vacc_t rest) {
  const acc_t most = sizeof(acc_t) == 4 ? (acc_t)0x1.000004p127 : (acc_t)0x1.0000000000002p1023;
  return vblend(vabs(a * vset((acc_t)0.5) / b) >= vset(most), vset((acc_t)NAN), rest);
}
OMC_INLINE vacc_t remainder_of(vacc_t a, vacc_t b) { return within_range(a, b, vfmod(a, b)); }
/* The same with the sign of the divisor. */
OMC_INLINE vacc_t modulo(vacc_t a, vacc_t b) {
  const vacc_t m = vfmod(a, b);
  return within_range(a, b, vblend(differ(m, b), m + b, m));
}
/* The quotient is taken of what is divisible, so that rounding cannot lift it over an integer. */
OMC_INLINE vacc_t floor_divide(vacc_t a, vacc_t b) {
  const vacc_t m = vfmod(a, b), near = (a - m) / b;
  const vacc_t q = vblend(differ(m, b), near - vset(1), near), f = vfloor(q);
  const vacc_t rounded = vblend(q - f > vset((acc_t)0.5), f + vset(1), f);
  const vacc_t signed_ = vblend(q == vset(0), vsign(vset(0), a / b), rounded);
  return vblend(b == vset(0), a / b, signed_);
}
#else
OMC_INLINE int64_t rest(int64_t a, int64_t b) { return b == 0 || b == -1 ? 0 : a % b; }
OMC_INLINE bool differs(int64_t a, int64_t b) { return rest(a, b) != 0 && (a < 0) != (b < 0); }
OMC_INLINE int64_t modulo_of(int64_t a, int64_t b) { return rest(a, b) + (differs(a, b) ? b : 0); }
OMC_INLINE int64_t floor_divide_of(int64_t a, int64_t b) {
  return omc_divide(a, b) - differs(a, b);
}
OMC_INLINE vacc_t remainder_of(vacc_t a, vacc_t b) { return OMC_LANES2(a, b, rest); }
OMC_INLINE vacc_t modulo(vacc_t a, vacc_t b) { return OMC_LANES2(a, b, modulo_of); }
OMC_INLINE vacc_t floor_divide(vacc_t a, vacc_t b) { return OMC_LANES2(a, b, floor_divide_of); }
#endif
#endif
#ifdef OMC_RECORDS
/* How often the divisor is taken: the quotient, rounded down, or to 0 if the remainder has the sign
 * of the dividend. */
static omc_value *times_taken(omc_grad *g, bool to_zero) {
  if (!to_zero) return omc_binary(&g->b, OMC_OP_FloorDiv, in(g, 0), in(g, 1));
  omc_value *const q = over(g, in(g, 0), in(g, 1));
  return where(g, compare(g, OMC_OP_Less, q, 0), omc_unary(&g->b, OMC_OP_Ceil, q),
               omc_unary(&g->b, OMC_OP_Floor, q));
}
#endif
BINARY_WITH(Mod, ANY, OMC_OP_DIVIDES, i, a, b, i[0][0] != 0 ? remainder_of(a, b) : modulo(a, b), g,
            dy(g), neg(g, mul(g, dy(g), times_taken(g, i[0] != 0))), node,
            omc_node_int(node, "fmod") != 0)
BINARY(FloorDiv, ANY, OMC_OP_DIVIDES, a, b, floor_divide(a, b), g, zeros(g), zeros(g))

#ifdef OMC_RECORDS
/* dy times `with` / (y^2 + x^2), and 0 where that is divided by 0. */
static omc_value *angle_slope(omc_grad *g, omc_value *with) {
  omc_value *const squares =
      omc_binary(&g->b, OMC_OP_Add, mul(g, in(g, 0), in(g, 0)), mul(g, in(g, 1), in(g, 1)));
  omc_value *const none = compare(g, OMC_OP_Equal, squares, 0);
  omc_value *const rate = where(g, none, zero(g), omc_unary(&g->b, OMC_OP_Reciprocal, squares));
  return mul(g, mul(g, dy(g), with), rate);
}
#endif
BINARY(Atan2, FLOAT, 0, a, b, vatan2(a, b), g, angle_slope(g, in(g, 1)),
       angle_slope(g, neg(g, in(g, 0))))

#ifdef OMC_RECORDS
/* Equal inputs share the gradient; a NaN passes it to both. */
static omc_value *where_not_less(omc_grad *g, omc_value *v, omc_value *w) {
  omc_value *const shared =
      where(g, omc_binary(&g->b, OMC_OP_Equal, v, w), times(g, dy(g), 0.5), dy(g));
  return where(g, omc_binary(&g->b, OMC_OP_Less, v, w), zero(g), shared);
}
#endif
BINARY(Max, ANY, 0, a, b, vmax(a, b), g, where_not_less(g, in(g, 0), in(g, 1)),
       where_not_less(g, in(g, 1), in(g, 0)))
BINARY(Min, ANY, 0, a, b, vmin(a, b), g, where_not_less(g, in(g, 1), in(g, 0)),
       where_not_less(g, in(g, 0), in(g, 1)))

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
  if (b == 2) return mul(g, dy(g), times(g, in(g, 0), 2));
  return mul(
      g, dy(g),
      times(g, omc_binary(&g->b, OMC_OP_Pow, in(g, 0), omc_scalar(&g->b, in(g, 0), b - 1)), b));
}
/* dy b a^(b-1), and 0 where b is 0 whatever the others are. */
static omc_value *power_gradient(omc_grad *g) {
  if (omc_is_const(in(g, 1)) && omc_shape_numel(&in(g, 1)->type.shape) == 1)
    return const_power_gradient(g, omc_const_float(in(g, 1), 0));
  omc_value *const slope =
      mul(g, in(g, 1), omc_binary(&g->b, OMC_OP_Pow, in(g, 0), plus(g, in(g, 1), -1)));
  return where(g, compare(g, OMC_OP_Equal, in(g, 1), 0), zero(g), mul(g, dy(g), slope));
}
/* y log a, and 0 where a is 0 and stays so when b changes a little. */
static omc_value *exponent_slope(omc_grad *g) {
  omc_value *const at_zero = omc_binary(&g->b, OMC_OP_And, compare(g, OMC_OP_Equal, in(g, 0), 0),
                                        compare(g, OMC_OP_GreaterOrEqual, in(g, 1), 0));
  return where(g, at_zero, zero(g), mul(g, out(g), omc_unary(&g->b, OMC_OP_Log, in(g, 0))));
}
#endif
BINARY_WITH(Pow, FLOAT, 0, i, a, b, power(a, b, i[0][0], i[1]), g, power_gradient(g),
            mul(g, dy(g), exponent_slope(g)), node, given_exponent(node),
            omc_in(node, 0)->type.dtype == OMC_BF16)

#if defined(OMC_VARIANT) && OMC_IS_FLOAT
/* From a to b by w, counted from the nearer end. */
OMC_INLINE vacc_t lerp(vacc_t a, vacc_t b, vacc_t w) {
  const vmask near_a = vabs(w) < vset((acc_t)0.5);
  return vfma(vblend(near_a, w, w - vset(1)), b - a, vblend(near_a, a, b));
}
#endif
TERNARY(Lerp, FLOAT, a, b, c, lerp(a, b, c), g, mul(g, dy(g), one_minus(g, in(g, 2))),
        mul(g, dy(g), in(g, 2)), mul(g, dy(g), omc_binary(&g->b, OMC_OP_Sub, in(g, 1), in(g, 0))))

/* a b + c, rounded once where there is FMA, as PyTorch's vectors scale a summand. */
TERNARY(MulAdd, FLOAT, a, b, c, vfma(a, b, c), g, mul(g, dy(g), in(g, 1)), mul(g, dy(g), in(g, 0)),
        dy(g))
