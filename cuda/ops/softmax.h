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

template <typename Team>
OMC_INLINE void softmax(const Team &team, const omc_softmax &p) {
  omc_line<storage_t, Team> x(team, p.a);
  const acc_t top = omc_fold<omc_most, acc_t>(team, [&](omc_at at) { return x[at]; }, x);
  const acc_t sum =
      omc_fold<omc_sum, acc_t>(team, [&](omc_at at) { return OMC_R(exp)(x[at] - top); }, x);
  const acc_t scale = 1 / sum;
  omc_write_line<storage_t>(
      team, p.out, [&](omc_at at) { return OMC_R(exp)(x[at] - top) * scale; }, x);
}

template <typename Team>
OMC_INLINE void log_softmax(const Team &team, const omc_softmax &p) {
  omc_line<storage_t, Team> x(team, p.a);
  const acc_t top = omc_fold<omc_most, acc_t>(team, [&](omc_at at) { return x[at]; }, x);
  const acc_t log_sum = OMC_R(log)(
      omc_fold<omc_sum, acc_t>(team, [&](omc_at at) { return OMC_R(exp)(x[at] - top); }, x));
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
