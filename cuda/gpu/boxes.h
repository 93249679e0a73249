/* Copies of boxes (base/box.h) and fills, by size of element. Read by the host as C11. */
#ifndef OMC_GPU_BOXES_H
#define OMC_GPU_BOXES_H

#include "cuda/gpu/divide.h"

enum {
  OMC_BOXES_THREADS = 256,
  OMC_BOX_AXES = 16,
  OMC_FILL_BYTES = 16 /* that a thread sets */
};

/* Strides in bytes. */
typedef struct omc_gpu_box_axis {
  omc_gpu_divisor size;
  int64_t src, dst;
} omc_gpu_box_axis;

typedef struct omc_gpu_copy {
  char *dst;
  const char *src;
  int64_t n; /* units: elements, or as many bytes of a row as can be moved at once */
  int32_t rank;
  omc_gpu_divisor down, across; /* tiles of the last two axes, where it transposes */
  omc_gpu_box_axis axes[OMC_BOX_AXES];
} omc_gpu_copy;

typedef struct omc_gpu_fill {
  char *dst;
  int64_t bytes;
  const void *value; /* an element of `size` bytes; NULL: `pattern` */
  int64_t size;
  uint64_t pattern; /* elements in a row */
} omc_gpu_fill;

/* Units that a thread moves, and elements of a side of a tile, by their bytes. */
#define OMC_UNITS_OF_THREAD(size) ((size) < 8 ? 4 : 2)
#define OMC_TILE_SIDE(size) ((size) < 4 ? 64 : 32)

#ifdef OMC_GPU

struct alignas(16) omc_bytes16 {
  uint64_t of[2];
};

/* Moves both sides to the place of `index` along the first `rank` axes. */
OMC_INLINE void omc_place(const omc_gpu_copy &p, int rank, int64_t index, int64_t *src,
                          int64_t *dst) {
  for (int i = rank - 1; i >= 0; i--) {
    const int64_t at = i > 0 ? omc_remainder(&index, p.axes[i].size) : index;
    *src += at * p.axes[i].src;
    *dst += at * p.axes[i].dst;
  }
}

template <typename T>
OMC_INLINE void omc_copy(const omc_gpu_copy &p) {
  constexpr int n = OMC_UNITS_OF_THREAD(sizeof(T));
  const int64_t first = (int64_t)blockIdx.x * (OMC_BOXES_THREADS * n) + threadIdx.x;
  T units[n];
  int64_t dst[n];
#pragma unroll
  for (int k = 0; k < n; k++) {
    const int64_t index = first + k * OMC_BOXES_THREADS;
    if (index >= p.n) continue;
    int64_t src = 0;
    dst[k] = 0;
    omc_place(p, p.rank, index, &src, &dst[k]);
    units[k] = *(const T *)(p.src + src);
  }
#pragma unroll
  for (int k = 0; k < n; k++)
    if (first + k * OMC_BOXES_THREADS < p.n) *(T *)(p.dst + dst[k]) = units[k];
}

/* Along the last axis but one the source is contiguous, along the last the destination: by way of
 * shared memory each is read and written so. A block has one tile. */
template <typename T>
OMC_INLINE void omc_transpose(const omc_gpu_copy &p) {
  constexpr int side = OMC_TILE_SIDE(sizeof(T)), step = OMC_BOXES_THREADS / side;
  __shared__ T tile[side][side + 1];
  const omc_gpu_box_axis &rows = p.axes[p.rank - 2], &cols = p.axes[p.rank - 1];
  int64_t index = blockIdx.x, src = 0, dst = 0;
  const int64_t row = omc_remainder(&index, p.down) * side;
  const int64_t col = omc_remainder(&index, p.across) * side;
  omc_place(p, p.rank - 2, index, &src, &dst);
  const int x = threadIdx.x % side;
  for (int y = threadIdx.x / side; y < side; y += step)
    if (row + x < rows.size.by && col + y < cols.size.by)
      tile[y][x] = *(const T *)(p.src + src + (row + x) * rows.src + (col + y) * cols.src);
  __syncthreads();
  for (int y = threadIdx.x / side; y < side; y += step)
    if (row + y < rows.size.by && col + x < cols.size.by)
      *(T *)(p.dst + dst + (row + y) * rows.dst + (col + x) * cols.dst) = tile[x][y];
}

#define OMC_BOXES(bytes, T)                                                              \
  OMC_GLOBAL(copy_##bytes, OMC_BOXES_THREADS, omc_gpu_copy, copy) { omc_copy<T>(copy); } \
  OMC_GLOBAL(transpose_##bytes, OMC_BOXES_THREADS, omc_gpu_copy, copy) { omc_transpose<T>(copy); }
OMC_BOXES(1, uint8_t)
OMC_BOXES(2, uint16_t)
OMC_BOXES(4, uint32_t)
OMC_BOXES(8, uint64_t)
OMC_GLOBAL(copy_16, OMC_BOXES_THREADS, omc_gpu_copy, copy) { omc_copy<omc_bytes16>(copy); }

OMC_INLINE uint64_t omc_pattern_of(const void *value, int64_t size) {
  switch (size) {
    case 1:
      return *(const uint8_t *)value * (uint64_t)0x0101010101010101;
    case 2:
      return *(const uint16_t *)value * (uint64_t)0x0001000100010001;
    case 4:
      return *(const uint32_t *)value * (uint64_t)0x0000000100000001;
    default:
      return *(const uint64_t *)value;
  }
}

OMC_GLOBAL(fill, OMC_BOXES_THREADS, omc_gpu_fill, p) {
  const int64_t from = ((int64_t)blockIdx.x * OMC_BOXES_THREADS + threadIdx.x) * OMC_FILL_BYTES;
  const uint64_t pattern = p.value ? omc_pattern_of(p.value, p.size) : p.pattern;
  if (from + OMC_FILL_BYTES <= p.bytes && (uint64_t)p.dst % OMC_FILL_BYTES == 0) {
    *(omc_bytes16 *)(p.dst + from) = omc_bytes16{{pattern, pattern}};
    return;
  }
  for (int64_t k = from; k < p.bytes && k < from + OMC_FILL_BYTES; k++)
    p.dst[k] = (char)(pattern >> 8 * (k % 8));
}

#endif

#endif
