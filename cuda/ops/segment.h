/* Rows that follow each other added up, and a row for each of a segment. Read by the host as C11.
 */
#ifndef OMC_CUDA_OPS_SEGMENT_H
#define OMC_CUDA_OPS_SEGMENT_H

#include "cuda/gpu/divide.h"
#include "cuda/gpu/letter.h"

enum { OMC_SEGMENT_THREADS = 256 };

typedef struct omc_segments {
  omc_sender sender;
  const int64_t *offsets;
  int64_t n_offsets, segments;
  const void *src;
  void *dst;
  int64_t rows;  /* in segments, and beyond them */
  int64_t numel; /* of dst */
  omc_gpu_divisor inner;
} omc_segments;

#ifdef OMC_GPU
#include "cuda/gpu/lane.h"

typedef OMC_STORAGE storage_t;

/* A letter if offset i is less than the one before, or not a row. */
OMC_INLINE void omc_check_offset(const omc_segments &p, int64_t i) {
  if (i >= p.n_offsets) return;
  const int64_t at = p.offsets[i], least = i > 0 ? p.offsets[i - 1] : 0;
  if (at < least || at > p.rows || (i == 0 && at != 0))
    omc_write(p.sender, OMC_LETTER_INDEX, at, p.rows);
}

/* The row that a segment begins at, or the last one ends at. */
OMC_INLINE int64_t omc_border(const omc_segments &p, int64_t segment) {
  const int64_t at = segment < p.n_offsets ? p.offsets[segment] : p.rows;
  return at < 0 ? 0 : at > p.rows ? p.rows : at;
}

OMC_GLOBAL(segment_sum, OMC_SEGMENT_THREADS, omc_segments, p) {
  const int64_t at = (int64_t)blockIdx.x * OMC_SEGMENT_THREADS + threadIdx.x;
  omc_check_offset(p, at);
  if (at >= p.numel) return;
  int64_t segment = at;
  const int64_t column = omc_remainder(&segment, p.inner);
  const int64_t begin = omc_border(p, segment), end = omc_border(p, segment + 1);
  const storage_t *x = (const storage_t *)p.src + begin * p.inner.by + column;
  acc_t sum = 0;
  for (int64_t row = begin; row < end; row++, x += p.inner.by) sum += number<acc_t>(*x);
  ((storage_t *)p.dst)[at] = element<storage_t>(sum);
}

/* Rows after the last end are in no segment. */
OMC_GLOBAL(segment_spread, OMC_SEGMENT_THREADS, omc_segments, p) {
  const int64_t at = (int64_t)blockIdx.x * OMC_SEGMENT_THREADS + threadIdx.x;
  omc_check_offset(p, at);
  if (at >= p.numel) return;
  int64_t row = at, low = -1, high = p.segments; /* the last that begins at `row` or before */
  const int64_t column = omc_remainder(&row, p.inner);
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (p.offsets[middle] <= row)
      low = middle;
    else
      high = middle;
  }
  const bool within = low >= 0 && row < omc_border(p, low + 1);
  ((storage_t *)p.dst)[at] =
      within ? ((const storage_t *)p.src)[low * p.inner.by + column] : element<storage_t>((acc_t)0);
}

#endif

#endif
