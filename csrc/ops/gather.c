/* Ops that read a table by index, and their gradients, which add by index.
 *
 * Gather, GatherND and Embedding are one thing: the table is [outer, dim, inner] and the result
 * [outer, n, inner] has row id of it for each of n ids. GatherElements picks single elements along
 * lines of an axis. Gather and GatherElements refuse ids below 0 if their attribute `strict` is 1.
 * Scattering is deterministic and needs no atomics: threads own disjoint parts of the destination,
 * and each adds in the order of the ids.
 *
 * in[1] are the ids, i64 or i32. A gradient has the gradient of what was picked as in[0], the
 * op's attributes, and the table's shape as attribute `shape`. */
#include <stdatomic.h>
#include <string.h>

#include "base/int.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "cpu/strided.h"
#include "ops/infer.h"
#include "ops/op.h"

#define GRAIN 16384 /* elements that are worth a thread */

typedef struct rows_params {
  int64_t outer, dim, inner, n;
  int64_t outer_ids; /* ids from one outer to the next: 0, all share them, or n */
  int64_t padding;   /* row without gradient, -1: none */
  bool by_freq;      /* gradients are divided by how often their row is used */
  bool negative;     /* ids below 0 count from the end */
  int32_t depth;     /* GatherND: length of an index into `dims`; 0: ids are rows */
  int64_t dims[OMC_MAX_RANK];
} rows_params;

/* Elements of two tensors that differ along one axis, line by line. */
typedef struct lines_params {
  int32_t rank;                                      /* of the other axes */
  int64_t dims[OMC_MAX_RANK];                        /* of ids */
  int64_t table[OMC_MAX_RANK], picked[OMC_MAX_RANK]; /* strides: of x, and of ids and y */
  int64_t n, count;                                  /* ids in a line, lines */
  int32_t axis;
  int64_t dim;   /* elements of x along the axis */
  bool negative; /* ids below 0 count from the end */
  int64_t table_step, picked_step;
} lines_params;

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

static inline omc_status line_ids_of(const omc_kernel_args *args, const lines_params *p, ids *out) {
  return omc_ids_of(args, p->n * p->count, p->axis, p->dim, p->negative,
                    p->negative ? OMC_EINDEX : OMC_EBOUNDS, out);
}

/* Those ids as rows. For GatherND they are worked out in the workspace. */
omc_status omc_row_ids(const omc_kernel_args *args, ids *out) OMC_MUST_USE;

static inline int64_t n_ids(const rows_params *p) { return p->outer_ids ? p->outer * p->n : p->n; }

static inline size_t ids_bytes(const rows_params *p) {
  return p->depth ? omc_round_up((size_t)n_ids(p) * sizeof(int64_t), 64) : 0;
}

/* Where line number `line` starts. */
static inline void line_at(const lines_params *p, int64_t line, int64_t *table, int64_t *picked) {
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

OMC_INLINE void add_row(elem *dst, const elem *src, int64_t n, real scale) {
  int64_t k = 0;
  for (; k + OMC_VL <= n; k += OMC_VL) vst(dst + k, vfma(vld(src + k), vset(scale), vld(dst + k)));
  for (; k < n; k++) st(dst + k, ld(dst + k) + ld(src + k) * scale);
}

typedef enum { SPLIT_OUTER, SPLIT_ROWS, SPLIT_COLUMNS } split;

typedef struct scatter_job {
  const rows_params *p;
  ids rows;
  const elem *src;
  elem *dst;
  const int64_t *counts; /* uses of each row, NULL: gradients are not divided */
  split by;
} scatter_job;

/* What [begin, end) of the axis split by leaves of the destination is this call's. */
static void scatter_part(int64_t begin, int64_t end, int thread, void *ctx) {
  (void)thread;
  const scatter_job *j = ctx;
  const rows_params *p = j->p;
  const bool by_outer = j->by == SPLIT_OUTER, by_rows = j->by == SPLIT_ROWS;
  const int64_t o0 = by_outer ? begin : 0, o1 = by_outer ? end : p->outer;
  const int64_t r0 = by_rows ? begin : 0, r1 = by_rows ? end : p->dim;
  const int64_t c0 = j->by == SPLIT_COLUMNS ? begin * OMC_VL : 0;
  const int64_t c1 = j->by == SPLIT_COLUMNS && end * OMC_VL < p->inner ? end * OMC_VL : p->inner;
  for (int64_t o = o0; o < o1; o++) {
    for (int64_t i = 0; i < p->n; i++) {
      const int64_t row = id_at(&j->rows, o * p->outer_ids + i);
      if (row < r0 || row >= r1 || row == p->padding) continue;
      const real scale = j->counts ? (real)1 / (real)j->counts[row] : 1;
      add_row(j->dst + (o * p->dim + row) * p->inner + c0, j->src + (o * p->n + i) * p->inner + c0,
              c1 - c0, scale);
    }
  }
}

/* Columns keep threads evenly busy whatever the ids; rows are for rows too short to divide. */
static void scatter(const omc_kernel_args *args, scatter_job *j) {
  const rows_params *p = j->p;
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
  const rows_params *p = args->params;
  scatter_job j = {.p = p, .src = args->in[0].data, .dst = args->out[0].data};
  OMC_TRY(omc_row_ids(args, &j.rows));
  const void *base = omc_in_data(args, 2);
  const int64_t numel = p->outer * p->dim * p->inner;
  if (!base) {
    omc_strided_fill(j.dst, numel, sizeof(elem), NULL, args->threads);
  } else if (base != j.dst) {
    omc_strided all = {.rank = 1, .dims = {numel}, .src = {1}, .dst = {1}};
    omc_strided_prepare(&all, sizeof(elem));
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
  const lines_params *p;
  ids at;
  const elem *src;
  elem *dst;
} lines_job;

static void scatter_lines(int64_t begin, int64_t end, int thread, void *ctx) {
  (void)thread;
  const lines_job *j = ctx;
  const lines_params *p = j->p;
  for (int64_t line = begin; line < end; line++) {
    int64_t table, picked;
    line_at(p, line, &table, &picked);
    for (int64_t i = 0; i < p->n; i++, picked += p->picked_step) {
      elem *d = j->dst + table + id_at(&j->at, picked) * p->table_step;
      st(d, ld(d) + ld(j->src + picked));
    }
  }
}

OMC_KERNEL(GatherElementsGrad) {
  const lines_params *p = args->params;
  const omc_type *out = args->out[0].type;
  lines_job j = {.p = p, .src = args->in[0].data, .dst = args->out[0].data};
  OMC_TRY(line_ids_of(args, p, &j.at));
  omc_strided_fill(j.dst, omc_shape_numel(&out->shape), sizeof(elem), NULL, args->threads);
  if (p->n > 0) omc_parallel_for(p->count, 1 + GRAIN / p->n, args->threads, scatter_lines, &j);
  return OMC_OK;
}

#endif
#endif

#ifdef OMC_RECORDS

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
  const rows_params *p = args->params;
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
  const rows_params *p = j->params;
  int64_t o = begin / p->n, i = begin % p->n;
  for (int64_t r = begin; r < end; r++) {
    const int64_t row = o * p->dim + id_at(&j->at, o * p->outer_ids + i);
    copy_bytes(j->dst + (size_t)r * j->bytes, j->src + (size_t)row * j->bytes, j->bytes);
    if (++i == p->n) i = 0, o++;
  }
}

OMC_KERNEL_ANY(GatherRows) {
  const rows_params *p = args->params;
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
  const lines_params *p = j->params;
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
  const lines_params *p = args->params;
  gather_job j = {.params = p,
                  .src = args->in[0].data,
                  .dst = args->out[0].data,
                  .bytes = omc_dtype_size(args->in[0].type->dtype)};
  OMC_TRY(line_ids_of(args, p, &j.at));
  if (p->n > 0) omc_parallel_for(p->count, 1 + GRAIN / p->n, args->threads, gather_lines, &j);
  return OMC_OK;
}

/* ---- rules: `table` is the shape of what is gathered from ---- */

/* Copies dims [from, to) of a shape to the end of *out. */
static omc_status append(const omc_node *node, const omc_shape *shape, int32_t from, int32_t to,
                         omc_shape *out) {
  for (int32_t i = from; i < to; i++) {
    if (out->rank == OMC_MAX_RANK)
      OMC_NODE_FAIL(node, EUNSUPPORTED, "the result has more than %d dims", OMC_MAX_RANK);
    out->dims[out->rank++] = shape->dims[i];
  }
  return OMC_OK;
}

/* Rows of `axis`, one for each id. */
static omc_status rows_shape(const omc_node *node, const omc_shape *table, int32_t axis,
                             omc_shape *out) {
  const omc_shape *of_ids = omc_in_shape(node, 1);
  *out = (omc_shape){0};
  OMC_TRY(append(node, table, 0, axis, out));
  OMC_TRY(append(node, of_ids, 0, of_ids->rank, out));
  return append(node, table, axis + 1, table->rank, out);
}

static omc_status gather_shape(const omc_node *node, const omc_shape *table, omc_shape *out) {
  int32_t axis;
  OMC_TRY(omc_need_axis(node, 0, table->rank, &axis));
  return rows_shape(node, table, axis, out);
}

static bool takes_negative(const omc_node *node) { return omc_attr_int(node, "strict", 0) == 0; }

static omc_status gather_params(const omc_node *node, const omc_shape *table, rows_params *p) {
  int32_t axis;
  OMC_TRY(omc_need_axis(node, 0, table->rank, &axis));
  *p = (rows_params){.outer = omc_shape_span(table, 0, axis),
                     .dim = table->dims[axis],
                     .inner = omc_shape_span(table, axis + 1, table->rank),
                     .n = omc_shape_numel(omc_in_shape(node, 1)),
                     .padding = -1,
                     .negative = takes_negative(node)};
  return OMC_OK;
}

/* Embedding: Gather of whole rows, ids from 0, some rows without gradient. */
static omc_status embedding_shape(const omc_node *node, const omc_shape *table, omc_shape *out) {
  OMC_TRY(omc_need_float(node, 0));
  if (table->rank != 2) OMC_NODE_FAIL(node, ESHAPE, "a table of rank %d, not 2", table->rank);
  return rows_shape(node, table, 0, out);
}

static omc_status embedding_params(const omc_node *node, const omc_shape *table, rows_params *p) {
  *p = (rows_params){.outer = 1,
                     .dim = table->dims[0],
                     .inner = table->dims[1],
                     .n = omc_shape_numel(omc_in_shape(node, 1)),
                     .padding = omc_attr_int(node, "padding_idx", -1),
                     .by_freq = node->op == OMC_OP_EmbeddingGrad &&
                                omc_attr_int(node, "scale_grad_by_freq", 0) != 0};
  return OMC_OK;
}

/* GatherND: the last axis of ids is an index into the `depth` axes after the batch axes. */
static omc_status gather_nd_params(const omc_node *node, const omc_shape *table, rows_params *p) {
  const omc_shape *t = omc_in_shape(node, 1);
  const int64_t batch = omc_attr_int(node, "batch_dims", 0);
  const int64_t depth = t->rank ? t->dims[t->rank - 1] : 0;
  char a[OMC_TYPE_TEXT], b[OMC_TYPE_TEXT];
  bool fits = batch >= 0 && batch < t->rank && depth >= 1 && batch + depth <= table->rank;
  for (int32_t i = 0; fits && i < batch; i++) fits = t->dims[i] == table->dims[i];
  if (!fits)
    OMC_NODE_FAIL(node, ESHAPE, "ids %s with %lld batch dims do not index %s",
                  omc_shape_text(t, a, sizeof a), (long long)batch,
                  omc_shape_text(table, b, sizeof b));
  const int32_t from = (int32_t)batch, to = (int32_t)(batch + depth);
  const int64_t n = omc_shape_span(t, from, t->rank - 1);
  *p = (rows_params){.outer = omc_shape_span(table, 0, from),
                     .dim = omc_shape_span(table, from, to),
                     .inner = omc_shape_span(table, to, table->rank),
                     .n = n,
                     .outer_ids = from ? n : 0,
                     .padding = -1,
                     .depth = to - from};
  memcpy(p->dims, table->dims + from, (size_t)p->depth * sizeof p->dims[0]);
  return OMC_OK;
}

static omc_status gather_nd_shape(const omc_node *node, const omc_shape *table, omc_shape *out) {
  const omc_shape *of_ids = omc_in_shape(node, 1);
  rows_params p;
  OMC_TRY(gather_nd_params(node, table, &p));
  *out = (omc_shape){0};
  OMC_TRY(append(node, of_ids, 0, of_ids->rank - 1, out));
  const int32_t batch = (int32_t)omc_attr_int(node, "batch_dims", 0);
  return append(node, table, batch + p.depth, table->rank, out);
}

/* GatherElements: ids have the table's rank and nowhere, but along the axis, more elements. */
static omc_status gather_elements_shape(const omc_node *node, const omc_shape *table,
                                        omc_shape *out) {
  int32_t axis;
  OMC_TRY(omc_need_axis(node, 0, table->rank, &axis));
  *out = *omc_in_shape(node, 1);
  bool fits = out->rank == table->rank;
  for (int32_t i = 0; fits && i < out->rank; i++)
    fits = i == axis || out->dims[i] <= table->dims[i];
  if (fits) return OMC_OK;
  char a[OMC_TYPE_TEXT], b[OMC_TYPE_TEXT];
  OMC_NODE_FAIL(node, ESHAPE, "ids %s do not pick from %s along axis %d",
                omc_shape_text(out, a, sizeof a), omc_shape_text(table, b, sizeof b), axis);
}

static omc_status gather_elements_params(const omc_node *node, const omc_shape *table,
                                         lines_params *p) {
  const omc_shape *t = omc_in_shape(node, 1);
  int64_t table_strides[OMC_MAX_RANK], strides[OMC_MAX_RANK];
  int32_t axis;
  OMC_TRY(omc_need_axis(node, 0, table->rank, &axis));
  omc_shape_strides(table, table_strides);
  omc_shape_strides(t, strides);
  *p = (lines_params){.n = t->dims[axis],
                      .count = 1,
                      .axis = axis,
                      .dim = table->dims[axis],
                      .negative = takes_negative(node),
                      .table_step = table_strides[axis],
                      .picked_step = strides[axis]};
  for (int32_t i = 0; i < t->rank; i++) {
    if (i == axis) continue;
    p->dims[p->rank] = t->dims[i];
    p->table[p->rank] = table_strides[i];
    p->picked[p->rank++] = strides[i];
    p->count *= t->dims[i];
  }
  return OMC_OK;
}

static omc_status need_ids(const omc_node *node) {
  return omc_in(node, 1)->type.dtype == OMC_I32 ? OMC_OK : omc_need_dtype(node, 1, OMC_I64);
}

/* The shape of what a node picks from a table of shape `table`. */
typedef omc_status (*pick_rule)(const omc_node *node, const omc_shape *table, omc_shape *out);

static omc_status infer_pick(omc_node *node, pick_rule rule) {
  omc_shape shape;
  OMC_TRY(need_ids(node));
  OMC_TRY(rule(node, omc_in_shape(node, 0), &shape));
  omc_set_shape(node, &shape);
  return OMC_OK;
}

/* A third input is what the gradient is added to. */
static omc_status infer_pick_grad(omc_node *node, pick_rule rule) {
  omc_shape table, shape;
  OMC_TRY(need_ids(node));
  OMC_TRY(omc_need_shape(node, &table));
  OMC_TRY(rule(node, &table, &shape));
  OMC_TRY(omc_need_gradient(node, &shape));
  omc_set_shape(node, &table);
  const omc_value *base = omc_in(node, 2);
  if (!base || omc_type_equal(&base->type, &node->out[0]->type)) return OMC_OK;
  char type[OMC_TYPE_TEXT];
  OMC_NODE_FAIL(node, ESHAPE, "base is %s, unlike the result",
                omc_type_text(&base->type, type, sizeof type));
}

static omc_status grad_pick(omc_grad *g, omc_op_id op) {
  omc_value *const in[] = {g->dout[0], omc_in(g->node, 1)};
  g->din[0] = omc_bn_shaped(&g->b, op, 2, in, g->node, omc_in_shape(g->node, 0));
  return g->b.status;
}

static size_t rows_workspace(const omc_node *node, const void *params, int threads) {
  (void)node, (void)threads;
  const rows_params *p = params;
  return ids_bytes(p) + (p->by_freq ? (size_t)p->dim * sizeof(int64_t) : 0);
}

/* ---- records: an op that picks, and its gradient ---- */

#define PICK_OPS(name_, id, params_t, pick, scatter, most_in, workspace_)                      \
  static omc_status infer_##id(omc_node *node) { return infer_pick(node, id##_shape); }        \
  static omc_status infer_##id##_grad(omc_node *node) {                                        \
    return infer_pick_grad(node, id##_shape);                                                  \
  }                                                                                            \
  static omc_status grad_##id(omc_grad *g) { return grad_pick(g, OMC_OP_##name_##Grad); }      \
  static omc_status params_##id(const omc_node *node, omc_arena *arena, void *params) {        \
    (void)arena;                                                                               \
    return id##_params(node, omc_in_shape(node, 0), params);                                   \
  }                                                                                            \
  static omc_status params_##id##_grad(const omc_node *node, omc_arena *arena, void *params) { \
    (void)arena;                                                                               \
    return id##_params(node, &node->out[0]->type.shape, params);                               \
  }                                                                                            \
  const omc_op omc_op_##name_ = {.name = #name_,                                               \
                                 .min_in = 2,                                                  \
                                 .max_in = 2,                                                  \
                                 .n_out = 1,                                                   \
                                 .infer = infer_##id,                                          \
                                 .grad = grad_##id,                                            \
                                 .params_size = sizeof(params_t),                              \
                                 .params = params_##id,                                        \
                                 .workspace = workspace_,                                      \
                                 .cpu = &omc_kernels_##pick};                                  \
  const omc_op omc_op_##name_##Grad = {.name = #name_ "Grad",                                  \
                                       .min_in = 2,                                            \
                                       .max_in = most_in,                                      \
                                       .n_out = 1,                                             \
                                       .flags = most_in > 2 ? OMC_OP_INPLACE_2 : 0,            \
                                       .infer = infer_##id##_grad,                             \
                                       .params_size = sizeof(params_t),                        \
                                       .params = params_##id##_grad,                           \
                                       .workspace = workspace_,                                \
                                       .cpu = &omc_kernels_##scatter};
PICK_OPS(Gather, gather, rows_params, GatherRows, ScatterRows, 2, rows_workspace)
PICK_OPS(GatherND, gather_nd, rows_params, GatherRows, ScatterRows, 2, rows_workspace)
PICK_OPS(Embedding, embedding, rows_params, GatherRows, ScatterRows, 3, rows_workspace)
PICK_OPS(GatherElements, gather_elements, lines_params, GatherElements, GatherElementsGrad, 2, NULL)

#endif
