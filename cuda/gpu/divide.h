/* Division by a number that stays the same, with a multiplication: the quotient of n < 2^31 is
 * (n * multiplier / 2^32 + n) / 2^shift. Granlund and Montgomery, Division by Invariant Integers
 * using Multiplication, 1994. Read by the host as C11. */
#ifndef OMC_GPU_DIVIDE_H
#define OMC_GPU_DIVIDE_H

#include "cuda/gpu/target.h"

/* Indices below 2^31 are divided so, others by 64 bits; tests have others begin earlier. */
#ifndef OMC_NARROW_BITS
#define OMC_NARROW_BITS 31
#endif

typedef struct omc_gpu_divisor {
  int64_t by;
  uint32_t multiplier, shift;
} omc_gpu_divisor;

#ifdef OMC_GPU

OMC_INLINE uint32_t omc_quotient(uint32_t n, uint32_t multiplier, uint32_t shift) {
  return (__umulhi(n, multiplier) + n) >> shift;
}

/* Of any n that is not negative. */
OMC_INLINE int64_t omc_quotient(int64_t n, const omc_gpu_divisor &d) {
  return n >> OMC_NARROW_BITS == 0 ? omc_quotient((uint32_t)n, d.multiplier, d.shift) : n / d.by;
}

/* The remainder, and *n becomes the quotient. */
OMC_INLINE int64_t omc_remainder(int64_t *n, const omc_gpu_divisor &d) {
  const int64_t quotient = omc_quotient(*n, d), remainder = *n - quotient * d.by;
  *n = quotient;
  return remainder;
}

#else

/* Of `by` from 1 to 2^31. */
static inline uint32_t omc_gpu_multiplier_of(int64_t by, uint32_t *shift) {
  *shift = 0;
  while (*shift < 31 && ((int64_t)1 << *shift) < by) ++*shift;
  const uint64_t d = (uint64_t)by;
  return (uint32_t)(((((uint64_t)1 << *shift) - d) << 32) / d + 1);
}

/* By 0 nobody divides. */
static inline omc_gpu_divisor omc_gpu_divisor_of(int64_t by) {
  omc_gpu_divisor d = {by < 1 ? 1 : by, 0, 31};
  if (d.by >> 31 == 0) d.multiplier = omc_gpu_multiplier_of(d.by, &d.shift);
  return d;
}

#endif

#endif
