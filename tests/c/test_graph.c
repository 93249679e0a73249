#include "harness.h"

#include <stdlib.h>
#include <string.h>

#include "graph/edit.h"
#include "graph/schema.h"
#include "graph/text.h"
#include "graph/verify.h"

static const char diamond[] =
    "input %x : f32[2,3] grad\n"
    "const %two : f32[] = [2.0]\n"
    "%a = Relu(%x)\n"
    "%b = Mul(%a, %two)\n"
    "%c = Add(%a, %b)\n"
    "return %c\n";

static omc_graph *parse(const char *text) {
  omc_graph *g = NULL;
  CHECK_OK(omc_graph_parse(omc_default_allocator(), text, strlen(text), NULL, NULL, &g));
  return g;
}

static void check_prints(const omc_graph *g, const char *text) {
  char *printed;
  size_t bytes;
  REQUIRE_OK(omc_graph_print(g, omc_default_allocator(), &printed, &bytes));
  CHECK_TEXT(printed, text);
  omc_free(omc_default_allocator(), printed, 1, bytes);
}

/* The output of the n-th node. */
static omc_value *nth(const omc_graph *g, int n) {
  const omc_node *node = g->first;
  while (n--) node = node->next;
  return node->out[0];
}

TEST(graph_built_by_hand_is_valid_and_prints) {
  const omc_type type = {OMC_F32, {1, {4}}};
  const int64_t args[] = {0, -1, -1}, outs[] = {1}, dtypes[] = {1};
  const double imm[] = {0.5, 2};
  const char *const ops[] = {"a", "b\"c"};
  const omc_attr attrs[] = {
      {"ops", OMC_ATTR_STRINGS, 2, {.ss = ops}}, omc_attr_ints("args", args, 3),
      {"imm", OMC_ATTR_FLOATS, 2, {.fs = imm}},  omc_attr_ints("outs", outs, 1),
      omc_attr_ints("dtypes", dtypes, 1),        omc_attr_string("class", "f32")};
  omc_graph *g;
  omc_value *x, *dy;
  omc_node *y, *dx;
  REQUIRE_OK(omc_graph_create(omc_default_allocator(), &g));
  CHECK_OK(omc_graph_add_input(g, "x", &type, true, &x));
  const omc_node_spec forward = {.op = OMC_OP_FusedElementwise,
                                 .name = "/h",
                                 .n_in = 1,
                                 .n_out = 1,
                                 .n_attr = 6,
                                 .in = &x,
                                 .attr = attrs};
  REQUIRE_OK(omc_graph_add_node(g, &forward, &y));
  y->out[0]->type = type;
  CHECK_OK(omc_graph_set_result(g, y->out, 1, 0));
  CHECK_OK(omc_graph_verify(g, true));
  CHECK_OK(omc_graph_add_grad(g, 0, &dy));
  CHECK_STATUS(omc_graph_add_grad(g, 0, &dy), EINVALID);
  CHECK_STATUS(omc_graph_add_grad(g, 1, &dy), EINVALID);
  omc_value *const in[] = {g->grads[0], NULL, y->out[0]};
  const omc_node_spec backward = {
      .op = OMC_OP_SoftmaxGrad, .phase = OMC_BACKWARD, .n_in = 3, .n_out = 1, .in = in};
  REQUIRE_OK(omc_graph_add_node(g, &backward, &dx));
  CHECK_OK(omc_graph_verify(g, false));
  CHECK_STATUS(omc_graph_verify(g, true), EINTERNAL);
  dx->out[0]->type = type;
  omc_value *const results[] = {y->out[0], dx->out[0]};
  CHECK_STATUS(omc_graph_set_result(g, results, 0, 2), EINVALID);
  CHECK_OK(omc_graph_set_result(g, results, 1, 1));
  CHECK_OK(omc_graph_verify(g, true));
  check_prints(g,
               "input %x : f32[4] grad\n"
               "grad %0 of 0 : f32[4]\n"
               "%1 : f32[4] = FusedElementwise(%x) {ops=[\"a\", \"b\\\"c\"], args=[0, -1, -1], "
               "imm=[0.5, 2.0], outs=[1], dtypes=[1], class=\"f32\"} name=\"/h\"\n"
               "backward:\n"
               "%2 : f32[4] = SoftmaxGrad(%0, _, %1)\n"
               "return %1 grads %2\n");
  omc_graph_destroy(g);
}

TEST(attributes_are_what_the_node_gives_or_the_default) {
  omc_graph *g = parse(
      "input %x : f32[1,1,4,4]\n"
      "%a = Elu(%x) {alpha=2, scale=0.5}\n"
      "%b = Softmax(%a) {axis=1}\n"
      "%c = Softmax(%b)\n"
      "%d = Gelu(%c) {approximate=\"tanh\"}\n"
      "%e = Gelu(%d)\n"
      "%f = Cast(%e) {to=11}\n"
      "%g = Conv(%f, %f) {strides=[2, 3], pads=[]}\n"
      "%h = Transpose(%g)\n"
      "return %h\n");
  const omc_node *node[8];
  for (int i = 0; i < 8; i++) node[i] = nth(g, i)->producer;
  int64_t list[4];
  uint32_t n;
  CHECK_FLOAT(omc_node_float(node[0], "alpha"), 2);
  CHECK_FLOAT(omc_node_float(node[0], "scale"), 0.5);
  CHECK_FLOAT(omc_node_float(node[0], "input_scale"), 1);
  CHECK_INT(omc_node_int(node[1], "axis"), 1);
  CHECK_INT(omc_node_int(node[2], "axis"), -1);
  CHECK_TEXT(omc_node_string(node[3], "approximate"), "tanh");
  CHECK_TEXT(omc_node_string(node[4], "approximate"), "none");
  CHECK_INT(omc_node_to_dtype(node[5], "to"), OMC_F64);
  CHECK_OK(omc_node_list(node[6], "strides", 2, list));
  CHECK(list[0] == 2 && list[1] == 3);
  CHECK_OK(omc_node_list(node[6], "dilations", 2, list));
  CHECK(list[0] == 1 && list[1] == 1);
  CHECK_OK(omc_node_list(node[6], "pads", 4, list));
  CHECK(list[0] == 0 && list[3] == 0);
  CHECK_STATUS(omc_node_list(node[6], "strides", 3, list), ESHAPE);
  CHECK_CONTAINS(omc_status_detail(), "attribute 'strides' has 2 values, not 3");
  CHECK(omc_node_ints(node[6], "strides", &n)[1] == 3 && n == 2);
  CHECK(!omc_node_ints(node[7], "perm", &n) && n == 0);
  CHECK(omc_node_attr(node[7], "perm") == NULL && omc_node_attr(node[0], "alpha")->v.i == 2);
  omc_graph_destroy(g);
}

TEST(defaults_are_allowed_and_names_are_one_each) {
  for (int op = 0; op < OMC_N_OPS; op++) {
    uint32_t n;
    const omc_attr_schema *list = omc_schema_of((omc_op_id)op, &n);
    for (uint32_t i = 0; i < n; i++) {
      const omc_attr_schema *s = &list[i];
      CHECK(omc_schema_find((omc_op_id)op, s->name) == s);
      if (s->required || s->absent) continue;
      omc_attr a = {.name = s->name, .kind = s->kind, .n = 1};
      if (s->kind == OMC_ATTR_INT) a.v.i = s->otherwise.i;
      if (s->kind == OMC_ATTR_INTS) a.v.is = &s->otherwise.i;
      if (s->kind == OMC_ATTR_FLOAT) a.v.f = s->otherwise.f;
      if (s->kind == OMC_ATTR_STRING) a.v.s = s->otherwise.s;
      const omc_node node = {.op = (omc_op_id)op, .n_attr = 1, .attr = &a};
      const omc_status status = omc_schema_check(&node);
      if (status != OMC_OK) CHECK_CONTAINS(omc_status_detail(), "is missing"); /* another one */
    }
  }
}

TEST(verifier_holds_attributes_to_the_schema) {
  omc_graph *g = parse("input %x : f32[2]\n%y = Softmax(%x) {axis=0} name=\"h\"\nreturn %y\n");
  const omc_attr renamed = omc_attr_int("axs", 0), retyped = omc_attr_float("axis", 0);
  omc_node *node = nth(g, 0)->producer;
  CHECK_OK(omc_graph_verify(g, false));
  node->attr = &renamed;
  CHECK_STATUS(omc_graph_verify(g, false), EUNSUPPORTED);
  CHECK_TEXT(omc_status_detail(), "Softmax 'h': it has no attribute 'axs', which is 0");
  node->attr = &retyped;
  CHECK_STATUS(omc_graph_verify(g, false), EINVALID);
  omc_graph_destroy(g);
}

TEST(a_refused_node_leaves_the_graph_as_it_was) {
  omc_graph *g = parse(diamond);
  const omc_attr wrong = omc_attr_int("to", 99);
  omc_value *x = g->inputs[0];
  omc_node *node;
  const omc_node_spec spec = {
      .op = OMC_OP_Cast, .n_in = 1, .n_out = 1, .n_attr = 1, .in = &x, .attr = &wrong};
  CHECK_STATUS(omc_graph_add_node(g, &spec, &node), EUNSUPPORTED);
  CHECK_TEXT(omc_status_detail(), "Cast: attribute 'to' is 99, not the ONNX code of a dtype");
  CHECK_OK(omc_graph_verify(g, false));
  check_prints(g, diamond);
  omc_graph_destroy(g);
}

TEST(names_of_values_are_checked) {
  const omc_type type = {OMC_F32, {0, {0}}};
  omc_graph *g;
  omc_value *v;
  REQUIRE_OK(omc_graph_create(omc_default_allocator(), &g));
  CHECK_STATUS(omc_graph_add_input(g, "a b", &type, false, &v), EINVALID);
  CHECK_STATUS(omc_graph_add_input(g, "", &type, false, &v), EINVALID);
  REQUIRE_OK(omc_graph_add_input(g, "a.b/c:0-d_e", &type, false, &v));
  CHECK_STATUS(omc_graph_name_value(g, v, "%a"), EINVALID);
  CHECK_OK(omc_graph_verify(g, true));
  omc_graph_destroy(g);
}

TEST(numbers_of_unnamed_values_avoid_names) {
  omc_graph *g = parse(
      "input %1 : f32[]\n"
      "%a = Relu(%1)\n"
      "%b = Relu(%a)\n"
      "%007 = Relu(%b)\n"
      "return %007\n");
  nth(g, 0)->name = nth(g, 1)->name = NULL;
  check_prints(g,
               "input %1 : f32[]\n"
               "%0 = Relu(%1)\n"
               "%2 = Relu(%0)\n"
               "%007 = Relu(%2)\n"
               "return %007\n");
  omc_graph_destroy(g);
}

static int n_uses(const omc_value *v) {
  int n = 0;
  for (const omc_use *use = v->uses; use; use = use->next) n++;
  return n;
}

TEST(replace_uses_reaches_the_result) {
  omc_graph *g = parse(diamond);
  omc_value *a = nth(g, 0), *b = nth(g, 1), *c = nth(g, 2);
  CHECK_INT(n_uses(a), 2);
  omc_replace_uses(c, b);
  omc_replace_uses(a, a);
  CHECK_INT(n_uses(c), 0);
  CHECK(omc_in(g->result, 0) == b);
  CHECK_OK(omc_graph_verify(g, false));
  CHECK_INT(omc_erase_unused(g), 1);
  CHECK_INT(n_uses(a), 1);
  CHECK_OK(omc_graph_verify(g, false));
  check_prints(g,
               "input %x : f32[2,3] grad\n"
               "const %two : f32[] = [2.0]\n"
               "%a = Relu(%x)\n"
               "%b = Mul(%a, %two)\n"
               "return %b\n");
  omc_graph_destroy(g);
}

TEST(erase_unused_takes_chains_in_one_sweep) {
  omc_graph *g = parse(diamond);
  omc_replace_uses(nth(g, 2), g->inputs[0]);
  CHECK_INT(omc_erase_unused(g), 3);
  CHECK(g->first == NULL && g->last == NULL);
  CHECK_INT(n_uses(g->inputs[0]), 1);
  CHECK_OK(omc_graph_verify(g, false));
  check_prints(g, "input %x : f32[2,3] grad\nreturn %x\n");
  omc_graph_destroy(g);
}

TEST(clone_is_its_own_graph) {
  omc_graph *g = parse(diamond), *clone;
  REQUIRE_OK(omc_graph_clone(g, omc_default_allocator(), &clone));
  CHECK_OK(omc_graph_verify(clone, false));
  CHECK(nth(clone, 1)->id == nth(g, 1)->id && nth(clone, 1) != nth(g, 1));
  CHECK(omc_in(clone->first->next, 1)->data == omc_in(g->first->next, 1)->data);
  omc_replace_uses(nth(clone, 2), nth(clone, 0));
  omc_erase_unused(clone);
  CHECK_OK(omc_graph_verify(clone, false));
  check_prints(g,
               "input %x : f32[2,3] grad\n"
               "const %two : f32[] = [2.0]\n"
               "%a = Relu(%x)\n"
               "%b = Mul(%a, %two)\n"
               "%c = Add(%a, %b)\n"
               "return %c\n");
  omc_graph_destroy(clone);
  omc_graph_destroy(g);
}

static float kept[2];
static omc_status keep(void *ctx, const void *elements, size_t bytes, const void **out) {
  uint32_t *n = ctx;
  CHECK_INT(bytes, sizeof(float));
  kept[*n] = *(const float *)elements;
  *out = &kept[(*n)++];
  return OMC_OK;
}

TEST(compact_keeps_what_is_in_use) {
  uint32_t n_kept = 0;
  omc_graph *g = parse(diamond);
  const void *two = omc_in(g->first->next, 1)->data;
  omc_replace_uses(nth(g, 2), nth(g, 1));
  omc_erase_unused(g);
  CHECK_INT(g->n_values, 5);
  REQUIRE_OK(omc_graph_compact(&g, keep, &n_kept));
  CHECK_INT(g->n_values, 4);
  CHECK_OK(omc_graph_verify(g, false));
  CHECK(omc_in(g->first->next, 1)->data != two && omc_in(g->first->next, 1)->data == kept);
  CHECK_INT(n_kept, 1);
  check_prints(g,
               "input %x : f32[2,3] grad\n"
               "const %two : f32[] = [2.0]\n"
               "%a = Relu(%x)\n"
               "%b = Mul(%a, %two)\n"
               "return %b\n");
  omc_graph_destroy(g);
}

/* Each breaks one invariant of the diamond. */
static void swap_nodes(omc_graph *g) {
  omc_node *last = g->last;
  g->last = last->prev;
  g->last->next = NULL;
  omc_link_node(g, last, g->first);
}
static void forget_use(omc_graph *g) { nth(g, 0)->uses = nth(g, 0)->uses->next; }
static void cross_use(omc_graph *g) { g->last->in[0].value = g->inputs[0]; }
static void same_name(omc_graph *g) { nth(g, 0)->name = "x"; }
static void same_id(omc_graph *g) { nth(g, 0)->id = 0; }
static void large_id(omc_graph *g) { nth(g, 0)->id = g->n_values; }
static void wrong_producer(omc_graph *g) { nth(g, 0)->producer = g->last; }
static void wrong_index(omc_graph *g) { nth(g, 0)->index = 1; }
static void wrong_last(omc_graph *g) { g->last = g->first; }
static void wrong_role(omc_graph *g) { g->inputs[0]->role = OMC_ROLE_GRAD; }
static void wrong_phase(omc_graph *g) { g->first->phase = OMC_BACKWARD; }
static void backward_output(omc_graph *g) { g->last->phase = OMC_BACKWARD; }
static void no_output(omc_graph *g) { omc_set_input(g->result, 0, NULL); }
static void no_data(omc_graph *g) { omc_in(g->first->next, 1)->data = NULL; }
static void wrong_count(omc_graph *g) { g->n_grads = 1; }
static void use_after_erase(omc_graph *g) { omc_erase_node(g, g->first); }

TEST(verifier_finds_every_broken_invariant) {
  static const struct {
    const char *name;
    void (*corrupt)(omc_graph *g);
  } rows[] = {
#define ROW(f) {#f, f}
      ROW(swap_nodes), ROW(forget_use), ROW(cross_use),      ROW(same_name),
      ROW(same_id),    ROW(large_id),   ROW(wrong_producer), ROW(wrong_index),
      ROW(wrong_last), ROW(wrong_role), ROW(wrong_phase),    ROW(backward_output),
      ROW(no_output),  ROW(no_data),    ROW(wrong_count),    ROW(use_after_erase)};
#undef ROW
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    omc_graph *g = parse(diamond);
    REQUIRE(g);
    CHECK_OK(omc_graph_verify(g, false));
    rows[i].corrupt(g);
    if (!CHECK_STATUS(omc_graph_verify(g, false), EINTERNAL)) CHECK_TEXT(rows[i].name, "found");
    omc_graph_destroy(g);
  }
}
