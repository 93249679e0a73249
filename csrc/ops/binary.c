/* Arithmetic of two inputs, with broadcasting. */
#include <math.h>

#include "cpu/elementwise.h"
#include "ops/infer.h"
#include "ops/op.h"

#ifdef OMC_VARIANT

/* A function of two scalars lane by lane. */
#define LANES2(fn)                                                 \
  __extension__({                                                  \
    vreal r_;                                                      \
    for (int l_ = 0; l_ < OMC_VL; l_++) r_[l_] = fn(a[l_], b[l_]); \
    r_;                                                            \
  })

#if OMC_IS_FLOAT

/* The remainder has the sign of the divisor. */
static inline real modulo(real a, real b) {
  const real m = OMC_R(fmod)(a, b);
  return m != 0 && (b < 0) != (m < 0) ? m + b : m;
}

/* The quotient is taken of what is divisible, so that rounding cannot lift it over an integer. */
static inline real floor_divide(real a, real b) {
  if (b == 0) return a / b;
  const real m = OMC_R(fmod)(a, b);
  real q = (a - m) / b;
  if (m != 0 && (b < 0) != (m < 0)) q -= 1;
  if (q == 0) return OMC_R(copysign)(0, a / b);
  const real f = OMC_R(floor)(q);
  return q - f > (real)0.5 ? f + 1 : f;
}

OMC_EW2(Div, a / b)

/* Exponents that are the same throughout a block are mostly small integers. */
static bool same_throughout(const real *x, int64_t n) {
  for (int64_t k = 1; k < n; k++)
    if (x[k] != x[0]) return false;
  return true;
}

OMC_EW2(power, LANES2(OMC_R(pow)))
OMC_EW1(square, vmul(a, a))
OMC_EW1(cube, vmul(a, vmul(a, a)))
OMC_EW1(root, vsqrt(a))
void OMC_EW_NAME(Pow)(const omc_ew_block *);
void OMC_EW_NAME(Pow)(const omc_ew_block *blk) {
  const real *e = blk->in[1];
  const real common = same_throughout(e, blk->n) ? e[0] : 0;
  if (common == 2)
    OMC_EW_NAME(square)(blk);
  else if (common == 3)
    OMC_EW_NAME(cube)(blk);
  else if (common == (real)0.5)
    OMC_EW_NAME(root)(blk);
  else
    OMC_EW_NAME(power)(blk);
}

#else

/* Division by zero gives 0; the one quotient that overflows wraps around. */
static inline bool divides(int64_t a, int64_t b) { return b != 0 && !(b == -1 && a == INT64_MIN); }
static inline int64_t divide(int64_t a, int64_t b) {
  return divides(a, b) ? a / b : b == 0 ? 0 : a;
}
static inline int64_t modulo(int64_t a, int64_t b) {
  if (!divides(a, b)) return 0;
  const int64_t m = a % b;
  return m != 0 && (b < 0) != (m < 0) ? m + b : m;
}
static inline int64_t floor_divide(int64_t a, int64_t b) {
  if (!divides(a, b)) return divide(a, b);
  return a / b - (a % b != 0 && (b < 0) != (a % b < 0));
}

OMC_EW2(Div, LANES2(divide))

#endif

OMC_EW2(Add, vadd(a, b))
OMC_EW2(Sub, vsub(a, b))
OMC_EW2(Mul, vmul(a, b))
OMC_EW2(Max, vmax(a, b))
OMC_EW2(Min, vmin(a, b))
OMC_EW2(Mod, LANES2(modulo))
OMC_EW2(FloorDiv, LANES2(floor_divide))

#endif

#ifdef OMC_RECORDS

static omc_status infer_pow(omc_node *node) {
  OMC_TRY(omc_need_float(node, 0));
  return omc_infer_broadcast(node);
}

/* ---- gradients: dy = g->dout[0], x and z the inputs, y the output ---- */

#define DY (g->dout[0])
#define X omc_in(g->node, 0)
#define Z omc_in(g->node, 1)
#define Y omc_out(g->node, 0)
#define B (&g->b)

static omc_value *neg(omc_grad *g, omc_value *v) { return omc_b1(B, OMC_OP_Neg, v); }
static omc_value *mul(omc_grad *g, omc_value *a, omc_value *b) {
  return omc_b2(B, OMC_OP_Mul, a, b);
}
static omc_value *zero(omc_grad *g) { return omc_scalar(B, DY, 0); }

/* GRAD(name, dx, dz) defines grad_NAME; what nobody wants is not built. */
#define GRAD(name, dx, dz)                     \
  static omc_status grad_##name(omc_grad *g) { \
    if (g->needs[0]) g->din[0] = (dx);         \
    if (g->needs[1]) g->din[1] = (dz);         \
    return g->b.status;                        \
  }

GRAD(Add, DY, DY)
GRAD(Sub, DY, neg(g, DY))
GRAD(Mul, mul(g, DY, Z), mul(g, DY, X))
GRAD(Div, omc_b2(B, OMC_OP_Div, DY, Z), neg(g, omc_b2(B, OMC_OP_Div, mul(g, DY, Y), Z)))
GRAD(Mod, DY, neg(g, mul(g, DY, omc_b2(B, OMC_OP_FloorDiv, X, Z))))

/* Equal inputs share the gradient; a NaN passes it to both. */
static omc_value *where_not_less(omc_grad *g, omc_value *a, omc_value *b) {
  omc_value *const half = mul(g, DY, omc_scalar(B, DY, 0.5));
  omc_value *const shared = omc_b3(B, OMC_OP_Where, omc_b2(B, OMC_OP_Equal, a, b), half, DY);
  return omc_b3(B, OMC_OP_Where, omc_b2(B, OMC_OP_Less, a, b), zero(g), shared);
}
GRAD(Max, where_not_less(g, X, Z), where_not_less(g, Z, X))
GRAD(Min, where_not_less(g, Z, X), where_not_less(g, X, Z))

/* z x^(z-1), and 0 where z is 0 even if x is. */
static omc_value *pow_slope(omc_grad *g) {
  omc_value *const less = omc_b2(B, OMC_OP_Sub, Z, omc_scalar(B, Z, 1));
  omc_value *const slope = mul(g, Z, omc_b2(B, OMC_OP_Pow, X, less));
  return omc_b3(B, OMC_OP_Where, omc_b2(B, OMC_OP_Equal, Z, zero(g)), zero(g), slope);
}
/* The slope z x^(z-1) of a power that is one and the same constant. */
static omc_value *const_pow_slope(omc_grad *g, double z) {
  if (z == 0) return zero(g);
  if (z == 2) return mul(g, X, omc_scalar(B, X, 2));
  return mul(g, omc_b2(B, OMC_OP_Pow, X, omc_scalar(B, X, z - 1)), omc_scalar(B, X, z));
}
/* y log x, and 0 where x is 0 and stays so when z changes a little. */
static omc_value *pow_exponent_slope(omc_grad *g) {
  omc_value *const at_zero = omc_b2(B, OMC_OP_And, omc_b2(B, OMC_OP_Equal, X, zero(g)),
                                    omc_b2(B, OMC_OP_GreaterOrEqual, Z, zero(g)));
  return omc_b3(B, OMC_OP_Where, at_zero, zero(g), mul(g, Y, omc_b1(B, OMC_OP_Log, X)));
}
static omc_value *pow_base_slope(omc_grad *g) {
  const bool one_constant = omc_is_const(Z) && omc_shape_numel(&Z->type.shape) == 1;
  return one_constant ? const_pow_slope(g, omc_const_float(Z, 0)) : pow_slope(g);
}
GRAD(Pow, mul(g, DY, pow_base_slope(g)), mul(g, DY, pow_exponent_slope(g)))

/* ---- records ---- */

#define RECORD(name_, flags_, infer_, grad_)                           \
  const omc_op omc_op_##name_ = {.name = #name_,                       \
                                 .min_in = 2,                          \
                                 .max_in = 2,                          \
                                 .n_out = 1,                           \
                                 .flags = OMC_OP_POINTWISE | (flags_), \
                                 .infer = infer_,                      \
                                 .grad = grad_,                        \
                                 .ew = &omc_ew_##name_};

OMC_EWS_NUM(Add, NULL)
OMC_EWS_NUM(Sub, NULL)
OMC_EWS_NUM(Mul, NULL)
OMC_EWS_NUM(Div, NULL)
OMC_EWS_NUM(FloorDiv, NULL)
OMC_EWS_NUM(Mod, NULL)
OMC_EWS(Pow, NULL)
OMC_EWS_NUM(Max, NULL)
OMC_EWS_NUM(Min, NULL)

RECORD(Add, OMC_OP_COMMUTES, omc_infer_broadcast, grad_Add)
RECORD(Sub, 0, omc_infer_broadcast, grad_Sub)
RECORD(Mul, OMC_OP_COMMUTES, omc_infer_broadcast, grad_Mul)
RECORD(Div, 0, omc_infer_broadcast, grad_Div)
RECORD(FloorDiv, 0, omc_infer_broadcast, NULL)
RECORD(Mod, 0, omc_infer_broadcast, grad_Mod)
RECORD(Pow, 0, infer_pow, grad_Pow)
RECORD(Max, OMC_OP_COMMUTES, omc_infer_broadcast, grad_Max)
RECORD(Min, OMC_OP_COMMUTES, omc_infer_broadcast, grad_Min)

#endif
