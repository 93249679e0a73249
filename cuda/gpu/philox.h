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

/* The words of each of N counters of a subsequence, which share the keys of the rounds. */
template <int N>
OMC_INLINE void omc_philox(uint64_t seed, uint32_t subsequence, const uint64_t (&counters)[N],
                           uint32_t (&out)[N][4]) {
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#pragma unroll
  for (int n = 0; n < N; n++) {
    out[n][0] = (uint32_t)counters[n], out[n][1] = (uint32_t)(counters[n] >> 32);
    out[n][2] = subsequence, out[n][3] = 0;
  }
#pragma unroll
  for (int round = 0; round < 10; round++) {
#pragma unroll
    for (int n = 0; n < N; n++) {
      uint32_t (&c)[4] = out[n];
      const uint32_t high0 = __umulhi(0xD2511F53u, c[0]), low0 = 0xD2511F53u * c[0];
      const uint32_t high1 = __umulhi(0xCD9E8D57u, c[2]), low1 = 0xCD9E8D57u * c[2];
      c[0] = high1 ^ c[1] ^ k0, c[1] = low1;
      c[2] = high0 ^ c[3] ^ k1, c[3] = low0;
    }
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
}
OMC_INLINE void omc_philox(uint64_t seed, uint32_t subsequence, uint64_t counter,
                           uint32_t (&out)[4]) {
  const uint64_t counters[1] = {counter};
  uint32_t words[1][4];
  omc_philox(seed, subsequence, counters, words);
#pragma unroll
  for (int i = 0; i < 4; i++) out[i] = words[0][i];
}
OMC_INLINE uint64_t omc_seed(const omc_gpu_seed &seed) { return seed.at ? *seed.at : seed.value; }
OMC_INLINE void omc_philox(const omc_gpu_seed &seed, uint32_t subsequence, uint64_t counter,
                           uint32_t (&out)[4]) {
  omc_philox(omc_seed(seed), subsequence, counter, out);
}

/* What elements 4 * four to 4 * four + 3 of a subsequence draw, see ops/random.h. */
OMC_INLINE uint32_t omc_turned(uint32_t word) { return word << 16 | word >> 16; }
OMC_INLINE void omc_draws(const omc_gpu_seed &seed, uint32_t subsequence, uint64_t four,
                          uint32_t (&out)[4]) {
  omc_philox(seed, subsequence, four / 2, out);
#pragma unroll
  for (int i = 0; i < 4; i++) out[i] = four % 2 ? omc_turned(out[i]) : out[i];
}
/* The same of two fours, the first of them even. */
OMC_INLINE void omc_draws(const omc_gpu_seed &seed, uint32_t subsequence, uint64_t four,
                          uint32_t (&out)[8]) {
  uint32_t words[4];
  omc_philox(seed, subsequence, four / 2, words);
#pragma unroll
  for (int i = 0; i < 8; i++) out[i] = i < 4 ? words[i] : omc_turned(words[i - 4]);
}

#endif

#endif
