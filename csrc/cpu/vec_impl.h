/* Bodies of the verbs of cpu/vec.h, which includes this file and is the one to include.
 *
 * Generic vectors say most of it. OMC_V(verb) is the machine's own instruction where the generic
 * form is slow: an intrinsic of the vector's width, defined for x86-64 only. */
#ifndef OMC_CPU_VEC_IMPL_H
#define OMC_CPU_VEC_IMPL_H

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(OMC_COMPUTE_F32)
#include "cpu/half.h"
#endif
#include "cpu/shuffle.h"

#if defined(OMC_COMPUTE_F64)
#define OMC_R(name) name
#else
#define OMC_R(name) name##f
#endif

#if defined(__x86_64__) && OMC_IS_FLOAT
#if defined(OMC_COMPUTE_F64)
#if OMC_VL == 8
#define OMC_V(verb) _mm512_##verb##_pd
#elif OMC_VL == 4
#define OMC_V(verb) _mm256_##verb##_pd
#else
#define OMC_V(verb) _mm_##verb##_pd
#endif
#else
#if OMC_VL == 16
#define OMC_V(verb) _mm512_##verb##_ps
#elif OMC_VL == 8
#define OMC_V(verb) _mm256_##verb##_ps
#else
#define OMC_V(verb) _mm_##verb##_ps
#endif
#endif
#endif

/* A function of one scalar or two lane by lane. */
#define OMC_LANES(x, fn)                                             \
  __extension__({                                                    \
    vacc_t lanes_ = (x);                                             \
    for (int l_ = 0; l_ < OMC_VL; l_++) lanes_[l_] = fn(lanes_[l_]); \
    lanes_;                                                          \
  })
#define OMC_LANES2(x, y, fn)                                                    \
  __extension__({                                                               \
    vacc_t lanes_ = (x);                                                        \
    const vacc_t with_ = (y);                                                   \
    for (int l_ = 0; l_ < OMC_VL; l_++) lanes_[l_] = fn(lanes_[l_], with_[l_]); \
    lanes_;                                                                     \
  })

/* ---- loads and stores ---- */

OMC_INLINE vacc_t vset(acc_t x) { return x - (vacc_t){0}; }

#if defined(OMC_COMPUTE_F32)
/* Bits of OMC_VL 16-bit floats, and as many of 32 bits. */
typedef uint16_t omc_half_bits __attribute__((vector_size(OMC_VL * sizeof(uint16_t)), may_alias));
typedef uint32_t omc_acc_bits __attribute__((vector_size(OMC_VL * sizeof(uint32_t)), may_alias));

/* `a` where a lane of `m` is set, else `b`. */
OMC_INLINE omc_acc_bits omc_vpick(vmask m, omc_acc_bits a, omc_acc_bits b) {
  return (a & (omc_acc_bits)m) | (b & ~(omc_acc_bits)m);
}

/* n <= OMC_VL of them; lanes past them are 0, and are not stored. */
OMC_INLINE omc_half_bits omc_vldh(const void *p, int64_t n) {
  omc_half_bits h = {0};
  if (n >= OMC_VL)
    memcpy(&h, p, sizeof h);
  else
#if defined(__AVX512BW__) && OMC_VL == 16
    h = (omc_half_bits)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1u), p);
#else
    memcpy(&h, p, (size_t)n * sizeof(uint16_t));
#endif
  return h;
}
OMC_INLINE void omc_vsth(void *p, omc_half_bits h, int64_t n) {
  if (n >= OMC_VL)
    memcpy(p, &h, sizeof h);
  else
#if defined(__AVX512BW__) && OMC_VL == 16
    _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1u), (__m256i)h);
#else
    memcpy(p, &h, (size_t)n * sizeof(uint16_t));
#endif
}

#if defined(__AVX512BW__) && OMC_VL == 16
OMC_INLINE vacc_t omc_vfrom_bf16(omc_half_bits h) {
  return (vacc_t)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
}
OMC_INLINE omc_half_bits omc_vto_bf16(vacc_t x) {
  const __m512i u = (__m512i)x, down = _mm512_add_epi32(u, _mm512_set1_epi32(0x7fff));
  const __mmask16 odd = _mm512_test_epi32_mask(u, _mm512_set1_epi32(0x10000));
  const __mmask16 nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
  const __m512i even = _mm512_mask_add_epi32(down, odd, down, _mm512_set1_epi32(1));
  const __m512i bits = _mm512_mask_or_epi32(even, nan, u, _mm512_set1_epi32(0x400000));
  const __m512i high = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0x1f001d, 0x1b0019, 0x170015,
                                        0x130011, 0xf000d, 0xb0009, 0x70005, 0x30001);
  return (omc_half_bits)_mm512_castsi512_si256(_mm512_permutexvar_epi16(high, bits));
}
#else
OMC_INLINE vacc_t omc_vfrom_bf16(omc_half_bits h) {
  return (vacc_t)(__builtin_convertvector(h, omc_acc_bits) << 16);
}
OMC_INLINE omc_half_bits omc_vto_bf16(vacc_t x) {
  const omc_acc_bits u = (omc_acc_bits)x, even = u + 0x7fffu + ((u >> 16) & 1u);
  return __builtin_convertvector(omc_vpick(x != x, u | 0x400000u, even) >> 16, omc_half_bits);
}
#endif

#if defined(__AVX512F__) && OMC_VL == 16
OMC_INLINE vacc_t omc_vfrom_f16(omc_half_bits h) { return (vacc_t)_mm512_cvtph_ps((__m256i)h); }
OMC_INLINE omc_half_bits omc_vto_f16(vacc_t x) {
  return (omc_half_bits)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
}
#elif defined(__F16C__) && OMC_VL == 8
OMC_INLINE vacc_t omc_vfrom_f16(omc_half_bits h) { return (vacc_t)_mm256_cvtph_ps((__m128i)h); }
OMC_INLINE omc_half_bits omc_vto_f16(vacc_t x) {
  return (omc_half_bits)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
}
#else
/* As omc_half_to_float and omc_float_to_half. */
OMC_INLINE vacc_t omc_vfrom_f16(omc_half_bits h) {
  const omc_acc_bits u = __builtin_convertvector(h, omc_acc_bits), m = u & 0x7fffu;
  const vacc_t least = __builtin_convertvector((vmask)m, vacc_t) * vset(0x1p-24f);
  const omc_acc_bits normal = (m << 13) + (112u << 23);
  const omc_acc_bits most = omc_vpick((vmask)(m >= 0x7c00u), normal + (112u << 23), normal);
  return (vacc_t)(omc_vpick((vmask)(m < 0x400u), (omc_acc_bits)least, most) | (u & 0x8000u) << 16);
}
OMC_INLINE omc_half_bits omc_vto_f16(vacc_t x) {
  const omc_acc_bits bits = (omc_acc_bits)x, u = bits & 0x7fffffffu;
  const vacc_t steps = (vacc_t)u * vset(0x1p24f) + vset(0x1p23f);
  const omc_acc_bits least = (omc_acc_bits)steps - (omc_acc_bits)vset(0x1p23f);
  const omc_acc_bits normal = (u + 0xfffu + (u >> 13 & 1u) - 0x38000000u) >> 13;
  const omc_acc_bits infinite =
      omc_vpick((vmask)(u > 0x7f800000u), 0x7e00u - (omc_acc_bits){0}, 0x7c00u - (omc_acc_bits){0});
  const omc_acc_bits most = omc_vpick((vmask)(u >= 0x47800000u), infinite, normal);
  return __builtin_convertvector(
      omc_vpick((vmask)(u < 0x38800000u), least, most) | (bits >> 16 & 0x8000u), omc_half_bits);
}
#endif
#endif

#if OMC_STORES_ACC
OMC_INLINE vacc_t vld(const storage_t *p) { return vldr(p); }
OMC_INLINE void vst(storage_t *p, vacc_t x) { vstr(p, x); }
OMC_INLINE acc_t ld(const storage_t *p) { return *p; }
OMC_INLINE void st(storage_t *p, acc_t x) { *p = x; }
#else
#if defined(OMC_STORAGE_IS_BF16)
#define OMC_H(verb) omc_##verb##_bf16
OMC_INLINE acc_t ld(const storage_t *p) { return omc_bfloat_to_float(p->bits); }
OMC_INLINE void st(storage_t *p, acc_t x) { p->bits = omc_float_to_bfloat(x); }
#else
#define OMC_H(verb) omc_##verb##_f16
OMC_INLINE acc_t ld(const storage_t *p) { return omc_half_to_float(p->bits); }
OMC_INLINE void st(storage_t *p, acc_t x) { p->bits = omc_float_to_half(x); }
#endif
OMC_INLINE vacc_t vld(const storage_t *p) { return OMC_H(vfrom)(omc_vldh(p, OMC_VL)); }
OMC_INLINE void vst(storage_t *p, vacc_t x) { omc_vsth(p, OMC_H(vto)(x), OMC_VL); }
#endif

#if defined(OMC_COMPUTE_F32) && defined(__AVX512F__) && OMC_VL == 16
OMC_INLINE vacc_t vldrn(const acc_t *p, int64_t n) {
  return (vacc_t)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p);
}
OMC_INLINE void vstrn(acc_t *p, vacc_t x, int64_t n) {
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), (__m512)x);
}
#elif defined(OMC_COMPUTE_F64) && defined(__AVX512F__) && OMC_VL == 8
OMC_INLINE vacc_t vldrn(const acc_t *p, int64_t n) {
  return (vacc_t)_mm512_maskz_loadu_pd((__mmask8)((1u << n) - 1u), p);
}
OMC_INLINE void vstrn(acc_t *p, vacc_t x, int64_t n) {
  _mm512_mask_storeu_pd(p, (__mmask8)((1u << n) - 1u), (__m512d)x);
}
#else
OMC_INLINE vacc_t vldrn(const acc_t *p, int64_t n) {
  vacc_t x = vset(0);
  memcpy(&x, p, (size_t)n * sizeof *p);
  return x;
}
OMC_INLINE void vstrn(acc_t *p, vacc_t x, int64_t n) { memcpy(p, &x, (size_t)n * sizeof *p); }
#endif

#if OMC_STORES_ACC
OMC_INLINE vacc_t vldn(const storage_t *p, int64_t n) { return vldrn(p, n); }
OMC_INLINE void vstn(storage_t *p, vacc_t x, int64_t n) { vstrn(p, x, n); }
#else
OMC_INLINE vacc_t vldn(const storage_t *p, int64_t n) { return OMC_H(vfrom)(omc_vldh(p, n)); }
OMC_INLINE void vstn(storage_t *p, vacc_t x, int64_t n) { omc_vsth(p, OMC_H(vto)(x), n); }
#endif

/* ---- choice ---- */

/* Compilers make mask registers of the generic form, where there are such. */
#if defined(OMC_V) && defined(__AVX2__) && !defined(__AVX512F__)
OMC_INLINE vacc_t vblend(vmask m, vacc_t a, vacc_t b) {
  return (vacc_t)OMC_V(blendv)(b, a, (vacc_t)m);
}
#else
OMC_INLINE vacc_t vblend(vmask m, vacc_t a, vacc_t b) {
  return (vacc_t)(((vmask)a & m) | ((vmask)b & ~m));
}
#endif

OMC_INLINE vacc_t vbool(vmask m) { return vblend(m, vset(1), vset(0)); }

OMC_INLINE bool vall(vmask m) {
  acc_bits_t all = -1;
  for (int l = 0; l < OMC_VL; l++) all &= m[l];
  return all != 0;
}

#if OMC_IS_FLOAT
OMC_INLINE vmask vnan(vacc_t x) { return x != x; }
#else
OMC_INLINE vmask vnan(vacc_t x) { return x ^ x; }
#endif

/* The machine's max and min give their second operand if one is NaN. */
#if defined(OMC_V)
OMC_INLINE vacc_t vmax(vacc_t a, vacc_t b) { return vblend(vnan(a), a, (vacc_t)OMC_V(max)(a, b)); }
OMC_INLINE vacc_t vmin(vacc_t a, vacc_t b) { return vblend(vnan(a), a, (vacc_t)OMC_V(min)(a, b)); }
#else
OMC_INLINE vacc_t vmax(vacc_t a, vacc_t b) { return vblend((a > b) | vnan(a), a, b); }
OMC_INLINE vacc_t vmin(vacc_t a, vacc_t b) { return vblend((a < b) | vnan(a), a, b); }
#endif

/* ---- across lanes ---- */

/* Lanes joined pairwise, those that are furthest apart first. */
#define OMC_JOIN_(w, join, x) x = join(x, OMC_SWAP(x, w));
#define OMC_ACROSS(x, join)                \
  __extension__({                          \
    vacc_t across_ = (x);                  \
    OMC_HALVINGS(OMC_JOIN_, join, across_) \
    across_[0];                            \
  })
OMC_INLINE acc_t vsum(vacc_t x) { return OMC_ACROSS(x, vadd); }
OMC_INLINE acc_t vhmax(vacc_t x) { return OMC_ACROSS(x, vmax); }
OMC_INLINE acc_t vhmin(vacc_t x) { return OMC_ACROSS(x, vmin); }

/* ---- arithmetic ---- */

#if OMC_IS_FLOAT
OMC_INLINE vacc_t vadd(vacc_t a, vacc_t b) { return a + b; }
OMC_INLINE vacc_t vsub(vacc_t a, vacc_t b) { return a - b; }
OMC_INLINE vacc_t vmul(vacc_t a, vacc_t b) { return a * b; }
OMC_INLINE vacc_t vdiv(vacc_t a, vacc_t b) { return a / b; }
OMC_INLINE vacc_t vneg(vacc_t x) { return -x; }
OMC_INLINE vacc_t vabs(vacc_t x) { return (vacc_t)((vmask)x & ~(vmask)vset(-(acc_t)0)); }
#else
typedef uint64_t omc_unsigned __attribute__((vector_size(OMC_VL * sizeof(uint64_t)), may_alias));
OMC_INLINE vacc_t vadd(vacc_t a, vacc_t b) { return (vacc_t)((omc_unsigned)a + (omc_unsigned)b); }
OMC_INLINE vacc_t vsub(vacc_t a, vacc_t b) { return (vacc_t)((omc_unsigned)a - (omc_unsigned)b); }
OMC_INLINE vacc_t vmul(vacc_t a, vacc_t b) { return (vacc_t)((omc_unsigned)a * (omc_unsigned)b); }
OMC_INLINE vacc_t vneg(vacc_t x) { return vsub(vset(0), x); }
OMC_INLINE vacc_t vabs(vacc_t x) { return vblend(x < vset(0), vneg(x), x); }
OMC_INLINE int64_t omc_divide(int64_t a, int64_t b) {
  return b == 0 ? 0 : b == -1 && a == INT64_MIN ? a : a / b;
}
OMC_INLINE vacc_t vdiv(vacc_t a, vacc_t b) { return OMC_LANES2(a, b, omc_divide); }
#endif

#if OMC_IS_FLOAT

#if defined(OMC_V) && defined(__FMA__)
OMC_INLINE vacc_t vfma(vacc_t a, vacc_t b, vacc_t c) { return (vacc_t)OMC_V(fmadd)(a, b, c); }
#elif defined(__aarch64__) && defined(OMC_COMPUTE_F64) && OMC_VL == 2
OMC_INLINE vacc_t vfma(vacc_t a, vacc_t b, vacc_t c) {
  return (vacc_t)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
}
#elif defined(__aarch64__) && OMC_VL == 4
OMC_INLINE vacc_t vfma(vacc_t a, vacc_t b, vacc_t c) {
  return (vacc_t)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
OMC_INLINE vacc_t vfma(vacc_t a, vacc_t b, vacc_t c) { return a * b + c; }
#endif

#if defined(OMC_V)
OMC_INLINE vacc_t vsqrt(vacc_t x) { return (vacc_t)OMC_V(sqrt)(x); }
#else
OMC_INLINE vacc_t vsqrt(vacc_t x) { return OMC_LANES(x, OMC_R(sqrt)); }
#endif

OMC_INLINE vmask omc_sign_bit(vacc_t x) { return (vmask)x & (vmask)vset(-(acc_t)0); }
OMC_INLINE vacc_t vsign(vacc_t x, vacc_t of) { return (vacc_t)((vmask)vabs(x) | omc_sign_bit(of)); }

/* Adding 2^(fraction bits) rounds to an integer; larger numbers are integers already. */
OMC_INLINE vacc_t vround(vacc_t x) {
  const acc_t big = sizeof(acc_t) == 4 ? (acc_t)0x1p23 : (acc_t)0x1p52;
  const vacc_t rounded = (vabs(x) + vset(big)) - vset(big);
  return vblend(vabs(x) < vset(big), vsign(rounded, x), x);
}

#if defined(OMC_V) && defined(__AVX2__)
OMC_INLINE vacc_t vfloor(vacc_t x) { return (vacc_t)OMC_V(floor)(x); }
#else
OMC_INLINE vacc_t vfloor(vacc_t x) {
  const vacc_t r = vround(x);
  return vblend(r > x, r - vset(1), r);
}
#endif

/* x held to lo .. hi; NaN passes. */
OMC_INLINE vacc_t omc_vhold(vacc_t x, acc_t lo, acc_t hi) {
#if defined(OMC_V)
  return (vacc_t)OMC_V(max)(vset(lo), (vacc_t)OMC_V(min)(vset(hi), x));
#else
  return vblend(x > vset(hi), vset(hi), vblend(x < vset(lo), vset(lo), x));
#endif
}

/* ---- functions ---- */

/* The remainder that has the sign of a. A quotient that is small has all digits before the point,
 * or is one off, and what is left is exact. */
#if defined(__FMA__)
OMC_INLINE vacc_t vfmod(vacc_t a, vacc_t b) {
  const vacc_t x = vabs(a), y = vabs(b), q = x / y;
  const vmask small = q < vset(sizeof(acc_t) == 4 ? (acc_t)0x1p22 : (acc_t)0x1p51);
  const vacc_t near = vfma(-vfloor(q), y, x);
  const vacc_t below = vblend(near < vset(0), near + y, near);
  const vacc_t rest = vblend(below >= y, below - y, below);
  const vacc_t m = vsign(vblend(x < y, x, rest), a);
  return vall(small) ? m : vblend(small, m, OMC_LANES2(a, b, OMC_R(fmod)));
}
#else
OMC_INLINE vacc_t vfmod(vacc_t a, vacc_t b) { return OMC_LANES2(a, b, OMC_R(fmod)); }
#endif

#if defined(OMC_COMPUTE_F64)

OMC_INLINE vacc_t vexp(vacc_t x) { return OMC_LANES(x, exp); }
OMC_INLINE vacc_t vexpm1(vacc_t x) { return OMC_LANES(x, expm1); }
OMC_INLINE vacc_t vlog(vacc_t x) { return OMC_LANES(x, log); }
OMC_INLINE vacc_t vlog1p(vacc_t x) { return OMC_LANES(x, log1p); }
OMC_INLINE vacc_t vtanh(vacc_t x) { return OMC_LANES(x, tanh); }
OMC_INLINE vacc_t verf(vacc_t x) { return OMC_LANES(x, erf); }
OMC_INLINE vacc_t vnormal(vacc_t x, vacc_t *density) {
  *density = vset(0.3989422804014327) * vexp(vset(-0.5) * x * x);
  return vset(0.5) * (vset(1) + verf(x * vset(0.7071067811865476)));
}
OMC_INLINE vacc_t vsin(vacc_t x) { return OMC_LANES(x, sin); }
OMC_INLINE vacc_t vcos(vacc_t x) { return OMC_LANES(x, cos); }
OMC_INLINE vacc_t vtan(vacc_t x) { return OMC_LANES(x, tan); }
OMC_INLINE vacc_t vasin(vacc_t x) { return OMC_LANES(x, asin); }
OMC_INLINE vacc_t vacos(vacc_t x) { return OMC_LANES(x, acos); }
OMC_INLINE vacc_t vatan(vacc_t x) { return OMC_LANES(x, atan); }
OMC_INLINE vacc_t vatan2(vacc_t y, vacc_t x) { return OMC_LANES2(y, x, atan2); }
OMC_INLINE vacc_t vsinh(vacc_t x) { return OMC_LANES(x, sinh); }
OMC_INLINE vacc_t vcosh(vacc_t x) { return OMC_LANES(x, cosh); }
OMC_INLINE vacc_t vasinh(vacc_t x) { return OMC_LANES(x, asinh); }
OMC_INLINE vacc_t vacosh(vacc_t x) { return OMC_LANES(x, acosh); }
OMC_INLINE vacc_t vatanh(vacc_t x) { return OMC_LANES(x, atanh); }

#else

/* c[0] + c[1] x + ... + c[n-1] x^(n-1) */
#define OMC_POLY(x, ...)                      \
  omc_poly((x), (const acc_t[]){__VA_ARGS__}, \
           (int)(sizeof((const acc_t[]){__VA_ARGS__}) / sizeof(acc_t)))
OMC_INLINE vacc_t omc_poly(vacc_t x, const acc_t *c, int n) {
  vacc_t y = vset(c[n - 1]);
  for (int i = n - 2; i >= 0; i--) y = vfma(y, x, vset(c[i]));
  return y;
}

/* x = n ln 2 + r with |r| <= ln(2)/2; returns exp(r) - 1. The part of ln 2 that n is multiplied
 * with first has few enough bits for the product to be exact without FMA. */
OMC_INLINE vacc_t omc_exp_reduce(vacc_t x, vacc_t *n) {
  const vacc_t shift = vset((acc_t)0x1.8p23);
  *n = vfma(x, vset(1.44269504f), shift) - shift;
  const vacc_t r = vfma(*n, vset(2.12194440e-4f), vfma(*n, vset(-0.693359375f), x));
  const vacc_t p = OMC_POLY(r, 4.999999404e-01f, 1.666651517e-01f, 4.166845605e-02f,
                            8.369418792e-03f, 1.381314243e-03f);
  return vfma(r * r, p, r);
}

/* x * 2^n for integers n from -200 to 200; in two factors, since 2^n may not be a number. */
OMC_INLINE vacc_t omc_vscale(vacc_t x, vacc_t n) {
#if defined(OMC_V) && defined(__AVX512F__) && OMC_VL == 16
  return (vacc_t)_mm512_scalef_ps((__m512)x, (__m512)n);
#else
  const vmask i = __builtin_convertvector(n, vmask), half = i >> 1;
  return x * (vacc_t)((half + 127) << 23) * (vacc_t)((i - half + 127) << 23);
#endif
}

OMC_INLINE vacc_t vexp(vacc_t x) {
  vacc_t n;
  const vacc_t m1 = omc_exp_reduce(omc_vhold(x, -110.0f, 89.0f), &n);
  return omc_vscale(vset(1) + m1, n);
}

OMC_INLINE vacc_t vexpm1(vacc_t x) {
  vacc_t n;
  const vacc_t m1 = omc_exp_reduce(omc_vhold(x, -110.0f, 89.0f), &n);
  const vacc_t scale = omc_vscale(vset(1), n);
  const vacc_t near = vfma(scale, m1, scale - vset(1));
  return vsign(vblend(x > vset(64), omc_vscale(vset(1) + m1, n), near), x);
}

/* x = m 2^e with m from sqrt(1/2) to sqrt(2); log x = e ln 2 + log m. */
OMC_INLINE vacc_t vlog(vacc_t x) {
  const vmask tiny = x < vset(0x1p-126f);
  const vmask bits = (vmask)vblend(tiny, x * vset(0x1p23f), x);
  const vmask e = (bits - 0x3f3504f3) >> 23;
  const vacc_t exponent = __builtin_convertvector(e, vacc_t) - vblend(tiny, vset(23), vset(0));
  const vacc_t f = (vacc_t)(bits - (e << 23)) - vset(1);
  const vacc_t p =
      OMC_POLY(f, 3.333333135e-01f, -2.500082254e-01f, 2.000122666e-01f, -1.662335694e-01f,
               1.420176178e-01f, -1.316019446e-01f, 1.276154965e-01f, -7.634429634e-02f);
  const vacc_t low = vfma(exponent, vset(-2.12194440e-4f), vfma(f, p, vset(-0.5f)) * (f * f));
  const vacc_t y = vfma(exponent, vset(0.693359375f), low + f);
  const vacc_t outside = vblend(x < vset(0), vset(NAN), vblend(x == vset(0), vset(-INFINITY), x));
  return vblend((x > vset(0)) & (x < vset(INFINITY)), y, outside);
}

/* What 1 + x rounds away is added to first order. */
OMC_INLINE vacc_t vlog1p(vacc_t x) {
  const vacc_t u = vset(1) + x, lost = (x - (u - vset(1))) / u;
  return vblend(vabs(x) < vset(0x1p-25f), x,
                vblend((u > vset(0)) & (u < vset(INFINITY)), vlog(u) + lost, vlog(u)));
}

OMC_INLINE vacc_t vtanh(vacc_t x) {
  const vacc_t s = x * x, t = vabs(x);
  const vacc_t p = OMC_POLY(s, -3.333328068e-01f, 1.333144158e-01f, -5.373971164e-02f,
                            2.063907869e-02f, -5.704978481e-03f);
  const vacc_t large = vset(1) - vset(2) / (vexp(t + t) + vset(1));
  return vsign(vblend(t < vset(0.625f), vfma(t * s, p, t), large), x);
}

/* Below 1 a polynomial; above, 1 - exp(-g) with g = -log(erfc(t)) another one. */
OMC_INLINE vacc_t verf(vacc_t x) {
  const vacc_t s = x * x, t = omc_vhold(vabs(x), 0, 4);
  const vacc_t p =
      OMC_POLY(s, 1.283791661e-01f, -3.761262596e-01f, 1.128358543e-01f, -2.685381100e-02f,
               5.188327748e-03f, -8.010192541e-04f, 7.853857824e-05f);
  const vacc_t g = OMC_POLY(t, 1.284998953e-01f, 6.357671022e-01f, 1.051976979e-01f,
                            -2.284890041e-02f, 3.202165477e-03f, -2.124349412e-04f);
  const vacc_t large = vset(1) - vexp(-vfma(t, g, t));
  return vblend(t < vset(1), vfma(x, p, x), vsign(large, x));
}

/* The tail beyond |x| is exp(-x^2/2) times a function that falls slowly: a polynomial in u. */
OMC_INLINE vacc_t vnormal(vacc_t x, vacc_t *density) {
  const vacc_t e = vexp(vset(-0.5f) * x * x), u = vset(1) / vfma(vabs(x), vset(0.25f), vset(1));
  const vacc_t p =
      OMC_POLY(u, 9.891704470e-02f, 1.111610159e-01f, 2.891002782e-02f, 2.729682624e-01f,
               -2.581298947e-01f, 3.366380036e-01f, -9.046445042e-02f);
  const vacc_t tail = e * u * p;
  *density = vset(0.398942280f) * e;
  return vblend(x > vset(0), vset(1) - tail, tail);
}

/* x = n pi/2 + r with |r| <= pi/4; gives sin(r) and cos(r), and returns n. The first two of the
 * four parts of pi/2 have so few bits that their products with n are exact. */
OMC_INLINE vmask omc_turn(vacc_t x, vacc_t *sine, vacc_t *cosine) {
  const vacc_t shift = vset((acc_t)0x1.8p23);
  const vacc_t n = vfma(x, vset(0.636619772f), shift) - shift;
  vacc_t r = vfma(n, vset(-0x1.fb4p-12f), vfma(n, vset(-0x1.92p0f), x));
  r = vfma(n, vset(0x1.ee59da0000000p-50f), vfma(n, vset(-0x1.4442d20000000p-24f), r));
  const vacc_t s = r * r;
  *sine = vfma(
      r * s, OMC_POLY(s, -1.666666716e-01f, 8.333329111e-03f, -1.983915135e-04f, 2.716604286e-06f),
      r);
  const vacc_t q = OMC_POLY(s, 4.166664183e-02f, -1.388718490e-03f, 2.441812649e-05f);
  *cosine = vfma(s * s, q, vfma(s, vset(-0.5f), vset(1)));
  return __builtin_convertvector(n, vmask);
}

/* sin(x + turn pi/2) */
OMC_INLINE vacc_t omc_sine(vacc_t x, int turn) {
  vacc_t sine, cosine;
  const vmask quadrant = omc_turn(x, &sine, &cosine) + turn;
  const vacc_t y = vblend((quadrant & 1) == 0, sine, cosine);
  return (vacc_t)((vmask)y ^ ((quadrant & 2) << 30));
}

/* Angles so large that the reduction loses bits are left to the C library, lane by lane: an
 * element's result does not depend on its neighbours. */
OMC_INLINE vacc_t vsin(vacc_t x) {
  const vmask small = vabs(x) <= vset(8192);
  const vacc_t y = vblend(x == vset(0), x, omc_sine(x, 0)); /* the reduction loses a zero's sign */
  return vall(small) ? y : vblend(small, y, OMC_LANES(x, sinf));
}
OMC_INLINE vacc_t vcos(vacc_t x) {
  const vmask small = vabs(x) <= vset(8192);
  const vacc_t y = omc_sine(x, 1);
  return vall(small) ? y : vblend(small, y, OMC_LANES(x, cosf));
}
OMC_INLINE vacc_t vtan(vacc_t x) {
  const vmask small = vabs(x) <= vset(8192);
  vacc_t sine, cosine;
  const vmask odd = (omc_turn(x, &sine, &cosine) & 1) != 0;
  const vacc_t slope = vblend(odd, -cosine, sine) / vblend(odd, sine, cosine);
  const vacc_t y = vblend(x == vset(0), x, slope);
  return vall(small) ? y : vblend(small, y, OMC_LANES(x, tanf));
}

#define OMC_HALF_PI 1.57079637f
/* From 0 to 1. */
OMC_INLINE vacc_t omc_atan(vacc_t t) {
  const vacc_t s = t * t;
  const vacc_t p = OMC_POLY(s, -3.333329909e-01f, 1.999854829e-01f, -1.426424170e-01f,
                            1.095218589e-01f, -8.403450661e-02f, 5.795759905e-02f,
                            -3.117785111e-02f, 1.091460847e-02f, -1.793622296e-03f);
  return vfma(t * s, p, t);
}
OMC_INLINE vacc_t vatan(vacc_t x) {
  const vacc_t t = vabs(x);
  const vmask steep = t > vset(1);
  const vacc_t y = omc_atan(vblend(steep, vset(1) / t, t));
  return vsign(vblend(steep, vset(OMC_HALF_PI) - y, y), x);
}
/* Of two zeros or infinities the ratio is taken to be 0 or 1. */
OMC_INLINE vacc_t vatan2(vacc_t y, vacc_t x) {
  const vacc_t rise = vabs(y), run = vabs(x);
  const vmask steep = rise > run;
  const vacc_t ratio = vblend(steep, run, rise) / vblend(steep, rise, run);
  vacc_t angle = omc_atan(vblend(rise == run, vbool(rise > vset(0)), ratio));
  angle = vblend(steep, vset(OMC_HALF_PI) - angle, angle);
  return vsign(vblend((vmask)x < 0, vset(2 * OMC_HALF_PI) - angle, angle), y);
}
/* asin(t) of t up to 1/2, whose square is s. */
OMC_INLINE vacc_t omc_asin(vacc_t t, vacc_t s) {
  return vfma(t * s,
              OMC_POLY(s, 1.666665999e-01f, 7.500504186e-02f, 4.451695474e-02f, 3.180772281e-02f,
                       1.443858660e-02f, 3.751647718e-02f),
              t);
}
/* Above 1/2 asin(t) = pi/2 - 2 asin(sqrt((1 - t) / 2)). */
OMC_INLINE vacc_t vasin(vacc_t x) {
  const vacc_t t = vabs(x), rest = (vset(1) - t) * vset(0.5f);
  const vmask near = t < vset(0.5f);
  const vacc_t y = omc_asin(vblend(near, t, vsqrt(rest)), vblend(near, t * t, rest));
  return vsign(vblend(near, y, vset(OMC_HALF_PI) - (y + y)), x);
}
OMC_INLINE vacc_t vacos(vacc_t x) {
  const vacc_t t = vabs(x), rest = (vset(1) - t) * vset(0.5f);
  const vmask near = t < vset(0.5f);
  const vacc_t y = omc_asin(vblend(near, t, vsqrt(rest)), vblend(near, t * t, rest));
  const vacc_t far = vblend(x < vset(0), vset(2 * OMC_HALF_PI) - (y + y), y + y);
  return vblend(near, vset(OMC_HALF_PI) - vsign(y, x), far);
}
#undef OMC_HALF_PI

/* exp(t) / 2, which is a number where exp(t) is none. */
OMC_INLINE vacc_t omc_half_exp(vacc_t t) {
  vacc_t n;
  const vacc_t m1 = omc_exp_reduce(omc_vhold(t, 0, 90.0f), &n);
  return omc_vscale(vset(1) + m1, n - vset(1));
}
OMC_INLINE vacc_t vsinh(vacc_t x) {
  const vacc_t t = vabs(x), s = x * x, half = omc_half_exp(t);
  const vacc_t p =
      OMC_POLY(s, 1.666666650e-01f, 8.333350058e-03f, 1.983615978e-04f, 2.816951224e-06f);
  return vblend(t < vset(1), vfma(x * s, p, x), vsign(half - vset(0.25f) / half, x));
}
OMC_INLINE vacc_t vcosh(vacc_t x) {
  const vacc_t half = omc_half_exp(vabs(x));
  return half + vset(0.25f) / half;
}
/* Of numbers that large, log(2 t). */
#define OMC_IS_LARGE(t) ((t) > vset(0x1p30f))
OMC_INLINE vacc_t omc_log_of_twice(vacc_t t) { return vlog(t) + vset(0.693147181f); }
OMC_INLINE vacc_t vasinh(vacc_t x) {
  const vacc_t t = vabs(x), s = t * t;
  const vacc_t y = vlog1p(t + s / (vset(1) + vsqrt(vset(1) + s)));
  return vsign(vblend(OMC_IS_LARGE(t), omc_log_of_twice(t), y), x);
}
OMC_INLINE vacc_t vacosh(vacc_t x) {
  const vacc_t t = x - vset(1), y = vlog1p(t + vsqrt(t * (t + vset(2))));
  return vblend(x < vset(1), vset(NAN), vblend(OMC_IS_LARGE(x), omc_log_of_twice(x), y));
}
#undef OMC_IS_LARGE
OMC_INLINE vacc_t vatanh(vacc_t x) {
  const vacc_t t = vabs(x);
  return vsign(vset(0.5f) * vlog1p((t + t) / (vset(1) - t)), x);
}

#endif

OMC_INLINE vacc_t vsigmoid(vacc_t x) { return vset(1) / (vset(1) + vexp(-x)); }

#endif

#endif
