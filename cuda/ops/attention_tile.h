/* What kernels of attention are made of: operands in shared memory, tiles of scores of which a
 * thread has 4 x 4, and which of them are seen and kept. Read by the host as C11. */
#ifndef OMC_CUDA_OPS_ATTENTION_TILE_H
#define OMC_CUDA_OPS_ATTENTION_TILE_H

#include "cuda/gpu/philox.h"

enum { OMC_TILE = 64, OMC_TILE_PITCH = OMC_TILE + 4, OMC_ATTENTION_THREADS = 256 };

/* Elements from one to the next. */
typedef struct omc_attention_strides {
  int64_t sample, head, token;
} omc_attention_strides;

/* Elements of room for one operand of any kind, in rows or columns: what blocks hold beside those
 * that they keep, and before a tile. */
#define OMC_ATTENTION_ROOM(deepest) \
  (OMC_TILE_PITCH * (((deepest) + OMC_TILE - 1) / OMC_TILE * OMC_TILE))

typedef struct omc_attention {
  const void *q, *k, *v, *dy, *mask;
  void *y, *lse, *dq, *dk, *dv;
  void *share, *delta; /* of each row of scores, for the gradient: what its exponentials are
                        * multiplied by, and the sum of probabilities times their gradients */
  omc_attention_strides q_at, k_at, v_at, y_at;
  int64_t mask_at[4];
  int32_t queries, keys, heads, kv_heads;
  int32_t tiles, unused; /* of a head */
  double scale, keep_scale;
  omc_gpu_seed seed;
  uint32_t drop_below, subsequence;
} omc_attention;

#ifdef OMC_GPU

#include "cuda/gpu/lane.h"
#include "cuda/gpu/pack.h"

typedef OMC_STORAGE storage_t;
typedef omc_pack<acc_t, 4> four;

enum {
  SIDE = OMC_TILE / 4, /* threads along a tile's side */
  DEEPEST = OMC_DIM > OMC_VALUE_DIM ? OMC_DIM : OMC_VALUE_DIM,
  PARTS_OF_KEY = (OMC_DIM + OMC_TILE - 1) / OMC_TILE, /* fours of a thread in a row */
  PARTS_OF_VALUE = (OMC_VALUE_DIM + OMC_TILE - 1) / OMC_TILE
};

OMC_INLINE acc_t lowest() { return -(acc_t)INFINITY; }

OMC_INLINE acc_t fused(acc_t a, acc_t b, acc_t c) { return OMC_R(fma)(a, b, c); }
OMC_INLINE int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
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

/* ---- heads ---- */

/* What a block works on: a head of queries (of all samples) and the head of keys that it reads. */
struct place {
  int32_t sample, head, kv_head;
};

OMC_INLINE place place_of(const omc_attention &p, int32_t head) {
  const int32_t h = head % p.heads;
  return place{head / p.heads, h, h / (p.heads / p.kv_heads)};
}

OMC_INLINE int64_t start_of(const omc_attention_strides &at, int32_t sample, int32_t head,
                            int32_t token) {
  return sample * at.sample + head * at.head + token * at.token;
}

/* Of all rows of scores. */
OMC_INLINE int64_t row_of(const omc_attention &p, const place &at, int32_t query) {
  return ((int64_t)at.sample * p.heads + at.head) * p.queries + query;
}

/* Keys that queries before `end` see. */
OMC_INLINE int32_t seen_before(const omc_attention &p, int32_t end) {
  return OMC_CAUSAL ? least(p.keys, end) : p.keys;
}

/* A product as a score, masked: what is hidden has -inf added, and NaN shows through. */
OMC_INLINE acc_t score_of(const omc_attention &p, const place &at, int32_t query, int32_t key,
                          acc_t product) {
  if (query >= p.queries || key >= p.keys || (OMC_CAUSAL && key > query)) return lowest();
  acc_t s = (acc_t)p.scale * product;
#if OMC_MASK
  const int64_t i =
      at.sample * p.mask_at[0] + at.head * p.mask_at[1] + query * p.mask_at[2] + key * p.mask_at[3];
  if (OMC_MASK == 1) {
    if (!((const boolean *)p.mask)[i].is) s += lowest();
  } else {
    s += number<acc_t>(((const storage_t *)p.mask)[i]);
  }
#endif
  (void)at;
  return s;
}

/* Which probabilities dropout keeps; neighbours along the keys share a counter. */
struct dropper {
  uint64_t counter = ~(uint64_t)0;
  uint32_t words[4] = {};

  OMC_METHOD bool keeps(const omc_attention &p, const place &at, int32_t query, int32_t key) {
    if (!OMC_DROPS) return true;
    const uint64_t e = (uint64_t)(row_of(p, at, query) * p.keys + key);
    if (e / 4 != counter) omc_philox(p.seed, p.subsequence, counter = e / 4, words);
    const uint32_t i = (uint32_t)(e % 4);
    const uint32_t word = i < 2 ? (i ? words[1] : words[0]) : (i == 2 ? words[2] : words[3]);
    return word >= p.drop_below;
  }
  OMC_METHOD acc_t factor(const omc_attention &p, const place &at, int32_t query, int32_t key) {
    return keeps(p, at, query, key) ? (acc_t)p.keep_scale : 0;
  }
};

#endif

#endif
