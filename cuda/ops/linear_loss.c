/* LinearCrossEntropy, a chunk of rows at a time: a product makes their logits, kernels of loss.h
 * the losses and, in place, their gradients, and two more products take these to x and w. Rows
 * whose target is ignored have gradients of 0: nobody waits to know how many there are. Products
 * are of so many classes as suit tensor cores: w has rows of 0 for those that are no classes, whose
 * logits and gradients are 0 too, or NaN in rows that are NaN. */
#include <stdio.h>

#include "base/int.h"
#include "cuda/api.h"
#include "cuda/ops/losses.h"
#include "cuda/ops/reduce.h"
#include "cuda/product.h"
#include "cuda/teams.h"
#include "ops/forms.h"

/* Rows of a chunk are so many that reading and writing the gradient of w costs little beside its
 * product, and logits no fewer than are worth launches. */
enum { COLUMN_BYTES = 8192, LEAST_LOGITS = 1 << 20, ROW_UNIT = 8 };

/* What is launched for so many rows. */
typedef struct chunk {
  int64_t rows;
  omc_cuda_loss loss, gradient;
  omc_cuda_product logits, to_x, to_w;
  omc_reduce columns; /* of the gradient, for the bias; but for addresses, as the next */
  omc_cuda_kernel columns_kernel;
  omc_cuda_grid columns_grid;
} chunk;

/* Offsets into the workspace, in bytes. */
typedef struct layout {
  size_t product, loss, parts, total, top, log_sum, bias, weight, logits, x, w, dw, columns, end;
} layout;

typedef struct params {
  omc_linear_loss_form form;
  omc_dtype stored, wide, dtype; /* of x and w; of results; of logits and operands of products */
  int64_t row;                   /* classes of products, and elements from one row to the next */
  int64_t chunks;                /* all but the last of one size */
  bool sums_apart;               /* the gradient of w is summed where there is room for `row` */
  chunk whole, last;
  omc_cuda_loss_sums sums;
  omc_reduce joined;
  omc_cuda_kernel join;
  omc_cuda_grid join_grid;
  omc_cuda_kernel operand; /* from `stored` to `dtype` */
  omc_cuda_kernel widen;   /* to `wide`, of what class weights are stored as */
  layout at;
} params;

/* ---- plan time ---- */

/* Whether there are rows that are no classes. */
static bool pads(const params *p) { return p->row != p->form.loss.classes; }

/* Whether w and the bias are copied: to be read as another dtype, or with rows of 0. */
static bool copies_operands(const params *p) { return p->dtype != p->stored || pads(p); }

static const char sum[] = "#define OMC_VERB omc_sum\n";

static omc_status plan_columns(omc_cuda_device *device, const omc_node *node, const params *p,
                               chunk *c) {
  if (!omc_out(node, 3)) return OMC_OK;
  omc_gpu_lines *lines = &c->columns.lines;
  lines->kept = omc_cuda_places(p->form.loss.classes, 1);
  lines->along = omc_cuda_places(c->rows, p->row);
  const omc_cuda_team team = omc_cuda_columns_by_parts(lines, omc_dtype_size(p->wide));
  c->columns_grid = team.grid;
  char defines[96];
  snprintf(defines, sizeof defines, "%s#define OMC_READ %s\n", sum, omc_cuda_storage(p->dtype));
  return omc_cuda_kernel_of(device, "reduce", p->wide, defines, "reduce", team.name,
                            &c->columns_kernel);
}

static omc_status plan_products(omc_cuda_device *device, const omc_node *node, const params *p,
                                chunk *c) {
  const int64_t k = p->form.k, rows = c->rows;
  const omc_cuda_product product = {
      .device = device, .dtype = p->dtype, .result = p->wide, .alpha = 1};
  c->logits = c->to_x = c->to_w = product;
  c->logits.result = p->dtype;
  c->logits.m = rows, c->logits.n = p->row, c->logits.k = k;
  c->logits.a_row = c->logits.b_row = k, c->logits.d_row = p->row;
  c->logits.trans_b = true;
  c->logits.biased = omc_in(node, 3) != NULL;
  OMC_TRY(omc_cuda_product_plan(&c->logits, node));
  c->to_x.m = rows, c->to_x.n = k, c->to_x.k = p->row;
  c->to_x.a_row = p->row, c->to_x.b_row = c->to_x.d_row = k;
  if (omc_out(node, 1)) OMC_TRY(omc_cuda_product_plan(&c->to_x, node));
  c->to_w.m = p->row, c->to_w.n = k, c->to_w.k = rows;
  c->to_w.a_row = p->row, c->to_w.b_row = c->to_w.d_row = k;
  c->to_w.trans_a = true;
  return omc_out(node, 2) ? omc_cuda_product_plan(&c->to_w, node) : OMC_OK;
}

static omc_status plan_chunk(omc_cuda_device *device, const omc_node *node, const params *p,
                             int64_t rows, chunk *c) {
  omc_loss_form form = p->form.loss;
  c->rows = form.outer = rows;
  OMC_TRY(omc_cuda_loss_of(device, node, &form, p->dtype, p->wide, p->row, "CrossEntropy", true,
                           &c->loss));
  OMC_TRY(omc_cuda_loss_of(device, node, &form, p->dtype, p->wide, p->row, "CrossEntropyGrad", true,
                           &c->gradient));
  OMC_TRY(plan_columns(device, node, p, c));
  OMC_TRY(omc_cuda_enter(device));
  const omc_status status = plan_products(device, node, p, c);
  omc_cuda_leave(device);
  return status;
}

static omc_status plan_copies(omc_cuda_device *device, const omc_node *node, params *p) {
  const omc_value *weight = omc_in(node, 4);
  if (copies_operands(p)) OMC_TRY(omc_cuda_repeat_of(device, p->stored, p->dtype, &p->operand));
  return weight ? omc_cuda_repeat_of(device, weight->type.dtype, p->wide, &p->widen) : OMC_OK;
}

/* Sums of columns are those of the chunks' parts, one after another. */
static omc_status plan_join(omc_cuda_device *device, const omc_node *node, params *p,
                            int64_t parts) {
  if (!omc_out(node, 3)) return OMC_OK;
  omc_gpu_lines *lines = &p->joined.lines;
  lines->kept = omc_cuda_places(p->form.loss.classes, 1);
  lines->along = omc_cuda_places(parts, p->form.loss.classes);
  const omc_cuda_team team = omc_cuda_columns_of(lines);
  p->join_grid = team.grid;
  return omc_cuda_kernel_of(device, "reduce", p->wide, sum, "join", team.name, &p->join);
}

static size_t most_bytes(const chunk *c, size_t bytes) {
  const omc_cuda_product *const products[] = {&c->logits, &c->to_x, &c->to_w};
  for (int i = 0; i < 3; i++)
    if (products[i]->workspace_bytes > bytes) bytes = products[i]->workspace_bytes;
  return bytes;
}

static layout layout_of(const params *p, int64_t parts) {
  const size_t wide = omc_dtype_size(p->wide), size = omc_dtype_size(p->dtype);
  const size_t rows = (size_t)omc_max(p->whole.rows, p->last.rows), row = (size_t)p->row;
  const size_t k = (size_t)p->form.k, classes = (size_t)p->form.loss.classes;
  const bool widens = p->dtype != p->stored;
  layout at = {0};
#define PLACE(what, bytes) \
  at.what = at.end;        \
  at.end = omc_round_up(at.end + (bytes), OMC_PRODUCT_ALIGNMENT);
  PLACE(product, most_bytes(&p->whole, most_bytes(&p->last, 0)))
  PLACE(loss, (size_t)p->form.n * wide)
  PLACE(parts, omc_cuda_loss_sums_bytes(&p->sums))
  PLACE(total, wide)
  PLACE(top, rows * wide)
  PLACE(log_sum, rows * wide)
  PLACE(bias, row * size)
  PLACE(weight, classes * wide)
  PLACE(logits, rows * row * size)
  PLACE(x, widens ? rows * k * size : 0)
  PLACE(w, copies_operands(p) ? row * k * size : 0)
  PLACE(dw, p->sums_apart ? row * k * wide : 0)
  PLACE(columns, (size_t)parts * classes * wide)
#undef PLACE
  return at;
}

static omc_status params_linear_loss(omc_cuda_device *device, const omc_node *node,
                                     omc_arena *arena, void *params_) {
  (void)arena;
  params *p = params_;
  OMC_TRY(omc_linear_loss_form_of(node, &p->form));
  p->stored = omc_in(node, 0)->type.dtype;
  p->wide = omc_dtype_acc(p->stored);
  /* bf16 has the range of the gradients, and logits are rounded to it as PyTorch's are; f16 would
   * lose small gradients. */
  p->dtype = p->stored == OMC_BF16 ? OMC_BF16 : p->wide;
  const int64_t n = p->form.n, classes = p->form.loss.classes;
  p->row = omc_ceil_div(classes, ROW_UNIT) * ROW_UNIT;
  p->sums_apart = pads(p) && omc_out(node, 2);
  const int64_t most =
      omc_max(COLUMN_BYTES / (int64_t)omc_dtype_size(p->dtype), LEAST_LOGITS / omc_max(classes, 1));
  const int64_t even = omc_ceil_div(n, omc_max(omc_ceil_div(n, most), 1));
  const int64_t rows = omc_max(omc_ceil_div(even, ROW_UNIT) * ROW_UNIT, ROW_UNIT);
  p->chunks = omc_ceil_div(n, rows);
  if (p->chunks > 1) OMC_TRY(plan_chunk(device, node, p, rows, &p->whole));
  if (p->chunks > 0) OMC_TRY(plan_chunk(device, node, p, n - (p->chunks - 1) * rows, &p->last));
  OMC_TRY(omc_cuda_loss_sums_of(device, &p->form.loss, p->wide, &p->sums));
  OMC_TRY(plan_copies(device, node, p));
  const int64_t parts =
      p->chunks == 0 ? 0
                     : (p->chunks - 1) * p->whole.columns.lines.parts + p->last.columns.lines.parts;
  p->at = layout_of(p, parts);
  return plan_join(device, node, p, parts);
}

static size_t linear_loss_workspace(const void *params_) {
  return ((const params *)params_)->at.end;
}

/* ---- run time ---- */

/* Addresses, of which those of rows are of the next chunk's. */
typedef struct job {
  const omc_kernel_args *args;
  params *p;
  const char *x;
  const void *w, *bias, *weight; /* NULL: none */
  const int64_t *target;
  char *loss, *dx, *dbias; /* dx, dw NULL: not asked for */
  void *dw;
  char *columns;
  bool gradient;
} job;

static void *place(const job *j, size_t offset) { return (char *)j->args->workspace + offset; }

static omc_status multiply(const job *j, omc_cuda_product *product, const void *a, const void *b,
                           void *d, bool adds) {
  const omc_cuda_operands operands = {
      .a = a, .b = b, .bias = product->biased ? j->bias : NULL, .d = d, .adds = adds};
  return omc_cuda_product_run(product, &operands, place(j, j->p->at.product), j->args->node,
                              j->args->queue);
}

static omc_status gradients_of(job *j, chunk *c, const omc_loss *forward, const void *x,
                               bool first) {
  omc_loss given = c->gradient.given;
  given.logits = given.dlogits = place(j, j->p->at.logits);
  given.target = forward->target, given.weight = forward->weight;
  given.top = forward->top, given.log_sum = forward->log_sum;
  given.total = place(j, j->p->at.total);
  OMC_TRY(omc_cuda_launch(&c->gradient.kernel, c->gradient.grid, &given, j->args->queue));
  if (j->dbias) {
    omc_reduce columns = c->columns;
    columns.x = given.dlogits;
    columns.y = columns.partial = j->columns;
    OMC_TRY(omc_cuda_launch(&c->columns_kernel, c->columns_grid, &columns, j->args->queue));
  }
  if (j->dx) OMC_TRY(multiply(j, &c->to_x, given.dlogits, j->w, j->dx, false));
  void *const dw = j->p->sums_apart ? place(j, j->p->at.dw) : j->dw;
  return dw ? multiply(j, &c->to_w, given.dlogits, x, dw, !first) : OMC_OK;
}

static omc_status run_chunk(job *j, chunk *c, bool first) {
  params *p = j->p;
  const int64_t features = c->rows * p->form.k;
  const void *x = j->x;
  if (p->dtype != p->stored) {
    x = place(j, p->at.x);
    OMC_TRY(omc_cuda_repeat(&p->operand, place(j, p->at.x), j->x, features, omc_max(features, 1),
                            j->args->queue));
  }
  omc_loss given = c->loss.given;
  void *const logits = place(j, p->at.logits);
  given.logits = logits;
  given.target = j->target, given.weight = j->weight;
  given.rows = j->loss;
  given.top = place(j, p->at.top), given.log_sum = place(j, p->at.log_sum);
  OMC_TRY(multiply(j, &c->logits, x, j->w, logits, false));
  OMC_TRY(omc_cuda_launch(&c->loss.kernel, c->loss.grid, &given, j->args->queue));
  if (j->gradient) OMC_TRY(gradients_of(j, c, &given, x, first));
  const size_t rows = (size_t)c->rows, wide = omc_dtype_size(p->wide);
  j->x += (size_t)features * omc_dtype_size(p->stored);
  j->target += rows;
  j->loss += rows * wide;
  if (j->dx) j->dx += (size_t)features * wide;
  j->columns += (size_t)(c->columns.lines.parts * p->form.loss.classes) * wide;
  return OMC_OK;
}

static omc_status zero(void *at, size_t bytes, void *queue) {
  if (bytes > 0) OMC_CUDA_TRY(cuMemsetD8Async, (omc_cuda_ptr)(uintptr_t)at, 0, bytes, queue);
  return OMC_OK;
}

/* An operand of `n` elements for each class. */
static omc_status copy_operand(const job *j, const void **operand, int64_t n, size_t offset) {
  params *p = j->p;
  char *const copy = place(j, offset);
  const int64_t cells = p->form.loss.classes * n;
  const size_t size = omc_dtype_size(p->dtype);
  OMC_TRY(omc_cuda_repeat(&p->operand, copy, *operand, cells, omc_max(cells, 1), j->args->queue));
  *operand = copy;
  return zero(copy + (size_t)cells * size, (size_t)(p->row * n - cells) * size, j->args->queue);
}

/* What is read as another dtype than it is stored as, or beyond its end. */
static omc_status copy_operands(job *j) {
  params *p = j->p;
  const int64_t classes = p->form.loss.classes;
  if (classes == 0) return OMC_OK;
  if (j->weight) {
    void *const weight = place(j, p->at.weight);
    OMC_TRY(omc_cuda_repeat(&p->widen, weight, j->weight, classes, classes, j->args->queue));
    j->weight = weight;
  }
  if (!copies_operands(p)) return OMC_OK;
  if (j->bias) OMC_TRY(copy_operand(j, &j->bias, 1, p->at.bias));
  return copy_operand(j, &j->w, p->form.k, p->at.w);
}

static omc_status run_chunks(job *j) {
  params *p = j->p;
  for (int64_t c = 0; c < p->chunks; c++)
    OMC_TRY(run_chunk(j, c + 1 < p->chunks ? &p->whole : &p->last, c == 0));
  const size_t bytes = (size_t)(p->form.loss.classes * p->form.k) * omc_dtype_size(p->wide);
  if (j->dw && p->chunks == 0)
    OMC_TRY(zero(j->dw, bytes, j->args->queue));
  else if (p->sums_apart && bytes > 0)
    OMC_CUDA_TRY(cuMemcpyDtoDAsync_v2, (omc_cuda_ptr)(uintptr_t)j->dw,
                 (omc_cuda_ptr)(uintptr_t)place(j, p->at.dw), bytes, j->args->queue);
  if (!j->dbias) return OMC_OK;
  omc_reduce joined = p->joined;
  joined.x = place(j, p->at.columns);
  joined.y = j->dbias;
  return omc_cuda_launch(&p->join, p->join_grid, &joined, j->args->queue);
}

/* Inputs: x, w, target, bias?, weight?. Outputs: loss, dx?, dw?, dbias?. */
static omc_status run_linear_loss(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  job j = {.args = args,
           .p = p,
           .x = omc_cuda_in(args, 0),
           .w = omc_cuda_in(args, 1),
           .target = omc_cuda_in(args, 2),
           .bias = omc_cuda_in(args, 3),
           .weight = omc_cuda_in(args, 4),
           .dx = omc_cuda_out(args, 1),
           .dw = omc_cuda_out(args, 2),
           .dbias = omc_cuda_out(args, 3)};
  j.loss = place(&j, p->at.loss), j.columns = place(&j, p->at.columns);
  j.gradient = j.dx || j.dw || j.dbias;
  OMC_TRY(copy_operands(&j));
  omc_loss_total sums = {.target = j.target,
                         .weight = j.weight,
                         .rows = j.loss,
                         .partial = place(&j, p->at.parts),
                         .total = place(&j, p->at.total)};
  if (j.gradient) OMC_TRY(omc_cuda_loss_sums_run(&p->sums, &sums, args->queue));
  OMC_TRY(run_chunks(&j));
  sums.out = omc_cuda_out(args, 0);
  return omc_cuda_loss_sums_run(&p->sums, &sums, args->queue);
}

const omc_cuda_op omc_cuda_LinearCrossEntropy = {.run = run_linear_loss,
                                                 .params_size = sizeof(params),
                                                 .params = params_linear_loss,
                                                 .workspace = linear_loss_workspace};
