/* LayerNormalization and RmsNorm by rows, GroupNorm by groups of channels, and their gradients. */
#include "cpu/ops/norm.h"

#include "base/int.h"
#include "cpu/convert.h"
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

OMC_INLINE vacc_t square(vacc_t x) { return x * x; }

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

#endif

#ifndef OMC_VARIANT

static omc_status params_layer(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  omc_shape shape, stats;
  return omc_layer_form_of(node, 0, &shape, &stats, params); /* dy and x have one shape */
}

static size_t block_sums_bytes(const omc_node *node, int64_t blocks, int64_t n) {
  return (size_t)(blocks * 2 * omc_whole_vectors(n)) * omc_acc_size(omc_node_dtype(node));
}

static size_t layer_workspace(const omc_node *node, const void *params, int threads) {
  (void)threads;
  const omc_layer_form *p = params;
  return omc_norm_room(node, p->n, 2);
}

static size_t layer_grad_workspace(const omc_node *node, const void *params, int threads) {
  (void)threads;
  const omc_layer_form *p = params;
  return block_sums_bytes(node, n_blocks(p), p->n) + omc_norm_room(node, p->n, 1);
}

static size_t group_workspace(const omc_node *node, const void *params, int threads) {
  (void)threads;
  const omc_group_form *p = params;
  return omc_norm_room(node, p->groups * p->channels, 2);
}

static size_t group_grad_workspace(const omc_node *node, const void *params, int threads) {
  (void)threads;
  const omc_group_form *p = params;
  const int64_t channels = p->groups * p->channels;
  return block_sums_bytes(node, p->batch, channels) + omc_norm_room(node, channels, 1);
}

static omc_status params_group(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  omc_shape shape, stats;
  return omc_group_form_of(node, 0, &shape, &stats, params); /* dy and x have one shape */
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

#endif
