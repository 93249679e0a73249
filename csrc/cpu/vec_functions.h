/* Bodies of the functions of cpu/vec.h, which is the one to include. */
#ifndef OMC_CPU_VEC_FUNCTIONS_H
#define OMC_CPU_VEC_FUNCTIONS_H

#include "cpu/vec_impl.h"

#if OMC_IS_FLOAT

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
OMC_INLINE vacc_t vexp2(vacc_t x) { return OMC_LANES(x, exp2); }
OMC_INLINE vacc_t vexpm1(vacc_t x) { return OMC_LANES(x, expm1); }
OMC_INLINE vacc_t vlog(vacc_t x) { return OMC_LANES(x, log); }
OMC_INLINE vacc_t vlog2(vacc_t x) { return OMC_LANES(x, log2); }
OMC_INLINE vacc_t vlog10(vacc_t x) { return OMC_LANES(x, log10); }
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

/* What is before the point is a scale. */
OMC_INLINE vacc_t vexp2(vacc_t x) {
  const vacc_t held = omc_vhold(x, -152, 129), n = vround(held);
  return omc_vscale(vexp((held - n) * vset(0.693147181f)), n);
}

OMC_INLINE vacc_t vexpm1(vacc_t x) {
  vacc_t n;
  const vacc_t m1 = omc_exp_reduce(omc_vhold(x, -110.0f, 89.0f), &n);
  const vacc_t scale = omc_vscale(vset(1), n);
  const vacc_t near = vfma(scale, m1, scale - vset(1));
  return vsign(vblend(x > vset(64), omc_vscale(vset(1) + m1, n), near), x);
}

/* x = m 2^e with m from sqrt(1/2) to sqrt(2): e, and log m = f + what is returned. */
OMC_INLINE vacc_t omc_log_reduce(vacc_t x, vacc_t *exponent, vacc_t *f_out) {
  const vmask tiny = x < vset(0x1p-126f);
  const vmask bits = (vmask)vblend(tiny, x * vset(0x1p23f), x);
  const vmask e = (bits - 0x3f3504f3) >> 23;
  *exponent = __builtin_convertvector(e, vacc_t) - vblend(tiny, vset(23), vset(0));
  const vacc_t f = (vacc_t)(bits - (e << 23)) - vset(1);
  const vacc_t p =
      OMC_POLY(f, 3.333333135e-01f, -2.500082254e-01f, 2.000122666e-01f, -1.662335694e-01f,
               1.420176178e-01f, -1.316019446e-01f, 1.276154965e-01f, -7.634429634e-02f);
  *f_out = f;
  return vfma(f, p, vset(-0.5f)) * (f * f);
}

/* y where there is a logarithm that is a number. */
OMC_INLINE vacc_t omc_log_of(vacc_t x, vacc_t y) {
  const vacc_t outside = vblend(x < vset(0), vset(NAN), vblend(x == vset(0), vset(-INFINITY), x));
  return vblend((x > vset(0)) & (x < vset(INFINITY)), y, outside);
}

OMC_INLINE vacc_t vlog(vacc_t x) {
  vacc_t e, f;
  const vacc_t rest = omc_log_reduce(x, &e, &f);
  const vacc_t low = vfma(e, vset(-2.12194440e-4f), rest);
  return omc_log_of(x, vfma(e, vset(0.693359375f), low + f));
}

OMC_INLINE vacc_t vlog2(vacc_t x) {
  vacc_t e, f;
  const vacc_t rest = omc_log_reduce(x, &e, &f);
  return omc_log_of(x, vfma(rest + f, vset(1.44269504f), e));
}

/* log10 of 2 in two parts, of which the first is exact in products with e. */
OMC_INLINE vacc_t vlog10(vacc_t x) {
  vacc_t e, f;
  const vacc_t rest = omc_log_reduce(x, &e, &f);
  const vacc_t low = vfma(rest + f, vset(0.434294482f), e * vset(4.60503898e-6f));
  return omc_log_of(x, vfma(e, vset(0.301025390625f), low));
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
