/* The upper or the lower triangle of matrices, by size of element. Read by the host as C11. */
#ifndef OMC_CUDA_OPS_TRILU_H
#define OMC_CUDA_OPS_TRILU_H

#include "cuda/gpu/divide.h"

enum { OMC_TRILU_THREADS = 256, OMC_TRILU_UNITS = 4 /* elements of a thread */ };

typedef struct omc_trilu {
  const void *x;
  void *y;
  int64_t n;
  omc_gpu_divisor rows, cols;
  int64_t k;     /* the diagonal that both triangles have */
  int64_t upper; /* a flag */
} omc_trilu;

#ifdef OMC_GPU

template <typename T>
OMC_INLINE void omc_take_triangle(const omc_trilu &p) {
  const int64_t first = (int64_t)blockIdx.x * (OMC_TRILU_THREADS * OMC_TRILU_UNITS) + threadIdx.x;
#pragma unroll
  for (int u = 0; u < OMC_TRILU_UNITS; u++) {
    const int64_t at = first + u * OMC_TRILU_THREADS;
    if (at >= p.n) return;
    int64_t index = at;
    const int64_t col = omc_remainder(&index, p.cols), row = omc_remainder(&index, p.rows);
    const bool kept = p.upper ? col - row >= p.k : col - row <= p.k;
    ((T *)p.y)[at] = kept ? ((const T *)p.x)[at] : T(0);
  }
}

#define OMC_TRILU(bytes, T) \
  OMC_GLOBAL(trilu_##bytes, OMC_TRILU_THREADS, omc_trilu, trilu) { omc_take_triangle<T>(trilu); }
OMC_TRILU(1, uint8_t)
OMC_TRILU(2, uint16_t)
OMC_TRILU(4, uint32_t)
OMC_TRILU(8, uint64_t)

#endif

#endif
