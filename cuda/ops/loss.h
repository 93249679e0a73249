/* Losses of rows, which are lines along the classes, what they are reduced to, and gradients. The
 * formulas are those of csrc/ops/loss.c. A target that is no class is told of, and counts as one
 * that is ignored. */
#ifndef OMC_CUDA_OPS_LOSS_H
#define OMC_CUDA_OPS_LOSS_H

#include "cuda/gpu/letter.h"
#include "cuda/gpu/lines.h"

typedef struct omc_loss {
  omc_gpu_lines lines;
  omc_gpu_places classes; /* of weight */
  omc_sender sender;
  const void *logits, *weight; /* weight NULL: all 1 */
  const int64_t *target;
  const void *dloss;   /* of each row, if by_row; NULL: 1 */
  void *total;         /* what a mean is divided by */
  void *dlogits;       /* may be logits */
  void *rows;          /* losses of a forward, as they are computed */
  void *out;           /* the losses of all rows, if by_row */
  void *top, *log_sum; /* of each row; NULL: not kept */
  int64_t ignore_index;
  double hard, soft; /* 1 - e and e / C */
  int32_t by_row, is_mean;
} omc_loss;

/* Rows are along one line. */
typedef struct omc_loss_total {
  omc_gpu_lines lines;
  const void *weight;
  const int64_t *target;
  int64_t classes, ignore_index;
  const void *rows;
  double *partial;   /* [2, parts] */
  void *out, *total; /* NULL: not wanted */
  int64_t is_mean;
} omc_loss_total;

typedef struct omc_unit_interval {
  omc_sender sender;
  const void *x;
  void *y; /* may be x */
  int64_t n;
} omc_unit_interval;

#ifdef OMC_GPU

/* What weights of classes are stored as. */
#ifndef OMC_WEIGHTS
#define OMC_WEIGHTS storage_t
#endif

/* The target of a row; -1: it does not count. */
template <typename P>
OMC_INLINE int64_t class_of(const P &p, int64_t row, int64_t classes) {
  const int64_t t = p.target[row];
  return t == p.ignore_index || t < 0 || t >= classes ? -1 : t;
}

OMC_INLINE int64_t checked_class_of(const omc_loss &p, int64_t row) {
  const int64_t t = p.target[row], classes = p.lines.along.n;
  if (t != p.ignore_index && (t < 0 || t >= classes))
    omc_write(p.sender, OMC_LETTER_INDEX, t, classes);
  return class_of(p, row, classes);
}

OMC_INLINE acc_t weight_of(const void *weight, int64_t t) {
  return weight ? number<acc_t>(((const OMC_WEIGHTS *)weight)[t]) : (acc_t)1;
}

OMC_INLINE acc_t logit_of(const omc_loss &p, int64_t row, int64_t t) {
  const int64_t at = omc_offset_at(p.lines.kept, row) + t * p.lines.along.group[0].stride;
  return number<acc_t>(((const storage_t *)p.logits)[at]);
}

OMC_INLINE void write_loss(const omc_loss &p, int64_t row, acc_t loss) {
  if (p.by_row)
    ((storage_t *)p.out)[row] = element<storage_t>(loss);
  else
    ((acc_t *)p.rows)[row] = loss;
}

template <typename Team>
OMC_INLINE void cross_entropy(const Team &team, const omc_loss &p) {
  const acc_t hard = (acc_t)p.hard, soft = (acc_t)p.soft;
  omc_line<storage_t, Team> x(team, p.logits);
  omc_line<OMC_WEIGHTS, Team, 0> weight(team, p.weight, 0, p.classes);
  const omc_peak peak =
      omc_fold<omc_peaks, omc_peak>(team, [&](omc_at at) { return omc_peak{x[at], 1}; }, x);
  const acc_t top = peak.top;
  const acc_t log_sum = OMC_R(log)(peak.sum) + (top - top); /* NaN where the largest is infinite */
  omc_two smooth = {0, 0};                                  /* sums of w * (x - top) and of w */
  if (soft > 0)
    smooth = omc_fold<omc_sum, omc_two>(
        team,
        [&](omc_at at) {
          const acc_t w = p.weight ? weight[at] : 1;
          return omc_two{w * (x[at] - top), w};
        },
        x, weight);
  if (!team.leads()) return;
  if (p.top) ((acc_t *)p.top)[team.line] = top;
  if (p.log_sum) ((acc_t *)p.log_sum)[team.line] = log_sum;
  const int64_t t = checked_class_of(p, team.line);
  acc_t loss = 0;
  if (t >= 0) {
    loss = hard * weight_of(p.weight, t) * (log_sum - (logit_of(p, team.line, t) - top));
    if (soft > 0) loss += soft * (smooth.b * log_sum - smooth.a);
  }
  write_loss(p, team.line, loss);
}

/* What flows into the loss of a row. */
OMC_INLINE acc_t flow_of(const omc_loss &p, int64_t row) {
  const acc_t flow =
      p.dloss ? number<acc_t>(((const storage_t *)p.dloss)[p.by_row ? row : 0]) : (acc_t)1;
  return p.is_mean ? flow / *(const acc_t *)p.total : flow;
}

template <typename Team>
OMC_INLINE void cross_entropy_grad(const Team &team, const omc_loss &p) {
  omc_line<storage_t, Team> x(team, p.logits);
  omc_line<OMC_WEIGHTS, Team, 0> weight(team, p.soft > 0 ? p.weight : nullptr, 0, p.classes);
  acc_t weights = (acc_t)p.lines.along.n;
  if (weight.from)
    weights = omc_fold<omc_sum, acc_t>(team, [&](omc_at at) { return weight[at]; }, weight);
  acc_t top = 0, log_sum = 0, prob = 0, soft = 0, hard = 0;
  int64_t t = -1;
  if (team.has_line()) {
    top = ((const acc_t *)p.top)[team.line], log_sum = ((const acc_t *)p.log_sum)[team.line];
    t = checked_class_of(p, team.line);
  }
  if (t >= 0) {
    const acc_t flow = flow_of(p, team.line), pull = (acc_t)p.hard * weight_of(p.weight, t);
    prob = flow * (p.soft > 0 ? pull + (acc_t)p.soft * weights : pull);
    soft = p.soft > 0 ? flow * (acc_t)p.soft : 0; /* none of an infinite flow either */
    hard = flow * pull;
  }
  const bool none = t < 0 && log_sum == log_sum; /* NaN times 0 is not 0 */
  omc_write_line<storage_t>(
      team, p.dlogits,
      [&](omc_at at) {
        const int64_t c = at.k + at.l;
        const acc_t rest = soft * (weight.from ? weight[at] : 1);
        const acc_t slope = OMC_R(exp)(x[at] - top - log_sum) * prob - rest;
        return none ? 0 : c == t ? slope - hard : slope;
      },
      x, weight);
}

template <typename Team>
OMC_INLINE void nll_grad(const Team &team, const omc_loss &p) {
  const int64_t t = team.has_line() ? checked_class_of(p, team.line) : -1;
  const acc_t hard = t >= 0 ? flow_of(p, team.line) * weight_of(p.weight, t) : 0;
  omc_write_line<storage_t>(team, p.dlogits,
                            [&](omc_at at) { return at.k + at.l == t ? -hard : (acc_t)0; });
}

OMC_LINE_KERNELS(CrossEntropy, omc_loss, cross_entropy)
OMC_LINE_KERNELS(CrossEntropyGrad, omc_loss, cross_entropy_grad)
OMC_LINE_KERNELS(NegativeLogLikelihoodLossGrad, omc_loss, nll_grad)

OMC_GLOBAL(NegativeLogLikelihoodLoss, OMC_LINE_THREADS, omc_loss, p) {
  const int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= p.lines.kept.n) return;
  const int64_t t = checked_class_of(p, row);
  write_loss(p, row, t < 0 ? 0 : -logit_of(p, row, t) * weight_of(p.weight, t));
}

OMC_INLINE void write_total(const omc_loss_total &p, double loss, double total) {
  if (p.out) *(storage_t *)p.out = element<storage_t>((acc_t)(p.is_mean ? loss / total : loss));
  if (p.total) *(acc_t *)p.total = (acc_t)total;
}

/* The sums of the losses and of the weights of rows that count. */
template <typename Team>
OMC_INLINE void sum_rows(const Team &team, const omc_loss_total &p) {
  const acc_t *const rows = (const acc_t *)p.rows;
  const double loss =
      p.out ? omc_fold<omc_sum, double>(team, [&](omc_at at) { return rows[at.k + at.l]; }) : 0;
  const double total = omc_fold<omc_sum, double>(team, [&](omc_at at) {
    const int64_t t = class_of(p, at.k + at.l, p.classes);
    return t < 0 ? (acc_t)0 : weight_of(p.weight, t);
  });
  if (!team.leads()) return;
  if (p.lines.parts == 1) return write_total(p, loss, total);
  p.partial[team.part] = loss;
  p.partial[p.lines.parts + team.part] = total;
}

/* The same of the parts, which are along the line. */
template <typename Team>
OMC_INLINE void sum_parts(const Team &team, const omc_loss_total &p) {
  const double *const losses = p.partial, *const totals = p.partial + p.lines.along.n;
  const double loss =
      omc_fold<omc_sum, double>(team, [&](omc_at at) { return losses[at.k + at.l]; });
  const double total =
      omc_fold<omc_sum, double>(team, [&](omc_at at) { return totals[at.k + at.l]; });
  if (team.leads()) write_total(p, loss, total);
}

OMC_LINE_KERNEL(sum_rows_block, omc_row_team, omc_loss_total, sum_rows)
OMC_LINE_KERNEL(sum_parts_block, omc_row_team, omc_loss_total, sum_parts)

OMC_GLOBAL(UnitInterval, OMC_LINE_THREADS, omc_unit_interval, p) {
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= p.n) return;
  const storage_t e = ((const storage_t *)p.x)[i];
  const acc_t x = number<acc_t>(e);
  if (!(x >= 0 && x <= 1)) omc_write(p.sender, OMC_LETTER_DOMAIN, 0, 0);
  ((storage_t *)p.y)[i] = e;
}

#endif

#endif
