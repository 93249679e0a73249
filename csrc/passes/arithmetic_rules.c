/* Canonical forms of arithmetic: neutral elements go. */
#include "ops/op.h"
#include "passes/rewrite.h"

/* Captures 2: what is added; 0 would turn -0 to 0. */
static omc_value *add_zero(omc_match *m) {
  const double zero = omc_dtype_is_float(m->capture[2]->type.dtype) ? -0.0 : 0.0;
  return omc_const_all(m->capture[2], zero) ? omc_match_identity(m) : NULL;
}

static omc_value *as_sub(omc_match *m) {
  return omc_binary(m->b, OMC_OP_Sub, m->capture[1], m->capture[2]);
}

static omc_value *as_add(omc_match *m) {
  return omc_binary(m->b, OMC_OP_Add, m->capture[1], m->capture[2]);
}

/* Whether every value of `from` is also one of `to`. */
static bool holds_all(omc_dtype from, omc_dtype to) {
  const omc_dtype_info *a = omc_dtype_get(from), *b = omc_dtype_get(to);
  if (from == to || a->kind == OMC_KIND_BOOL) return true;
  if (a->kind != b->kind || from == OMC_U8 || to == OMC_U8) return false;
  return a->size < b->size;
}

static omc_value *cast_cast(omc_match *m) {
  const omc_value *x = m->capture[1], *between = m->capture[2];
  if (!holds_all(x->type.dtype, between->type.dtype)) return NULL;
  return omc_cast(m->b, m->capture[1], m->capture[0]->type.dtype);
}

static omc_value *where_constant(omc_match *m) {
  omc_value *chosen = omc_const_all(m->capture[1], 1)   ? m->capture[2]
                      : omc_const_all(m->capture[1], 0) ? m->capture[3]
                                                        : NULL;
  return chosen ? omc_expand(m->b, chosen, &m->capture[0]->type.shape) : NULL;
}

static omc_value *dropout_nothing(omc_match *m) {
  return omc_node_float(m->root, "p") == 0 ? m->capture[1] : NULL;
}

#define X OMC_P_ANY(1)

static const omc_rule rules[] = {
    {"add_zero", OMC_EXACT, OMC_P_OP(Add, 0, X, OMC_P_CONSTANT(2)), add_zero},
    {"sub_zero", OMC_EXACT, OMC_P_OP(Sub, 0, X, OMC_P_CONST(0)), omc_match_identity},
    {"mul_one", OMC_EXACT, OMC_P_OP(Mul, 0, X, OMC_P_CONST(1)), omc_match_identity},
    {"div_one", OMC_EXACT, OMC_P_OP(Div, 0, X, OMC_P_CONST(1)), omc_match_identity},
    {"neg_neg", OMC_EXACT, OMC_P_OP(Neg, 0, OMC_P_SHARED(Neg, 0, X)), omc_match_identity},
    {"not_not", OMC_EXACT, OMC_P_OP(Not, 0, OMC_P_SHARED(Not, 0, X)), omc_match_identity},
    {"add_neg", OMC_EXACT, OMC_P_OP(Add, 0, X, OMC_P_OP(Neg, 0, OMC_P_ANY(2))), as_sub},
    {"sub_neg", OMC_EXACT, OMC_P_OP(Sub, 0, X, OMC_P_OP(Neg, 0, OMC_P_ANY(2))), as_add},
    {"cast_same", OMC_EXACT, OMC_P_OP(Cast, 0, X), omc_match_identity},
    {"cast_cast", OMC_EXACT, OMC_P_OP(Cast, 0, OMC_P_SHARED(Cast, 2, X)), cast_cast},
    {"where_constant", OMC_EXACT, OMC_P_OP(Where, 0, OMC_P_CONSTANT(1), OMC_P_ANY(2), OMC_P_ANY(3)),
     where_constant},
    {"dropout_nothing", OMC_EXACT, OMC_P_OP(Dropout, 0, X), dropout_nothing},
};

const omc_rules omc_arithmetic_rules = {rules, sizeof rules / sizeof *rules};
