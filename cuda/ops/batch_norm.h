/* BatchNorm in training and its gradient: sums over parts of channels, which are lines across the
 * batch, then what is of each channel, then elements, by packs or along columns. What is added, and
 * Relu: see csrc/ops/norm.c. */
#ifndef OMC_CUDA_OPS_BATCH_NORM_H
#define OMC_CUDA_OPS_BATCH_NORM_H

#include "cuda/gpu/divide.h"
#include "cuda/gpu/lines.h"

/* A parameter or running statistic of each channel, stored as x is, or as what is computed in. */
typedef struct omc_channel_values {
  void *at; /* NULL: left out */
  int64_t is_wide;
} omc_channel_values;

typedef struct omc_batch_norm {
  omc_gpu_lines lines;
  int64_t channels, parts, part;      /* parts of a channel, elements of one */
  int64_t n;                          /* elements of all */
  omc_gpu_divisor inner, by_channels; /* neighbours of one channel, channels */
  double count, epsilon, momentum;
  int64_t relu;
  const void *dy, *x, *added; /* NULL: nothing is */
  omc_channel_values gamma, beta, running_mean, running_var, moved_mean, moved_var;
  void *mean, *rstd, *shift; /* of each channel; the last, which is beta, NULL: not wanted */
  void *partial;             /* [2, parts, channels]: means and squares about them, or sums */
  void *mean_dy, *mean_dyx;  /* of each channel: of dy and dy * xhat */
  void *dgamma, *dbeta;      /* NULL: not wanted */
  void *out;                 /* y or dx, which may be dy or x */
} omc_batch_norm;

#ifdef OMC_GPU

OMC_INLINE acc_t channel_value(const omc_channel_values &of, int64_t c, acc_t otherwise) {
  if (!of.at) return otherwise;
  return of.is_wide ? ((const acc_t *)of.at)[c] : number<acc_t>(((const storage_t *)of.at)[c]);
}

OMC_INLINE acc_t *sums_of(const omc_batch_norm &p, int which) {
  return (acc_t *)p.partial + which * p.parts * p.channels;
}

/* The mean of each line's first packs, to the bit where they are all the same: what it is rounded
 * by is added. 0 if it is not finite. */
template <typename Team>
OMC_INLINE omc_of_lines<acc_t, Team> mean_of_head(const Team &head, omc_line<storage_t, Team> &x) {
  const acc_t n = (acc_t)(head.last - head.first);
  omc_of_lines<acc_t, Team> mean = {};
#pragma unroll
  for (int pass = 0; pass < 2; pass++) {
    const omc_of_lines<acc_t, Team> off =
        omc_fold_lines<omc_sum, acc_t>(head, [&](omc_at at) { return x[at] - mean[at]; }, x);
#pragma unroll
    for (int l = 0; l < Team::LINES; l++) {
      const acc_t moved = mean.of[l] + off.of[l] / n;
      mean.of[l] = moved - moved == 0 ? moved : 0;
    }
  }
  return mean;
}

/* Mean and squares about it of a part of a channel, of one pass about what is near: the mean of the
 * part's first packs. What is lost by that is bounded, as these are a part of what varies. */
template <typename Team>
OMC_INLINE void statistics(const Team &team, const omc_batch_norm &p) {
  const acc_t n = (acc_t)(team.last - team.first);
  omc_line<storage_t, Team> x(team, p.x);
  const omc_of_lines<acc_t, Team> near = mean_of_head(omc_head(team), x);
  const omc_of_lines<omc_two, Team> off = omc_fold_lines<omc_sum, omc_two>(
      team,
      [&](omc_at at) {
        const acc_t d = x[at] - near[at];
        return omc_two{d, d * d};
      },
      x);
  omc_lead_lines(team, [&](int64_t line, int l) {
    const int64_t at = team.part * p.channels + line;
    const acc_t mean = off.of[l].a / n, squares = off.of[l].b - off.of[l].a * mean;
    sums_of(p, 0)[at] = near.of[l] + mean;
    sums_of(p, 1)[at] = squares < 0 ? 0 : squares;
  });
}

/* What y of a channel is made of, in which numbers are as they would be after being stored. */
struct of_channel {
  acc_t mean, rstd, scale, shift;

  of_channel() = default;
  OMC_METHOD of_channel(const omc_batch_norm &p, int64_t c) {
    mean = ((const acc_t *)p.mean)[c], rstd = ((const acc_t *)p.rstd)[c];
    scale = rstd * channel_value(p.gamma, c, 1), shift = channel_value(p.beta, c, 0);
  }
  static OMC_METHOD acc_t stored(acc_t x) { return number<acc_t>(element<storage_t>(x)); }
  OMC_METHOD acc_t normalized(acc_t x) const { return OMC_R(fma)(x - mean, scale, shift); }
  OMC_METHOD acc_t y(const omc_batch_norm &p, acc_t x, acc_t added) const {
    acc_t y = normalized(x);
    if (p.added) y = stored(y) + added;
    if (p.relu) y = stored(y);
    return p.relu && y < 0 ? 0 : y;
  }
  /* The gradient of y before Relu. */
  OMC_METHOD acc_t slope(const omc_batch_norm &p, acc_t dy, acc_t x) const {
    return p.relu && stored(normalized(x)) <= 0 ? 0 : dy;
  }
};

/* The same of lines that are channels, or samples of them. */
template <typename Of, typename Team>
OMC_INLINE omc_of_lines<Of, Team> channels_of(const Team &team, const omc_batch_norm &p) {
  return omc_each_line<Of>(
      team, [&](int64_t line, int) { return Of(p, omc_remainder(&line, p.by_channels)); });
}

/* Sums of dy and dy * xhat of a part of a channel. */
template <typename Team>
OMC_INLINE void gradient_sums(const Team &team, const omc_batch_norm &p) {
  omc_line<storage_t, Team> dy(team, p.dy), x(team, p.x);
  const omc_of_lines<of_channel, Team> channel = channels_of<of_channel>(team, p);
  const omc_of_lines<omc_two, Team> sums = omc_fold_lines<omc_sum, omc_two>(
      team,
      [&](omc_at at) {
        const of_channel c = channel[at];
        const acc_t slope = c.slope(p, dy[at], x[at]);
        return omc_two{slope, slope * (x[at] - c.mean) * c.rstd};
      },
      dy, x);
  omc_lead_lines(team, [&](int64_t line, int l) {
    const int64_t at = team.part * p.channels + line;
    sums_of(p, 0)[at] = sums.of[l].a, sums_of(p, 1)[at] = sums.of[l].b;
  });
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
  if (p.shift) ((acc_t *)p.shift)[c] = channel_value(p.beta, c, 0);
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

/* What dx is made of beside. */
struct of_channel_grad : of_channel {
  acc_t mean_dy, mean_dyx;

  of_channel_grad() = default;
  OMC_METHOD of_channel_grad(const omc_batch_norm &p, int64_t c) : of_channel(p, c) {
    mean_dy = ((const acc_t *)p.mean_dy)[c], mean_dyx = ((const acc_t *)p.mean_dyx)[c];
  }
  OMC_METHOD acc_t dx(const omc_batch_norm &p, acc_t dy, acc_t x) const {
    return scale * (slope(p, dy, x) - mean_dy - (x - mean) * rstd * mean_dyx);
  }
};

template <typename Team>
OMC_INLINE void normalize(const Team &team, const omc_batch_norm &p) {
  omc_line<storage_t, Team> x(team, p.x), added(team, p.added);
  const omc_of_lines<of_channel, Team> c = channels_of<of_channel>(team, p);
  omc_write_line<storage_t>(
      team, p.out, [&](omc_at at) { return c[at].y(p, x[at], added[at]); }, x, added);
}

template <typename Team>
OMC_INLINE void normalize_grad(const Team &team, const omc_batch_norm &p) {
  omc_line<storage_t, Team> dy(team, p.dy), x(team, p.x);
  const omc_of_lines<of_channel_grad, Team> c = channels_of<of_channel_grad>(team, p);
  omc_write_line<storage_t>(
      team, p.out, [&](omc_at at) { return c[at].dx(p, dy[at], x[at]); }, dy, x);
}

/* Packs of neighbours wherever channels begin: each is of two at most. Writes what each(c, l) gives
 * of element l, that is of c. */
template <typename Of, typename Each>
OMC_INLINE void write_pack(const omc_batch_norm &p, int64_t first, int lanes, Each each) {
  int64_t at = first;
  const int64_t left = p.inner.by - omc_remainder(&at, p.inner);
  const int64_t c = omc_remainder(&at, p.by_channels), next = c + 1 < p.channels ? c + 1 : 0;
  const Of here(p, c), after(p, next);
  storage_t out[OMC_ROW_PACK];
#pragma unroll
  for (int l = 0; l < OMC_ROW_PACK; l++) {
    if (l >= lanes) break;
    const Of of = l < left ? here : after;
    out[l] = element<storage_t>(each(of, l));
  }
  omc_store((storage_t *)p.out + first, out, lanes);
}

/* The thread's pack of a tensor that is stored as x is; NULL: none. */
struct pack_of : omc_loaded<storage_t, OMC_ROW_PACK> {
  OMC_METHOD pack_of(const void *data, int64_t first, int lanes) {
    if (data) omc_load(*this, (const storage_t *)data + first, lanes);
  }
  OMC_METHOD acc_t operator[](int l) const { return number<acc_t>(this->e[l]); }
};

template <bool IS_GRAD>
OMC_INLINE void packs_of_channels(const omc_batch_norm &p) {
  const int64_t first = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * OMC_ROW_PACK;
  if (first >= p.n) return;
  const int lanes = p.n - first < OMC_ROW_PACK ? (int)(p.n - first) : (int)OMC_ROW_PACK;
  const pack_of x(p.x, first, lanes), other(IS_GRAD ? p.dy : p.added, first, lanes);
  if (IS_GRAD)
    write_pack<of_channel_grad>(
        p, first, lanes, [&](const of_channel_grad &c, int l) { return c.dx(p, other[l], x[l]); });
  else
    write_pack<of_channel>(p, first, lanes,
                           [&](const of_channel &c, int l) { return c.y(p, x[l], other[l]); });
}

OMC_GROUPED_LINE_KERNELS(sums_of_BatchNorm, omc_batch_norm, statistics)
OMC_GROUPED_LINE_KERNELS(sums_of_BatchNormGrad, omc_batch_norm, gradient_sums)
OMC_COLUMN_KERNELS(sums_of_BatchNorm, omc_batch_norm, statistics)
OMC_COLUMN_KERNELS(sums_of_BatchNormGrad, omc_batch_norm, gradient_sums)
OMC_LINE_KERNEL(join_BatchNorm_columns, omc_column_team, omc_batch_norm, join_statistics)
OMC_LINE_KERNEL(join_BatchNormGrad_columns, omc_column_team, omc_batch_norm, join_gradients)
OMC_COLUMN_KERNELS(BatchNorm, omc_batch_norm, normalize)
OMC_COLUMN_KERNELS(BatchNormGrad, omc_batch_norm, normalize_grad)
OMC_GLOBAL_BLOCKS(BatchNorm_packs, OMC_LINE_THREADS, 2, omc_batch_norm, p) {
  packs_of_channels<false>(p);
}
OMC_GLOBAL_BLOCKS(BatchNormGrad_packs, OMC_LINE_THREADS, 2, omc_batch_norm, p) {
  packs_of_channels<true>(p);
}

#endif

#endif
