/* Convolutions and their gradients against sums of products in double, on every instruction set, in
 * the dtypes whose panels hold numbers and those whose panels hold pairs. Operands are small whole
 * numbers, so that every sum is exact and the result is that, rounded once. */
#include "harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/element.h"
#include "cpu/kernel.h"
#include "run/session.h"

typedef struct {
  int64_t n, c, o, groups;
  int64_t in[2], kernel[2], stride[2], pad[2], dilation[2];
} convolution;

static const convolution convolutions[] = {
    {2, 3, 5, 1, {9, 11}, {3, 3}, {1, 1}, {1, 1}, {1, 1}},    /* a channel without a second */
    {2, 8, 33, 1, {7, 7}, {1, 1}, {1, 1}, {0, 0}, {1, 1}},    /* in place, more than a panel */
    {3, 7, 6, 1, {5, 13}, {1, 1}, {2, 2}, {0, 0}, {1, 1}},    /* twins */
    {1, 3, 17, 1, {23, 22}, {7, 7}, {2, 2}, {3, 3}, {1, 1}},  /* stacked rows */
    {2, 6, 9, 3, {10, 9}, {3, 3}, {1, 2}, {2, 1}, {2, 1}},    /* groups */
    {2, 5, 5, 5, {9, 9}, {3, 3}, {1, 1}, {1, 1}, {1, 1}},     /* each channel by itself */
    {1, 40, 4, 1, {8, 19}, {2, 3}, {1, 1}, {0, 1}, {1, 1}},   /* depth of many groups of units */
    {1, 121, 3, 1, {4, 5}, {3, 3}, {1, 1}, {1, 1}, {1, 1}},   /* and of more blocks than one */
    {2, 34, 35, 1, {18, 17}, {3, 3}, {1, 1}, {1, 1}, {1, 1}}, /* where Winograd repays */
    {9, 18, 18, 18, {7, 6}, {3, 3}, {1, 1}, {1, 1}, {1, 1}},  /* lanes are channels */
    {2, 33, 33, 33, {9, 8}, {3, 2}, {2, 2}, {1, 0}, {1, 2}},  /* with steps */
    {1, 20, 33, 1, {6, 7}, {3, 3}, {2, 2}, {1, 1}, {1, 1}},   /* some taps of each channel */
    {2, 3, 4, 1, {1, 300}, {1, 270}, {1, 1}, {0, 3}, {1, 1}}, /* more taps than packed together */
    {2, 6, 20, 1, {3, 56}, {3, 3}, {1, 1}, {1, 1}, {1, 1}},   /* vectors within rows, and across */
    {1, 3, 15, 1, {7, 70}, {3, 5}, {2, 2}, {1, 2}, {1, 1}},   /* of columns of each phase */
    {2, 32, 33, 1, {5, 8}, {3, 3}, {1, 1}, {1, 1}, {1, 1}},   /* both pairs of pixels, padded */
    {2, 16, 5, 1, {4, 9}, {2, 5}, {1, 1}, {0, 2}, {1, 2}},    /* half a panel at the end */
    {3, 48, 9, 3, {3, 8}, {1, 3}, {1, 1}, {0, 0}, {1, 1}},    /* of each group */
    {1, 16, 3, 1, {6, 9}, {3, 3}, {2, 2}, {1, 1}, {1, 1}},    /* pairs are not neighbours */
};

enum { X, W, B, N_IN };

typedef struct {
  omc_type types[N_IN], out;
  double *in[N_IN], *grad[N_IN], *y, *dy; /* what they should be */
} problem;

static double *numbers(const omc_type *type) {
  return calloc((size_t)omc_shape_numel(&type->shape) + 1, sizeof(double));
}

static uint32_t state = 1;
/* -2, -1, 0, 1 or 2. */
static double small(void) {
  state = state * 1664525u + 1013904223u;
  return (double)((state >> 16) % 5) - 2;
}

static void fill(const omc_type *type, double *x) {
  for (int64_t i = 0; i < omc_shape_numel(&type->shape); i++) x[i] = small();
}

static bool make_problem(const convolution *v, omc_dtype dtype, problem *p) {
  int64_t out[2];
  for (int a = 0; a < 2; a++)
    out[a] =
        (v->in[a] + 2 * v->pad[a] - (v->kernel[a] - 1) * v->dilation[a] - 1) / v->stride[a] + 1;
  *p = (problem){.types = {{dtype, {4, {v->n, v->c, v->in[0], v->in[1]}}},
                           {dtype, {4, {v->o, v->c / v->groups, v->kernel[0], v->kernel[1]}}},
                           {dtype, {1, {v->o}}}},
                 .out = {dtype, {4, {v->n, v->o, out[0], out[1]}}}};
  p->y = numbers(&p->out), p->dy = numbers(&p->out);
  bool ok = p->y && p->dy;
  for (int i = 0; i < N_IN; i++) {
    p->in[i] = numbers(&p->types[i]), p->grad[i] = numbers(&p->types[i]);
    ok = ok && p->in[i] && p->grad[i];
    if (ok) fill(&p->types[i], p->in[i]);
  }
  if (ok) fill(&p->out, p->dy);
  return CHECK(ok);
}

static void end_problem(problem *p) {
  for (int i = 0; i < N_IN; i++) free(p->in[i]), free(p->grad[i]);
  free(p->y), free(p->dy);
}

static void solve(const convolution *v, problem *p) {
  const int64_t *out = &p->out.shape.dims[2], cg = v->c / v->groups, og = v->o / v->groups;
  int64_t at = 0;
  for (int64_t n = 0; n < v->n; n++)
    for (int64_t o = 0; o < v->o; o++)
      for (int64_t i = 0; i < out[0]; i++)
        for (int64_t j = 0; j < out[1]; j++, at++) {
          p->y[at] = p->in[B][o];
          p->grad[B][o] += p->dy[at];
          for (int64_t t = 0; t < cg * v->kernel[0] * v->kernel[1]; t++) {
            const int64_t c = t / v->kernel[1] / v->kernel[0];
            const int64_t y =
                i * v->stride[0] - v->pad[0] + t / v->kernel[1] % v->kernel[0] * v->dilation[0];
            const int64_t x = j * v->stride[1] - v->pad[1] + t % v->kernel[1] * v->dilation[1];
            if (y < 0 || y >= v->in[0] || x < 0 || x >= v->in[1]) continue;
            const int64_t plane = n * v->c + o / og * cg + c;
            const int64_t from = (plane * v->in[0] + y) * v->in[1] + x,
                          w = o * cg * v->kernel[0] * v->kernel[1] + t;
            p->y[at] += p->in[X][from] * p->in[W][w];
            p->grad[X][from] += p->dy[at] * p->in[W][w];
            p->grad[W][w] += p->dy[at] * p->in[X][from];
          }
        }
}

/* Elements of a dtype: those numbers, or none. */
static void *stored(const omc_type *type, const double *from) {
  const int64_t n = omc_shape_numel(&type->shape);
  void *x = calloc((size_t)n + 1, omc_dtype_size(type->dtype));
  for (int64_t i = 0; x && from && i < n; i++) omc_element_set_float(type->dtype, x, i, from[i]);
  return x;
}

static bool equals(const omc_type *type, const void *x, const double *want) {
  for (int64_t i = 0; i < omc_shape_numel(&type->shape); i++) {
    uint64_t rounded;
    omc_element_set_float(type->dtype, &rounded, 0, want[i]);
    if (omc_element_float(type->dtype, x, i) != omc_element_float(type->dtype, &rounded, 0))
      return false;
  }
  return true;
}

static void check_results(omc_plan *plan, const problem *p, const char *text) {
  void *in[N_IN], *grad[N_IN], *y = stored(&p->out, NULL), *dy = stored(&p->out, p->dy);
  bool ok = y && dy;
  for (int i = 0; i < N_IN; i++) {
    in[i] = stored(&p->types[i], p->in[i]), grad[i] = stored(&p->types[i], NULL);
    ok = ok && in[i] && grad[i];
  }
  omc_run *run = NULL;
  omc_backward b = {.inputs = in, .outputs = &y, .grads = &dy, .results = grad};
  if (CHECK(ok) && CHECK_OK(omc_run_forward(plan, in, &y, grad, 1, NULL, &run)) &&
      CHECK_OK(omc_run_enter(run, &b)) && CHECK_OK(omc_run_backward(run, &b))) {
    bool right = CHECK(equals(&p->out, y, p->y));
    for (int i = 0; i < N_IN; i++) right &= CHECK(equals(&p->types[i], grad[i], p->grad[i]));
    if (!right) printf("  isa %d:\n%s", (int)omc_cpu_isa(), text);
  }
  omc_run_destroy(run);
  for (int i = 0; i < N_IN; i++) free(in[i]), free(grad[i]);
  free(y), free(dy);
}

static void check(const convolution *v, omc_dtype dtype, const problem *p) {
  const char *d = omc_dtype_get(dtype)->text;
  char text[512];
  snprintf(text, sizeof text,
           "input %%x : %s[%d,%d,%d,%d] grad\ninput %%w : %s[%d,%d,%d,%d] grad\n"
           "input %%b : %s[%d] grad\n%%y = Conv(%%x, %%w, %%b) {strides=[%d, %d], "
           "pads=[%d, %d, %d, %d], dilations=[%d, %d], group=%d}\nreturn %%y\n",
           d, (int)v->n, (int)v->c, (int)v->in[0], (int)v->in[1], d, (int)v->o,
           (int)(v->c / v->groups), (int)v->kernel[0], (int)v->kernel[1], d, (int)v->o,
           (int)v->stride[0], (int)v->stride[1], (int)v->pad[0], (int)v->pad[1], (int)v->pad[0],
           (int)v->pad[1], (int)v->dilation[0], (int)v->dilation[1], (int)v->groups);
  const bool wanted[N_IN] = {true, true, true};
  const omc_signature signature = {p->types, wanted, wanted, 1, false, false};
  omc_session *s = NULL;
  omc_plan *plan = NULL;
  if (CHECK_OK(omc_session_create(text, strlen(text), NULL, NULL, NULL, omc_provider_host(),
                                  omc_default_allocator(), 1, &s)) &&
      CHECK_OK(omc_session_plan(s, &signature, &plan)))
    check_results(plan, p, text);
  omc_plan_release(plan);
  omc_session_destroy(s);
}

TEST(convolutions_are_exact_on_every_isa) {
  static const omc_dtype dtypes[] = {OMC_F32, OMC_F64, OMC_BF16, OMC_F16};
  for (size_t i = 0; i < sizeof convolutions / sizeof *convolutions; i++)
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
      problem p;
      if (make_problem(&convolutions[i], dtypes[d], &p)) {
        solve(&convolutions[i], &p);
        omc_cpu_set_isa(OMC_N_ISA);
        const int most = (int)omc_cpu_isa();
        for (int isa = 0; isa <= most; isa++) {
          omc_cpu_set_isa((omc_isa)isa);
          check(&convolutions[i], dtypes[d], &p);
        }
        omc_cpu_set_isa(OMC_N_ISA);
      }
      end_problem(&p);
    }
}
