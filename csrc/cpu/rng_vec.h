/* Philox in vectors, for kernels of float classes: variant part only. The same bits as
 * omc_philox. */
#ifndef OMC_CPU_RNG_VEC_H
#define OMC_CPU_RNG_VEC_H

#include "cpu/rng.h"
#include "cpu/vec.h"

#if OMC_IS_FLOAT

/* One counter per 64-bit lane, of which the low half is a word and the high half is ignored: a
 * product of two words then fills a lane and its halves need no regrouping. */
#define OMC_RNG_LANES (OMC_VL * (int)sizeof(real) / 8)
#define OMC_RNG_STEP (4 * OMC_RNG_LANES) /* words made at a time */
#define OMC_RNG_CHUNK 512

typedef uint64_t omc_rng_vec __attribute__((vector_size(OMC_RNG_LANES * 8), may_alias));

OMC_INLINE omc_rng_vec omc_rng_set(uint64_t x) { return x - (omc_rng_vec){0}; }

/* Products of the low halves. */
OMC_INLINE omc_rng_vec omc_rng_mul(omc_rng_vec a, omc_rng_vec b) {
#if defined(__AVX512F__) && OMC_VL * __SIZEOF_FLOAT__ == 64
  return (omc_rng_vec)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && OMC_VL * __SIZEOF_FLOAT__ == 32
  return (omc_rng_vec)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return (omc_rng_vec)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & omc_rng_set(0xffffffffu)) * (b & omc_rng_set(0xffffffffu));
#endif
}

/* The words of elements first .. first + n - 1, first a multiple of 4, n of OMC_RNG_STEP. */
OMC_INLINE void omc_rng_words(uint64_t seed, uint32_t stream, uint64_t first, uint32_t *out,
                              int64_t n) {
  const omc_rng_vec m0 = omc_rng_set(0xD2511F53u), m1 = omc_rng_set(0xCD9E8D57u);
  const omc_rng_vec low = omc_rng_set(0xffffffffu);
  omc_rng_vec k0[10], k1[10], lane;
  for (int r = 0; r < 10; r++) {
    k0[r] = omc_rng_set((uint32_t)seed + (uint32_t)r * 0x9E3779B9u);
    k1[r] = omc_rng_set((uint32_t)(seed >> 32) + (uint32_t)r * 0xBB67AE85u);
  }
  for (int l = 0; l < OMC_RNG_LANES; l++) lane[l] = (uint64_t)l;
  for (int64_t done = 0; done < n; done += OMC_RNG_STEP) {
    const omc_rng_vec counter = omc_rng_set((first + (uint64_t)done) / 4) + lane;
    omc_rng_vec c0 = counter, c1 = counter >> 32, c2 = omc_rng_set(stream), c3 = omc_rng_set(0);
    for (int r = 0; r < 10; r++) {
      const omc_rng_vec p0 = omc_rng_mul(m0, c0), p1 = omc_rng_mul(m1, c2);
      c0 = (p1 >> 32) ^ c1 ^ k0[r];
      c1 = p1;
      c2 = (p0 >> 32) ^ c3 ^ k1[r];
      c3 = p0;
    }
    const omc_rng_vec front = (c0 & low) | (c1 << 32), back = (c2 & low) | (c3 << 32);
    for (int l = 0; l < OMC_RNG_LANES; l++) {
      const uint64_t four[2] = {front[l], back[l]};
      memcpy(out + done + 4 * l, four, sizeof four);
    }
  }
}

/* factors[i] = element first + i of the stream is kept ? scale : 0; any first and n. */
OMC_INLINE void omc_dropout_factors(uint64_t seed, uint32_t stream, uint64_t first,
                                    uint32_t threshold, real scale, real *factors, int64_t n) {
  _Alignas(64) uint32_t words[OMC_RNG_CHUNK + OMC_RNG_STEP];
  const int64_t skip = (int64_t)(first % 4);
  for (int64_t done = 0, m; done < n; done += m) {
    m = n - done < OMC_RNG_CHUNK ? n - done : OMC_RNG_CHUNK;
    const int64_t made = (int64_t)omc_round_up((size_t)(skip + m), OMC_RNG_STEP);
    omc_rng_words(seed, stream, first + (uint64_t)done - (uint64_t)skip, words, made);
    for (int64_t i = 0; i < m; i++) factors[done + i] = words[skip + i] >= threshold ? scale : 0;
  }
}

#endif
#endif
