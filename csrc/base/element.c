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

/* What is special to a dtype: NAME(dtype, storage, e, number of element e, x, element of number x),
 * numbers of floats being double, all others int64. */
#define ELEMENTS(FLOATS, INTS)                                                   \
  FLOATS(F32, float, e, (double)e, x, (float)x)                                  \
  FLOATS(F64, double, e, e, x, x)                                                \
  FLOATS(F16, uint16_t, e, unpack16(e, F16_FORMAT), x, pack16(x, F16_FORMAT))    \
  FLOATS(BF16, uint16_t, e, unpack16(e, BF16_FORMAT), x, pack16(x, BF16_FORMAT)) \
  INTS(I64, int64_t, e, e, x, x)                                                 \
  INTS(I32, int32_t, e, e, x, (int32_t)x)                                        \
  INTS(I16, int16_t, e, e, x, (int16_t)x)                                        \
  INTS(I8, int8_t, e, e, x, (int8_t)x)                                           \
  INTS(U8, uint8_t, e, e, x, (uint8_t)x)                                         \
  INTS(BOOL, uint8_t, e, e != 0, x, x != 0)

#define FUNCTIONS(name, type, e, number, x, element, wide) \
  static wide get_##name(const void *data_, int64_t i_) {  \
    const type e = ((const type *)data_)[i_];              \
    return number;                                         \
  }                                                        \
  static void set_##name(void *data_, int64_t i_, wide x) { ((type *)data_)[i_] = element; }
#define FLOAT_FUNCTIONS(...) FUNCTIONS(__VA_ARGS__, double)
#define INT_FUNCTIONS(...) FUNCTIONS(__VA_ARGS__, int64_t)
ELEMENTS(FLOAT_FUNCTIONS, INT_FUNCTIONS)

#define FLOAT_ROW(name, ...) [OMC_##name] = {.get = get_##name, .set = set_##name},
#define INT_ROW(name, ...) [OMC_##name] = {.get_int = get_##name, .set_int = set_##name},
static const struct {
  double (*get)(const void *data, int64_t i); /* floats only, as the next */
  void (*set)(void *data, int64_t i, double x);
  int64_t (*get_int)(const void *data, int64_t i); /* the others */
  void (*set_int)(void *data, int64_t i, int64_t x);
} rows[OMC_N_DTYPE] = {ELEMENTS(FLOAT_ROW, INT_ROW)};

static int64_t cut(double x) {
  if (isnan(x)) return 0;
  if (x >= 0x1p63) return INT64_MAX;
  return x < -0x1p63 ? INT64_MIN : (int64_t)x;
}

double omc_element_float(omc_dtype dtype, const void *data, int64_t i) {
  return rows[dtype].get ? rows[dtype].get(data, i) : (double)rows[dtype].get_int(data, i);
}

int64_t omc_element_int(omc_dtype dtype, const void *data, int64_t i) {
  return rows[dtype].get ? cut(rows[dtype].get(data, i)) : rows[dtype].get_int(data, i);
}

void omc_element_set_float(omc_dtype dtype, void *data, int64_t i, double x) {
  if (rows[dtype].set)
    rows[dtype].set(data, i, x);
  else
    rows[dtype].set_int(data, i, dtype == OMC_BOOL ? x != 0 : cut(x));
}

void omc_element_set_int(omc_dtype dtype, void *data, int64_t i, int64_t x) {
  if (rows[dtype].set)
    rows[dtype].set(data, i, (double)x);
  else
    rows[dtype].set_int(data, i, x);
}
