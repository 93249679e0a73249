/* Comparisons, logic, of bits too, and choice by a bool. */
#include "ops/elementwise.h"

BINARY_NO_GRAD(Equal, ANY_TO_BOOL, OMC_OP_COMMUTES, a, b, vbool(a == b))
BINARY_NO_GRAD(NotEqual, ANY_TO_BOOL, OMC_OP_COMMUTES, a, b, vbool(a != b))
BINARY_NO_GRAD(Less, ANY_TO_BOOL, 0, a, b, vbool(a < b))
BINARY_NO_GRAD(LessOrEqual, ANY_TO_BOOL, 0, a, b, vbool(a <= b))
BINARY_NO_GRAD(Greater, ANY_TO_BOOL, 0, a, b, vbool(a > b))
BINARY_NO_GRAD(GreaterOrEqual, ANY_TO_BOOL, 0, a, b, vbool(a >= b))

BINARY_NO_GRAD(And, BOOL, OMC_OP_COMMUTES, a, b, vbool((a != vset(0)) & (b != vset(0))))
BINARY_NO_GRAD(Or, BOOL, OMC_OP_COMMUTES, a, b, vbool((a != vset(0)) | (b != vset(0))))
BINARY_NO_GRAD(Xor, BOOL, OMC_OP_COMMUTES, a, b, vbool((a != vset(0)) ^ (b != vset(0))))

BINARY_NO_GRAD(BitwiseAnd, INT, OMC_OP_COMMUTES, a, b, (vacc_t)((vmask)a & (vmask)b))
UNARY_NO_GRAD(BitwiseNot, INT, a, (vacc_t)((vmask)a ^ -1))
BINARY_NO_GRAD(BitwiseOr, INT, OMC_OP_COMMUTES, a, b, (vacc_t)((vmask)a | (vmask)b))
BINARY_NO_GRAD(BitwiseXor, INT, OMC_OP_COMMUTES, a, b, (vacc_t)((vmask)a ^ (vmask)b))

#if defined(OMC_VARIANT) && !OMC_IS_FLOAT
/* By fewer bits than none, or more than there are, is by all: as in PyTorch the sign stays. Those
 * of narrower integers are lost when the result is stored. */
OMC_INLINE bool is_by_all(int64_t bits) { return bits < 0 || bits > 63; }
OMC_INLINE int64_t shifted_left(int64_t x, int64_t bits) {
  return is_by_all(bits) ? 0 : (int64_t)((uint64_t)x << bits);
}
OMC_INLINE int64_t shifted_right(int64_t x, int64_t bits) {
  return x >> (is_by_all(bits) ? 63 : bits);
}
OMC_INLINE vacc_t shifted(vacc_t a, vacc_t b, bool left) {
  return left ? OMC_LANES2(a, b, shifted_left) : OMC_LANES2(a, b, shifted_right);
}
#endif
BINARY_NO_GRAD_WITH(BitShift, INT, 0, i, a, b, shifted(a, b, i[0][0] != 0), node,
                    strcmp(omc_node_string(node, "direction"), "LEFT") == 0)

TERNARY(Where, CHOICE, a, b, c, vblend(a != vset(0), b, c), g, NULL,
        where(g, in(g, 0), dy(g), zero(g)), where(g, in(g, 0), zero(g), dy(g)))
