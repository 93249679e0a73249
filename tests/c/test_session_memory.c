/* What sessions hold: with memory that fails, plans that go, threads that share. */
#include <math.h>
#include <pthread.h>
#include <string.h>

#include "sessions.h"

/* The whole way with the n-th allocation and all after it failing, for every n. */
static omc_status whole_way(const omc_allocator *allocator) {
  omc_session *s = NULL;
  omc_plan *plan = NULL;
  omc_run *run = NULL;
  tensors t;
  fill(&t, 0);
  omc_status status =
      omc_session_create(model, strlen(model), NULL, NULL, NULL, here(), allocator, 4, &s);
  if (status == OMC_OK) status = plan_rows(s, ROWS, true, false, &plan);
  if (status == OMC_OK) status = forward(plan, &t, &run);
  if (status == OMC_OK) status = backward(run, &t);
  if (status == OMC_OK) CHECK(gradients_right(&t));
  omc_run_destroy(run);
  omc_plan_release(plan);
  omc_session_destroy(s);
  return status;
}

TEST_ANYWHERE(session_failing_allocator) {
  omc_test_memory memory;
  omc_test_memory_init(&memory);
  omc_status status = OMC_ENOMEM;
  for (size_t n = 0; status == OMC_ENOMEM && n < 100000; n++) {
    memory.calls = 0;
    memory.fail_at = n;
    status = whole_way(&memory.allocator);
    CHECK_INT(memory.live_blocks, 0);
    CHECK_INT(memory.live_bytes, 0);
  }
  CHECK_OK(status);
}

/* The ops that a network for images and one for text are made of, with tied weights. */
static const char *network =
    "input %x : f32[2,3,9,9]\n"
    "input %ids : i64[2,5]\n"
    "input %target : i64[10]\n"
    "input %w : f32[8,3,3,3] grad\n"
    "input %table : f32[7,16] grad\n"
    "input %g : f32[16] grad\n"
    "const %k_heads : i64[4] = [2, 4, 2, 8]\n"
    "const %q_heads : i64[4] = [2, 5, 2, 8]\n"
    "const %rows : i64[2] = [10, 16]\n"
    "%c = Conv(%x, %w) {strides=[2, 2], pads=[1, 1, 1, 1]}\n"
    "%r = Relu(%c)\n"
    "%p = AdaptiveAvgPool(%r) {output_size=[2, 4]}\n"
    "%kr = Reshape(%p, %k_heads)\n"
    "%k = Transpose(%kr) {perm=[0, 2, 1, 3]}\n"
    "%e = Embedding(%table, %ids)\n"
    "%qr = Reshape(%e, %q_heads)\n"
    "%q = Transpose(%qr) {perm=[0, 2, 1, 3]}\n"
    "%a, %lse = Attention(%q, %k, %k) {scale=0.3, p=0.2, subsequence=1}\n"
    "%at = Transpose(%a) {perm=[0, 2, 1, 3]}\n"
    "%ar = Reshape(%at, %rows)\n"
    "%d = Dropout(%ar) {p=0.1, subsequence=2}\n"
    "%er = Reshape(%e, %rows)\n"
    "%s = Add(%d, %er)\n"
    "%n, %mean, %rstd = LayerNormalization(%s, %g) {axis=-1, epsilon=1e-5}\n"
    "%tt = Transpose(%table) {perm=[1, 0]}\n"
    "%logits = MatMul(%n, %tt)\n"
    "%loss, %top, %l, %total = CrossEntropy(%logits, %target)\n"
    "return %loss\n";

static omc_status train_network(const omc_allocator *allocator, float *sum) {
  float x[486], w[216], table[112], g[16], loss, dloss = 1, dw[216], dtable[112], dg[16];
  int64_t ids[10], target[10];
  for (int i = 0; i < 486; i++) x[i] = 0.01f * (float)(i % 37) - 0.2f;
  for (int i = 0; i < 216; i++) w[i] = 0.02f * (float)(i % 19) - 0.2f;
  for (int i = 0; i < 112; i++) table[i] = 0.03f * (float)(i % 23) - 0.3f;
  for (int i = 0; i < 16; i++) g[i] = 1;
  for (int i = 0; i < 10; i++) ids[i] = i % 7, target[i] = (i + 1) % 7;
  const omc_type types[] = {{OMC_F32, {4, {2, 3, 9, 9}}}, {OMC_I64, {2, {2, 5}}},
                            {OMC_I64, {1, {10}}},         {OMC_F32, {4, {8, 3, 3, 3}}},
                            {OMC_F32, {2, {7, 16}}},      {OMC_F32, {1, {16}}}};
  const bool in_grads[] = {false, false, false, true, true, true}, out_grads[] = {true};
  const omc_signature signature = {types, in_grads, out_grads, 1, false, false};
  void *in[] = {x, ids, target, w, table, g}, *out[] = {&loss}, *grad_out[] = {&dloss};
  void *grad_in[] = {NULL, NULL, NULL, dw, dtable, dg};
  omc_session *s = NULL;
  omc_plan *plan = NULL;
  omc_run *run = NULL;
  omc_status status = omc_session_create(network, strlen(network), NULL, NULL, NULL,
                                         omc_provider_host(), allocator, 1, &s);
  if (status == OMC_OK) status = omc_session_plan(s, &signature, &plan);
  if (status == OMC_OK) status = omc_run_forward(plan, in, out, NULL, 1, NULL, &run);
  if (status == OMC_OK) status = backward_of(run, in, out, grad_out, grad_in);
  if (status == OMC_OK) *sum = loss + dw[5] + dtable[7] + dg[3];
  omc_run_destroy(run);
  omc_plan_release(plan);
  omc_session_destroy(s);
  return status;
}

TEST(session_failing_allocator_on_a_network) {
  omc_test_memory memory;
  omc_test_memory_init(&memory);
  float expected = NAN, sum = NAN;
  REQUIRE_OK(train_network(&memory.allocator, &expected));
  CHECK(isfinite(expected));
  const size_t all = memory.calls;
  for (size_t n = 0; n <= all; n++) {
    memory.calls = 0;
    memory.fail_at = n;
    const omc_status status = train_network(&memory.allocator, &sum);
    CHECK_INT(status, n < all ? OMC_ENOMEM : OMC_OK);
    CHECK_INT(memory.live_blocks, 0);
    CHECK_INT(memory.live_bytes, 0);
  }
  CHECK_FLOAT(sum, expected);
}

static const char *const deep =
    "input %x : f32[64,16]\n"
    "input %w : f32[16,16] grad\n"
    "%a = MatMul(%x, %w)\n"
    "%b = Gelu(%a)\n"
    "%c = MatMul(%b, %w)\n"
    "%d = Gelu(%c)\n"
    "%e = MatMul(%d, %w)\n"
    "%n, %mean, %rstd = LayerNormalization(%e) {axis=-1, epsilon=1e-5}\n"
    "%y = MatMul(%n, %w)\n"
    "return %y\n";

/* In an arena of that share of what it would be. */
static omc_status train_deep(const omc_allocator *allocator, double share, float *dw,
                             size_t *arena) {
  float x[64 * 16], w[16 * 16], y[64 * 16], dy[64 * 16];
  for (int i = 0; i < 64 * 16; i++) x[i] = dy[i] = 0.01f * (float)(i % 37) - 0.2f;
  for (int i = 0; i < 16 * 16; i++) w[i] = 0.02f * (float)(i % 19) - 0.2f;
  const omc_type types[] = {{OMC_F32, {2, {64, 16}}}, {OMC_F32, {2, {16, 16}}}};
  const bool in_grads[] = {false, true}, out_grads[] = {true};
  const omc_signature signature = {types, in_grads, out_grads, 1, false, false};
  const omc_budget budget = {share, SIZE_MAX};
  void *in[] = {x, w}, *out[] = {y}, *grad_out[] = {dy}, *grad_in[] = {NULL, dw};
  omc_session *s = NULL;
  omc_plan *plan = NULL;
  omc_run *run = NULL;
  omc_status status = omc_session_create(deep, strlen(deep), NULL, NULL, NULL, omc_provider_host(),
                                         allocator, 1, &s);
  if (status == OMC_OK) status = omc_session_set_budget(s, &budget);
  if (status == OMC_OK) status = omc_session_plan(s, &signature, &plan);
  if (status == OMC_OK) status = omc_run_forward(plan, in, out, NULL, 1, NULL, &run);
  if (status == OMC_OK) status = backward_of(run, in, out, grad_out, grad_in);
  if (status == OMC_OK) *arena = plan->arena_bytes;
  omc_run_destroy(run);
  omc_plan_release(plan);
  omc_session_destroy(s);
  return status;
}

TEST(session_failing_allocator_under_a_budget) {
  omc_test_memory memory;
  omc_test_memory_init(&memory);
  float dw[16 * 16] = {0}, expected[16 * 16] = {0};
  size_t arena, whole;
  REQUIRE_OK(train_deep(omc_default_allocator(), 1, expected, &whole));
  REQUIRE_OK(train_deep(&memory.allocator, 0, dw, &arena));
  CHECK(arena < whole);
  CHECK(memcmp(dw, expected, sizeof dw) == 0);
  const size_t all = memory.calls;
  for (size_t n = 0; n <= all; n++) {
    memory.calls = 0;
    memory.fail_at = n;
    const omc_status status = train_deep(&memory.allocator, 0, dw, &arena);
    CHECK_INT(status, n < all ? OMC_ENOMEM : OMC_OK);
    CHECK_INT(memory.live_blocks, 0);
    CHECK_INT(memory.live_bytes, 0);
  }
  CHECK(memcmp(dw, expected, sizeof dw) == 0);
}

TEST(session_budget_that_is_none) {
  omc_session *s = open_session(model, 1);
  const omc_budget budgets[] = {{-0.1, SIZE_MAX}, {1.5, SIZE_MAX}, {NAN, 0}};
  for (int i = 0; i < 3; i++) CHECK_STATUS(omc_session_set_budget(s, &budgets[i]), EINVALID);
  omc_session_destroy(s);
}

/* Threads that share a session and its plans. */
static void *train(void *session) {
  omc_session *s = session;
  bool right = true;
  for (int i = 0; i < 200; i++) {
    omc_plan *plan = NULL;
    omc_run *run = NULL;
    tensors t;
    fill(&t, 0.01f * (float)i);
    right &= plan_rows(s, ROWS, true, i % 2, &plan) == OMC_OK && forward(plan, &t, &run) == OMC_OK;
    if (!right) break;
    right &= outputs_right(&t) && backward(run, &t) == OMC_OK && gradients_right(&t);
    omc_run_destroy(run);
    omc_plan_release(plan);
  }
  return right ? s : NULL;
}

TEST_ANYWHERE(session_threads) {
  omc_session *s = open_session(model, 1); /* so that plans are evicted under way */
  pthread_t threads[4];
  for (int i = 0; i < 4; i++) REQUIRE(pthread_create(&threads[i], NULL, train, s) == 0);
  for (int i = 0; i < 4; i++) {
    void *done = NULL;
    pthread_join(threads[i], &done);
    CHECK(done == s);
  }
  CHECK_INT(omc_session_get_stats(s).runs_live, 0);
  omc_session_destroy(s);
}

/* A plan that cannot be built for want of memory does not spoil the session. */
TEST_ANYWHERE(session_usable_after_failed_plan) {
  omc_test_memory memory;
  omc_test_memory_init(&memory);
  omc_session *s = open_on(model, &memory.allocator, 4);
  omc_plan *plan = NULL;
  const size_t before = memory.live_bytes;
  for (size_t n = 0; n < 12; n++) {
    memory.fail_at = memory.calls + n;
    const omc_status status = plan_rows(s, 3, true, false, &plan);
    if (status == OMC_OK) break;
    CHECK_STATUS(status, ENOMEM);
    CHECK_INT(memory.live_bytes, before);
  }
  memory.fail_at = SIZE_MAX;
  if (!plan) CHECK_OK(plan_rows(s, 3, true, false, &plan));
  omc_plan_release(plan);
  omc_session_destroy(s);
  CHECK_INT(memory.live_blocks, 0);
}

/* A provider whose pool is empty. */
static omc_status no_block(void *ctx, size_t bytes, void *queue, void **out) {
  (void)ctx, (void)queue, (void)out;
  return omc_fail(OMC_ENOMEM, "no block of %zu bytes", bytes);
}

TEST(session_without_arena_memory) {
  omc_provider empty = *omc_provider_host();
  empty.alloc = no_block;
  omc_session *s = NULL;
  omc_plan *plan = NULL;
  omc_run *run = NULL;
  tensors t;
  fill(&t, 0);
  REQUIRE_OK(omc_session_create(model, strlen(model), NULL, NULL, NULL, &empty,
                                omc_default_allocator(), 1, &s));
  REQUIRE_OK(plan_rows(s, ROWS, true, false, &plan));
  CHECK(plan->arena_bytes > 0);
  CHECK_STATUS(forward(plan, &t, &run), ENOMEM);
  CHECK(run == NULL);
  omc_plan_release(plan);
  omc_session_destroy(s);
}

/* ---- constants ---- */

/* y = x + (0, 1, 2, ... 99) + size of x: one constant that all plans have, one of each plan's. */
static const char *shifted =
    "input %x : i64[?,1]\n"
    "const %zero : i64[] = [0]\n"
    "const %one : i64[] = [1]\n"
    "const %n : i64[] = [100]\n"
    "%r = Range(%zero, %n, %one)\n"
    "%s = Size(%x)\n"
    "%rs = Mul(%r, %s)\n"
    "%a = Add(%x, %r)\n"
    "%b = Add(%x, %rs)\n"
    "return %a, %b\n";

static omc_status plan_shifted(omc_session *s, int64_t rows, omc_plan **out) {
  const omc_type inputs[] = {{OMC_I64, {2, {rows, 1}}}};
  const bool no[] = {false, false};
  return omc_session_plan(s, &(omc_signature){inputs, no, no, 0, false, false}, out);
}

TEST_ANYWHERE(session_holds_equal_constants_once) {
  omc_session *s = open_session(shifted, 4);
  omc_plan *plans[3] = {NULL};
  REQUIRE(s);
  for (int i = 0; i < 3; i++) {
    CHECK_OK(plan_shifted(s, 2 + i, &plans[i]));
    CHECK_INT(omc_session_get_stats(s).constant_bytes, (size_t)(2 + i) * 800);
  }
  for (int i = 0; i < 3; i++) omc_plan_release(plans[i]);
  CHECK_INT(omc_session_get_stats(s).constant_bytes, 4 * 800); /* they are cached */
  omc_session_destroy(s);
}

TEST_ANYWHERE(session_forgets_constants_with_their_plans) {
  omc_session *s = open_session(shifted, 1);
  omc_plan *plan = NULL;
  for (int i = 2; i < 9; i++) {
    REQUIRE_OK(plan_shifted(s, i, &plan));
    omc_plan_release(plan);
    CHECK_INT(omc_session_get_stats(s).constant_bytes, 2 * 800);
  }
  omc_session_destroy(s);
}

/* A device that does not answer when it is waited for. */
static omc_status no_answer(void *ctx) {
  (void)ctx;
  return omc_fail(OMC_EINTERNAL, "no answer");
}

static int n_unloaded;
static void count_unloaded(void *ctx, const void *uploaded, size_t bytes) {
  (void)ctx, (void)uploaded, (void)bytes;
  n_unloaded++;
}

TEST(plan_is_left_to_a_device_that_does_not_answer) {
  static omc_plan *plan; /* so that it can still be reached */
  omc_provider silent = *omc_provider_host();
  silent.sync_all = no_answer;
  silent.unload = count_unloaded;
  omc_session *s = NULL;
  REQUIRE_OK(omc_session_create(shifted, strlen(shifted), NULL, NULL, NULL, &silent,
                                omc_default_allocator(), 1, &s));
  REQUIRE_OK(plan_shifted(s, 2, &plan));
  omc_plan_release(plan);
  omc_session_destroy(s);
  CHECK_INT(n_unloaded, 0);
}
