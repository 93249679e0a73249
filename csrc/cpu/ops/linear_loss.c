/* LinearCrossEntropy, a block of rows at a time: rows that count are gathered, multiplied into
 * logits, these turned into losses and then in place into gradients, which two more products take
 * to x and w. */
#include <string.h>

#include "base/int.h"
#include "cpu/convert.h"
#include "cpu/gemm.h"
#include "cpu/kernel.h"
#include "cpu/ops/loss.h"
#include "cpu/parallel.h"
#include "ops/forms.h"

typedef struct linear_loss_params {
  omc_linear_loss_form form;
  int64_t block; /* most rows of a block */
} linear_loss_params;

/* Offsets into the workspace, in bytes; the last is where that of the products begins. */
typedef struct layout {
  size_t row, target, loss, top, log_sum, widened, logits, narrow, x, dx, product;
} layout;

static inline layout layout_of(const linear_loss_params *p, omc_dtype dtype) {
  const size_t size = omc_dtype_size(dtype), wide = omc_acc_size(dtype);
  const size_t n = (size_t)p->form.n, block = (size_t)p->block;
  const size_t cells = block * (size_t)p->form.loss.classes, features = block * (size_t)p->form.k;
  layout at = {0};
  size_t end = 0;
#define PLACE(what, bytes) \
  at.what = end;           \
  end = omc_round_up(end + (bytes), 64);
  PLACE(row, n * sizeof(int64_t))
  PLACE(target, n * sizeof(int64_t))
  PLACE(loss, n * wide)
  PLACE(top, n * wide)
  PLACE(log_sum, n * wide)
  PLACE(widened, 2 * (size_t)p->form.loss.classes * wide)
  PLACE(logits, cells * wide)
  PLACE(narrow, dtype == OMC_BF16 ? cells * size : 0)
  PLACE(x, features * size)
  PLACE(dx, features * wide)
  PLACE(product, 0)
#undef PLACE
  return at;
}

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

#include "cpu/rows.h"

typedef struct {
  const omc_kernel_args *args;
  const linear_loss_params *p;
  const storage_t *x, *w;
  const int64_t *target;
  const acc_t *weight;
  const acc_t *bias;      /* NULL: none */
  acc_t *dx, *dw, *dbias; /* NULL: not asked for */
  int64_t *row;           /* those that count */
  int64_t *row_target;
  acc_t *loss, *top, *log_sum, *logits, *block_dx;
  /* Their gradients, as products of bf16 are fast, and its range is large enough: f16 would lose
   * small ones. NULL: logits become them. */
  storage_t *narrow;
  storage_t *block_x;
  void *product;
  int64_t begin, rows; /* of the block, among those that count */
} linear_job;

static int64_t item_grain(int64_t elements) { return omc_grain(OMC_GRAIN_ELEMENTS, elements); }

/* Finds the rows that count and the sum of their weights; checks every target. */
static omc_status count_rows(linear_job *job, int64_t *counted, double *total) {
  const omc_loss_form *form = &job->p->form.loss;
  for (int64_t r = 0; r < job->p->form.n; r++) {
    const int64_t t = job->target[r];
    if (t == form->ignore_index) continue;
    OMC_TRY(omc_check_target(job->args, form, r, t));
    *total += job->weight ? (double)job->weight[t] : 1;
    job->row[*counted] = r;
    job->row_target[(*counted)++] = t;
  }
  return OMC_OK;
}

static void gather(omc_range range, void *ctx) {
  const linear_job *job = ctx;
  const int64_t k = job->p->form.k;
  for (int64_t i = range.begin; i < range.end; i++)
    memcpy(job->block_x + i * k, job->x + job->row[job->begin + i] * k, (size_t)k * sizeof *job->x);
}

static void scatter(omc_range range, void *ctx) {
  const linear_job *job = ctx;
  const int64_t k = job->p->form.k;
  for (int64_t i = range.begin; i < range.end; i++)
    memcpy(job->dx + job->row[job->begin + i] * k, job->block_dx + i * k,
           (size_t)k * sizeof(acc_t));
}

/* Adds up the columns of the block's gradients, which may be of millions of rows: groups side by
 * side, as far as their sums stay in the first cache. */
static void add_columns(omc_range range, void *ctx) {
  enum { TOGETHER = 2048 / OMC_COLUMNS };
  const linear_job *job = ctx;
  const int64_t n = job->p->form.loss.classes;
  for (int64_t g = range.begin; g < range.end; g += TOGETHER) {
    const int64_t c = g * OMC_COLUMNS, groups = omc_min(range.end - g, TOGETHER);
    const int64_t width = omc_min(n - c, groups * OMC_COLUMNS);
    double sums[TOGETHER * OMC_COLUMNS] = {0};
    for (int64_t i = 0; i < job->rows; i++) {
      const acc_t *row = job->logits + i * n + c;
      acc_t loaded[TOGETHER * OMC_COLUMNS];
      if (job->narrow) load_row(job->narrow + i * n + c, loaded, width), row = loaded;
      for (int64_t j = 0; j < width; j++) sums[j] += (double)row[j];
    }
    for (int64_t j = 0; j < width; j++) job->dbias[c + j] += (acc_t)sums[j];
  }
}

static void products_of_block(linear_job *job, bool first) {
  const int64_t k = job->p->form.k, classes = job->p->form.loss.classes, rows = job->rows;
  const int threads = job->args->threads;
  const omc_dtype dtype = job->narrow ? OMC_BF16 : OMC_ACC;
  void *const gradients = job->narrow ? (void *)job->narrow : (void *)job->logits;
  if (job->dx) {
    const omc_gemm_args g = {.m = rows,
                             .n = k,
                             .k = classes,
                             .a = omc_matrix_rows(gradients, classes, dtype),
                             .b = omc_matrix_rows(job->w, k, OMC_STORAGE),
                             .c = omc_matrix_rows(job->block_dx, k, OMC_ACC),
                             .alpha = 1};
    omc_gemm(&g, threads, job->product);
    omc_parallel_for(rows, item_grain(k), threads, scatter, job);
  }
  if (job->dw) {
    const omc_gemm_args g = {.m = classes,
                             .n = k,
                             .k = rows,
                             .a = omc_matrix_columns(gradients, classes, dtype),
                             .b = omc_matrix_rows(job->block_x, k, OMC_STORAGE),
                             .c = omc_matrix_rows(job->dw, k, OMC_ACC),
                             .alpha = 1,
                             .beta = first ? 0 : 1};
    omc_gemm(&g, threads, job->product);
  }
  if (job->dbias)
    omc_parallel_for(omc_ceil_div(classes, OMC_COLUMNS), item_grain(rows * OMC_COLUMNS), threads,
                     add_columns, job);
}

static void run_block(linear_job *job, double total, bool first) {
  const int64_t k = job->p->form.k, classes = job->p->form.loss.classes;
  const int threads = job->args->threads;
  if (k > 0) omc_parallel_for(job->rows, item_grain(k), threads, gather, job);
  const omc_gemm_args g = {.m = job->rows,
                           .n = classes,
                           .k = k,
                           .a = omc_matrix_rows(job->block_x, k, OMC_STORAGE),
                           .b = omc_matrix_columns(job->w, k, OMC_STORAGE),
                           .c = omc_matrix_rows(job->logits, classes, OMC_ACC),
                           .alpha = 1,
                           .bias = job->bias};
  omc_gemm(&g, threads, job->product);
  omc_loss_rows rows = {.form = job->p->form.loss,
                        .logits = job->logits,
                        .narrow = job->narrow,
                        .target = job->row_target + job->begin,
                        .weight = job->weight,
                        .total = total,
                        .loss = job->loss + job->begin,
                        .top = job->top,
                        .log_sum = job->log_sum,
                        .gradient = job->dx || job->dw || job->dbias};
  rows.form.outer = job->rows;
  OMC_LOSS_NAME(rows)(&rows, threads);
  if (rows.gradient) products_of_block(job, first);
}

OMC_KERNEL(LinearCrossEntropy, args) {
  const linear_loss_params *p = args->params;
  const layout at = layout_of(p, OMC_STORAGE);
  char *const workspace = args->workspace;
  linear_job job = {.args = args,
                    .p = p,
                    .x = omc_in_data(args, 0),
                    .w = omc_in_data(args, 1),
                    .target = omc_in_data(args, 2),
                    .dx = omc_out_data(args, 1),
                    .dw = omc_out_data(args, 2),
                    .dbias = omc_out_data(args, 3),
                    .row = (void *)(workspace + at.row),
                    .row_target = (void *)(workspace + at.target),
                    .loss = (void *)(workspace + at.loss),
                    .top = (void *)(workspace + at.top),
                    .log_sum = (void *)(workspace + at.log_sum),
                    .logits = (void *)(workspace + at.logits),
                    .narrow = OMC_STORAGE == OMC_BF16 ? (void *)(workspace + at.narrow) : NULL,
                    .block_x = (void *)(workspace + at.x),
                    .block_dx = (void *)(workspace + at.dx),
                    .product = workspace + at.product};
  const int64_t classes = p->form.loss.classes, k = p->form.k;
  acc_t *widened = (void *)(workspace + at.widened);
  job.bias = parameter(args, 3, classes, &widened);
  job.weight = parameter(args, 4, classes, &widened);
  int64_t counted = 0;
  double total = 0, sum = 0;
  OMC_TRY(count_rows(&job, &counted, &total));
  if (job.dx && counted < p->form.n) memset(job.dx, 0, (size_t)(p->form.n * k) * sizeof *job.dx);
  if (job.dw && counted == 0) memset(job.dw, 0, (size_t)(classes * k) * sizeof *job.dw);
  if (job.dbias) memset(job.dbias, 0, (size_t)classes * sizeof *job.dbias);
  const int64_t blocks = omc_ceil_div(counted, p->block);
  for (int64_t b = 0; b < blocks; b++) {
    job.begin = counted * b / blocks;
    job.rows = counted * (b + 1) / blocks - job.begin;
    run_block(&job, total, b == 0);
  }
  for (int64_t r = 0; r < counted; r++) sum += (double)job.loss[r];
  *(acc_t *)args->out[0].data =
      (acc_t)(p->form.loss.reduction == OMC_LOSS_MEAN ? sum / total : sum);
  return OMC_OK;
}

#endif

#ifndef OMC_VARIANT

#define BLOCK_BYTES ((int64_t)128 << 20) /* of logits */

static omc_status params_linear_loss(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  linear_loss_params *p = params;
  OMC_TRY(omc_linear_loss_form_of(node, &p->form));
  const int64_t row = p->form.loss.classes * (int64_t)omc_acc_size(omc_in(node, 0)->type.dtype);
  p->block = omc_clamp(BLOCK_BYTES / omc_max(row, 1), 1, omc_max(p->form.n, 1));
  return OMC_OK;
}

static size_t linear_loss_workspace(const omc_node *node, const void *params, int threads) {
  const linear_loss_params *p = params;
  const omc_dtype dtype = omc_in(node, 0)->type.dtype;
  const int64_t k = p->form.k, classes = p->form.loss.classes;
  size_t product = omc_gemm_workspace(dtype, p->block, classes, k, threads);
  const size_t to_x = omc_gemm_workspace(dtype, p->block, k, classes, threads);
  const size_t to_w = omc_gemm_workspace(dtype, classes, k, p->block, threads);
  if (to_x > product) product = to_x;
  if (to_w > product) product = to_w;
  return layout_of(p, dtype).product + product;
}

OMC_KERNELS(LinearCrossEntropy)
OMC_CPU_OP(LinearCrossEntropy, LinearCrossEntropy,
           OMC_PARAMS(linear_loss_params, params_linear_loss), .workspace = linear_loss_workspace)

#endif
