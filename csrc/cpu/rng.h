/* Philox4x32-10: random bits by counter. (seed, subsequence, element) determines every bit,
 * whatever the thread count, instruction set or device. Constants from Salmon et al., SC 2011. */
#ifndef OMC_CPU_RNG_H
#define OMC_CPU_RNG_H

#include <stdint.h>

#include "base/int.h"

#ifdef OMC_VARIANT
#include "cpu/vec.h"
#endif

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

/* One counter per 64-bit lane, of which the low half is a word and the high half is ignored: a
 * product of two words then fills a lane and its halves need no regrouping. */
#if defined(OMC_COMPUTE_F64)
#define OMC_RNG_LANES OMC_VL
#else
#define OMC_RNG_LANES (OMC_VL / 2)
#endif
typedef uint64_t omc_rng_vec __attribute__((vector_size(OMC_RNG_LANES * 8), may_alias));

OMC_INLINE omc_rng_vec omc_rng_set(uint64_t x) { return x - (omc_rng_vec){0}; }

/* Products of the low halves. */
OMC_INLINE omc_rng_vec omc_rng_mul(omc_rng_vec a, omc_rng_vec b) {
#if defined(__AVX512F__) && OMC_RNG_LANES == 8
  return (omc_rng_vec)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && OMC_RNG_LANES == 4
  return (omc_rng_vec)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return (omc_rng_vec)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & omc_rng_set(0xffffffffu)) * (b & omc_rng_set(0xffffffffu));
#endif
}

typedef struct omc_rng_keys {
  omc_rng_vec k0[10], k1[10]; /* of each round */
  omc_rng_vec lane;           /* 0, 1, 2, ... */
} omc_rng_keys;

/* Each word with its halves exchanged. */
OMC_INLINE omc_rng_vec omc_rng_turn(omc_rng_vec x) {
  typedef uint32_t words __attribute__((vector_size(sizeof(omc_rng_vec)), may_alias));
  const words w = (words)x;
  return (omc_rng_vec)(w << 16 | w >> 16);
}

/* The lane that lane l of a half is, see omc_rng_merge: those of y come after those of x. */
OMC_INLINE int omc_rng_lane(const int l, const int run, const int half) {
  const int i = l + half * OMC_RNG_LANES, at = i / (2 * run) * run + i % run;
  return i / run % 2 ? at + OMC_RNG_LANES : at;
}

/* Lanes of x and y by turns of `run`, those of x first: half 0 or 1 of what they make. */
OMC_INLINE omc_rng_vec omc_rng_merge(omc_rng_vec x, omc_rng_vec y, const int run, const int half) {
  omc_rng_vec out = {0};
#if defined(__clang__)
  for (int l = 0; l < OMC_RNG_LANES; l++) {
    const int from = omc_rng_lane(l, run, half);
    out[l] = from < OMC_RNG_LANES ? x[from] : y[from - OMC_RNG_LANES];
  }
#else
  for (int l = 0; l < OMC_RNG_LANES; l++) out[l] = (uint64_t)omc_rng_lane(l, run, half);
  out = __builtin_shuffle(x, y, out);
#endif
  return out;
}

/* Stores what OMC_RNG_LANES counters, whose rounds left these, give to `each` elements: the four
 * words or, to eight, the four turned after them. */
OMC_INLINE void omc_rng_store(const omc_rng_vec c[4], const int each, uint32_t *out) {
  const omc_rng_vec low = omc_rng_set(0xffffffffu);
  const omc_rng_vec front = (c[0] & low) | (c[1] << 32), back = (c[2] & low) | (c[3] << 32);
  for (int half = 0; half < 2; half++) {
    const omc_rng_vec x = omc_rng_merge(front, back, 1, half), turned = omc_rng_turn(x);
    for (int part = 0; part < each / 4; part++, out += 2 * OMC_RNG_LANES) {
      const omc_rng_vec y = each == 4 ? x : omc_rng_merge(x, turned, 2, part);
      memcpy(out, &y, sizeof y);
    }
  }
}

/* What `blocks` times OMC_RNG_LANES counters from `counter` on give: one or two, a constant. A
 * round waits for the one before it, but two blocks do not for each other. */
OMC_INLINE void omc_rng_blocks(const omc_rng_keys *keys, uint32_t subsequence, uint64_t counter,
                               const int blocks, const int each, uint32_t *out) {
  const omc_rng_vec m0 = omc_rng_set(0xD2511F53u), m1 = omc_rng_set(0xCD9E8D57u);
  omc_rng_vec c[2][4];
  for (int b = 0; b < blocks; b++) {
    c[b][0] = omc_rng_set(counter + (uint64_t)(b * OMC_RNG_LANES)) + keys->lane;
    c[b][1] = c[b][0] >> 32;
    c[b][2] = omc_rng_set(subsequence);
    c[b][3] = omc_rng_set(0);
  }
  for (int r = 0; r < 10; r++)
    for (int b = 0; b < blocks; b++) {
      const omc_rng_vec p0 = omc_rng_mul(m0, c[b][0]), p1 = omc_rng_mul(m1, c[b][2]);
      c[b][0] = (p1 >> 32) ^ c[b][1] ^ keys->k0[r];
      c[b][1] = p1;
      c[b][2] = (p0 >> 32) ^ c[b][3] ^ keys->k1[r];
      c[b][3] = p0;
    }
  for (int b = 0; b < blocks; b++) omc_rng_store(c[b], each, out + b * each * OMC_RNG_LANES);
}

/* Those of elements first .. first + n - 1 of a subsequence, `each` to a counter: a constant. */
OMC_INLINE void omc_rng_fill(uint64_t seed, uint32_t subsequence, uint64_t first, int64_t n,
                             const int each, uint32_t *out) {
  enum { MOST = 8 * OMC_RNG_LANES };
  const int64_t block = each * OMC_RNG_LANES;
  omc_rng_keys keys;
  for (uint32_t r = 0; r < 10; r++) {
    keys.k0[r] = omc_rng_set((uint32_t)seed + r * 0x9E3779B9u);
    keys.k1[r] = omc_rng_set((uint32_t)(seed >> 32) + r * 0xBB67AE85u);
  }
  for (int l = 0; l < OMC_RNG_LANES; l++) keys.lane[l] = (uint64_t)l;
  int64_t done = 0;
  while (done < n) {
    const uint64_t at = first + (uint64_t)done, counter = at / (uint64_t)each;
    const int64_t skip = (int64_t)(at % (uint64_t)each), take = omc_min(n - done, block - skip);
    if (skip == 0 && n - done >= 2 * block) {
      omc_rng_blocks(&keys, subsequence, counter, 2, each, out + done);
      done += 2 * block;
      continue;
    }
    if (take == block) {
      omc_rng_blocks(&keys, subsequence, counter, 1, each, out + done);
    } else {
      uint32_t some[MOST];
      omc_rng_blocks(&keys, subsequence, counter, 1, each, some);
      memcpy(out + done, some + skip, (size_t)take * sizeof *out);
    }
    done += take;
  }
}

/* Words first .. first + n - 1 of a subsequence, four to a counter. */
OMC_INLINE void omc_philox_words(uint64_t seed, uint32_t subsequence, uint64_t first, int64_t n,
                                 uint32_t *out) {
  omc_rng_fill(seed, subsequence, first, n, 4, out);
}

/* What elements first .. first + n - 1 of a subsequence draw, see ops/random.h. */
OMC_INLINE void omc_philox_draws(uint64_t seed, uint32_t subsequence, uint64_t first, int64_t n,
                                 uint32_t *out) {
  omc_rng_fill(seed, subsequence, first, n, 8, out);
}

#endif

#endif
