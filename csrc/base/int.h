/* Arithmetic on counts. */
#ifndef OMC_BASE_INT_H
#define OMC_BASE_INT_H

#include <stdint.h>

static inline int64_t omc_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t omc_max(int64_t a, int64_t b) { return a > b ? a : b; }

/* n / by rounded up; n is not negative, by positive. */
static inline int64_t omc_ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

/* The number of low .. high nearest to x. */
static inline int64_t omc_clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

#endif
