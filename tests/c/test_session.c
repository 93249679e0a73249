#include "harness.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

#include "device.h"
#include "graph/text.h"
#include "run/session.h"

/* y = sin(x @ w + b), with the gradients of w and b. */
static const char *model =
    "input %x : f32[?,3]\n"
    "input %w : f32[3,4] grad\n"
    "input %b : f32[4] grad\n"
    "%0 = MatMul(%x, %w)\n"
    "%1 = Add(%0, %b)\n"
    "%2 = Sin(%1)\n"
    "return %2, %x\n";

#define ROWS 5
typedef struct tensors {
  float x[ROWS * 3], w[12], b[4], y[ROWS * 4], x_again[ROWS * 3], dy[ROWS * 4], dw[12], db[4];
} tensors;

/* What sessions are opened on; NULL: the host. */
static const omc_provider *elsewhere;

static const omc_provider *here(void) { return elsewhere ? elsewhere : omc_provider_host(); }

/* A test of which every word holds on another device too. */
#define TEST_ANYWHERE(name)                                \
  static void name(void);                                  \
  TEST(name##_here) { name(); }                            \
  TEST(name##_elsewhere) {                                 \
    const omc_provider *p = elsewhere = device_provider(); \
    name();                                                \
    elsewhere = NULL;                                      \
    CHECK_OK(p->sync_all(p->ctx));                         \
    CHECK_INT(p->memory(p->ctx).used_bytes, 0);            \
  }                                                        \
  static void name(void)

static omc_session *open_on(const char *text, const omc_allocator *allocator, uint32_t max_plans) {
  omc_session *s = NULL;
  CHECK_OK(
      omc_session_create(text, strlen(text), NULL, NULL, NULL, here(), allocator, max_plans, &s));
  return s;
}

static omc_session *open_session(const char *text, uint32_t max_plans) {
  return open_on(text, omc_default_allocator(), max_plans);
}

static omc_status plan_rows(omc_session *s, int64_t rows, bool joint, bool retain_graph,
                            omc_plan **out) {
  const omc_type inputs[] = {
      {OMC_F32, {2, {rows, 3}}}, {OMC_F32, {2, {3, 4}}}, {OMC_F32, {1, {4}}}};
  const bool in_grads[] = {false, true, true}, out_grads[] = {joint, false};
  const omc_signature signature = {inputs, in_grads, out_grads, 1, retain_graph, false};
  return omc_session_plan(s, &signature, out);
}

static void fill(tensors *t, float shift) {
  for (int i = 0; i < ROWS * 3; i++) t->x[i] = 0.1f * (float)i - shift;
  for (int i = 0; i < 12; i++) t->w[i] = 0.3f - 0.05f * (float)i;
  for (int i = 0; i < 4; i++) t->b[i] = 0.2f * (float)i;
  for (int i = 0; i < ROWS * 4; i++) t->dy[i] = 1 + 0.1f * (float)i, t->y[i] = NAN;
  for (int i = 0; i < 12; i++) t->dw[i] = NAN;
  for (int i = 0; i < 4; i++) t->db[i] = NAN;
}

/* The tensors where the plan wants them. */
static omc_status send(tensors *t, tensors **there) {
  void *at = t;
  if (elsewhere) {
    OMC_TRY(elsewhere->alloc(elsewhere->ctx, sizeof *t, NULL, &at));
    device_write(at, t, sizeof *t);
  }
  *there = at;
  return OMC_OK;
}

/* Fetches them when all is done; `status` is what came of giving the work. */
static omc_status fetch(tensors *t, tensors *there, omc_status status) {
  if (!elsewhere) return status;
  const omc_status done = elsewhere->sync(elsewhere->ctx, NULL);
  device_read(t, there, sizeof *t);
  elsewhere->free(elsewhere->ctx, there, sizeof *t, NULL);
  return status == OMC_OK ? done : status;
}

static omc_status forward(omc_plan *plan, tensors *t, omc_run **run) {
  tensors *d;
  OMC_TRY(send(t, &d));
  void *in[] = {d->x, d->w, d->b}, *out[] = {d->y, d->x_again};
  return fetch(t, d, omc_run_forward(plan, in, out, 1, NULL, run));
}

static omc_status backward_of(omc_run *run, void *const *in, void *const *out,
                              void *const *grad_out, void *const *grad_in) {
  return omc_run_backward(run, &(omc_backward){0, false, NULL, NULL, in, out, grad_out, grad_in});
}

static omc_status backward(omc_run *run, tensors *t) {
  tensors *d;
  OMC_TRY(send(t, &d));
  void *in[] = {d->x, d->w, d->b}, *out[] = {d->y, d->x_again}, *grad_out[] = {d->dy, NULL};
  void *grad_in[] = {NULL, d->dw, d->db};
  return fetch(t, d, backward_of(run, in, out, grad_out, grad_in));
}

static bool close_to(double a, double b) { return fabs(a - b) <= 1e-5 * (1 + fabs(b)); }

static double pre_activation(const tensors *t, int r, int c) {
  double sum = t->b[c];
  for (int k = 0; k < 3; k++) sum += (double)t->x[r * 3 + k] * t->w[k * 4 + c];
  return sum;
}

static bool outputs_right(const tensors *t) {
  bool right = !memcmp(t->x, t->x_again, sizeof t->x);
  for (int i = 0; i < ROWS * 4; i++)
    right &= close_to(t->y[i], sin(pre_activation(t, i / 4, i % 4)));
  return right;
}

static bool gradients_right(const tensors *t) {
  bool right = true;
  for (int c = 0; c < 4; c++) {
    double db = 0, dw[3] = {0};
    for (int r = 0; r < ROWS; r++) {
      const double d = t->dy[r * 4 + c] * cos(pre_activation(t, r, c));
      db += d;
      for (int k = 0; k < 3; k++) dw[k] += d * t->x[r * 3 + k];
    }
    right &= close_to(t->db[c], db);
    for (int k = 0; k < 3; k++) right &= close_to(t->dw[k * 4 + c], dw[k]);
  }
  return right;
}

TEST_ANYWHERE(session_forward_and_backward) {
  omc_session *s = open_session(model, 4);
  omc_plan *plan = NULL;
  omc_run *run = NULL;
  tensors t;
  fill(&t, 0);
  REQUIRE(s);
  REQUIRE_OK(plan_rows(s, ROWS, true, false, &plan));
  REQUIRE_OK(forward(plan, &t, &run));
  CHECK(outputs_right(&t));
  CHECK(omc_run_plan(run) == plan);
  CHECK_INT(omc_session_get_stats(s).runs_live, 1);
  REQUIRE_OK(backward(run, &t));
  CHECK(gradients_right(&t));
  omc_run_destroy(run);
  CHECK_INT(omc_session_get_stats(s).runs_live, 0);
  omc_plan_release(plan);
  omc_session_destroy(s);
}

TEST_ANYWHERE(session_inference_has_no_run) {
  omc_session *s = open_session(model, 4);
  omc_plan *plan = NULL;
  omc_run *run = NULL;
  tensors t;
  fill(&t, 0);
  REQUIRE_OK(plan_rows(s, ROWS, false, false, &plan));
  CHECK_INT(plan->n_steps, plan->n_forward);
  CHECK_OK(forward(plan, &t, &run));
  CHECK(run == NULL);
  CHECK_OK(forward(plan, &t, NULL));
  CHECK(outputs_right(&t));
  omc_plan_release(plan);
  omc_session_destroy(s);
}

TEST_ANYWHERE(session_runs_are_independent) {
  omc_session *s = open_session(model, 4);
  omc_plan *plan = NULL;
  omc_run *runs[12] = {NULL};
  static tensors t[12];
  REQUIRE_OK(plan_rows(s, ROWS, true, false, &plan));
  for (int i = 0; i < 12; i++) {
    fill(&t[i], 0.1f * (float)i);
    CHECK_OK(forward(plan, &t[i], &runs[i]));
  }
  for (int i = 11; i >= 0; i -= 2) omc_run_destroy(runs[i]);
  for (int i = 0; i < 12; i += 2) {
    CHECK_OK(backward(runs[i], &t[i]));
    CHECK(gradients_right(&t[i]));
    omc_run_destroy(runs[i]);
  }
  CHECK_INT(omc_session_get_stats(s).runs_live, 0);
  omc_plan_release(plan);
  omc_session_destroy(s);
}

TEST_ANYWHERE(session_may_go_before_its_runs) {
  omc_session *s = open_session(model, 4);
  omc_plan *plan = NULL;
  omc_run *run = NULL;
  tensors t;
  fill(&t, 0);
  REQUIRE_OK(plan_rows(s, ROWS, true, false, &plan));
  REQUIRE_OK(forward(plan, &t, &run));
  omc_plan_release(plan);
  omc_session_destroy(s);
  CHECK_OK(backward(run, &t));
  CHECK(gradients_right(&t));
  omc_run_destroy(run);
}

TEST_ANYWHERE(session_backward_again) {
  omc_session *s = open_session(model, 4);
  omc_plan *plans[2] = {NULL, NULL};
  for (int retain_graph = 0; retain_graph < 2; retain_graph++) {
    omc_run *run = NULL;
    tensors t;
    fill(&t, 0);
    REQUIRE_OK(plan_rows(s, ROWS, true, retain_graph, &plans[retain_graph]));
    REQUIRE_OK(forward(plans[retain_graph], &t, &run));
    CHECK_OK(backward(run, &t));
    for (int again = 0; again < 2; again++) {
      fill(&t, 0);
      if (plans[retain_graph]->consumes) {
        CHECK_STATUS(backward(run, &t), ECONSUMED);
      } else {
        CHECK_OK(backward(run, &t));
        CHECK(gradients_right(&t));
      }
    }
    omc_run_destroy(run);
  }
  CHECK(plans[0] != plans[1] && !plans[1]->consumes);
  omc_plan_release(plans[0]);
  omc_plan_release(plans[1]);
  omc_session_destroy(s);
}

TEST_ANYWHERE(session_cache_is_bounded) {
  omc_session *s = open_session(model, 2);
  omc_plan *plan = NULL, *first = NULL;
  REQUIRE_OK(plan_rows(s, 1, true, false, &first));
  for (int64_t rows = 2; rows < 20; rows++) {
    REQUIRE_OK(plan_rows(s, 1, true, false, &plan)); /* kept: always the most recent but one */
    CHECK(plan == first);
    omc_plan_release(plan);
    REQUIRE_OK(plan_rows(s, rows, true, false, &plan));
    omc_plan_release(plan);
  }
  const omc_session_stats stats = omc_session_get_stats(s);
  CHECK_INT(stats.plans_built, 19);
  CHECK_INT(stats.plan_hits, 18);
  CHECK_INT(stats.plans_evicted, 17);
  CHECK_INT(stats.plans_cached, 2);
  CHECK(stats.specialize_seconds > 0 && stats.plan_seconds > 0 && stats.differentiate_seconds > 0);
  omc_plan_release(first);
  omc_session_destroy(s);
}

TEST_ANYWHERE(session_signatures_differ) {
  omc_session *s = open_session(model, 8);
  omc_plan *plans[3] = {NULL};
  REQUIRE_OK(plan_rows(s, 2, true, false, &plans[0]));
  REQUIRE_OK(plan_rows(s, 2, false, false, &plans[1]));
  REQUIRE_OK(plan_rows(s, 2, true, true, &plans[2]));
  CHECK(plans[0] != plans[1] && plans[0] != plans[2] && plans[1] != plans[2]);
  for (int i = 0; i < 3; i++) omc_plan_release(plans[i]);
  omc_session_destroy(s);
}

TEST(session_refuses_bad_calls) {
  omc_session *s = open_session(model, 4);
  omc_plan *plan = NULL;
  omc_run *run = NULL;
  tensors t;
  fill(&t, 0);
  const omc_type wrong[] = {{OMC_F32, {2, {5, 7}}}, {OMC_F32, {2, {3, 4}}}, {OMC_F32, {1, {4}}}};
  const bool in_grads[3] = {false}, out_grads[2] = {false};
  const omc_signature signature = {wrong, in_grads, out_grads, 1, false, false};
  CHECK_STATUS(omc_session_plan(s, &signature, &plan), ESHAPE);
  REQUIRE_OK(plan_rows(s, ROWS, true, false, &plan));
  CHECK_STATUS(forward(plan, &t, NULL), EINVALID);
  void *in[] = {t.x, NULL, t.b}, *out[] = {t.y, t.x_again};
  CHECK_STATUS(omc_run_forward(plan, in, out, 1, NULL, &run), EINVALID);
  CHECK_CONTAINS(omc_status_detail(), "input 1");
  void *no_copy[] = {t.y, NULL};
  in[1] = t.w;
  CHECK_STATUS(omc_run_forward(plan, in, no_copy, 1, NULL, &run), EINVALID);
  CHECK_CONTAINS(omc_status_detail(), "output 1");
  CHECK_INT(omc_session_get_stats(s).runs_live, 0);
  REQUIRE_OK(forward(plan, &t, &run));
  void *results[] = {NULL, t.dw, t.db};
  CHECK(plan->consumes);
  CHECK_STATUS(backward_of(run, in, out, (void *[]){NULL, NULL}, results), EINVALID);
  CHECK_CONTAINS(omc_status_detail(), "gradient of output 0");
  CHECK_OK(backward(run, &t));
  CHECK(gradients_right(&t));
  omc_run_destroy(run);
  omc_run_destroy(NULL);
  omc_plan_release(plan);
  omc_session_destroy(s);
  omc_session_destroy(NULL);
  CHECK_STATUS(omc_session_create("return", 6, NULL, NULL, NULL, omc_provider_host(),
                                  omc_default_allocator(), 0, &s),
               EINVALID);
  CHECK_STATUS(omc_session_create("nonsense", 8, NULL, NULL, NULL, omc_provider_host(),
                                  omc_default_allocator(), 1, &s),
               EPARSE);
}

/* y = x * m as it was, with the gradient of x; m becomes m / 2 + x. */
static const char *updating =
    "input %x : f32[4] grad\n"
    "input %m : f32[4]\n"
    "input %ids : i64[4]\n"
    "const %half : f32[] = [0.5]\n"
    "%y = Mul(%x, %m)\n"
    "%h = Mul(%m, %half)\n"
    "%new = Add(%h, %x)\n"
    "%p = Gather(%y, %ids)\n"
    "return %p, %new over %m\n";

typedef struct updated {
  float x[4], m[4], y[4], dy[4], dx[4];
  int64_t ids[4];
} updated;

static omc_status plan_updating(omc_session *s, omc_plan **out) {
  const omc_type inputs[] = {{OMC_F32, {1, {4}}}, {OMC_F32, {1, {4}}}, {OMC_I64, {1, {4}}}};
  const bool in_grads[] = {true, false, false}, out_grads[] = {true, false};
  return omc_session_plan(s, &(omc_signature){inputs, in_grads, out_grads, 1, false, false}, out);
}

TEST(session_writes_over_inputs) {
  omc_session *s = open_session(updating, 1);
  omc_plan *plan = NULL;
  omc_run *runs[2] = {NULL, NULL};
  updated t = {{1, 2, 3, 4}, {2, 4, 6, 8}, {0}, {1, 1, 1, 1}, {0}, {0, 1, 2, 3}};
  void *in[] = {t.x, t.m, t.ids}, *out[] = {t.y, NULL}, *grads[] = {t.dy, NULL};
  void *results[] = {t.dx, NULL, NULL};
  REQUIRE_OK(plan_updating(s, &plan));
  CHECK(!plan->parts[OMC_BACKWARD].reads_input[1]);
  for (int i = 0; i < 2; i++) {
    REQUIRE_OK(omc_run_forward(plan, in, out, 1, NULL, &runs[i]));
    CHECK_FLOAT(t.y[1], 8);
    CHECK_FLOAT(t.m[1], 4); /* 4 / 2 + 2 */
    t.m[2] = 100;           /* each backward has what its own forward read */
  }
  REQUIRE_OK(backward_of(runs[0], in, out, grads, results));
  CHECK_FLOAT(t.dx[2], 6);
  REQUIRE_OK(backward_of(runs[1], in, out, grads, results));
  CHECK_FLOAT(t.dx[2], 100);
  for (int i = 0; i < 2; i++) omc_run_destroy(runs[i]);
  omc_plan_release(plan);
  omc_session_destroy(s);
}

TEST(session_that_fails_has_written_over_nothing) {
  omc_session *s = open_session(updating, 1);
  omc_plan *plan = NULL;
  omc_run *run = NULL;
  updated t = {{1, 2, 3, 4}, {2, 4, 6, 8}, {0}, {0}, {0}, {0, 1, 2, 9}};
  void *in[] = {t.x, t.m, t.ids}, *out[] = {t.y, NULL};
  REQUIRE_OK(plan_updating(s, &plan));
  CHECK_STATUS(omc_run_forward(plan, in, out, 1, NULL, &run), EINDEX);
  for (int i = 0; i < 4; i++) CHECK_FLOAT(t.m[i], 2 * (i + 1));
  omc_plan_release(plan);
  omc_session_destroy(s);
}

TEST(session_refuses_to_write_over_what_others_share) {
  omc_session *s = open_session(updating, 1);
  omc_plan *plan = NULL;
  omc_run *run = NULL;
  float x[12] = {0}, y[4];
  int64_t ids[4] = {0, 1, 2, 3};
  void *in[] = {x, x + 3, ids}, *out[] = {y, NULL};
  REQUIRE_OK(plan_updating(s, &plan));
  CHECK_STATUS(omc_run_forward(plan, in, out, 1, NULL, &run), EINVALID);
  CHECK_CONTAINS(omc_status_detail(), "input 1 is written over and shares memory with input 0");
  in[1] = x + 4, out[0] = x + 6;
  CHECK_STATUS(omc_run_forward(plan, in, out, 1, NULL, &run), EINVALID);
  CHECK_CONTAINS(omc_status_detail(), "output 0");
  out[0] = x + 8;
  CHECK_OK(omc_run_forward(plan, in, out, 1, NULL, &run));
  omc_run_destroy(run);
  omc_plan_release(plan);
  omc_session_destroy(s);
}

TEST(session_refuses_an_update_of_another_type) {
  omc_session *s =
      open_session("input %x : f32[?]\ninput %m : f32[4]\n%y = Exp(%x)\nreturn %y over %m\n", 1);
  const omc_type inputs[] = {{OMC_F32, {1, {5}}}, {OMC_F32, {1, {4}}}};
  const bool no[] = {false, false};
  omc_plan *plan = NULL;
  CHECK_STATUS(omc_session_plan(s, &(omc_signature){inputs, no, no, 0, false, false}, &plan),
               ESHAPE);
  CHECK_CONTAINS(omc_status_detail(), "output 0, f32[5], is written over input 1 'm', f32[4]");
  omc_session_destroy(s);
}

TEST(session_empty_batch) {
  omc_session *s = open_session(model, 4);
  omc_plan *plan = NULL;
  omc_run *run = NULL;
  tensors t;
  fill(&t, 0);
  REQUIRE_OK(plan_rows(s, 0, true, false, &plan));
  void *in[] = {NULL, t.w, t.b}, *out[] = {NULL, NULL}, *grad_out[] = {NULL, NULL};
  void *grad_in[] = {NULL, t.dw, t.db};
  REQUIRE_OK(omc_run_forward(plan, in, out, 1, NULL, &run));
  CHECK_OK(backward_of(run, in, out, grad_out, grad_in));
  for (int i = 0; i < 12; i++) CHECK_FLOAT(t.dw[i], 0);
  for (int i = 0; i < 4; i++) CHECK_FLOAT(t.db[i], 0);
  omc_run_destroy(run);
  omc_plan_release(plan);
  omc_session_destroy(s);
}

TEST(session_index_error_leaves_it_usable) {
  omc_session *s = open_session(
      "input %w : f32[4,2] grad\n"
      "input %ids : i64[3]\n"
      "%a = Exp(%w)\n"
      "%0 = Embedding(%a, %ids)\n"
      "%1 = Sin(%0)\n"
      "return %1\n",
      2);
  const omc_type inputs[] = {{OMC_F32, {2, {4, 2}}}, {OMC_I64, {1, {3}}}};
  const bool in_grads[] = {true, false}, out_grads[] = {true};
  const omc_signature signature = {inputs, in_grads, out_grads, 1, false, false};
  omc_plan *plan = NULL;
  omc_run *run = NULL;
  float w[8] = {0, 1, 2, 3, 4, 5, 6, 7}, y[6];
  int64_t ids[3] = {0, 3, 4};
  void *in[] = {w, ids}, *out[] = {y};
  REQUIRE_OK(omc_session_plan(s, &signature, &plan));
  CHECK_STATUS(omc_run_forward(plan, in, out, 1, NULL, &run), EINDEX);
  CHECK(run == NULL);
  CHECK_INT(omc_session_get_stats(s).runs_live, 0);
  ids[2] = 1;
  REQUIRE_OK(omc_run_forward(plan, in, out, 1, NULL, &run));
  CHECK(close_to(y[2], sin(exp(6))));
  omc_run_destroy(run);
  omc_plan_release(plan);
  omc_session_destroy(s);
}

/* Callbacks whose only op doubles its input; they count the states they have given out. */
static int states;

static omc_status call_infer(void *ctx, int64_t index, const omc_type *in, uint32_t n_in,
                             omc_type *out, uint32_t n_out) {
  (void)ctx;
  CHECK(index == 7 && n_in == 1 && n_out == 1);
  *out = *in;
  return OMC_OK;
}

static void scale(const omc_tensor *x, const omc_tensor *y) {
  for (int64_t i = 0; i < omc_shape_numel(&x->type->shape); i++)
    ((float *)y->data)[i] = 2 * ((const float *)x->data)[i];
}

static omc_status call_forward(void *ctx, void **run, int64_t index, const omc_tensor *in,
                               uint32_t n_in, const omc_tensor *out, uint32_t n_out) {
  const bool *fails = ctx;
  CHECK(index == 7 && n_in == 1 && n_out == 1);
  if (!*run) *run = &states, states++;
  if (*fails) return omc_fail(OMC_ECALLBACK, "raised");
  scale(in, out);
  return OMC_OK;
}

static omc_status call_backward(void *ctx, void **run, int64_t index, const omc_tensor *grad_out,
                                uint32_t n_grad_out, const omc_tensor *grad_in,
                                uint32_t n_grad_in) {
  (void)ctx;
  CHECK(*run == &states && index == 7 && n_grad_out == 1 && n_grad_in == 1);
  scale(grad_out, grad_in);
  return OMC_OK;
}

static void call_drop(void *ctx, void *run) {
  (void)ctx;
  CHECK(run == &states);
  states--;
}

TEST(session_host_ops) {
  bool fails = false;
  const omc_callbacks callbacks = {&fails, call_infer, call_forward, call_backward, call_drop};
  const char *text =
      "input %x : f32[4] grad\n"
      "%0 = Sin(%x)\n"
      "%1 = TorchCall(%0) {index=7} name=\"/weird\"\n"
      "return %1\n";
  const omc_type inputs[] = {{OMC_F32, {1, {4}}}};
  const bool yes[] = {true}, no[] = {false};
  omc_session *s = NULL;
  omc_plan *plan = NULL, *inference = NULL;
  omc_run *run = NULL;
  float x[4] = {0, 1, 2, 3}, y[4], dy[4] = {1, 1, 1, 1}, dx[4];
  void *in[] = {x}, *out[] = {y}, *grad_out[] = {dy}, *grad_in[] = {dx};
  REQUIRE_OK(omc_session_create(text, strlen(text), NULL, NULL, &callbacks, omc_provider_host(),
                                omc_default_allocator(), 4, &s));
  REQUIRE_OK(omc_session_plan(s, &(omc_signature){inputs, yes, yes, 1, false, false}, &plan));
  REQUIRE_OK(omc_run_forward(plan, in, out, 1, NULL, &run));
  CHECK_INT(states, 1);
  CHECK_OK(backward_of(run, in, out, grad_out, grad_in));
  for (int i = 0; i < 4; i++)
    CHECK(close_to(y[i], 2 * sin(x[i])) && close_to(dx[i], 2 * cos(x[i])));
  omc_run_destroy(run);
  CHECK_INT(states, 0);
  REQUIRE_OK(omc_session_plan(s, &(omc_signature){inputs, no, no, 1, false, false}, &inference));
  REQUIRE_OK(omc_run_forward(inference, in, out, 1, NULL, &run));
  CHECK_INT(states, 0);
  fails = true;
  CHECK_STATUS(omc_run_forward(plan, in, out, 1, NULL, &run), ECALLBACK);
  CHECK_INT(states, 0);
  omc_plan_release(plan);
  omc_plan_release(inference);
  omc_session_destroy(s);
}

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
  if (status == OMC_OK) status = omc_run_forward(plan, in, out, 1, NULL, &run);
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
