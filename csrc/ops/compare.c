/* Comparisons, logic and choice by a bool. */
#include "ops/elementwise.h"

BINARY_NO_GRAD(Equal, ANY_TO_BOOL, OMC_OP_COMMUTES, vbool(a == b))
BINARY_NO_GRAD(NotEqual, ANY_TO_BOOL, OMC_OP_COMMUTES, vbool(a != b))
BINARY_NO_GRAD(Less, ANY_TO_BOOL, 0, vbool(a < b))
BINARY_NO_GRAD(LessOrEqual, ANY_TO_BOOL, 0, vbool(a <= b))
BINARY_NO_GRAD(Greater, ANY_TO_BOOL, 0, vbool(a > b))
BINARY_NO_GRAD(GreaterOrEqual, ANY_TO_BOOL, 0, vbool(a >= b))

BINARY_NO_GRAD(And, BOOL, OMC_OP_COMMUTES, vbool((a != vset(0)) & (b != vset(0))))
BINARY_NO_GRAD(Or, BOOL, OMC_OP_COMMUTES, vbool((a != vset(0)) | (b != vset(0))))
BINARY_NO_GRAD(Xor, BOOL, OMC_OP_COMMUTES, vbool((a != vset(0)) ^ (b != vset(0))))

TERNARY(Where, CHOICE, vblend(a != vset(0), b, c), NULL, where(g, A, DY, zero(g)),
        where(g, A, zero(g), DY))
