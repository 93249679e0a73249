/* Bodies of the verbs of cpu/vec.h, which is the one to include.
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

OMC_INLINE vacc_t vratio(vacc_t a, vacc_t b) { return a / b; }
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

#endif

#endif
