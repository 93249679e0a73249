/* The cells of recurrent layers, step by step: LstmCells, GruCells and RnnCells, as PyTorch has
 * them, and their gradients.
 *
 * The gates of a step are x, what the layer's input gives to them, for all steps at once, plus
 * p = h r' + bias, with r [gates * hidden, hidden]; h is the state before. In the order in which
 * the gates lie side by side, and with s the sigmoid function:
 *
 *   Lstm  i f g o   c' = s(f) c + s(i) tanh(g), h' = s(o) tanh(c')
 *   Gru   r z n     n' = tanh(x + s(r) p) of the last gate, h' = (h - n') s(z) + n'
 *   Rnn   h         h' = tanh(h) or relu(h)
 *
 * Inputs: x, r, bias?, h, c. Outputs: y, the states h of all steps; the last ones of h and c; and,
 * for the gradient, the gates after their functions, and of each unit what an Lstm has as c' and a
 * Gru as p of its last gate. */
#include "graph/schema.h"
#include "ops/forms.h"
#include "ops/infer.h"
#include "ops/op.h"

typedef struct cell_kind {
  omc_op_id forward, backward;
  uint32_t gates, states;
} cell_kind;

static const cell_kind *kind_of(const omc_node *node) {
  static const cell_kind kinds[] = {{OMC_OP_LstmCells, OMC_OP_LstmCellsGrad, 4, 2},
                                    {OMC_OP_GruCells, OMC_OP_GruCellsGrad, 3, 1},
                                    {OMC_OP_RnnCells, OMC_OP_RnnCellsGrad, 1, 1}};
  const cell_kind *kind = kinds;
  while (kind->forward != node->op && kind->backward != node->op) kind++;
  return kind;
}

/* Where the gradient op has what it reads; those from GATES on only if there are such. */
enum { R, H, Y, DY, DH, GATES, KEPT, C, DC, N_GRAD_IN };
#define LEFT_OUT (1u << DY | 1u << DH | 1u << DC) /* maybe */

static omc_shape shape_of_state(const omc_steps_form *p) {
  return (omc_shape){2, {p->batch, p->hidden}};
}
static omc_shape shape_of_states(const omc_steps_form *p) {
  return (omc_shape){3, {p->steps, p->batch, p->hidden}};
}
static omc_shape shape_of_gates(const omc_steps_form *p) {
  return (omc_shape){3, {p->steps, p->batch, p->gates * p->hidden}};
}

omc_status omc_steps_form_of(const omc_node *node, omc_steps_form *p) {
  const cell_kind *kind = kind_of(node);
  const bool backward = node->op == kind->backward;
  const uint32_t r = backward ? R : 1, h = backward ? H : 3, steps = backward ? Y : 0;
  OMC_TRY(omc_need_float(node, r));
  OMC_TRY(omc_need_float(node, h));
  OMC_TRY(omc_need_rank(node, h, 2));
  OMC_TRY(omc_need_rank(node, steps, 3));
  *p = (omc_steps_form){.steps = omc_in_shape(node, steps)->dims[0],
                        .batch = omc_in_shape(node, h)->dims[0],
                        .hidden = omc_in_shape(node, h)->dims[1],
                        .gates = kind->gates,
                        .states = kind->states,
                        .dtype = omc_in(node, r)->type.dtype,
                        .state = omc_in(node, h)->type.dtype,
                        .reverse = omc_node_int(node, "reverse") != 0};
  if (omc_schema_find(node->op, "relu")) p->relu = omc_node_int(node, "relu") != 0;
  if (p->steps == 0) OMC_NODE_FAIL(node, ESHAPE, "there are no steps");
  if (p->state != omc_dtype_acc(p->dtype)) OMC_TRY(omc_need_dtype(node, h, p->dtype));
  const omc_shape weight = {2, {p->gates * p->hidden, p->hidden}};
  return omc_need_type(node, r, "r", p->dtype, &weight);
}

static omc_status infer_cells(omc_node *node) {
  omc_steps_form p;
  OMC_TRY(omc_steps_form_of(node, &p));
  const uint32_t states = p.states;
  const omc_shape state = shape_of_state(&p), all = shape_of_states(&p), gates = shape_of_gates(&p);
  OMC_TRY(omc_need_type(node, 0, "x", p.dtype, &gates));
  OMC_TRY(omc_need_type(node, 2, "bias", p.dtype, &(omc_shape){1, {p.gates * p.hidden}}));
  OMC_TRY(omc_need_type(node, 4, "c", p.state, &state));
  omc_set_type(node, 0, p.state, &all);
  for (uint32_t k = 1; k <= states; k++) omc_set_type(node, k, p.state, &state);
  omc_set_type(node, states + 1, p.dtype, &gates);
  omc_set_type(node, states + 2, omc_dtype_acc(p.dtype), &all);
  return OMC_OK;
}

/* Outputs: the gradients of x, of h, and of c of an Lstm, or of p of a Gru, which x and p of the
 * others share. */
static omc_status infer_cells_grad(omc_node *node) {
  omc_steps_form p;
  OMC_TRY(omc_steps_form_of(node, &p));
  const bool has_c = p.states == 2;
  const omc_shape state = shape_of_state(&p), all = shape_of_states(&p), gates = shape_of_gates(&p);
  OMC_TRY(omc_need_type(node, Y, "y", p.state, &all));
  OMC_TRY(omc_need_type(node, DY, "dy", p.state, &all));
  OMC_TRY(omc_need_type(node, DH, "dh", p.state, &state));
  OMC_TRY(omc_need_type(node, GATES, "gates", p.dtype, &gates));
  OMC_TRY(omc_need_type(node, KEPT, "kept", omc_dtype_acc(p.dtype), &all));
  OMC_TRY(omc_need_type(node, C, "c", p.state, &state));
  OMC_TRY(omc_need_type(node, DC, "dc", p.state, &state));
  omc_set_type(node, 0, p.dtype, &gates);
  omc_set_type(node, 1, p.state, &state);
  omc_set_type(node, 2, has_c ? p.state : p.dtype, has_c ? &state : &gates);
  return OMC_OK;
}

/* The states that the steps begin with. */
static omc_value *states_before(omc_builder *b, const omc_node *node, const omc_steps_form *p) {
  const omc_shape one = {3, {1, p->batch, p->hidden}};
  omc_value *first = omc_reshape(b, omc_in(node, 3), &one);
  if (p->steps == 1) return first;
  const int64_t start = p->reverse ? 1 : 0, end = p->steps - 1 + start, axis = 0;
  omc_value *const slice[] = {omc_out(node, 0), omc_ints(b, &start, 1), omc_ints(b, &end, 1),
                              omc_ints(b, &axis, 1)};
  omc_value *others = omc_nary(b, OMC_OP_Slice, 4, slice, 0, NULL);
  omc_value *const both[] = {p->reverse ? others : first, p->reverse ? first : others};
  const omc_attr along = omc_attr_int("axis", axis);
  return omc_nary(b, OMC_OP_Concat, 2, both, 1, &along);
}

/* [steps, batch, n] as [steps * batch, n]. */
static omc_value *as_rows(omc_builder *b, omc_value *x, int64_t n, const omc_steps_form *p) {
  return omc_reshape(b, x, &(omc_shape){2, {p->steps * p->batch, n}});
}

static omc_status grad_cells(omc_grad *g) {
  const omc_node *node = g->node;
  const omc_op_id backward = kind_of(node)->backward;
  const uint32_t n_in = omc_op_get(backward)->max_in, n_out = omc_op_get(backward)->n_out;
  omc_builder *b = &g->b;
  omc_steps_form p;
  OMC_TRY(omc_steps_form_of(node, &p));
  OMC_TRY(omc_need_saved(g, omc_op_get(node->op)->n_out));
  omc_value *in[N_GRAD_IN] = {[R] = omc_in(node, 1),
                              [H] = omc_in(node, 3),
                              [Y] = omc_out(node, 0),
                              [DY] = g->grad_out[0],
                              [DH] = g->grad_out[1],
                              [GATES] = omc_out(node, p.states + 1),
                              [KEPT] = omc_out(node, p.states + 2),
                              [C] = omc_in(node, 4),
                              [DC] = p.states == 2 ? g->grad_out[2] : NULL};
  if (!in[DY] && !in[DH] && !in[DC]) return OMC_OK;
  omc_value *out[3];
  omc_build(b, backward, n_in, in, LEFT_OUT, node->n_attr, node->attr, n_out, out);
  omc_value *dp = p.states == 1 && n_out == 3 ? out[2] : out[0];
  g->grad_in[0] = out[0];
  g->grad_in[3] = out[1];
  if (p.states == 2) g->grad_in[4] = out[2];
  if (omc_in(node, 2)) g->grad_in[2] = dp;
  if (g->needs[1])
    g->grad_in[1] =
        omc_product(b, as_rows(b, dp, p.gates * p.hidden, &p), true,
                    as_rows(b, states_before(b, node, &p), p.hidden, &p), false, 1, NULL);
  return b->status;
}

/* The products of the states with r, or of the gradients with it. */
static omc_status cells_cost(const omc_node *node, omc_cost *cost) {
  omc_steps_form p;
  OMC_TRY(omc_steps_form_of(node, &p));
  cost->flops = 2.0 * (double)(p.steps * p.batch * p.gates) * (double)p.hidden * (double)p.hidden;
  return OMC_OK;
}

#define CELLS(name, in, out, saved)                                                         \
  OMC_RECORD(name, in, in, out, .optional = 1u << 2, .spared = saved, .infer = infer_cells, \
             .grad = grad_cells, .cost = cells_cost)
CELLS(LstmCells, 5, 5, 1u << 1 | 1u << 2 | 1u << 3 | 1u << 4)
CELLS(GruCells, 4, 4, 1u << 1 | 1u << 2 | 1u << 3)
CELLS(RnnCells, 4, 2, 1u << 1)

#define CELLS_GRAD(name, in, out, ...)                                                        \
  OMC_RECORD(name, in, in, out, .optional = LEFT_OUT, __VA_ARGS__, .infer = infer_cells_grad, \
             .cost = cells_cost)
CELLS_GRAD(LstmCellsGrad, N_GRAD_IN, 3, .in_place = 1u << GATES, .spared = 1u << 1 | 1u << 2)
CELLS_GRAD(GruCellsGrad, C, 3, .in_place = 1u << GATES, .spared = 1u << 1)
CELLS_GRAD(RnnCellsGrad, GATES, 2, .spared = 1u << 1)
