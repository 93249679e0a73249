/* Sorting of keys, equal ones in the order they had, with what each stands for: a digit of 8 bits
 * after another, the least first. Read by the host as C11. */
#ifndef OMC_GPU_DIGITS_H
#define OMC_GPU_DIGITS_H

#include "cuda/gpu/target.h"

enum {
  OMC_SORT_BITS = 8,
  OMC_SORT_DIGITS = 1 << OMC_SORT_BITS,
  OMC_SORT_TILE = OMC_SORT_DIGITS, /* keys and threads of a block */
  OMC_SORT_SCANNERS = 1024,
  OMC_SORT_SCANNED = 8 /* neighbours that a thread of the one block that scans takes */
};

typedef struct omc_gpu_sort {
  const int64_t *keys, *values; /* not negative; values NULL: each stands for its position */
  int64_t *sorted_keys, *sorted_values;
  int64_t *counts; /* [digits, tiles] */
  int64_t n, tiles;
  int64_t shift; /* of the digit */
} omc_gpu_sort;

#ifdef OMC_GPU
#include "cuda/gpu/prefix.h"

OMC_INLINE int omc_digit(const omc_gpu_sort &p, int64_t i) {
  return (int)(p.keys[i] >> p.shift & (OMC_SORT_DIGITS - 1));
}

/* How often each tile has each digit. */
OMC_GLOBAL(sort_count, OMC_SORT_TILE, omc_gpu_sort, p) {
  __shared__ unsigned counts[OMC_SORT_DIGITS];
  const int64_t i = (int64_t)blockIdx.x * OMC_SORT_TILE + threadIdx.x;
  counts[threadIdx.x] = 0;
  __syncthreads();
  if (i < p.n) atomicAdd(&counts[omc_digit(p, i)], 1u);
  __syncthreads();
  p.counts[threadIdx.x * p.tiles + blockIdx.x] = counts[threadIdx.x];
}

/* Where they go: one block. */
OMC_GLOBAL(sort_scan, OMC_SORT_SCANNERS, omc_gpu_sort, p) {
  const int64_t n = OMC_SORT_DIGITS * p.tiles;
  int64_t carried = 0;
  for (int64_t from = 0; from < n; from += OMC_SORT_SCANNERS * OMC_SORT_SCANNED) {
    const int64_t first = from + (int64_t)threadIdx.x * OMC_SORT_SCANNED;
    int64_t sum = 0, all;
    for (int64_t i = first; i < first + OMC_SORT_SCANNED && i < n; i++) sum += p.counts[i];
    int64_t at = carried + omc_scan<OMC_SORT_SCANNERS>(sum, &all);
    for (int64_t i = first; i < first + OMC_SORT_SCANNED && i < n; i++) {
      const int64_t count = p.counts[i];
      p.counts[i] = at;
      at += count;
    }
    carried += all;
  }
}

OMC_GLOBAL(sort_place, OMC_SORT_TILE, omc_gpu_sort, p) {
  __shared__ int digits[OMC_SORT_TILE];
  const int64_t i = (int64_t)blockIdx.x * OMC_SORT_TILE + threadIdx.x;
  const int digit = i < p.n ? omc_digit(p, i) : -1;
  digits[threadIdx.x] = digit;
  __syncthreads();
  if (i >= p.n) return;
  int64_t at = p.counts[digit * p.tiles + blockIdx.x];
  for (int j = 0; j < (int)threadIdx.x; j++) at += digits[j] == digit;
  p.sorted_keys[at] = p.keys[i];
  p.sorted_values[at] = p.values ? p.values[i] : i;
}

#endif

#endif
