/* The first k elements of each line of a tensor [outer, n, inner], a line at a time for a block, or
 * for a thread where that is short.
 * Read by the host as C11. */
#ifndef OMC_CUDA_OPS_TOPK_H
#define OMC_CUDA_OPS_TOPK_H

#include "cuda/gpu/divide.h"

enum {
  OMC_TOPK_BITS = 8, /* of a digit of a rank */
  OMC_TOPK_THREADS = 1 << OMC_TOPK_BITS,
  OMC_TOPK_BLOCKS = 1024 /* at most; they go on with other lines */
};

typedef struct omc_topk {
  const void *x;
  void *values;            /* NULL: nobody reads them */
  int64_t *places, *rooms; /* NULL: nobody reads them; for each block room for 2 k places */
  int64_t lines, n, k;
  omc_gpu_divisor inner;
  int32_t largest; /* a flag */
} omc_topk;

#ifdef OMC_GPU
#include "cuda/gpu/lane.h"
#include "cuda/gpu/prefix.h"

typedef OMC_STORAGE storage_t;

#if defined(OMC_COMPUTE_F32)
typedef uint32_t omc_rank;
#else
typedef uint64_t omc_rank;
#endif

/* Numbers in their order, zeros being equal and NaN beyond all; turned round if the largest come
 * first. */
OMC_INLINE omc_rank omc_rank_of(acc_t x, bool largest) {
  const omc_rank sign = (omc_rank)1 << (8 * sizeof(omc_rank) - 1);
#if OMC_IS_FLOAT
  const omc_rank bits = (omc_rank)omc_bits(x == 0 ? (acc_t)0 : x);
  const omc_rank rank = x != x ? ~(omc_rank)0 : bits & sign ? ~bits : bits | sign;
#else
  const omc_rank rank = (omc_rank)x ^ sign;
#endif
  return largest ? ~rank : rank;
}

struct omc_topk_line {
  const omc_topk &p;
  const storage_t *from;
  OMC_METHOD omc_rank rank(int64_t i) const {
    return omc_rank_of(number<acc_t>(from[i * p.inner.by]), p.largest);
  }
};

OMC_INLINE int omc_topk_digit(omc_rank rank, int shift) {
  return (int)(rank >> shift & (OMC_TOPK_THREADS - 1));
}

/* counts[d]: of how many of n elements digit(i) is d; those of which it is -1 are left out. */
template <typename F>
OMC_INLINE void omc_count_digits(unsigned *counts, int64_t n, F digit) {
  counts[threadIdx.x] = 0;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < n; i += OMC_TOPK_THREADS) {
    const int d = digit(i);
    if (d >= 0) atomicAdd(&counts[d], 1u);
  }
  __syncthreads();
}

/* The rank of the last of the first k, and how many of that rank are among them. */
OMC_INLINE omc_rank omc_last_rank(const omc_topk_line &line, unsigned *counts, int64_t *equal) {
  __shared__ int64_t found[2]; /* its digit, and how many are before it */
  omc_rank known = 0;          /* the digits that are known */
  int64_t left = line.p.k;
  for (int shift = 8 * (int)sizeof(omc_rank) - OMC_TOPK_BITS; shift >= 0; shift -= OMC_TOPK_BITS) {
    omc_count_digits(counts, line.p.n, [&](int64_t i) {
      const omc_rank rank = line.rank(i);
      return rank >> shift >> OMC_TOPK_BITS == known ? omc_topk_digit(rank, shift) : -1;
    });
    const int64_t count = counts[threadIdx.x];
    int64_t all;
    const int64_t before = omc_scan<OMC_TOPK_THREADS>(count, &all);
    if (before < left && left <= before + count) found[0] = threadIdx.x, found[1] = before;
    __syncthreads();
    known = known << OMC_TOPK_BITS | (omc_rank)found[0];
    left -= found[1];
  }
  *equal = left;
  return known;
}

/* The places of the first k, in their own order; who counts digits of them waits for all first. */
OMC_INLINE void omc_choose(const omc_topk_line &line, unsigned *counts, int64_t *places) {
  const omc_topk &p = line.p;
  const int64_t all_of_them = p.k == p.n;
  int64_t of_last = 0, equal = 0, chosen = 0;
  const omc_rank last = all_of_them ? 0 : omc_last_rank(line, counts, &of_last);
  for (int64_t first = 0; first < p.n; first += OMC_TOPK_THREADS) {
    const int64_t i = first + threadIdx.x;
    if (all_of_them) {
      if (i < p.n) places[i] = i;
      continue;
    }
    const omc_rank rank = i < p.n ? line.rank(i) : 0;
    const int is_last = i < p.n && rank == last;
    int equal_here, chosen_here;
    const int64_t nth = equal + omc_scan<OMC_TOPK_THREADS>(is_last, &equal_here);
    const int taken = i < p.n && (rank < last || (is_last && nth < of_last));
    const int64_t at = chosen + omc_scan<OMC_TOPK_THREADS>(taken, &chosen_here);
    if (taken) places[at] = i;
    equal += equal_here, chosen += chosen_here;
  }
}

/* Places in the order of a digit of their ranks, and of one digit in the order they had. */
OMC_INLINE void omc_place_by_digit(const omc_topk_line &line, int shift, unsigned *counts,
                                   const int64_t *from, int64_t *to) {
  __shared__ int digits[OMC_TOPK_THREADS];
  const int64_t k = line.p.k;
  const auto digit_of = [&](int64_t i) { return omc_topk_digit(line.rank(from[i]), shift); };
  omc_count_digits(counts, k, digit_of);
  unsigned all;
  const unsigned before = omc_scan<OMC_TOPK_THREADS>(counts[threadIdx.x], &all);
  counts[threadIdx.x] = before;
  for (int64_t first = 0; first < k; first += OMC_TOPK_THREADS) {
    const int64_t i = first + threadIdx.x;
    const int digit = i < k ? digit_of(i) : -1;
    digits[threadIdx.x] = digit;
    __syncthreads();
    if (digit >= 0) {
      int64_t at = counts[digit];
      for (int j = 0; j < (int)threadIdx.x; j++) at += digits[j] == digit;
      to[at] = from[i];
    }
    __syncthreads();
    if (digit >= 0) atomicAdd(&counts[digit], 1u);
    __syncthreads();
  }
}

OMC_GLOBAL(topk, OMC_TOPK_THREADS, omc_topk, p) {
  __shared__ unsigned counts[OMC_TOPK_THREADS];
  int64_t *places = p.rooms + 2 * p.k * blockIdx.x, *spare = places + p.k;
  for (int64_t l = blockIdx.x; l < p.lines; l += gridDim.x) {
    int64_t outer = l;
    const int64_t column = omc_remainder(&outer, p.inner);
    const omc_topk_line line = {p, (const storage_t *)p.x + outer * p.n * p.inner.by + column};
    omc_choose(line, counts, places);
    for (int shift = 0; shift < 8 * (int)sizeof(omc_rank); shift += OMC_TOPK_BITS) {
      omc_place_by_digit(line, shift, counts, places, spare);
      int64_t *const swapped = places;
      places = spare, spare = swapped;
    }
    for (int64_t i = threadIdx.x; i < p.k; i += OMC_TOPK_THREADS) {
      const int64_t to = (outer * p.k + i) * p.inner.by + column;
      if (p.values) ((storage_t *)p.values)[to] = line.from[places[i] * p.inner.by];
      if (p.places) p.places[to] = places[i];
    }
  }
}

/* A thread finds one element after another, each the next behind the last. */
OMC_GLOBAL(topk_short, OMC_TOPK_THREADS, omc_topk, p) {
  int64_t outer = (int64_t)blockIdx.x * OMC_TOPK_THREADS + threadIdx.x;
  if (outer >= p.lines) return;
  const int64_t column = omc_remainder(&outer, p.inner);
  const omc_topk_line line = {p, (const storage_t *)p.x + outer * p.n * p.inner.by + column};
  int64_t to = outer * p.k * p.inner.by + column, last = -1;
  omc_rank of_last = 0;
  for (int64_t k = 0; k < p.k; k++, to += p.inner.by) {
    int64_t next = -1;
    omc_rank of_next = 0;
    for (int64_t i = 0; i < p.n; i++) {
      const omc_rank rank = line.rank(i);
      const bool is_behind = last < 0 || rank > of_last || (rank == of_last && i > last);
      if (is_behind && (next < 0 || rank < of_next)) next = i, of_next = rank;
    }
    if (p.values) ((storage_t *)p.values)[to] = line.from[next * p.inner.by];
    if (p.places) p.places[to] = next;
    last = next, of_last = of_next;
  }
}

#endif

#endif
