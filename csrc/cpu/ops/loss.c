/* Losses row by row, or for many rows at a time where classes are not the last axis. */
#include <string.h>

#include "base/int.h"
#include "cpu/kernel.h"
#include "cpu/ops/loss.h"
#include "cpu/parallel.h"
#include "ops/forms.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

#include "cpu/rows.h"

typedef struct {
  const omc_loss_form *p;
  const storage_t *logits, *weight; /* weight NULL: all 1 */
  const int64_t *target;
  const storage_t *dloss; /* gradient only */
  storage_t *dlogits;     /* gradient only; may be logits */
  void *narrow;           /* takes it in bf16 instead, if not NULL */
  acc_t *loss;            /* one per row, forward only */
  acc_t *top;             /* one per row; NULL: not kept */
  acc_t *log_sum;         /* one per row; as top */
  acc_t hard, soft;       /* 1 - e and e/C */
  acc_t weights;          /* sum of w */
  double total;           /* sum of w[t] over rows that count */
  int64_t groups;         /* of OMC_COLUMNS rows, for each outer index */
} loss_job;

static acc_t class_weight(const loss_job *job, int64_t c) {
  return job->weight ? ld(job->weight + c) : 1;
}

/* Sets all but what belongs to one direction, given which input is what. Checks every target
 * before any is used. */
static omc_status prepare(const omc_kernel_args *args, uint32_t logits, uint32_t target,
                          uint32_t weight, loss_job *job) {
  const omc_loss_form *p = args->params;
  *job = (loss_job){.p = p,
                    .logits = omc_in_data(args, logits),
                    .target = omc_in_data(args, target),
                    .weight = omc_in_data(args, weight),
                    .hard = (acc_t)(1 - p->smoothing),
                    .soft = (acc_t)(p->smoothing / (double)p->classes),
                    .groups = omc_ceil_div(p->inner, OMC_COLUMNS)};
  job->weights = job->weight ? row_sum(job->weight, p->classes) : (acc_t)p->classes;
  for (int64_t i = 0; i < p->outer * p->inner; i++) {
    const int64_t t = job->target[i];
    if (t == p->ignore_index) continue;
    OMC_TRY(omc_check_target(args, p, i, t));
    job->total += (double)class_weight(job, t);
  }
  return OMC_OK;
}

/* Calls `row` for each row if classes are the last axis, else `cols` for each group of rows. */
static void run_rows(const omc_kernel_args *args, loss_job *job, omc_range_fn row,
                     omc_range_fn cols) {
  const omc_loss_form *p = job->p;
  const int64_t width = p->inner < OMC_COLUMNS ? p->inner : OMC_COLUMNS;
  omc_parallel_for(p->outer * job->groups, omc_grain(OMC_GRAIN_ELEMENTS, p->classes * width),
                   args->threads, p->inner == 1 ? row : cols, job);
}

/* Where a group of rows starts and how many it has. */
typedef struct {
  const storage_t *x; /* class 0 of the group's first row */
  int64_t cell, row;  /* offsets of x in the logits and of the first row in [outer, inner] */
  int64_t cols;
} loss_group;

static loss_group group_at(const loss_job *job, int64_t g) {
  const omc_loss_form *p = job->p;
  const int64_t outer = g / job->groups, col = g % job->groups * OMC_COLUMNS;
  const int64_t cell = outer * p->classes * p->inner + col;
  return (loss_group){job->logits + cell, cell, outer * p->inner + col,
                      p->inner - col < OMC_COLUMNS ? p->inner - col : OMC_COLUMNS};
}

/* A row's loss from its sums, all of x shifted down by the row's maximum: log of the sum of
 * exponentials, x[t], and the sum of w[c] * x[c]. */
static acc_t row_loss(const loss_job *job, int64_t t, acc_t log_sum, acc_t x_t, acc_t dot) {
  const acc_t loss = job->hard * class_weight(job, t) * (log_sum - x_t);
  return job->soft > 0 ? loss + job->soft * (job->weights * log_sum - dot) : loss;
}

OMC_INLINE void forward_row(const loss_job *job, int64_t r) {
  const int64_t n = job->p->classes, t = job->target[r];
  const storage_t *x = job->logits + r * n, *w = job->weight;
  const acc_t top = row_max(x, n);
  const acc_t log_sum = (acc_t)log((double)row_sum_exp(x, n, top));
  acc_t dot = 0;
  if (job->soft > 0 && w)
    dot = OMC_ROW_SUM(k, left, n,
                      (vld_fill(x + k, left, top) - vset(top)) * vld_fill(w + k, left, 0));
  else if (job->soft > 0)
    dot = OMC_ROW_SUM(k, left, n, vld_fill(x + k, left, top) - vset(top));
  if (job->top) job->top[r] = top, job->log_sum[r] = log_sum;
  job->loss[r] = t == job->p->ignore_index ? 0 : row_loss(job, t, log_sum, ld(x + t) - top, dot);
}

static void forward_rows(omc_range range, void *ctx) {
  for (int64_t r = range.begin; r < range.end; r++) forward_row(ctx, r);
}

static void forward_cols(omc_range range, void *ctx) {
  const loss_job *job = ctx;
  const int64_t n = job->p->classes, step = job->p->inner;
  for (int64_t g = range.begin; g < range.end; g++) {
    const loss_group at = group_at(job, g);
    acc_t top[OMC_COLUMNS], sum[OMC_COLUMNS] = {0}, dot[OMC_COLUMNS] = {0};
    for (int64_t j = 0; j < OMC_COLUMNS; j++) top[j] = -(acc_t)INFINITY;
    for (int64_t c = 0; c < n; c++)
      for (int64_t j = 0; j < at.cols; j += OMC_VL)
        vstr(top + j, vmax(vldr(top + j), vld_fill(at.x + c * step + j, at.cols - j, 0)));
    for (int64_t c = 0; c < n; c++) {
      const vacc_t w = vset(class_weight(job, c));
      for (int64_t j = 0; j < at.cols; j += OMC_VL) {
        const vacc_t x = vld_fill(at.x + c * step + j, at.cols - j, 0) - vldr(top + j);
        vstr(sum + j, vldr(sum + j) + vexp(x));
        if (job->soft > 0) vstr(dot + j, vldr(dot + j) + w * x);
      }
    }
    for (int64_t j = 0; j < at.cols; j++) {
      const int64_t t = job->target[at.row + j];
      const acc_t log_sum = (acc_t)log((double)sum[j]);
      if (job->top) job->top[at.row + j] = top[j], job->log_sum[at.row + j] = log_sum;
      job->loss[at.row + j] =
          t == job->p->ignore_index
              ? 0
              : row_loss(job, t, log_sum, ld(at.x + t * step + j) - top[j], dot[j]);
    }
  }
}

/* The losses of all rows, or what they are reduced to; and the total, unless it is NULL. */
static void store_loss(const loss_job *job, storage_t *out, acc_t *total) {
  const omc_loss_form *p = job->p;
  const int64_t rows = p->outer * p->inner;
  if (p->reduction == OMC_LOSS_NONE) {
    for (int64_t r = 0; r < rows; r++) st(out + r, job->loss[r]);
  } else {
    double sum = 0;
    for (int64_t r = 0; r < rows; r++) sum += (double)job->loss[r];
    st(out, (acc_t)(p->reduction == OMC_LOSS_MEAN ? sum / job->total : sum));
  }
  if (total) *total = (acc_t)job->total;
}

OMC_KERNEL(CrossEntropy, args) {
  loss_job job;
  OMC_TRY(prepare(args, 0, 1, 2, &job));
  job.loss = args->workspace;
  job.top = omc_out_data(args, 1);
  job.log_sum = omc_out_data(args, 2);
  run_rows(args, &job, forward_rows, forward_cols);
  store_loss(&job, args->out[0].data, omc_out_data(args, 3));
  return OMC_OK;
}

/* The gradient of row r's loss, times what flows into it: dx[c] is
 * p[c] * prob - w[c] * soft, less `hard` at the target. All 0 for a row that does not count. */
typedef struct {
  acc_t prob, soft, hard;
} row_scale;

static row_scale scale_of(const loss_job *job, int64_t r) {
  const omc_loss_form *p = job->p;
  const int64_t t = job->target[r];
  if (t == p->ignore_index) return (row_scale){0, 0, 0};
  acc_t flow = ld(job->dloss + (p->reduction == OMC_LOSS_NONE ? r : 0));
  if (p->reduction == OMC_LOSS_MEAN) flow /= (acc_t)job->total;
  const acc_t hard = job->hard * class_weight(job, t);
  const acc_t soft = job->soft == 0 ? 0 : flow * job->soft; /* none of an infinite flow either */
  const acc_t all = job->soft == 0 ? hard : hard + job->soft * job->weights;
  return (row_scale){flow * all, soft, flow * hard};
}

/* What smoothing pulls class c by, times soft; without it a weight may be infinite. */
static acc_t smooth_weight(const loss_job *job, int64_t c) {
  return job->soft == 0 ? 1 : class_weight(job, c);
}

/* The gradient of logits x but for what the target is pulled by. */
OMC_INLINE vacc_t slope_of(vacc_t x, vacc_t top, vacc_t log_sum, vacc_t prob, vacc_t pull) {
  return vexp(x - top - log_sum) * prob - pull;
}

/* Stores `left` gradients of a row, a vector of them at most, from element k on. */
OMC_INLINE void store_slopes(const loss_job *job, int64_t k, vacc_t slopes, int64_t left) {
#if defined(OMC_COMPUTE_F32)
  if (job->narrow) {
    omc_vsth((uint16_t *)job->narrow + k, omc_vto_bf16(slopes), left);
    return;
  }
#endif
  vst_upto(job->dlogits + k, slopes, left);
}

OMC_INLINE void backward_row(const loss_job *job, int64_t r) {
  const int64_t n = job->p->classes, at = r * n, t = job->target[r];
  const storage_t *x = job->logits + at, *w = job->soft == 0 ? NULL : job->weight;
  const bool ignored = t == job->p->ignore_index;
  if (ignored && !isnan(job->log_sum[r])) { /* NaN times 0 is not 0 */
    for (int64_t k = 0; k < n; k += OMC_VL) store_slopes(job, at + k, vset(0), n - k);
    return;
  }
  const row_scale s = scale_of(job, r);
  const vacc_t top = vset(job->top[r]), log_sum = vset(job->log_sum[r]);
  const vacc_t prob = vset(s.prob), soft = vset(s.soft);
  const vacc_t x_t = vset(ignored ? 0 : ld(x + t)); /* before its gradient is written over it */
  for (int64_t k = 0, left = n; k < n; k += OMC_VL, left -= OMC_VL) {
    const vacc_t pull = soft * (w ? vld_fill(w + k, left, 0) : vset(1));
    store_slopes(job, at + k, slope_of(vld_fill(x + k, left, 0), top, log_sum, prob, pull), left);
  }
  if (ignored) return;
  const vacc_t pull = soft * vset(smooth_weight(job, t));
  store_slopes(job, at + t, slope_of(x_t, top, log_sum, prob, pull) - vset(s.hard), 1);
}

static void backward_rows(omc_range range, void *ctx) {
  for (int64_t r = range.begin; r < range.end; r++) backward_row(ctx, r);
}

static void backward_cols(omc_range range, void *ctx) {
  const loss_job *job = ctx;
  const int64_t n = job->p->classes, step = job->p->inner;
  for (int64_t g = range.begin; g < range.end; g++) {
    const loss_group at = group_at(job, g);
    storage_t *dx = job->dlogits + at.cell;
    acc_t top[OMC_COLUMNS] = {0}, log_sum[OMC_COLUMNS] = {0};
    acc_t prob[OMC_COLUMNS] = {0}, soft[OMC_COLUMNS] = {0}, hard[OMC_COLUMNS] = {0},
          x_t[OMC_COLUMNS] = {0}, w_t[OMC_COLUMNS] = {0};
    for (int64_t j = 0; j < at.cols; j++) {
      const row_scale s = scale_of(job, at.row + j);
      top[j] = job->top[at.row + j], log_sum[j] = job->log_sum[at.row + j];
      prob[j] = s.prob, soft[j] = s.soft, hard[j] = s.hard;
      const int64_t t = job->target[at.row + j];
      if (t == job->p->ignore_index) continue;
      x_t[j] = ld(at.x + t * step + j), w_t[j] = smooth_weight(job, t);
    }
    for (int64_t c = 0; c < n; c++) {
      const vacc_t w = vset(smooth_weight(job, c));
      for (int64_t j = 0; j < at.cols; j += OMC_VL) {
        const vacc_t x = vld_fill(at.x + c * step + j, at.cols - j, 0);
        const vacc_t d =
            slope_of(x, vldr(top + j), vldr(log_sum + j), vldr(prob + j), w * vldr(soft + j));
        vst_upto(dx + c * step + j, d, at.cols - j);
      }
    }
    for (int64_t j = 0; j < OMC_COLUMNS; j += OMC_VL)
      vstr(x_t + j, slope_of(vldr(x_t + j), vldr(top + j), vldr(log_sum + j), vldr(prob + j),
                             vldr(w_t + j) * vldr(soft + j)));
    for (int64_t j = 0; j < at.cols; j++) {
      const int64_t t = job->target[at.row + j];
      if (t != job->p->ignore_index) st(dx + t * step + j, x_t[j] - hard[j]);
    }
  }
}

#if OMC_STORES_ACC
/* A row at a time, while a cache has it. */
static void both_rows(omc_range range, void *ctx) {
  for (int64_t r = range.begin; r < range.end; r++) {
    forward_row(ctx, r);
    backward_row(ctx, r);
  }
}

void OMC_LOSS_NAME(rows)(const omc_loss_rows *r, int threads) {
  const acc_t one = 1;
  loss_job job = {.p = &r->form,
                  .logits = r->logits,
                  .target = r->target,
                  .weight = r->weight,
                  .dloss = &one,
                  .dlogits = r->logits,
                  .narrow = r->narrow,
                  .loss = r->loss,
                  .top = r->top,
                  .log_sum = r->log_sum,
                  .hard = (acc_t)(1 - r->form.smoothing),
                  .soft = (acc_t)(r->form.smoothing / (double)r->form.classes),
                  .total = r->total,
                  .groups = 1};
  job.weights = job.weight ? row_sum(job.weight, r->form.classes) : (acc_t)r->form.classes;
  const omc_kernel_args args = {.threads = threads};
  const omc_range_fn rows = r->gradient ? both_rows : forward_rows;
  run_rows(&args, &job, rows, rows);
}
#endif

/* Inputs: dloss, logits, target, top, log_sum, total, weight?. */
OMC_KERNEL(CrossEntropyGrad, args) {
  loss_job job;
  OMC_TRY(prepare(args, 1, 2, 6, &job));
  job.dloss = args->in[0].data;
  job.top = args->in[3].data;
  job.log_sum = args->in[4].data;
  job.total = (double)*(const acc_t *)args->in[5].data;
  job.dlogits = args->out[0].data;
  run_rows(args, &job, backward_rows, backward_cols);
  return OMC_OK;
}

/* Where class c of row r is. */
static int64_t cell_of(const omc_loss_form *p, int64_t r, int64_t c) {
  return (r / p->inner * p->classes + c) * p->inner + r % p->inner;
}

/* Inputs: log probabilities, target, weight?. Outputs: loss, total. */
OMC_KERNEL(NegativeLogLikelihoodLoss, args) {
  loss_job job;
  OMC_TRY(prepare(args, 0, 1, 2, &job));
  const omc_loss_form *p = job.p;
  job.loss = args->workspace;
  for (int64_t r = 0; r < p->outer * p->inner; r++) {
    const int64_t t = job.target[r];
    job.loss[r] =
        t == p->ignore_index ? 0 : -ld(job.logits + cell_of(p, r, t)) * class_weight(&job, t);
  }
  store_loss(&job, args->out[0].data, omc_out_data(args, 1));
  return OMC_OK;
}

static void clear_rows(omc_range range, void *ctx) {
  const loss_job *job = ctx;
  const int64_t n = job->p->classes * job->p->inner;
  memset(job->dlogits + range.begin * n, 0,
         (size_t)((range.end - range.begin) * n) * sizeof *job->dlogits);
}

/* Inputs: dloss, target, total, weight?. */
OMC_KERNEL(NegativeLogLikelihoodLossGrad, args) {
  loss_job job;
  OMC_TRY(prepare(args, 0, 1, 3, &job));
  const omc_loss_form *p = job.p;
  job.dloss = args->in[0].data;
  job.total = (double)*(const acc_t *)args->in[2].data;
  job.dlogits = args->out[0].data;
  omc_parallel_for(p->outer, omc_grain(OMC_GRAIN_ELEMENTS, p->classes * p->inner), args->threads,
                   clear_rows, &job);
  for (int64_t r = 0; r < p->outer * p->inner; r++) {
    const int64_t t = job.target[r];
    if (t != p->ignore_index) st(job.dlogits + cell_of(p, r, t), -scale_of(&job, r).hard);
  }
  return OMC_OK;
}

/* Its input, whose elements have to be from 0 to 1. */
OMC_KERNEL(UnitInterval, args) {
  const storage_t *x = omc_in_data(args, 0);
  storage_t *y = omc_out_data(args, 0);
  bool inside = true;
  const int64_t n = omc_shape_numel(&args->in[0].type->shape);
  for (int64_t k = 0; k < n; k++) {
    const acc_t v = ld(x + k);
    inside &= v >= 0 && v <= 1;
    y[k] = x[k];
  }
  if (!inside)
    OMC_FAIL(EDOMAIN, "all elements of %s should be between 0 and 1 ('%s')",
             *(const bool *)args->params ? "target" : "input", args->node);
  return OMC_OK;
}

#endif

#ifndef OMC_VARIANT

static omc_status params_loss(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  omc_shape rows;
  return omc_loss_form_of(node, params, &rows);
}

static size_t forward_workspace(const omc_node *node, const void *params, int threads) {
  (void)threads;
  const omc_loss_form *p = params;
  return (size_t)(p->outer * p->inner) * omc_acc_size(omc_in(node, 0)->type.dtype);
}

OMC_FORM(params_cross_entropy_grad, omc_cross_entropy_grad_form_of)

static omc_status params_nll_grad(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  omc_type of;
  return omc_nll_grad_form_of(node, params, &of);
}

static omc_status params_unit(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  *(bool *)params = strcmp(omc_node_string(node, "of"), "target") == 0;
  return OMC_OK;
}

#define LOSS(name, params_, ...) \
  OMC_KERNELS(name)              \
  OMC_CPU_OP(name, name, OMC_PARAMS(omc_loss_form, params_), __VA_ARGS__)
LOSS(CrossEntropy, params_loss, .workspace = forward_workspace)
LOSS(CrossEntropyGrad, params_cross_entropy_grad)
LOSS(NegativeLogLikelihoodLoss, params_loss, .workspace = forward_workspace)
LOSS(NegativeLogLikelihoodLossGrad, params_nll_grad)
OMC_KERNELS(UnitInterval)
OMC_CPU_OP(UnitInterval, UnitInterval, OMC_PARAMS(bool, params_unit))

#endif
