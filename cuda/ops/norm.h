/* LayerNormalization, RmsNorm (not CENTRED: about 0) and GroupNorm along lines, and their
 * gradients. OMC_GAMMA, OMC_BETA and OMC_Y are what these, and the gradient of y, are stored as. */
#ifndef OMC_CUDA_OPS_NORM_H
#define OMC_CUDA_OPS_NORM_H

#include "cuda/gpu/divide.h"
#include "cuda/gpu/lines.h"

typedef struct omc_layer {
  omc_gpu_lines lines;
  const void *dy, *x, *gamma, *beta; /* NULL: left out */
  void *mean, *rstd;                 /* of each line */
  void *out;                         /* y or dx */
  double epsilon;
  int64_t groups, channels; /* of a sample, of a group: a line is one group's */
  omc_gpu_divisor inner;    /* neighbours of one channel */
} omc_layer;

/* Sums over lines, of which this has the elements of one place each; or of GroupNorm, of which this
 * has a channel of a sample each. */
typedef struct omc_layer_sums {
  omc_gpu_lines lines;
  const void *dy, *x, *mean, *rstd;
  void *dgamma, *dbeta;     /* NULL: not wanted */
  void *partial;            /* [parts, 2, lines], used if there are several parts; or those of each
                               sample, [samples, 2, all channels] */
  int64_t groups, channels; /* as above */
} omc_layer_sums;

/* Both at once, of which the sums are by parts as there are blocks; their lines are not asked for.
 */
typedef struct omc_layer_grads {
  omc_layer rows;
  omc_layer_sums sums;
} omc_layer_grads;

#ifdef OMC_GPU

/* gamma or beta of the elements of a line: of each its own, */
template <typename E, typename Team>
struct of_row : omc_line<E, Team, 0> {
  OMC_METHOD of_row(const Team &team, const omc_layer &p, const void *data)
      : omc_line<E, Team, 0>(team, data, 0, p.lines.along) {}
};
/* or of each channel of a group. */
template <typename E, typename Team>
struct of_group {
  static_assert(Team::LINES == 1, "one line");
  const E *from; /* NULL: none */
  const omc_gpu_divisor &inner;

  OMC_METHOD of_group(const Team &team, const omc_layer &p, const void *data)
      : from((const E *)data), inner(p.inner) {
    if (from) from += team.line % p.groups * p.channels;
  }
  OMC_METHOD void pass(int64_t, int64_t, int, int) {}
  OMC_METHOD acc_t operator[](omc_at at) const {
    const int64_t k = at.k + at.l; /* of lines that stay in registers there are few */
    return number<acc_t>(from[Team::SLOTS ? omc_quotient((uint32_t)k, inner.multiplier, inner.shift)
                                          : omc_quotient(k, inner)]);
  }
};

template <bool CENTRED, template <typename, typename> class Of, typename Team>
OMC_INLINE void layer(const Team &team, const omc_layer &p) {
  const acc_t n = (acc_t)p.lines.along.n, no_beta = CENTRED ? 0 : -(acc_t)0; /* sign of a zero */
  omc_line<storage_t, Team> x(team, p.x);
  Of<OMC_GAMMA, Team> gamma(team, p, p.gamma);
  Of<OMC_BETA, Team> beta(team, p, p.beta);
  acc_t mean = 0, var;
  if (CENTRED) { /* of one pass about what is near: the mean as it is summed up */
    const acc_t near = omc_fold<omc_sum, acc_t>(team, [&](omc_at at) { return x[at]; }, x) / n;
    const auto off = [&](omc_at at) { return x[at] - near; };
    const omc_two sums = omc_fold<omc_sum, omc_two>(
        team, [&](omc_at at) { return omc_two{off(at), off(at) * off(at)}; }, x);
    const acc_t moved = sums.a / n, about_near = sums.b / n, about = about_near - moved * moved;
    mean = near + moved;
    var = about >= 0 ? about : about_near; /* squares may be infinite */
  } else {
    var = omc_fold<omc_sum, acc_t>(team, [&](omc_at at) { return x[at] * x[at]; }, x) / n;
  }
  const acc_t rstd = (acc_t)(1 / sqrt((double)var + p.epsilon));
  omc_write_line<OMC_Y>(
      team, p.out,
      [&](omc_at at) {
        return OMC_R(fma)((x[at] - mean) * rstd, p.gamma ? gamma[at] : 1,
                          p.beta ? beta[at] : no_beta);
      },
      x, gamma, beta);
  if (!team.leads()) return;
  if (p.mean) ((acc_t *)p.mean)[team.line] = mean;
  if (p.rstd) ((acc_t *)p.rstd)[team.line] = rstd;
}

/* dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) with g = dy * gamma, mean(g) being 0 about 0.
 * Calls each(at, dy, xhat) once for all elements. */
template <bool CENTRED, template <typename, typename> class Of, typename Team, typename Each>
OMC_INLINE void layer_grad(const Team &team, const omc_layer &p, Each each) {
  const acc_t n = (acc_t)p.lines.along.n;
  omc_line<OMC_Y, Team> dy(team, p.dy);
  omc_line<storage_t, Team> x(team, p.x);
  Of<OMC_GAMMA, Team> gamma(team, p, p.gamma);
  const acc_t mean = CENTRED && team.has_line() ? ((const acc_t *)p.mean)[team.line] : 0;
  const acc_t rstd = team.has_line() ? ((const acc_t *)p.rstd)[team.line] : 0;
  const auto g = [&](omc_at at) { return p.gamma ? dy[at] * gamma[at] : dy[at]; };
  const auto xhat = [&](omc_at at) { return (x[at] - mean) * rstd; };
  const omc_two sums = omc_fold<omc_sum, omc_two>(
      team,
      [&](omc_at at) {
        each(at, dy[at], xhat(at));
        return omc_two{g(at), g(at) * xhat(at)};
      },
      dy, x, gamma);
  const acc_t mean_g = CENTRED ? sums.a / n : 0, mean_gx = sums.b / n;
  omc_write_line<storage_t>(
      team, p.out, [&](omc_at at) { return rstd * (g(at) - mean_g - xhat(at) * mean_gx); }, dy, x,
      gamma);
}

template <bool CENTRED, template <typename, typename> class Of, typename Team>
OMC_INLINE void layer_grad(const Team &team, const omc_layer &p) {
  layer_grad<CENTRED, Of>(team, p, [](omc_at, acc_t, acc_t) {});
}

OMC_INLINE void write_sums(const omc_layer_sums &p, int64_t i, acc_t dgamma, acc_t dbeta) {
  if (p.dgamma) ((acc_t *)p.dgamma)[i] = dgamma;
  if (p.dbeta) ((acc_t *)p.dbeta)[i] = dbeta;
}

template <bool CENTRED, typename Team>
OMC_INLINE void layer_sums(const Team &team, const omc_layer_sums &p) {
  omc_line<OMC_Y, Team> dy(team, p.dy);
  omc_line<storage_t, Team> x(team, p.x);
  const omc_of_lines<omc_two, Team> sums = omc_fold_lines<omc_sum, omc_two>(
      team,
      [&](omc_at at) {
        const acc_t mean = CENTRED ? ((const acc_t *)p.mean)[at.k] : 0;
        const acc_t xhat = (x[at] - mean) * ((const acc_t *)p.rstd)[at.k];
        return omc_two{dy[at] * xhat, dy[at]};
      },
      dy, x);
  omc_lead_lines(team, [&](int64_t line, int l) {
    if (p.lines.parts == 1) return write_sums(p, line, sums.of[l].a, sums.of[l].b);
    acc_t *const partial = (acc_t *)p.partial + 2 * team.part * p.lines.kept.n + line;
    partial[0] = sums.of[l].a, partial[p.lines.kept.n] = sums.of[l].b;
  });
}

/* Sums of dy * xhat and dy in as many places as a pack has. */
struct sums_of_pack {
  omc_two of[OMC_ROW_PACK];

  static OMC_METHOD sums_of_pack join(sums_of_pack a, const sums_of_pack &b) {
#pragma unroll
    for (int l = 0; l < OMC_ROW_PACK; l++) a.of[l] = omc_sum::join(a.of[l], b.of[l]);
    return a;
  }
};

/* The gradients of rows that stay in registers, and of parameters: each thread adds up what of
 * these is in its places of the rows that its warp goes through. A block is a part. */
template <bool CENTRED>
OMC_INLINE void layer_grads(const omc_layer_grads &p) {
  sums_of_pack sums[OMC_WALK_SLOTS] = {};
  omc_walking_team team(p.rows.lines);
  for (; team.has_line(); team.walk())
    layer_grad<CENTRED, of_row>(team, p.rows, [&](omc_at at, acc_t dy, acc_t xhat) {
      omc_two &sum = sums[at.slot].of[at.l];
      sum = omc_sum::join(sum, omc_two{dy * xhat, dy});
    });
  const int64_t n = p.rows.lines.along.n;
  acc_t *const partial = (acc_t *)p.sums.partial + 2 * (int64_t)blockIdx.x * n;
#pragma unroll
  for (int slot = 0; slot < OMC_WALK_SLOTS; slot++) {
    if (slot * OMC_WARP * OMC_ROW_PACK >= n) break;
    const sums_of_pack all = omc_join_warps<sums_of_pack>(sums[slot]);
    const int64_t k = (slot * OMC_WARP + (int)threadIdx.x) * OMC_ROW_PACK;
    if (threadIdx.x >= OMC_WARP || k >= n) continue;
#pragma unroll
    for (int l = 0; l < OMC_ROW_PACK; l++)
      if (gridDim.x == 1)
        write_sums(p.sums, k + l, all.of[l].a, all.of[l].b);
      else
        partial[k + l] = all.of[l].a, partial[n + k + l] = all.of[l].b;
  }
}

/* Of a channel of a sample. */
template <typename Team>
OMC_INLINE void group_sums(const Team &team, const omc_layer_sums &p) {
  omc_line<OMC_Y, Team> dy(team, p.dy);
  omc_line<storage_t, Team> x(team, p.x);
  const int64_t group = team.line / p.channels;
  const acc_t mean = team.has_line() ? ((const acc_t *)p.mean)[group] : 0;
  const acc_t rstd = team.has_line() ? ((const acc_t *)p.rstd)[group] : 0;
  const omc_two sums = omc_fold<omc_sum, omc_two>(
      team, [&](omc_at at) { return omc_two{dy[at] * ((x[at] - mean) * rstd), dy[at]}; }, dy, x);
  if (!team.leads()) return;
  const int64_t all = p.groups * p.channels;
  acc_t *const partial = (acc_t *)p.partial + team.line + group / p.groups * all;
  partial[0] = sums.a, partial[all] = sums.b;
}

/* Of the parts or samples, which are along these lines. */
template <typename Team>
OMC_INLINE void join_sums(const Team &team, const omc_layer_sums &p) {
  const acc_t *const from = (const acc_t *)p.partial;
  omc_line<acc_t, Team> dgamma(team, from), dbeta(team, from + p.lines.kept.n);
  const omc_two sums = omc_fold<omc_sum, omc_two>(
      team, [&](omc_at at) { return omc_two{dgamma[at], dbeta[at]}; }, dgamma, dbeta);
  if (team.leads()) write_sums(p, team.line, sums.a, sums.b);
}

OMC_LINE_KERNELS(LayerNormalization, omc_layer, layer<true, of_row>)
OMC_LINE_KERNELS(RmsNorm, omc_layer, layer<false, of_row>)
OMC_LINE_KERNELS(GroupNorm, omc_layer, layer<true, of_group>)
OMC_LINE_KERNELS(LayerNormGrad, omc_layer, layer_grad<true, of_row>)
OMC_LINE_KERNELS(RmsNormGrad, omc_layer, layer_grad<false, of_row>)
OMC_LINE_KERNEL(GroupNormGrad_warps, omc_warp_team, omc_layer, layer_grad<true, of_group>)
/* Which channels its elements are of stays in registers from one pass to the next. */
OMC_GLOBAL_WIDE(GroupNormGrad_whole_warps, OMC_LINE_THREADS, omc_layer, p) {
  layer_grad<true, of_group>(omc_whole_warp_team(p.lines), p);
}
OMC_LINE_KERNEL(GroupNormGrad_block, omc_row_team, omc_layer, layer_grad<true, of_group>)
OMC_LINE_KERNEL(GroupNormGrad_columns, omc_column_team, omc_layer, layer_grad<true, of_group>)
OMC_GLOBAL_BLOCKS(LayerNormGrad_walk, OMC_WALK_THREADS, OMC_WALK_BLOCKS, omc_layer_grads, p) {
  layer_grads<true>(p);
}
OMC_GLOBAL_BLOCKS(RmsNormGrad_walk, OMC_WALK_THREADS, OMC_WALK_BLOCKS, omc_layer_grads, p) {
  layer_grads<false>(p);
}
OMC_LINE_KERNELS(sums_of_GroupNormGrad, omc_layer_sums, group_sums)
OMC_COLUMN_KERNELS(sums_of_LayerNormGrad, omc_layer_sums, layer_sums<true>)
OMC_COLUMN_KERNELS(sums_of_RmsNormGrad, omc_layer_sums, layer_sums<false>)
OMC_LINE_KERNEL(join_sums_of_LayerNormGrad_columns, omc_column_team, omc_layer_sums, join_sums)
OMC_LINE_KERNEL(join_sums_of_RmsNormGrad_columns, omc_column_team, omc_layer_sums, join_sums)
OMC_LINE_KERNEL(join_sums_of_GroupNormGrad_columns, omc_column_team, omc_layer_sums, join_sums)

#endif

#endif
