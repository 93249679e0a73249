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

/* As omc_philox for OMC_PHILOX_LANES counters from `counter` on; out[4 * i + w] is word w of
 * counter + i. Lanes are so many that compilers make vector code of the loops, not unroll them. */
#define OMC_PHILOX_LANES 32
static inline void omc_philox_lanes(uint64_t seed, uint32_t stream, uint64_t counter,
                                    uint32_t out[4 * OMC_PHILOX_LANES]) {
  uint32_t c0[OMC_PHILOX_LANES], c1[OMC_PHILOX_LANES], c2[OMC_PHILOX_LANES], c3[OMC_PHILOX_LANES];
  for (int i = 0; i < OMC_PHILOX_LANES; i++) {
    c0[i] = (uint32_t)(counter + (uint64_t)i);
    c1[i] = (uint32_t)((counter + (uint64_t)i) >> 32);
    c2[i] = stream;
    c3[i] = 0;
  }
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; round++) {
    for (int i = 0; i < OMC_PHILOX_LANES; i++) {
      const uint64_t p0 = (uint64_t)0xD2511F53u * c0[i], p1 = (uint64_t)0xCD9E8D57u * c2[i];
      c0[i] = (uint32_t)(p1 >> 32) ^ c1[i] ^ k0;
      c1[i] = (uint32_t)p1;
      c2[i] = (uint32_t)(p0 >> 32) ^ c3[i] ^ k1;
      c3[i] = (uint32_t)p0;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (int i = 0; i < OMC_PHILOX_LANES; i++)
    out[4 * i] = c0[i], out[4 * i + 1] = c1[i], out[4 * i + 2] = c2[i], out[4 * i + 3] = c3[i];
}

/* The words of elements first .. first + n - 1 of a stream (see below). */
static inline void omc_philox_words(uint64_t seed, uint32_t stream, uint64_t first, int64_t n,
                                    uint32_t *out) {
  uint32_t words[4 * OMC_PHILOX_LANES];
  for (int64_t done = 0; done < n;) {
    const uint64_t skip = (first + (uint64_t)done) % 4;
    omc_philox_lanes(seed, stream, (first + (uint64_t)done) / 4, words);
    const int64_t have = 4 * OMC_PHILOX_LANES - (int64_t)skip;
    const int64_t take = n - done < have ? n - done : have;
    for (int64_t i = 0; i < take; i++) out[done + i] = words[(int64_t)skip + i];
    done += take;
  }
}

/* Element e of a stream has word e % 4 of counter e / 4. It is kept with probability 1 - p when
 * its word is at least omc_drop_threshold(p). */
static inline uint32_t omc_drop_threshold(double p) {
  double t = p * 4294967296.0;
  return t <= 0 ? 0u : t >= 4294967295.0 ? 4294967295u : (uint32_t)t;
}

#endif
