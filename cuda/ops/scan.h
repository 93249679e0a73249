/* Running sums and products, products of all others, and where the largest or the least is, along n
 * of a tensor [outer, n, inner]. A line is a block's where it is a long row, else a thread's. Read
 * by the host as C11. */
#ifndef OMC_CUDA_OPS_SCAN_H
#define OMC_CUDA_OPS_SCAN_H

#include "cuda/gpu/divide.h"

enum { OMC_SCAN_THREADS = 256, OMC_SCAN_UNITS = 4 /* neighbours that a thread sums at a time */ };

typedef struct omc_scan_along {
  const void *x;             /* dy, where these are of a gradient: */
  const void *of, *products; /* what was multiplied, and its running products */
  void *y, *scratch;         /* OtherProducts: what is computed in, as many as x has */
  int64_t lines, n;
  omc_gpu_divisor inner;
  int32_t reverse, exclusive, least; /* flags */
} omc_scan_along;

#ifdef OMC_GPU
#include "cuda/gpu/lane.h"
#include "cuda/gpu/prefix.h"

typedef OMC_STORAGE storage_t;

#if OMC_IS_FLOAT
typedef double wide; /* running sums, as PyTorch's */
#else
typedef int64_t wide;
#endif

/* Where a line starts. */
OMC_INLINE int64_t omc_line_at(const omc_scan_along &p, int64_t line) {
  const int64_t column = omc_remainder(&line, p.inner);
  return line * p.n * p.inner.by + column;
}

OMC_INLINE wide omc_wide(const omc_scan_along &p, int64_t at) {
  return (wide)number<acc_t>(((const storage_t *)p.x)[at]);
}

OMC_INLINE void omc_put(const omc_scan_along &p, int64_t at, wide x) {
  ((storage_t *)p.y)[at] = element<storage_t>((acc_t)x);
}

OMC_GLOBAL(cumsum_columns, OMC_SCAN_THREADS, omc_scan_along, p) {
  const int64_t line = (int64_t)blockIdx.x * OMC_SCAN_THREADS + threadIdx.x;
  if (line >= p.lines) return;
  const int64_t step = p.reverse ? -p.inner.by : p.inner.by;
  int64_t at = omc_line_at(p, line) + (p.reverse ? (p.n - 1) * p.inner.by : 0);
  wide sum = 0;
  for (int64_t i = 0; i < p.n; i++, at += step) {
    const wide before = sum;
    sum += omc_wide(p, at);
    omc_put(p, at, p.exclusive ? before : sum);
  }
}

OMC_GLOBAL(cumprod, OMC_SCAN_THREADS, omc_scan_along, p) {
  const int64_t line = (int64_t)blockIdx.x * OMC_SCAN_THREADS + threadIdx.x;
  if (line >= p.lines) return;
  int64_t at = omc_line_at(p, line);
  wide product = 1;
  for (int64_t i = 0; i < p.n; i++, at += p.inner.by) {
    product *= omc_wide(p, at);
    omc_put(p, at, product);
  }
}

OMC_GLOBAL(cumsum_rows, OMC_SCAN_THREADS, omc_scan_along, p) {
  const int64_t first = (int64_t)blockIdx.x * p.n;
  wide carried = 0;
  for (int64_t from = 0; from < p.n; from += OMC_SCAN_THREADS * OMC_SCAN_UNITS) {
    const int64_t begin = from + (int64_t)threadIdx.x * OMC_SCAN_UNITS;
    wide x[OMC_SCAN_UNITS], sum = 0, all;
    for (int k = 0; k < OMC_SCAN_UNITS; k++) {
      const int64_t i = begin + k;
      x[k] = i < p.n ? omc_wide(p, first + (p.reverse ? p.n - 1 - i : i)) : 0;
      sum += x[k];
    }
    wide upto = carried + omc_scan<OMC_SCAN_THREADS>(sum, &all);
    for (int k = 0; k < OMC_SCAN_UNITS; k++) {
      const int64_t i = begin + k;
      const wide before = upto;
      upto += x[k];
      if (i < p.n) omc_put(p, first + (p.reverse ? p.n - 1 - i : i), p.exclusive ? before : upto);
    }
    carried += all;
  }
}

#if OMC_IS_FLOAT
/* As PyTorch has it: before the first 0 the sum of all dy y from there on, divided by x; at the
 * first 0 that of the products of all others up to the next 0; behind it 0. Lines of one element
 * have the slope 1 whatever that is. */
OMC_GLOBAL(cumprod_slopes, OMC_SCAN_THREADS, omc_scan_along, p) {
  const int64_t line = (int64_t)blockIdx.x * OMC_SCAN_THREADS + threadIdx.x;
  if (line >= p.lines) return;
  const int64_t first = omc_line_at(p, line), step = p.inner.by, end = first + p.n * step;
  const auto of = [&](int64_t at) { return number<acc_t>(((const storage_t *)p.of)[at]); };
  const auto upto = [&](int64_t at) { return number<acc_t>(((const storage_t *)p.products)[at]); };
  if (p.n == 1) {
    omc_put(p, first, omc_wide(p, first));
    return;
  }
  int64_t zero = first;
  while (zero < end && of(zero) != 0) zero += step;
  wide sum = 0;
  for (int64_t at = zero - step; at >= first; at -= step) {
    sum += (wide)(upto(at) * (acc_t)omc_wide(p, at));
    omc_put(p, at, (wide)((acc_t)sum / of(at)));
  }
  if (zero == end) return;
  wide product = 1, total = omc_wide(p, zero);
  for (int64_t at = zero + step; at < end && of(at) != 0; at += step) {
    product *= (wide)of(at);
    total += (wide)((acc_t)product * (acc_t)omc_wide(p, at));
  }
  for (int64_t at = zero + step; at < end; at += step) omc_put(p, at, 0);
  omc_put(p, zero, (wide)((acc_t)total * (zero > first ? upto(zero - step) : (acc_t)1)));
}

/* What is before an element times what is behind it. */
OMC_GLOBAL(other_products, OMC_SCAN_THREADS, omc_scan_along, p) {
  const int64_t line = (int64_t)blockIdx.x * OMC_SCAN_THREADS + threadIdx.x;
  if (line >= p.lines) return;
  const int64_t first = omc_line_at(p, line), last = first + (p.n - 1) * p.inner.by;
  acc_t *const products = (acc_t *)p.scratch;
  wide before = 1, behind = 1;
  for (int64_t at = first; at <= last; at += p.inner.by) {
    products[at] = (acc_t)before;
    before *= omc_wide(p, at);
  }
  for (int64_t at = last; at >= first; at -= p.inner.by) {
    omc_put(p, at, products[at] * (acc_t)behind);
    behind *= omc_wide(p, at);
  }
}
#endif

/* The first of the largest or of the least; NaN is beyond all. */
struct omc_extreme {
  acc_t x;
  int64_t at;
  OMC_METHOD void meet(const omc_extreme &other, bool least) {
    const bool is_nan = x != x, other_is_nan = other.x != other.x;
    const bool equal = x == other.x || (is_nan && other_is_nan);
    const bool beyond = other_is_nan ? !is_nan
                        : least      ? other.x < x
                                     : other.x > x; /* no comparison is with NaN */
    if (equal ? other.at < at : beyond) *this = other;
  }
};

OMC_INLINE omc_extreme omc_extreme_at(const omc_scan_along &p, int64_t first, int64_t i) {
  return omc_extreme{number<acc_t>(((const storage_t *)p.x)[first + i * p.inner.by]), i};
}

OMC_GLOBAL(arg_columns, OMC_SCAN_THREADS, omc_scan_along, p) {
  const int64_t line = (int64_t)blockIdx.x * OMC_SCAN_THREADS + threadIdx.x;
  if (line >= p.lines) return;
  const int64_t first = omc_line_at(p, line);
  omc_extreme best = omc_extreme_at(p, first, 0);
  for (int64_t i = 1; i < p.n; i++) best.meet(omc_extreme_at(p, first, i), p.least);
  ((int64_t *)p.y)[line] = best.at;
}

OMC_GLOBAL(arg_rows, OMC_SCAN_THREADS, omc_scan_along, p) {
  __shared__ acc_t xs[OMC_SCAN_THREADS];
  __shared__ int64_t places[OMC_SCAN_THREADS];
  const int64_t first = (int64_t)blockIdx.x * p.n;
  const int t = (int)threadIdx.x;
  omc_extreme best = omc_extreme_at(p, first, t < p.n ? t : 0);
  for (int64_t i = t + OMC_SCAN_THREADS; i < p.n; i += OMC_SCAN_THREADS)
    best.meet(omc_extreme_at(p, first, i), p.least);
  for (int half = OMC_SCAN_THREADS / 2; half > 0; half /= 2) {
    xs[t] = best.x, places[t] = best.at;
    __syncthreads();
    if (t < half) best.meet(omc_extreme{xs[t + half], places[t + half]}, p.least);
    __syncthreads();
  }
  if (t == 0) ((int64_t *)p.y)[blockIdx.x] = best.at;
}

#endif

#endif
