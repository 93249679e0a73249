/* What the kernels of attention share: parameters and scratch memory. */
#ifndef OMC_CPU_OPS_ATTENTION_H
#define OMC_CPU_OPS_ATTENTION_H

#include "base/alloc.h"
#include "base/int.h"
#include "cpu/gemm.h"
#include "cpu/kernel.h"
#include "ops/forms.h"

typedef struct {
  omc_attention_form form;
  int64_t parts; /* of the query blocks that share a head of keys: their dk and dv are added up */
} attention_grad_params;

/* Query rows that share one product. */
enum { OMC_QUERY_BLOCK = 64 };

/* Keys that are left out together: whole vectors of any variant, and parts of packed panels. */
enum { OMC_KEY_BLOCK = 32 };
_Static_assert(OMC_KEY_BLOCK % OMC_GEMM_PART == 0, "runs of keys begin where parts do");

/* Items of the gradient, at least: heads of keys and values, in parts where these are few. */
enum { OMC_LEAST_GRAD_ITEMS = 8 };

/* The first element of head h of B * heads. */
static inline int64_t head_at(const omc_head_strides *s, int64_t heads, int64_t h) {
  return h / heads * s->sample + h % heads * s->head;
}

/* Elements from row to row of a table with a column for each key: whole vectors of any variant, an
 * odd number of them, lest rows of a power of two of keys share few sets of a cache. */
static inline int64_t row_length(const omc_attention_form *p) {
  return (omc_ceil_div(p->keys, OMC_MAX_VL) | 1) * OMC_MAX_VL;
}
static inline int64_t n_blocks(const omc_attention_form *p) {
  return omc_ceil_div(p->queries, OMC_QUERY_BLOCK);
}
/* Sums of one part's dk and dv, transposed: a row for each of their elements. */
static inline int64_t part_length(const omc_attention_form *p) {
  return (p->dim + p->value_dim) * row_length(p);
}
/* All of those: of each part, or, where heads are not cut, of what each thread is at. */
static inline int64_t n_sums(const attention_grad_params *p, int threads) {
  const omc_attention_form *f = &p->form;
  return (p->parts > 1 ? f->batch * f->kv_heads * p->parts : threads) * part_length(f);
}

/* What of a mask is looked at apart: samples, heads and blocks of queries, one where it repeats
 * itself; a look is noted in `length` acc_t. */
typedef struct {
  bool by_row; /* else all queries see the same */
  int64_t samples, heads, blocks, length;
} attention_looks;

static inline attention_looks looks_of(const omc_attention_form *p) {
  const bool by_row = p->causal || p->mask_strides[2] != 0;
  return (attention_looks){.by_row = by_row,
                           .samples = p->mask_strides[0] ? p->batch : 1,
                           .heads = p->mask_strides[1] ? p->heads : 1,
                           .blocks = by_row ? n_blocks(p) : 1,
                           .length = 1 + omc_ceil_div(p->keys, OMC_KEY_BLOCK)};
}

/* acc_t that are known of mask, keys and values during a run. */
static inline size_t hidden_length(const omc_attention_form *p, bool has_mask) {
  const attention_looks n = looks_of(p);
  if (!has_mask) return 0;
  return (size_t)(n.samples * n.heads * n.blocks * n.length + 2 * p->batch * p->kv_heads);
}

/* Keys first .. first + n - 1, which are columns at .. of a block's tables. */
typedef struct {
  int64_t first, n, at;
} key_run;

/* Panels of a head's keys and values: what scores are products by, what y or gradients of
 * probabilities are, and what dq is. */
enum { PACKED_SCORES, PACKED_VALUES, PACKED_KEYS, N_PACKED };

/* One thread's scratch memory, offsets in bytes: `tables` of OMC_QUERY_BLOCK x row_length acc_t,
 * random words of a row, an acc_t per query row, sums of OMC_QUERY_BLOCK rows of y or dq, runs of
 * keys, panels, and the products' own. */
typedef struct {
  size_t table[2], words, rows, sums, runs, packed[N_PACKED], gemm, total;
} attention_scratch;

static inline attention_scratch scratch_of(const omc_attention_form *p, int tables) {
  const size_t size = omc_acc_size(p->dtype), length = (size_t)row_length(p);
  const size_t table = omc_round_up(OMC_QUERY_BLOCK * length * size, 64);
  const size_t scores = omc_gemm_workspace(p->dtype, OMC_QUERY_BLOCK, p->keys, p->dim, 1);
  const size_t values = omc_gemm_workspace(p->dtype, OMC_QUERY_BLOCK, p->keys, p->value_dim, 1);
  const size_t out = omc_gemm_workspace(p->dtype, OMC_QUERY_BLOCK, p->value_dim, p->keys, 1);
  const size_t dq = omc_gemm_workspace(p->dtype, OMC_QUERY_BLOCK, p->dim, p->keys, 1);
  const size_t dk = omc_gemm_workspace(p->dtype, p->dim, p->keys, OMC_QUERY_BLOCK, 1);
  const size_t dv = omc_gemm_workspace(p->dtype, p->value_dim, p->keys, OMC_QUERY_BLOCK, 1);
  const size_t forward[] = {scores, out}, backward[] = {scores, values, dq, dk, dv};
  size_t gemm = 0;
  const size_t *all = tables == 1 ? forward : backward;
  for (int i = 0; i < (tables == 1 ? 2 : 5); i++) gemm = all[i] > gemm ? all[i] : gemm;

  attention_scratch s = {.table = {0, table}};
  s.words = table * (size_t)tables;
  s.rows = s.words + (p->p > 0 ? omc_round_up(length * sizeof(uint32_t), 64) : 0);
  const int64_t widest = omc_max(p->dim, p->value_dim);
  s.sums = s.rows + OMC_QUERY_BLOCK * size;
  s.runs = s.sums + omc_round_up(omc_sums_bytes(p->dtype, OMC_QUERY_BLOCK * widest), 64);
  const size_t most_runs = length / (2 * OMC_KEY_BLOCK) + 1;
  s.packed[PACKED_SCORES] = s.runs + omc_round_up(most_runs * sizeof(key_run), 64);
  s.packed[PACKED_VALUES] =
      s.packed[PACKED_SCORES] + omc_gemm_packed_bytes(p->dtype, p->keys, p->dim);
  s.packed[PACKED_KEYS] = s.packed[PACKED_VALUES] +
                          (tables == 1 ? omc_gemm_packed_bytes(p->dtype, p->value_dim, p->keys)
                                       : omc_gemm_packed_bytes(p->dtype, p->keys, p->value_dim));
  s.gemm =
      s.packed[PACKED_KEYS] + (tables == 1 ? 0 : omc_gemm_packed_bytes(p->dtype, p->dim, p->keys));
  s.total = omc_round_up(s.gemm + gemm, 64);
  return s;
}

#endif
