/* Weighted sums of a few elements along an axis. Read by the host as C11. */
#ifndef OMC_CUDA_OPS_RESAMPLE_H
#define OMC_CUDA_OPS_RESAMPLE_H

#include "cuda/gpu/divide.h"

enum { OMC_RESAMPLE_THREADS = 256 };

typedef struct omc_resampling {
  const void *x, *weights;
  const int64_t *places;
  void *y;
  int64_t numel; /* of y */
  int64_t from, most;
  omc_gpu_divisor inner, to;
} omc_resampling;

#ifdef OMC_GPU
#include "cuda/gpu/lane.h"

typedef OMC_STORAGE storage_t;

OMC_GLOBAL(resample, OMC_RESAMPLE_THREADS, omc_resampling, p) {
  const int64_t at = (int64_t)blockIdx.x * OMC_RESAMPLE_THREADS + threadIdx.x;
  if (at >= p.numel) return;
  int64_t outer = at;
  const int64_t column = omc_remainder(&outer, p.inner), i = omc_remainder(&outer, p.to);
  const storage_t *x = (const storage_t *)p.x + outer * p.from * p.inner.by + column;
  const storage_t *weights = (const storage_t *)p.weights;
  acc_t sum = 0;
  for (int64_t k = i * p.most; k < (i + 1) * p.most; k++) {
    const int64_t place = p.places[k];
    if (place >= 0 && place < p.from)
      sum += number<acc_t>(weights[k]) * number<acc_t>(x[place * p.inner.by]);
  }
  ((storage_t *)p.y)[at] = element<storage_t>(sum);
}

#endif

#endif
