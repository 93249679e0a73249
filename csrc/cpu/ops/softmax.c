/* Softmax and LogSoftmax of a tensor [outer, n, inner] over n, and their gradients. */
#include <string.h>

#include "base/int.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/forms.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

#include "cpu/rows.h"

/* `count` reductions of n elements each, side by side, that are a slice: one row, OMC_VL short rows
 * at most, or OMC_COLUMNS columns. `a` and `b` are the op's inputs, b NULL if it has one. `out` may
 * be an input: every element is read before the element of the same position is written. */
typedef void (*slice_fn)(const storage_t *a, const storage_t *b, storage_t *out,
                         const omc_axis_form *p, int64_t count);

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

/* Sets v, rows that are turned, to exp(x - top), and returns what that adds up to. */
OMC_INLINE vacc_t exp_turned(vacc_t *v, int64_t n, vacc_t *top) {
  vacc_t sum = vset(0);
  *top = v[0];
  for (int64_t k = 1; k < n; k++) *top = vmax(*top, v[k]);
  for (int64_t k = 0; k < n; k++) sum += v[k] = vexp(v[k] - *top);
  return sum;
}

static void softmax_short(const storage_t *x, const storage_t *b, storage_t *y,
                          const omc_axis_form *p, int64_t rows) {
  (void)b;
  vacc_t v[OMC_VL], top;
  load_turned(x, rows, p->n, v);
  const vacc_t scale = vset(1) / exp_turned(v, p->n, &top);
  for (int64_t k = 0; k < p->n; k++) v[k] *= scale;
  store_turned(v, rows, p->n, y);
}

static void log_softmax_short(const storage_t *x, const storage_t *b, storage_t *y,
                              const omc_axis_form *p, int64_t rows) {
  (void)b;
  vacc_t v[OMC_VL], e[OMC_VL], top;
  load_turned(x, rows, p->n, v);
  memcpy(e, v, sizeof e);
  const vacc_t log_sum = vlog(exp_turned(e, p->n, &top));
  for (int64_t k = 0; k < p->n; k++) v[k] = v[k] - top - log_sum;
  store_turned(v, rows, p->n, y);
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
  int64_t width;  /* reductions of a slice, at most */
  int64_t side;   /* reductions that lie side by side, of which slices are cut */
  int64_t slices; /* that they are cut into */
  slice_fn slice;
} softmax_job;

static void run_slices(omc_range range, void *ctx) {
  const softmax_job *job = ctx;
  const omc_axis_form *p = job->p;
  const int64_t next = p->inner == 1 ? p->n : 1;
  for (int64_t g = range.begin; g < range.end; g++) {
    const int64_t first = g % job->slices * job->width;
    const int64_t at = g / job->slices * p->n * p->inner + first * next;
    job->slice(job->a + at, job->b ? job->b + at : NULL, job->out + at, p,
               omc_min(job->side - first, job->width));
  }
}

/* By rows, by short ones, which may be left to the former, or by columns. */
static omc_status run_softmax(const omc_kernel_args *args, slice_fn row, slice_fn rows,
                              slice_fn cols) {
  const omc_axis_form *p = args->params;
  if (p->n == 0) return OMC_OK;
  softmax_job job = {.a = args->in[0].data,
                     .b = omc_in_data(args, 1),
                     .out = args->out[0].data,
                     .p = p,
                     .width = OMC_COLUMNS,
                     .side = p->inner,
                     .slice = cols};
  int64_t outer = p->outer;
  if (p->inner == 1) {
    const bool brief = rows && p->n <= OMC_VL;
    job.slice = brief ? rows : row, job.width = brief ? OMC_VL : 1;
    job.side = outer, outer = 1;
  }
  job.slices = omc_ceil_div(job.side, job.width);
  omc_parallel_for(outer * job.slices,
                   omc_grain(OMC_GRAIN_ELEMENTS, p->n * omc_min(job.side, job.width)),
                   args->threads, run_slices, &job);
  return OMC_OK;
}

OMC_KERNEL(Softmax, args) { return run_softmax(args, softmax_row, softmax_short, softmax_cols); }
OMC_KERNEL(LogSoftmax, args) {
  return run_softmax(args, log_softmax_row, log_softmax_short, log_softmax_cols);
}
OMC_KERNEL(SoftmaxGrad, args) {
  return run_softmax(args, softmax_grad_row, NULL, softmax_grad_cols);
}
OMC_KERNEL(LogSoftmaxGrad, args) {
  return run_softmax(args, log_softmax_grad_row, NULL, log_softmax_grad_cols);
}

#endif

#ifndef OMC_VARIANT

OMC_FORM(params_softmax, omc_axis_form_of)

#define SOFTMAX(name) \
  OMC_KERNELS(name)   \
  OMC_CPU_OP(name, name, OMC_PARAMS(omc_axis_form, params_softmax))

SOFTMAX(Softmax)
SOFTMAX(LogSoftmax)
SOFTMAX(SoftmaxGrad)
SOFTMAX(LogSoftmaxGrad)

#endif
