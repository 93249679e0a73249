/* Running sums and products, products of all others, and where the largest or the least is, along n
 * of a tensor [outer, n, inner]. */
#include <string.h>

#include "base/int.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "ops/forms.h"

/* x is [outer, n, inner]. */
typedef struct scan_params {
  int64_t outer, n, inner;
  bool reverse, exclusive;
} scan_params;

#ifdef OMC_VARIANT

#if OMC_IS_FLOAT
typedef double wide; /* running sums, as PyTorch's */
#else
typedef int64_t wide;
#endif

typedef struct scan_job {
  const scan_params *p;
  const storage_t *x;
  void *out;
  acc_t *scratch; /* OtherProducts: a column of products for each thread */
} scan_job;

typedef struct scan_block {
  int64_t first;  /* element */
  int64_t n;      /* columns */
  int64_t result; /* first result of one per column */
} scan_block;

/* Unit u: a block of columns of one outer. */
static scan_block block_at(const scan_params *p, int64_t u) {
  if (p->inner == 1) return (scan_block){u * p->n, 1, u};
  const int64_t across = omc_ceil_div(p->inner, OMC_COLUMNS), o = u / across,
                k = u % across * OMC_COLUMNS;
  return (scan_block){o * p->n * p->inner + k, omc_min(OMC_COLUMNS, p->inner - k),
                      o * p->inner + k};
}

/* n running sums or products of rows `step` apart; always inlined, so that one column stays in a
 * register. */
OMC_INLINE void go_along(const scan_params *p, const storage_t *x, storage_t *y, int64_t step,
                         int64_t n, bool products) {
  wide all[OMC_COLUMNS];
  for (int64_t k = 0; k < n; k++) all[k] = products;
  for (int64_t i = 0; i < p->n; i++) {
    for (int64_t k = 0; k < n; k++) {
      const wide before = all[k], next = (wide)ld(x + i * step + k);
      all[k] = products ? before * next : before + next;
      st(y + i * step + k, (acc_t)(p->exclusive ? before : all[k]));
    }
  }
}

OMC_INLINE void run_along(omc_range range, const scan_job *j, bool products) {
  const scan_params *p = j->p;
  for (int64_t u = range.begin; u < range.end; u++) {
    const scan_block b = block_at(p, u);
    const int64_t from = b.first + (p->reverse ? (p->n - 1) * p->inner : 0);
    const storage_t *x = j->x + from;
    storage_t *y = (storage_t *)j->out + from;
    if (p->inner == 1)
      go_along(p, x, y, p->reverse ? -1 : 1, 1, products);
    else
      go_along(p, x, y, p->reverse ? -p->inner : p->inner, b.n, products);
  }
}

static void run_cumsum(omc_range range, void *ctx) { run_along(range, ctx, false); }

static void run_cumprod(omc_range range, void *ctx) { run_along(range, ctx, true); }

#if OMC_IS_FLOAT

typedef struct products_job {
  const scan_params *p;
  const storage_t *dy, *x, *y;
  storage_t *dx;
} products_job;

/* As PyTorch has it, of a line. Before the first 0, at z, the gradient is the sum of all dy y from
 * there on, divided by x; at the first 0 it is that of the products of all others up to the next 0;
 * behind it is 0. */
static void cumprod_slopes(const products_job *j, int64_t first) {
  const scan_params *p = j->p;
  const int64_t step = p->inner;
  const storage_t *dy = j->dy + first, *x = j->x + first, *y = j->y + first;
  storage_t *dx = j->dx + first;
  int64_t z = 0;
  while (z < p->n && ld(x + z * step) != 0) z++;
  wide sum = 0;
  for (int64_t i = z - 1; i >= 0; i--) {
    sum += (wide)(ld(y + i * step) * ld(dy + i * step));
    st(dx + i * step, (acc_t)sum / ld(x + i * step));
  }
  if (z == p->n) return;
  wide product = 1, total = ld(dy + z * step);
  int64_t i = z + 1;
  for (; i < p->n && ld(x + i * step) != 0; i++) {
    product *= (wide)ld(x + i * step);
    total += (wide)((acc_t)product * ld(dy + i * step));
  }
  for (int64_t k = z + 1; k < p->n; k++) st(dx + k * step, 0);
  st(dx + z * step, (acc_t)total * (z > 0 ? ld(y + (z - 1) * step) : 1));
}

static void run_cumprod_grad(omc_range range, void *ctx) {
  const products_job *j = ctx;
  const int64_t inner = j->p->inner;
  for (int64_t line = range.begin; line < range.end; line++)
    cumprod_slopes(j, line / inner * j->p->n * inner + line % inner);
}

/* Lines of one element have the slope 1 whatever that is. */
OMC_KERNEL(CumProdGrad, args) {
  const scan_params *p = args->params;
  products_job j = {p, args->in[0].data, args->in[2].data, args->in[3].data, args->out[0].data};
  const int64_t lines = p->outer * p->inner;
  if (p->n == 1)
    memcpy(j.dx, j.dy, (size_t)lines * sizeof(storage_t));
  else if (p->n > 0)
    omc_parallel_for(lines, omc_grain(OMC_GRAIN_ELEMENTS, p->n), args->threads, run_cumprod_grad,
                     &j);
  return OMC_OK;
}

#endif

/* What is before an element times what is behind it. */
static void run_others(omc_range range, void *ctx) {
  const scan_job *j = ctx;
  const scan_params *p = j->p;
  for (int64_t u = range.begin; u < range.end; u++) {
    const scan_block b = block_at(p, u);
    for (int64_t k = b.first; k < b.first + b.n; k++) {
      storage_t *y = (storage_t *)j->out + k;
      acc_t *products = sums_of(y, j->scratch + range.thread * p->n);
      const int64_t step = OMC_STORES_ACC ? p->inner : 1;
      wide before = 1, behind = 1;
      for (int64_t i = 0; i < p->n; i++) {
        products[i * step] = (acc_t)before;
        before *= (wide)ld(j->x + k + i * p->inner);
      }
      for (int64_t i = p->n - 1; i >= 0; i--) {
        st(y + i * p->inner, products[i * step] * (acc_t)behind);
        behind *= (wide)ld(j->x + k + i * p->inner);
      }
    }
  }
}

/* The first of the largest or of the least; NaN is beyond all. */
OMC_INLINE int64_t arg_row(const storage_t *x, int64_t n, bool least) {
  const acc_t best = least ? row_min(x, n) : row_max(x, n);
  int64_t i = 0;
  while (i + 1 < n && ld(x + i) != best && !OMC_IS_NAN(ld(x + i))) i++;
  return i;
}

OMC_INLINE void arg_columns(const scan_params *p, const storage_t *x, int64_t columns, int64_t *at,
                            bool least) {
  acc_t best[OMC_COLUMNS];
  for (int64_t k = 0; k < columns; k++) best[k] = ld(x + k), at[k] = 0;
  for (int64_t i = 1; i < p->n; i++) {
    for (int64_t k = 0; k < columns; k++) {
      const acc_t v = ld(x + i * p->inner + k);
      const bool beyond = OMC_IS_NAN(v) || (least ? v < best[k] : v > best[k]);
      const bool better = beyond && !OMC_IS_NAN(best[k]);
      best[k] = better ? v : best[k];
      at[k] = better ? i : at[k];
    }
  }
}

OMC_INLINE void run_arg(omc_range range, const scan_job *j, bool least) {
  const scan_params *p = j->p;
  for (int64_t u = range.begin; u < range.end; u++) {
    const scan_block b = block_at(p, u);
    int64_t *at = (int64_t *)j->out + b.result;
    if (p->inner == 1)
      *at = arg_row(j->x + b.first, p->n, least);
    else
      arg_columns(p, j->x + b.first, b.n, at, least);
  }
}

/* Units are OMC_VL rows, of at most a vector. */
OMC_INLINE void run_short_arg(omc_range range, const scan_job *j, bool least) {
  const int64_t n = j->p->n;
  for (int64_t u = range.begin; u < range.end; u++) {
    const int64_t first = u * OMC_VL, rows = omc_min(j->p->outer - first, OMC_VL);
    vacc_t v[OMC_VL], at = vset(0);
    load_turned(j->x + first * n, rows, n, v);
    vacc_t best = v[0];
    for (int64_t k = 1; k < n; k++) {
      const vmask beyond = vnan(v[k]) | (least ? v[k] < best : v[k] > best);
      const vmask better = beyond & ~vnan(best);
      best = vblend(better, v[k], best);
      at = vblend(better, vset((acc_t)k), at);
    }
    acc_t lanes[OMC_VL];
    vstr(lanes, at);
    for (int64_t r = 0; r < rows; r++) ((int64_t *)j->out)[first + r] = (int64_t)lanes[r];
  }
}

static void run_argmax(omc_range range, void *ctx) { run_arg(range, ctx, false); }
static void run_argmin(omc_range range, void *ctx) { run_arg(range, ctx, true); }
static void run_short_argmax(omc_range range, void *ctx) { run_short_arg(range, ctx, false); }
static void run_short_argmin(omc_range range, void *ctx) { run_short_arg(range, ctx, true); }

static omc_status scan(const omc_kernel_args *args, omc_range_fn fn) {
  const scan_params *p = args->params;
  scan_job j = {p, args->in[0].data, args->out[0].data, args->workspace};
  const int64_t unit = p->n * omc_min(p->inner, OMC_COLUMNS);
  if (p->n > 0)
    omc_parallel_for(p->outer * omc_ceil_div(p->inner, OMC_COLUMNS),
                     omc_grain(OMC_GRAIN_ELEMENTS, unit), args->threads, fn, &j);
  return OMC_OK;
}

OMC_KERNEL(CumSum, args) { return scan(args, run_cumsum); }
OMC_KERNEL(CumProd, args) { return scan(args, run_cumprod); }
#if OMC_IS_FLOAT
OMC_KERNEL(OtherProducts, args) { return scan(args, run_others); }
#endif

static omc_status arg(const omc_kernel_args *args, omc_range_fn fn, omc_range_fn of_short_rows) {
  const scan_params *p = args->params;
  if (p->inner != 1 || p->n == 0 || p->n > OMC_VL) return scan(args, fn);
  scan_job j = {.p = p, .x = args->in[0].data, .out = args->out[0].data};
  omc_parallel_for(omc_ceil_div(p->outer, OMC_VL), omc_grain(OMC_GRAIN_ELEMENTS, OMC_VL * p->n),
                   args->threads, of_short_rows, &j);
  return OMC_OK;
}

OMC_KERNEL(ArgMax, args) { return arg(args, run_argmax, run_short_argmax); }
OMC_KERNEL(ArgMin, args) { return arg(args, run_argmin, run_short_argmin); }

#else

OMC_KERNELS_NUM(CumSum)
OMC_KERNELS_NUM(CumProd)
OMC_KERNELS(CumProdGrad)
OMC_KERNELS(OtherProducts)
OMC_KERNELS_NUM(ArgMax)
OMC_KERNELS_NUM(ArgMin)

static omc_status params_cumsum(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  omc_axis_form f;
  OMC_TRY(omc_running_form_of(node, &f));
  *(scan_params *)params = (scan_params){f.outer, f.n, f.inner, omc_node_int(node, "reverse") != 0,
                                         omc_node_int(node, "exclusive") != 0};
  return OMC_OK;
}

static omc_status params_running(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  omc_axis_form f;
  OMC_TRY(omc_running_form_of(node, &f));
  *(scan_params *)params = (scan_params){.outer = f.outer, .n = f.n, .inner = f.inner};
  return OMC_OK;
}

static omc_status params_scan(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  omc_axis_form f;
  OMC_TRY(omc_axis_form_of(node, &f));
  *(scan_params *)params = (scan_params){.outer = f.outer, .n = f.n, .inner = f.inner};
  return OMC_OK;
}

static size_t others_workspace(const omc_node *node, const void *params, int threads) {
  const scan_params *p = params;
  return omc_sums_bytes(omc_in(node, 0)->type.dtype, threads * p->n);
}

OMC_CPU_OP(CumSum, CumSum, OMC_PARAMS(scan_params, params_cumsum))
OMC_CPU_OP(CumProd, CumProd, OMC_PARAMS(scan_params, params_running))
OMC_CPU_OP(CumProdGrad, CumProdGrad, OMC_PARAMS(scan_params, params_running))
OMC_CPU_OP(OtherProducts, OtherProducts, OMC_PARAMS(scan_params, params_scan),
           .workspace = others_workspace)
OMC_CPU_OP(ArgMax, ArgMax, OMC_PARAMS(scan_params, params_scan))
OMC_CPU_OP(ArgMin, ArgMin, OMC_PARAMS(scan_params, params_scan))

#endif
