/* 16-bit floats: their bits as floats and back, rounded to nearest even. NaN stays NaN, and what is
 * too large becomes infinite. */
#ifndef OMC_CPU_HALF_H
#define OMC_CPU_HALF_H

#include <stdint.h>
#include <string.h>

#if defined(__F16C__)
#include <immintrin.h>
#endif

static inline uint32_t omc_float_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

static inline float omc_bits_float(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

/* The smallest halves are made by multiplying: as bit patterns they would be denormal floats. */
static inline float omc_half_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, rest = h & 1023u;
  const float least = (float)rest * 0x1p-24f;
  const uint32_t magnitude = exponent == 0    ? omc_float_bits(least)
                             : exponent == 31 ? 0x7f800000u | rest << 13
                                              : (exponent + 112) << 23 | rest << 13;
  return omc_bits_float(sign | magnitude);
#endif
}

static inline uint16_t omc_float_to_half(float x) {
#if defined(__F16C__)
  return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
  const uint32_t u = omc_float_bits(x) & 0x7fffffffu, sign = omc_float_bits(x) >> 16 & 0x8000u;
  const float steps = omc_bits_float(u) * 0x1p24f + 0x1p23f; /* rounds to units of the least half */
  const uint32_t least = omc_float_bits(steps) - omc_float_bits(0x1p23f);
  const uint32_t normal = (u + 0xfffu + (u >> 13 & 1u) - 0x38000000u) >> 13;
  const uint32_t magnitude = u > 0x7f800000u    ? 0x7e00u
                             : u >= 0x47800000u ? 0x7c00u
                             : u < 0x38800000u  ? least
                                                : normal;
  return (uint16_t)(sign | magnitude);
#endif
}

static inline float omc_bfloat_to_float(uint16_t b) { return omc_bits_float((uint32_t)b << 16); }

static inline uint16_t omc_float_to_bfloat(float x) {
  const uint32_t u = omc_float_bits(x);
  return (uint16_t)((x != x ? u | 0x400000u : u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

#endif
