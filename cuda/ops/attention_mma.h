/* Attention of 16-bit elements on tensor cores: a warp works on bands of 16 rows by tiles of
 * columns. Scores stay in registers, where they become an operand of the next product. Backward
 * makes them again from lse; sums are in one order.
 * Read by the host as C11. */
#ifndef OMC_CUDA_OPS_ATTENTION_MMA_H
#define OMC_CUDA_OPS_ATTENTION_MMA_H

#include "cuda/ops/attention_band.h"

#ifdef OMC_GPU

/* Queries of a block, and tiles of the keys and values that they see, in turn. */
template <int BANDS>
struct key_tiles {
  const omc_attention &p;
  storage_t *stages;
  const storage_t *k, *v;
  int32_t first, end; /* of queries; of keys */
  window<false> scores;

  OMC_METHOD key_tiles(const omc_attention &given, storage_t *shared) : p(given), stages(shared) {
    const int32_t i = (int32_t)blockIdx.x % p.tiles;
    scores.at = place_of(p, p.first + (int32_t)blockIdx.x / p.tiles);
    first = (OMC_CAUSAL ? p.tiles - 1 - i : i) * OMC_BAND_ROWS(BANDS); /* the longest start first */
    scores.row = first + row_of_warp(BANDS), scores.column = 0;
    end = seen_before(p, first + OMC_BAND_ROWS(BANDS));
    k = (const storage_t *)p.k + start_of(p.k_at, scores.at.sample, scores.at.kv_head, 0);
    v = (const storage_t *)p.v + start_of(p.v_at, scores.at.sample, scores.at.kv_head, 0);
    if (end > 0) fetch_tile(0);
  }
  OMC_METHOD storage_t *keys() const { return stages + scores.column / COLUMNS % 2 * STAGE; }
  OMC_METHOD storage_t *values() const { return keys() + COLUMNS * PITCH; }

  /* The tile is there, and nobody needs the one before. Does the warp see anything of it? */
  OMC_METHOD bool arrive() const {
    omc_wait_for_copies();
    __syncthreads();
    if (scores.column + COLUMNS < end) fetch_tile(scores.column + COLUMNS);
    return !OMC_CAUSAL || scores.column < scores.row + BANDS * 16;
  }
  /* Rows of this lane: 8 apart. */
  OMC_METHOD int32_t query(int i) const { return scores.row + i * 8 + omc_lane_row(); }

 private:
  OMC_METHOD void fetch_tile(int32_t key) const {
    storage_t *const to = stages + key / COLUMNS % 2 * STAGE;
    fetch<COLUMNS, OMC_DIM>(to, k + key * p.k_at.token, p.k_at.token, p.keys - key);
    fetch<COLUMNS, OMC_VALUE_DIM>(to + COLUMNS * PITCH, v + key * p.v_at.token, p.v_at.token,
                                  p.keys - key);
  }
};

/* ---- forward: a block is a tile of queries ---- */

OMC_GLOBAL_BLOCKS(attention, OMC_BAND_THREADS, FORWARD_BLOCKS, omc_attention, p) {
  constexpr int BANDS = OMC_FORWARD_BANDS(DEEPEST, PLAIN), ROWS = OMC_BAND_ROWS(BANDS);
  OMC_SHARED_BYTES(shared);
  storage_t *const queries = (storage_t *)shared;
  key_tiles<BANDS> t(p, queries + ROWS * PITCH);
  window<false> &w = t.scores;
  if (t.end > 0)
    fetch<ROWS, OMC_DIM>(queries,
                         (const storage_t *)p.q + start_of(p.q_at, w.at.sample, w.at.head, t.first),
                         p.q_at.token, p.queries - t.first);
  float top[BANDS * 2], total[BANDS * 2], s[BANDS][COLUMNS / 8][4];
  float sums[BANDS][VALUE_DEPTH / 8][4];
#pragma unroll
  for (int r = 0; r < BANDS * 2; r++) top[r] = lowest(), total[r] = 0;
  clear(sums);
#pragma unroll 1
  for (; w.column < t.end; w.column += COLUMNS) {
    if (!t.arrive()) continue;
    const kept_scores<BANDS> keeps(p, w);
    multiply<DEPTH>(queries + row_of_warp(BANDS) * PITCH, t.keys(), s);
    score(p, w, s);
#pragma unroll
    for (int r = 0; r < BANDS * 2; r++) {
      float best = top[r], sum = 0;
#pragma unroll
      for (int j = 0; j < COLUMNS / 4; j++) best = fmaxf(best, s[r / 2][j / 2][r % 2 * 2 + j % 2]);
      best = top_of_row(best);
      const float base = best == lowest() ? 0 : best, rescale = exponential(top[r] - base);
#pragma unroll
      for (int j = 0; j < COLUMNS / 4; j++) {
        float &e = s[r / 2][j / 2][r % 2 * 2 + j % 2];
        sum += e = exponential(e - base);
      }
      top[r] = best;
      total[r] = total[r] * rescale + sum;
#pragma unroll
      for (int j = 0; j < VALUE_DEPTH / 4; j++) sums[r / 2][j / 2][r % 2 * 2 + j % 2] *= rescale;
    }
#pragma unroll
    for (int k = 0; k < BANDS * COLUMNS / 2 && OMC_DROPS; k++) {
      const int b = k / (COLUMNS / 2), n = k / 4 % (COLUMNS / 8), i = k % 4;
      if (!keeps(b, n, i)) s[b][n][i] = 0;
    }
    combine<VALUE_PITCH>(s, t.values(), sums);
  }
  float factor[BANDS * 2];
#pragma unroll
  for (int r = 0; r < BANDS * 2; r++) {
    const float sum = sum_of_row(total[r]); /* 0: all is hidden */
    factor[r] = sum == 0 ? 0 : (OMC_DROPS ? (float)p.keep_scale : 1) / sum;
    if (p.lse && omc_lane_column() == 0 && t.query(r) < p.queries)
      ((float *)p.lse)[row_of(p, w.at, t.query(r))] = sum == 0 ? INFINITY : top[r] + logf(sum);
  }
  store<OMC_VALUE_DIM>((storage_t *)p.y + start_of(p.y_at, w.at.sample, w.at.head, w.row),
                       p.y_at.token, p.queries - w.row, 0, sums, factor);
}

/* ---- backward ---- */

/* Queries and gradients of y beside the tiles of keys and values. */
template <int BANDS>
struct grad_tiles : key_tiles<BANDS> {
  enum { ROWS = OMC_BAND_ROWS(BANDS) };
  storage_t *queries, *grads;
  float lse[BANDS * 2];

  OMC_METHOD grad_tiles(const omc_attention &p, storage_t *shared)
      : key_tiles<BANDS>(p, shared + ROWS * (PITCH + VALUE_PITCH)),
        queries(shared),
        grads(shared + ROWS * PITCH) {
    const window<false> &w = this->scores;
    const int32_t first = this->first;
    if (this->end > 0) {
      fetch<ROWS, OMC_DIM>(queries,
                           (const storage_t *)p.q + start_of(p.q_at, w.at.sample, w.at.head, first),
                           p.q_at.token, p.queries - first);
      fetch<ROWS, OMC_VALUE_DIM>(
          grads, (const storage_t *)p.dy + start_of(p.y_at, w.at.sample, w.at.head, first),
          p.y_at.token, p.queries - first);
    }
    queries += row_of_warp(BANDS) * PITCH, grads += row_of_warp(BANDS) * VALUE_PITCH;
    load(p.lse, lse);
  }

  /* Numbers of a lane's rows. */
  OMC_METHOD void load(const void *of, float (&to)[BANDS * 2]) const {
#pragma unroll
    for (int r = 0; r < BANDS * 2; r++)
      to[r] =
          ((const float *)
               of)[row_of(this->p, this->scores.at, least(this->query(r), this->p.queries - 1))];
  }

  /* The exponentials of a tile, and the gradients of its probabilities. */
  OMC_METHOD void unroll(float (&e)[BANDS][COLUMNS / 8][4], float (&d)[BANDS][COLUMNS / 8][4]) {
    const kept_scores<BANDS> keeps(this->p, this->scores);
    multiply<DEPTH>(queries, this->keys(), e);
    multiply<VALUE_DEPTH>(grads, this->values(), d);
    score(this->p, this->scores, e);
#pragma unroll
    for (int k = 0; k < BANDS * COLUMNS / 2; k++) {
      const int b = k / (COLUMNS / 2), n = k / 4 % (COLUMNS / 8), i = k % 4;
      e[b][n][i] = exponential(e[b][n][i] - lse[b * 2 + i / 2]);
      if (OMC_DROPS) d[b][n][i] *= keeps(b, n, i) ? (float)this->p.keep_scale : 0;
    }
  }
};

/* Share and delta of rows whose result is there: OMC_DELTA_LANES have a row. */
OMC_GLOBAL(attention_delta, OMC_DELTA_THREADS, omc_attention, p) {
  constexpr int LANES = OMC_DELTA_LANES, PACK = 8, ROWS = OMC_DELTA_THREADS / LANES;
  const int lane = (int)threadIdx.x % LANES;
  const int64_t row = (int64_t)blockIdx.x * ROWS + threadIdx.x / LANES;
  const int32_t head = (int32_t)(row / p.queries), query = (int32_t)(row % p.queries);
  const bool is_row = head < p.tiles;
  const place at = place_of(p, is_row ? head : 0);
  const int64_t start = start_of(p.y_at, at.sample, at.head, is_row ? query : 0);
  float sum = 0;
#pragma unroll
  for (int d = lane * PACK; d < OMC_VALUE_DIM; d += LANES * PACK) {
    const int lanes = least(PACK, OMC_VALUE_DIM - d);
    omc_loaded<storage_t, PACK> y, dy;
    omc_load(y, (const storage_t *)p.y + start + d, lanes);
    omc_load(dy, (const storage_t *)p.dy + start + d, lanes);
#pragma unroll
    for (int i = 0; i < PACK; i++)
      if (i < lanes) sum = fmaf(number<float>(y[i]), number<float>(dy[i]), sum);
  }
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
  if (lane != 0 || !is_row) return;
  ((float *)p.share)[row] = 1;
  ((float *)p.delta)[row] = sum;
}

/* A block is a tile of queries: share and delta of its rows. */
OMC_GLOBAL_WIDE(attention_rows, OMC_BAND_THREADS, omc_attention, p) {
  constexpr int BANDS = OMC_DQ_BANDS(DEEPEST, PLAIN);
  OMC_SHARED_BYTES(shared);
  grad_tiles<BANDS> t(p, (storage_t *)shared);
  float sum[BANDS * 2], products[BANDS * 2], e[BANDS][COLUMNS / 8][4], d[BANDS][COLUMNS / 8][4];
#pragma unroll
  for (int r = 0; r < BANDS * 2; r++) sum[r] = products[r] = 0;
#pragma unroll 1
  for (; t.scores.column < t.end; t.scores.column += COLUMNS) {
    if (!t.arrive()) continue;
    t.unroll(e, d);
#pragma unroll
    for (int j = 0; j < BANDS * COLUMNS / 2; j++) {
      const int b = j / (COLUMNS / 2), n = j / 4 % (COLUMNS / 8), i = j % 4, r = b * 2 + i / 2;
      sum[r] += e[b][n][i];
      products[r] = fmaf(e[b][n][i], d[b][n][i], products[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < BANDS * 2; r++) {
    const float whole = sum_of_row(sum[r]), product = sum_of_row(products[r]);
    const float share = whole == 0 ? 0 : 1 / whole;
    if (omc_lane_column() != 0 || t.query(r) >= p.queries) continue;
    ((float *)p.share)[row_of(p, t.scores.at, t.query(r))] = share;
    ((float *)p.delta)[row_of(p, t.scores.at, t.query(r))] = product * share;
  }
}

/* A block is a tile of queries: dq. */
OMC_GLOBAL_WIDE(attention_dq, OMC_BAND_THREADS, omc_attention, p) {
  constexpr int BANDS = OMC_DQ_BANDS(DEEPEST, PLAIN);
  OMC_SHARED_BYTES(shared);
  grad_tiles<BANDS> t(p, (storage_t *)shared);
  const window<false> &w = t.scores;
  float share[BANDS * 2], delta[BANDS * 2], sums[BANDS][DEPTH / 8][4];
  float e[BANDS][COLUMNS / 8][4], d[BANDS][COLUMNS / 8][4];
  t.load(p.share, share);
  t.load(p.delta, delta);
  clear(sums);
#pragma unroll 1
  for (; t.scores.column < t.end; t.scores.column += COLUMNS) {
    if (!t.arrive()) continue;
    t.unroll(e, d);
#pragma unroll
    for (int j = 0; j < BANDS * COLUMNS / 2; j++) {
      const int b = j / (COLUMNS / 2), n = j / 4 % (COLUMNS / 8), i = j % 4, r = b * 2 + i / 2;
      d[b][n][i] = e[b][n][i] * share[r] * (d[b][n][i] - delta[r]);
    }
    combine<PITCH>(d, t.keys(), sums);
  }
  float factor[BANDS * 2];
#pragma unroll
  for (int r = 0; r < BANDS * 2; r++) factor[r] = (float)p.scale;
  store<OMC_DIM>((storage_t *)p.dq + start_of(p.q_at, w.at.sample, w.at.head, w.row), p.q_at.token,
                 p.queries - w.row, 0, sums, factor);
}

/* Tiles of queries, gradients of y, and words of these rows (OMC_BAND_WORDS), in turn: all that
 * keys of a block are seen by, head after head of those that share them. */
struct query_tiles {
  const omc_attention &p;
  storage_t *stages;
  float *words;
  int32_t sample, kv_head, key, start, per_head;

  OMC_METHOD query_tiles(const omc_attention &given, storage_t *shared, int32_t kv,
                         int32_t first_key)
      : p(given), stages(shared), words((float *)(shared + OMC_BAND_STAGES * STAGE)) {
    key = first_key;
    sample = kv / p.kv_heads, kv_head = kv % p.kv_heads;
    start = OMC_CAUSAL ? key / COLUMNS * COLUMNS : 0;
    per_head = p.queries > start ? (p.queries - start + COLUMNS - 1) / COLUMNS : 0;
  }
  OMC_METHOD int32_t count() const { return p.heads / p.kv_heads * per_head; }
  OMC_METHOD place at(int32_t i) const {
    return place{sample, kv_head * (p.heads / p.kv_heads) + i / per_head, kv_head};
  }
  OMC_METHOD int32_t query(int32_t i) const { return start + i % per_head * COLUMNS; }
  OMC_METHOD storage_t *queries(int32_t i) const { return stages + i % 2 * STAGE; }
  OMC_METHOD storage_t *grads(int32_t i) const { return queries(i) + COLUMNS * PITCH; }
  OMC_METHOD float *lse(int32_t i) const { return words + i % 2 * WORDS * COLUMNS; }

  /* Of the scores with keys that are as many after the first. */
  OMC_METHOD const uint32_t *kept(int32_t i, int32_t after) const {
    return (const uint32_t *)lse(i) + (NUMBERS + after / OMC_KEPT_TILE) * COLUMNS;
  }

  OMC_METHOD void arrive(int32_t i) const {
    omc_wait_for_copies();
    __syncthreads();
    if (i + 1 < count()) fetch_tile(i + 1);
  }
  OMC_METHOD void fetch_tile(int32_t i) const {
    const place head = at(i);
    const int32_t first = query(i), rest = p.queries - first;
    fetch<COLUMNS, OMC_DIM>(queries(i),
                            (const storage_t *)p.q + start_of(p.q_at, sample, head.head, first),
                            p.q_at.token, rest);
    fetch<COLUMNS, OMC_VALUE_DIM>(
        grads(i), (const storage_t *)p.dy + start_of(p.y_at, sample, head.head, first),
        p.y_at.token, rest);
    for (int j = (int)threadIdx.x; j < WORDS * COLUMNS; j += OMC_BAND_THREADS)
      fetch_word(lse(i) + j, head, first, j / COLUMNS, j % COLUMNS);
  }

 private:
  OMC_METHOD void fetch_word(float *to, const place &head, int32_t first, int which,
                             int32_t r) const {
    if (OMC_DROPS != 2 || which < NUMBERS) {
      const void *const of = which == 0 ? p.lse : which == 1 ? p.share : p.delta;
      const bool there = first + r < p.queries;
      omc_copy_later<4>(to, (const float *)of + row_of(p, head, there ? first + r : 0), there);
    } else {
      const int32_t of = key + (which - NUMBERS) * OMC_KEPT_TILE;
      const bool there = of < p.keys && !(OMC_CAUSAL && of > first);
      omc_copy_later<4>(to, kept_tile(p, head, first, there ? of : 0) + r, there);
    }
  }
};

/* A block is a tile of keys, for all heads of queries that share it, and a part of a head: dk and
 * dv. */
OMC_GLOBAL_BLOCKS(attention_dkv, OMC_BAND_THREADS, DKV_BLOCKS, omc_attention, p) {
  constexpr int BANDS = OMC_DKV_BANDS, ROWS = OMC_BAND_ROWS(BANDS);
  constexpr int WIDTH = DEPTH / PARTS, VALUE_WIDTH = VALUE_DEPTH / PARTS;
  OMC_SHARED_BYTES(shared);
  storage_t *const keys = (storage_t *)shared, *const values = keys + ROWS * PITCH;
  const int32_t block = (int32_t)blockIdx.x / PARTS, part = (int32_t)blockIdx.x % PARTS;
  const int32_t first = block % p.tiles * ROWS, warp = row_of_warp(BANDS);
  const int32_t kv = p.first / (p.heads / p.kv_heads) + block / p.tiles;
  const query_tiles t(p, values + ROWS * VALUE_PITCH, kv, first);
  if (t.count() > 0) {
    fetch<ROWS, OMC_DIM>(keys,
                         (const storage_t *)p.k + start_of(p.k_at, t.sample, t.kv_head, first),
                         p.k_at.token, p.keys - first);
    fetch<ROWS, OMC_VALUE_DIM>(
        values, (const storage_t *)p.v + start_of(p.v_at, t.sample, t.kv_head, first), p.v_at.token,
        p.keys - first);
    t.fetch_tile(0);
  }
  float dk[BANDS][WIDTH / 8][4], dv[BANDS][VALUE_WIDTH / 8][4];
  float e[BANDS][COLUMNS / 8][4], d[BANDS][COLUMNS / 8][4];
  clear(dk);
  clear(dv);
#pragma unroll 1
  for (int32_t tile = 0; tile < t.count(); tile++) {
    t.arrive(tile);
    const window<true> w = {t.at(tile), first + warp, t.query(tile)};
    if (OMC_CAUSAL && w.column + COLUMNS <= w.row) continue;
    multiply<DEPTH>(keys + warp * PITCH, t.queries(tile), e);
    multiply<VALUE_DEPTH>(values + warp * VALUE_PITCH, t.grads(tile), d);
    score(p, w, e);
    const float *const lse = t.lse(tile) + omc_lane_column();
    const float *const share = lse + COLUMNS, *const delta = share + COLUMNS;
    const kept_columns keeps(p, w, t.kept(tile, warp));
#pragma unroll
    for (int k = 0; k < BANDS * COLUMNS / 2; k++) {
      const int b = k / (COLUMNS / 2), n = k / 4 % (COLUMNS / 8), i = k % 4, row = n * 8 + i % 2;
      const float prob = exponential(e[b][n][i] - lse[row]) * share[row];
      const float factor = !OMC_DROPS ? 1 : keeps(n, i) ? (float)p.keep_scale : 0;
      d[b][n][i] = prob * (d[b][n][i] * factor - delta[row]);
      e[b][n][i] = prob * factor;
    }
    combine<VALUE_PITCH>(e, t.grads(tile) + part * VALUE_WIDTH, dv);
    combine<PITCH>(d, t.queries(tile) + part * WIDTH, dk);
  }
  float ones[BANDS * 2], scales[BANDS * 2];
#pragma unroll
  for (int r = 0; r < BANDS * 2; r++) ones[r] = 1, scales[r] = (float)p.scale;
  const int32_t row = first + warp;
  store<OMC_DIM>((storage_t *)p.dk + start_of(p.k_at, t.sample, t.kv_head, row), p.k_at.token,
                 p.keys - row, part * WIDTH, dk, scales);
  store<OMC_VALUE_DIM>((storage_t *)p.dv + start_of(p.v_at, t.sample, t.kv_head, row), p.v_at.token,
                       p.keys - row, part * VALUE_WIDTH, dv, ones);
}

#endif

#endif
