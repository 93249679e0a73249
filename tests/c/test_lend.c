/* Gradients whose memory holds other values until they are written. */
#include "harness.h"

#include <string.h>

#include "graph/text.h"
#include "ops/op.h"
#include "plan/plan.h"
#include "run/session.h"
#include "sessions.h"

/* ---- plans ---- */

/* %b and %c are gone by the time that %gx is written, %a and %ga are read with it, and %gw is
 * written while %b is read. */
static const char *text =
    "input %x : f32[32,32] grad\n"
    "input %w : f32[32,32] grad\n"
    "grad %g of 0 : f32[32,32]\n"
    "%a = Exp(%x)\n"
    "%b = Sin(%a)\n"
    "%y = Mul(%b, %w)\n"
    "backward:\n"
    "%gw = Mul(%b, %g)\n"
    "%gb = Mul(%g, %w)\n"
    "%c = Cos(%a)\n"
    "%ga = Mul(%gb, %c)\n"
    "%gx = Mul(%ga, %a)\n"
    "return %y grads %gx, %gw\n";
enum { SQUARE = 32 * 32 * 4 };

static omc_plan *make(const char *from, bool retain_graph) {
  const omc_allocator *a = omc_default_allocator();
  omc_graph *g = NULL;
  omc_plan *plan = NULL;
  if (!CHECK_OK(omc_graph_parse(a, from, strlen(from), NULL, NULL, &g))) return NULL;
  for (omc_node *node = g->first; node; node = node->next)
    CHECK_OK(omc_op_get(node->op)->infer(node));
  CHECK_OK(omc_plan_create(g, omc_provider_host(), retain_graph, a, &plan));
  return plan;
}

static omc_slot *slot(omc_plan *plan, const char *name) {
  for (const omc_node *node = plan->graph->first; node; node = node->next)
    if (!strcmp(node->out[0]->name, name)) return &plan->slots[node->out[0]->id];
  static omc_slot none;
  CHECK_TEXT(name, "name of a value");
  return &none;
}

TEST(lend_what_is_gone_by_then) {
  omc_plan *plan = make(text, false);
  REQUIRE(plan);
  CHECK(plan->lends[0] && !plan->lends[1] && plan->lends_any);
  CHECK_INT(slot(plan, "b")->place, OMC_AT_LENT);
  CHECK_INT(slot(plan, "c")->place, OMC_AT_LENT);
  CHECK_INT(slot(plan, "b")->index, 0);
  CHECK_INT(slot(plan, "a")->place, OMC_AT_ARENA);
  CHECK_INT(slot(plan, "ga")->place, OMC_AT_ARENA);
  CHECK_INT(plan->lent_bytes, SQUARE);
  CHECK_INT(plan->arena_bytes, plan->bound_bytes);
  CHECK(plan->consumes);
  CHECK_INT(plan->forward_bytes, 2 * SQUARE);
  omc_plan_release(plan);
}

TEST(lend_nothing_that_is_kept) {
  omc_plan *plan = make(text, true);
  REQUIRE(plan);
  CHECK_INT(slot(plan, "b")->place, OMC_AT_ARENA);
  CHECK_INT(slot(plan, "c")->place, OMC_AT_LENT); /* of backward alone */
  CHECK(!plan->consumes);
  omc_plan_release(plan);
}

TEST(lend_only_what_every_backward_gives) {
  omc_plan *plan = make(
      "input %x : f32[32,32] grad\n"
      "input %w : f32[32,32] grad\n"
      "grad %g of 0 : f32[32,32]\n"
      "grad %h of 1 : f32[32,32]\n"
      "%a = Exp(%x)\n"
      "%b = Sin(%a)\n"
      "%y = MatMul(%b, %w)\n"
      "%z = Transpose(%w) {perm=[1, 0]}\n"
      "backward:\n"
      "%gb = FusedMatMul(%g, %w) {transB=1}\n"
      "%gw = FusedMatMul(%b, %g) {transA=1}\n"
      "%gx = Mul(%gb, %a)\n"
      "backward 1:\n"
      "%hw = Transpose(%h) {perm=[1, 0]}\n"
      "return %y, %z grads %gx, %gw, _, %hw\n",
      false);
  REQUIRE(plan);
  CHECK(!plan->lends[0]);
  omc_plan_release(plan);
}

/* Each backward is done with %a and %b before it gives %gx, though the other reads them later. */
TEST(lend_what_several_backwards_read) {
  omc_plan *plan = make(
      "input %x : f32[32,32] grad\n"
      "grad %g of 0 : f32[32,32]\n"
      "grad %h of 1 : f32[32,32]\n"
      "%a = Exp(%x)\n"
      "%b = Sin(%a)\n"
      "%y = Mul(%a, %b)\n"
      "%z = Add(%a, %b)\n"
      "backward:\n"
      "%gb = Mul(%g, %b)\n"
      "%gc = Mul(%gb, %a)\n"
      "%gx = Neg(%gc)\n"
      "backward 1:\n"
      "%hb = Mul(%h, %b)\n"
      "%hc = Mul(%hb, %a)\n"
      "%hx = Neg(%hc)\n"
      "return %y, %z grads %gx, %hx\n",
      false);
  REQUIRE(plan);
  CHECK(plan->lends[0] && plan->consumes);
  CHECK(slot(plan, "a")->place == OMC_AT_LENT || slot(plan, "b")->place == OMC_AT_LENT);
  plan->consumes = false;
  CHECK_STATUS(omc_plan_check(plan), EINTERNAL);
  CHECK_CONTAINS(omc_status_detail(), "may run backward again");
  plan->consumes = true;
  slot(plan, "gb")->place = slot(plan, "hc")->place = OMC_AT_LENT; /* read as %gx is written */
  slot(plan, "gc")->place = OMC_AT_LENT;
  slot(plan, "gb")->index = slot(plan, "gc")->index = slot(plan, "hc")->index = 0;
  slot(plan, "gb")->offset = slot(plan, "gc")->offset = slot(plan, "hc")->offset = 0;
  CHECK_STATUS(omc_plan_check(plan), EINTERNAL);
  omc_plan_release(plan);
}

TEST(lend_nothing_small) {
  omc_plan *plan = make(
      "input %x : f32[31,32] grad\n"
      "grad %g of 0 : f32[31,32]\n"
      "%a = Exp(%x)\n"
      "%y = Sin(%a)\n"
      "backward:\n"
      "%c = Cos(%a)\n"
      "%ga = Mul(%g, %c)\n"
      "%e = Mul(%ga, %a)\n"
      "%gx = Neg(%e)\n"
      "return %y grads %gx\n",
      false);
  REQUIRE(plan);
  CHECK(!plan->lends_any);
  CHECK_INT(plan->lent_bytes, 0);
  omc_plan_release(plan);
}

/* Spoils a fresh plan and expects the checker to say `why_`. */
#define CORRUPT(name_, why_, ...)                  \
  TEST(lend_check_rejects_##name_) {               \
    omc_plan *plan = make(text, false);            \
    REQUIRE(plan);                                 \
    __VA_ARGS__                                    \
    CHECK_STATUS(omc_plan_check(plan), EINTERNAL); \
    CHECK_CONTAINS(omc_status_detail(), why_);     \
    omc_plan_release(plan);                        \
  }

static void move_to(omc_plan *plan, const char *name, uint32_t lender) {
  slot(plan, name)->place = OMC_AT_LENT;
  slot(plan, name)->index = lender;
  slot(plan, name)->offset = 0;
}

CORRUPT(what_is_read_when_the_gradient_is_written, "written over a value that is live", {
  move_to(plan, "b", 1), plan->lends[1] = true, plan->lent_bytes += SQUARE;
  for (uint32_t i = 0; i < plan->n_saved; i++)
    if (plan->saved[i].lender == 0) plan->saved[i].lender = 1;
})
CORRUPT(what_is_written_after_the_gradient, "written over a gradient",
        { move_to(plan, "c", 1), plan->lends[1] = true, plan->lent_bytes += SQUARE; })
CORRUPT(what_does_not_lend, "saved where there is no memory", { plan->lends[0] = false; })
CORRUPT(what_is_no_input, "outside of what is lent", { slot(plan, "b")->index = 2; })
CORRUPT(what_is_larger, "outside of what is lent", { slot(plan, "b")->offset = 64; })
CORRUPT(what_is_misaligned, "not aligned", { slot(plan, "c")->offset = 4; })
CORRUPT(what_shares_memory, "written over a value that is live", { move_to(plan, "a", 0); })

TEST(lend_check_rejects_another_output_of_the_step) {
  omc_plan *plan = make(
      "input %x : f32[32,32] grad\n"
      "grad %g of 0 : f32[32,64]\n"
      "const %halves : i64[2] = [32, 32]\n"
      "%y = Concat(%x, %x) {axis=1}\n"
      "backward:\n"
      "%p, %gx = Split(%g, %halves) {axis=1}\n"
      "return %y grads %gx\n",
      false);
  REQUIRE(plan);
  plan->lends[0] = plan->lends_any = true, plan->lent_bytes = SQUARE;
  move_to(plan, "p", 0);
  CHECK_STATUS(omc_plan_check(plan), EINTERNAL);
  CHECK_CONTAINS(omc_status_detail(), "written over a value that is live");
  omc_plan_release(plan);
}

CORRUPT(saved_elsewhere, "not among what is saved", {
  for (uint32_t i = 0; i < plan->n_saved; i++) plan->saved[i].lender = OMC_NO_LENDER;
})
CORRUPT(saved_past_its_end, "saved where there is no memory", { plan->saved[0].offset += 1 << 20; })
CORRUPT(saved_in_what_is_no_input, "saved where there is no memory",
        { plan->saved[0].lender = 77; })
CORRUPT(lent_bytes_miscounted, "miscounted", { plan->lent_bytes = 0; })
CORRUPT(lending_denied, "miscounted", { plan->lends_any = false; })
CORRUPT(another_arena, "in another arena", { slot(plan, "a")->index = 1; })
CORRUPT(consumed_silently, "may run backward again", { plan->consumes = false; })

/* ---- runs ---- */

#define LAYER(x, n)             \
  "%t" n " = Transpose(%" x     \
  ") {perm=[1, 0]}\n"           \
  "%a" n " = Mul(%t" n ", %w" n \
  ")\n"                         \
  "%b" n " = Tanh(%a" n ")\n"
#define WEIGHT(n) "input %w" n " : f32[32,32] grad\n"
static const char *layers = "input %x : f32[32,32]\n" WEIGHT("1") WEIGHT("2") WEIGHT("3")
    WEIGHT("4") LAYER("x", "1") LAYER("b1", "2") LAYER("b2", "3") LAYER("b3", "4") "return %b4\n";
enum { N_IN = 5 };

typedef float square[32 * 32];

typedef struct scene {
  omc_session *session;
  omc_plan *plan;
  omc_run *run;
  square in[N_IN], y, dy, lent[N_IN], results[N_IN], expected[N_IN];
} scene;

static omc_status plan_layers(const omc_allocator *allocator, bool retain_graph, omc_session **s,
                              omc_plan **plan) {
  omc_type types[N_IN];
  bool in_grads[N_IN];
  for (int i = 0; i < N_IN; i++) types[i] = (omc_type){OMC_F32, {2, {32, 32}}}, in_grads[i] = i > 0;
  const bool out_grads[] = {true};
  const omc_signature signature = {types, in_grads, out_grads, 1, retain_graph, false};
  OMC_TRY(omc_session_create(layers, strlen(layers), NULL, NULL, NULL, omc_provider_host(),
                             allocator, 2, s));
  return omc_session_plan(*s, &signature, plan);
}

static void point(square *of, void **out) {
  for (int i = 0; i < N_IN; i++) out[i] = of[i];
}

static omc_status go_forward(scene *c, void *queue) {
  void *in[N_IN], *out[] = {c->y}, *lent[N_IN];
  point(c->in, in), point(c->lent, lent);
  return omc_run_forward(c->plan, in, out, lent, 1, queue, &c->run);
}

/* A backward that has begun, with the results where they must be. */
static omc_status go_back(scene *c, const omc_backward *begun) {
  void *in[N_IN], *out[] = {c->y}, *grads[] = {c->dy}, *results[N_IN];
  point(c->in, in), point(c->results, results);
  for (int i = 0; i < N_IN; i++)
    if (begun->takes_lent && c->plan->lends[i]) results[i] = c->lent[i];
  omc_backward b = *begun;
  b.inputs = in, b.outputs = out, b.grads = grads, b.results = results;
  OMC_TRY(omc_run_backward(c->run, &b));
  for (int i = 1; i < N_IN; i++) memcpy(c->results[i], results[i], sizeof c->results[i]);
  return OMC_OK;
}

static bool right(const scene *c) {
  bool same = true;
  for (int i = 1; i < N_IN; i++) same &= !memcmp(c->results[i], c->expected[i], sizeof(square));
  return same;
}

static void spoil(scene *c) { memset(c->results, 0xff, sizeof c->results); }

/* With what a plan that keeps all says of the gradients. */
static bool begin(scene *c) {
  memset(c, 0, sizeof *c);
  float *all = c->in[0];
  for (int i = 0; i < (N_IN + 2) * 32 * 32; i++) all[i] = 0.05f * (float)(i % 23) - 0.5f;
  omc_session *s = NULL;
  bool ok = CHECK_OK(plan_layers(omc_default_allocator(), true, &s, &c->plan)) &&
            CHECK_OK(go_forward(c, NULL));
  omc_backward b = {.number = 0};
  ok = ok && CHECK_OK(omc_run_enter(c->run, &b)) && CHECK_OK(go_back(c, &b));
  memcpy(c->expected, c->results, sizeof c->expected);
  omc_run_destroy(c->run), c->run = NULL;
  omc_plan_release(c->plan), c->plan = NULL;
  omc_session_destroy(s);
  spoil(c);
  return ok && CHECK_OK(plan_layers(omc_default_allocator(), false, &c->session, &c->plan)) &&
         CHECK(c->plan->lends_any) && CHECK_OK(go_forward(c, NULL));
}

static void end(scene *c) {
  omc_run_destroy(c->run);
  omc_plan_release(c->plan);
  if (c->session) omc_session_destroy(c->session);
}

TEST(lend_run_takes_over_what_was_lent) {
  scene c;
  omc_backward b = {.number = 0}, again = b;
  if (begin(&c) && CHECK_OK(omc_run_enter(c.run, &b))) {
    CHECK(b.in_place && b.takes_lent);
    CHECK_OK(go_back(&c, &b));
    CHECK(right(&c));
    CHECK_STATUS(omc_run_enter(c.run, &again), ECONSUMED);
  }
  end(&c);
}

TEST(lend_run_keeps_what_was_lent) {
  scene c;
  omc_backward keeping = {.keep = true}, last = {.keep = false};
  if (begin(&c)) {
    for (int i = 0; i < 3; i++) {
      CHECK_OK(omc_run_enter(c.run, &keeping));
      CHECK(!keeping.in_place && !keeping.takes_lent);
      CHECK_OK(go_back(&c, &keeping));
      CHECK(right(&c));
      spoil(&c);
    }
    CHECK_OK(omc_run_enter(c.run, &last));
    CHECK(last.takes_lent);
    CHECK_OK(go_back(&c, &last));
    CHECK(right(&c));
  }
  end(&c);
}

TEST(lend_run_that_leaves_is_as_it_was) {
  scene c;
  omc_backward left = {.number = 0}, without = left, b = left;
  if (begin(&c) && CHECK_OK(omc_run_enter(c.run, &left))) {
    CHECK_STATUS(omc_run_enter(c.run, &b), ECONSUMED);
    CHECK_OK(omc_run_leave(c.run, &left));
    CHECK_OK(omc_run_enter(c.run, &without));
    without.takes_lent = false; /* so that it gets other memory */
    omc_backward wrong = without;
    wrong.takes_lent = true;
    void *in[N_IN], *out[] = {c.y}, *grads[] = {c.dy}, *results[N_IN];
    point(c.in, in), point(c.results, results);
    wrong.inputs = in, wrong.outputs = out, wrong.grads = grads, wrong.results = results;
    CHECK_STATUS(omc_run_backward(c.run, &wrong), EINVALID);
    CHECK_CONTAINS(omc_status_detail(), "goes elsewhere than what forward was lent");
    CHECK_OK(omc_run_enter(c.run, &b));
    CHECK(b.takes_lent);
    CHECK_OK(go_back(&c, &b));
    CHECK(right(&c));
  }
  end(&c);
}

/* What is done with is spoiled as soon as it is: the gradients still come out right. */
TEST(lend_run_goes_on_bit_by_bit) {
  scene c;
  omc_backward b = {.number = 0};
  if (begin(&c) && CHECK_OK(omc_run_enter(c.run, &b))) {
    void *in[N_IN], *out[] = {c.y}, *grads[] = {c.dy}, *results[N_IN];
    omc_uses uses[N_IN];
    bool done[N_IN] = {false};
    point(c.in, in), point(c.results, results);
    for (int i = 0; i < N_IN; i++)
      if (b.takes_lent && c.plan->lends[i]) results[i] = c.lent[i];
    b.inputs = in, b.outputs = out, b.grads = grads, b.results = results;
    omc_plan_uses(c.plan, 0, uses, NULL, NULL);
    const omc_part *part = &c.plan->parts[OMC_BACKWARD];
    int early = 0;
    for (uint32_t step = part->step; step <= part->end_step; step++) {
      const uint32_t end = step < part->end_step ? step + 1 : UINT32_MAX;
      CHECK_OK(omc_run_advance(c.run, &b, end));
      CHECK_OK(omc_run_advance(c.run, &b, part->step)); /* it does not go back */
      for (int i = 1; i < N_IN; i++) {
        if (done[i] || uses[i].end > end) continue;
        done[i] = true;
        early += step + 1 < part->end_step;
        CHECK(!memcmp(results[i], c.expected[i], sizeof(square)));
        memset(results[i], 0xff, sizeof(square));
        memset(in[i], 0xff, sizeof(square));
      }
    }
    for (int i = 1; i < N_IN; i++) CHECK(done[i]);
    CHECK(early > 0);
    CHECK_OK(omc_run_leave(c.run, &b));
    CHECK_STATUS(omc_run_enter(c.run, &b), ECONSUMED);
  }
  end(&c);
}

/* Left half-way it has consumed what forward saved, as any backward that fails. */
TEST(lend_run_is_left_half_way) {
  scene c;
  omc_backward b = {.number = 0}, again = b;
  if (begin(&c) && CHECK_OK(omc_run_enter(c.run, &b))) {
    void *in[N_IN], *out[] = {c.y}, *grads[] = {c.dy}, *results[N_IN];
    point(c.in, in), point(c.results, results);
    for (int i = 0; i < N_IN; i++)
      if (b.takes_lent && c.plan->lends[i]) results[i] = c.lent[i];
    b.inputs = in, b.outputs = out, b.grads = grads, b.results = results;
    CHECK_OK(omc_run_advance(c.run, &b, c.plan->parts[OMC_BACKWARD].step + 1));
    CHECK_OK(omc_run_leave(c.run, &b));
    CHECK_STATUS(omc_run_enter(c.run, &again), ECONSUMED);
  }
  end(&c);
}

TEST(lend_run_is_packed) {
  scene c;
  static char packed[16 * sizeof(square)];
  if (begin(&c) && CHECK(c.plan->forward_bytes <= sizeof packed)) {
    CHECK_OK(omc_run_pack(c.run, packed, NULL));
    memset(c.lent, 0xff, sizeof c.lent);
    for (int i = 0; i < 2; i++) {
      omc_backward b = {.packed = packed};
      CHECK_OK(omc_run_enter(c.run, &b));
      CHECK(!b.in_place && !b.takes_lent);
      CHECK_OK(go_back(&c, &b));
      CHECK(right(&c));
      spoil(&c);
    }
    omc_backward bare = {.number = 0};
    CHECK_STATUS(omc_run_enter(c.run, &bare), EINVALID);
    CHECK_STATUS(omc_run_pack(c.run, packed, NULL), EINVALID);
  }
  end(&c);
}

/* A backward that works where forward did is under way, then it has written there. */
TEST(lend_run_is_packed_before_any_backward) {
  scene c;
  static char packed[16 * sizeof(square)];
  omc_backward unborn = {.number = 0}, b = unborn, keeping = {.keep = true};
  if (begin(&c) && CHECK(c.plan->forward_bytes <= sizeof packed)) {
    CHECK_OK(omc_run_enter(c.run, &unborn));
    CHECK_STATUS(omc_run_pack(c.run, packed, NULL), EINVALID);
    CHECK_CONTAINS(omc_status_detail(), "one is under way");
    CHECK_OK(omc_run_leave(c.run, &unborn));
    CHECK_OK(omc_run_enter(c.run, &keeping)); /* it copies what would be given back */
    CHECK_STATUS(omc_run_pack(c.run, packed, NULL), EINVALID);
    CHECK_OK(go_back(&c, &keeping));
    CHECK(right(&c));
    spoil(&c);
    CHECK_OK(omc_run_enter(c.run, &b));
    CHECK_OK(go_back(&c, &b));
    CHECK(right(&c));
    CHECK_STATUS(omc_run_pack(c.run, packed, NULL), EINVALID);
    CHECK_CONTAINS(omc_status_detail(), "wrote over what was saved");
  }
  end(&c);
}

static int calls_left;

static bool is_last(void) { return calls_left-- == 0; }

static omc_status copy_or_fail(void *ctx, void *dst, const void *src, size_t bytes, void *queue) {
  if (is_last()) OMC_FAIL(EDEVICE, "a copy fails");
  return omc_provider_host()->copy(ctx, dst, src, bytes, queue);
}

static omc_status order_or_fail(void *ctx, void *queue, void *other) {
  (void)ctx, (void)queue, (void)other;
  if (is_last()) OMC_FAIL(EDEVICE, "an order fails");
  return OMC_OK;
}

/* Whichever of its calls fails, the run is as it was. */
TEST(lend_run_that_could_not_be_packed_is_as_it_was) {
  static char packed[16 * sizeof(square)], other_queue;
  omc_provider p = *omc_provider_host();
  p.copy = copy_or_fail, p.order = order_or_fail;
  int n = 0;
  for (omc_status status = OMC_EDEVICE; status != OMC_OK; n++) {
    scene c;
    calls_left = -1;
    if (!CHECK(begin(&c) && c.plan->forward_bytes <= sizeof packed)) return;
    const omc_provider *const host = c.plan->provider;
    c.plan->provider = &p;
    calls_left = n;
    status = omc_run_pack(c.run, packed, &other_queue);
    calls_left = -1;
    if (status == OMC_OK) {
      CHECK_STATUS(omc_run_pack(c.run, packed, NULL), EINVALID);
    } else {
      CHECK_STATUS(status, EDEVICE);
      omc_backward b = {.number = 0};
      CHECK_OK(omc_run_enter(c.run, &b));
      CHECK(b.in_place && b.takes_lent);
      CHECK_OK(go_back(&c, &b));
      CHECK(right(&c));
    }
    c.plan->provider = host;
    end(&c);
    REQUIRE(n < 100);
  }
  CHECK(n > 3); /* two orders and a copy at least */
}

TEST(lend_forward_needs_what_it_is_lent) {
  scene c;
  omc_run *run = NULL;
  if (begin(&c)) {
    void *in[N_IN], *out[] = {c.y}, *lent[N_IN] = {NULL};
    point(c.in, in);
    CHECK_STATUS(omc_run_forward(c.plan, in, out, NULL, 1, NULL, &run), EINVALID);
    CHECK_STATUS(omc_run_forward(c.plan, in, out, lent, 1, NULL, &run), EINVALID);
    CHECK_CONTAINS(omc_status_detail(), "lends memory and it was not given");
    CHECK(run == NULL);
  }
  end(&c);
}

TEST(lend_failing_allocator) {
  omc_test_memory memory;
  omc_test_memory_init(&memory);
  size_t n = 0;
  for (omc_status status = OMC_ENOMEM; status != OMC_OK; n++) {
    scene c;
    memset(&c, 0, sizeof c);
    memory.calls = 0;
    memory.fail_at = n;
    status = plan_layers(&memory.allocator, false, &c.session, &c.plan);
    if (status == OMC_OK) status = go_forward(&c, NULL);
    omc_backward b = {.number = 0};
    if (status == OMC_OK) status = omc_run_enter(c.run, &b);
    if (status == OMC_OK) status = go_back(&c, &b);
    if (status != OMC_OK) CHECK_STATUS(status, ENOMEM);
    end(&c);
    CHECK_INT(memory.live_blocks, 0);
    REQUIRE(n <= 100000); /* it ends */
  }
  CHECK(n > 10);
}
