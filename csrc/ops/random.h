/* What random ops draw on every device: see cpu/rng.h for how the bits are made. */
#ifndef OMC_OPS_RANDOM_H
#define OMC_OPS_RANDOM_H

#include <stdint.h>

/* Element e of a subsequence has word e % 4 of counter e / 4 of Philox4x32-10. It is kept with
 * probability 1 - p when its word is at least omc_drop_threshold(p). */
static inline uint32_t omc_drop_threshold(double p) {
  double t = p * 4294967296.0;
  return t <= 0 ? 0u : t >= 4294967295.0 ? 4294967295u : (uint32_t)t;
}

#endif
