/* Comparisons, logic and choice by a bool. */
#include "cpu/elementwise.h"
#include "ops/infer.h"
#include "ops/op.h"

#ifdef OMC_VARIANT

#define ZERO_ONE(m) vblend((m), vset(1), vset(0))
#define TRUE_(x) ((x) != vset(0))

OMC_EW2(Equal, ZERO_ONE(a == b))
OMC_EW2(NotEqual, ZERO_ONE(a != b))
OMC_EW2(Less, ZERO_ONE(a < b))
OMC_EW2(LessOrEqual, ZERO_ONE(a <= b))
OMC_EW2(Greater, ZERO_ONE(a > b))
OMC_EW2(GreaterOrEqual, ZERO_ONE(a >= b))
OMC_EW2(And, ZERO_ONE(TRUE_(a) & TRUE_(b)))
OMC_EW2(Or, ZERO_ONE(TRUE_(a) | TRUE_(b)))
OMC_EW2(Xor, ZERO_ONE(TRUE_(a) ^ TRUE_(b)))
OMC_EW3(Where, vblend(TRUE_(a), b, c))

#endif

#ifdef OMC_RECORDS

static omc_status infer_logic(omc_node *node) {
  OMC_TRY(omc_need_dtype(node, 0, OMC_BOOL));
  return omc_infer_broadcast(node);
}

static omc_status infer_where(omc_node *node) {
  char text[OMC_NODE_TEXT];
  OMC_TRY(omc_need_dtype(node, 0, OMC_BOOL));
  const omc_type *a = &omc_in(node, 1)->type, *b = &omc_in(node, 2)->type;
  OMC_TRY(omc_need_dtype(node, 2, a->dtype));
  omc_shape shape;
  omc_node_text(node, text, sizeof text);
  OMC_TRY(omc_shape_broadcast(&a->shape, &b->shape, text, &shape));
  OMC_TRY(omc_shape_broadcast(&omc_in(node, 0)->type.shape, &shape, text, &shape));
  omc_set_type(node, 0, a->dtype, &shape);
  return OMC_OK;
}

static omc_status grad_where(omc_grad *g) {
  omc_value *const dy = g->dout[0], *const cond = omc_in(g->node, 0);
  omc_value *const zero = omc_scalar(&g->b, dy, 0);
  if (g->needs[1]) g->din[1] = omc_b3(&g->b, OMC_OP_Where, cond, dy, zero);
  if (g->needs[2]) g->din[2] = omc_b3(&g->b, OMC_OP_Where, cond, zero, dy);
  return g->b.status;
}

#define RECORD(name_, flags_, infer_)                                  \
  OMC_EWS_NUM(name_, NULL)                                             \
  const omc_op omc_op_##name_ = {.name = #name_,                       \
                                 .min_in = 2,                          \
                                 .max_in = 2,                          \
                                 .n_out = 1,                           \
                                 .flags = OMC_OP_POINTWISE | (flags_), \
                                 .infer = infer_,                      \
                                 .ew = &omc_ew_##name_};

RECORD(Equal, OMC_OP_COMMUTES, omc_infer_compare)
RECORD(NotEqual, OMC_OP_COMMUTES, omc_infer_compare)
RECORD(Less, 0, omc_infer_compare)
RECORD(LessOrEqual, 0, omc_infer_compare)
RECORD(Greater, 0, omc_infer_compare)
RECORD(GreaterOrEqual, 0, omc_infer_compare)
RECORD(And, OMC_OP_COMMUTES, infer_logic)
RECORD(Or, OMC_OP_COMMUTES, infer_logic)
RECORD(Xor, OMC_OP_COMMUTES, infer_logic)

OMC_EWS_NUM(Where, NULL)
const omc_op omc_op_Where = {.name = "Where",
                             .min_in = 3,
                             .max_in = 3,
                             .n_out = 1,
                             .flags = OMC_OP_POINTWISE,
                             .infer = infer_where,
                             .grad = grad_where,
                             .ew = &omc_ew_Where};

#endif
