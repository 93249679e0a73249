/* What the threads of a block before a thread have, added up in a fixed order. */
#ifndef OMC_GPU_PREFIX_H
#define OMC_GPU_PREFIX_H

#include "cuda/gpu/target.h"

/* The sum of x of the threads before this one, and *all that of all THREADS, who all call it. */
template <int THREADS, typename T>
OMC_INLINE T omc_scan(T x, T *all) {
  constexpr int warp_size = 32, n_warps = THREADS / warp_size;
  __shared__ T sums[n_warps];
  const int lane = (int)threadIdx.x % warp_size, warp = (int)threadIdx.x / warp_size;
  T upto = x;
#pragma unroll
  for (int by = 1; by < warp_size; by *= 2) {
    const T before = __shfl_up_sync(~0u, upto, by);
    if (lane >= by) upto = before + upto;
  }
  const T before = __shfl_up_sync(~0u, upto, 1);
  if (lane == warp_size - 1) sums[warp] = upto;
  __syncthreads();
  T earlier = 0, total = 0;
#pragma unroll
  for (int w = 0; w < n_warps; w++) {
    if (w == warp) earlier = total;
    total += sums[w];
  }
  __syncthreads();
  *all = total;
  return lane == 0 ? earlier : earlier + before;
}

#endif
