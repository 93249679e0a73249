/* Comparisons, logic and choice by a bool. */
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

TERNARY(Where, CHOICE, a, b, c, vblend(a != vset(0), b, c), g, NULL,
        where(g, in(g, 0), dy(g), zero(g)), where(g, in(g, 0), zero(g), dy(g)))
