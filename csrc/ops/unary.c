/* Elementwise ops of one input, and the gradients that are worth an op of their own. */
#include <math.h>
#include <string.h>

#include "cpu/elementwise.h"
#include "ops/infer.h"
#include "ops/op.h"

#ifdef OMC_VARIANT

#define ZERO_ONE(m) vblend((m), vset(1), vset(0))

OMC_EW1(Clip, __extension__({
          const vreal low = vblend(i2 != vset(0), vmax(a, i0), a);
          vblend(i3 != vset(0), vmin(low, i1), low);
        }))
OMC_EW1(Not, ZERO_ONE(a == vset(0)))
OMC_EW1(Relu, vblend(a < vset(0), vset(0), a))
OMC_EW2(ReluGrad, vblend(b <= vset(0), vset(0), a))
OMC_EW1(Sign, ZERO_ONE(a > vset(0)) - ZERO_ONE(a < vset(0)))

#if OMC_IS_FLOAT

OMC_EW1(Abs, vabs(a))
OMC_EW1(Ceil, -vfloor(-a))
OMC_EW1(Cos, vcos(a))
OMC_EW1(Elu, vblend(a > vset(0), a, vexpm1(a) * i0))
OMC_EW1(Erf, verf(a))
OMC_EW1(Exp, vexp(a))
OMC_EW1(Expm1, vexpm1(a))
OMC_EW1(Floor, vfloor(a))
OMC_EW1(HardSigmoid, vmax(vset(0), vmin(vset(1), vfma(a, i0, i1))))
OMC_EW1(HardSwish, vmax(vset(0), vmin(vset(6), a + vset(3))) * a / vset(6))
OMC_EW1(IsNaN, ZERO_ONE(vnan(a)))
OMC_EW1(LeakyRelu, vblend(a > vset(0), a, vmul(a, i0)))
OMC_EW1(Log, vlog(a))
OMC_EW1(Log1p, vlog1p(a))
OMC_EW1(Neg, -a)
OMC_EW1(Reciprocal, vset(1) / a)
OMC_EW1(Round, vround(a))
OMC_EW1(Rsqrt, vset(1) / vsqrt(a))
OMC_EW1(Sigmoid, vsigmoid(a))
OMC_EW1(Silu, a / (vset(1) + vexp(-a)))
OMC_EW1(Sin, vsin(a))
OMC_EW1(Softplus, vmax(a, vset(0)) + vlog1p(vexp(-vabs(a))))
OMC_EW1(Sqrt, vsqrt(a))
OMC_EW1(Tanh, vtanh(a))

OMC_EW2(SiluGrad, __extension__({
          const vreal s = vsigmoid(b);
          a * s * (vset(1) + b * (vset(1) - s));
        }))

/* The tanh form is x * sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3). */
#define TWO_BETA ((real)1.5957691216057308)
#define KAPPA ((real)0.044715)
OMC_INLINE vreal gelu_gate(vreal x) {
  return vsigmoid(vset(TWO_BETA) * x * vfma(vset(KAPPA), x * x, vset(1)));
}
OMC_INLINE vreal gelu_tanh_slope(vreal x) {
  const vreal s = gelu_gate(x);
  const vreal inner = vset(TWO_BETA) * vfma(vset(3 * KAPPA), x * x, vset(1));
  return vfma(x * inner, s * (vset(1) - s), s);
}
OMC_INLINE vreal gelu_slope(vreal x) {
  vreal density;
  const vreal below = vnormal(x, &density);
  return vfma(x, density, below);
}
OMC_EW1(Gelu, __extension__({
          vreal density;
          a *(blk->imm[0] != 0 ? gelu_gate(a) : vnormal(a, &density));
        }))
OMC_EW2(GeluGrad, a *(blk->imm[0] != 0 ? gelu_tanh_slope(b) : gelu_slope(b)))

#else

OMC_EW1(Neg, vsub(vset(0), a))
OMC_EW1(Abs, vblend(a < vset(0), vsub(vset(0), a), a))

#endif
#endif

#ifdef OMC_RECORDS

/* ---- attributes ---- */

/* Bounds and whether there are any: an integer's bounds may not be infinite. */
static omc_status clip_imm(const omc_node *node, double *imm) {
  imm[0] = omc_attr_float(node, "min", 0);
  imm[1] = omc_attr_float(node, "max", 0);
  imm[2] = omc_attr_find(node, "min") != NULL;
  imm[3] = omc_attr_find(node, "max") != NULL;
  return OMC_OK;
}

static double elu_alpha(const omc_node *node) { return omc_attr_float(node, "alpha", 1); }
static double leaky_alpha(const omc_node *node) { return omc_attr_float(node, "alpha", 0.01); }

static omc_status elu_imm(const omc_node *node, double *imm) {
  imm[0] = elu_alpha(node);
  return OMC_OK;
}

static omc_status leaky_relu_imm(const omc_node *node, double *imm) {
  imm[0] = leaky_alpha(node);
  return OMC_OK;
}

static omc_status hard_sigmoid_imm(const omc_node *node, double *imm) {
  imm[0] = omc_attr_float(node, "alpha", 0.2);
  imm[1] = omc_attr_float(node, "beta", 0.5);
  return OMC_OK;
}

static omc_status gelu_imm(const omc_node *node, double *imm) {
  const char *form = omc_attr_string(node, "approximate", "none");
  imm[0] = strcmp(form, "tanh") == 0;
  if (imm[0] != 0 || strcmp(form, "none") == 0) return OMC_OK;
  char text[OMC_NODE_TEXT];
  OMC_FAIL(EUNSUPPORTED, "%s: approximate is '%s', not 'none' or 'tanh'",
           omc_node_text(node, text, sizeof text), form);
}

/* ---- types ---- */

static omc_status infer_is_nan(omc_node *node) {
  OMC_TRY(omc_need_float(node, 0));
  omc_set_type(node, 0, OMC_BOOL, &omc_in(node, 0)->type.shape);
  return OMC_OK;
}

static omc_status infer_not(omc_node *node) {
  OMC_TRY(omc_need_dtype(node, 0, OMC_BOOL));
  return omc_infer_same(node);
}

static omc_status infer_grad(omc_node *node) {
  OMC_TRY(omc_need_float(node, 0));
  return omc_infer_broadcast(node);
}

/* ---- gradients: dy = g->dout[0], x the input, y the output ---- */

#define DY (g->dout[0])
#define X omc_in(g->node, 0)
#define Y omc_out(g->node, 0)
#define B (&g->b)

static omc_value *mul(omc_grad *g, omc_value *a, omc_value *b) {
  return omc_b2(B, OMC_OP_Mul, a, b);
}
static omc_value *times(omc_grad *g, omc_value *a, double by) {
  return mul(g, a, omc_scalar(B, a, by));
}
static omc_value *plus(omc_grad *g, omc_value *a, double by) {
  return omc_b2(B, OMC_OP_Add, a, omc_scalar(B, a, by));
}
/* dy where `mask` holds, else 0. */
static omc_value *masked(omc_grad *g, omc_value *mask, omc_value *dy) {
  return omc_b3(B, OMC_OP_Where, mask, dy, omc_scalar(B, DY, 0));
}
static omc_value *compare(omc_grad *g, omc_op_id op, omc_value *a, double bound) {
  return omc_b2(B, op, a, omc_scalar(B, a, bound));
}

/* GRAD(name, dx) defines grad_NAME. */
#define GRAD(name, dx)                         \
  static omc_status grad_##name(omc_grad *g) { \
    g->din[0] = (dx);                          \
    return g->b.status;                        \
  }

GRAD(Abs, mul(g, DY, omc_b1(B, OMC_OP_Sign, X)))
GRAD(Cos, omc_b1(B, OMC_OP_Neg, mul(g, DY, omc_b1(B, OMC_OP_Sin, X))))
GRAD(Elu, omc_b3(B, OMC_OP_Where, compare(g, OMC_OP_Greater, Y, 0), DY,
                 mul(g, DY, plus(g, Y, elu_alpha(g->node)))))
GRAD(Erf,
     mul(g, DY,
         times(g, omc_b1(B, OMC_OP_Exp, omc_b1(B, OMC_OP_Neg, mul(g, X, X))), 1.1283791670955126)))
GRAD(Exp, mul(g, DY, Y))
GRAD(Expm1, mul(g, DY, plus(g, Y, 1)))
GRAD(HardSwish, masked(g, compare(g, OMC_OP_Greater, X, -3),
                       omc_b3(B, OMC_OP_Where, compare(g, OMC_OP_Less, X, 3),
                              mul(g, DY, plus(g, times(g, X, 1.0 / 3), 0.5)), DY)))
GRAD(LeakyRelu, omc_b3(B, OMC_OP_Where, compare(g, OMC_OP_Greater, X, 0), DY,
                       times(g, DY, leaky_alpha(g->node))))
GRAD(Log, omc_b2(B, OMC_OP_Div, DY, X))
GRAD(Log1p, omc_b2(B, OMC_OP_Div, DY, plus(g, X, 1)))
GRAD(Neg, omc_b1(B, OMC_OP_Neg, DY))
GRAD(Reciprocal, omc_b1(B, OMC_OP_Neg, mul(g, DY, mul(g, Y, Y))))
GRAD(Relu, omc_b2(B, OMC_OP_ReluGrad, DY, Y))
GRAD(Rsqrt, mul(g, times(g, DY, -0.5), mul(g, Y, mul(g, Y, Y))))
GRAD(Sigmoid, mul(g, DY, mul(g, Y, omc_b2(B, OMC_OP_Sub, omc_scalar(B, Y, 1), Y))))
GRAD(Silu, omc_b2(B, OMC_OP_SiluGrad, DY, X))
GRAD(Sin, mul(g, DY, omc_b1(B, OMC_OP_Cos, X)))
GRAD(Softplus, mul(g, DY, omc_b1(B, OMC_OP_Sigmoid, X)))
GRAD(Sqrt, omc_b2(B, OMC_OP_Div, DY, times(g, Y, 2)))
GRAD(Tanh, mul(g, DY, omc_b2(B, OMC_OP_Sub, omc_scalar(B, Y, 1), mul(g, Y, Y))))

static omc_status grad_Clip(omc_grad *g) {
  omc_value *dx = DY;
  if (omc_attr_find(g->node, "min"))
    dx = masked(g, compare(g, OMC_OP_GreaterOrEqual, X, omc_attr_float(g->node, "min", 0)), dx);
  if (omc_attr_find(g->node, "max"))
    dx = masked(g, compare(g, OMC_OP_LessOrEqual, X, omc_attr_float(g->node, "max", 0)), dx);
  g->din[0] = dx;
  return g->b.status;
}

static omc_status grad_Gelu(omc_grad *g) {
  const omc_attr form = omc_as("approximate", omc_attr_string(g->node, "approximate", "none"));
  omc_value *const in[] = {DY, X};
  g->din[0] = omc_bn(B, OMC_OP_GeluGrad, 2, in, 1, &form);
  return g->b.status;
}

static omc_status grad_HardSigmoid(omc_grad *g) {
  double imm[OMC_EW_IMM];
  OMC_TRY(hard_sigmoid_imm(g->node, imm));
  omc_value *const inside =
      omc_b2(B, OMC_OP_And, compare(g, OMC_OP_Greater, Y, 0), compare(g, OMC_OP_Less, Y, 1));
  g->din[0] = masked(g, inside, times(g, DY, imm[0]));
  return g->b.status;
}

/* ---- records ---- */

#define RECORD(name_, n_in, infer_, grad_)                  \
  const omc_op omc_op_##name_ = {.name = #name_,            \
                                 .min_in = n_in,            \
                                 .max_in = n_in,            \
                                 .n_out = 1,                \
                                 .flags = OMC_OP_POINTWISE, \
                                 .infer = infer_,           \
                                 .grad = grad_,             \
                                 .ew = &omc_ew_##name_};

OMC_EWS_NUM(Abs, NULL)
OMC_EWS(Ceil, NULL)
OMC_EWS_NUM(Clip, clip_imm)
OMC_EWS(Cos, NULL)
OMC_EWS(Elu, elu_imm)
OMC_EWS(Erf, NULL)
OMC_EWS(Exp, NULL)
OMC_EWS(Expm1, NULL)
OMC_EWS(Floor, NULL)
OMC_EWS(Gelu, gelu_imm)
OMC_EWS(GeluGrad, gelu_imm)
OMC_EWS(HardSigmoid, hard_sigmoid_imm)
OMC_EWS(HardSwish, NULL)
OMC_EWS(IsNaN, NULL)
OMC_EWS(LeakyRelu, leaky_relu_imm)
OMC_EWS(Log, NULL)
OMC_EWS(Log1p, NULL)
OMC_EWS_NUM(Neg, NULL)
OMC_EWS_NUM(Not, NULL)
OMC_EWS(Reciprocal, NULL)
OMC_EWS_NUM(Relu, NULL)
OMC_EWS_NUM(ReluGrad, NULL)
OMC_EWS(Round, NULL)
OMC_EWS(Rsqrt, NULL)
OMC_EWS(Sigmoid, NULL)
OMC_EWS_NUM(Sign, NULL)
OMC_EWS(Silu, NULL)
OMC_EWS(SiluGrad, NULL)
OMC_EWS(Sin, NULL)
OMC_EWS(Softplus, NULL)
OMC_EWS(Sqrt, NULL)
OMC_EWS(Tanh, NULL)

RECORD(Abs, 1, omc_infer_same, grad_Abs)
RECORD(Ceil, 1, omc_infer_float, NULL)
RECORD(Clip, 1, omc_infer_same, grad_Clip)
RECORD(Cos, 1, omc_infer_float, grad_Cos)
RECORD(Elu, 1, omc_infer_float, grad_Elu)
RECORD(Erf, 1, omc_infer_float, grad_Erf)
RECORD(Exp, 1, omc_infer_float, grad_Exp)
RECORD(Expm1, 1, omc_infer_float, grad_Expm1)
RECORD(Floor, 1, omc_infer_float, NULL)
RECORD(Gelu, 1, omc_infer_float, grad_Gelu)
RECORD(GeluGrad, 2, infer_grad, NULL)
RECORD(HardSigmoid, 1, omc_infer_float, grad_HardSigmoid)
RECORD(HardSwish, 1, omc_infer_float, grad_HardSwish)
RECORD(IsNaN, 1, infer_is_nan, NULL)
RECORD(LeakyRelu, 1, omc_infer_float, grad_LeakyRelu)
RECORD(Log, 1, omc_infer_float, grad_Log)
RECORD(Log1p, 1, omc_infer_float, grad_Log1p)
RECORD(Neg, 1, omc_infer_same, grad_Neg)
RECORD(Not, 1, infer_not, NULL)
RECORD(Reciprocal, 1, omc_infer_float, grad_Reciprocal)
RECORD(Relu, 1, omc_infer_same, grad_Relu)
RECORD(ReluGrad, 2, infer_grad, NULL)
RECORD(Round, 1, omc_infer_float, NULL)
RECORD(Rsqrt, 1, omc_infer_float, grad_Rsqrt)
RECORD(Sigmoid, 1, omc_infer_float, grad_Sigmoid)
RECORD(Sign, 1, omc_infer_same, NULL)
RECORD(Silu, 1, omc_infer_float, grad_Silu)
RECORD(SiluGrad, 2, infer_grad, NULL)
RECORD(Sin, 1, omc_infer_float, grad_Sin)
RECORD(Softplus, 1, omc_infer_float, grad_Softplus)
RECORD(Sqrt, 1, omc_infer_float, grad_Sqrt)
RECORD(Tanh, 1, omc_infer_float, grad_Tanh)

#endif
