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

/* Ids number picked + i * run_step + k * step, for i < runs and k < n. Each names the element
 * table + k * beside + id * table_step. All of that `lines` times, the next picked_next and
 * table_next further on. */
typedef struct picks {
  int64_t picked, runs, run_step, n, step;
  int64_t table, table_step, beside;
  int64_t lines, picked_next, table_next;
} picks;

/* How many lines may be picked from together: of one the ids lie one after the other, else those of
 * lines beside it are taken in the order in which they lie. */
static inline int64_t most_beside(const omc_lines_form *p) {
  enum { MOST = 16 };
  return p->rank == 0 || p->picked_step == 1 ? 1 : omc_min(p->dims[p->rank - 1], MOST);
}

/* Of the lines from `line` on and before `end`, as many as may be; *n: how many. */
static inline picks picks_of(const omc_lines_form *p, int64_t line, int64_t end, int64_t *n) {
  picks all = {
      .runs = 1, .n = p->n, .step = p->picked_step, .table_step = p->table_step, .lines = 1};
  const int32_t last = p->rank - 1;
  const int64_t most = most_beside(p);
  *n = p->rank ? omc_min(end - line, p->dims[last] - line % p->dims[last]) : 1;
  if (most > 1) {
    *n = omc_min(*n, most);
    all.runs = p->n, all.run_step = p->picked_step;
    all.n = *n, all.step = p->picked[last], all.beside = p->table[last];
  } else if (p->rank) {
    all.lines = *n, all.picked_next = p->picked[last], all.table_next = p->table[last];
  }
  for (int32_t i = last; i >= 0; i--) {
    const int64_t at = line % p->dims[i];
    line /= p->dims[i];
    all.table += at * p->table[i];
    all.picked += at * p->picked[i];
  }
  return all;
}

/* Rows of few columns are added up one element after the other, all rows of an outer index in one
 * go: nothing is then known of which ids name the same row. */
static inline bool by_elements(const omc_rows_form *p) {
  enum { FEW_COLUMNS = 8, MANY_OUTER = 8 };
  return p->inner <= FEW_COLUMNS && p->outer >= MANY_OUTER && !p->by_freq;
}

#ifdef OMC_VARIANT

/* Makes the result what is added to, or zeros. */
static void begin(const omc_kernel_args *args, const void *base) {
  void *to = args->out[0].data;
  const int64_t numel = omc_shape_numel(&args->out[0].type->shape);
  if (!base) {
    omc_strided_fill(to, numel, sizeof(storage_t), NULL, args->threads);
  } else if (base != to) {
    const omc_box all = {.rank = 1, .dims = {numel}, .src = {1}, .dst = {1}};
    const omc_strided copy = omc_strided_of(&all, sizeof(storage_t));
    omc_strided_copy(&copy, to, base, args->threads);
  }
}

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
  acc_t *scratch; /* by elements: the sums of an outer index, for each thread */
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

/* For the outer indices of the range. */
static void scatter_elements(omc_range range, void *ctx) {
  const scatter_job *j = ctx;
  const omc_rows_form *p = j->p;
  const ids rows = j->rows;
  const int64_t n = p->n, inner = p->inner, padding = p->padding, elements = p->dim * inner;
  for (int64_t o = range.begin; o < range.end; o++) {
    const int64_t first_id = o * p->outer_ids;
    const storage_t *src = j->src + o * n * inner;
    storage_t *const dst = j->dst + o * elements;
    acc_t *const sums = sums_of(dst, j->scratch + range.thread * elements);
    if (!OMC_STORES_ACC) load_row(dst, sums, elements);
    for (int64_t i = 0; i < n; i++, src += inner) {
      const int64_t row = id_at(&rows, first_id + i);
      if (row == padding) continue;
      if (inner == 1)
        sums[row] += ld(src);
      else
        for (int64_t c = 0; c < inner; c++) sums[row * inner + c] += ld(src + c);
    }
    store_sums(sums, dst, elements);
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

/* GatherGrad, GatherNDGrad and EmbeddingGrad: in[0] is dy. */
OMC_KERNEL(ScatterRows, args) {
  const omc_rows_form *p = args->params;
  scatter_job j = {.p = p, .src = args->in[0].data, .dst = args->out[0].data};
  OMC_TRY(omc_row_ids(args, &j.rows));
  begin(args, omc_in_data(args, 2));
  if (p->inner == 0) return OMC_OK;
  void *const scratch = (char *)args->workspace + ids_bytes(p);
  if (by_elements(p)) {
    j.scratch = scratch;
    omc_parallel_for(p->outer, omc_grain(OMC_GRAIN_ELEMENTS, (p->n + p->dim) * p->inner),
                     args->threads, scatter_elements, &j);
    return OMC_OK;
  }
  int64_t *const first = scratch;
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

#endif

typedef struct lines_job {
  const omc_lines_form *p;
  ids at;
  const storage_t *src;
  storage_t *dst;
  acc_t *scratch; /* sums for each position along the axis of lines that are picked together, for
                     each thread */
} lines_job;

typedef enum { FETCH, JOIN, STORE } lines_step;

/* Of equal ones the first, and NaN if one of them is. */
OMC_INLINE acc_t joined(acc_t a, acc_t b, omc_join join) {
  if (join == OMC_JOIN_SUM) return a + b;
  if (join == OMC_JOIN_PRODUCT) return a * b;
  const bool beyond = join == OMC_JOIN_MOST ? b > a : b < a;
  return beyond || OMC_IS_NAN(b) ? b : a;
}

/* One step of adding up: sums are fetched from what is there, added to, and stored. */
OMC_INLINE void step_lines(const lines_job *j, picks all, int64_t beside, acc_t *sums,
                           lines_step step, omc_join join) {
  const ids at = j->at;
  const storage_t *const src = j->src;
  storage_t *const dst = j->dst + all.table;
  const int64_t of_id = OMC_STORES_ACC ? all.table_step : beside;
  const int64_t of_line = OMC_STORES_ACC ? all.beside : beside > 1;
  for (int64_t i = 0; i < all.runs; i++) {
    for (int64_t k = 0, from = all.picked + i * all.run_step; k < all.n; k++, from += all.step) {
      const int64_t id = id_at(&at, from);
      acc_t *const sum = sums + id * of_id + k * of_line;
      if (step == FETCH) *sum = ld(dst + id * all.table_step + k * all.beside);
      if (step == JOIN) *sum = joined(*sum, ld(src + from), join);
      if (step == STORE) st(dst + id * all.table_step + k * all.beside, *sum);
    }
  }
}

OMC_INLINE void scatter_lines(omc_range range, const lines_job *j, omc_join join) {
  const omc_lines_form *p = j->p;
  enum { SPARSE = 8 /* places to an id from which on only those that are named are converted */ };
  acc_t *const scratch = j->scratch + range.thread * p->dim * most_beside(p);
  for (int64_t line = range.begin, lines; line < range.end; line += lines) {
    picks all = picks_of(p, line, range.end, &lines);
    const int64_t beside = lines / all.lines;
    const bool whole = beside == 1 && all.table_step == 1 && p->dim <= SPARSE * p->n;
    for (int64_t i = 0; i < all.lines; i++) {
      storage_t *const dst = j->dst + all.table;
      acc_t *const sums = sums_of(dst, scratch);
      if (!OMC_STORES_ACC && whole)
        load_row(dst, sums, p->dim);
      else if (!OMC_STORES_ACC)
        step_lines(j, all, beside, sums, FETCH, join);
      step_lines(j, all, beside, sums, JOIN, join);
      if (whole)
        store_sums(sums, dst, p->dim);
      else if (!OMC_STORES_ACC)
        step_lines(j, all, beside, sums, STORE, join);
      all.picked += all.picked_next, all.table += all.table_next;
    }
  }
}

static void add_lines(omc_range range, void *ctx) { scatter_lines(range, ctx, OMC_JOIN_SUM); }
static void multiply_lines(omc_range range, void *ctx) {
  scatter_lines(range, ctx, OMC_JOIN_PRODUCT);
}
static void raise_lines(omc_range range, void *ctx) { scatter_lines(range, ctx, OMC_JOIN_MOST); }
static void lower_lines(omc_range range, void *ctx) { scatter_lines(range, ctx, OMC_JOIN_LEAST); }

static omc_status put_in(const omc_kernel_args *args, const void *base, const void *src) {
  static const omc_range_fn fns[] = {[OMC_JOIN_SUM] = add_lines,
                                     [OMC_JOIN_PRODUCT] = multiply_lines,
                                     [OMC_JOIN_MOST] = raise_lines,
                                     [OMC_JOIN_LEAST] = lower_lines};
  const omc_lines_form *p = args->params;
  lines_job j = {.p = p, .src = src, .dst = args->out[0].data, .scratch = args->workspace};
  OMC_TRY(line_ids_of(args, p, &j.at));
  begin(args, base);
  if (p->n > 0)
    omc_parallel_for(p->count, omc_grain(OMC_GRAIN_ELEMENTS, p->n), args->threads, fns[p->join],
                     &j);
  return OMC_OK;
}

OMC_KERNEL(GatherElementsGrad, args) {
  return put_in(args, omc_in_data(args, 2), args->in[0].data);
}
OMC_KERNEL(ScatterElements, args) { return put_in(args, args->in[0].data, args->in[2].data); }

#endif

#ifndef OMC_VARIANT

OMC_KERNELS(ScatterRows)
OMC_KERNELS_NUM(GatherElementsGrad)
OMC_KERNELS_NUM(ScatterElements)

/* ---- ids ---- */

typedef struct check_job {
  const ids *t;
  bool negative;
  atomic_bool bad;
} check_job;

static int64_t lowest_id(const check_job *j) { return j->negative ? -j->t->dim : 0; }

/* The first position of n whose id is outside; n: there is none. */
static int64_t find_bad(const check_job *j, int64_t n) {
  int64_t i = 0;
  while (i < n && id_raw(j->t, i) >= lowest_id(j) && id_raw(j->t, i) < j->t->dim) i++;
  return i;
}

/* Whether an id may be outside: the sign of id - low or of high - id is set then, and where a table
 * without elements has so many rows that a difference is no int64. */
static inline bool any_outside(omc_range range, const check_job *j, bool wide) {
  const uint64_t low = (uint64_t)lowest_id(j), high = (uint64_t)(j->t->dim - 1);
  const ids of = {j->t->data, wide, j->t->dim};
  uint64_t signs = 0;
  for (int64_t i = range.begin; i < range.end; i++)
    signs |= ((uint64_t)id_raw(&of, i) - low) | (high - (uint64_t)id_raw(&of, i));
  return signs >> 63;
}

static void check_range(omc_range range, void *ctx) {
  check_job *j = ctx;
  if (j->t->wide ? any_outside(range, j, true) : any_outside(range, j, false))
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
  const int64_t i = find_bad(&j, n);
  return i == n ? OMC_OK : bad_id(args, outside, id_raw(out, i), i, axis, dim);
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

/* dst[at] is what the id at `at` names of src. */
typedef void (*pick_fn)(void *dst, const void *src, const ids *at, const picks *all);

#define PICK_LOOP(index)                                                       \
  for (int64_t line_ = 0; line_ < p.lines; line_++)                            \
    for (int64_t i_ = 0; i_ < p.runs; i_++) {                                  \
      int64_t at_ = p.picked + line_ * p.picked_next + i_ * p.run_step;        \
      const element *from_ = from + p.table + line_ * p.table_next;            \
      for (int64_t k_ = 0; k_ < p.n; k_++, at_ += p.step, from_ += p.beside) { \
        const int64_t id_ = (index)[at_];                                      \
        to[at_] = from_[(id_ < 0 ? id_ + dim : id_) * p.table_step];           \
      }                                                                        \
    }
#define PICKER(T)                                                                        \
  static void pick_##T(void *dst, const void *src, const ids *of, const picks *all) {    \
    typedef T element __attribute__((may_alias, aligned(1))); /* a row of several too */ \
    const picks p = *all;                                                                \
    const int64_t dim = of->dim;                                                         \
    const int64_t *const wide = of->data;                                                \
    const int32_t *const narrow = of->data;                                              \
    element *const to = dst;                                                             \
    const element *const from = src;                                                     \
    if (of->wide)                                                                        \
      PICK_LOOP(wide)                                                                    \
    else                                                                                 \
      PICK_LOOP(narrow)                                                                  \
  }
PICKER(uint8_t)
PICKER(uint16_t)
PICKER(uint32_t)
PICKER(uint64_t)

/* For elements of so many bytes; NULL: none has so many. */
static pick_fn picker_of(size_t bytes) {
  static const pick_fn pickers[] = {
      [1] = pick_uint8_t, [2] = pick_uint16_t, [4] = pick_uint32_t, [8] = pick_uint64_t};
  return bytes < sizeof pickers / sizeof *pickers ? pickers[bytes] : NULL;
}

typedef struct gather_job {
  const void *params;
  ids at;
  const char *src;
  char *dst;
  size_t bytes; /* of a row or an element */
  pick_fn pick; /* NULL: rows are longer */
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
    memcpy(j->dst + (size_t)r * j->bytes, j->src + (size_t)row * j->bytes, j->bytes);
    if (++i == p->n) i = 0, o++;
  }
}

/* Rows that are as long as an element. */
static void gather_short_rows(omc_range range, void *ctx) {
  const gather_job *j = ctx;
  const omc_rows_form *p = j->params;
  for (int64_t r = range.begin, n; r < range.end; r += n) {
    const int64_t o = r / p->n, i = r % p->n, at = o * p->outer_ids + i;
    n = omc_min(range.end - r, p->n - i);
    picks all = {.runs = 1, .step = 1, .table_step = 1, .lines = 1};
    all.picked = at, all.n = n, all.table = o * p->dim;
    j->pick(j->dst + (r - at) * (int64_t)j->bytes, j->src, &j->at, &all);
  }
}

OMC_KERNEL_ANY(GatherRows, args) {
  const omc_rows_form *p = args->params;
  gather_job j = {.params = p,
                  .src = args->in[0].data,
                  .dst = args->out[0].data,
                  .bytes = (size_t)p->inner * omc_dtype_size(args->in[0].type->dtype)};
  OMC_TRY(omc_row_ids(args, &j.at));
  j.pick = picker_of(j.bytes);
  if (p->inner > 0)
    omc_parallel_for(p->outer * p->n, omc_grain(OMC_GRAIN_ELEMENTS, p->inner), args->threads,
                     j.pick ? gather_short_rows : gather_rows, &j);
  return OMC_OK;
}

static void gather_lines(omc_range range, void *ctx) {
  const gather_job *j = ctx;
  for (int64_t line = range.begin, lines; line < range.end; line += lines) {
    const picks all = picks_of(j->params, line, range.end, &lines);
    j->pick(j->dst, j->src, &j->at, &all);
  }
}

OMC_KERNEL_ANY(GatherElements, args) {
  const omc_lines_form *p = args->params;
  gather_job j = {.params = p,
                  .src = args->in[0].data,
                  .dst = args->out[0].data,
                  .bytes = omc_dtype_size(args->in[0].type->dtype)};
  OMC_TRY(line_ids_of(args, p, &j.at));
  j.pick = picker_of(j.bytes);
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
  const omc_rows_form *p = params;
  if (p->inner == 0) return ids_bytes(p);
  if (by_elements(p))
    return ids_bytes(p) + omc_sums_bytes(omc_in(node, 0)->type.dtype, p->dim * p->inner * threads);
  const int64_t links = n_rows(p) + n_ids(p) + (p->by_freq ? p->dim : 0);
  return ids_bytes(p) + (size_t)links * sizeof(int64_t);
}

static size_t lines_workspace(const omc_node *node, const void *params, int threads) {
  const omc_lines_form *p = params;
  return omc_sums_bytes(omc_in(node, 0)->type.dtype, p->dim * most_beside(p) * threads);
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
OMC_CPU_OP(ScatterElements, ScatterElements, OMC_PARAMS(omc_lines_form, params_gather_elements),
           .workspace = lines_workspace)

#endif
