/* Reading and adding by index. Scattering is deterministic and needs no atomics: threads own
 * disjoint parts of the destination, and each adds in the order of the ids. */
#include <stdatomic.h>
#include <string.h>

#include "base/int.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "cpu/strided.h"
#include "ops/forms.h"

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

/* Rows of the table that ids name: those of one outer index if all have the same ids. */
static inline int64_t n_rows(const omc_rows_form *p) {
  return p->outer_ids ? p->outer * p->dim : p->dim;
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

enum { CHUNK = 256 /* columns added up at a time */ };

typedef enum { SPLIT_OUTER, SPLIT_IDS, SPLIT_COLUMNS } split;

typedef struct scatter_job {
  const omc_rows_form *p;
  ids rows;
  const storage_t *src;
  storage_t *dst;
  const int64_t *counts; /* uses of each row, NULL: gradients are not divided */
  const int64_t *first;  /* of each row: the first id that names it */
  const int64_t *next;   /* of each id: the next one that names the same row; -1: none */
  split by;
} scatter_job;

/* Adds up, in order, what was picked from a row from id i on: columns c0 .. c1-1. */
static void add_picked(const scatter_job *j, int64_t o, int64_t i, int64_t row, int64_t c0,
                       int64_t c1) {
  const omc_rows_form *p = j->p;
  const acc_t scale = j->counts ? (acc_t)1 / (acc_t)j->counts[row] : 1;
  storage_t *dst = j->dst + (o * p->dim + row) * p->inner;
  const storage_t *src = j->src + o * p->n * p->inner;
  const int64_t *next = j->next + o * p->outer_ids;
  acc_t scratch[CHUNK];
  for (int64_t c = c0; c < c1; c += CHUNK) {
    const int64_t n = omc_min(c1 - c, CHUNK);
    acc_t *sum = sums_of(dst + c, scratch);
    if (!OMC_STORES_ACC) load_row(dst + c, sum, n);
    for (int64_t at = i; at >= 0; at = next[at]) {
      const storage_t *x = src + at * p->inner + c;
      int64_t k = 0;
      for (; k + OMC_VL <= n; k += OMC_VL)
        vstr(sum + k, vfma(vld(x + k), vset(scale), vldr(sum + k)));
      for (; k < n; k++) sum[k] += ld(x + k) * scale;
    }
    store_sums(sum, dst + c, n);
  }
}

/* What [begin, end) of the axis split by leaves of the destination is this call's. */
static void scatter_part(omc_range range, void *ctx) {
  const scatter_job *j = ctx;
  const omc_rows_form *p = j->p;
  const bool by_outer = j->by == SPLIT_OUTER, by_ids = j->by == SPLIT_IDS;
  const int64_t o0 = by_outer ? range.begin : 0, o1 = by_outer ? range.end : p->outer;
  const int64_t i0 = by_ids ? range.begin : 0, i1 = by_ids ? range.end : p->n;
  const int64_t c0 = j->by == SPLIT_COLUMNS ? range.begin * OMC_VL : 0;
  const int64_t c1 = j->by == SPLIT_COLUMNS ? omc_min(range.end * OMC_VL, p->inner) : p->inner;
  for (int64_t o = o0; o < o1; o++) {
    const int64_t *first = j->first + (p->outer_ids ? o * p->dim : 0);
    for (int64_t i = i0; i < i1; i++) {
      const int64_t row = id_at(&j->rows, o * p->outer_ids + i);
      if (first[row] == i && row != p->padding) add_picked(j, o, i, row, c0, c1);
    }
  }
}

/* Chains the ids that name the same row. */
static void link_ids(const omc_rows_form *p, const ids *rows, int64_t *first, int64_t *next) {
  for (int64_t r = 0; r < n_rows(p); r++) first[r] = -1;
  for (int64_t o = 0; o < (p->outer_ids ? p->outer : 1); o++) {
    for (int64_t i = p->n - 1; i >= 0; i--) {
      const int64_t at = o * p->n + i, row = o * p->dim + id_at(rows, at);
      next[at] = first[row];
      first[row] = i;
    }
  }
}

/* Columns keep threads evenly busy whatever the ids. */
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
    j->by = SPLIT_IDS, units = p->n;
  if (work > 0)
    omc_parallel_for(units, omc_grain(OMC_GRAIN_ELEMENTS, work / units), args->threads,
                     scatter_part, j);
}

/* Makes the result what it is added to, in[2], or zeros. */
static void begin(const omc_kernel_args *args) {
  void *to = args->out[0].data;
  const void *base = omc_in_data(args, 2);
  const int64_t numel = omc_shape_numel(&args->out[0].type->shape);
  if (!base) {
    omc_strided_fill(to, numel, sizeof(storage_t), NULL, args->threads);
  } else if (base != to) {
    const omc_box all = {.rank = 1, .dims = {numel}, .src = {1}, .dst = {1}};
    const omc_strided copy = omc_strided_of(&all, sizeof(storage_t));
    omc_strided_copy(&copy, to, base, args->threads);
  }
}

/* GatherGrad, GatherNDGrad and EmbeddingGrad: in[0] is dy. */
OMC_KERNEL(ScatterRows, args) {
  const omc_rows_form *p = args->params;
  scatter_job j = {.p = p, .src = args->in[0].data, .dst = args->out[0].data};
  OMC_TRY(omc_row_ids(args, &j.rows));
  begin(args);
  int64_t *const first = (int64_t *)(void *)((char *)args->workspace + ids_bytes(p));
  int64_t *const next = first + n_rows(p), *const counts = next + n_ids(p);
  link_ids(p, &j.rows, first, next);
  j.first = first, j.next = next;
  if (p->by_freq) {
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
  acc_t *scratch; /* a sum for each position along the axis, for each thread */
} lines_job;

static void scatter_lines(omc_range range, void *ctx) {
  const lines_job *j = ctx;
  const omc_lines_form *p = j->p;
  const int64_t step = OMC_STORES_ACC ? p->table_step : 1;
  for (int64_t line = range.begin; line < range.end; line++) {
    int64_t table, picked;
    line_at(p, line, &table, &picked);
    storage_t *dst = j->dst + table;
    acc_t *sums = sums_of(dst, j->scratch + range.thread * p->dim);
    for (int64_t i = 0; i < p->n && !OMC_STORES_ACC; i++) {
      const int64_t id = id_at(&j->at, picked + i * p->picked_step);
      sums[id] = ld(dst + id * p->table_step);
    }
    for (int64_t i = 0; i < p->n; i++) {
      const int64_t at = picked + i * p->picked_step;
      sums[id_at(&j->at, at) * step] += ld(j->src + at);
    }
    for (int64_t i = 0; i < p->n && !OMC_STORES_ACC; i++) {
      const int64_t id = id_at(&j->at, picked + i * p->picked_step);
      st(dst + id * p->table_step, sums[id]);
    }
  }
}

OMC_KERNEL(GatherElementsGrad, args) {
  const omc_lines_form *p = args->params;
  lines_job j = {
      .p = p, .src = args->in[0].data, .dst = args->out[0].data, .scratch = args->workspace};
  OMC_TRY(line_ids_of(args, p, &j.at));
  begin(args);
  if (p->n > 0)
    omc_parallel_for(p->count, omc_grain(OMC_GRAIN_ELEMENTS, p->n), args->threads, scatter_lines,
                     &j);
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

static void check_range(omc_range range, void *ctx) {
  check_job *j = ctx;
  if (find_bad(j, range.begin, range.end) < range.end)
    atomic_store_explicit(&j->bad, true, memory_order_relaxed);
}

static omc_status bad_id(const omc_kernel_args *args, omc_status status, int64_t id,
                         int64_t position, int32_t axis, int64_t dim) {
  return omc_fail(status,
                  "index %lld is out of bounds for dimension %d with size %lld ('%s', %lld)",
                  (long long)id, axis, (long long)dim, args->node, (long long)position);
}

omc_status omc_ids_of(const omc_kernel_args *args, int64_t n, int32_t axis, int64_t dim,
                      bool negative, omc_status outside, ids *out) {
  const omc_tensor *t = &args->in[1];
  *out = (ids){t->data, t->type->dtype == OMC_I64, dim};
  check_job j = {out, negative, false};
  omc_parallel_for(n, omc_grain(OMC_GRAIN_ELEMENTS, 1), args->threads, check_range, &j);
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

enum { AHEAD = 16 /* rows that are asked for before their turn */, LINE = 64, MOST_ASKED = 512 };

/* No hardware foresees where the next row lies; that a long one goes on it does. */
static inline void ask_for(const void *row, size_t bytes) {
  for (size_t at = 0; at < bytes && at < MOST_ASKED; at += LINE)
    __builtin_prefetch((const char *)row + at);
}

static void gather_rows(omc_range range, void *ctx) {
  const gather_job *j = ctx;
  const omc_rows_form *p = j->params;
  int64_t o = range.begin / p->n, i = range.begin % p->n;
  for (int64_t r = range.begin; r < range.end; r++) {
    if (i + AHEAD < p->n) {
      const int64_t row = o * p->dim + id_at(&j->at, o * p->outer_ids + i + AHEAD);
      ask_for(j->src + (size_t)row * j->bytes, j->bytes);
    }
    const int64_t row = o * p->dim + id_at(&j->at, o * p->outer_ids + i);
    copy_bytes(j->dst + (size_t)r * j->bytes, j->src + (size_t)row * j->bytes, j->bytes);
    if (++i == p->n) i = 0, o++;
  }
}

OMC_KERNEL_ANY(GatherRows, args) {
  const omc_rows_form *p = args->params;
  gather_job j = {.params = p,
                  .src = args->in[0].data,
                  .dst = args->out[0].data,
                  .bytes = (size_t)p->inner * omc_dtype_size(args->in[0].type->dtype)};
  OMC_TRY(omc_row_ids(args, &j.at));
  if (p->inner > 0)
    omc_parallel_for(p->outer * p->n, omc_grain(OMC_GRAIN_ELEMENTS, p->inner), args->threads,
                     gather_rows, &j);
  return OMC_OK;
}

static void gather_lines(omc_range range, void *ctx) {
  const gather_job *j = ctx;
  const omc_lines_form *p = j->params;
  for (int64_t line = range.begin; line < range.end; line++) {
    int64_t table, picked;
    line_at(p, line, &table, &picked);
    for (int64_t i = 0; i < p->n; i++, picked += p->picked_step) {
      const int64_t from = table + id_at(&j->at, picked) * p->table_step;
      copy_bytes(j->dst + (size_t)picked * j->bytes, j->src + (size_t)from * j->bytes, j->bytes);
    }
  }
}

OMC_KERNEL_ANY(GatherElements, args) {
  const omc_lines_form *p = args->params;
  gather_job j = {.params = p,
                  .src = args->in[0].data,
                  .dst = args->out[0].data,
                  .bytes = omc_dtype_size(args->in[0].type->dtype)};
  OMC_TRY(line_ids_of(args, p, &j.at));
  if (p->n > 0)
    omc_parallel_for(p->count, omc_grain(OMC_GRAIN_ELEMENTS, p->n), args->threads, gather_lines,
                     &j);
  return OMC_OK;
}

static size_t gather_workspace(const omc_node *node, const void *params, int threads) {
  (void)node, (void)threads;
  return ids_bytes(params);
}

static size_t scatter_workspace(const omc_node *node, const void *params, int threads) {
  (void)node, (void)threads;
  const omc_rows_form *p = params;
  const int64_t links = n_rows(p) + n_ids(p) + (p->by_freq ? p->dim : 0);
  return ids_bytes(p) + (size_t)links * sizeof(int64_t);
}

static size_t lines_workspace(const omc_node *node, const void *params, int threads) {
  const omc_lines_form *p = params;
  return omc_sums_bytes(omc_in(node, 0)->type.dtype, p->dim * threads);
}

/* An op that picks, and its gradient. */
#define PICK(name, id, form, pick, scatter, workspace_, grad_workspace)                        \
  static omc_status params_##id(const omc_node *node, omc_arena *arena, void *params) {        \
    (void)arena;                                                                               \
    return omc_##id##_form_of(node, &omc_in(node, 0)->type.shape, params);                     \
  }                                                                                            \
  static omc_status params_##id##_grad(const omc_node *node, omc_arena *arena, void *params) { \
    (void)arena;                                                                               \
    return omc_##id##_form_of(node, &omc_out(node, 0)->type.shape, params);                    \
  }                                                                                            \
  OMC_CPU_OP(name, pick, OMC_PARAMS(form, params_##id), .workspace = workspace_)               \
  OMC_CPU_OP(name##Grad, scatter, OMC_PARAMS(form, params_##id##_grad), .workspace = grad_workspace)
#define PICK_ROWS(name, id) \
  PICK(name, id, omc_rows_form, GatherRows, ScatterRows, gather_workspace, scatter_workspace)
PICK_ROWS(Gather, gather)
PICK_ROWS(GatherND, gather_nd)
PICK_ROWS(Embedding, embedding)
PICK(GatherElements, gather_elements, omc_lines_form, GatherElements, GatherElementsGrad, NULL,
     lines_workspace)

#endif
