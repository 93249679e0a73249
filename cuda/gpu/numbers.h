/* Elements as they are stored, and as numbers: those of csrc/base/dtype.def. */
#ifndef OMC_GPU_NUMBERS_H
#define OMC_GPU_NUMBERS_H

#include "cuda/gpu/target.h"

typedef struct bf16 {
  uint16_t bits;
} bf16;
typedef struct f16 {
  uint16_t bits;
} f16;
typedef struct boolean {
  uint8_t is;
} boolean;

OMC_INLINE float to_float(bf16 e) { return omc_bits_float((uint32_t)e.bits << 16); }

#if defined(__CUDA_ARCH__) && !defined(OMC_EMULATED)
OMC_INLINE bf16 to_bf16(float x) {
  bf16 e;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(e.bits) : "f"(x));
  return e;
}
OMC_INLINE float to_float(f16 e) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(e.bits));
  return x;
}
OMC_INLINE f16 to_f16(float x) {
  f16 e;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(e.bits) : "f"(x));
  return e;
}
#else
OMC_INLINE bf16 to_bf16(float x) {
  const uint32_t u = omc_float_bits(x);
  return bf16{(uint16_t)((x != x ? u | 0x400000u : u + 0x7fffu + (u >> 16 & 1u)) >> 16)};
}
/* The smallest halves are made by multiplying: as bit patterns they would be denormal floats. */
OMC_INLINE float to_float(f16 e) {
  const uint32_t exponent = e.bits >> 10 & 31u, rest = e.bits & 1023u;
  const uint32_t magnitude = exponent == 0    ? omc_float_bits((float)rest * 0x1p-24f)
                             : exponent == 31 ? 0x7f800000u | rest << 13
                                              : (exponent + 112u) << 23 | rest << 13;
  return omc_bits_float((uint32_t)(e.bits & 0x8000u) << 16 | magnitude);
}
OMC_INLINE f16 to_f16(float x) {
  const uint32_t u = omc_float_bits(x) & 0x7fffffffu, sign = omc_float_bits(x) >> 16 & 0x8000u;
  const float steps = omc_bits_float(u) * 0x1p24f + 0x1p23f; /* rounds to units of the least half */
  const uint32_t least = omc_float_bits(steps) - omc_float_bits(0x1p23f);
  const uint32_t normal = (u + 0xfffu + (u >> 13 & 1u) - 0x38000000u) >> 13;
  const uint32_t magnitude = u > 0x7f800000u    ? 0x7e00u
                             : u >= 0x47800000u ? 0x7c00u
                             : u < 0x38800000u  ? least
                                                : normal;
  return f16{(uint16_t)(sign | magnitude)};
}
#endif

/* 2 to the power x, nearly, and 0 for what would be denormal: for what is rounded to 16 bits. */
OMC_INLINE float omc_exp2(float x) {
#if defined(__CUDA_ARCH__) && !defined(OMC_EMULATED)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

/* What does not fit, NaN too, is the least integer, as on the CPU. */
#define OMC_TO_INTEGERS(X)                                                   \
  OMC_INLINE int64_t to_int64(X x) {                                         \
    return x >= (X) - 0x1p63 && x < (X)0x1p63 ? (int64_t)x : INT64_MIN;      \
  }                                                                          \
  OMC_INLINE int32_t to_int32(X x) {                                         \
    return x > (X) - 2147483649.0 && x < (X)0x1p31 ? (int32_t)x : INT32_MIN; \
  }
OMC_TO_INTEGERS(float)
OMC_TO_INTEGERS(double)
#undef OMC_TO_INTEGERS
OMC_INLINE int64_t to_int64(int64_t x) { return x; }
OMC_INLINE int32_t to_int32(int64_t x) { return (int32_t)x; }

/* number<X>(e): an element as an X. element<E>(x): the number x as an element E. */
template <typename X, typename E>
OMC_INLINE X number(E e) {
  return (X)e;
}
template <typename X>
OMC_INLINE X number(bf16 e) {
  return (X)to_float(e);
}
template <typename X>
OMC_INLINE X number(f16 e) {
  return (X)to_float(e);
}
template <typename X>
OMC_INLINE X number(boolean e) {
  return (X)(e.is != 0);
}

template <typename E>
struct element_of;
#define OMC_ELEMENT(E, expr) \
  template <>                \
  struct element_of<E> {     \
    template <typename X>    \
    OMC_INLINE E from(X x) { \
      return expr;           \
    }                        \
  };
OMC_ELEMENT(float, (float)x)
OMC_ELEMENT(double, (double)x)
OMC_ELEMENT(bf16, to_bf16((float)x))
OMC_ELEMENT(f16, to_f16((float)x))
OMC_ELEMENT(int64_t, to_int64(x))
OMC_ELEMENT(int32_t, to_int32(x))
OMC_ELEMENT(int16_t, (int16_t)to_int32(x))
OMC_ELEMENT(int8_t, (int8_t)to_int32(x))
OMC_ELEMENT(uint8_t, (uint8_t)to_int64(x))
OMC_ELEMENT(boolean, (boolean{(uint8_t)(x != 0)}))
#undef OMC_ELEMENT

template <typename E, typename X>
OMC_INLINE E element(X x) {
  return element_of<E>::from(x);
}

#endif
