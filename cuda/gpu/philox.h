/* The random bits of csrc/cpu/rng.h. Read by the host as C11. */
#ifndef OMC_GPU_PHILOX_H
#define OMC_GPU_PHILOX_H

#include "cuda/gpu/target.h"

/* A number, or where it is when a kernel runs: a graph of launches is the same for each seed. */
typedef struct omc_gpu_seed {
  uint64_t value;
  const uint64_t *at; /* NULL: `value` */
} omc_gpu_seed;

#ifdef OMC_GPU

/* The words of elements 4 * counter to 4 * counter + 3 of a subsequence. */
OMC_INLINE void omc_philox(uint64_t seed, uint32_t subsequence, uint64_t counter,
                           uint32_t (&out)[4]) {
  uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32), c2 = subsequence, c3 = 0;
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const uint32_t high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const uint32_t high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0, c1 = low1;
    c2 = high0 ^ c3 ^ k1, c3 = low0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}
OMC_INLINE void omc_philox(const omc_gpu_seed &seed, uint32_t subsequence, uint64_t counter,
                           uint32_t (&out)[4]) {
  omc_philox(seed.at ? *seed.at : seed.value, subsequence, counter, out);
}

#endif

#endif
