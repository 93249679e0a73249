#include "harness.h"

#include <stdio.h>
#include <string.h>

#include "autodiff/autodiff.h"
#include "graph/text.h"
#include "graph/verify.h"
#include "ops/infer.h"
#include "ops/op.h"

typedef struct fixture {
  omc_test_memory memory;
  omc_graph *graph;
  omc_builder b;
  omc_value *x; /* f32[4,2,3] */
} fixture;

static bool setup(fixture *f) {
  const omc_type type = {OMC_F32, {3, {4, 2, 3}}};
  omc_test_memory_init(&f->memory);
  if (!CHECK_OK(omc_graph_create(&f->memory.allocator, &f->graph))) return false;
  f->b = (omc_builder){f->graph, NULL, OMC_FORWARD, "/here", OMC_OK};
  return CHECK_OK(omc_graph_add_input(f->graph, "x", &type, false, &f->x));
}

static void teardown(fixture *f) {
  omc_graph_destroy(f->graph);
  CHECK_INT(f->memory.live_bytes, 0);
}

static void check_type(const omc_value *v, const char *expected) {
  char text[OMC_TYPE_TEXT];
  REQUIRE(v);
  CHECK_TEXT(omc_type_text(&v->type, text, sizeof text), expected);
}

TEST(every_op_has_a_whole_record) {
  for (int op = 0; op < OMC_N_OPS; op++) {
    const omc_op *record = omc_op_get((omc_op_id)op);
    CHECK(record->infer != NULL || (record->flags & OMC_OP_CALLBACK));
    CHECK(record->min_in <= record->max_in && record->n_out > 0);
  }
}

TEST(builder_infers_types) {
  fixture f;
  if (!setup(&f)) return;
  const omc_shape flat = {2, {8, 3}}, wide = {4, {5, 4, 2, 3}}, small = {2, {2, 1}};
  const omc_shape scalar = {0, {0}};
  const int64_t perm[] = {2, 0, 1}, axes[] = {0, -1};
  const omc_type half = {OMC_F64, {2, {2, 2}}};
  check_type(omc_scalar(&f.b, f.x, 0.5), "f32[]");
  check_type(omc_ints(&f.b, perm, 3), "i64[3]");
  check_type(omc_ints(&f.b, NULL, 0), "i64[0]");
  check_type(omc_zeros(&f.b, &half), "f64[2,2]");
  check_type(omc_reshape(&f.b, f.x, &flat), "f32[8,3]");
  check_type(omc_transpose(&f.b, f.x, perm), "f32[3,4,2]");
  check_type(omc_expand(&f.b, f.x, &wide), "f32[5,4,2,3]");
  check_type(omc_reduce_sum(&f.b, f.x, axes, 2, true), "f32[1,2,1]");
  check_type(omc_reduce_sum(&f.b, f.x, axes, 2, false), "f32[2]");
  check_type(omc_sum_to(&f.b, f.x, &small), "f32[2,1]");
  check_type(omc_sum_to(&f.b, f.x, &scalar), "f32[]");
  check_type(omc_cast(&f.b, f.x, OMC_BF16), "bf16[4,2,3]");
  check_type(omc_binary(&f.b, OMC_OP_Add, f.x, omc_scalar(&f.b, f.x, 1)), "f32[4,2,3]");
  CHECK_OK(f.b.status);
  CHECK_OK(omc_graph_verify(f.graph, true));
  teardown(&f);
}

TEST(builder_gives_back_what_needs_no_node) {
  fixture f;
  if (!setup(&f)) return;
  const omc_shape same = f.x->type.shape;
  CHECK(omc_reshape(&f.b, f.x, &same) == f.x);
  CHECK(omc_expand(&f.b, f.x, &same) == f.x);
  CHECK(omc_sum_to(&f.b, f.x, &same) == f.x);
  CHECK(omc_cast(&f.b, f.x, OMC_F32) == f.x);
  CHECK(omc_reduce_sum(&f.b, f.x, NULL, 0, false) == f.x);
  CHECK(f.graph->first == NULL);
  CHECK_OK(f.b.status);
  teardown(&f);
}

TEST(builder_reshapes_to_empty_shapes) {
  fixture f;
  if (!setup(&f)) return;
  const omc_type empty = {OMC_F32, {2, {0, 3}}};
  const omc_shape other = {3, {3, 0, 7}};
  omc_value *e;
  REQUIRE_OK(omc_graph_add_input(f.graph, "e", &empty, false, &e));
  check_type(omc_reshape(&f.b, e, &other), "f32[3,0,7]");
  teardown(&f);
}

TEST(builder_latches_its_first_failure) {
  fixture f;
  if (!setup(&f)) return;
  const omc_shape bad = {1, {5}};
  omc_value *y = omc_reshape(&f.b, f.x, &bad);
  CHECK(!y);
  CHECK_STATUS(f.b.status, ESHAPE);
  CHECK_CONTAINS(omc_status_detail(), "Reshape '/here'");
  CHECK(f.graph->first == NULL);
  char first[256];
  strncpy(first, omc_status_detail(), sizeof first - 1);
  first[sizeof first - 1] = '\0';
  CHECK(!omc_unary(&f.b, OMC_OP_Relu, f.x));
  CHECK(!omc_binary(&f.b, OMC_OP_Add, y, f.x));
  CHECK(!omc_scalar(&f.b, y, 1));
  CHECK(!omc_scalar(&f.b, f.x, 1));
  CHECK(!omc_sum_to(&f.b, y, &bad));
  CHECK(!omc_cast(&f.b, y, OMC_F64));
  CHECK_STATUS(f.b.status, ESHAPE);
  CHECK_TEXT(omc_status_detail(), first);
  teardown(&f);
}

TEST(builder_takes_a_missing_input_for_a_failure) {
  fixture f;
  if (!setup(&f)) return;
  CHECK(!omc_binary(&f.b, OMC_OP_Add, f.x, NULL));
  CHECK_STATUS(f.b.status, EINTERNAL);
  CHECK_CONTAINS(omc_status_detail(), "Add for '/here'");
  teardown(&f);
}

TEST(arity_is_checked) {
  static const struct {
    const char *text, *detail;
  } rows[] = {{"%y = Relu(%x, %x)", "Relu: 2 inputs, not 1 to 1"},
              {"%y = Add(%x)", "Add: 1 inputs, not 2 to 2"},
              {"%y = Add(%x, _)", "Add: input 1 is left out"},
              {"%y, %z = Relu(%x)", "Relu: 2 outputs, not 1 to 1"}};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    char text[128] = "input %x : f32[2]\n";
    omc_graph *g;
    strcat(strcat(text, rows[i].text), "\nreturn %y\n");
    REQUIRE_OK(omc_graph_parse(omc_default_allocator(), text, strlen(text), NULL, NULL, &g));
    CHECK_STATUS(omc_node_check(g->first), EINVALID);
    CHECK_TEXT(omc_status_detail(), rows[i].detail);
    omc_graph_destroy(g);
  }
}

TEST(rules_name_the_node_and_the_input) {
  const char *text =
      "input %x : f32[2]\ninput %i : i64[3]\n%y = Add(%x, %i, _) name=\"/n\"\nreturn %y\n";
  omc_graph *g;
  REQUIRE_OK(omc_graph_parse(omc_default_allocator(), text, strlen(text), NULL, NULL, &g));
  omc_node *node = g->first;
  CHECK_STATUS(omc_infer_broadcast(node), EDTYPE);
  CHECK_TEXT(omc_status_detail(), "Add '/n': input 1 is i64, not f32");
  CHECK_STATUS(omc_need_float(node, 1), EDTYPE);
  CHECK_STATUS(omc_need_rank(node, 0, 2), ESHAPE);
  CHECK_TEXT(omc_status_detail(), "Add '/n': input 0 is f32[2], not of rank 2");
  CHECK_STATUS(omc_need_const(node, 0), EUNSUPPORTED);
  CHECK_STATUS(omc_need_const(node, 2), EINVALID);
  CHECK_OK(omc_need_float(node, 0));
  CHECK_INT(omc_node_dtype(node), OMC_F32);
  CHECK_OK(omc_infer_same(node));
  check_type(node->out[0], "f32[2]");
  omc_graph_destroy(g);
}

/* ---- cost ---- */

/* Of the node that gives %y, the last one. */
static void check_cost(const char *text, double flops, double bytes) {
  omc_graph *g = NULL;
  omc_cost cost = {-1, -1};
  REQUIRE_OK(omc_graph_parse(omc_default_allocator(), text, strlen(text), NULL, NULL, &g));
  for (omc_node *node = g->first; node; node = node->next)
    CHECK_OK(omc_op_get(node->op)->infer(node));
  CHECK_OK(omc_node_cost(g->last, &cost));
  CHECK_FLOAT(cost.flops, flops);
  CHECK_FLOAT(cost.bytes, bytes);
  omc_graph_destroy(g);
}

TEST(cost_of_products_is_exact) {
  check_cost("input %a : f32[5,2,3]\ninput %b : f32[3,7]\n%y = MatMul(%a, %b)\nreturn %y\n",
             2 * 10 * 3 * 7, 4 * (30 + 21 + 70));
  check_cost(
      "input %a : f64[2,3]\ninput %b : f64[7,3]\ninput %c : f64[7]\n"
      "%y = FusedMatMul(%a, %b, %c) {transB=1}\nreturn %y\n",
      2 * 2 * 3 * 7 + 2 * 7, 8 * (6 + 21 + 7 + 14));
  check_cost(
      "input %x : f32[2,6,9,9]\ninput %w : f32[8,3,3,3]\n"
      "%y = Conv(%x, %w) {strides=[2, 2], pads=[1, 1, 1, 1], group=2}\nreturn %y\n",
      2.0 * (2 * 8 * 5 * 5) * (3 * 3 * 3), 4 * (972 + 216 + 400));
  check_cost(
      "input %dy : f32[2,8,5,5]\ninput %x : f32[2,6,9,9]\n"
      "%y = ConvGradWeight(%dy, %x) "
      "{strides=[2, 2], pads=[1, 1, 1, 1], group=2, shape=[8, 3, 3, 3]}\nreturn %y\n",
      2.0 * (2 * 8 * 5 * 5) * (3 * 3 * 3), 4 * (972 + 216 + 400));
}

TEST(cost_of_attention_counts_the_pairs_that_meet) {
  static const char *const head =
      "input %q : f32[2,4,5,8]\ninput %k : f32[2,2,6,8]\ninput %v : f32[2,2,6,3]\n";
  const double moved = 4 * (2 * 4 * 5 * 8 + 2 * 2 * 6 * 8 + 2 * 2 * 6 * 3 + 2 * 4 * 5 * 3 + 40);
  char text[512];
  strcat(strcpy(text, head), "%y, %l = Attention(%q, %k, %v)\nreturn %y\n");
  check_cost(text, 2 * 4 * (5 * 6) * 2.0 * (8 + 3), moved);
  strcat(strcpy(text, head), "%y, %l = Attention(%q, %k, %v) {is_causal=1}\nreturn %y\n");
  check_cost(text, 2 * 4 * (1 + 2 + 3 + 4 + 5) * 2.0 * (8 + 3), moved);
}

TEST(cost_of_other_nodes_follows_from_their_types) {
  check_cost("input %a : f32[4,1]\ninput %b : f32[5]\n%y = Add(%a, %b)\nreturn %y\n", 20,
             4 * (4 + 5 + 20));
  check_cost(
      "input %a : f32[6,5]\nconst %one : i64[1] = [1]\n%y = ReduceSum(%a, %one)\nreturn %y\n", 30,
      4 * (30 + 6) + 8);
  check_cost("input %a : bf16[6,5]\n%y = Transpose(%a) {perm=[1, 0]}\nreturn %y\n", 0, 2 * 60);
  check_cost("input %t : f32[1000,4]\ninput %i : i64[3]\n%y = Gather(%t, %i)\nreturn %y\n", 0,
             2 * 48);
  check_cost("input %a : f32[6,5]\n%y = Identity(%a)\nreturn %y\n", 0, 0);
}

/* The rule of an op looks at all inputs that it may have, also those that a node leaves out. */
TEST(gradient_rules_may_ask_for_inputs_that_are_left_out) {
  static const char *const clips[] = {"Clip(%x)", "Clip(%x, %low)", "Clip(%x, _, %low)"};
  for (size_t i = 0; i < sizeof clips / sizeof *clips; i++) {
    char text[200];
    snprintf(text, sizeof text,
             "input %%x : f32[3] grad\ninput %%low : f32[] grad\n%%y = %s\nreturn %%y\n", clips[i]);
    omc_test_memory memory;
    omc_test_memory_init(&memory);
    omc_graph *g = NULL;
    REQUIRE_OK(omc_graph_parse(&memory.allocator, text, strlen(text), NULL, NULL, &g));
    CHECK_OK(omc_op_get(g->first->op)->infer(g->first));
    CHECK_OK(omc_differentiate(g, 1, (const bool[]){true}, (const bool[]){true, true}));
    CHECK((omc_in(g->result, 2) != NULL) == (i > 0));
    omc_graph_destroy(g);
  }
}
