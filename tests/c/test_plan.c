#include "harness.h"

#include <stdlib.h>
#include <string.h>

#include "autodiff/autodiff.h"
#include "graph/text.h"
#include "ops/builder.h"
#include "passes/passes.h"
#include "plan/plan.h"

/* Parses and types a graph whose inputs have concrete types. */
static omc_graph *typed(const char *text) {
  const omc_allocator *a = omc_default_allocator();
  omc_graph *g = NULL;
  if (!CHECK_OK(omc_graph_parse(a, text, strlen(text), NULL, NULL, &g))) return NULL;
  for (omc_node *node = g->first; node; node = node->next)
    CHECK_OK(omc_op_get(node->op)->infer(node));
  return g;
}

static omc_plan *plan_of(const char *text, bool retain_graph) {
  omc_graph *g = typed(text);
  omc_plan *plan = NULL;
  if (g)
    CHECK_OK(omc_plan_create(g, omc_provider_host(), retain_graph, omc_default_allocator(), &plan));
  return plan;
}

static const omc_slot *slot_of(const omc_plan *plan, const char *name) {
  for (const omc_node *node = plan->graph->first; node; node = node->next)
    for (uint32_t k = 0; k < node->n_out; k++)
      if (node->out[k] && node->out[k]->name && !strcmp(node->out[k]->name, name))
        return &plan->slots[node->out[k]->id];
  static const omc_slot none = {.place = OMC_AT_NONE};
  CHECK_TEXT(name, "name of a value");
  return &none;
}

TEST(plan_forward_chain_in_place) {
  omc_plan *plan = plan_of(
      "input %x : f32[64,16]\n"
      "%a = Exp(%x)\n"
      "%b = Relu(%a)\n"
      "%c = Transpose(%b) {perm=[1, 0]}\n"
      "%d = Neg(%c)\n"
      "%e = Exp(%d)\n"
      "return %e\n",
      false);
  REQUIRE(plan);
  CHECK_INT(plan->n_steps, 5);
  CHECK_INT(plan->n_forward, 5);
  CHECK_INT(plan->n_copies, 0);
  CHECK_INT(slot_of(plan, "b")->offset, slot_of(plan, "a")->offset);
  CHECK_INT(slot_of(plan, "d")->offset, slot_of(plan, "c")->offset);
  CHECK_INT(slot_of(plan, "e")->place, OMC_AT_OUTPUT);
  CHECK_INT(plan->bound_bytes, plan->arena_bytes);
  CHECK(!plan->consumes && !plan->random);
  omc_plan_release(plan);
}

TEST(plan_views_cost_nothing) {
  omc_plan *plan = plan_of(
      "input %x : f32[4,8]\n"
      "const %s : i64[1] = [32]\n"
      "%a = Exp(%x)\n"
      "%v = Reshape(%a, %s)\n"
      "%w = Identity(%v)\n"
      "return %w\n",
      false);
  REQUIRE(plan);
  CHECK_INT(plan->n_steps, 1);
  CHECK_INT(plan->n_copies, 0);
  CHECK_INT(slot_of(plan, "a")->place, OMC_AT_OUTPUT);
  CHECK_INT(slot_of(plan, "w")->place, OMC_AT_OUTPUT);
  omc_plan_release(plan);
}

TEST(plan_results_that_are_copied) {
  omc_plan *plan = plan_of(
      "input %x : f32[4]\n"
      "const %c : f32[2] = [1.0, 2.0]\n"
      "%a = Exp(%x)\n"
      "%v = Identity(%x)\n"
      "return %a, %x, %c, %a, %v\n",
      false);
  REQUIRE(plan);
  CHECK_INT(plan->n_steps, 1);
  REQUIRE(plan->n_copies == 4 && plan->parts[OMC_FORWARD].end_copy == 4);
  for (uint32_t i = 0; i < 4; i++) CHECK_INT(plan->copies[i].to, i + 1);
  omc_plan_release(plan);
}

static const char *joint_text =
    "input %x : f32[8,16] grad\n"
    "input %w : f32[16,32] grad\n"
    "grad %g of 0 : f32[8,32]\n"
    "%a = MatMul(%x, %w)\n"
    "%b = Exp(%a)\n"
    "%y = Sin(%b)\n"
    "backward:\n"
    "%cos = Cos(%b)\n"
    "%gb = Mul(%g, %cos)\n"
    "%ga = Mul(%b, %gb)\n"
    "%gx = FusedMatMul(%ga, %w) {transB=1}\n"
    "%gw = FusedMatMul(%x, %ga) {transA=1}\n"
    "return %y grads %gx, %gw\n";

TEST(plan_joint_saves_and_consumes) {
  omc_plan *plan = plan_of(joint_text, false);
  REQUIRE(plan);
  CHECK_INT(plan->n_forward, 3);
  CHECK_INT(plan->n_steps, 8);
  const omc_part *backward = &plan->parts[OMC_BACKWARD];
  CHECK(backward->reads_input[0] && backward->reads_input[1]);
  CHECK(!backward->reads_output[0]);
  CHECK_INT(plan->forward_bytes, 8 * 32 * 4);
  CHECK(plan->consumes); /* %ga takes over %b */
  CHECK_INT(slot_of(plan, "gx")->place, OMC_AT_RESULT);
  CHECK_INT(slot_of(plan, "gw")->index, 1);
  omc_plan_release(plan);
}

TEST(plan_retain_keeps_what_forward_saved) {
  omc_plan *once = plan_of(joint_text, false), *often = plan_of(joint_text, true);
  REQUIRE(once && often);
  CHECK(often->retain_graph && !often->consumes);
  CHECK_INT(slot_of(often, "b")->end, often->n_steps - 1);
  CHECK(often->arena_bytes >= once->arena_bytes);
  omc_plan_release(once);
  omc_plan_release(often);
}

TEST(plan_gradient_of_two_inputs_is_copied) {
  omc_plan *plan = plan_of(
      "input %x : f32[4] grad\n"
      "input %z : f32[4] grad\n"
      "grad %g of 0 : f32[4]\n"
      "%y = Add(%x, %z)\n"
      "backward:\n"
      "%n = Exp(%g)\n"
      "return %y grads %n, %n\n",
      false);
  REQUIRE(plan);
  CHECK_INT(plan->parts[OMC_FORWARD].end_copy, 0);
  REQUIRE(plan->n_copies == 1);
  CHECK_INT(plan->copies[0].to, 2);
  omc_plan_release(plan);
}

TEST(plan_gradient_that_is_the_given_one) {
  omc_plan *plan = plan_of(
      "input %x : f32[4] grad\n"
      "grad %g of 0 : f32[4]\n"
      "%y = Identity(%x)\n"
      "return %y grads %g\n",
      false);
  REQUIRE(plan);
  CHECK_INT(plan->n_steps, 0);
  CHECK_INT(plan->n_copies, 2);
  CHECK_INT(plan->arena_bytes, 0);
  omc_plan_release(plan);
}

TEST(plan_shared_input_is_not_taken_over) {
  omc_plan *plan = plan_of(
      "input %x : f32[8,8]\n"
      "%a = Exp(%x)\n"
      "%b = MatMul(%a, %a)\n"
      "%c = Add(%b, %a)\n"
      "%d = SoftmaxGrad(%c, %c)\n"
      "%e = Exp(%d)\n"
      "return %e\n",
      false);
  REQUIRE(plan);
  CHECK(slot_of(plan, "b")->offset != slot_of(plan, "a")->offset);
  CHECK(slot_of(plan, "c")->offset == slot_of(plan, "b")->offset ||
        slot_of(plan, "c")->offset == slot_of(plan, "a")->offset);
  CHECK(slot_of(plan, "d")->offset != slot_of(plan, "c")->offset);
  omc_plan_release(plan);
}

/* ---- outputs that are written over inputs ---- */

static const omc_slot *slot_of_over(const char *text, const char *name, uint32_t n_copies) {
  static omc_slot slot;
  omc_plan *plan = plan_of(text, false);
  if (!plan) return &slot;
  slot = *slot_of(plan, name);
  CHECK_INT(plan->n_copies, n_copies);
  omc_plan_release(plan);
  return &slot;
}

TEST(plan_update_is_computed_where_its_input_is) {
  const omc_slot *slot = slot_of_over(
      "input %x : f32[4,3]\n"
      "input %mean : f32[3]\n"
      "input %var : f32[3]\n"
      "%y, %m, %r, %new_mean, %new_var = BatchNorm(%x, _, _, %mean, %var)\n"
      "%z = Exp(%y)\n"
      "return %z, %new_mean over %mean, %new_var over %var\n",
      "new_var", 0);
  CHECK_INT(slot->place, OMC_AT_INPUT);
  CHECK_INT(slot->index, 2);
}

TEST(plan_update_waits_for_those_that_read_its_input) {
  const omc_slot *slot = slot_of_over(
      "input %old : f32[4]\n"
      "%new = Exp(%old)\n"
      "%y = Mul(%old, %new)\n"
      "return %y, %new over %old\n",
      "new", 1);
  CHECK_INT(slot->place, OMC_AT_ARENA);
}

TEST(plan_update_waits_for_steps_that_may_fail) {
  const omc_slot *slot = slot_of_over(
      "input %old : f32[4]\n"
      "input %ids : i64[2]\n"
      "%new = Exp(%old)\n"
      "%other = Exp(%new)\n"
      "%y = Gather(%other, %ids)\n"
      "return %y, %new over %old\n",
      "new", 1);
  CHECK_INT(slot->place, OMC_AT_ARENA);
}

TEST(plan_update_that_backward_reads_is_kept_apart) {
  const omc_slot *slot = slot_of_over(
      "input %x : f32[4] grad\n"
      "input %old : f32[4]\n"
      "grad %g of 0 : f32[4]\n"
      "%new = Exp(%old)\n"
      "%y = Mul(%x, %new)\n"
      "backward:\n"
      "%gx = Mul(%g, %new)\n"
      "return %y, %new over %old grads %gx, _\n",
      "new", 1);
  CHECK_INT(slot->place, OMC_AT_ARENA);
}

TEST(plan_update_to_what_it_was_is_nothing) {
  slot_of_over(
      "input %old : f32[4]\n"
      "%y = Exp(%old)\n"
      "%same = Identity(%old)\n"
      "return %y, %same over %old\n",
      "y", 0);
}

/* ---- live ranges before there is a plan ---- */

static size_t peak_of(const char *text, omc_liveness *l, omc_arena *arena) {
  omc_graph *g = typed(text);
  size_t live[16], peak = 0;
  if (!g) return 0;
  if (CHECK_OK(omc_live_ranges(g, false, arena, arena, l)) && CHECK(l->n_steps < 16) &&
      CHECK_OK(omc_live_bytes(l, 64, NULL, live)))
    peak = live[omc_live_peak(live, l->n_steps)];
  omc_graph_destroy(g);
  return peak;
}

TEST(live_ranges_tell_what_a_change_would_cost) {
  static const char head[] =
      "input %x : f32[64,64]\n"
      "%a = Exp(%x)\n"
      "%t = Transpose(%a) {perm=[1, 0]}\n"
      "%p = MatMul(%t, %t)\n";
  char kept[512], again[512];
  strcat(strcpy(kept, head), "%y = Add(%p, %t)\nreturn %y\n");
  strcat(strcpy(again, head), "%u = Transpose(%a) {perm=[1, 0]}\n%y = Add(%p, %u)\nreturn %y\n");
  omc_arena arena;
  omc_liveness l;
  omc_arena_init(&arena, omc_default_allocator());
  CHECK_INT(peak_of(kept, &l, &arena), 2 * 64 * 64 * 4);
  CHECK_INT(l.n_steps, 4);
  CHECK_INT(l.n_ranges, 3); /* a, t and p; y is the caller's */
  CHECK_INT(l.ranges[1].begin, 1);
  CHECK_INT(l.ranges[1].end, 3);
  CHECK_INT(peak_of(again, &l, &arena), 3 * 64 * 64 * 4);
  omc_arena_deinit(&arena);
}

TEST(live_bytes_count_scratch_memory) {
  omc_arena arena;
  omc_liveness l;
  size_t live[4], workspace[] = {0, 100, 0};
  omc_arena_init(&arena, omc_default_allocator());
  CHECK_INT(peak_of("input %x : f32[16]\n"
                    "%a = Exp(%x)\n"
                    "%b = Relu(%a)\n"
                    "%y = Exp(%b)\n"
                    "return %y\n",
                    &l, &arena),
            64);
  CHECK_OK(omc_live_bytes(&l, 64, workspace, live));
  CHECK_INT(live[0], 64);
  CHECK_INT(omc_live_peak(live, 3), 1);
  CHECK_INT(live[1], 64 + 128);
  workspace[1] = SIZE_MAX - 64;
  CHECK_STATUS(omc_live_bytes(&l, 64, workspace, live), ENOMEM);
  omc_arena_deinit(&arena);
}

/* Random graphs. */

typedef struct dice {
  uint64_t state;
} dice;

static uint32_t roll(dice *d, uint32_t n) {
  d->state = d->state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(d->state >> 33) % n;
}

#define SIDE 32 /* every value is a square, as large as a gradient that lends, or its 1-d view */
#define MOST 64

static omc_value *square(omc_builder *b, omc_value *x) {
  const omc_shape shape = {2, {SIDE, SIDE}};
  return omc_reshape(b, x, &shape);
}

static omc_value *random_node(omc_builder *b, dice *d, omc_value *x, omc_value *y) {
  static const int64_t perm[] = {1, 0};
  static const omc_shape flat = {1, {SIDE * SIDE}};
  omc_value *in[] = {square(b, x), square(b, y)};
  const omc_attr trans = omc_attr_int("transB", roll(d, 2));
  switch (roll(d, 7)) {
    case 0:
      return omc_binary(b, OMC_OP_Add, in[0], in[1]);
    case 1:
      return omc_binary(b, OMC_OP_Mul, in[0], in[1]);
    case 2:
      return omc_unary(b, OMC_OP_Relu, x);
    case 3:
      return omc_reshape(b, x, &flat);
    case 4:
      return omc_transpose(b, in[0], perm);
    case 5:
      return omc_unary(b, OMC_OP_Sin, x);
    default:
      return omc_nary(b, OMC_OP_FusedMatMul, 2, in, 1, &trans);
  }
}

/* A graph of `n` nodes or so with so many backwards. The caller owns it. */
static omc_graph *random_graph(dice *d, uint32_t n, uint32_t n_backwards) {
  static const omc_type type = {OMC_F32, {2, {SIDE, SIDE}}};
  omc_graph *g = NULL;
  omc_value *values[MOST + 3], *results[4];
  if (!CHECK_OK(omc_graph_create(omc_default_allocator(), &g))) return NULL;
  omc_builder b = {.graph = g, .phase = OMC_FORWARD};
  uint32_t n_values = 3;
  for (uint32_t i = 0; i < 3; i++)
    CHECK_OK(omc_graph_add_input(g, (const char *[]){"x", "y", "z"}[i], &type, true, &values[i]));
  while (n_values < n + 3) {
    omc_value *x = values[n_values - 1 - roll(d, n_values < 6 ? n_values : 6)];
    values[n_values] = random_node(&b, d, x, values[roll(d, n_values)]);
    n_values++;
  }
  CHECK_OK(b.status);
  for (uint32_t k = 0; k < 4; k++)
    results[k] = k == 0 ? values[n_values - 1] : values[roll(d, n_values)];
  CHECK_OK(omc_graph_set_result(g, results, 4, 0));
  for (uint32_t k = 1; k < 4; k++) /* some outputs are written over inputs */
    if (roll(d, 2) && omc_type_equal(&results[k]->type, &type))
      CHECK_OK(omc_graph_write_over(g, k, g->inputs[k - 1]));
  const bool out_grads[] = {true,       roll(d, 2), roll(d, 2), false, roll(d, 2), true,
                            roll(d, 2), false,      false,      false, true,       roll(d, 2)},
             in_grads[] = {true, true, roll(d, 2)};
  if (n_backwards) CHECK_OK(omc_differentiate(g, n_backwards, out_grads, in_grads));
  CHECK_OK(omc_save_overwritten(g));
  return g;
}

/* The caller's memory. */
typedef struct tensors {
  float *inputs[3], *outputs[4], *grads[4], *results[3]; /* of one backward */
} tensors;

static float *new_square(dice *d) {
  float *x = malloc(SIDE * SIDE * sizeof *x);
  for (int i = 0; i < SIDE * SIDE; i++) x[i] = (float)roll(d, 2000) / 2000 - 0.5f;
  return x;
}

static void tensors_init(tensors *m) {
  dice d = {7};
  for (int i = 0; i < 3; i++) m->inputs[i] = new_square(&d), m->results[i] = new_square(&d);
  for (int k = 0; k < 4; k++) m->outputs[k] = new_square(&d), m->grads[k] = new_square(&d);
}

static void tensors_free(tensors *m) {
  for (int i = 0; i < 3; i++) free(m->inputs[i]), free(m->results[i]);
  for (int k = 0; k < 4; k++) free(m->outputs[k]), free(m->grads[k]);
}

static omc_status call(const omc_call *kernel, const omc_node *node, void *const *data,
                       void *workspace) {
  omc_tensor in[8] = {{NULL, NULL}}, out[8] = {{NULL, NULL}};
  for (uint32_t i = 0; i < node->n_in; i++)
    if (omc_in(node, i)) in[i] = (omc_tensor){data[i], &omc_in(node, i)->type};
  for (uint32_t k = 0; k < node->n_out; k++)
    if (omc_out(node, k)) out[k] = (omc_tensor){data[node->n_in + k], &omc_out(node, k)->type};
  const omc_kernel_args args = {.in = in,
                                .out = out,
                                .n_in = node->n_in,
                                .n_out = node->n_out,
                                .params = kernel->params,
                                .workspace = workspace,
                                .threads = 1};
  return kernel->kernel(&args);
}

/* Where a plan says value v is. */
static void *at(const omc_plan *plan, const tensors *m, char *arena, const omc_value *v) {
  const omc_slot *slot = &plan->slots[v->id];
  switch (slot->place) {
    case OMC_AT_INPUT:
      return m->inputs[slot->index];
    case OMC_AT_OUTPUT:
      return m->outputs[slot->index];
    case OMC_AT_GRAD:
      return m->grads[slot->index];
    case OMC_AT_RESULT:
      return m->results[slot->index];
    case OMC_AT_LENT:
      return (char *)m->results[slot->index] + slot->offset;
    case OMC_AT_CONST:
      return (void *)(uintptr_t)v->data;
    default:
      return arena + slot->offset;
  }
}

static void run_phase(const omc_plan *plan, const tensors *m, char *arena, omc_phase phase) {
  const omc_part *part = &plan->parts[phase];
  for (uint32_t s = part->step; s < part->end_step; s++) {
    const omc_step *step = &plan->steps[s];
    void *data[16] = {NULL};
    for (uint32_t i = 0; i < step->n_in; i++)
      if (omc_in(step->node, i)) data[i] = at(plan, m, arena, omc_in(step->node, i));
    for (uint32_t k = 0; k < step->n_out; k++)
      if (omc_out(step->node, k)) data[step->n_in + k] = at(plan, m, arena, omc_out(step->node, k));
    const omc_call kernel = {.kernel = step->kernel, .params = step->params};
    CHECK_OK(call(&kernel, step->node, data, arena + step->workspace_offset));
  }
  for (uint32_t c = part->copy; c < part->end_copy; c++) {
    const uint32_t to = plan->copies[c].to;
    const omc_value *over = omc_over(plan->graph, to);
    memcpy(over     ? m->inputs[over->index]
           : to < 4 ? m->outputs[to]
                    : m->results[(to - 4) % 3],
           at(plan, m, arena, omc_in(plan->graph->result, to)), SIDE * SIDE * sizeof(float));
  }
}

/* Runs the nodes of a graph with memory of its own for each value, for the results of forward and
 * of one backward. */
static void run_graph(const omc_graph *g, const tensors *m, omc_phase phase) {
  omc_arena scratch;
  omc_arena_init(&scratch, omc_default_allocator());
  void **data = OMC_NEW_ARRAY(&scratch, void *, g->n_values);
  for (uint32_t i = 0; i < 3; i++) data[g->inputs[i]->id] = m->inputs[i];
  for (uint32_t k = 0; k < 4; k++)
    if (g->grads && g->grads[k]) data[g->grads[k]->id] = m->grads[k];
  for (const omc_node *node = g->first; node; node = node->next) {
    void *operands[16] = {NULL};
    for (uint32_t i = 0; i < node->n_in; i++)
      if (omc_in(node, i))
        operands[i] = omc_is_const(omc_in(node, i)) ? (void *)(uintptr_t)omc_in(node, i)->data
                                                    : data[omc_in(node, i)->id];
    for (uint32_t k = 0; k < node->n_out; k++)
      if (omc_out(node, k))
        operands[node->n_in + k] = data[omc_out(node, k)->id] =
            omc_arena_alloc(&scratch, SIDE * SIDE, 8);
    if (omc_op_get(node->op)->flags & OMC_OP_VIEW) {
      data[node->out[0]->id] = operands[0];
      continue;
    }
    omc_call kernel;
    if (!CHECK_OK(omc_provider_host()->prepare(NULL, node, 1, &scratch, &kernel))) break;
    CHECK_OK(
        call(&kernel, node, operands, omc_arena_alloc(&scratch, kernel.workspace_bytes + 1, 1)));
  }
  for (uint32_t r = 0; r < g->result->n_in; r++) {
    const omc_value *v = omc_in(g->result, r);
    if (!v || (r >= 4 && omc_result_phase(g, r) != phase)) continue;
    const void *from = omc_is_const(v) ? v->data : data[v->id];
    memcpy(r < 4 ? m->outputs[r] : m->results[(r - 4) % 3], from, SIDE * SIDE * sizeof(float));
  }
  omc_arena_deinit(&scratch);
}

static bool same_results(const tensors *a, const tensors *b) {
  bool same = true;
  for (int k = 0; k < 4; k++)
    same &= !memcmp(a->outputs[k], b->outputs[k], SIDE * SIDE * sizeof(float));
  for (int i = 0; i < 3; i++)
    same &= !memcmp(a->results[i], b->results[i], SIDE * SIDE * sizeof(float));
  return same;
}

/* Takes the outputs that were written over inputs from there, and spoils these as the next forward
 * would. */
static void take_written(const omc_plan *plan, const tensors *m) {
  for (uint32_t k = 0; k < 4; k++) {
    const omc_value *over = omc_over(plan->graph, k);
    if (over) memcpy(m->outputs[k], m->inputs[over->index], SIDE * SIDE * sizeof(float));
  }
  for (uint32_t k = 0; k < 4; k++)
    if (omc_over(plan->graph, k))
      memset(m->inputs[omc_over(plan->graph, k)->index], 0xff, SIDE * SIDE * sizeof(float));
}

/* Runs forward and, in any order, as many backwards as the plan allows; all must be right. */
static void check_runs(const omc_plan *plan, dice *d, uint32_t n_backwards) {
  char *arena = malloc(plan->arena_bytes + 1);
  memset(arena, 0xff, plan->arena_bytes);
  tensors planned, plain;
  tensors_init(&planned);
  run_phase(plan, &planned, arena, OMC_FORWARD);
  take_written(plan, &planned);
  for (int i = 0; i < (plan->consumes ? 1 : 5); i++) {
    const omc_phase phase = OMC_BACKWARD + (n_backwards ? roll(d, n_backwards) : 0);
    tensors_init(&plain);
    for (int k = 0; k < 3 && i > 0; k++) /* new memory, as forward's is taken */
      memcpy(planned.results[k], plain.results[k], SIDE * SIDE * sizeof(float));
    run_phase(plan, &planned, arena, phase);
    run_graph(plan->graph, &plain, phase);
    CHECK(same_results(&planned, &plain));
    tensors_free(&plain);
  }
  tensors_free(&planned);
  free(arena);
}

TEST(plan_random_graphs_compute_the_same) {
  for (uint32_t seed = 0; seed < 400; seed++) {
    dice d = {seed};
    const uint32_t n = 2 + roll(&d, MOST - 2);
    const uint32_t n_backwards = seed % 4;
    const bool retain_graph = seed / 4 % 2;
    omc_graph *g = random_graph(&d, n, n_backwards);
    REQUIRE(g);
    omc_plan *plan = NULL;
    if (CHECK_OK(omc_plan_create(g, omc_provider_host(), retain_graph, omc_default_allocator(),
                                 &plan))) {
      check_runs(plan, &d, n_backwards);
      CHECK(plan->arena_bytes >= plan->bound_bytes);
      CHECK((double)plan->arena_bytes <= 1.1 * (double)plan->bound_bytes);
      CHECK(!retain_graph || !plan->consumes);
    }
    omc_plan_release(plan);
  }
}

TEST(plan_failing_allocator) {
  omc_test_memory memory;
  omc_test_memory_init(&memory);
  size_t n = 0;
  for (omc_status status = OMC_ENOMEM; status == OMC_ENOMEM && n < 10000; n++) {
    omc_graph *g = typed(joint_text);
    omc_plan *plan = NULL;
    memory.calls = 0;
    memory.fail_at = n;
    status = omc_plan_create(g, omc_provider_host(), false, &memory.allocator, &plan);
    CHECK(status == OMC_OK || status == OMC_ENOMEM);
    omc_plan_release(plan);
    CHECK_INT(memory.live_blocks, 0);
  }
  CHECK(n > 3);
}
