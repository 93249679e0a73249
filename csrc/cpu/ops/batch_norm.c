/* BatchNorm by channels, and its gradient; what is added and Relu, see ops/norm.c. */
#include "base/int.h"
#include "cpu/ops/norm.h"
#include "cpu/parallel.h"
#include "ops/forms.h"
#include "ops/op.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

typedef struct {
  const omc_batch_form *p;
  const omc_kernel_args *args;
  const storage_t *x, *dy, *added;
  const acc_t *gamma, *beta, *running_mean, *running_var;
  storage_t *y, *dx;
  acc_t *mean, *rstd, *dgamma, *dbeta, *shift;
} batch_job;

static double count(const omc_batch_form *p) { return (double)(p->batch * p->inner); }
static acc_t gamma_of(const batch_job *job, int64_t c) { return job->gamma ? job->gamma[c] : 1; }
static acc_t beta_of(const batch_job *job, int64_t c) { return job->beta ? job->beta[c] : 0; }

/* What y of a channel is made with. */
typedef struct {
  acc_t mean, rstd, scale, shift;
} channel;

static channel channel_of(const batch_job *job, int64_t c) {
  return (channel){job->mean[c], job->rstd[c], job->rstd[c] * gamma_of(job, c), beta_of(job, c)};
}

static bool is_plain(const batch_job *job) { return !job->added && !job->p->relu; }

OMC_INLINE vacc_t normalized(const channel *c, vacc_t x) {
  return vfma(x - vset(c->mean), vset(c->scale), vset(c->shift));
}

/* As it would be after being stored. */
OMC_INLINE vacc_t as_stored(vacc_t x) {
  storage_t stored[OMC_VL];
  if (OMC_STORES_ACC) return x;
  vst(stored, x);
  return vld(stored);
}

/* Stores y of n elements of a channel. */
OMC_INLINE void store_plane(const batch_job *job, const channel *c, int64_t at, int64_t n,
                            bool added, bool relu) {
  for (int64_t k = at, left = n; left > 0; k += OMC_VL, left -= OMC_VL) {
    vacc_t y = as_stored(normalized(c, vld_fill(job->x + k, left, 0)));
    if (added) y = as_stored(y + vld_fill(job->added + k, left, 0));
    vst_upto(job->y + k, relu ? vblend(y < vset(0), vset(0), y) : y, left);
  }
}
static void normalize(const batch_job *job, const channel *c, int64_t at, int64_t n) {
  if (is_plain(job))
    normalize_plane(job->x + at, n, c->mean, c->scale, c->shift, job->y + at);
  else if (!job->added)
    store_plane(job, c, at, n, false, true);
  else if (job->p->relu)
    store_plane(job, c, at, n, true, true);
  else
    store_plane(job, c, at, n, true, false);
}

/* Of up to a vector of elements of a channel x - mean, and the gradient of y before Relu: both are
 * 0 past the end. */
typedef struct {
  vacc_t off, dy;
} slopes;

OMC_INLINE slopes slopes_at(const batch_job *job, const channel *c, int64_t k, int64_t left,
                            bool relu) {
  const vacc_t x = vld_fill(job->x + k, left, c->mean), dy = vld_fill(job->dy + k, left, 0);
  const vacc_t y = as_stored(normalized(c, x));
  return (slopes){x - vset(c->mean), relu ? vblend(y <= vset(0), vset(0), dy) : dy};
}

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
  if (job->shift) job->shift[c] = beta_of(job, c);
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

/* The same of an element of a group of channels. */
typedef struct {
  acc_t mean[OMC_COLUMNS], scale[OMC_COLUMNS], shift[OMC_COLUMNS];
} columns;

static void set_columns(const batch_job *job, int64_t first, int64_t n, columns *of) {
  for (int64_t j = 0; j < n; j++) {
    const channel c = channel_of(job, first + j);
    of->mean[j] = c.mean, of->scale[j] = c.scale, of->shift[j] = c.shift;
  }
}
OMC_INLINE acc_t one_as_stored(acc_t x) {
  storage_t stored;
  st(&stored, x);
  return ld(&stored);
}
OMC_INLINE acc_t one_normalized(const columns *of, int64_t j, acc_t x) {
  return (x - of->mean[j]) * of->scale[j] + of->shift[j];
}

static void store_row_of_columns(const batch_job *job, const columns *of, int64_t at, int64_t n) {
  if (is_plain(job)) {
    for (int64_t j = 0; j < n; j++) st(job->y + at + j, one_normalized(of, j, ld(job->x + at + j)));
    return;
  }
  for (int64_t j = 0; j < n; j++) {
    acc_t y = one_as_stored(one_normalized(of, j, ld(job->x + at + j)));
    if (job->added) y = one_as_stored(y + ld(job->added + at + j));
    st(job->y + at + j, job->p->relu && y < 0 ? 0 : y);
  }
}

static void load_slopes(const batch_job *job, const columns *of, int64_t at, int64_t n, acc_t *dy) {
  for (int64_t j = 0; j < n; j++) dy[j] = ld(job->dy + at + j);
  for (int64_t j = 0; job->p->relu && j < n; j++)
    if (one_as_stored(one_normalized(of, j, ld(job->x + at + j))) <= 0) dy[j] = 0;
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
    const channel here = channel_of(job, c);
    for (int64_t b = 0; b < p->batch; b++) normalize(job, &here, c * n + b * step, n);
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
    columns of;
    for (int64_t b = 0; b < p->batch; b++)
      for (int64_t j = 0; j < cols; j++) mean[j] += (double)ld(job->x + b * step + c0 + j);
    for (int64_t j = 0; j < cols; j++) mean[j] /= count(p);
    for (int64_t b = 0; b < p->batch; b++)
      for (int64_t j = 0; j < cols; j++) {
        const double d = (double)ld(job->x + b * step + c0 + j) - mean[j];
        squares[j] += d * d;
      }
    for (int64_t j = 0; j < cols; j++) store_statistics(job, c0 + j, mean[j], squares[j]);
    set_columns(job, c0, cols, &of);
    for (int64_t b = 0; b < p->batch; b++) store_row_of_columns(job, &of, b * step + c0, cols);
  }
}

/* Sums of dy and dy * xhat of n elements of a channel, in the lanes of vectors. */
OMC_INLINE moments sums_of_slopes(const batch_job *job, const channel *c, int64_t at, int64_t n,
                                  bool relu) {
  moments sums = {vset(0), vset(0)};
  const vacc_t rstd = vset(c->rstd);
  vacc_t dy[CHAINS] = {{0}}, dyx[CHAINS] = {{0}};
  int64_t k = 0;
  while (k + CHAINS * OMC_VL <= n) {
    OMC_UNROLL for (int i = 0; i < CHAINS; i++, k += OMC_VL) {
      const slopes s = slopes_at(job, c, at + k, OMC_VL, relu);
      dy[i] += s.dy;
      dyx[i] += s.dy * s.off * rstd;
    }
    if (k % OMC_ROW_PIECE == 0) close_chains(dy, &sums.numbers), close_chains(dyx, &sums.squares);
  }
  for (; k < n; k += OMC_VL) {
    const slopes s = slopes_at(job, c, at + k, n - k, relu);
    dy[0] += s.dy;
    dyx[0] += s.dy * s.off * rstd;
  }
  close_chains(dy, &sums.numbers), close_chains(dyx, &sums.squares);
  return sums;
}

/* The sums of a channel, of which those of rows are added up in double. */
OMC_INLINE void sum_slopes(const batch_job *job, const channel *c, int64_t first, bool relu,
                           double *sum_dy, double *sum_dyx) {
  const omc_batch_form *p = job->p;
  for (int64_t b = 0; b < p->batch; b++) {
    const int64_t at = first + b * p->channels * p->inner;
    const moments sums = sums_of_slopes(job, c, at, p->inner, relu);
    *sum_dy += (double)vsum(sums.numbers);
    *sum_dyx += (double)vsum(sums.squares);
  }
}

OMC_INLINE void store_slopes(const batch_job *job, const channel *c, int64_t at, int64_t n,
                             bool relu, acc_t factor, acc_t mean_dy, acc_t mean_dyx) {
  for (int64_t k = at, left = n; left > 0; k += OMC_VL, left -= OMC_VL) {
    const slopes s = slopes_at(job, c, k, left, relu);
    const vacc_t d = s.dy - vset(mean_dy) - s.off * vset(c->rstd) * vset(mean_dyx);
    vst_upto(job->dx + k, vset(factor) * d, left);
  }
}

OMC_INLINE void backward_plane(const batch_job *job, int64_t c, bool relu) {
  const omc_batch_form *p = job->p;
  const int64_t n = p->inner, step = p->channels * n;
  const channel here = channel_of(job, c);
  double sum_dy = 0, sum_dyx = 0;
  sum_slopes(job, &here, c * n, relu, &sum_dy, &sum_dyx);
  const acc_t factor = store_gradients(job, c, &sum_dy, &sum_dyx);
  for (int64_t b = 0; b < p->batch; b++)
    store_slopes(job, &here, c * n + b * step, n, relu, factor, (acc_t)sum_dy, (acc_t)sum_dyx);
}

static void batch_backward_planes(omc_range range, void *ctx) {
  const batch_job *job = ctx;
  for (int64_t c = range.begin; c < range.end; c++)
    if (job->p->relu)
      backward_plane(job, c, true);
    else
      backward_plane(job, c, false);
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
    acc_t factor[OMC_COLUMNS], dy[OMC_COLUMNS];
    columns of;
    set_columns(job, c0, cols, &of);
    for (int64_t b = 0; b < p->batch; b++) {
      const int64_t i = b * step + c0;
      load_slopes(job, &of, i, cols, dy);
      for (int64_t j = 0; j < cols; j++) {
        sum_dy[j] += (double)dy[j];
        sum_dyx[j] += (double)(dy[j] * (ld(job->x + i + j) - mean[j]) * rstd[j]);
      }
    }
    for (int64_t j = 0; j < cols; j++)
      factor[j] = store_gradients(job, c0 + j, &sum_dy[j], &sum_dyx[j]);
    for (int64_t b = 0; b < p->batch; b++) {
      const int64_t i = b * step + c0;
      load_slopes(job, &of, i, cols, dy);
      for (int64_t j = 0; j < cols; j++) {
        const acc_t xhat = (ld(job->x + i + j) - mean[j]) * rstd[j];
        st(job->dx + i + j, factor[j] * (dy[j] - (acc_t)sum_dy[j] - xhat * (acc_t)sum_dyx[j]));
      }
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
                   .rstd = omc_out_data(args, 2),
                   .added = omc_in_data(args, 5),
                   .shift = omc_out_data(args, 5)};
  run_channels(args, &job, batch_forward_planes, batch_forward_cols);
  return OMC_OK;
}

/* Inputs: dy, x, gamma?, mean, rstd, shift?. */
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
                   .beta = omc_in_data(args, 5),
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
