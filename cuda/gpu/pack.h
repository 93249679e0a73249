/* Neighbours in memory, a few at a time. */
#ifndef OMC_GPU_PACK_H
#define OMC_GPU_PACK_H

#include "cuda/gpu/target.h"

template <typename E, int N>
struct alignas(N * sizeof(E)) omc_pack {
  E e[N];
};

template <int N, typename E>
OMC_INLINE bool omc_is_packed(const E *at, int lanes) {
  return lanes == N && (uint64_t)at % sizeof(omc_pack<E, N>) == 0;
}

/* The first `lanes` of N neighbours, in one access if they are all there and aligned. */
template <typename E, int N>
OMC_INLINE void omc_load(E (&to)[N], const E *from, int lanes) {
  if (omc_is_packed<N>(from, lanes)) {
    const omc_pack<E, N> pack = *(const omc_pack<E, N> *)from;
#pragma unroll
    for (int l = 0; l < N; l++) to[l] = pack.e[l];
  } else {
#pragma unroll
    for (int l = 0; l < N; l++)
      if (l < lanes) to[l] = from[l];
  }
}
template <typename E, int N>
OMC_INLINE void omc_store(E *to, const E (&from)[N], int lanes) {
  if (omc_is_packed<N>(to, lanes)) {
    omc_pack<E, N> pack;
#pragma unroll
    for (int l = 0; l < N; l++) pack.e[l] = from[l];
    *(omc_pack<E, N> *)to = pack;
  } else {
#pragma unroll
    for (int l = 0; l < N; l++)
      if (l < lanes) to[l] = from[l];
  }
}

#endif
