/* Reading and adding by index. Scattering is deterministic and needs no atomics: threads own
 * disjoint parts of the destination, and each adds in the order of the ids. */
#include <stdatomic.h>
#include <string.h>

#include "base/int.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "cpu/strided.h"
#include "ops/forms.h"

#define GRAIN 16384 /* elements that are worth a thread */

/* Indices into 0 .. dim-1, checked before any is used. */
typedef struct ids {
  const void *data;
  bool wide; /* i64, else i32 */
  int64_t dim;
} ids;

static inline int64_t id_raw(const ids *t, int64_t i) {
  return t->wide ? ((const int64_t *)t->data)[i] : ((const int32_t *)t->data)[i];
}

static inline int64_t id_at(const ids *t, int64_t i) {
  const int64_t id = id_raw(t, i);
  return id < 0 ? id + t->dim : id;
}

/* The n ids of args->in[1], all checked, from -dim (from 0 unless `negative`) to dim-1. `axis` is
 * what a failure calls the dimension; PyTorch counts those that are indexed alone. `outside`
 * is the failure that names the first other, OMC_EINDEX or, as PyTorch's gather, OMC_EBOUNDS. */
omc_status omc_ids_of(const omc_kernel_args *args, int64_t n, int32_t axis, int64_t dim,
                      bool negative, omc_status outside, ids *out) OMC_MUST_USE;

static inline omc_status line_ids_of(const omc_kernel_args *args, const omc_lines_form *p,
                                     ids *out) {
  return omc_ids_of(args, p->n * p->count, p->axis, p->dim, p->negative,
                    p->negative ? OMC_EINDEX : OMC_EBOUNDS, out);
}

/* Those ids as rows. For GatherND they are worked out in the workspace. */
omc_status omc_row_ids(const omc_kernel_args *args, ids *out) OMC_MUST_USE;

static inline int64_t n_ids(const omc_rows_form *p) {
  return p->outer_ids ? p->outer * p->n : p->n;
}

static inline size_t ids_bytes(const omc_rows_form *p) {
  return p->depth ? omc_round_up((size_t)n_ids(p) * sizeof(int64_t), 64) : 0;
}

/* Where line number `line` starts. */
static inline void line_at(const omc_lines_form *p, int64_t line, int64_t *table, int64_t *picked) {
  *table = *picked = 0;
  for (int32_t i = p->rank - 1; i >= 0; i--) {
    const int64_t at = line % p->dims[i];
    line /= p->dims[i];
    *table += at * p->table[i];
    *picked += at * p->picked[i];
  }
}

#ifdef OMC_VARIANT
#if OMC_IS_FLOAT

OMC_INLINE void add_row(storage_t *dst, const storage_t *src, int64_t n, acc_t scale) {
  int64_t k = 0;
  for (; k + OMC_VL <= n; k += OMC_VL) vst(dst + k, vfma(vld(src + k), vset(scale), vld(dst + k)));
  for (; k < n; k++) st(dst + k, ld(dst + k) + ld(src + k) * scale);
}

typedef enum { SPLIT_OUTER, SPLIT_ROWS, SPLIT_COLUMNS } split;

typedef struct scatter_job {
  const omc_rows_form *p;
  ids rows;
  const storage_t *src;
  storage_t *dst;
  const int64_t *counts; /* uses of each row, NULL: gradients are not divided */
  split by;
} scatter_job;

/* What [begin, end) of the axis split by leaves of the destination is this call's. */
static void scatter_part(int64_t begin, int64_t end, int thread, void *ctx) {
  (void)thread;
  const scatter_job *j = ctx;
  const omc_rows_form *p = j->p;
  const bool by_outer = j->by == SPLIT_OUTER, by_rows = j->by == SPLIT_ROWS;
  const int64_t o0 = by_outer ? begin : 0, o1 = by_outer ? end : p->outer;
  const int64_t r0 = by_rows ? begin : 0, r1 = by_rows ? end : p->dim;
  const int64_t c0 = j->by == SPLIT_COLUMNS ? begin * OMC_VL : 0;
  const int64_t c1 = j->by == SPLIT_COLUMNS && end * OMC_VL < p->inner ? end * OMC_VL : p->inner;
  for (int64_t o = o0; o < o1; o++) {
    for (int64_t i = 0; i < p->n; i++) {
      const int64_t row = id_at(&j->rows, o * p->outer_ids + i);
      if (row < r0 || row >= r1 || row == p->padding) continue;
      const acc_t scale = j->counts ? (acc_t)1 / (acc_t)j->counts[row] : 1;
      add_row(j->dst + (o * p->dim + row) * p->inner + c0, j->src + (o * p->n + i) * p->inner + c0,
              c1 - c0, scale);
    }
  }
}

/* Columns keep threads evenly busy whatever the ids; rows are for rows too short to divide. */
static void scatter(const omc_kernel_args *args, scatter_job *j) {
  const omc_rows_form *p = j->p;
  const int64_t threads = args->threads, blocks = omc_ceil_div(p->inner, OMC_VL);
  const int64_t work = p->outer * p->n * p->inner;
  int64_t units;
  if (p->outer >= threads)
    j->by = SPLIT_OUTER, units = p->outer;
  else if (blocks >= 2 * threads)
    j->by = SPLIT_COLUMNS, units = blocks;
  else
    j->by = SPLIT_ROWS, units = p->dim;
  if (work > 0) omc_parallel_for(units, 1 + units * GRAIN / work, args->threads, scatter_part, j);
}

/* GatherGrad, GatherNDGrad and EmbeddingGrad: in[0] is dy, in[2] what the result is added to. */
OMC_KERNEL(ScatterRows) {
  const omc_rows_form *p = args->params;
  scatter_job j = {.p = p, .src = args->in[0].data, .dst = args->out[0].data};
  OMC_TRY(omc_row_ids(args, &j.rows));
  const void *base = omc_in_data(args, 2);
  const int64_t numel = p->outer * p->dim * p->inner;
  if (!base) {
    omc_strided_fill(j.dst, numel, sizeof(storage_t), NULL, args->threads);
  } else if (base != j.dst) {
    omc_strided all = {.rank = 1, .dims = {numel}, .src = {1}, .dst = {1}};
    omc_strided_prepare(&all, sizeof(storage_t));
    omc_strided_copy(&all, j.dst, base, args->threads);
  }
  if (p->by_freq) {
    int64_t *counts = (int64_t *)((char *)args->workspace + ids_bytes(p));
    memset(counts, 0, (size_t)p->dim * sizeof *counts);
    for (int64_t i = 0; i < n_ids(p); i++) counts[id_at(&j.rows, i)]++;
    j.counts = counts;
  }
  scatter(args, &j);
  return OMC_OK;
}

typedef struct lines_job {
  const omc_lines_form *p;
  ids at;
  const storage_t *src;
  storage_t *dst;
} lines_job;

static void scatter_lines(int64_t begin, int64_t end, int thread, void *ctx) {
  (void)thread;
  const lines_job *j = ctx;
  const omc_lines_form *p = j->p;
  for (int64_t line = begin; line < end; line++) {
    int64_t table, picked;
    line_at(p, line, &table, &picked);
    for (int64_t i = 0; i < p->n; i++, picked += p->picked_step) {
      storage_t *d = j->dst + table + id_at(&j->at, picked) * p->table_step;
      st(d, ld(d) + ld(j->src + picked));
    }
  }
}

OMC_KERNEL(GatherElementsGrad) {
  const omc_lines_form *p = args->params;
  const omc_type *out = args->out[0].type;
  lines_job j = {.p = p, .src = args->in[0].data, .dst = args->out[0].data};
  OMC_TRY(line_ids_of(args, p, &j.at));
  omc_strided_fill(j.dst, omc_shape_numel(&out->shape), sizeof(storage_t), NULL, args->threads);
  if (p->n > 0) omc_parallel_for(p->count, 1 + GRAIN / p->n, args->threads, scatter_lines, &j);
  return OMC_OK;
}

#endif
#endif

#ifndef OMC_VARIANT

OMC_KERNELS(ScatterRows)
OMC_KERNELS(GatherElementsGrad)

/* ---- ids ---- */

typedef struct check_job {
  const ids *t;
  bool negative;
  atomic_bool bad;
} check_job;

/* The first position from `begin` whose id is outside, or `end`. */
static int64_t find_bad(const check_job *j, int64_t begin, int64_t end) {
  const int64_t low = j->negative ? -j->t->dim : 0;
  for (int64_t i = begin; i < end; i++) {
    const int64_t id = id_raw(j->t, i);
    if (id < low || id >= j->t->dim) return i;
  }
  return end;
}

static void check_range(int64_t begin, int64_t end, int thread, void *ctx) {
  (void)thread;
  check_job *j = ctx;
  if (find_bad(j, begin, end) < end) atomic_store_explicit(&j->bad, true, memory_order_relaxed);
}

static omc_status bad_id(const omc_kernel_args *args, omc_status status, int64_t id,
                         int64_t position, int32_t axis, int64_t dim) {
  return omc_fail(
      status, "index %lld is out of bounds for dimension %d with size %lld ('%s', %lld)",
      (long long)id, axis, (long long)dim, args->node ? args->node : "", (long long)position);
}

omc_status omc_ids_of(const omc_kernel_args *args, int64_t n, int32_t axis, int64_t dim,
                      bool negative, omc_status outside, ids *out) {
  const omc_tensor *t = &args->in[1];
  *out = (ids){t->data, t->type->dtype == OMC_I64, dim};
  check_job j = {out, negative, false};
  omc_parallel_for(n, GRAIN, args->threads, check_range, &j);
  if (!atomic_load(&j.bad)) return OMC_OK;
  const int64_t i = find_bad(&j, 0, n);
  return bad_id(args, outside, id_raw(out, i), i, axis, dim);
}

omc_status omc_row_ids(const omc_kernel_args *args, ids *out) {
  const omc_rows_form *p = args->params;
  const int64_t n = n_ids(p);
  if (!p->depth) return omc_ids_of(args, n, 0, p->dim, p->negative, OMC_EINDEX, out);
  const ids parts = {args->in[1].data, args->in[1].type->dtype == OMC_I64, 0};
  int64_t *rows = args->workspace;
  for (int64_t i = 0; i < n; i++) {
    rows[i] = 0;
    for (int32_t d = 0; d < p->depth; d++) {
      const int64_t at = i * p->depth + d, id = id_raw(&parts, at), dim = p->dims[d];
      if (id < -dim || id >= dim) return bad_id(args, OMC_EINDEX, id, at, d, dim);
      rows[i] = rows[i] * dim + (id < 0 ? id + dim : id);
    }
  }
  *out = (ids){rows, true, p->dim};
  return OMC_OK;
}

/* ---- kernels that move bytes ---- */

static inline void copy_bytes(char *dst, const char *src, size_t n) {
  if (n == 4)
    memcpy(dst, src, 4);
  else if (n == 8)
    memcpy(dst, src, 8);
  else
    memcpy(dst, src, n);
}

typedef struct gather_job {
  const void *params;
  ids at;
  const char *src;
  char *dst;
  size_t bytes; /* of a row or an element */
} gather_job;

static void gather_rows(int64_t begin, int64_t end, int thread, void *ctx) {
  (void)thread;
  const gather_job *j = ctx;
  const omc_rows_form *p = j->params;
  int64_t o = begin / p->n, i = begin % p->n;
  for (int64_t r = begin; r < end; r++) {
    const int64_t row = o * p->dim + id_at(&j->at, o * p->outer_ids + i);
    copy_bytes(j->dst + (size_t)r * j->bytes, j->src + (size_t)row * j->bytes, j->bytes);
    if (++i == p->n) i = 0, o++;
  }
}

OMC_KERNEL_ANY(GatherRows) {
  const omc_rows_form *p = args->params;
  gather_job j = {.params = p,
                  .src = args->in[0].data,
                  .dst = args->out[0].data,
                  .bytes = (size_t)p->inner * omc_dtype_size(args->in[0].type->dtype)};
  OMC_TRY(omc_row_ids(args, &j.at));
  if (p->inner > 0)
    omc_parallel_for(p->outer * p->n, 1 + GRAIN / p->inner, args->threads, gather_rows, &j);
  return OMC_OK;
}

static void gather_lines(int64_t begin, int64_t end, int thread, void *ctx) {
  (void)thread;
  const gather_job *j = ctx;
  const omc_lines_form *p = j->params;
  for (int64_t line = begin; line < end; line++) {
    int64_t table, picked;
    line_at(p, line, &table, &picked);
    for (int64_t i = 0; i < p->n; i++, picked += p->picked_step) {
      const int64_t from = table + id_at(&j->at, picked) * p->table_step;
      copy_bytes(j->dst + (size_t)picked * j->bytes, j->src + (size_t)from * j->bytes, j->bytes);
    }
  }
}

OMC_KERNEL_ANY(GatherElements) {
  const omc_lines_form *p = args->params;
  gather_job j = {.params = p,
                  .src = args->in[0].data,
                  .dst = args->out[0].data,
                  .bytes = omc_dtype_size(args->in[0].type->dtype)};
  OMC_TRY(line_ids_of(args, p, &j.at));
  if (p->n > 0) omc_parallel_for(p->count, 1 + GRAIN / p->n, args->threads, gather_lines, &j);
  return OMC_OK;
}

static size_t rows_workspace(const omc_node *node, const void *params, int threads) {
  (void)node, (void)threads;
  const omc_rows_form *p = params;
  return ids_bytes(p) + (p->by_freq ? (size_t)p->dim * sizeof(int64_t) : 0);
}

/* An op that picks, and its gradient. */
#define PICK(name, id, form, pick, scatter, ...)                                               \
  static omc_status params_##id(const omc_node *node, omc_arena *arena, void *params) {        \
    (void)arena;                                                                               \
    return omc_##id##_form_of(node, &omc_in(node, 0)->type.shape, params);                     \
  }                                                                                            \
  static omc_status params_##id##_grad(const omc_node *node, omc_arena *arena, void *params) { \
    (void)arena;                                                                               \
    return omc_##id##_form_of(node, &omc_out(node, 0)->type.shape, params);                    \
  }                                                                                            \
  OMC_CPU_OP(name, pick, OMC_PARAMS(form, params_##id), __VA_ARGS__)                           \
  OMC_CPU_OP(name##Grad, scatter, OMC_PARAMS(form, params_##id##_grad), __VA_ARGS__)
#define PICK_ROWS(name, id) \
  PICK(name, id, omc_rows_form, GatherRows, ScatterRows, .workspace = rows_workspace)
PICK_ROWS(Gather, gather)
PICK_ROWS(GatherND, gather_nd)
PICK_ROWS(Embedding, embedding)
PICK(GatherElements, gather_elements, omc_lines_form, GatherElements, GatherElementsGrad)

#endif
