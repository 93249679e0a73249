/* Several threads at one session, one plan and one run. `setup.py ctest --thread` runs these tests
 * under ThreadSanitizer. */
#include <math.h>
#include <pthread.h>
#include <string.h>

#include "harness.h"
#include "run/session.h"

#define THREADS 4
#define ROUNDS 40
#define ROWS 6

static const char model[] =
    "input %x : f32[?,4] grad\n"
    "input %w : f32[4,3] grad\n"
    "%a = MatMul(%x, %w)\n"
    "%h = Tanh(%a)\n"
    "%y = Sin(%h)\n"
    "%z = Exp(%y)\n"
    "return %y, %z\n";

typedef struct tensors {
  float x[ROWS * 4], w[12], y[ROWS * 3], z[ROWS * 3], ones[ROWS * 3], dx[ROWS * 4], dw[12];
} tensors;

static void fill(tensors *t) {
  for (int i = 0; i < ROWS * 4; i++) t->x[i] = (float)(i % 7) / 7 - 0.4f;
  for (int i = 0; i < 12; i++) t->w[i] = (float)(i % 5) / 5 - 0.3f;
  for (int i = 0; i < ROWS * 3; i++) t->ones[i] = 1;
}

static omc_status open_session(omc_session **out) {
  return omc_session_create(model, strlen(model), NULL, NULL, NULL, omc_provider_host(),
                            omc_default_allocator(), 2, out);
}

/* A plan with one backward for each output. */
static omc_status plan_rows(omc_session *s, int64_t rows, bool retain_graph, omc_plan **out) {
  const omc_type inputs[] = {{OMC_F32, {2, {rows, 4}}}, {OMC_F32, {2, {4, 3}}}};
  const bool in_grads[] = {true, true}, out_grads[] = {true, false, false, true};
  const omc_signature signature = {inputs, in_grads, out_grads, 2, retain_graph, false};
  return omc_session_plan(s, &signature, out);
}

static omc_status forward(omc_plan *plan, tensors *t, omc_run **run) {
  void *in[] = {t->x, t->w}, *out[] = {t->y, t->z};
  return omc_run_forward(plan, in, out, NULL, 1, NULL, run);
}

static omc_status backward(omc_run *run, const tensors *of, tensors *t, uint32_t number,
                           bool keep) {
  void *in[] = {(void *)(uintptr_t)of->x, (void *)(uintptr_t)of->w},
       *out[] = {(void *)(uintptr_t)of->y, (void *)(uintptr_t)of->z},
       *grads[] = {number == 0 ? t->ones : NULL, number == 1 ? t->ones : NULL},
       *results[] = {t->dx, t->dw};
  omc_backward b = {.number = number,
                    .keep = keep,
                    .inputs = in,
                    .outputs = out,
                    .grads = grads,
                    .results = results};
  OMC_TRY(omc_run_enter(run, &b));
  return omc_run_backward(run, &b);
}

typedef struct worker {
  pthread_t thread;
  omc_session *session;
  omc_run *run;         /* shared, and */
  const tensors *given; /* what its forward was given */
  float expected[2][12];
  int number;
  omc_status status; /* of the first failure */
  bool right;
} worker;

static void note(worker *w, omc_status status) {
  if (w->status == OMC_OK) w->status = status;
}

/* Plans of more sizes than are cached, each with runs of its own. */
static void *plan_and_run(void *arg) {
  worker *w = arg;
  tensors t;
  fill(&t);
  for (int i = 0; i < ROUNDS && w->status == OMC_OK; i++) {
    omc_plan *plan = NULL;
    omc_run *run = NULL;
    note(w, plan_rows(w->session, 1 + (i + w->number) % ROWS, i % 3 == 0, &plan));
    if (w->status == OMC_OK) note(w, forward(plan, &t, &run));
    if (w->status == OMC_OK) note(w, backward(run, &t, &t, (uint32_t)i % 2, i % 5 == 0));
    omc_run_destroy(run);
    omc_plan_release(plan);
    w->right &= omc_session_get_stats(w->session).plans_cached <= 2;
  }
  return NULL;
}

/* Backwards of one forward, which they share. */
static void *run_backwards(void *arg) {
  worker *w = arg;
  tensors t;
  fill(&t);
  for (int i = 0; i < ROUNDS && w->status == OMC_OK; i++) {
    const uint32_t number = (uint32_t)(i + w->number) % 2;
    note(w, backward(w->run, w->given, &t, number, true));
    w->right &= !memcmp(t.dw, w->expected[number], sizeof t.dw);
  }
  return NULL;
}

/* Sessions of its own. */
static void *make_sessions(void *arg) {
  worker *w = arg;
  for (int i = 0; i < 5 && w->status == OMC_OK; i++) {
    note(w, open_session(&w->session));
    if (w->status != OMC_OK) break;
    plan_and_run(w);
    omc_session_destroy(w->session);
  }
  return NULL;
}

/* Starts copies of a worker on a function each, and waits for them. */
static void run_threads(const worker *like, void *(*function)(void *)) {
  worker workers[THREADS];
  for (int i = 0; i < THREADS; i++) {
    workers[i] = *like;
    workers[i].number = i;
    workers[i].status = OMC_OK;
    workers[i].right = true;
    REQUIRE(pthread_create(&workers[i].thread, NULL, function, &workers[i]) == 0);
  }
  for (int i = 0; i < THREADS; i++) {
    pthread_join(workers[i].thread, NULL);
    CHECK_OK(workers[i].status);
    CHECK(workers[i].right);
  }
}

TEST(threads_share_a_session) {
  worker w = {.number = 0};
  REQUIRE_OK(open_session(&w.session));
  run_threads(&w, plan_and_run);
  CHECK_INT(omc_session_get_stats(w.session).runs_live, 0);
  omc_session_destroy(w.session);
}

TEST(threads_share_a_run) {
  for (int retain_graph = 0; retain_graph < 2; retain_graph++) {
    worker w = {.number = 0};
    omc_plan *plan = NULL;
    tensors t;
    fill(&t);
    REQUIRE_OK(open_session(&w.session));
    REQUIRE_OK(plan_rows(w.session, ROWS, retain_graph, &plan));
    REQUIRE_OK(forward(plan, &t, &w.run));
    w.given = &t;
    for (uint32_t b = 0; b < 2; b++) {
      REQUIRE_OK(backward(w.run, &t, &t, b, true));
      memcpy(w.expected[b], t.dw, sizeof t.dw);
    }
    run_threads(&w, run_backwards);
    omc_run_destroy(w.run);
    omc_plan_release(plan);
    omc_session_destroy(w.session);
  }
}

/* What one thread packs, the other's backward reads, or one of them is told no. */
static void *go_back_while_it_is_packed(void *arg) {
  worker *w = arg;
  tensors t;
  fill(&t);
  const omc_status status = backward(w->run, w->given, &t, 0, true);
  w->right = status == OMC_OK ? !memcmp(t.dw, w->expected[0], sizeof t.dw) : status == OMC_EINVALID;
  return NULL;
}

TEST(threads_pack_a_run_or_go_back) {
  worker w = {.number = 0};
  omc_plan *plan = NULL;
  static char packed[4096];
  tensors t;
  fill(&t);
  REQUIRE_OK(open_session(&w.session));
  REQUIRE_OK(plan_rows(w.session, ROWS, false, &plan));
  REQUIRE(plan->forward_bytes > 0 && plan->forward_bytes <= sizeof packed);
  for (int i = 0; i < 8 * ROUNDS; i++) {
    REQUIRE_OK(forward(plan, &t, &w.run));
    if (i == 0) {
      REQUIRE_OK(backward(w.run, &t, &t, 0, true));
      memcpy(w.expected[0], t.dw, sizeof t.dw);
    }
    w.given = &t;
    REQUIRE(pthread_create(&w.thread, NULL, go_back_while_it_is_packed, &w) == 0);
    const omc_status status = omc_run_pack(w.run, packed, NULL);
    pthread_join(w.thread, NULL);
    CHECK(w.right && (status == OMC_OK || status == OMC_EINVALID));
    omc_run_destroy(w.run);
  }
  omc_plan_release(plan);
  omc_session_destroy(w.session);
}

TEST(threads_have_sessions_of_their_own) { run_threads(&(worker){.number = 0}, make_sessions); }
