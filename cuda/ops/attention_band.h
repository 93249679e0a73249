/* What kernels of attention on tensor cores are made of: operands in shared memory, row by row as
 * they are stored, and of scores bands of 16 rows by OMC_BAND_COLUMNS columns, which a warp has in
 * the layout of gpu/mma.h. Rows of scores are queries and columns keys, or, FLIPPED, the other way
 * round. Read by the host as C11. */
#ifndef OMC_CUDA_OPS_ATTENTION_BAND_H
#define OMC_CUDA_OPS_ATTENTION_BAND_H

#include "cuda/ops/attention_kept.h"

enum {
  OMC_BAND_WARPS = 4, /* of a block */
  OMC_BAND_THREADS = OMC_BAND_WARPS * 32,
  OMC_BAND_COLUMNS = OMC_KEPT_TILE,
  OMC_BAND_STAGES = 2 /* one tile of columns is read while the next is copied */
};

/* Bands of a warp, and into how many parts dk and dv are cut along a head, each a block's: what
 * registers hold, by the elements of the longer of a head's rows. Scores are plain if none has a
 * mask or waits for a number to be drawn. */
#define OMC_FORWARD_BANDS(deepest, plain) ((plain) && (deepest) <= 96 ? 2 : 1)
#define OMC_DQ_BANDS(deepest, plain) ((plain) && (deepest) <= 64 ? 2 : 1)
#define OMC_DKV_BANDS 1
#define OMC_DKV_PARTS(deepest) ((deepest) <= 128 ? 1 : 2)

/* Rows of a block. */
#define OMC_BAND_ROWS(bands) ((bands) * OMC_BAND_WARPS * 16)

/* Elements of a row as products take them, in whole parts of 16, and from one row to the next in
 * shared memory, where 8 rows in turn are in different banks. */
#define OMC_BAND_DEPTH(depth, parts) (((depth) + 16 * (parts) - 1) / (16 * (parts)) * 16 * (parts))
#define OMC_BAND_PITCH(depth, parts) (OMC_BAND_DEPTH(depth, parts) + 8)

/* Rows of 32-bit words beside a tile of queries: lse, share, delta, and which scores with the keys
 * of a block are kept, if that has been drawn ahead. */
enum { OMC_BAND_NUMBERS = 3 };
#define OMC_BAND_WORDS(ahead) \
  (OMC_BAND_NUMBERS + ((ahead) ? OMC_BAND_ROWS(OMC_DKV_BANDS) / OMC_KEPT_TILE : 0))

#ifdef OMC_GPU

#include "cuda/gpu/mma.h"
#include "cuda/gpu/pack.h"

enum {
  NUMBERS = OMC_BAND_NUMBERS,
  PLAIN = !OMC_MASK && OMC_DROPS != 1,
  WORDS = OMC_BAND_WORDS(OMC_DROPS == 2),
  /* Blocks that a multiprocessor has registers for, at least. */
  FORWARD_BLOCKS = DEEPEST <= 64 && OMC_DROPS != 1 ? 3 : 1,
  DKV_BLOCKS = OMC_MASK != 0 && OMC_DROPS != 0 ? 1 : FORWARD_BLOCKS,
  COLUMNS = OMC_BAND_COLUMNS,
  PARTS = OMC_DKV_PARTS(DEEPEST),
  DEPTH = OMC_BAND_DEPTH(OMC_DIM, PARTS),
  PITCH = OMC_BAND_PITCH(OMC_DIM, PARTS),
  VALUE_DEPTH = OMC_BAND_DEPTH(OMC_VALUE_DIM, PARTS),
  VALUE_PITCH = OMC_BAND_PITCH(OMC_VALUE_DIM, PARTS),
  STAGE = COLUMNS * (PITCH + VALUE_PITCH) /* elements of a tile of columns, of both operands */
};

OMC_INLINE float exponential(float x) { return omc_exp2(x * 1.44269504f); }

/* The first of the rows of a warp in its block. */
OMC_INLINE int row_of_warp(int bands) { return (int)threadIdx.x / 32 * bands * 16; }

/* ---- operands ---- */

/* ROWS rows of DIM elements on their way to shared memory, rows from n on and what lies between DIM
 * and the depth of products being 0. A block that has no tile to wait for them with has none: it
 * must not end before its copies. */
template <int ROWS, int DIM>
OMC_INLINE void fetch(storage_t *to, const storage_t *rows, int64_t stride, int32_t n) {
  constexpr int STEP = OMC_BAND_PITCH(DIM, PARTS), UNITS = OMC_BAND_DEPTH(DIM, PARTS) / 8;
  const bool whole =
      DIM % 8 == 0 && ((uint64_t)rows | (uint64_t)stride * sizeof(storage_t)) % 16 == 0;
  for (int i = (int)threadIdx.x; i < ROWS * UNITS; i += OMC_BAND_THREADS) {
    const int r = i / UNITS, d = i % UNITS * 8;
    storage_t *const at = to + r * STEP + d;
    const storage_t *const from = rows + (r < n ? r * stride : 0);
    if (whole) {
      omc_copy_later<16>(at, d < DIM ? from + d : rows, r < n && d < DIM);
    } else {
      for (int e = 0; e < 8; e++)
        at[e] = r < n && d + e < DIM ? from[d + e] : element<storage_t>(0.0f);
    }
  }
}

/* sums[b][n] = bands of `rows` by `columns`, both [][depth]. */
template <int D, int BANDS>
OMC_INLINE void multiply(const storage_t *rows, const storage_t *columns,
                         float (&sums)[BANDS][COLUMNS / 8][4]) {
  constexpr int STEP = D + 8;
#pragma unroll
  for (int i = 0; i < BANDS * COLUMNS / 2; i++)
    sums[i / (COLUMNS / 2)][i / 4 % (COLUMNS / 8)][i % 4] = 0;
#pragma unroll 4
  for (int d = 0; d < D; d += 16) {
    uint32_t a[BANDS][4];
#pragma unroll
    for (int b = 0; b < BANDS; b++) omc_load_a(a[b], rows + b * 16 * STEP + d, STEP);
#pragma unroll
    for (int n = 0; n < COLUMNS / 16; n++) {
      uint32_t two[4];
      omc_load_b<false>(two, columns + n * 16 * STEP + d, STEP);
#pragma unroll
      for (int b = 0; b < BANDS; b++) {
        omc_multiply<storage_t>(sums[b][2 * n], a[b], two[0], two[1]);
        omc_multiply<storage_t>(sums[b][2 * n + 1], a[b], two[2], two[3]);
      }
    }
  }
}

/* sums += scores, rounded to 16 bits, by the rows that are their columns, of which there are whole
 * rows or, at `rows`, a part. */
template <int STEP, int BANDS, int N>
OMC_INLINE void combine(const float (&scores)[BANDS][COLUMNS / 8][4], const storage_t *rows,
                        float (&sums)[BANDS][N][4]) {
#pragma unroll
  for (int k = 0; k < COLUMNS / 16; k++) {
    uint32_t a[BANDS][4];
#pragma unroll
    for (int w = 0; w < BANDS * 4; w++) {
      const float (&two)[4] = scores[w / 4][2 * k + w % 4 / 2];
      a[w / 4][w % 4] = omc_pair<storage_t>(two[w % 2 * 2], two[w % 2 * 2 + 1]);
    }
#pragma unroll
    for (int n = 0; n < N / 2; n++) {
      uint32_t two[4];
      omc_load_b<true>(two, rows + k * 16 * STEP + n * 16, STEP);
#pragma unroll
      for (int b = 0; b < BANDS; b++) {
        omc_multiply<storage_t>(sums[b][2 * n], a[b], two[0], two[1]);
        omc_multiply<storage_t>(sums[b][2 * n + 1], a[b], two[2], two[3]);
      }
    }
  }
}

template <int BANDS, int N>
OMC_INLINE void clear(float (&sums)[BANDS][N][4]) {
#pragma unroll
  for (int i = 0; i < BANDS * N * 4; i++) sums[i / (N * 4)][i / 4 % N][i % 4] = 0;
}

/* The sums of row i of a lane's, times factor[i], to the first n rows: elements from `first` on, of
 * rows of DIM. */
template <int DIM, int BANDS, int N>
OMC_INLINE void store(storage_t *rows, int64_t stride, int32_t n, int first,
                      const float (&sums)[BANDS][N][4], const float (&factor)[BANDS * 2]) {
#pragma unroll
  for (int i = 0; i < BANDS * 2 * N; i++) {
    const int half = i / N, r = half * 8 + omc_lane_row(),
              d = first + i % N * 8 + omc_lane_column();
    const float (&sum)[4] = sums[half / 2][i % N];
    const storage_t two[2] = {element<storage_t>(sum[half % 2 * 2] * factor[half]),
                              element<storage_t>(sum[half % 2 * 2 + 1] * factor[half])};
    if (r < n && d < DIM) omc_store(rows + r * stride + d, two, least(2, DIM - d));
  }
}

/* Of the four lanes that share rows. */
OMC_INLINE float sum_of_row(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
OMC_INLINE float top_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

/* ---- scores ---- */

/* Where a warp's scores are: those of a head from one row and column on. */
template <bool FLIPPED>
struct window {
  place at;
  int32_t row, column;

  OMC_METHOD int32_t query() const { return FLIPPED ? column : row; }
  OMC_METHOD int32_t key() const { return FLIPPED ? row : column; }
  /* Of score i of a lane in columns n * 8 to n * 8 + 7 of band b. */
  OMC_METHOD int32_t query(int b, int n, int i) const {
    return FLIPPED ? across(n, i) : down(b, i);
  }
  OMC_METHOD int32_t key(int b, int n, int i) const { return FLIPPED ? down(b, i) : across(n, i); }

 private:
  OMC_METHOD int32_t down(int b, int i) const { return row + b * 16 + i / 2 * 8 + omc_lane_row(); }
  OMC_METHOD int32_t across(int n, int i) const {
    return column + n * 8 + omc_lane_column() + i % 2;
  }
};

/* Products as scores. Where nothing can be hidden nobody looks. */
template <bool FLIPPED, int BANDS>
OMC_INLINE void score(const omc_attention &p, const window<FLIPPED> &w,
                      float (&s)[BANDS][COLUMNS / 8][4]) {
  constexpr int QUERIES = FLIPPED ? COLUMNS : BANDS * 16, KEYS = FLIPPED ? BANDS * 16 : COLUMNS;
  const bool looks = OMC_MASK != 0 || w.query() + QUERIES > p.queries || w.key() + KEYS > p.keys ||
                     (OMC_CAUSAL && w.key() + KEYS - 1 > w.query());
  constexpr int SCORES = BANDS * COLUMNS / 2, OF_BAND = COLUMNS / 2;
  if (looks) {
#pragma unroll
    for (int j = 0; j < SCORES; j++) {
      const int b = j / OF_BAND, n = j % OF_BAND / 4, i = j % 4;
      s[b][n][i] = score_of(p, w.at, w.query(b, n, i), w.key(b, n, i), s[b][n][i]);
    }
  } else {
    const float scale = (float)p.scale;
#pragma unroll
    for (int j = 0; j < SCORES; j++) s[j / OF_BAND][j % OF_BAND / 4][j % 4] *= scale;
  }
}

/* Of the scores of a tile, which of a lane's dropout keeps: words of its rows, from its first
 * column on. */
template <int BANDS>
struct kept_scores {
  uint32_t words[BANDS * 2];

  OMC_METHOD kept_scores(const omc_attention &p, const window<false> &w) {
    if (OMC_DROPS == 1) draw(p, w);
    if (OMC_DROPS != 2) return;
    const uint32_t *const tile = kept_tile(p, w.at, least(w.row, p.queries - 1), w.column);
#pragma unroll
    for (int r = 0; r < BANDS * 2; r++)
      words[r] = tile[w.row % OMC_KEPT_TILE + r * 8 + omc_lane_row()] >> omc_lane_column();
  }
  OMC_METHOD bool operator()(int b, int n, int i) const {
    return !OMC_DROPS || (words[b * 2 + i / 2] >> (n * 8 + i % 2) & 1);
  }

 private:
  OMC_METHOD void draw(const omc_attention &p, const window<false> &w) {
    dropper drops;
#pragma unroll
    for (int r = 0; r < BANDS * 2; r++) {
      words[r] = 0;
#pragma unroll
      for (int k = 0; k < COLUMNS / 4; k++) {
        const int b = r / 2, n = k / 2, i = r % 2 * 2 + k % 2;
        words[r] |= (uint32_t)drops.keeps(p, w.at, w.query(b, n, i), w.key(b, n, i))
                    << (n * 8 + k % 2);
      }
    }
  }
};

/* The same of a band whose rows are keys: words of a lane's columns, from its first row on. `tile`
 * has those of the keys. */
struct kept_columns {
  uint32_t words[COLUMNS / 8][2];

  OMC_METHOD kept_columns(const omc_attention &p, const window<true> &w, const uint32_t *tile) {
    dropper drops;
#pragma unroll
    for (int k = 0; k < COLUMNS / 4; k++) {
      const int n = k / 2, i = k % 2;
      if (OMC_DROPS == 1)
        words[n][i] = (uint32_t)drops.keeps(p, w.at, w.query(0, n, i), w.key(0, n, i)) |
                      (uint32_t)drops.keeps(p, w.at, w.query(0, n, i), w.key(0, n, i + 2)) << 8;
      if (OMC_DROPS == 2)
        words[n][i] =
            tile[n * 8 + omc_lane_column() + i] >> (w.row % OMC_KEPT_TILE + omc_lane_row());
    }
  }
  OMC_METHOD bool operator()(int n, int i) const {
    return !OMC_DROPS || (words[n][i % 2] >> (i / 2 * 8) & 1);
  }
};

#endif

#endif
