/* Softmax and LogSoftmax of a tensor [outer, n, inner] over n, and their gradients. */
#include "base/int.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/forms.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

#include "cpu/rows.h"

/* One reduction (or OMC_COLUMNS of them at most, `n` elements each, `step` apart): `a` and `b` are
 * the op's inputs, b NULL if it has one. `out` may be an input: every element is read before the
 * element of the same position is written. */
typedef void (*slice_fn)(const storage_t *a, const storage_t *b, storage_t *out,
                         const omc_axis_form *p, int64_t cols);

/* exp(x - top) once it has been summed: kept in y, or if that would round it, made again. */
OMC_INLINE vacc_t exp_kept(const storage_t *x, storage_t *y, int64_t left, vacc_t top) {
  const vacc_t e = vexp(vld_fill(x, left, -(acc_t)INFINITY) - top);
  if (OMC_STORES_ACC) vst_upto(y, e, left);
  return e;
}
OMC_INLINE vacc_t kept(const storage_t *x, const storage_t *y, int64_t left, vacc_t top) {
  return OMC_STORES_ACC ? vld_fill(y, left, 0) : vexp(vld_fill(x, left, 0) - top);
}

/* Of a row that is no longer than this it is kept as it is computed. */
enum { LONGEST_KEPT = 2048 };

OMC_INLINE vacc_t exp_to(const storage_t *x, acc_t *to, int64_t left, vacc_t top) {
  const vacc_t e = vexp(vld_fill(x, left, -(acc_t)INFINITY) - top);
  if (to) vstr_upto(to, e, left);
  return e;
}

static void softmax_row(const storage_t *x, const storage_t *b, storage_t *y,
                        const omc_axis_form *p, int64_t cols) {
  (void)b, (void)cols;
  const int64_t n = p->n;
  acc_t room[LONGEST_KEPT], *const e = sums_of(y, room);
  const bool keeps = OMC_STORES_ACC || n <= LONGEST_KEPT;
  const vacc_t top = vset(row_max(x, n));
  const acc_t sum = OMC_ROW_SUM(k, left, n, exp_to(x + k, keeps ? e + k : NULL, left, top));
  const vacc_t scale = vset(1 / sum);
  for (int64_t k = 0, left = n; k < n; k += OMC_VL, left -= OMC_VL) {
    const vacc_t now = keeps ? vldr_upto(e + k, left) : vexp(vld_fill(x + k, left, 0) - top);
    vst_upto(y + k, now * scale, left);
  }
}

static void log_softmax_row(const storage_t *x, const storage_t *b, storage_t *y,
                            const omc_axis_form *p, int64_t cols) {
  (void)b, (void)cols;
  const acc_t top = row_max(x, p->n);
  const vacc_t vtop = vset(top), log_sum = vlog(vset(row_sum_exp(x, p->n, top)));
  for (int64_t k = 0; k < p->n; k += OMC_VL)
    vst_upto(y + k, vld_fill(x + k, p->n - k, 0) - vtop - log_sum, p->n - k);
}

static void softmax_grad_row(const storage_t *dy, const storage_t *y, storage_t *dx,
                             const omc_axis_form *p, int64_t cols) {
  (void)cols;
  const vacc_t dot =
      vset(OMC_ROW_SUM(k, left, p->n, vld_fill(dy + k, left, 0) * vld_fill(y + k, left, 0)));
  for (int64_t k = 0, left = p->n; k < p->n; k += OMC_VL, left -= OMC_VL)
    vst_upto(dx + k, vld_fill(y + k, left, 0) * (vld_fill(dy + k, left, 0) - dot), left);
}

static void log_softmax_grad_row(const storage_t *dy, const storage_t *y, storage_t *dx,
                                 const omc_axis_form *p, int64_t cols) {
  (void)cols;
  const vacc_t sum = vset(row_sum(dy, p->n));
  for (int64_t k = 0, left = p->n; k < p->n; k += OMC_VL, left -= OMC_VL)
    vst_upto(dx + k, vld_fill(dy + k, left, 0) - vexp(vld_fill(y + k, left, 0)) * sum, left);
}

/* Visits the n x cols elements of a slice vector by vector: `i` is the element's offset from the
 * slice's start, `j` its column, `left` the columns from j on; the caller names them. */
#define EACH_CELL(i, j, left, p, cols)                                    \
  for (int64_t row_ = 0; row_ < (p)->n; row_++)                           \
    for (int64_t j = 0, i = row_ * (p)->inner, left = (cols); j < (cols); \
         j += OMC_VL, i += OMC_VL, left -= OMC_VL)

static void fill_cols(acc_t *acc, acc_t x) {
  for (int64_t j = 0; j < OMC_COLUMNS; j += OMC_VL) vstr(acc + j, vset(x));
}

static void max_cols(const storage_t *x, const omc_axis_form *p, int64_t cols, acc_t *top) {
  fill_cols(top, -(acc_t)INFINITY);
  EACH_CELL(i, j, left, p, cols) vstr(top + j, vmax(vldr(top + j), vld_fill(x + i, left, 0)));
}

static void softmax_cols(const storage_t *x, const storage_t *b, storage_t *y,
                         const omc_axis_form *p, int64_t cols) {
  (void)b;
  acc_t top[OMC_COLUMNS], sum[OMC_COLUMNS];
  max_cols(x, p, cols, top);
  fill_cols(sum, 0);
  EACH_CELL(i, j, left, p, cols) {
    vstr(sum + j, vldr(sum + j) + exp_kept(x + i, y + i, left, vldr(top + j)));
  }
  EACH_CELL(i, j, left, p, cols)
  vst_upto(y + i, kept(x + i, y + i, left, vldr(top + j)) / vldr(sum + j), left);
}

static void log_softmax_cols(const storage_t *x, const storage_t *b, storage_t *y,
                             const omc_axis_form *p, int64_t cols) {
  (void)b;
  acc_t top[OMC_COLUMNS], sum[OMC_COLUMNS];
  max_cols(x, p, cols, top);
  fill_cols(sum, 0);
  EACH_CELL(i, j, left, p, cols)
  vstr(sum + j, vldr(sum + j) + vexp(vld_fill(x + i, left, 0) - vldr(top + j)));
  for (int64_t j = 0; j < OMC_COLUMNS; j += OMC_VL) vstr(sum + j, vlog(vldr(sum + j)));
  EACH_CELL(i, j, left, p, cols)
  vst_upto(y + i, vld_fill(x + i, left, 0) - vldr(top + j) - vldr(sum + j), left);
}

static void softmax_grad_cols(const storage_t *dy, const storage_t *y, storage_t *dx,
                              const omc_axis_form *p, int64_t cols) {
  acc_t dot[OMC_COLUMNS];
  fill_cols(dot, 0);
  EACH_CELL(i, j, left, p, cols)
  vstr(dot + j, vfma(vld_fill(dy + i, left, 0), vld_fill(y + i, left, 0), vldr(dot + j)));
  EACH_CELL(i, j, left, p, cols)
  vst_upto(dx + i, vld_fill(y + i, left, 0) * (vld_fill(dy + i, left, 0) - vldr(dot + j)), left);
}

static void log_softmax_grad_cols(const storage_t *dy, const storage_t *y, storage_t *dx,
                                  const omc_axis_form *p, int64_t cols) {
  acc_t sum[OMC_COLUMNS];
  fill_cols(sum, 0);
  EACH_CELL(i, j, left, p, cols) vstr(sum + j, vldr(sum + j) + vld_fill(dy + i, left, 0));
  EACH_CELL(i, j, left, p, cols) {
    const vacc_t exp_y = vexp(vld_fill(y + i, left, 0));
    vst_upto(dx + i, vld_fill(dy + i, left, 0) - exp_y * vldr(sum + j), left);
  }
}

typedef struct {
  const storage_t *a, *b;
  storage_t *out;
  const omc_axis_form *p;
  int64_t groups; /* of columns, for each outer index */
  slice_fn slice;
} softmax_job;

static void run_slices(omc_range range, void *ctx) {
  const softmax_job *job = ctx;
  const omc_axis_form *p = job->p;
  for (int64_t g = range.begin; g < range.end; g++) {
    const int64_t col = g % job->groups * OMC_COLUMNS;
    const int64_t at = g / job->groups * p->n * p->inner + col;
    const int64_t cols = p->inner - col < OMC_COLUMNS ? p->inner - col : OMC_COLUMNS;
    job->slice(job->a + at, job->b ? job->b + at : NULL, job->out + at, p, cols);
  }
}

static omc_status run_softmax(const omc_kernel_args *args, slice_fn row, slice_fn cols) {
  const omc_axis_form *p = args->params;
  softmax_job job = {.a = args->in[0].data,
                     .b = args->n_in > 1 ? args->in[1].data : NULL,
                     .out = args->out[0].data,
                     .p = p,
                     .groups = omc_ceil_div(p->inner, OMC_COLUMNS),
                     .slice = p->inner == 1 ? row : cols};
  if (p->n == 0) return OMC_OK;
  const int64_t width = p->inner < OMC_COLUMNS ? p->inner : OMC_COLUMNS;
  omc_parallel_for(p->outer * job.groups, omc_grain(OMC_GRAIN_ELEMENTS, p->n * width),
                   args->threads, run_slices, &job);
  return OMC_OK;
}

OMC_KERNEL(Softmax, args) { return run_softmax(args, softmax_row, softmax_cols); }
OMC_KERNEL(LogSoftmax, args) { return run_softmax(args, log_softmax_row, log_softmax_cols); }
OMC_KERNEL(SoftmaxGrad, args) { return run_softmax(args, softmax_grad_row, softmax_grad_cols); }
OMC_KERNEL(LogSoftmaxGrad, args) {
  return run_softmax(args, log_softmax_grad_row, log_softmax_grad_cols);
}

#endif

#ifndef OMC_VARIANT

static omc_status params_softmax(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  return omc_axis_form_of(node, params);
}

#define SOFTMAX(name) \
  OMC_KERNELS(name)   \
  OMC_CPU_OP(name, name, OMC_PARAMS(omc_axis_form, params_softmax))

SOFTMAX(Softmax)
SOFTMAX(LogSoftmax)
SOFTMAX(SoftmaxGrad)
SOFTMAX(LogSoftmaxGrad)

#endif
