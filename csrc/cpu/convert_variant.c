#include "cpu/convert.h"
#include "cpu/half.h"

#if OMC_STORES_ACC

typedef struct {
  uint16_t bits;
} f16;
typedef struct {
  uint16_t bits;
} bf16;
typedef struct {
  uint8_t is;
} boolean;

/* What does not fit, NaN too, is the least integer, as of x86-64's own instructions; narrow types
 * take the low bits of what the instruction that PyTorch's conversion to them compiles to gives. */
#if OMC_IS_FLOAT
static inline int64_t to_int64(acc_t x) {
  return x >= (acc_t)-0x1p63 && x < (acc_t)0x1p63 ? (int64_t)x : INT64_MIN;
}
static inline int32_t to_int32(acc_t x) {
  return x > (acc_t)-2147483649.0 && x < (acc_t)0x1p31 ? (int32_t)x : INT32_MIN;
}
#else
static inline int64_t to_int64(acc_t x) { return x; }
static inline int32_t to_int32(acc_t x) { return (int32_t)x; }
#endif

/* CONVERSION(dtype, storage, e, the number of element e, x, the element of number x). */
#define CONVERSIONS                                                \
  CONVERSION(F32, float, e, (acc_t)e, x, (float)x)                 \
  CONVERSION(F64, double, e, (acc_t)e, x, (double)x)               \
  CONVERSION(F16, f16, e, (acc_t)omc_half_to_float(e.bits), x,     \
             ((f16){omc_float_to_half((float)x)}))                 \
  CONVERSION(BF16, bf16, e, (acc_t)omc_bfloat_to_float(e.bits), x, \
             ((bf16){omc_float_to_bfloat((float)x)}))              \
  CONVERSION(I64, int64_t, e, (acc_t)e, x, to_int64(x))            \
  CONVERSION(I32, int32_t, e, (acc_t)e, x, to_int32(x))            \
  CONVERSION(I16, int16_t, e, (acc_t)e, x, (int16_t)to_int32(x))   \
  CONVERSION(I8, int8_t, e, (acc_t)e, x, (int8_t)to_int32(x))      \
  CONVERSION(U8, uint8_t, e, (acc_t)e, x, (uint8_t)to_int64(x))    \
  CONVERSION(BOOL, boolean, e, (acc_t)(e.is != 0), x, ((boolean){x != 0}))

#define CONVERSION(name, type, e, number, x, element)                           \
  static void load_##name(const void *elements_, void *numbers_, int64_t n_) {  \
    const type *restrict from_ = elements_;                                     \
    acc_t *restrict to_ = numbers_;                                             \
    for (int64_t i_ = 0; i_ < n_; i_++) {                                       \
      const type e = from_[i_];                                                 \
      to_[i_] = number;                                                         \
    }                                                                           \
  }                                                                             \
  static void store_##name(const void *numbers_, void *elements_, int64_t n_) { \
    const acc_t *restrict from_ = numbers_;                                     \
    type *restrict to_ = elements_;                                             \
    for (int64_t i_ = 0; i_ < n_; i_++) {                                       \
      const acc_t x = from_[i_];                                                \
      to_[i_] = element;                                                        \
    }                                                                           \
  }
CONVERSIONS
#undef CONVERSION

#if defined(__F16C__) && !defined(OMC_COMPUTE_F64) && OMC_IS_FLOAT
/* Eight at a time: compilers convert halves one by one. */
static void load_halves(const void *elements, void *numbers, int64_t n) {
  const f16 *from = elements;
  float *to = numbers;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
  load_F16(from + i, to + i, n - i);
}

static void store_halves(const void *numbers, void *elements, int64_t n) {
  const float *from = numbers;
  f16 *to = elements;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i *)(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  store_F16(from + i, to + i, n - i);
}
#define load_F16 load_halves
#define store_F16 store_halves
#endif

static void spread(void *numbers, int64_t n) {
  acc_t *to = numbers;
  const acc_t x = to[0];
  int64_t i = 0;
  for (; i + OMC_VL <= n; i += OMC_VL) vstr(to + i, vset(x));
  for (; i < n; i++) to[i] = x;
}

extern const omc_convert OMC_PASTE3(omc_, convert, OMC_VARIANT);
const omc_convert OMC_PASTE3(omc_, convert, OMC_VARIANT) = {
    .load =
        {
#define CONVERSION(name, ...) [OMC_##name] = load_##name,
            CONVERSIONS
#undef CONVERSION
        },
    .store =
        {
#define CONVERSION(name, ...) [OMC_##name] = store_##name,
            CONVERSIONS
#undef CONVERSION
        },
    .spread = spread,
    .size = sizeof(acc_t),
    .dtype = OMC_STORAGE,
};

#endif
