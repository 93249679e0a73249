#include "sessions.h"

#include <math.h>
#include <string.h>

#include "device.h"

const char *const model =
    "input %x : f32[?,3]\n"
    "input %w : f32[3,4] grad\n"
    "input %b : f32[4] grad\n"
    "%0 = MatMul(%x, %w)\n"
    "%1 = Add(%0, %b)\n"
    "%2 = Sin(%1)\n"
    "return %2, %x\n";

const omc_provider *elsewhere;

const omc_provider *here(void) { return elsewhere ? elsewhere : omc_provider_host(); }

void go_elsewhere(void) { elsewhere = device_provider(); }

void come_back(void) {
  const omc_provider *p = elsewhere;
  elsewhere = NULL;
  CHECK_OK(p->sync_all(p->ctx));
  CHECK_INT(p->memory(p->ctx).used_bytes, 0);
}

omc_session *open_on(const char *text, const omc_allocator *allocator, uint32_t max_plans) {
  omc_session *s = NULL;
  CHECK_OK(
      omc_session_create(text, strlen(text), NULL, NULL, NULL, here(), allocator, max_plans, &s));
  return s;
}

omc_session *open_session(const char *text, uint32_t max_plans) {
  return open_on(text, omc_default_allocator(), max_plans);
}

omc_status plan_rows(omc_session *s, int64_t rows, bool joint, bool retain_graph, omc_plan **out) {
  const omc_type inputs[] = {
      {OMC_F32, {2, {rows, 3}}}, {OMC_F32, {2, {3, 4}}}, {OMC_F32, {1, {4}}}};
  const bool in_grads[] = {false, true, true}, out_grads[] = {joint, false};
  const omc_signature signature = {inputs, in_grads, out_grads, 1, retain_graph, false};
  return omc_session_plan(s, &signature, out);
}

void fill(tensors *t, float shift) {
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

omc_status forward(omc_plan *plan, tensors *t, omc_run **run) {
  tensors *d;
  OMC_TRY(send(t, &d));
  void *in[] = {d->x, d->w, d->b}, *out[] = {d->y, d->x_again};
  return fetch(t, d, omc_run_forward(plan, in, out, NULL, 1, NULL, run));
}

omc_status backward_of(omc_run *run, void *const *in, void *const *out, void *const *grad_out,
                       void *const *grad_in) {
  omc_backward b = {.inputs = in, .outputs = out, .grads = grad_out, .results = grad_in};
  OMC_TRY(omc_run_enter(run, &b));
  return omc_run_backward(run, &b);
}

omc_status backward(omc_run *run, tensors *t) {
  tensors *d;
  OMC_TRY(send(t, &d));
  void *in[] = {d->x, d->w, d->b}, *out[] = {d->y, d->x_again}, *grad_out[] = {d->dy, NULL};
  void *grad_in[] = {NULL, d->dw, d->db};
  return fetch(t, d, backward_of(run, in, out, grad_out, grad_in));
}

bool close_to(double a, double b) { return fabs(a - b) <= 1e-5 * (1 + fabs(b)); }

static double pre_activation(const tensors *t, int r, int c) {
  double sum = t->b[c];
  for (int k = 0; k < 3; k++) sum += (double)t->x[r * 3 + k] * t->w[k * 4 + c];
  return sum;
}

bool outputs_right(const tensors *t) {
  bool right = !memcmp(t->x, t->x_again, sizeof t->x);
  for (int i = 0; i < ROWS * 4; i++)
    right &= close_to(t->y[i], sin(pre_activation(t, i / 4, i % 4)));
  return right;
}

bool gradients_right(const tensors *t) {
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
