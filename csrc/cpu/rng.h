/* Philox4x32-10: random bits by counter. (seed, stream, element) determines every bit, whatever
 * the thread count, instruction set or device. Constants from Salmon et al., SC 2011. */
#ifndef OMC_CPU_RNG_H
#define OMC_CPU_RNG_H

#include <stdint.h>

static inline void omc_philox(uint64_t seed, uint32_t stream, uint64_t counter, uint32_t out[4]) {
  uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32), c2 = stream, c3 = 0;
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; round++) {
    uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
    c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
    c1 = (uint32_t)p1;
    c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c3 = (uint32_t)p0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* Element e of a stream has word e % 4 of counter e / 4. It is kept with probability 1 - p when
 * its word is at least omc_drop_threshold(p). */
static inline uint32_t omc_drop_threshold(double p) {
  double t = p * 4294967296.0;
  return t <= 0 ? 0u : t >= 4294967295.0 ? 4294967295u : (uint32_t)t;
}

#endif
