/* Types and vector verbs of the variant being compiled: one body for every instruction set.
 *
 * setup.py defines, of its row in cpu/variants.def, OMC_VARIANT (for example bf16_avx2), of what
 * it computes in OMC_COMPUTE_VARIANT (f32_avx2),
 * OMC_STORAGE (OMC_BF16), OMC_STORAGE_IS_BF16, OMC_COMPUTE_F32, OMC_KIND (HALF), and OMC_VL, the
 * lanes of a vector. The compiler's generic vectors do the rest; verbs are static inline, so each
 * variant has its own. Multiply-add contraction is off: vfma is explicit. */
#ifndef OMC_CPU_VEC_H
#define OMC_CPU_VEC_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(OMC_COMPUTE_F32)
typedef float acc_t;
#define OMC_ACC OMC_F32     /* its dtype */
typedef int32_t acc_bits_t; /* integer of the same width: masks and bit patterns */
#define OMC_IS_FLOAT 1
#elif defined(OMC_COMPUTE_F64)
typedef double acc_t;
#define OMC_ACC OMC_F64
typedef int64_t acc_bits_t;
#define OMC_IS_FLOAT 1
#elif defined(OMC_COMPUTE_I64)
typedef int64_t acc_t;
#define OMC_ACC OMC_I64
typedef int64_t acc_bits_t;
#define OMC_IS_FLOAT 0
#else
#error "setup.py must define what is computed in"
#endif

/* Whether elements are stored as they are computed in. */
#if defined(OMC_STORAGE_IS_BF16) || defined(OMC_STORAGE_IS_F16)
#define OMC_STORES_ACC 0
typedef struct {
  uint16_t bits;
} storage_t;
#else
#define OMC_STORES_ACC 1
typedef acc_t storage_t;
#endif

typedef acc_t vacc_t __attribute__((vector_size(OMC_VL * sizeof(acc_t)), may_alias));
typedef acc_bits_t vmask
    __attribute__((vector_size(OMC_VL * sizeof(acc_bits_t)), may_alias)); /* 0 or -1 */

#define OMC_INLINE static inline __attribute__((always_inline, unused))
#if defined(__clang__)
#define OMC_UNROLL _Pragma("unroll")
#else
#define OMC_UNROLL _Pragma("GCC unroll 16")
#endif

OMC_INLINE acc_t ld(const storage_t *p); /* one element */
OMC_INLINE void st(storage_t *p, acc_t x);
OMC_INLINE vacc_t vld(const storage_t *p); /* OMC_VL elements, any alignment */
OMC_INLINE void vst(storage_t *p, vacc_t x);
OMC_INLINE vacc_t vset(acc_t x);                       /* x in every lane */
OMC_INLINE vacc_t vldn(const storage_t *p, int64_t n); /* first n lanes, the rest 0 */
OMC_INLINE void vstn(storage_t *p, vacc_t x, int64_t n);
OMC_INLINE vacc_t vblend(vmask m, vacc_t a, vacc_t b); /* m ? a : b, lane by lane */
OMC_INLINE vacc_t vbool(vmask m);                      /* m ? 1 : 0 */
OMC_INLINE bool vall(vmask m);                         /* true in every lane */
OMC_INLINE vmask vnan(vacc_t x);                       /* lanes that are NaN; none of an integer */
OMC_INLINE vacc_t vmax(vacc_t a, vacc_t b);            /* NaN in either gives NaN */
OMC_INLINE vacc_t vmin(vacc_t a, vacc_t b);
OMC_INLINE acc_t vsum(vacc_t x); /* lanes added pairwise: the same order everywhere */
OMC_INLINE acc_t vhmax(vacc_t x);
OMC_INLINE acc_t vhmin(vacc_t x);

/* The same of an array of acc_t. */
OMC_INLINE vacc_t vldrn(const acc_t *p, int64_t n);
OMC_INLINE void vstrn(acc_t *p, vacc_t x, int64_t n);
OMC_INLINE vacc_t vldr(const acc_t *p) {
  vacc_t x;
  memcpy(&x, p, sizeof x);
  return x;
}
OMC_INLINE void vstr(acc_t *p, vacc_t x) { memcpy(p, &x, sizeof x); }

OMC_INLINE vacc_t vadd(vacc_t a, vacc_t b); /* these six: integers wrap around */
OMC_INLINE vacc_t vsub(vacc_t a, vacc_t b);
OMC_INLINE vacc_t vmul(vacc_t a, vacc_t b);
OMC_INLINE vacc_t vdiv(vacc_t a, vacc_t b); /* integers: towards 0, and 0 where b is 0 */
OMC_INLINE vacc_t vneg(vacc_t x);
OMC_INLINE vacc_t vabs(vacc_t x);

#if OMC_IS_FLOAT
OMC_INLINE vacc_t vfma(vacc_t a, vacc_t b, vacc_t c); /* a*b + c, one rounding where there is FMA */
OMC_INLINE vacc_t vratio(vacc_t a, vacc_t b); /* a / b within 2 ulp, or denormal, for b >= 1 */
OMC_INLINE vacc_t vsqrt(vacc_t x);
OMC_INLINE vacc_t vfloor(vacc_t x);
OMC_INLINE vacc_t vround(vacc_t x);           /* halves to even */
OMC_INLINE vacc_t vsign(vacc_t x, vacc_t of); /* |x| with the sign of `of` */
/* Within 2 ulp in f32, the C library's in f64. Ends of the range and NaN as the C library's. */
OMC_INLINE vacc_t vexp(vacc_t x);
OMC_INLINE vacc_t vexp2(vacc_t x);
OMC_INLINE vacc_t vexpm1(vacc_t x);
OMC_INLINE vacc_t vlog(vacc_t x);
OMC_INLINE vacc_t vlog2(vacc_t x);
OMC_INLINE vacc_t vlog10(vacc_t x);
OMC_INLINE vacc_t vlog1p(vacc_t x);
OMC_INLINE vacc_t vtanh(vacc_t x);
OMC_INLINE vacc_t verf(vacc_t x);
OMC_INLINE vacc_t vnormal(vacc_t x,
                          vacc_t *density); /* the normal distribution's, both within 1e-7 */
OMC_INLINE vacc_t vsin(vacc_t x);
OMC_INLINE vacc_t vcos(vacc_t x);
OMC_INLINE vacc_t vtan(vacc_t x);
OMC_INLINE vacc_t vasin(vacc_t x);
OMC_INLINE vacc_t vacos(vacc_t x);
OMC_INLINE vacc_t vatan(vacc_t x);
OMC_INLINE vacc_t vatan2(vacc_t y, vacc_t x); /* the angle of the point (x, y) */
OMC_INLINE vacc_t vsinh(vacc_t x);
OMC_INLINE vacc_t vcosh(vacc_t x);
OMC_INLINE vacc_t vasinh(vacc_t x);
OMC_INLINE vacc_t vacosh(vacc_t x);
OMC_INLINE vacc_t vatanh(vacc_t x);
OMC_INLINE vacc_t vfmod(vacc_t a, vacc_t b); /* exact, of the sign of a */
OMC_INLINE vacc_t vsigmoid(vacc_t x);        /* 1 / (1 + exp(-x)) */
#endif

#include "cpu/vec_functions.h"

#endif
