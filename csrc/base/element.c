#include "base/element.h"

#include <math.h>

/* The two 16-bit float formats: bits of the stored fraction and of the exponent. */
#define F16_FORMAT 10, 5
#define BF16_FORMAT 7, 8

static uint16_t pack16(double x, int fraction, int exponent) {
  const int bias = (1 << (exponent - 1)) - 1;
  const unsigned sign = signbit(x) ? 0x8000u : 0u;
  const unsigned infinity = ((1u << exponent) - 1) << fraction;
  if (isnan(x)) return (uint16_t)(sign | infinity | 1u << (fraction - 1));
  int e;
  x = fabs(x);
  if (isinf(x) || frexp(x, &e) == 0) return (uint16_t)(sign | (x > 0 ? infinity : 0u));
  /* Scaled so that the last bit kept is 1; a carry out of the fraction moves the exponent up. */
  const int lowest = e - 1 < 1 - bias ? 1 - bias : e - 1;
  const double steps = nearbyint(ldexp(x, fraction - lowest));
  const double bits = steps + ldexp(lowest + bias - 1, fraction);
  return (uint16_t)(sign | (bits < infinity ? (unsigned)bits : infinity));
}

static double unpack16(uint16_t bits, int fraction, int exponent) {
  const int bias = (1 << (exponent - 1)) - 1;
  const int e = (bits & 0x7fff) >> fraction, f = bits & ((1 << fraction) - 1);
  double x;
  if (e == (1 << exponent) - 1)
    x = f ? NAN : INFINITY;
  else
    x = e ? ldexp(f + (1 << fraction), e - bias - fraction) : ldexp(f, 1 - bias - fraction);
  return bits & 0x8000 ? -x : x;
}

double omc_element_float(omc_dtype dtype, const void *data, int64_t i) {
  switch (dtype) {
    case OMC_F32:
      return ((const float *)data)[i];
    case OMC_F64:
      return ((const double *)data)[i];
    case OMC_F16:
      return unpack16(((const uint16_t *)data)[i], F16_FORMAT);
    case OMC_BF16:
      return unpack16(((const uint16_t *)data)[i], BF16_FORMAT);
    default:
      return (double)omc_element_int(dtype, data, i);
  }
}

static int64_t cut(double x) {
  if (isnan(x)) return 0;
  if (x >= 0x1p63) return INT64_MAX;
  return x < -0x1p63 ? INT64_MIN : (int64_t)x;
}

int64_t omc_element_int(omc_dtype dtype, const void *data, int64_t i) {
  switch (dtype) {
    case OMC_I64:
      return ((const int64_t *)data)[i];
    case OMC_I32:
      return ((const int32_t *)data)[i];
    case OMC_I16:
      return ((const int16_t *)data)[i];
    case OMC_I8:
      return ((const int8_t *)data)[i];
    case OMC_U8:
      return ((const uint8_t *)data)[i];
    case OMC_BOOL:
      return ((const uint8_t *)data)[i] != 0;
    default:
      return cut(omc_element_float(dtype, data, i));
  }
}

void omc_element_set_float(omc_dtype dtype, void *data, int64_t i, double x) {
  switch (dtype) {
    case OMC_F32:
      ((float *)data)[i] = (float)x;
      break;
    case OMC_F64:
      ((double *)data)[i] = x;
      break;
    case OMC_F16:
      ((uint16_t *)data)[i] = pack16(x, F16_FORMAT);
      break;
    case OMC_BF16:
      ((uint16_t *)data)[i] = pack16(x, BF16_FORMAT);
      break;
    case OMC_BOOL:
      ((uint8_t *)data)[i] = x != 0;
      break;
    default:
      omc_element_set_int(dtype, data, i, cut(x));
  }
}

void omc_element_set_int(omc_dtype dtype, void *data, int64_t i, int64_t x) {
  switch (dtype) {
    case OMC_I64:
      ((int64_t *)data)[i] = x;
      break;
    case OMC_I32:
      ((int32_t *)data)[i] = (int32_t)x;
      break;
    case OMC_I16:
      ((int16_t *)data)[i] = (int16_t)x;
      break;
    case OMC_I8:
      ((int8_t *)data)[i] = (int8_t)x;
      break;
    case OMC_U8:
      ((uint8_t *)data)[i] = (uint8_t)x;
      break;
    case OMC_BOOL:
      ((uint8_t *)data)[i] = x != 0;
      break;
    default:
      omc_element_set_float(dtype, data, i, (double)x);
  }
}
