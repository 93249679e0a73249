/* Types and verbs of csrc/cpu/vec.h for one lane of a GPU, so that rows of csrc/ops are its kernels
 * too. Whoever includes this has defined OMC_COMPUTE_F32, _F64 or _I64.
 *
 * As in a vector, a comparison is a mask of all bits or none, and a mask and a number are cast to
 * one another bit by bit. Contraction to multiply-add is off, as there: vfma is explicit. */
#ifndef OMC_GPU_LANE_H
#define OMC_GPU_LANE_H

#include "cuda/gpu/numbers.h"

#if defined(OMC_COMPUTE_F32)
typedef float acc_t;
typedef int32_t acc_bits_t;
#define OMC_IS_FLOAT 1
#define OMC_R(name) name##f
OMC_INLINE acc_bits_t omc_bits(acc_t x) { return (acc_bits_t)__float_as_uint(x); }
OMC_INLINE acc_t omc_from_bits(acc_bits_t b) { return __uint_as_float((uint32_t)b); }
#elif defined(OMC_COMPUTE_F64)
typedef double acc_t;
typedef int64_t acc_bits_t;
#define OMC_IS_FLOAT 1
#define OMC_R(name) name
OMC_INLINE acc_bits_t omc_bits(acc_t x) { return (acc_bits_t)__double_as_longlong(x); }
OMC_INLINE acc_t omc_from_bits(acc_bits_t b) { return __longlong_as_double(b); }
#elif defined(OMC_COMPUTE_I64)
typedef int64_t acc_t;
typedef int64_t acc_bits_t;
#define OMC_IS_FLOAT 0
OMC_INLINE acc_bits_t omc_bits(acc_t x) { return x; }
OMC_INLINE acc_t omc_from_bits(acc_bits_t b) { return b; }
#else
#error "what is computed in must be defined"
#endif

struct vmask {
  acc_bits_t x;
};
struct vacc_t {
  acc_t x;
  vacc_t() = default;
  OMC_METHOD vacc_t(acc_t number) : x(number) {}
  OMC_METHOD explicit vacc_t(vmask m) : x(omc_from_bits(m.x)) {}
  OMC_METHOD explicit operator vmask() const { return vmask{omc_bits(x)}; }
  OMC_METHOD acc_t operator[](int) const { return x; }
};

#define OMC_BITWISE(op)                                                        \
  OMC_INLINE vmask operator op(vmask a, vmask b) { return vmask{a.x op b.x}; } \
  OMC_INLINE vmask operator op(vmask a, acc_bits_t b) { return vmask{a.x op b}; }
OMC_BITWISE(&)
OMC_BITWISE(|)
OMC_BITWISE(^)
OMC_BITWISE(+)
#undef OMC_BITWISE
OMC_INLINE vmask operator>>(vmask a, int n) { return vmask{a.x >> n}; }

#define OMC_COMPARISON(op) \
  OMC_INLINE vmask operator op(vacc_t a, vacc_t b) { return vmask{-(acc_bits_t)(a.x op b.x)}; }
OMC_COMPARISON(==)
OMC_COMPARISON(!=)
OMC_COMPARISON(<)
OMC_COMPARISON(<=)
OMC_COMPARISON(>)
OMC_COMPARISON(>=)
#undef OMC_COMPARISON

OMC_INLINE vacc_t vset(acc_t x) { return x; }
OMC_INLINE vacc_t vblend(vmask m, vacc_t a, vacc_t b) { return m.x ? a : b; }
OMC_INLINE vacc_t vbool(vmask m) { return m.x ? (acc_t)1 : (acc_t)0; }
OMC_INLINE bool vall(vmask m) { return m.x != 0; }
OMC_INLINE vmask vnan(vacc_t x) { return x != x; }
OMC_INLINE vacc_t vmax(vacc_t a, vacc_t b) { return a.x > b.x || a.x != a.x ? a : b; }
OMC_INLINE vacc_t vmin(vacc_t a, vacc_t b) { return a.x < b.x || a.x != a.x ? a : b; }

#define OMC_LANES(a, fn) vacc_t(fn((a).x))
#define OMC_LANES2(a, b, fn) vacc_t(fn((a).x, (b).x))

#if OMC_IS_FLOAT

OMC_INLINE vacc_t operator+(vacc_t a, vacc_t b) { return a.x + b.x; }
OMC_INLINE vacc_t operator-(vacc_t a, vacc_t b) { return a.x - b.x; }
OMC_INLINE vacc_t operator*(vacc_t a, vacc_t b) { return a.x * b.x; }
OMC_INLINE vacc_t operator/(vacc_t a, vacc_t b) { return a.x / b.x; }
OMC_INLINE vacc_t operator-(vacc_t x) { return -x.x; }

OMC_INLINE vacc_t vfma(vacc_t a, vacc_t b, vacc_t c) { return OMC_R(fma)(a.x, b.x, c.x); }
#if defined(OMC_COMPUTE_F32) && defined(__CUDA_ARCH__) && !defined(OMC_EMULATED)
OMC_INLINE vacc_t vratio(vacc_t a, vacc_t b) {
  acc_t ratio;
  asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(ratio) : "f"(a.x), "f"(b.x));
  return ratio;
}
#else
OMC_INLINE vacc_t vratio(vacc_t a, vacc_t b) { return a / b; }
#endif
OMC_INLINE vacc_t vsqrt(vacc_t x) { return OMC_R(sqrt)(x.x); }
OMC_INLINE vacc_t vfloor(vacc_t x) { return OMC_R(floor)(x.x); }
OMC_INLINE vacc_t vround(vacc_t x) { return OMC_R(rint)(x.x); }
OMC_INLINE vacc_t vabs(vacc_t x) { return OMC_R(fabs)(x.x); }
OMC_INLINE vacc_t vsign(vacc_t x, vacc_t of) { return OMC_R(copysign)(x.x, of.x); }
OMC_INLINE vmask omc_sign_bit(vacc_t x) { return (vmask)x & (vmask)vset(-(acc_t)0); }
OMC_INLINE vacc_t vexp(vacc_t x) { return OMC_R(exp)(x.x); }
OMC_INLINE vacc_t vexp2(vacc_t x) { return OMC_R(exp2)(x.x); }
OMC_INLINE vacc_t vexpm1(vacc_t x) { return OMC_R(expm1)(x.x); }
OMC_INLINE vacc_t vlog(vacc_t x) { return OMC_R(log)(x.x); }
OMC_INLINE vacc_t vlog2(vacc_t x) { return OMC_R(log2)(x.x); }
OMC_INLINE vacc_t vlog10(vacc_t x) { return OMC_R(log10)(x.x); }
OMC_INLINE vacc_t vlog1p(vacc_t x) { return OMC_R(log1p)(x.x); }
OMC_INLINE vacc_t vtanh(vacc_t x) { return OMC_R(tanh)(x.x); }
OMC_INLINE vacc_t verf(vacc_t x) { return OMC_R(erf)(x.x); }
OMC_INLINE vacc_t vsin(vacc_t x) { return OMC_R(sin)(x.x); }
OMC_INLINE vacc_t vcos(vacc_t x) { return OMC_R(cos)(x.x); }
OMC_INLINE vacc_t vtan(vacc_t x) { return OMC_R(tan)(x.x); }
OMC_INLINE vacc_t vasin(vacc_t x) { return OMC_R(asin)(x.x); }
OMC_INLINE vacc_t vacos(vacc_t x) { return OMC_R(acos)(x.x); }
OMC_INLINE vacc_t vatan(vacc_t x) { return OMC_R(atan)(x.x); }
OMC_INLINE vacc_t vatan2(vacc_t y, vacc_t x) { return OMC_R(atan2)(y.x, x.x); }
OMC_INLINE vacc_t vfmod(vacc_t a, vacc_t b) { return OMC_R(fmod)(a.x, b.x); }
OMC_INLINE vacc_t vsinh(vacc_t x) { return OMC_R(sinh)(x.x); }
OMC_INLINE vacc_t vcosh(vacc_t x) { return OMC_R(cosh)(x.x); }
OMC_INLINE vacc_t vasinh(vacc_t x) { return OMC_R(asinh)(x.x); }
OMC_INLINE vacc_t vacosh(vacc_t x) { return OMC_R(acosh)(x.x); }
OMC_INLINE vacc_t vatanh(vacc_t x) { return OMC_R(atanh)(x.x); }
OMC_INLINE vacc_t vsigmoid(vacc_t x) { return vset(1) / (vset(1) + vexp(-x)); }
/* erfc keeps the digits of the lower tail. */
OMC_INLINE vacc_t vnormal(vacc_t x, vacc_t *density) {
  *density = vset((acc_t)0.3989422804014327) * vexp(vset((acc_t)-0.5) * x * x);
  return vset((acc_t)0.5) * vacc_t(OMC_R(erfc)((x * vset((acc_t)-0.7071067811865476)).x));
}

#else

/* As unsigned numbers: they wrap around. */
OMC_INLINE vacc_t operator+(vacc_t a, vacc_t b) { return (acc_t)((uint64_t)a.x + (uint64_t)b.x); }
OMC_INLINE vacc_t operator-(vacc_t a, vacc_t b) { return (acc_t)((uint64_t)a.x - (uint64_t)b.x); }
OMC_INLINE vacc_t operator*(vacc_t a, vacc_t b) { return (acc_t)((uint64_t)a.x * (uint64_t)b.x); }
OMC_INLINE vacc_t operator-(vacc_t x) { return (acc_t)(0 - (uint64_t)x.x); }
OMC_INLINE int64_t omc_divide(int64_t a, int64_t b) {
  return b == 0 ? 0 : b == -1 && a == INT64_MIN ? a : a / b;
}
OMC_INLINE vacc_t operator/(vacc_t a, vacc_t b) { return omc_divide(a.x, b.x); }
OMC_INLINE vacc_t vabs(vacc_t x) { return x.x < 0 ? -x : x; }

#endif

OMC_INLINE vacc_t vadd(vacc_t a, vacc_t b) { return a + b; }
OMC_INLINE vacc_t vsub(vacc_t a, vacc_t b) { return a - b; }
OMC_INLINE vacc_t vmul(vacc_t a, vacc_t b) { return a * b; }
OMC_INLINE vacc_t vdiv(vacc_t a, vacc_t b) { return a / b; }
OMC_INLINE vacc_t vneg(vacc_t x) { return -x; }

#endif
