/* What kernels of attention are given, and which scores are seen and kept. Read by the host as C11.
 *
 * Defined are OMC_STORAGE, what is computed in (gpu/lane.h), OMC_DIM and OMC_VALUE_DIM, elements of
 * a head, OMC_MASK (0: none, 1: of bool, 2: added), OMC_CAUSAL, and OMC_DROPS (0: nothing, 1: as is
 * drawn when scores are there, 2: as has been drawn ahead). */
#ifndef OMC_CUDA_OPS_ATTENTION_HEADS_H
#define OMC_CUDA_OPS_ATTENTION_HEADS_H

#include "cuda/gpu/philox.h"

/* Of a block that has as many rows of y as OMC_DELTA_LANES go into its threads. */
enum { OMC_DELTA_THREADS = 256, OMC_DELTA_LANES = 8 };

/* Elements from one to the next. */
typedef struct omc_attention_strides {
  int64_t sample, head, token;
} omc_attention_strides;

typedef struct omc_attention {
  const void *q, *k, *v, *dy, *mask;
  void *y, *lse, *dq, *dk, *dv;
  void *share, *delta; /* of each row of scores, for the gradient: what its exponentials are
                        * multiplied by, and the sum of probabilities times their gradients */
  void *kept;          /* what has been drawn ahead (attention_kept.h) */
  omc_attention_strides q_at, k_at, v_at, y_at;
  int64_t mask_at[4];
  int32_t queries, keys, heads, kv_heads;
  int32_t first, tiles; /* heads before the launch's; tiles of a head, and of kernels whose blocks
                         * go on from one head to the next (attention_kept, attention_delta), heads
                         * of the launch */
  double scale, keep_scale;
  omc_gpu_seed seed;
  uint32_t drop_below, subsequence;
} omc_attention;

#ifdef OMC_GPU

#include "cuda/gpu/lane.h"

typedef OMC_STORAGE storage_t;

enum { DEEPEST = OMC_DIM > OMC_VALUE_DIM ? OMC_DIM : OMC_VALUE_DIM };

OMC_INLINE acc_t lowest() { return -(acc_t)INFINITY; }
OMC_INLINE int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

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

/* Which probabilities dropout keeps; neighbours along the keys draw together. */
struct dropper {
  uint64_t four = ~(uint64_t)0;
  uint32_t words[4] = {};

  OMC_METHOD bool keeps(const omc_attention &p, const place &at, int32_t query, int32_t key) {
    if (!OMC_DROPS) return true;
    const uint64_t e = (uint64_t)(row_of(p, at, query) * p.keys + key);
    if (e / 4 != four) omc_draws(p.seed, p.subsequence, four = e / 4, words);
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
