/* Reductions over axes.
 *
 * The axes of a reduction collapse into groups, kept and reduced in turn. If the innermost group is
 * reduced, the kernel reduces contiguous rows; if it is kept, it adds up rows, many columns at a
 * time. Both split what they reduce in half again and again (pairwise summation), and large
 * reductions to few results into parts, at places that depend on the shape alone. */
#include <math.h>
#include <string.h>

#include "base/int.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "ops/forms.h"

typedef struct group_list {
  int32_t n;
  int64_t dims[OMC_MAX_RANK], strides[OMC_MAX_RANK];
} group_list;

typedef struct reduce_params {
  group_list kept, reduced; /* but for the innermost group */
  bool by_rows;             /* the innermost group is reduced */
  bool mean;                /* results are divided by `count` */
  bool widens;              /* results, rounded, are stored as numbers */
  int64_t inner;            /* elements of the innermost group */
  int64_t outer;            /* products of the kept groups but for the innermost */
  int64_t total;            /* positions reduced: elements if by_rows, else rows of `inner` */
  int64_t count;            /* elements that make one result */
  int64_t parts, step;      /* part i reduces positions i * step to (i + 1) * step */
} reduce_params;

#ifdef OMC_VARIANT

#define LEAF (512 * OMC_VL) /* elements of rows reduced in a plain loop */
#define LEAF_ROWS 64        /* rows added up in a plain loop */
#define WIDTH 256           /* columns whose results are kept on the stack */

typedef enum { SUM, PROD, MAX, MIN } verb;

OMC_INLINE vacc_t vjoin(verb v, vacc_t a, vacc_t b) {
  if (v == SUM) return a + b;
  if (v == PROD) return a * b;
  return v == MAX ? vmax(a, b) : vmin(a, b);
}

/* NaN in either gives NaN. */
OMC_INLINE acc_t join(verb v, acc_t a, acc_t b) {
  if (v == SUM) return a + b;
  if (v == PROD) return a * b;
  const acc_t best = v == MAX ? (a > b ? a : b) : (a < b ? a : b);
  return OMC_IS_NAN(a) ? a : best;
}

OMC_INLINE acc_t start_of(verb v) {
  return v == SUM ? 0 : v == PROD ? 1 : v == MAX ? OMC_LOWEST : OMC_HIGHEST;
}

#define JOIN(a, b) vjoin(v, a, b)

OMC_INLINE acc_t reduce_row(verb v, const storage_t *x, int64_t n) {
  const acc_t start = start_of(v);
  acc_t lanes[OMC_VL];
  if (n <= OMC_SHORT_ROW) {
    lanes[0] = start;
    for (int64_t k = 0; k < n; k++) lanes[0] = join(v, lanes[0], ld(x + k));
    return lanes[0];
  }
  vstr(lanes, OMC_ROW_REDUCE(k, left, n, start, JOIN, , vld_fill(x + k, left, start)));
  _Pragma("GCC unroll 4") for (int w = OMC_VL / 2; w > 0; w /= 2) for (int i = 0; i < w; i++)
      lanes[i] = join(v, lanes[i], lanes[i + w]);
  return lanes[0];
}

/* Joins 4 rows of n elements, or one, to acc, which is writable to the end of its last vector. */
OMC_INLINE void join_rows(verb v, acc_t *acc, const storage_t *const *x, int rows, int64_t n) {
  for (int64_t k = 0; k < n; k += OMC_VL) {
    const int64_t left = n - k;
    const acc_t fill = start_of(v);
    vacc_t sum = vld_fill(x[0] + k, left, fill);
    if (rows == 4)
      sum = JOIN(JOIN(sum, vld_fill(x[1] + k, left, fill)),
                 JOIN(vld_fill(x[2] + k, left, fill), vld_fill(x[3] + k, left, fill)));
    vstr(acc + k, JOIN(vldr(acc + k), sum));
  }
}

/* Reduces rows of at most a vector, as many at most as that has lanes. */
OMC_INLINE void reduce_short_rows(verb v, const storage_t *x, int64_t rows, int64_t n, acc_t *out) {
  vacc_t turned[OMC_VL], acc = vset(start_of(v));
  load_turned(x, rows, n, turned);
  for (int64_t k = 0; k < n; k++) acc = JOIN(acc, turned[k]);
  vstr(out, acc);
}

typedef struct verb_fns {
  verb v;
  acc_t (*row)(const storage_t *x, int64_t n);
  void (*short_rows)(const storage_t *x, int64_t rows, int64_t n, acc_t *out);
  void (*rows)(acc_t *acc, const storage_t *const *x, int rows, int64_t n);
} verb_fns;

#define VERB(V)                                                                       \
  static acc_t row_##V(const storage_t *x, int64_t n) { return reduce_row(V, x, n); } \
  static void short_##V(const storage_t *x, int64_t rows, int64_t n, acc_t *out) {    \
    reduce_short_rows(V, x, rows, n, out);                                            \
  }                                                                                   \
  static void rows_##V(acc_t *acc, const storage_t *const *x, int rows, int64_t n) {  \
    if (rows == 4)                                                                    \
      join_rows(V, acc, x, 4, n);                                                     \
    else                                                                              \
      join_rows(V, acc, x, 1, n);                                                     \
  }
VERB(SUM)
VERB(PROD)
VERB(MAX)
VERB(MIN)

static const verb_fns verbs[] = {{SUM, row_SUM, short_SUM, rows_SUM},
                                 {PROD, row_PROD, short_PROD, rows_PROD},
                                 {MAX, row_MAX, short_MAX, rows_MAX},
                                 {MIN, row_MIN, short_MIN, rows_MIN}};

typedef struct reduce_job {
  const reduce_params *p;
  const verb_fns *fns;
  const storage_t *x;
  void *out;
  acc_t *partial; /* parts x results; NULL if there is one part */
} reduce_job;

static int64_t offset_of(const group_list *g, int64_t position) {
  int64_t offset = 0;
  for (int32_t i = g->n - 1; i > 0; i--) {
    offset += position % g->dims[i] * g->strides[i];
    position /= g->dims[i];
  }
  return g->n ? offset + position * g->strides[0] : 0;
}

static int64_t halfway(int64_t a, int64_t b, int64_t unit) {
  return a + ((b - a) / 2 + unit - 1) / unit * unit;
}

/* One result: elements a .. b-1 of the rows that start at x. */
static acc_t reduce_elements(const reduce_job *j, const storage_t *x, int64_t a, int64_t b) {
  const reduce_params *p = j->p;
  if (b - a > LEAF) {
    const int64_t middle = halfway(a, b, 4 * OMC_COLUMNS);
    return join(j->fns->v, reduce_elements(j, x, a, middle), reduce_elements(j, x, middle, b));
  }
  acc_t acc = start_of(j->fns->v);
  int64_t row = p->reduced.n ? a / p->inner : 0;
  for (int64_t k = a - row * p->inner; a < b; row++, k = 0) {
    const int64_t n = omc_min(p->inner - k, b - a);
    acc = join(j->fns->v, acc, j->fns->row(x + offset_of(&p->reduced, row) + k, n));
    a += n;
  }
  return acc;
}

/* n results, at most WIDTH: rows a .. b-1 of columns that start at x. */
static void reduce_columns(const reduce_job *j, const storage_t *x, int64_t n, int64_t a, int64_t b,
                           acc_t *acc) {
  const verb v = j->fns->v;
  if (b - a > LEAF_ROWS) {
    acc_t upper[WIDTH];
    const int64_t middle = halfway(a, b, 4);
    reduce_columns(j, x, n, a, middle, acc);
    reduce_columns(j, x, n, middle, b, upper);
    for (int64_t k = 0; k < n; k++) acc[k] = join(v, acc[k], upper[k]);
    return;
  }
  for (int64_t k = 0; k < n; k++) acc[k] = start_of(v);
  for (int count; a < b; a += count) {
    const storage_t *rows[4];
    count = b - a < 4 ? 1 : 4;
    for (int r = 0; r < count; r++) rows[r] = x + offset_of(&j->p->reduced, a + r);
    j->fns->rows(acc, rows, count, n);
  }
}

static void store_result(const reduce_job *j, int64_t at, acc_t acc) {
  storage_t stored, *const out = j->p->widens ? &stored : (storage_t *)j->out + at;
  st(out, j->p->mean ? acc / (acc_t)j->p->count : acc);
  if (j->p->widens) ((acc_t *)j->out)[at] = ld(out);
}

static void store(const reduce_job *j, int64_t part, int64_t at, const acc_t *acc, int64_t n) {
  const reduce_params *p = j->p;
  if (j->partial) {
    const int64_t results = p->outer * (p->by_rows ? 1 : p->inner);
    memcpy(j->partial + part * results + at, acc, (size_t)n * sizeof *acc);
  } else {
    for (int64_t k = 0; k < n; k++) store_result(j, at + k, acc[k]);
  }
}

/* Units are results by part. */
static void run_elements(omc_range range, void *ctx) {
  const reduce_job *j = ctx;
  const reduce_params *p = j->p;
  int64_t part = range.begin / p->outer, o = range.begin % p->outer;
  for (int64_t u = range.begin; u < range.end; u++) {
    const int64_t a = part * p->step;
    const storage_t *x = j->x + offset_of(&p->kept, o);
    const acc_t acc = reduce_elements(j, x, a, omc_min(a + p->step, p->total));
    store(j, part, o, &acc, 1);
    if (++o == p->outer) o = 0, part++;
  }
}

/* Rows of at most a vector are reduced side by side. */
static bool has_short_rows(const reduce_params *p) {
  return p->by_rows && p->parts == 1 && p->reduced.n == 0 && p->total > 0 && p->total <= OMC_VL;
}

/* Units are OMC_VL rows. */
static void run_short_rows(omc_range range, void *ctx) {
  const reduce_job *j = ctx;
  const reduce_params *p = j->p;
  for (int64_t u = range.begin; u < range.end; u++) {
    const int64_t first = u * OMC_VL, rows = omc_min(p->outer - first, OMC_VL);
    acc_t acc[OMC_VL];
    j->fns->short_rows(j->x + first * p->total, rows, p->total, acc);
    store(j, 0, first, acc, rows);
  }
}

/* Units are blocks of columns by kept position by part. */
static void run_columns(omc_range range, void *ctx) {
  const reduce_job *j = ctx;
  const reduce_params *p = j->p;
  const int64_t across = omc_ceil_div(p->inner, OMC_COLUMNS);
  for (int64_t u = range.begin, together; u < range.end; u += together) {
    const int64_t block = u % across, o = u / across % p->outer, part = u / across / p->outer;
    const int64_t k = block * OMC_COLUMNS, a = part * p->step;
    together = omc_min(omc_min(across - block, range.end - u), WIDTH / OMC_COLUMNS);
    const int64_t n = omc_min(together * OMC_COLUMNS, p->inner - k);
    acc_t acc[WIDTH];
    reduce_columns(j, j->x + offset_of(&p->kept, o) + k, n, a, omc_min(a + p->step, p->total), acc);
    store(j, part, o * p->inner + k, acc, n);
  }
}

static void join_parts(omc_range range, void *ctx) {
  const reduce_job *j = ctx;
  const reduce_params *p = j->p;
  const int64_t results = p->outer * (p->by_rows ? 1 : p->inner);
  for (int64_t i = range.begin; i < range.end; i++) {
    acc_t acc = j->partial[i];
    for (int64_t part = 1; part < p->parts; part++)
      acc = join(j->fns->v, acc, j->partial[part * results + i]);
    store_result(j, i, acc);
  }
}

static omc_status reduce(const omc_kernel_args *args, verb v) {
  const reduce_params *p = args->params;
  reduce_job j = {p, &verbs[v], args->in[0].data, args->out[0].data,
                  p->parts > 1 ? args->workspace : NULL};
  if (has_short_rows(p)) {
    omc_parallel_for(omc_ceil_div(p->outer, OMC_VL),
                     omc_grain(OMC_GRAIN_ELEMENTS, OMC_VL * p->total), args->threads,
                     run_short_rows, &j);
    return OMC_OK;
  }
  const int64_t across = p->by_rows ? 1 : omc_ceil_div(p->inner, OMC_COLUMNS);
  const int64_t unit =
      omc_min(p->step, p->total) * (p->by_rows ? 1 : omc_min(p->inner, OMC_COLUMNS));
  omc_parallel_for(p->parts * p->outer * across, omc_grain(OMC_GRAIN_ELEMENTS, unit), args->threads,
                   p->by_rows ? run_elements : run_columns, &j);
  if (j.partial)
    omc_parallel_for(p->outer * (p->by_rows ? 1 : p->inner),
                     omc_grain(OMC_GRAIN_ELEMENTS, p->parts), args->threads, join_parts, &j);
  return OMC_OK;
}

OMC_KERNEL(ReduceSum, args) { return reduce(args, SUM); }
OMC_KERNEL(ReduceProd, args) { return reduce(args, PROD); }
OMC_KERNEL(ReduceMax, args) { return reduce(args, MAX); }
OMC_KERNEL(ReduceMin, args) { return reduce(args, MIN); }

#else

OMC_KERNELS_NUM(ReduceSum)
OMC_KERNELS_NUM(ReduceProd)
OMC_KERNELS_NUM(ReduceMax)
OMC_KERNELS_NUM(ReduceMin)

#define MAX_PARTS 64
#define PART 32768 /* elements at least in a part of a reduction */

static void add_group(group_list *g, int64_t dim, int64_t stride) {
  g->dims[g->n] = dim;
  g->strides[g->n++] = stride;
}

static int64_t group_product(const group_list *g) {
  int64_t n = 1;
  for (int32_t i = 0; i < g->n; i++) n *= g->dims[i];
  return n;
}

/* Collapses the axes from the last to the first; groups come out innermost first. */
static int32_t collapse(const omc_shape *x, const bool *reduced, group_list *groups,
                        bool *is_reduced) {
  int32_t n = 0;
  int64_t stride = 1;
  for (int32_t i = x->rank - 1; i >= 0; i--) {
    if (x->dims[i] == 1) continue;
    if (n > 0 && is_reduced[n - 1] == reduced[i]) {
      groups->dims[n - 1] *= x->dims[i];
    } else {
      is_reduced[n++] = reduced[i];
      add_group(groups, x->dims[i], stride);
    }
    stride *= x->dims[i];
  }
  return n;
}

static omc_status params_reduce(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  reduce_params *p = params;
  group_list groups = {0};
  bool reduced[OMC_MAX_RANK], is_reduced[OMC_MAX_RANK] = {true};
  OMC_TRY(omc_reduced_axes(node, reduced));
  p->mean = node->op == OMC_OP_ReduceMean;
  p->widens = node->out[0]->type.dtype != omc_in(node, 0)->type.dtype;
  p->parts = 1;
  if (omc_shape_numel(&omc_in(node, 0)->type.shape) == 0) {
    p->by_rows = true; /* all of them empty */
    p->outer = omc_shape_numel(&node->out[0]->type.shape);
    return OMC_OK;
  }
  const int32_t n = collapse(&omc_in(node, 0)->type.shape, reduced, &groups, is_reduced);
  for (int32_t i = n - 1; i > 0; i--)
    add_group(is_reduced[i] ? &p->reduced : &p->kept, groups.dims[i], groups.strides[i]);
  p->by_rows = is_reduced[0];
  p->inner = n > 0 ? groups.dims[0] : 1;
  p->outer = group_product(&p->kept);
  p->total = group_product(&p->reduced) * (p->by_rows ? p->inner : 1);
  p->count = p->total;
  const int64_t units = p->outer * (p->by_rows ? 1 : omc_ceil_div(p->inner, OMC_COLUMNS)) + 1;
  const int64_t work = p->total * (p->by_rows ? 1 : p->inner);
  const int64_t parts = omc_min(MAX_PARTS / units, work / PART);
  p->step = parts > 1 ? (p->total / parts / OMC_COLUMNS + 1) * OMC_COLUMNS : p->total;
  p->parts = omc_ceil_div(p->total, p->step);
  return OMC_OK;
}

static size_t reduce_workspace(const omc_node *node, const void *params, int threads) {
  (void)threads;
  const reduce_params *p = params;
  if (p->parts == 1) return 0;
  return (size_t)(p->parts * omc_shape_numel(&node->out[0]->type.shape)) *
         omc_acc_size(omc_in(node, 0)->type.dtype);
}

#define REDUCE(name, kernel) \
  OMC_CPU_OP(name, kernel, OMC_PARAMS(reduce_params, params_reduce), .workspace = reduce_workspace)
REDUCE(ReduceSum, ReduceSum)
REDUCE(ReduceMean, ReduceSum)
REDUCE(ReduceMax, ReduceMax)
REDUCE(ReduceMin, ReduceMin)
REDUCE(ReduceProd, ReduceProd)

#endif
