/* Which scores dropout keeps, drawn ahead of the products that ask for it: a bit for each, a word
 * for 32 keys of a query, and the words of 32 queries in turn, which are a tile. Tiles of the heads
 * of a launch lie head by head, in rows of tiles. Read by the host as C11. */
#ifndef OMC_CUDA_OPS_ATTENTION_KEPT_H
#define OMC_CUDA_OPS_ATTENTION_KEPT_H

#include "cuda/ops/attention_heads.h"

enum { OMC_KEPT_TILE = 32, OMC_KEPT_THREADS = 256 };

#ifdef OMC_GPU

OMC_INLINE int32_t kept_tiles(int32_t n) { return (n + OMC_KEPT_TILE - 1) / OMC_KEPT_TILE; }

/* The words of the tile that has a query and a key. */
OMC_INLINE uint32_t *kept_tile(const omc_attention &p, const place &at, int32_t query,
                               int32_t key) {
  const int64_t head = (int64_t)at.sample * p.heads + at.head - p.first;
  const int64_t row = head * kept_tiles(p.queries) + query / OMC_KEPT_TILE;
  return (uint32_t *)p.kept + (row * kept_tiles(p.keys) + key / OMC_KEPT_TILE) * OMC_KEPT_TILE;
}

/* Bits of the elements of COUNTERS counters, eight each. */
template <int COUNTERS>
OMC_INLINE uint64_t drawn(const omc_attention &p, uint64_t seed, uint64_t counter) {
  uint64_t counters[COUNTERS];
  uint32_t words[COUNTERS][4];
  uint64_t bits = 0;
#pragma unroll
  for (int i = 0; i < COUNTERS; i++) counters[i] = counter + (uint64_t)i;
  omc_philox(seed, p.subsequence, counters, words);
#pragma unroll
  for (int i = 0; i < COUNTERS * 8; i++) {
    const uint32_t word = words[i / 8][i % 4];
    bits |= (uint64_t)((i % 8 < 4 ? word : omc_turned(word)) >= p.drop_below) << i;
  }
  return bits;
}

/* A warp draws a tile, a lane a word of it: what 4 counters have, or parts of 5. */
OMC_GLOBAL_WIDE(attention_kept, OMC_KEPT_THREADS, omc_attention, p) {
  const int64_t tile = ((int64_t)blockIdx.x * OMC_KEPT_THREADS + threadIdx.x) / OMC_KEPT_TILE;
  const int32_t across = kept_tiles(p.keys), down = kept_tiles(p.queries);
  const int64_t row = tile / across;
  const int32_t head = (int32_t)(row / down);
  const int32_t query =
      (int32_t)(row % down) * OMC_KEPT_TILE + (int32_t)threadIdx.x % OMC_KEPT_TILE;
  const int32_t key = (int32_t)(tile % across) * OMC_KEPT_TILE;
  if (head >= p.tiles || (OMC_CAUSAL && key / OMC_KEPT_TILE > query / OMC_KEPT_TILE)) return;
  const place at = place_of(p, p.first + head);
  const uint64_t first = (uint64_t)(row_of(p, at, query) * p.keys + key), seed = omc_seed(p.seed);
  uint64_t bits = drawn<4>(p, seed, first / 8);
  if (first % 8) bits |= drawn<1>(p, seed, first / 8 + 4) << 32;
  kept_tile(p, at, query, key)[query % OMC_KEPT_TILE] = (uint32_t)(bits >> first % 8);
}

#endif

#endif
