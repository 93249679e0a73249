/* What sessions compute, and what they refuse. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "sessions.h"

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
  CHECK_STATUS(omc_run_forward(plan, in, out, NULL, 1, NULL, &run), EINVALID);
  CHECK_CONTAINS(omc_status_detail(), "input 1");
  void *no_copy[] = {t.y, NULL};
  in[1] = t.w;
  CHECK_STATUS(omc_run_forward(plan, in, no_copy, NULL, 1, NULL, &run), EINVALID);
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
    REQUIRE_OK(omc_run_forward(plan, in, out, NULL, 1, NULL, &runs[i]));
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
  CHECK_STATUS(omc_run_forward(plan, in, out, NULL, 1, NULL, &run), EINDEX);
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
  CHECK_STATUS(omc_run_forward(plan, in, out, NULL, 1, NULL, &run), EINVALID);
  CHECK_CONTAINS(omc_status_detail(), "input 1 is written over and shares memory with input 0");
  in[1] = x + 4, out[0] = x + 6;
  CHECK_STATUS(omc_run_forward(plan, in, out, NULL, 1, NULL, &run), EINVALID);
  CHECK_CONTAINS(omc_status_detail(), "output 0");
  out[0] = x + 8;
  CHECK_OK(omc_run_forward(plan, in, out, NULL, 1, NULL, &run));
  omc_run_destroy(run);
  omc_plan_release(plan);
  omc_session_destroy(s);
}

TEST(session_refuses_to_write_two_outputs_over_one_memory) {
  omc_session *s = open_session(
      "input %a : f32[4]\ninput %b : f32[4]\ninput %x : f32[4]\n%c = Add(%a, %x)\n"
      "%d = Mul(%b, %x)\nreturn %c over %a, %d over %b\n",
      1);
  const omc_type types[] = {{OMC_F32, {1, {4}}}, {OMC_F32, {1, {4}}}, {OMC_F32, {1, {4}}}};
  const bool no[] = {false, false, false};
  omc_plan *plan = NULL;
  float at[12] = {0};
  void *in[] = {at, at + 3, at + 8}, *out[] = {NULL, NULL};
  REQUIRE_OK(omc_session_plan(s, &(omc_signature){types, no, no, 0, false, false}, &plan));
  CHECK_STATUS(omc_run_forward(plan, in, out, NULL, 1, NULL, NULL), EINVALID);
  CHECK_CONTAINS(omc_status_detail(), "input 1 is written over and shares memory with input 0");
  in[1] = at + 4, in[2] = at + 7;
  CHECK_STATUS(omc_run_forward(plan, in, out, NULL, 1, NULL, NULL), EINVALID);
  CHECK_CONTAINS(omc_status_detail(), "input 1 is written over and shares memory with input 2");
  in[2] = at + 8;
  CHECK_OK(omc_run_forward(plan, in, out, NULL, 1, NULL, NULL));
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

TEST(session_refuses_a_gradient_of_another_type) {
  static const struct {
    const char *type;
    omc_status status;
    const char *detail;
  } rows[] = {{"f32[4]", OMC_ESHAPE, "output 0 is f32[5], its gradient f32[4]"},
              {"f64[5]", OMC_EDTYPE, "output 0 is f32[5], its gradient f64[5]"},
              {"f32[?]", OMC_ESHAPE, "output 0 is f32[5], its gradient f32[?]"}};
  const omc_type x = {OMC_F32, {1, {5}}};
  const bool yes[] = {true};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    char text[128];
    (void)snprintf(text, sizeof text,
                   "input %%x : f32[?] grad\ngrad %%g of 0 : %s\n%%y = Exp(%%x)\nreturn %%y\n",
                   rows[i].type);
    omc_session *s = open_session(text, 1);
    omc_plan *plan = NULL;
    CHECK_INT(omc_session_plan(s, &(omc_signature){&x, yes, yes, 1, false, false}, &plan),
              rows[i].status);
    CHECK_TEXT(omc_status_detail(), rows[i].detail);
    omc_session_destroy(s);
  }
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
  REQUIRE_OK(omc_run_forward(plan, in, out, NULL, 1, NULL, &run));
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
  CHECK_STATUS(omc_run_forward(plan, in, out, NULL, 1, NULL, &run), EINDEX);
  CHECK(run == NULL);
  CHECK_INT(omc_session_get_stats(s).runs_live, 0);
  ids[2] = 1;
  REQUIRE_OK(omc_run_forward(plan, in, out, NULL, 1, NULL, &run));
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

TEST(session_calls_back) {
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
  REQUIRE_OK(omc_run_forward(plan, in, out, NULL, 1, NULL, &run));
  CHECK_INT(states, 1);
  CHECK_OK(backward_of(run, in, out, grad_out, grad_in));
  for (int i = 0; i < 4; i++)
    CHECK(close_to(y[i], 2 * sin(x[i])) && close_to(dx[i], 2 * cos(x[i])));
  omc_run_destroy(run);
  CHECK_INT(states, 0);
  REQUIRE_OK(omc_session_plan(s, &(omc_signature){inputs, no, no, 1, false, false}, &inference));
  REQUIRE_OK(omc_run_forward(inference, in, out, NULL, 1, NULL, &run));
  CHECK_INT(states, 0);
  fails = true;
  CHECK_STATUS(omc_run_forward(plan, in, out, NULL, 1, NULL, &run), ECALLBACK);
  CHECK_INT(states, 0);
  omc_plan_release(plan);
  omc_plan_release(inference);
  omc_session_destroy(s);
}
