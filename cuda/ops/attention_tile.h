/* Tiles of scores by multiply-adds: operands in shared memory, of scores a thread has 4 x 4.
 * Read by the host as C11. */
#ifndef OMC_CUDA_OPS_ATTENTION_TILE_H
#define OMC_CUDA_OPS_ATTENTION_TILE_H

#include "cuda/ops/attention_heads.h"

enum { OMC_TILE = 64, OMC_TILE_PITCH = OMC_TILE + 4, OMC_ATTENTION_THREADS = 256 };

/* Elements of room for one operand of any kind, in rows or columns: what blocks hold beside those
 * that they keep, and before a tile. */
#define OMC_ATTENTION_ROOM(deepest) \
  (OMC_TILE_PITCH * (((deepest) + OMC_TILE - 1) / OMC_TILE * OMC_TILE))

#ifdef OMC_GPU

#include "cuda/gpu/pack.h"

typedef omc_pack<acc_t, 4> four;

enum {
  SIDE = OMC_TILE / 4,                                /* threads along a tile's side */
  PARTS_OF_KEY = (OMC_DIM + OMC_TILE - 1) / OMC_TILE, /* fours of a thread in a row */
  PARTS_OF_VALUE = (OMC_VALUE_DIM + OMC_TILE - 1) / OMC_TILE
};

OMC_INLINE acc_t fused(acc_t a, acc_t b, acc_t c) { return OMC_R(fma)(a, b, c); }
OMC_INLINE int own_of() { return (int)threadIdx.x / SIDE * 4; }   /* the first of its 4 rows */
OMC_INLINE int other_of() { return (int)threadIdx.x % SIDE * 4; } /* and columns */

/* ---- tiles in shared memory ---- */

OMC_INLINE acc_t element_at(const storage_t *rows, int64_t stride, int32_t n, int r, int d,
                            int depth) {
  return r < n && d < depth ? number<acc_t>(rows[r * stride + d]) : 0;
}

/* to[d][r], of the first n rows, those that are missing being 0. */
template <int DEPTH>
OMC_INLINE void load_columns(acc_t *to, const storage_t *rows, int64_t stride, int32_t n) {
#pragma unroll 2
  for (int i = (int)threadIdx.x; i < OMC_TILE * DEPTH; i += OMC_ATTENTION_THREADS)
    to[i % DEPTH * OMC_TILE_PITCH + i / DEPTH] =
        element_at(rows, stride, n, i / DEPTH, i % DEPTH, DEPTH);
}

/* to[r][d], rows of whole tiles. */
template <int DEPTH>
OMC_INLINE void load_rows(acc_t *to, const storage_t *rows, int64_t stride, int32_t n) {
  constexpr int WIDTH = (DEPTH + OMC_TILE - 1) / OMC_TILE * OMC_TILE;
#pragma unroll 2
  for (int i = (int)threadIdx.x; i < OMC_TILE * WIDTH; i += OMC_ATTENTION_THREADS)
    to[i] = element_at(rows, stride, n, i / WIDTH, i % WIDTH, DEPTH);
}

/* out[i][j] = the sum over d of own[d][i] * other[d][j]. */
template <int DEPTH>
OMC_INLINE void multiply(const acc_t *own, const acc_t *other, acc_t (&out)[4][4]) {
#pragma unroll
  for (int i = 0; i < 16; i++) out[i / 4][i % 4] = 0;
#pragma unroll 2
  for (int d = 0; d < DEPTH; d++) {
    const four a = *(const four *)(own + d * OMC_TILE_PITCH + own_of());
    const four b = *(const four *)(other + d * OMC_TILE_PITCH + other_of());
#pragma unroll
    for (int i = 0; i < 16; i++)
      out[i / 4][i % 4] = fused(a.e[i / 4], b.e[i % 4], out[i / 4][i % 4]);
  }
}

/* to[j][i] */
OMC_INLINE void store_tile(acc_t *to, const acc_t (&tile)[4][4]) {
#pragma unroll
  for (int j = 0; j < 4; j++)
    *(four *)(to + (other_of() + j) * OMC_TILE_PITCH + own_of()) =
        four{{tile[0][j], tile[1][j], tile[2][j], tile[3][j]}};
}

/* sums[i][...] += the sum over k of tile[k][i] * rows[k][...]. */
template <int PARTS>
OMC_INLINE void combine(const acc_t *tile, const acc_t *rows, acc_t (&sums)[4][PARTS][4]) {
#pragma unroll 2
  for (int k = 0; k < OMC_TILE; k++) {
    const four a = *(const four *)(tile + k * OMC_TILE_PITCH + own_of());
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      const four b = *(const four *)(rows + (k * PARTS + part) * OMC_TILE + other_of());
#pragma unroll
      for (int i = 0; i < 16; i++)
        sums[i / 4][part][i % 4] = fused(a.e[i / 4], b.e[i % 4], sums[i / 4][part][i % 4]);
    }
  }
}

template <int PARTS>
OMC_INLINE void clear(acc_t (&sums)[4][PARTS][4]) {
#pragma unroll
  for (int i = 0; i < 16 * PARTS; i++) sums[i / (4 * PARTS)][i / 4 % PARTS][i % 4] = 0;
}

/* Row i of the sums times factor[i], to the first n rows. */
template <int DEPTH, int PARTS>
OMC_INLINE void store_rows(storage_t *rows, int64_t stride, int32_t n,
                           const acc_t (&sums)[4][PARTS][4], const acc_t (&factor)[4]) {
#pragma unroll
  for (int i = 0; i < 16 * PARTS; i++) {
    const int r = own_of() + i / (4 * PARTS), part = i / 4 % PARTS;
    const int d = part * OMC_TILE + other_of() + i % 4;
    if (r < n && d < DEPTH)
      rows[r * stride + d] =
          element<storage_t>(sums[i / (4 * PARTS)][part][i % 4] * factor[i / (4 * PARTS)]);
  }
}

/* Of all threads that share rows. */
OMC_INLINE acc_t sum_of_row(acc_t x) {
#pragma unroll
  for (int by = SIDE / 2; by > 0; by /= 2) x += __shfl_xor_sync(~0u, x, by);
  return x;
}
OMC_INLINE acc_t top_of_row(acc_t x) {
#pragma unroll
  for (int by = SIDE / 2; by > 0; by /= 2) x = vmax(x, __shfl_xor_sync(~0u, x, by)).x;
  return x;
}

#endif

#endif
