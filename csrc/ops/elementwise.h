/* An elementwise op is one row in its family's file, kernel and gradient side by side:
 *   UNARY(Tanh, FLOAT, a, vtanh(a), g, mul(g, dy(g), one_minus(g, mul(g, out(g), out(g)))))
 *
 * types   what it takes and gives, see below
 * flags   OMC_OP_COMMUTES, OMC_OP_DIVIDES or 0
 * kernel  the result for the operands that are named before it, in vector verbs, those of cpu/vec.h
 * da, ..  the gradient of each operand, in the gradient verbs below, which are given the rule that
 *         is named before them; _NO_GRAD: none flows through
 *
 * A row _WITH numbers names first how its kernel and its gradients see them (in a kernel each is a
 * vector of itself), and then the node and the numbers made of it, OMC_EW_IMM at most:
 *   UNARY_WITH(LeakyRelu, FLOAT, i, a, vblend(a > vset(0), a, a * i[0]), g,
 *              where(g, compare(g, OMC_OP_Greater, in(g, 0), 0), dy(g), times(g, dy(g), i[0])),
 *              node, omc_node_float(node, "alpha"))
 *
 * Of an OPTIONAL row all operands but the first may be left out; a kernel is given the first
 * instead.
 *
 * A gradient of several verbs is rounded to the dtype after each of them, as PyTorch rounds what it
 * writes in several ops; one in AT_ONCE() only at its end, as what PyTorch has a kernel for.
 *
 * Compiled by itself, a family's file is its records. Compiled for a device it is its kernels: the
 * device says what a row is (cpu/ops/block.h), defines OMC_ROWS_ARE_KERNELS and includes the file.
 * Functions that a row calls stand above it under OMC_VARIANT or OMC_RECORDS. */
#ifndef OMC_OPS_ELEMENTWISE_H
#define OMC_OPS_ELEMENTWISE_H

#ifndef OMC_ROWS_ARE_KERNELS
#define OMC_RECORDS

#include <string.h>

#include "ops/infer.h"
#include "ops/op.h"
#include "ops/program.h"

/* What an op takes, broadcast to one shape, and gives: its shape rule. */
#define OMC_INFER_FLOAT omc_infer_float /* one float dtype, and gives it */
#define OMC_INFER_FLOAT_TO_BOOL omc_infer_test
#define OMC_INFER_ANY omc_infer_broadcast /* one dtype, and gives it */
#define OMC_INFER_ANY_TO_BOOL omc_infer_compare
#define OMC_INFER_INT omc_infer_integers /* one integer dtype, and gives it */
#define OMC_INFER_BOOL omc_infer_logic
#define OMC_INFER_CHOICE omc_infer_choice /* bool, then one dtype, and gives it */

#define OMC_ROW_NUMBERS_(name, node, ...)                            \
  static omc_status imm_##name(const omc_node *node, double *imm_) { \
    const double numbers_[OMC_EW_IMM] = {__VA_ARGS__};               \
    (void)node;                                                      \
    memcpy(imm_, numbers_, sizeof numbers_);                         \
    return OMC_OK;                                                   \
  }
#define OMC_ROW_SET_(g, operand, d) \
  if (g->needs[operand]) g->grad_in[operand] = (d);
#define OMC_ROW_GRAD_(name, i, g, sets)        \
  static omc_status grad_##name(omc_grad *g) { \
    double i[OMC_EW_IMM] = {0};                \
    OMC_TRY(imm_##name(g->node, i));           \
    sets return g->b.status;                   \
  }
#define OMC_ROW_RECORD_(name, types, least_in, n_in, flags_, grad_)         \
  OMC_RECORD(name, least_in, n_in, 1, .flags = OMC_OP_POINTWISE | (flags_), \
             .infer = OMC_INFER_##types, .grad = grad_, .imm = imm_##name)

#define UNARY_WITH(name, types, i, a, kernel, g, da, node, ...) \
  OMC_ROW_NUMBERS_(name, node, __VA_ARGS__)                     \
  OMC_ROW_GRAD_(name, i, g, OMC_ROW_SET_(g, 0, da))             \
  OMC_ROW_RECORD_(name, types, 1, 1, 0, grad_##name)
#define UNARY_NO_GRAD(name, types, a, kernel) \
  OMC_ROW_NUMBERS_(name, node_, 0)            \
  OMC_ROW_RECORD_(name, types, 1, 1, 0, NULL)
#define BINARY_WITH(name, types, flags, i, a, b, kernel, g, da, db, node, ...) \
  OMC_ROW_NUMBERS_(name, node, __VA_ARGS__)                                    \
  OMC_ROW_GRAD_(name, i, g, OMC_ROW_SET_(g, 0, da) OMC_ROW_SET_(g, 1, db))     \
  OMC_ROW_RECORD_(name, types, 2, 2, flags, grad_##name)
#define BINARY_NO_GRAD_WITH(name, types, flags, i, a, b, kernel, node, ...) \
  OMC_ROW_NUMBERS_(name, node, __VA_ARGS__)                                 \
  OMC_ROW_RECORD_(name, types, 2, 2, flags, NULL)
#define TERNARY(name, types, a, b, c, kernel, g, da, db, dc)                                       \
  OMC_ROW_NUMBERS_(name, node_, 0)                                                                 \
  OMC_ROW_GRAD_(name, i_, g, OMC_ROW_SET_(g, 0, da) OMC_ROW_SET_(g, 1, db) OMC_ROW_SET_(g, 2, dc)) \
  OMC_ROW_RECORD_(name, types, 3, 3, 0, grad_##name)
#define TERNARY_OPTIONAL_WITH(name, types, i, a, b, c, kernel, g, da, db, dc, node, ...)          \
  OMC_ROW_NUMBERS_(name, node, __VA_ARGS__)                                                       \
  OMC_ROW_GRAD_(name, i, g, OMC_ROW_SET_(g, 0, da) OMC_ROW_SET_(g, 1, db) OMC_ROW_SET_(g, 2, dc)) \
  OMC_ROW_RECORD_(name, types, 1, 3, 0, grad_##name)

/* ---- gradient verbs ---- */

/* A value in the dtype that its class computes in, which holds it exactly. */
static inline omc_value *widened(omc_grad *g, omc_value *v) {
  return v ? omc_cast(&g->b, v, omc_dtype_acc(v->type.dtype)) : NULL;
}
static inline omc_value *read_by_rule(omc_grad *g, omc_value *v) {
  return g->at_once ? widened(g, v) : v;
}
/* `v`, made of widened values, rounded to the dtype of the result. */
static inline omc_value *narrowed(omc_grad *g, omc_value *v) {
  g->at_once = false;
  return v ? omc_cast(&g->b, v, g->node->out[0]->type.dtype) : NULL;
}
#define AT_ONCE(g, d) ((g)->at_once = true, narrowed((g), (d)))

/* The operands, the result and its gradient. */
static inline omc_value *in(omc_grad *g, uint32_t i) { return read_by_rule(g, omc_in(g->node, i)); }
static inline omc_value *out(omc_grad *g) { return read_by_rule(g, omc_out(g->node, 0)); }
static inline omc_value *dy(omc_grad *g) { return read_by_rule(g, g->grad_out[0]); }

static inline omc_value *neg(omc_grad *g, omc_value *v) { return omc_unary(&g->b, OMC_OP_Neg, v); }
static inline omc_value *mul(omc_grad *g, omc_value *v, omc_value *w) {
  return omc_binary(&g->b, OMC_OP_Mul, v, w);
}
static inline omc_value *over(omc_grad *g, omc_value *v, omc_value *w) {
  return omc_binary(&g->b, OMC_OP_Div, v, w);
}
/* The number is not rounded to 16 bits. */
static inline omc_value *times(omc_grad *g, omc_value *v, double by) {
  omc_value *const wide = widened(g, v);
  omc_value *const product = wide ? mul(g, wide, omc_scalar(&g->b, wide, by)) : NULL;
  return product ? omc_cast(&g->b, product, v->type.dtype) : NULL;
}
static inline omc_value *plus(omc_grad *g, omc_value *v, double by) {
  return omc_binary(&g->b, OMC_OP_Add, v, omc_scalar(&g->b, v, by));
}
static inline omc_value *one_minus(omc_grad *g, omc_value *v) {
  return omc_binary(&g->b, OMC_OP_Sub, omc_scalar(&g->b, v, 1), v);
}
static inline omc_value *compare(omc_grad *g, omc_op_id op, omc_value *v, double bound) {
  return omc_binary(&g->b, op, v, omc_scalar(&g->b, v, bound));
}
static inline omc_value *where(omc_grad *g, omc_value *mask, omc_value *v, omc_value *w) {
  return omc_ternary(&g->b, OMC_OP_Where, mask, v, w);
}
static inline omc_value *zero(omc_grad *g) { return omc_scalar(&g->b, dy(g), 0); }
/* The gradient of a function that is flat between its steps: not the same as none. */
static inline omc_value *zeros(omc_grad *g) { return omc_zeros(&g->b, &dy(g)->type); }

#endif

/* Rows without numbers. */
#define UNARY(name, types, a, kernel, g, da) UNARY_WITH(name, types, i_, a, kernel, g, da, node_, 0)
#define BINARY(name, types, flags, a, b, kernel, g, da, db) \
  BINARY_WITH(name, types, flags, i_, a, b, kernel, g, da, db, node_, 0)
#define BINARY_NO_GRAD(name, types, flags, a, b, kernel) \
  BINARY_NO_GRAD_WITH(name, types, flags, i_, a, b, kernel, node_, 0)

#endif
