/* BatchNorm in training and its gradient: sums over parts of channels, which are lines across the
 * batch, then what is of each channel, then elements along lines that are of one channel. */
#ifndef OMC_CUDA_OPS_BATCH_NORM_H
#define OMC_CUDA_OPS_BATCH_NORM_H

#include "cuda/gpu/lines.h"

/* A parameter or running statistic of each channel, stored as x is, or as what is computed in. */
typedef struct omc_channel_values {
  void *at; /* NULL: left out */
  int64_t is_wide;
} omc_channel_values;

typedef struct omc_batch_norm {
  omc_gpu_lines lines;
  int64_t channels, parts, part; /* parts of a channel, elements of one */
  double count, epsilon, momentum;
  const void *dy, *x;
  omc_channel_values gamma, beta, running_mean, running_var, moved_mean, moved_var;
  void *mean, *rstd;        /* of each channel */
  void *partial;            /* [2, parts, channels]: means and squares about them, or sums */
  void *mean_dy, *mean_dyx; /* of each channel: of dy and dy * xhat */
  void *dgamma, *dbeta;     /* NULL: not wanted */
  void *out;                /* y or dx, which may be dy or x */
} omc_batch_norm;

#ifdef OMC_GPU

OMC_INLINE acc_t channel_value(const omc_channel_values &of, int64_t c, acc_t otherwise) {
  if (!of.at) return otherwise;
  return of.is_wide ? ((const acc_t *)of.at)[c] : number<acc_t>(((const storage_t *)of.at)[c]);
}

OMC_INLINE acc_t *sums_of(const omc_batch_norm &p, int which) {
  return (acc_t *)p.partial + which * p.parts * p.channels;
}

/* Mean and squares of a part of a channel. */
template <typename Team>
OMC_INLINE void statistics(const Team &team, const omc_batch_norm &p) {
  const acc_t n = (acc_t)(team.last - team.first);
  omc_line<storage_t, Team> x(team, p.x);
  const acc_t mean = omc_fold<omc_sum, acc_t>(team, [&](omc_at at) { return x[at]; }, x) / n;
  const acc_t squares =
      omc_fold<omc_sum, acc_t>(team, [&](omc_at at) { return (x[at] - mean) * (x[at] - mean); }, x);
  if (!team.leads()) return;
  const int64_t at = team.part * p.channels + team.line;
  sums_of(p, 0)[at] = mean, sums_of(p, 1)[at] = squares;
}

/* Sums of dy and dy * xhat of a part of a channel. */
template <typename Team>
OMC_INLINE void gradient_sums(const Team &team, const omc_batch_norm &p) {
  omc_line<storage_t, Team> dy(team, p.dy), x(team, p.x);
  const acc_t mean = team.has_line() ? ((const acc_t *)p.mean)[team.line] : 0;
  const acc_t rstd = team.has_line() ? ((const acc_t *)p.rstd)[team.line] : 0;
  const omc_two sums = omc_fold<omc_sum, omc_two>(
      team, [&](omc_at at) { return omc_two{dy[at], dy[at] * (x[at] - mean) * rstd}; }, dy, x);
  if (!team.leads()) return;
  const int64_t at = team.part * p.channels + team.line;
  sums_of(p, 0)[at] = sums.a, sums_of(p, 1)[at] = sums.b;
}

/* Of a batch of nothing running statistics are left as they are. */
OMC_INLINE void move(const omc_batch_norm &p, const omc_channel_values &from,
                     const omc_channel_values &to, int64_t c, double now) {
  if (!to.at) return;
  acc_t moved = channel_value(from, c, 0);
  if (p.count > 0) moved = (acc_t)((1 - p.momentum) * (double)moved + p.momentum * now);
  if (to.is_wide)
    ((acc_t *)to.at)[c] = moved;
  else
    ((storage_t *)to.at)[c] = element<storage_t>(moved);
}

/* Joins the parts, along which its lines are, as in Chan, Golub and LeVeque, Algorithms for
 * Computing the Sample Variance, 1983. */
template <typename Team>
OMC_INLINE void join_statistics(const Team &team, const omc_batch_norm &p) {
  const int64_t c = team.line;
  const acc_t *const means = sums_of(p, 0), *const squares = sums_of(p, 1);
  const auto size = [&](int64_t part) {
    const double left = p.count - (double)(part * p.part);
    return left < (double)p.part ? left : (double)p.part;
  };
  const double mean =
      omc_fold<omc_sum, double>(
          team, [&](omc_at at) { return size(at.k) * (double)means[at.k * p.channels + c]; }) /
      p.count;
  const double sum = omc_fold<omc_sum, double>(team, [&](omc_at at) {
    const double off = (double)means[at.k * p.channels + c] - mean;
    return (double)squares[at.k * p.channels + c] + size(at.k) * off * off;
  });
  if (!team.leads()) return;
  ((acc_t *)p.mean)[c] = (acc_t)mean;
  ((acc_t *)p.rstd)[c] = (acc_t)(1 / sqrt(sum / p.count + p.epsilon));
  move(p, p.running_mean, p.moved_mean, c, mean);
  move(p, p.running_var, p.moved_var, c, sum / (p.count - 1));
}

template <typename Team>
OMC_INLINE void join_gradients(const Team &team, const omc_batch_norm &p) {
  const int64_t c = team.line;
  double sums[2];
  for (int i = 0; i < 2; i++)
    sums[i] = omc_fold<omc_sum, double>(
        team, [&](omc_at at) { return (double)sums_of(p, i)[at.k * p.channels + c]; });
  if (!team.leads()) return;
  if (p.dbeta) ((acc_t *)p.dbeta)[c] = (acc_t)sums[0];
  if (p.dgamma) ((acc_t *)p.dgamma)[c] = (acc_t)sums[1];
  ((acc_t *)p.mean_dy)[c] = (acc_t)(sums[0] / p.count);
  ((acc_t *)p.mean_dyx)[c] = (acc_t)(sums[1] / p.count);
}

/* What elements of a channel are made of. */
struct of_channel {
  acc_t mean, rstd, scale, shift, mean_dy, mean_dyx;

  OMC_METHOD of_channel(const omc_batch_norm &p, int64_t c) {
    mean = ((const acc_t *)p.mean)[c], rstd = ((const acc_t *)p.rstd)[c];
    scale = rstd * channel_value(p.gamma, c, 1), shift = channel_value(p.beta, c, 0);
    mean_dy = p.mean_dy ? ((const acc_t *)p.mean_dy)[c] : 0;
    mean_dyx = p.mean_dyx ? ((const acc_t *)p.mean_dyx)[c] : 0;
  }
  OMC_METHOD acc_t y(acc_t x) const { return OMC_R(fma)(x - mean, scale, shift); }
  OMC_METHOD acc_t dx(acc_t dy, acc_t x) const {
    return scale * (dy - mean_dy - (x - mean) * rstd * mean_dyx);
  }
};

template <typename Team>
OMC_INLINE void normalize(const Team &team, const omc_batch_norm &p) {
  omc_line<storage_t, Team> x(team, p.x);
  const of_channel c(p, team.has_line() ? team.line % p.channels : 0);
  omc_write_line<storage_t>(team, p.out, [&](omc_at at) { return c.y(x[at]); }, x);
}

template <typename Team>
OMC_INLINE void normalize_grad(const Team &team, const omc_batch_norm &p) {
  omc_line<storage_t, Team> dy(team, p.dy), x(team, p.x);
  const of_channel c(p, team.has_line() ? team.line % p.channels : 0);
  omc_write_line<storage_t>(team, p.out, [&](omc_at at) { return c.dx(dy[at], x[at]); }, dy, x);
}

OMC_GROUPED_LINE_KERNELS(sums_of_BatchNorm, omc_batch_norm, statistics)
OMC_GROUPED_LINE_KERNELS(sums_of_BatchNormGrad, omc_batch_norm, gradient_sums)
OMC_LINE_KERNEL(join_BatchNorm_columns, omc_column_team, omc_batch_norm, join_statistics)
OMC_LINE_KERNEL(join_BatchNormGrad_columns, omc_column_team, omc_batch_norm, join_gradients)
OMC_LINE_KERNELS(BatchNorm, omc_batch_norm, normalize)
OMC_LINE_KERNELS(BatchNormGrad, omc_batch_norm, normalize_grad)

#endif

#endif
