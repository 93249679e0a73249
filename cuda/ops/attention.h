/* Attention in tiles of OMC_TILE queries by as many keys: nothing of all scores is stored. Each
 * thread of a block works on 4 x 4 scores at a time, from operands in shared memory. Backward makes
 * the probabilities again from lse, and the dropout mask again from its counters; sums are in one
 * order, whatever the device. Read by the host as C11. */
#ifndef OMC_CUDA_OPS_ATTENTION_H
#define OMC_CUDA_OPS_ATTENTION_H

#include "cuda/ops/attention_tile.h"

#ifdef OMC_GPU

/* ---- forward: a block is a tile of queries ---- */

OMC_GLOBAL_WIDE(attention, OMC_ATTENTION_THREADS, omc_attention, p) {
  OMC_SHARED_BYTES(shared);
  acc_t *const queries = (acc_t *)shared;
  acc_t *const keys = queries + OMC_DIM * OMC_TILE_PITCH; /* and then values */
  acc_t *const tile = keys + OMC_ATTENTION_ROOM(DEEPEST);
  const int32_t first = (int32_t)blockIdx.x % p.tiles * OMC_TILE;
  const place at = place_of(p, (int32_t)blockIdx.x / p.tiles);
  const storage_t *const k = (const storage_t *)p.k + start_of(p.k_at, at.sample, at.kv_head, 0);
  const storage_t *const v = (const storage_t *)p.v + start_of(p.v_at, at.sample, at.kv_head, 0);
  load_columns<OMC_DIM>(queries,
                        (const storage_t *)p.q + start_of(p.q_at, at.sample, at.head, first),
                        p.q_at.token, p.queries - first);
  acc_t top[4] = {lowest(), lowest(), lowest(), lowest()}, total[4] = {0, 0, 0, 0};
  acc_t sums[4][PARTS_OF_VALUE][4], s[4][4];
  clear(sums);
  const int32_t end = seen_before(p, first + OMC_TILE);
#pragma unroll 1
  for (int32_t key = 0; key < end; key += OMC_TILE) {
    __syncthreads();
    load_columns<OMC_DIM>(keys, k + key * p.k_at.token, p.k_at.token, p.keys - key);
    __syncthreads();
    multiply<OMC_DIM>(queries, keys, s);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int32_t query = first + own_of() + i;
      acc_t best = top[i], sum = 0;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        s[i][j] = score_of(p, at, query, key + other_of() + j, s[i][j]);
        best = vmax(best, s[i][j]).x;
      }
      best = top_of_row(best);
      const acc_t base = best == lowest() ? 0 : best, rescale = vexp(top[i] - base).x;
      dropper drops;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        s[i][j] = vexp(s[i][j] - base).x;
        sum += s[i][j];
        if (!drops.keeps(p, at, query, key + other_of() + j)) s[i][j] = 0;
      }
      top[i] = best;
      total[i] = total[i] * rescale + sum;
#pragma unroll
      for (int d = 0; d < 4 * PARTS_OF_VALUE; d++) sums[i][d / 4][d % 4] *= rescale;
    }
    store_tile(tile, s);
    __syncthreads();
    load_rows<OMC_VALUE_DIM>(keys, v + key * p.v_at.token, p.v_at.token, p.keys - key);
    __syncthreads();
    combine(tile, keys, sums);
  }
  acc_t factor[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int32_t query = first + own_of() + i;
    const acc_t sum = sum_of_row(total[i]);
    factor[i] = top[i] == lowest() ? 0 : (OMC_DROPS ? (acc_t)p.keep_scale : 1) / sum;
    if (p.lse && other_of() == 0 && query < p.queries)
      ((acc_t *)p.lse)[row_of(p, at, query)] =
          top[i] == lowest() ? (acc_t)INFINITY : top[i] + vlog(sum).x;
  }
  store_rows<OMC_VALUE_DIM>((storage_t *)p.y + start_of(p.y_at, at.sample, at.head, first),
                            p.y_at.token, p.queries - first, sums, factor);
}

/* ---- backward ---- */

/* A tile of queries beside each tile of keys that it sees. */
struct query_tile {
  acc_t *queries, *grads, *keys, *tile;
  const storage_t *k, *v;
  place at;
  int32_t first, end;

  OMC_METHOD query_tile(const omc_attention &p, unsigned char *shared) {
    queries = (acc_t *)shared, grads = queries + OMC_DIM * OMC_TILE_PITCH;
    keys = grads + OMC_VALUE_DIM * OMC_TILE_PITCH; /* and values */
    tile = keys + OMC_ATTENTION_ROOM(DEEPEST);
    first = (int32_t)blockIdx.x % p.tiles * OMC_TILE;
    at = place_of(p, (int32_t)blockIdx.x / p.tiles);
    end = seen_before(p, first + OMC_TILE);
    k = (const storage_t *)p.k + start_of(p.k_at, at.sample, at.kv_head, 0);
    v = (const storage_t *)p.v + start_of(p.v_at, at.sample, at.kv_head, 0);
    load_columns<OMC_DIM>(queries,
                          (const storage_t *)p.q + start_of(p.q_at, at.sample, at.head, first),
                          p.q_at.token, p.queries - first);
    load_columns<OMC_VALUE_DIM>(
        grads, (const storage_t *)p.dy + start_of(p.y_at, at.sample, at.head, first), p.y_at.token,
        p.queries - first);
  }

  /* The exponentials of a tile, and the gradients of its probabilities. */
  OMC_METHOD void unroll(const omc_attention &p, int32_t key, acc_t (&e)[4][4], acc_t (&d)[4][4]) {
    __syncthreads();
    load_columns<OMC_DIM>(keys, k + key * p.k_at.token, p.k_at.token, p.keys - key);
    __syncthreads();
    multiply<OMC_DIM>(queries, keys, e);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int32_t query = first + own_of() + i;
      const acc_t lse = ((const acc_t *)p.lse)[row_of(p, at, least(query, p.queries - 1))];
#pragma unroll
      for (int j = 0; j < 4; j++)
        e[i][j] = vexp(score_of(p, at, query, key + other_of() + j, e[i][j]) - lse).x;
    }
    __syncthreads();
    load_columns<OMC_VALUE_DIM>(keys, v + key * p.v_at.token, p.v_at.token, p.keys - key);
    __syncthreads();
    multiply<OMC_VALUE_DIM>(grads, keys, d);
#pragma unroll
    for (int i = 0; i < 4 && OMC_DROPS; i++) {
      dropper drops;
#pragma unroll
      for (int j = 0; j < 4; j++)
        d[i][j] *= drops.factor(p, at, first + own_of() + i, key + other_of() + j);
    }
  }
};

/* A block is a tile of queries: share and delta of its rows. */
OMC_GLOBAL_WIDE(attention_rows, OMC_ATTENTION_THREADS, omc_attention, p) {
  OMC_SHARED_BYTES(shared);
  query_tile t(p, shared);
  acc_t sum[4] = {0, 0, 0, 0}, products[4] = {0, 0, 0, 0}, e[4][4], d[4][4];
#pragma unroll 1
  for (int32_t key = 0; key < t.end; key += OMC_TILE) {
    t.unroll(p, key, e, d);
#pragma unroll
    for (int i = 0; i < 16; i++) {
      sum[i / 4] += e[i / 4][i % 4];
      products[i / 4] = fused(e[i / 4][i % 4], d[i / 4][i % 4], products[i / 4]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int32_t query = t.first + own_of() + i;
    const acc_t whole = sum_of_row(sum[i]), product = sum_of_row(products[i]);
    const acc_t share = whole == 0 ? 0 : 1 / whole;
    if (other_of() != 0 || query >= p.queries) continue;
    ((acc_t *)p.share)[row_of(p, t.at, query)] = share;
    ((acc_t *)p.delta)[row_of(p, t.at, query)] = product * share;
  }
}

/* A block is a tile of queries: dq. */
OMC_GLOBAL_WIDE(attention_dq, OMC_ATTENTION_THREADS, omc_attention, p) {
  OMC_SHARED_BYTES(shared);
  query_tile t(p, shared);
  acc_t sums[4][PARTS_OF_KEY][4], e[4][4], d[4][4];
  clear(sums);
#pragma unroll 1
  for (int32_t key = 0; key < t.end; key += OMC_TILE) {
    t.unroll(p, key, e, d);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int64_t row = row_of(p, t.at, least(t.first + own_of() + i, p.queries - 1));
      const acc_t share = ((const acc_t *)p.share)[row], delta = ((const acc_t *)p.delta)[row];
#pragma unroll
      for (int j = 0; j < 4; j++) d[i][j] = e[i][j] * share * (d[i][j] - delta);
    }
    store_tile(t.tile, d);
    __syncthreads();
    load_rows<OMC_DIM>(t.keys, t.k + key * p.k_at.token, p.k_at.token, p.keys - key);
    __syncthreads();
    combine(t.tile, t.keys, sums);
  }
  const acc_t scale = (acc_t)p.scale, factor[4] = {scale, scale, scale, scale};
  store_rows<OMC_DIM>((storage_t *)p.dq + start_of(p.q_at, t.at.sample, t.at.head, t.first),
                      p.q_at.token, p.queries - t.first, sums, factor);
}

/* A block is a tile of keys, for all heads of queries that share it: dk and dv. */
OMC_GLOBAL_WIDE(attention_dkv, OMC_ATTENTION_THREADS, omc_attention, p) {
  OMC_SHARED_BYTES(shared);
  acc_t *const keys = (acc_t *)shared, *const values = keys + OMC_DIM * OMC_TILE_PITCH;
  acc_t *const queries = values + OMC_VALUE_DIM * OMC_TILE_PITCH; /* and gradients of y */
  acc_t *const tile = queries + OMC_ATTENTION_ROOM(DEEPEST);
  const int32_t first = (int32_t)blockIdx.x % p.tiles * OMC_TILE;
  const int32_t kv = (int32_t)blockIdx.x / p.tiles, group = p.heads / p.kv_heads;
  const int32_t sample = kv / p.kv_heads, kv_head = kv % p.kv_heads;
  load_columns<OMC_DIM>(keys, (const storage_t *)p.k + start_of(p.k_at, sample, kv_head, first),
                        p.k_at.token, p.keys - first);
  load_columns<OMC_VALUE_DIM>(values,
                              (const storage_t *)p.v + start_of(p.v_at, sample, kv_head, first),
                              p.v_at.token, p.keys - first);
  acc_t dk[4][PARTS_OF_KEY][4], dv[4][PARTS_OF_VALUE][4], e[4][4], d[4][4];
  clear(dk);
  clear(dv);
#pragma unroll 1
  for (int32_t g = 0; g < group; g++) {
    const place at = {sample, kv_head * group + g, kv_head};
    const storage_t *const q = (const storage_t *)p.q + start_of(p.q_at, sample, at.head, 0);
    const storage_t *const dy = (const storage_t *)p.dy + start_of(p.y_at, sample, at.head, 0);
#pragma unroll 1
    for (int32_t query = OMC_CAUSAL ? first : 0; query < p.queries; query += OMC_TILE) {
      const int32_t rest = p.queries - query;
      __syncthreads();
      load_columns<OMC_DIM>(queries, q + query * p.q_at.token, p.q_at.token, rest);
      __syncthreads();
      multiply<OMC_DIM>(keys, queries, e);
      __syncthreads();
      load_columns<OMC_VALUE_DIM>(queries, dy + query * p.y_at.token, p.y_at.token, rest);
      __syncthreads();
      multiply<OMC_VALUE_DIM>(values, queries, d);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int32_t row = query + other_of() + j;
        const int64_t known = row_of(p, at, least(row, p.queries - 1));
        const acc_t lse = ((const acc_t *)p.lse)[known], share = ((const acc_t *)p.share)[known];
        const acc_t delta = ((const acc_t *)p.delta)[known];
        dropper drops;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int32_t key = first + own_of() + i;
          const acc_t prob = vexp(score_of(p, at, row, key, e[i][j]) - lse).x * share;
          const acc_t kept = OMC_DROPS ? drops.factor(p, at, row, key) : 1;
          d[i][j] = prob * (d[i][j] * kept - delta);
          e[i][j] = prob * kept;
        }
      }
      store_tile(tile, e);
      __syncthreads();
      load_rows<OMC_VALUE_DIM>(queries, dy + query * p.y_at.token, p.y_at.token, rest);
      __syncthreads();
      combine(tile, queries, dv);
      __syncthreads();
      store_tile(tile, d);
      load_rows<OMC_DIM>(queries, q + query * p.q_at.token, p.q_at.token, rest);
      __syncthreads();
      combine(tile, queries, dk);
    }
  }
  const acc_t scale = (acc_t)p.scale, scales[4] = {scale, scale, scale, scale};
  const acc_t ones[4] = {1, 1, 1, 1};
  store_rows<OMC_DIM>((storage_t *)p.dk + start_of(p.k_at, sample, kv_head, first), p.k_at.token,
                      p.keys - first, dk, scales);
  store_rows<OMC_VALUE_DIM>((storage_t *)p.dv + start_of(p.v_at, sample, kv_head, first),
                            p.v_at.token, p.keys - first, dv, ones);
}

#endif

#endif
