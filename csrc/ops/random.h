/* What random ops draw on every device: see cpu/rng.h for how the bits are made. */
#ifndef OMC_OPS_RANDOM_H
#define OMC_OPS_RANDOM_H

#include <stdint.h>

/* Element e of a subsequence draws a word of counter e / 8 of Philox4x32-10: the first four of
 * eight elements draw the four as they are, the others the same with the halves exchanged. Each is
 * uniform to the last bit. Two that share a word are independent but where the upper half of one,
 * which is the lower half of the other, cannot decide: in 2^-16 of all cases, little beside a p far
 * above it. An element is kept with probability 1 - p: when what it draws is at least
 * omc_drop_threshold(p). */
static inline uint32_t omc_drop_threshold(double p) {
  double t = p * 4294967296.0;
  return t <= 0 ? 0u : t >= 4294967295.0 ? 4294967295u : (uint32_t)t;
}

#endif
