/* BatchNorm by channels, and its gradient. */
#include "base/int.h"
#include "cpu/ops/norm.h"
#include "cpu/parallel.h"
#include "ops/forms.h"
#include "ops/op.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

typedef struct {
  const omc_batch_form *p;
  const omc_kernel_args *args;
  const storage_t *x, *dy;
  const acc_t *gamma, *beta, *running_mean, *running_var;
  storage_t *y, *dx;
  acc_t *mean, *rstd, *dgamma, *dbeta;
} batch_job;

static double count(const omc_batch_form *p) { return (double)(p->batch * p->inner); }
static acc_t gamma_of(const batch_job *job, int64_t c) { return job->gamma ? job->gamma[c] : 1; }
static acc_t beta_of(const batch_job *job, int64_t c) { return job->beta ? job->beta[c] : 0; }

/* Stores element c of output i, a running statistic after a batch, which leaves it as it is if it
 * is empty. Nothing if it is not kept. */
static void move_running(const batch_job *job, uint32_t i, int64_t c, const acc_t *running,
                         double now) {
  const omc_batch_form *p = job->p;
  void *out = omc_out_data(job->args, i);
  if (!out) return;
  const acc_t moved = count(p) > 0
                          ? (acc_t)((1 - p->momentum) * (double)running[c] + p->momentum * now)
                          : running[c];
  if (stores_acc(&job->args->out[i]))
    ((acc_t *)out)[c] = moved;
  else
    st((storage_t *)out + c, moved);
}

/* Stores the statistics of channel c, given its mean and the sum of squared differences to it. */
static void store_statistics(const batch_job *job, int64_t c, double mean, double squares) {
  const omc_batch_form *p = job->p;
  const double n = count(p);
  job->mean[c] = (acc_t)mean;
  job->rstd[c] = (acc_t)(1 / sqrt(squares / n + p->epsilon));
  move_running(job, 3, c, job->running_mean, mean);
  move_running(job, 4, c, job->running_var, squares / (n - 1));
}

/* Stores the parameters' gradients of channel c and scales its sums of dy and dy * xhat to what
 * dx = factor * (dy - *sum_dy - xhat * *sum_dyx) needs. */
static acc_t store_gradients(const batch_job *job, int64_t c, double *sum_dy, double *sum_dyx) {
  if (job->dgamma) job->dgamma[c] = (acc_t)*sum_dyx;
  if (job->dbeta) job->dbeta[c] = (acc_t)*sum_dy;
  *sum_dy /= count(job->p);
  *sum_dyx /= count(job->p);
  return gamma_of(job, c) * job->rstd[c];
}

/* The mean of a channel, and the sum of squared differences to it. */
typedef struct {
  double mean, squares;
} statistics;

/* Those of a channel of `inner` contiguous elements for each row of the batch, whose mean is near
 * `near`. Sums of lanes are added up in double before they are long. */
static statistics statistics_about(const omc_batch_form *p, const storage_t *x, acc_t near) {
  double numbers = 0, squares = 0;
  for (int64_t b = 0; b < p->batch;) {
    moments sums = {vset(0), vset(0)};
    for (int64_t n = 0; b < p->batch && n < OMC_ROW_PIECE; n += p->inner, b++)
      sums = add_moments(x + b * p->channels * p->inner, p->inner, near, sums);
    numbers += (double)vsum(sums.numbers);
    squares += (double)vsum(sums.squares);
  }
  const double off = numbers / count(p), about = squares - numbers * off;
  return (statistics){(double)near + off, about < 0 ? 0 : about};
}

/* Items are channels of `inner` contiguous elements for each row of the batch. */
static void batch_forward_planes(omc_range range, void *ctx) {
  const batch_job *job = ctx;
  const omc_batch_form *p = job->p;
  const int64_t n = p->inner, step = p->channels * n;
  for (int64_t c = range.begin; c < range.end; c++) {
    const storage_t *first = job->x + c * n, *last = first + p->batch * step;
    double sum = 0;
    for (const storage_t *x = first; x < last; x += step) sum += (double)row_sum(x, n);
    const statistics of = statistics_about(p, first, (acc_t)(sum / count(p)));
    store_statistics(job, c, of.mean, of.squares);
    for (int64_t b = 0; b < p->batch; b++)
      normalize_plane(first + b * step, n, (acc_t)of.mean, job->rstd[c] * gamma_of(job, c),
                      beta_of(job, c), job->y + c * n + b * step);
  }
}

/* Items are groups of OMC_COLUMNS channels of one element for each row of the batch. */
static void batch_forward_cols(omc_range range, void *ctx) {
  const batch_job *job = ctx;
  const omc_batch_form *p = job->p;
  const int64_t step = p->channels;
  for (int64_t c0 = range.begin * OMC_COLUMNS; c0 < range.end * OMC_COLUMNS && c0 < step;
       c0 += OMC_COLUMNS) {
    const int64_t cols = step - c0 < OMC_COLUMNS ? step - c0 : OMC_COLUMNS;
    double mean[OMC_COLUMNS] = {0}, squares[OMC_COLUMNS] = {0};
    acc_t center[OMC_COLUMNS], scale[OMC_COLUMNS], shift[OMC_COLUMNS];
    for (int64_t b = 0; b < p->batch; b++)
      for (int64_t j = 0; j < cols; j++) mean[j] += (double)ld(job->x + b * step + c0 + j);
    for (int64_t j = 0; j < cols; j++) mean[j] /= count(p);
    for (int64_t b = 0; b < p->batch; b++)
      for (int64_t j = 0; j < cols; j++) {
        const double d = (double)ld(job->x + b * step + c0 + j) - mean[j];
        squares[j] += d * d;
      }
    for (int64_t j = 0; j < cols; j++) {
      store_statistics(job, c0 + j, mean[j], squares[j]);
      center[j] = (acc_t)mean[j];
      scale[j] = job->rstd[c0 + j] * gamma_of(job, c0 + j);
      shift[j] = beta_of(job, c0 + j);
    }
    for (int64_t b = 0; b < p->batch; b++)
      for (int64_t j = 0; j < cols; j++) {
        const int64_t i = b * step + c0 + j;
        st(job->y + i, (ld(job->x + i) - center[j]) * scale[j] + shift[j]);
      }
  }
}

static void batch_backward_planes(omc_range range, void *ctx) {
  const batch_job *job = ctx;
  const omc_batch_form *p = job->p;
  const int64_t n = p->inner, step = p->channels * n;
  for (int64_t c = range.begin; c < range.end; c++) {
    const vacc_t mean = vset(job->mean[c]), rstd = vset(job->rstd[c]);
    double sum_dy = 0, sum_dyx = 0;
    for (int64_t b = 0; b < p->batch; b++) {
      const storage_t *x = job->x + c * n + b * step, *dy = job->dy + c * n + b * step;
      sum_dy += (double)row_sum(dy, n);
      sum_dyx += (double)sum_of_slopes(dy, x, n, job->mean[c], job->rstd[c]);
    }
    const vacc_t factor = vset(store_gradients(job, c, &sum_dy, &sum_dyx));
    const vacc_t mean_dy = vset((acc_t)sum_dy), mean_dyx = vset((acc_t)sum_dyx);
    for (int64_t b = 0; b < p->batch; b++) {
      const int64_t at = c * n + b * step;
      for (int64_t k = at, left = n; left > 0; k += OMC_VL, left -= OMC_VL) {
        const vacc_t xhat = (vld_fill(job->x + k, left, 0) - mean) * rstd;
        const vacc_t d = vld_fill(job->dy + k, left, 0) - mean_dy - xhat * mean_dyx;
        vst_upto(job->dx + k, factor * d, left);
      }
    }
  }
}

static void batch_backward_cols(omc_range range, void *ctx) {
  const batch_job *job = ctx;
  const omc_batch_form *p = job->p;
  const int64_t step = p->channels;
  for (int64_t c0 = range.begin * OMC_COLUMNS; c0 < range.end * OMC_COLUMNS && c0 < step;
       c0 += OMC_COLUMNS) {
    const int64_t cols = step - c0 < OMC_COLUMNS ? step - c0 : OMC_COLUMNS;
    const acc_t *mean = job->mean + c0, *rstd = job->rstd + c0;
    double sum_dy[OMC_COLUMNS] = {0}, sum_dyx[OMC_COLUMNS] = {0};
    acc_t factor[OMC_COLUMNS];
    for (int64_t b = 0; b < p->batch; b++)
      for (int64_t j = 0; j < cols; j++) {
        const int64_t i = b * step + c0 + j;
        const acc_t dy = ld(job->dy + i);
        sum_dy[j] += (double)dy;
        sum_dyx[j] += (double)(dy * (ld(job->x + i) - mean[j]) * rstd[j]);
      }
    for (int64_t j = 0; j < cols; j++)
      factor[j] = store_gradients(job, c0 + j, &sum_dy[j], &sum_dyx[j]);
    for (int64_t b = 0; b < p->batch; b++)
      for (int64_t j = 0; j < cols; j++) {
        const int64_t i = b * step + c0 + j;
        const acc_t xhat = (ld(job->x + i) - mean[j]) * rstd[j];
        st(job->dx + i,
           factor[j] * (ld(job->dy + i) - (acc_t)sum_dy[j] - xhat * (acc_t)sum_dyx[j]));
      }
  }
}

static void run_channels(const omc_kernel_args *args, batch_job *job, omc_range_fn planes,
                         omc_range_fn cols) {
  const omc_batch_form *p = job->p;
  if (p->inner == 1)
    omc_parallel_for(omc_ceil_div(p->channels, OMC_COLUMNS),
                     omc_grain(OMC_GRAIN_ELEMENTS, p->batch * OMC_COLUMNS), args->threads, cols,
                     job);
  else
    omc_parallel_for(p->channels, omc_grain(OMC_GRAIN_ELEMENTS, p->batch * p->inner), args->threads,
                     planes, job);
}

OMC_KERNEL(BatchNorm, args) {
  const omc_batch_form *p = args->params;
  acc_t *scratch = args->workspace;
  batch_job job = {.p = p,
                   .args = args,
                   .x = omc_in_data(args, 0),
                   .gamma = parameter(args, 1, p->channels, &scratch),
                   .beta = parameter(args, 2, p->channels, &scratch),
                   .running_mean = parameter(args, 3, p->channels, &scratch),
                   .running_var = parameter(args, 4, p->channels, &scratch),
                   .y = omc_out_data(args, 0),
                   .mean = omc_out_data(args, 1),
                   .rstd = omc_out_data(args, 2)};
  run_channels(args, &job, batch_forward_planes, batch_forward_cols);
  return OMC_OK;
}

/* Inputs: dy, x, gamma?, mean, rstd. */
OMC_KERNEL(BatchNormGrad, args) {
  const omc_batch_form *p = args->params;
  acc_t *scratch = args->workspace;
  batch_job job = {.p = p,
                   .args = args,
                   .dy = omc_in_data(args, 0),
                   .x = omc_in_data(args, 1),
                   .gamma = parameter(args, 2, p->channels, &scratch),
                   .mean = args->in[3].data,
                   .rstd = args->in[4].data,
                   .dx = omc_out_data(args, 0),
                   .dgamma = omc_out_data(args, 1),
                   .dbeta = omc_out_data(args, 2)};
  run_channels(args, &job, batch_backward_planes, batch_backward_cols);
  return OMC_OK;
}

#endif

#ifndef OMC_VARIANT

static size_t batch_workspace(const omc_node *node, const void *params, int threads) {
  (void)threads;
  const omc_batch_form *p = params;
  return omc_norm_room(node, p->channels, 4);
}

static omc_status params_batch(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  omc_shape channels;
  return omc_batch_form_of(node, 0, &channels, params); /* dy and x have one shape */
}

#define BATCH_NORM(name) \
  OMC_KERNELS(name)      \
  OMC_CPU_OP(name, name, OMC_PARAMS(omc_batch_form, params_batch), .workspace = batch_workspace)
BATCH_NORM(BatchNorm)
BATCH_NORM(BatchNormGrad)

#endif
