/* LayerNormalization and RmsNorm by rows, GroupNorm by groups of channels, BatchNorm by channels,
 * and their gradients. */
#include "base/int.h"
#include "cpu/convert.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/forms.h"
#include "ops/op.h"

/* dgamma and dbeta of a norm by rows are sums over rows, first within blocks of rows, then over
 * blocks in order, so that they do not depend on the number of threads. */
#define MAX_BLOCKS 64
#define MIN_BLOCK_ROWS 16

static inline int64_t block_rows(const omc_layer_form *p) {
  const int64_t even = omc_ceil_div(p->rows, MAX_BLOCKS);
  return even > MIN_BLOCK_ROWS ? even : MIN_BLOCK_ROWS;
}
static inline int64_t n_blocks(const omc_layer_form *p) {
  return omc_ceil_div(p->rows, block_rows(p));
}

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

#include "cpu/rows.h"

OMC_INLINE vacc_t square(vacc_t x) { return x * x; }

/* A parameter or running statistic is stored as x is, or as what is computed in. */
static bool stores_acc(const omc_tensor *t) {
  return omc_dtype_size(t->type->dtype) == sizeof(acc_t);
}

/* The n elements of input i as acc_t, by way of *scratch, of which they take what they need; NULL
 * if it is left out. */
static const acc_t *parameter(const omc_kernel_args *args, uint32_t i, int64_t n, acc_t **scratch) {
  const void *data = omc_in_data(args, i);
  if (!data || stores_acc(&args->in[i])) return data;
  acc_t *const to = *scratch;
  *scratch += n;
  load_row(data, to, n);
  return to;
}

/* Elements of a row that are rounded, or widened, at a time: those of y, or of its gradient, if it
 * is of 16 bits beside an x of float32. */
enum { BLOCK = 512 };

/* Sums for dgamma and dbeta of n elements each: [blocks, 2, omc_whole_vectors(n)]. */
typedef struct {
  int64_t blocks, n;
  acc_t *sums;
  acc_t *dgamma, *dbeta; /* NULL: not wanted */
} block_sums;

/* Where those of dgamma are of a block; those of dbeta come after them. */
static acc_t *sums_at(const block_sums *s, int64_t block) {
  return s->sums + 2 * block * omc_whole_vectors(s->n);
}

/* Adds them up in order; items are vectors of columns. */
static void add_blocks(omc_range range, void *ctx) {
  const block_sums *s = ctx;
  const int64_t length = omc_whole_vectors(s->n);
  for (int64_t k = range.begin * OMC_VL; k < range.end * OMC_VL; k += OMC_VL) {
    vacc_t dgamma = vset(0), dbeta = vset(0);
    for (int64_t block = 0; block < s->blocks; block++) {
      dgamma += vldr(sums_at(s, block) + k);
      dbeta += vldr(sums_at(s, block) + length + k);
    }
    if (s->dgamma) vstr_upto(s->dgamma + k, dgamma, s->n - k);
    if (s->dbeta) vstr_upto(s->dbeta + k, dbeta, s->n - k);
  }
}

static void store_block_sums(const omc_kernel_args *args, block_sums *s) {
  if (s->dgamma || s->dbeta)
    omc_parallel_for(omc_ceil_div(s->n, OMC_VL),
                     omc_grain(OMC_GRAIN_ELEMENTS, s->blocks * 2 * OMC_VL), args->threads,
                     add_blocks, s);
}

typedef struct {
  const omc_layer_form *p;
  bool centred; /* about the mean; else about 0: RmsNorm, which has no mean and no beta */
  const storage_t *x;
  const acc_t *gamma, *beta;
  const void *dy; /* gradient only, as the next three */
  void (*widen)(const void *elements, void *numbers, int64_t n); /* of dy; NULL: it is as x is */
  storage_t *dx;
  block_sums params;
  void *y;
  void (*round)(const void *numbers, void *elements, int64_t n); /* to y; NULL: it is as x is */
  int64_t y_size;     /* bytes of an element of y or dy */
  acc_t *mean, *rstd; /* NULL: not kept */
} layer_job;

static int64_t block_at(int64_t k, int64_t n) { return n - k < BLOCK ? n - k : BLOCK; }

/* n elements of y, from column `column` on. */
static void normalize(const layer_job *job, const storage_t *x, int64_t column, int64_t n,
                      acc_t mean, acc_t rstd, storage_t *y) {
  const vacc_t no_beta = vset(job->centred ? 0 : -(acc_t)0); /* which leaves the sign of a zero */
  const vacc_t vmean = vset(mean), vrstd = vset(rstd);
  for (int64_t k = 0, left = n; k < n; k += OMC_VL, left -= OMC_VL) {
    const vacc_t gamma = job->gamma ? vldr_upto(job->gamma + column + k, left) : vset(1);
    const vacc_t beta = job->beta ? vldr_upto(job->beta + column + k, left) : no_beta;
    vst_upto(y + k, vfma((vld_fill(x + k, left, 0) - vmean) * vrstd, gamma, beta), left);
  }
}

/* Sums of numbers and of their squares, in the lanes of vectors. */
typedef struct {
  vacc_t numbers, squares;
} moments;

enum { CHAINS = 4 /* vectors added up side by side, so that none waits for its last term */ };

/* Adds up chains, which begin anew. */
OMC_INLINE void close_chains(vacc_t *chains, vacc_t *sum) {
  *sum += (chains[0] + chains[1]) + (chains[2] + chains[3]);
  OMC_UNROLL for (int i = 0; i < CHAINS; i++) chains[i] = vset(0);
}

/* Adds those of n elements, each less `near`: what cancels is small if that is near the mean. */
OMC_INLINE moments add_moments(const storage_t *x, int64_t n, acc_t near, moments sums) {
  const vacc_t shift = vset(near);
  vacc_t numbers[CHAINS] = {{0}}, squares[CHAINS] = {{0}};
  int64_t k = 0;
  while (k + CHAINS * OMC_VL <= n) {
    OMC_UNROLL for (int i = 0; i < CHAINS; i++, k += OMC_VL) {
      const vacc_t off = vld(x + k) - shift;
      numbers[i] += off;
      squares[i] = vfma(off, off, squares[i]);
    }
    if (k % OMC_ROW_PIECE == 0)
      close_chains(numbers, &sums.numbers), close_chains(squares, &sums.squares);
  }
  for (; k < n; k += OMC_VL) {
    const vacc_t off = vld_fill(x + k, n - k, near) - shift;
    numbers[0] += off;
    squares[0] = vfma(off, off, squares[0]);
  }
  close_chains(numbers, &sums.numbers), close_chains(squares, &sums.squares);
  return sums;
}

/* The mean of a row, and the mean square about it. Both are of one pass about what is near: the
 * mean as it is summed up, which rounding moves off even if all numbers are the same. */
static void moments_of(const storage_t *x, int64_t n, acc_t *mean, acc_t *square_mean) {
  const acc_t near = row_sum(x, n) / (acc_t)n;
  const moments sums = add_moments(x, n, near, (moments){vset(0), vset(0)});
  const acc_t off = vsum(sums.numbers) / (acc_t)n, about_near = vsum(sums.squares) / (acc_t)n;
  const acc_t about = about_near - off * off;
  *mean = near + off;
  *square_mean = about >= 0 ? about : about_near; /* squares may be infinite */
}

static void layer_forward(omc_range range, void *ctx) {
  const layer_job *job = ctx;
  const int64_t n = job->p->n;
  storage_t block[BLOCK];
  for (int64_t r = range.begin; r < range.end; r++) {
    const storage_t *x = job->x + r * n;
    char *y = (char *)job->y + r * n * job->y_size;
    acc_t mean = 0, var;
    if (job->centred)
      moments_of(x, n, &mean, &var);
    else
      var = OMC_ROW_SUM(k, left, n, square(vld_fill(x + k, left, 0))) / (acc_t)n;
    const acc_t rstd = (acc_t)(1 / sqrt((double)var + job->p->epsilon));
    if (!job->round) normalize(job, x, 0, n, mean, rstd, (storage_t *)(void *)y);
    for (int64_t k = 0; k < n && job->round; k += BLOCK) {
      normalize(job, x + k, k, block_at(k, n), mean, rstd, block);
      job->round(block, y + k * job->y_size, block_at(k, n));
    }
    if (job->mean) job->mean[r] = mean;
    if (job->rstd) job->rstd[r] = rstd;
  }
}

/* How a tensor of 16 bits that is not as x is comes from and to numbers; NULL for any other. */
static const omc_convert *converts(const omc_tensor *t, const omc_tensor *x) {
  return t->type->dtype == x->type->dtype ? NULL : omc_convert_pick(x->type->dtype);
}

static omc_status norm_rows(const omc_kernel_args *args, bool centred) {
  const omc_layer_form *p = args->params;
  const omc_convert *convert = converts(&args->out[0], &args->in[0]);
  const omc_dtype to = args->out[0].type->dtype;
  acc_t *scratch = args->workspace;
  layer_job job = {.p = p,
                   .centred = centred,
                   .x = omc_in_data(args, 0),
                   .gamma = parameter(args, 1, p->n, &scratch),
                   .beta = parameter(args, 2, p->n, &scratch),
                   .y = omc_out_data(args, 0),
                   .round = convert ? convert->store[to] : NULL,
                   .y_size = (int64_t)omc_dtype_size(to),
                   .mean = centred ? omc_out_data(args, 1) : NULL,
                   .rstd = omc_out_data(args, centred ? 2 : 1)};
  omc_parallel_for(p->rows, omc_grain(OMC_GRAIN_ELEMENTS, p->n), args->threads, layer_forward,
                   &job);
  return OMC_OK;
}

OMC_KERNEL(LayerNormalization, args) { return norm_rows(args, true); }
OMC_KERNEL(RmsNorm, args) { return norm_rows(args, false); }

/* dy of row r from column k on: a block of it at least. */
static const storage_t *gradients(const layer_job *job, int64_t r, int64_t k, storage_t *block) {
  const int64_t n = job->p->n;
  const char *dy = (const char *)job->dy + (r * n + k) * job->y_size;
  if (!job->widen) return (const storage_t *)(const void *)dy;
  job->widen(dy, block, block_at(k, n));
  return block;
}

/* One row of the gradient: dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) with
 * g = dy * gamma, mean(g) being 0 about 0; its terms of dgamma and dbeta are added to their sums.
 */
static void layer_backward_row(const layer_job *job, int64_t r, acc_t *dgamma, acc_t *dbeta) {
  const int64_t n = job->p->n, step = job->widen ? BLOCK : n;
  const storage_t *x = job->x + r * n;
  const acc_t *w = job->gamma;
  storage_t *dx = job->dx + r * n, block[BLOCK];
  const acc_t centre = job->centred ? job->mean[r] : 0; /* of lanes past the end too: 0 times inf */
  const vacc_t mean = vset(centre), rstd = vset(job->rstd[r]);
  vacc_t sum_g = vset(0), sum_gx = vset(0);
  for (int64_t at = 0; at < n; at += step) {
    const storage_t *dy = gradients(job, r, at, block);
    const int64_t end = n - at < step ? n : at + step;
    for (int64_t k = at, left = end - at; k < end; k += OMC_VL, left -= OMC_VL) {
      const vacc_t d = vld_fill(dy + (k - at), left, 0);
      const vacc_t xhat = (vld_fill(x + k, left, centre) - mean) * rstd;
      const vacc_t g = d * (w ? vldr_upto(w + k, left) : vset(1));
      sum_g += g;
      sum_gx = vfma(g, xhat, sum_gx);
      if (job->params.dgamma) vstr(dgamma + k, vfma(d, xhat, vldr(dgamma + k)));
      if (job->params.dbeta) vstr(dbeta + k, vldr(dbeta + k) + d);
    }
  }
  const vacc_t mean_g = vset(job->centred ? vsum(sum_g) / (acc_t)n : 0);
  const vacc_t mean_gx = vset(vsum(sum_gx) / (acc_t)n);
  for (int64_t at = 0; at < n; at += step) {
    const storage_t *dy = gradients(job, r, at, block);
    const int64_t end = n - at < step ? n : at + step;
    for (int64_t k = at, left = end - at; k < end; k += OMC_VL, left -= OMC_VL) {
      const vacc_t xhat = (vld_fill(x + k, left, 0) - mean) * rstd;
      const vacc_t g = vld_fill(dy + (k - at), left, 0) * (w ? vldr_upto(w + k, left) : vset(1));
      vst_upto(dx + k, rstd * (g - mean_g - xhat * mean_gx), left);
    }
  }
}

static void layer_backward(omc_range range, void *ctx) {
  const layer_job *job = ctx;
  const int64_t length = omc_whole_vectors(job->p->n), rows = block_rows(job->p);
  for (int64_t block = range.begin; block < range.end; block++) {
    acc_t *dgamma = sums_at(&job->params, block), *dbeta = dgamma + length;
    memset(dgamma, 0, (size_t)(2 * length) * sizeof(acc_t));
    const int64_t last = (block + 1) * rows < job->p->rows ? (block + 1) * rows : job->p->rows;
    for (int64_t r = block * rows; r < last; r++) layer_backward_row(job, r, dgamma, dbeta);
  }
}

/* Inputs: dy, x, gamma?, mean if centred, rstd. */
static omc_status norm_rows_grad(const omc_kernel_args *args, bool centred) {
  const omc_layer_form *p = args->params;
  const omc_convert *convert = converts(&args->in[0], &args->in[1]);
  const omc_dtype of_dy = args->in[0].type->dtype;
  const block_sums params = {n_blocks(p), p->n, args->workspace, omc_out_data(args, 1),
                             omc_out_data(args, 2)};
  acc_t *scratch = sums_at(&params, params.blocks);
  layer_job job = {.p = p,
                   .centred = centred,
                   .dy = omc_in_data(args, 0),
                   .widen = convert ? convert->load[of_dy] : NULL,
                   .y_size = (int64_t)omc_dtype_size(of_dy),
                   .x = omc_in_data(args, 1),
                   .gamma = parameter(args, 2, p->n, &scratch),
                   .mean = centred ? args->in[3].data : NULL,
                   .rstd = args->in[centred ? 4 : 3].data,
                   .dx = omc_out_data(args, 0),
                   .params = params};
  omc_parallel_for(n_blocks(p), omc_grain(OMC_GRAIN_ELEMENTS, block_rows(p) * p->n), args->threads,
                   layer_backward, &job);
  store_block_sums(args, &job.params);
  return OMC_OK;
}

OMC_KERNEL(LayerNormGrad, args) { return norm_rows_grad(args, true); }
OMC_KERNEL(RmsNormGrad, args) { return norm_rows_grad(args, false); }

typedef struct {
  const omc_group_form *p;
  const storage_t *x, *dy;
  const acc_t *gamma, *beta;
  storage_t *y, *dx;
  acc_t *mean, *rstd;
  block_sums params; /* of each sample */
} group_job;

/* n elements of one channel. */
static void normalize_plane(const storage_t *x, int64_t n, acc_t mean, acc_t scale, acc_t shift,
                            storage_t *y) {
  const vacc_t vmean = vset(mean), vscale = vset(scale), vshift = vset(shift);
  for (int64_t k = 0, left = n; k < n; k += OMC_VL, left -= OMC_VL)
    vst_upto(y + k, vfma(vld_fill(x + k, left, 0) - vmean, vscale, vshift), left);
}

/* Sum of dy * xhat. */
static acc_t sum_of_slopes(const storage_t *dy, const storage_t *x, int64_t n, acc_t mean,
                           acc_t rstd) {
  const vacc_t vmean = vset(mean),
               vrstd = vset(rstd); /* of lanes past the end, 0 times inf is none */
  return OMC_ROW_SUM(k, left, n,
                     vld_fill(dy + k, left, 0) * (vld_fill(x + k, left, mean) - vmean) * vrstd);
}

/* Items are groups of samples. */
static void group_forward(omc_range range, void *ctx) {
  const group_job *job = ctx;
  const omc_group_form *p = job->p;
  const int64_t n = p->channels * p->inner;
  for (int64_t r = range.begin; r < range.end; r++) {
    const int64_t first = r % p->groups * p->channels;
    acc_t mean, var;
    moments_of(job->x + r * n, n, &mean, &var);
    const acc_t rstd = (acc_t)(1 / sqrt((double)var + p->epsilon));
    for (int64_t c = 0; c < p->channels; c++) {
      const int64_t at = r * n + c * p->inner;
      normalize_plane(job->x + at, p->inner, mean, job->gamma ? rstd * job->gamma[first + c] : rstd,
                      job->beta ? job->beta[first + c] : 0, job->y + at);
    }
    if (job->mean) job->mean[r] = mean;
    if (job->rstd) job->rstd[r] = rstd;
  }
}

OMC_KERNEL(GroupNorm, args) {
  const omc_group_form *p = args->params;
  const int64_t channels = p->groups * p->channels;
  acc_t *scratch = args->workspace;
  group_job job = {.p = p,
                   .x = omc_in_data(args, 0),
                   .gamma = parameter(args, 1, channels, &scratch),
                   .beta = parameter(args, 2, channels, &scratch),
                   .y = omc_out_data(args, 0),
                   .mean = omc_out_data(args, 1),
                   .rstd = omc_out_data(args, 2)};
  omc_parallel_for(p->batch * p->groups, omc_grain(OMC_GRAIN_ELEMENTS, p->channels * p->inner),
                   args->threads, group_forward, &job);
  return OMC_OK;
}

/* Items are groups of samples: dx as that of a LayerNormalization, with the sums over a group made
 * of those over its channels, which dgamma and dbeta are sums of as well. */
static void group_backward(omc_range range, void *ctx) {
  const group_job *job = ctx;
  const omc_group_form *p = job->p;
  const int64_t n = p->channels * p->inner;
  for (int64_t r = range.begin; r < range.end; r++) {
    const int64_t first = r % p->groups * p->channels;
    acc_t *const dgamma = sums_at(&job->params, r / p->groups) + first;
    acc_t *const dbeta = dgamma + omc_whole_vectors(job->params.n);
    const acc_t *const gamma = job->gamma ? job->gamma + first : NULL;
    const acc_t mean = job->mean[r], rstd = job->rstd[r];
    double sum_g = 0, sum_gx = 0;
    for (int64_t c = 0; c < p->channels; c++) {
      const int64_t at = r * n + c * p->inner;
      dgamma[c] = sum_of_slopes(job->dy + at, job->x + at, p->inner, mean, rstd);
      dbeta[c] = row_sum(job->dy + at, p->inner);
      const double scale = gamma ? (double)gamma[c] : 1;
      sum_g += scale * (double)dbeta[c], sum_gx += scale * (double)dgamma[c];
    }
    const vacc_t vmean = vset(mean), vrstd = vset(rstd);
    const vacc_t mean_g = vset((acc_t)(sum_g / (double)n)),
                 mean_gx = vset((acc_t)(sum_gx / (double)n));
    for (int64_t c = 0; c < p->channels; c++) {
      const vacc_t scale = vset(gamma ? gamma[c] : 1);
      const int64_t at = r * n + c * p->inner;
      for (int64_t k = at, left = p->inner; left > 0; k += OMC_VL, left -= OMC_VL) {
        const vacc_t xhat = (vld_fill(job->x + k, left, 0) - vmean) * vrstd;
        const vacc_t g = vld_fill(job->dy + k, left, 0) * scale;
        vst_upto(job->dx + k, vrstd * (g - mean_g - xhat * mean_gx), left);
      }
    }
  }
}

/* Inputs: dy, x, gamma?, mean, rstd. */
OMC_KERNEL(GroupNormGrad, args) {
  const omc_group_form *p = args->params;
  const block_sums params = {p->batch, p->groups * p->channels, args->workspace,
                             omc_out_data(args, 1), omc_out_data(args, 2)};
  acc_t *scratch = sums_at(&params, params.blocks);
  group_job job = {.p = p,
                   .dy = omc_in_data(args, 0),
                   .x = omc_in_data(args, 1),
                   .gamma = parameter(args, 2, params.n, &scratch),
                   .mean = args->in[3].data,
                   .rstd = args->in[4].data,
                   .dx = omc_out_data(args, 0),
                   .params = params};
  omc_parallel_for(p->batch * p->groups, omc_grain(OMC_GRAIN_ELEMENTS, p->channels * p->inner),
                   args->threads, group_backward, &job);
  store_block_sums(args, &job.params);
  return OMC_OK;
}

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

static omc_status params_layer(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  omc_shape shape, stats;
  return omc_layer_form_of(node, 0, &shape, &stats, params); /* dy and x have one shape */
}

/* Room for as many parameters of n elements, should they be stored as a half is. */
static size_t parameters(const omc_node *node, int64_t n, int64_t how_many) {
  return omc_sums_bytes(omc_node_dtype(node), how_many * n);
}

static size_t block_sums_bytes(const omc_node *node, int64_t blocks, int64_t n) {
  return (size_t)(blocks * 2 * omc_whole_vectors(n)) * omc_acc_size(omc_node_dtype(node));
}

static size_t layer_workspace(const omc_node *node, const void *params, int threads) {
  (void)threads;
  const omc_layer_form *p = params;
  return parameters(node, p->n, 2);
}

static size_t layer_grad_workspace(const omc_node *node, const void *params, int threads) {
  (void)threads;
  const omc_layer_form *p = params;
  return block_sums_bytes(node, n_blocks(p), p->n) + parameters(node, p->n, 1);
}

static size_t group_workspace(const omc_node *node, const void *params, int threads) {
  (void)threads;
  const omc_group_form *p = params;
  return parameters(node, p->groups * p->channels, 2);
}

static size_t group_grad_workspace(const omc_node *node, const void *params, int threads) {
  (void)threads;
  const omc_group_form *p = params;
  const int64_t channels = p->groups * p->channels;
  return block_sums_bytes(node, p->batch, channels) + parameters(node, channels, 1);
}

static size_t batch_workspace(const omc_node *node, const void *params, int threads) {
  (void)threads;
  const omc_batch_form *p = params;
  return parameters(node, p->channels, 4);
}

static omc_status params_group(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  omc_shape shape, stats;
  return omc_group_form_of(node, 0, &shape, &stats, params); /* dy and x have one shape */
}

static omc_status params_batch(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  omc_shape channels;
  return omc_batch_form_of(node, 0, &channels, params); /* dy and x have one shape */
}

#define NORM(name, id, workspace_) \
  OMC_KERNELS(name)                \
  OMC_CPU_OP(name, name, OMC_PARAMS(omc_##id##_form, params_##id), .workspace = workspace_)
NORM(LayerNormalization, layer, layer_workspace)
NORM(LayerNormGrad, layer, layer_grad_workspace)
NORM(RmsNorm, layer, layer_workspace)
NORM(RmsNormGrad, layer, layer_grad_workspace)
NORM(GroupNorm, group, group_workspace)
NORM(GroupNormGrad, group, group_grad_workspace)
NORM(BatchNorm, batch, batch_workspace)
NORM(BatchNormGrad, batch, batch_workspace)

#endif
