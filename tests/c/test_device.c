/* A second device: the core knows it by its table alone. */
#include "harness.h"

#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device.h"
#include "run/session.h"

/* y = sin(x @ w + b) * c, with the gradients of w and b; c is a constant, and x comes back. */
static const char *const model =
    "input %x : f32[2,3]\n"
    "input %w : f32[3,4] grad\n"
    "input %b : f32[4] grad\n"
    "const %c : f32[4] = [1, 2, 3, 4]\n"
    "%0 = MatMul(%x, %w)\n"
    "%1 = Add(%0, %b)\n"
    "%2 = Sin(%1)\n"
    "%3 = Mul(%2, %c)\n"
    "return %3, %x\n";

enum { X = 6, W = 12, B = 4, Y = 8 };
typedef struct tensors {
  float x[X], w[W], b[B], y[Y], x_again[X], dy[Y], dw[W], db[B];
} tensors;

static void fill(tensors *t) {
  float *all = t->x;
  for (size_t i = 0; i < sizeof *t / sizeof *all; i++) all[i] = 0.1f * (float)(i % 7) - 0.2f;
}

static omc_status open_on(const omc_provider *p, bool joint, omc_session **s, omc_plan **plan) {
  const bool in_grads[] = {false, true, true}, out_grads[] = {joint, false};
  const omc_type inputs[] = {{OMC_F32, {2, {2, 3}}}, {OMC_F32, {2, {3, 4}}}, {OMC_F32, {1, {4}}}};
  OMC_TRY(
      omc_session_create(model, strlen(model), NULL, NULL, NULL, p, omc_default_allocator(), 1, s));
  return omc_session_plan(*s, &(omc_signature){inputs, in_grads, out_grads, 1, false, false}, plan);
}

static omc_status forward(omc_plan *plan, tensors *t, void *queue, omc_run **run) {
  void *in[] = {t->x, t->w, t->b}, *out[] = {t->y, t->x_again};
  return omc_run_forward(plan, in, out, NULL, 1, queue, run);
}

static omc_status backward(omc_run *run, tensors *t, const void *packed, void *queue) {
  void *in[] = {t->x, t->w, t->b}, *out[] = {t->y, t->x_again};
  void *grad_out[] = {t->dy, NULL}, *grad_in[] = {NULL, t->dw, t->db};
  omc_backward b = {.queue = queue,
                    .packed = packed,
                    .inputs = in,
                    .outputs = out,
                    .grads = grad_out,
                    .results = grad_in};
  OMC_TRY(omc_run_enter(run, &b));
  return omc_run_backward(run, &b);
}

/* What the CPU makes of it. */
static bool expected(tensors *t) {
  omc_session *s = NULL;
  omc_plan *plan = NULL;
  omc_run *run = NULL;
  fill(t);
  const bool ok = CHECK_OK(open_on(omc_provider_host(), true, &s, &plan)) &&
                  CHECK_OK(forward(plan, t, NULL, &run)) && CHECK_OK(backward(run, t, NULL, NULL));
  omc_run_destroy(run);
  omc_plan_release(plan);
  omc_session_destroy(s);
  return ok;
}

typedef struct scene {
  const omc_provider *p;
  omc_session *s;
  omc_plan *plan;
  omc_run *run;
  tensors host, *t; /* t: on the device */
} scene;

static bool begin(scene *c, bool joint) {
  void *t;
  *c = (scene){.p = device_provider()};
  fill(&c->host);
  if (!CHECK_OK(c->p->alloc(c->p->ctx, sizeof *c->t, NULL, &t))) return false;
  c->t = t;
  device_write(c->t, &c->host, sizeof c->host);
  return CHECK_OK(open_on(c->p, joint, &c->s, &c->plan));
}

static void end(scene *c) {
  omc_run_destroy(c->run);
  omc_plan_release(c->plan);
  omc_session_destroy(c->s);
  if (c->t) c->p->free(c->p->ctx, c->t, sizeof *c->t, NULL);
  CHECK_OK(c->p->sync_all(c->p->ctx));
  CHECK_INT(c->p->memory(c->p->ctx).used_bytes, 0);
}

static void check_results(scene *c) {
  tensors want;
  REQUIRE(expected(&want));
  device_read(&c->host, c->t, sizeof c->host);
  CHECK(memcmp(&c->host, &want, sizeof want) == 0);
}

TEST(device_memory_traps_the_host) {
  void *p;
  const omc_provider *d = device_provider();
  REQUIRE_OK(d->alloc(d->ctx, 64, NULL, &p));
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGSEGV, SIG_DFL); /* no report of the sanitizer */
    _exit(*(volatile char *)p);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
  d->free(d->ctx, p, 64, NULL);
  CHECK_OK(d->sync(d->ctx, NULL));
}

TEST(device_makes_the_bits_of_the_cpu) {
  scene c;
  if (begin(&c, true) && CHECK_OK(forward(c.plan, c.t, NULL, &c.run)) &&
      CHECK_OK(backward(c.run, c.t, NULL, NULL)) && CHECK_OK(c.p->sync(c.p->ctx, NULL)))
    check_results(&c);
  end(&c);
}

TEST(device_steps_copy_nothing_from_or_to_the_host) {
  scene c;
  const device_counts before = device_counted();
  if (begin(&c, true)) {
    const device_counts planned = device_counted();
    CHECK(planned.uploads > before.uploads); /* constants come with the plan */
    CHECK_OK(forward(c.plan, c.t, NULL, &c.run));
    CHECK_OK(backward(c.run, c.t, NULL, NULL));
    const device_counts after = device_counted();
    CHECK_INT(after.from_and_to_host, planned.from_and_to_host);
    CHECK_INT(after.uploads, planned.uploads);
    CHECK_INT(after.copies_within - planned.copies_within, 1); /* x, which is an output */
    CHECK_INT(after.kernels - planned.kernels, c.plan->n_steps);
  }
  end(&c);
}

TEST(device_has_each_constant_once_for_all_plans) {
  scene c;
  const uint64_t before = device_counted().uploads;
  if (begin(&c, true)) {
    const uint64_t one = device_counted().uploads;
    const bool in_grads[] = {false, true, true}, out_grads[] = {false, false};
    const omc_type inputs[] = {{OMC_F32, {2, {2, 3}}}, {OMC_F32, {2, {3, 4}}}, {OMC_F32, {1, {4}}}};
    omc_plan *plan = NULL;
    CHECK(one > before);
    CHECK_OK(omc_session_plan(c.s, &(omc_signature){inputs, in_grads, out_grads, 1, false, false},
                              &plan));
    CHECK(plan != c.plan);
    CHECK_INT(device_counted().uploads, one);
    omc_plan_release(plan);
  }
  end(&c);
}

TEST(device_runs_wait_for_nothing) {
  scene c;
  if (begin(&c, true)) {
    tensors now;
    device_pause(NULL);
    CHECK_OK(forward(c.plan, c.t, NULL, &c.run));
    CHECK_OK(backward(c.run, c.t, NULL, NULL));
    omc_run_destroy(c.run); /* its memory is given back when the queue gets there */
    c.run = NULL;
    device_read(&now, c.t, sizeof now);
    CHECK(memcmp(&now, &c.host, sizeof now) == 0);
    device_resume(NULL);
    CHECK_OK(c.p->sync(c.p->ctx, NULL));
    check_results(&c);
  }
  end(&c);
}

/* Between two forwards in a queue that does nothing, memory that the first has given back is not
 * given to the second. */
TEST(device_memory_is_freed_in_its_queue) {
  scene c;
  if (begin(&c, false)) {
    const size_t before = c.p->memory(c.p->ctx).used_bytes;
    device_pause(NULL);
    CHECK_OK(forward(c.plan, c.t, NULL, NULL));
    const size_t one = c.p->memory(c.p->ctx).used_bytes;
    CHECK_OK(forward(c.plan, c.t, NULL, NULL));
    CHECK(one > before);
    CHECK_INT(c.p->memory(c.p->ctx).used_bytes - one, one - before);
    device_resume(NULL);
    CHECK_OK(c.p->sync(c.p->ctx, NULL));
    CHECK_INT(c.p->memory(c.p->ctx).used_bytes, before);
  }
  end(&c);
}

TEST(device_backward_in_another_queue_waits_for_forward) {
  scene c;
  static void *other;
  if (!other) other = device_queue();
  if (begin(&c, true) && CHECK(other != NULL)) {
    device_pause(NULL);
    CHECK_OK(forward(c.plan, c.t, NULL, &c.run));
    CHECK_OK(backward(c.run, c.t, NULL, other));
    device_resume(NULL);
    CHECK_OK(c.p->sync(c.p->ctx, other));
    check_results(&c);
  }
  end(&c);
}

static bool order_fails;
static omc_status order_or_fail(void *ctx, void *queue, void *other) {
  if (order_fails) OMC_FAIL(EINTERNAL, "the queues are in no order");
  return device_provider()->order(ctx, queue, other);
}

/* The next one works in the run's own arena, as if it were the first. */
TEST(device_backward_that_could_not_begin_leaves_the_run_as_it_was) {
  scene c;
  static omc_provider p;
  static void *other;
  p = *device_provider();
  p.order = order_or_fail;
  if (!other) other = device_queue();
  if (begin(&c, true) && CHECK(other != NULL)) {
    omc_plan_release(c.plan);
    omc_session_destroy(c.s);
    c.plan = NULL, c.s = NULL;
    if (CHECK_OK(open_on(&p, true, &c.s, &c.plan)) &&
        CHECK_OK(forward(c.plan, c.t, NULL, &c.run))) {
      const uint64_t copies = device_counted().copies_within;
      order_fails = true;
      CHECK_STATUS(backward(c.run, c.t, NULL, other), EINTERNAL);
      order_fails = false;
      CHECK_OK(backward(c.run, c.t, NULL, NULL));
      CHECK_OK(c.p->sync(c.p->ctx, NULL));
      CHECK_INT(device_counted().copies_within, copies);
      check_results(&c);
    }
  }
  end(&c);
}

/* Its queue has been done and the other not: nothing is there yet. */
TEST(device_runs_are_packed_in_the_queue_that_is_given) {
  scene c;
  static void *other;
  void *packed = NULL;
  if (!other) other = device_queue();
  if (begin(&c, true) && CHECK(other != NULL)) {
    const size_t bytes = c.plan->forward_bytes;
    const char untouched[4] = {1, 2, 3, 4};
    char start[sizeof untouched];
    CHECK(bytes >= sizeof untouched);
    REQUIRE_OK(c.p->alloc(c.p->ctx, bytes, NULL, &packed));
    device_write(packed, untouched, sizeof untouched);
    device_pause(NULL);
    device_pause(other);
    CHECK_OK(forward(c.plan, c.t, NULL, &c.run));
    CHECK_OK(omc_run_pack(c.run, packed, other));
    CHECK_STATUS(omc_run_pack(c.run, packed, other), EINVALID);
    CHECK_OK(backward(c.run, c.t, packed, other));
    device_resume(NULL);
    CHECK_OK(c.p->sync(c.p->ctx, NULL));
    device_read(start, packed, sizeof start);
    CHECK(memcmp(start, untouched, sizeof start) == 0);
    device_resume(other);
    CHECK_OK(c.p->sync(c.p->ctx, other));
    check_results(&c);
    c.p->free(c.p->ctx, packed, bytes, other);
  }
  end(&c);
}

/* Two forwards given to a queue that does nothing yet: the second reads what the first writes. */
TEST(device_writes_over_inputs_in_the_order_of_the_queue) {
  static const char *const text =
      "input %x : f32[4]\ninput %m : f32[4]\n%y = Exp(%m)\n%n = Add(%m, %x)\n"
      "return %y, %n over %m\n";
  const omc_provider *p = device_provider();
  const omc_type types[] = {{OMC_F32, {1, {4}}}, {OMC_F32, {1, {4}}}};
  const bool no[] = {false, false};
  const float start[] = {1, 2, 3, 4};
  float now[4];
  char *t;
  omc_session *s = NULL;
  omc_plan *plan = NULL;
  REQUIRE_OK(p->alloc(p->ctx, 192, NULL, (void **)&t));
  device_write(t, start, sizeof start);
  device_write(t + 64, start, sizeof start);
  CHECK_OK(
      omc_session_create(text, strlen(text), NULL, NULL, NULL, p, omc_default_allocator(), 1, &s));
  if (s && CHECK_OK(omc_session_plan(s, &(omc_signature){types, no, no, 0, false, false}, &plan))) {
    void *in[] = {t, t + 64}, *out[] = {t + 128, NULL};
    const device_counts before = device_counted();
    device_pause(NULL);
    CHECK_OK(omc_run_forward(plan, in, out, NULL, 1, NULL, NULL));
    CHECK_OK(omc_run_forward(plan, in, out, NULL, 1, NULL, NULL));
    device_resume(NULL);
    CHECK_OK(p->sync(p->ctx, NULL));
    device_read(now, t + 64, sizeof now);
    for (int i = 0; i < 4; i++) CHECK_FLOAT(now[i], 3 * start[i]);
    CHECK_INT(device_counted().copies_within, before.copies_within);
  }
  omc_plan_release(plan);
  omc_session_destroy(s);
  p->free(p->ctx, t, 192, NULL);
  CHECK_OK(p->sync(p->ctx, NULL));
}

TEST(device_failures_are_told_when_waited_for) {
  static const char *const text =
      "input %x : f32[3,2]\ninput %i : i64[2]\n%y = Gather(%x, %i)\nreturn %y\n";
  const omc_provider *p = device_provider();
  const omc_type types[] = {{OMC_F32, {2, {3, 2}}}, {OMC_I64, {1, {2}}}};
  const bool no[] = {false, false};
  const int64_t ids[] = {0, 5};
  char *t;
  omc_session *s = NULL;
  omc_plan *plan = NULL;
  REQUIRE_OK(p->alloc(p->ctx, 192, NULL, (void **)&t));
  device_write(t + 64, ids, sizeof ids);
  CHECK_OK(
      omc_session_create(text, strlen(text), NULL, NULL, NULL, p, omc_default_allocator(), 1, &s));
  if (s && CHECK_OK(omc_session_plan(s, &(omc_signature){types, no, no, 0, false, false}, &plan))) {
    void *in[] = {t, t + 64}, *out[] = {t + 128};
    CHECK_OK(omc_run_forward(plan, in, out, NULL, 1, NULL, NULL));
    CHECK_STATUS(p->sync(p->ctx, NULL), EINDEX);
    CHECK_CONTAINS(omc_status_detail(), "index 5 is out of bounds");
    CHECK_OK(p->sync(p->ctx, NULL));
    in[0] = (void *)(uintptr_t)ids;
    CHECK_STATUS(omc_run_forward(plan, in, out, NULL, 1, NULL, NULL), EINTERNAL);
    CHECK_CONTAINS(omc_status_detail(), "memory of the host's");
  }
  omc_plan_release(plan);
  omc_session_destroy(s);
  p->free(p->ctx, t, 192, NULL);
  CHECK_OK(p->sync(p->ctx, NULL));
}
