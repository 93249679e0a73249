/* Which keys a block of query rows leaves out because its mask hides them: variant part only.
 *
 * The mask is looked at once a run, for all heads and samples that share it. A block of keys is
 * left out where each of its weights is exactly 0 and all that they would be multiplied by is
 * finite, so that a result is that of computing them too. The weights are 0 where entries are -inf
 * or false, or so low that no score can make up for it, beside another entry of the same row:
 * where there is none, as in a row that is the lowest number throughout, all keys are alike. Keys
 * that no row of a causal block sees are not looked at, whatever they hold. */
#ifndef OMC_CPU_OPS_ATTENTION_MASK_H
#define OMC_CPU_OPS_ATTENTION_MASK_H

#include "cpu/ops/attention.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT
#include "cpu/parallel.h"
#include "cpu/rows.h"

/* Entries above OMC_SHOWN hide nothing. exp(-OMC_FAINT) is 0. */
#define OMC_SHOWN ((acc_t) - 100)
#define OMC_FAINT ((acc_t)1000)

typedef struct {
  const omc_attention_form *p;
  const void *mask;
  const storage_t *k, *v;
  acc_t *looks;   /* a row for each look: its floor, and the top of each block of keys */
  acc_t *largest; /* magnitude in k and in v of each head of keys */
} hidden_keys;

/* The largest of n > 0 entries from `at` on, +inf if that is above OMC_SHOWN or NaN. */
static acc_t top_of(const hidden_keys *h, int64_t at, int64_t n) {
  if (h->p->mask_is_bool) {
    const uint8_t *m = (const uint8_t *)h->mask + at;
    const bool hides = !m[0] && memcmp(m, m + 1, (size_t)n - 1) == 0;
    return hides ? OMC_LOWEST : (acc_t)INFINITY;
  }
  const acc_t top = row_max((const storage_t *)h->mask + at, n);
  return top <= OMC_SHOWN ? top : (acc_t)INFINITY;
}

/* Items are looks. The top of a block of keys is the largest entry that any row has in it; the
 * floor is the smallest of the rows' own largest, OMC_SHOWN at most, rows of -inf left out. */
static void look(omc_range range, void *ctx) {
  const hidden_keys *h = ctx;
  const omc_attention_form *p = h->p;
  const attention_looks n = looks_of(p);
  const int64_t *stride = p->mask_strides;
  for (int64_t item = range.begin; item < range.end; item++) {
    acc_t *floor = h->looks + item * n.length, *top = floor + 1;
    *floor = OMC_SHOWN;
    for (int64_t j = 0; j + 1 < n.length; j++) top[j] = OMC_LOWEST;
    const int64_t matrix = item / n.blocks, first = item % n.blocks * OMC_QUERY_BLOCK;
    const int64_t at = matrix / n.heads * stride[0] + matrix % n.heads * stride[1];
    const int64_t end = n.by_row ? omc_min(p->queries, first + OMC_QUERY_BLOCK) : 1;
    for (int64_t i = first; i < end; i++) {
      const int64_t seen = p->causal ? omc_min(p->keys, i + 1) : p->keys;
      acc_t best = OMC_LOWEST;
      for (int64_t key = 0, j = 0; key < seen; key += OMC_KEY_BLOCK, j++) {
        if (top[j] > OMC_SHOWN && best == OMC_SHOWN) continue;
        const int64_t entries = stride[3] ? omc_min(OMC_KEY_BLOCK, seen - key) : 1;
        const acc_t t = top_of(h, at + i * stride[2] + key * stride[3], entries);
        top[j] = t > top[j] ? t : top[j];
        best = t > OMC_SHOWN ? OMC_SHOWN : t > best ? t : best;
      }
      if (best > OMC_LOWEST && best < *floor) *floor = best;
    }
  }
}

/* The largest magnitude in some rows of n elements, NaN if there is one. */
static acc_t largest_of(const storage_t *x, int64_t rows, int64_t row_stride, int64_t n) {
  vacc_t top = vset(0);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t k = 0; k < n; k += OMC_VL)
      top = vmax(top, vabs(vld_fill(x + r * row_stride + k, n - k, 0)));
  return vhmax(top);
}

/* Items are heads of keys. */
static void measure(omc_range range, void *ctx) {
  const hidden_keys *h = ctx;
  const omc_attention_form *p = h->p;
  for (int64_t i = range.begin; i < range.end; i++) {
    const storage_t *k = h->k + head_at(&p->k, p->kv_heads, i);
    const storage_t *v = h->v + head_at(&p->v, p->kv_heads, i);
    h->largest[2 * i] = largest_of(k, p->keys, p->k.token, p->dim);
    h->largest[2 * i + 1] = largest_of(v, p->keys, p->v.token, p->value_dim);
  }
}

/* Looks at mask, keys and values. `memory` is of hidden_length acc_t. */
static hidden_keys look_for_hidden(const omc_attention_form *p, const void *mask,
                                   const storage_t *k, const storage_t *v, acc_t *memory,
                                   int threads) {
  hidden_keys h = {.p = p, .mask = mask, .k = k, .v = v};
  if (!mask) return h;
  const attention_looks n = looks_of(p);
  const int64_t looks = n.samples * n.heads * n.blocks;
  h.looks = memory;
  h.largest = memory + looks * n.length;
  omc_parallel_for(looks, omc_grain(OMC_GRAIN_ELEMENTS, OMC_QUERY_BLOCK * p->keys), threads, look,
                   &h);
  bool any = false;
  for (int64_t i = 0; i < looks; i++)
    for (int64_t j = 1; j < n.length; j++) any |= h.looks[i * n.length + j] <= OMC_SHOWN;
  if (any)
    omc_parallel_for(p->batch * p->kv_heads,
                     omc_grain(OMC_GRAIN_ELEMENTS, p->keys * (p->dim + p->value_dim)), threads,
                     measure, &h);
  else
    h.looks = NULL;
  return h;
}

/* What a block of rows of q, and of dy (NULL: none), sees of the first `cols` keys: runs of them,
 * one at least. Returns how many, and the keys in them in *seen. */
static int64_t runs_of(const hidden_keys *h, int64_t head, int64_t first, int64_t rows,
                       int64_t cols, const storage_t *q, const storage_t *dy, key_run *runs,
                       int64_t *seen) {
  const omc_attention_form *p = h->p;
  const acc_t *floor = NULL;
  acc_t margin = 0;
  if (h->looks) {
    const attention_looks n = looks_of(p);
    const int64_t sample = n.samples > 1 ? head / p->heads : 0, block = first / OMC_QUERY_BLOCK;
    const int64_t matrix = sample * n.heads + (n.heads > 1 ? head % p->heads : 0);
    floor = h->looks + (matrix * n.blocks + (n.by_row ? block : 0)) * n.length;
    /* A score is at most |scale| * dim * |q| * |k|, and a gradient of a weight dim * |dy| * |v|,
     * over 1 - p; what is not finite makes a margin that no entry keeps. */
    const acc_t *largest = h->largest + 2 * (head / (p->heads / p->kv_heads));
    const acc_t score = (acc_t)(fabs(p->scale) * (double)p->dim) * largest[0] *
                        largest_of(q, rows, p->q.token, p->dim);
    const acc_t grad = (acc_t)p->value_dim *
                       (dy ? largest_of(dy, rows, p->y.token, p->value_dim) : 1) *
                       (p->p < 1 ? (acc_t)(2 / (1 - p->p)) : 1);
    margin = OMC_FAINT + 4 * score + 0 * (grad * largest[1]);
  }
  int64_t n = 0, at = 0;
  for (int64_t key = 0, j = 1; key < cols; key += OMC_KEY_BLOCK, j++) {
    if (floor && floor[j] + margin < *floor) continue;
    const int64_t length = omc_min(OMC_KEY_BLOCK, cols - key);
    if (n > 0 && runs[n - 1].first + runs[n - 1].n == key)
      runs[n - 1].n += length;
    else
      runs[n++] = (key_run){key, length, at};
    at += length;
  }
  if (n == 0) runs[n++] = (key_run){0};
  *seen = at;
  return n;
}

#endif
#endif
