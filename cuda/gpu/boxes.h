/* Copies of boxes (base/box.h) and fills, by size of element. Read by the host as C11. */
#ifndef OMC_GPU_BOXES_H
#define OMC_GPU_BOXES_H

#include "cuda/gpu/divide.h"
#include "cuda/gpu/parts.h"

enum {
  OMC_BOXES_THREADS = 256,
  OMC_BOX_AXES = 16,
  OMC_COPIES = 52,    /* of a launch, in the 4096 bytes that a kernel is given */
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

/* Copies of two axes at most, the units of all of them being of one size. */
typedef struct omc_gpu_plane {
  char *dst;
  const char *src;
  int64_t n; /* units */
  omc_gpu_divisor cols;
  int64_t col_src, col_dst, row_src, row_dst; /* strides in bytes */
} omc_gpu_plane;

typedef struct omc_gpu_copies {
  uint32_t n;
  uint32_t first[OMC_COPIES]; /* block of each plane */
  omc_gpu_plane planes[OMC_COPIES];
} omc_gpu_copies;

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
#include "cuda/gpu/pack.h"

/* Moves both sides to the place of `index` along the first `rank` axes. */
OMC_INLINE void omc_place(const omc_gpu_copy &p, int rank, int64_t index, int64_t *src,
                          int64_t *dst) {
  for (int i = rank - 1; i >= 0; i--) {
    const int64_t at = i > 0 ? omc_remainder(&index, p.axes[i].size) : index;
    *src += at * p.axes[i].src;
    *dst += at * p.axes[i].dst;
  }
}

OMC_INLINE void omc_place(const omc_gpu_copy &p, int64_t index, int64_t *src, int64_t *dst) {
  omc_place(p, p.rank, index, src, dst);
}

OMC_INLINE void omc_place(const omc_gpu_plane &p, int64_t index, int64_t *src, int64_t *dst) {
  const int64_t col = omc_remainder(&index, p.cols);
  *src = col * p.col_src + index * p.row_src;
  *dst = col * p.col_dst + index * p.row_dst;
}

/* What a block moves of a box or a plane. */
template <typename T, typename Copy>
OMC_INLINE void omc_copy(const Copy &p, int64_t block) {
  constexpr int n = OMC_UNITS_OF_THREAD(sizeof(T));
  const int64_t first = block * (OMC_BOXES_THREADS * n) + threadIdx.x;
  T units[n];
  int64_t dst[n];
#pragma unroll
  for (int k = 0; k < n; k++) {
    const int64_t index = first + k * OMC_BOXES_THREADS;
    if (index >= p.n) continue;
    int64_t src = 0;
    dst[k] = 0;
    omc_place(p, index, &src, &dst[k]);
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

template <typename T>
OMC_INLINE void omc_copy_one(const omc_gpu_copies &p) {
  int64_t block;
  const uint32_t i = omc_entry_of_block(p.first, p.n, &block);
  omc_copy<T>(p.planes[i], block);
}

#define OMC_COPY(bytes, T)                                          \
  OMC_GLOBAL(copy_##bytes, OMC_BOXES_THREADS, omc_gpu_copy, copy) { \
    omc_copy<T>(copy, (int64_t)blockIdx.x);                         \
  }                                                                 \
  OMC_GLOBAL(copies_##bytes, OMC_BOXES_THREADS, omc_gpu_copies, copies) { omc_copy_one<T>(copies); }
#define OMC_TRANSPOSE(bytes, T) \
  OMC_GLOBAL(transpose_##bytes, OMC_BOXES_THREADS, omc_gpu_copy, copy) { omc_transpose<T>(copy); }
OMC_COPY(1, uint8_t)
OMC_COPY(2, uint16_t)
OMC_COPY(4, uint32_t)
OMC_COPY(8, uint64_t)
OMC_COPY(16, omc_bytes16)
OMC_TRANSPOSE(1, uint8_t)
OMC_TRANSPOSE(2, uint16_t)
OMC_TRANSPOSE(4, uint32_t)
OMC_TRANSPOSE(8, uint64_t)

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
