/* Softmax and LogSoftmax along lines, and their gradients from what they gave. */
#ifndef OMC_CUDA_OPS_SOFTMAX_H
#define OMC_CUDA_OPS_SOFTMAX_H

#include "cuda/gpu/lines.h"

typedef struct omc_softmax {
  omc_gpu_lines lines;
  const void *a, *b; /* x, or dy and y */
  void *out;         /* may be one of them */
} omc_softmax;

#ifdef OMC_GPU

/* Of a line: what would be read again is passed over once, what is in registers twice, as no sum of
 * exps then waits for another's. NaN where the largest is infinite. */
template <typename Team>
OMC_INLINE omc_peak peak_of(const Team &team, omc_line<storage_t, Team> &x) {
  omc_peak peak;
  if constexpr (Team::SLOTS == 0) {
    peak = omc_fold<omc_peaks, omc_peak>(team, [&](omc_at at) { return omc_peak{x[at], 1}; }, x);
    peak.sum += peak.top - peak.top;
  } else {
    peak.top = omc_fold<omc_most, acc_t>(team, [&](omc_at at) { return x[at]; }, x);
    peak.sum =
        omc_fold<omc_sum, acc_t>(team, [&](omc_at at) { return OMC_R(exp)(x[at] - peak.top); }, x);
  }
  return peak;
}

template <typename Team>
OMC_INLINE void softmax(const Team &team, const omc_softmax &p) {
  omc_line<storage_t, Team> x(team, p.a);
  const omc_peak peak = peak_of(team, x);
  const acc_t top = peak.top, scale = 1 / peak.sum;
  omc_write_line<storage_t>(
      team, p.out, [&](omc_at at) { return OMC_R(exp)(x[at] - top) * scale; }, x);
}

template <typename Team>
OMC_INLINE void log_softmax(const Team &team, const omc_softmax &p) {
  omc_line<storage_t, Team> x(team, p.a);
  const omc_peak peak = peak_of(team, x);
  const acc_t top = peak.top, log_sum = OMC_R(log)(peak.sum);
  omc_write_line<storage_t>(team, p.out, [&](omc_at at) { return x[at] - top - log_sum; }, x);
}

template <typename Team>
OMC_INLINE void softmax_grad(const Team &team, const omc_softmax &p) {
  omc_line<storage_t, Team> dy(team, p.a), y(team, p.b);
  const acc_t dot =
      omc_fold<omc_sum, acc_t>(team, [&](omc_at at) { return dy[at] * y[at]; }, dy, y);
  omc_write_line<storage_t>(team, p.out, [&](omc_at at) { return y[at] * (dy[at] - dot); }, dy, y);
}

template <typename Team>
OMC_INLINE void log_softmax_grad(const Team &team, const omc_softmax &p) {
  omc_line<storage_t, Team> dy(team, p.a), y(team, p.b);
  const acc_t sum = omc_fold<omc_sum, acc_t>(team, [&](omc_at at) { return dy[at]; }, dy);
  omc_write_line<storage_t>(
      team, p.out, [&](omc_at at) { return dy[at] - OMC_R(exp)(y[at]) * sum; }, dy, y);
}

OMC_LINE_KERNELS(Softmax, omc_softmax, softmax)
OMC_LINE_KERNELS(LogSoftmax, omc_softmax, log_softmax)
OMC_LINE_KERNELS(SoftmaxGrad, omc_softmax, softmax_grad)
OMC_LINE_KERNELS(LogSoftmaxGrad, omc_softmax, log_softmax_grad)

#endif

#endif
