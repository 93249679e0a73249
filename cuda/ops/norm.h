/* LayerNormalization and RmsNorm (not CENTRED: about 0) along lines, and their gradients.
 * OMC_GAMMA, OMC_BETA and OMC_Y are what these, and the gradient of y, are stored as. */
#ifndef OMC_CUDA_OPS_NORM_H
#define OMC_CUDA_OPS_NORM_H

#include "cuda/gpu/lines.h"

typedef struct omc_layer {
  omc_gpu_lines lines;
  const void *dy, *x, *gamma, *beta; /* NULL: left out */
  void *mean, *rstd;                 /* of each line */
  void *out;                         /* y or dx */
  double epsilon;
} omc_layer;

/* Sums over lines, of which this has the elements of one place each. */
typedef struct omc_layer_sums {
  omc_gpu_lines lines;
  const void *dy, *x, *mean, *rstd;
  void *dgamma, *dbeta; /* NULL: not wanted */
  void *partial;        /* [parts, 2, lines], used if there are several parts */
} omc_layer_sums;

#ifdef OMC_GPU

template <bool CENTRED, typename Team>
OMC_INLINE void layer(const Team &team, const omc_layer &p) {
  const acc_t n = (acc_t)p.lines.along.n, no_beta = CENTRED ? 0 : -(acc_t)0; /* sign of a zero */
  omc_line<storage_t, Team> x(team, p.x);
  omc_line<OMC_GAMMA, Team, 0> gamma(team, p.gamma, 0, p.lines.along);
  omc_line<OMC_BETA, Team, 0> beta(team, p.beta, 0, p.lines.along);
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
 */
template <bool CENTRED, typename Team>
OMC_INLINE void layer_grad(const Team &team, const omc_layer &p) {
  const acc_t n = (acc_t)p.lines.along.n;
  omc_line<OMC_Y, Team> dy(team, p.dy);
  omc_line<storage_t, Team> x(team, p.x);
  omc_line<OMC_GAMMA, Team, 0> gamma(team, p.gamma, 0, p.lines.along);
  const acc_t mean = CENTRED && team.has_line() ? ((const acc_t *)p.mean)[team.line] : 0;
  const acc_t rstd = team.has_line() ? ((const acc_t *)p.rstd)[team.line] : 0;
  const auto g = [&](omc_at at) { return p.gamma ? dy[at] * gamma[at] : dy[at]; };
  const auto xhat = [&](omc_at at) { return (x[at] - mean) * rstd; };
  const omc_two sums = omc_fold<omc_sum, omc_two>(
      team, [&](omc_at at) { return omc_two{g(at), g(at) * xhat(at)}; }, dy, x, gamma);
  const acc_t mean_g = CENTRED ? sums.a / n : 0, mean_gx = sums.b / n;
  omc_write_line<storage_t>(
      team, p.out, [&](omc_at at) { return rstd * (g(at) - mean_g - xhat(at) * mean_gx); }, dy, x,
      gamma);
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

/* Of the parts, which are along these lines. */
template <typename Team>
OMC_INLINE void join_sums(const Team &team, const omc_layer_sums &p) {
  const acc_t *const from = (const acc_t *)p.partial;
  omc_line<acc_t, Team> dgamma(team, from), dbeta(team, from + p.lines.kept.n);
  const omc_two sums = omc_fold<omc_sum, omc_two>(
      team, [&](omc_at at) { return omc_two{dgamma[at], dbeta[at]}; }, dgamma, dbeta);
  if (team.leads()) write_sums(p, team.line, sums.a, sums.b);
}

OMC_LINE_KERNELS(LayerNormalization, omc_layer, layer<true>)
OMC_LINE_KERNELS(RmsNorm, omc_layer, layer<false>)
OMC_LINE_KERNELS(LayerNormGrad, omc_layer, layer_grad<true>)
OMC_LINE_KERNELS(RmsNormGrad, omc_layer, layer_grad<false>)
OMC_COLUMN_KERNELS(sums_of_LayerNormGrad, omc_layer_sums, layer_sums<true>)
OMC_COLUMN_KERNELS(sums_of_RmsNormGrad, omc_layer_sums, layer_sums<false>)
OMC_LINE_KERNEL(join_sums_of_LayerNormGrad_columns, omc_column_team, omc_layer_sums, join_sums)
OMC_LINE_KERNEL(join_sums_of_RmsNormGrad_columns, omc_column_team, omc_layer_sums, join_sums)

#endif

#endif
