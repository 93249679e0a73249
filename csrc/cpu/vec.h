/* Types and vector verbs of the variant being compiled: one body for every instruction set.
 *
 * setup.py defines OMC_VARIANT (for example f32_avx2), one of OMC_CLASS_IS_F32, _F64, _BF16,
 * _I64, and OMC_VL, the lanes of a vector. The compiler's generic vectors do the rest; verbs are
 * static inline, so each variant has its own. Multiply-add contraction is off: vfma is explicit. */
#ifndef OMC_CPU_VEC_H
#define OMC_CPU_VEC_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(OMC_CLASS_IS_F32) || defined(OMC_CLASS_IS_BF16)
typedef float real;
typedef int32_t ireal; /* integer of the same width: masks and bit patterns */
#define OMC_IS_FLOAT 1
#elif defined(OMC_CLASS_IS_F64)
typedef double real;
typedef int64_t ireal;
#define OMC_IS_FLOAT 1
#elif defined(OMC_CLASS_IS_I64)
typedef int64_t real;
typedef int64_t ireal;
#define OMC_IS_FLOAT 0
#else
#error "setup.py must define the compute class"
#endif

#if defined(OMC_CLASS_IS_BF16)
typedef struct {
  uint16_t bits;
} elem;
#else
typedef real elem;
#endif

typedef real vreal __attribute__((vector_size(OMC_VL * sizeof(real)), may_alias));
typedef ireal vmask __attribute__((vector_size(OMC_VL * sizeof(ireal)), may_alias)); /* 0 or -1 */

#define OMC_INLINE static inline __attribute__((always_inline, unused))

OMC_INLINE real ld(const elem *p); /* one element */
OMC_INLINE void st(elem *p, real x);
OMC_INLINE vreal vld(const elem *p); /* OMC_VL elements, any alignment */
OMC_INLINE void vst(elem *p, vreal x);
OMC_INLINE vreal vset(real x);                   /* x in every lane */
OMC_INLINE vreal vldn(const elem *p, int64_t n); /* first n lanes, the rest 0 */
OMC_INLINE void vstn(elem *p, vreal x, int64_t n);
OMC_INLINE vreal vblend(vmask m, vreal a, vreal b); /* m ? a : b, lane by lane */
OMC_INLINE vreal vbool(vmask m);                    /* m ? 1 : 0 */
OMC_INLINE bool vall(vmask m);                      /* true in every lane */
OMC_INLINE vmask vnan(vreal x);                     /* lanes that are NaN; none of an integer */
OMC_INLINE vreal vmax(vreal a, vreal b);            /* NaN in either gives NaN */
OMC_INLINE vreal vmin(vreal a, vreal b);
OMC_INLINE real vsum(vreal x); /* lanes added pairwise: the same order everywhere */
OMC_INLINE real vhmax(vreal x);
OMC_INLINE real vhmin(vreal x);

OMC_INLINE vreal vldr(const real *p) {
  vreal x;
  memcpy(&x, p, sizeof x);
  return x;
}
OMC_INLINE void vstr(real *p, vreal x) { memcpy(p, &x, sizeof x); }

OMC_INLINE vreal vadd(vreal a, vreal b); /* these six: integers wrap around */
OMC_INLINE vreal vsub(vreal a, vreal b);
OMC_INLINE vreal vmul(vreal a, vreal b);
OMC_INLINE vreal vdiv(vreal a, vreal b); /* integers: towards 0, and 0 where b is 0 */
OMC_INLINE vreal vneg(vreal x);
OMC_INLINE vreal vabs(vreal x);

#if OMC_IS_FLOAT
OMC_INLINE vreal vfma(vreal a, vreal b, vreal c); /* a*b + c, one rounding where there is FMA */
OMC_INLINE vreal vsqrt(vreal x);
OMC_INLINE vreal vfloor(vreal x);
OMC_INLINE vreal vround(vreal x);          /* halves to even */
OMC_INLINE vreal vsign(vreal x, vreal of); /* |x| with the sign of `of` */
/* Within 2 ulp in f32, the C library's in f64. Ends of the range and NaN as the C library's. */
OMC_INLINE vreal vexp(vreal x);
OMC_INLINE vreal vexpm1(vreal x);
OMC_INLINE vreal vlog(vreal x);
OMC_INLINE vreal vlog1p(vreal x);
OMC_INLINE vreal vtanh(vreal x);
OMC_INLINE vreal verf(vreal x);
OMC_INLINE vreal vnormal(vreal x, vreal *density); /* the normal distribution's, both within 1e-7 */
OMC_INLINE vreal vsin(vreal x);
OMC_INLINE vreal vcos(vreal x);
OMC_INLINE vreal vsigmoid(vreal x); /* 1 / (1 + exp(-x)) */
#endif

#include "cpu/vec_impl.h"

#endif
