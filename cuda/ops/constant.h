/* Numbers in even steps. Read by the host as C11. */
#ifndef OMC_CUDA_OPS_CONSTANT_H
#define OMC_CUDA_OPS_CONSTANT_H

#include "cuda/gpu/target.h"

enum { OMC_RANGE_THREADS = 256 };

typedef struct omc_range_of {
  void *y;
  int64_t n;
  double from, step;    /* of floats */
  int64_t first, delta; /* of integers */
} omc_range_of;

#ifdef OMC_GPU
#include "cuda/gpu/lane.h"

OMC_GLOBAL(range, OMC_RANGE_THREADS, omc_range_of, p) {
  const int64_t i = (int64_t)blockIdx.x * OMC_RANGE_THREADS + threadIdx.x;
  if (i >= p.n) return;
#if OMC_IS_FLOAT
  ((OMC_STORAGE *)p.y)[i] = element<OMC_STORAGE>(p.from + (double)i * p.step);
#else
  ((OMC_STORAGE *)p.y)[i] =
      element<OMC_STORAGE>((int64_t)((uint64_t)p.first + (uint64_t)i * (uint64_t)p.delta));
#endif
}

#endif

#endif
