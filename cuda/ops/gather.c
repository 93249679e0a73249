/* Reading by index, and gradients of that, which are deterministic. */
#include "cuda/ops/gather.h"

#include "base/int.h"
#include "cuda/api.h"
#include "cuda/sort.h"
#include "ops/forms.h"
#include "ops/infer.h"

enum { WIDEST = 16 }; /* bytes that are moved at a time */

static const char source[] = "#include \"cuda/ops/gather.h\"\n";

static omc_cuda_grid grid_of(int64_t n) {
  return (omc_cuda_grid){omc_ceil_div(n, OMC_GATHER_THREADS), OMC_GATHER_THREADS, 0};
}

/* ---- ids ---- */

static omc_status rows_of(omc_cuda_device *device, const omc_node *node, const omc_rows_form *f,
                          omc_gather_rows *out) {
  out->ids = (omc_gpu_ids){.dim = f->dim,
                           .wide = omc_in(node, 1)->type.dtype == OMC_I64,
                           .negative = f->negative || f->depth > 0,
                           .outside = OMC_LETTER_INDEX,
                           .depth = f->depth};
  for (int32_t d = 0; d < f->depth; d++) out->ids.dims[d] = f->dims[d];
  out->n = omc_gpu_divisor_of(f->n);
  out->outer_ids = f->outer_ids;
  return omc_cuda_sender_of(device, node, &out->ids.sender);
}

static omc_status lines_of(omc_cuda_device *device, const omc_node *node, const omc_shape *table,
                           omc_gather_lines *out) {
  omc_lines_form f;
  OMC_TRY(omc_gather_elements_form_of(node, table, &f));
  const omc_type *ids = &omc_in(node, 1)->type;
  out->ids = (omc_gpu_ids){.dim = f.dim,
                           .wide = ids->dtype == OMC_I64,
                           .negative = f.negative,
                           .outside = f.negative ? OMC_LETTER_INDEX : OMC_LETTER_BOUNDS};
  out->n = f.n * f.count;
  out->step = f.table_step;
  out->rank = ids->shape.rank;
  omc_shape_strides(table, out->strides);
  if (out->rank > 0) out->strides[f.axis] = 0;
  for (int32_t d = 0; d < ids->shape.rank; d++)
    out->dims[d] = omc_gpu_divisor_of(ids->shape.dims[d]);
  return omc_cuda_sender_of(device, node, &out->ids.sender);
}

/* ---- picking ---- */

typedef struct rows_params {
  omc_gather_rows rows;
  int64_t row_bytes, picked; /* rows that are picked */
  omc_cuda_kernel kernels[OMC_CUDA_UNITS];
} rows_params;

typedef omc_status (*rows_form)(const omc_node *, const omc_shape *, omc_rows_form *);

/* log2 of the bytes that are moved at a time, between addresses with these bits. */
static int unit_of(const rows_params *p, uintptr_t addresses) {
  return __builtin_ctzll((uint64_t)p->row_bytes | addresses | WIDEST);
}

static omc_status run_rows(const omc_kernel_args *args) {
  rows_params *p = (rows_params *)(uintptr_t)args->params;
  omc_gather_rows rows = p->rows;
  rows.src = args->in[0].data, rows.dst = args->out[0].data, rows.ids.data = args->in[1].data;
  const int unit = unit_of(p, (uintptr_t)rows.src | (uintptr_t)rows.dst);
  rows.inner = omc_gpu_divisor_of(p->row_bytes >> unit);
  rows.units = p->picked * (p->row_bytes >> unit);
  return omc_cuda_launch(&p->kernels[unit], grid_of(rows.units), &rows, args->queue);
}

static omc_status params_rows(omc_cuda_device *device, const omc_node *node, rows_form form,
                              rows_params *p) {
  static const char *const names[OMC_CUDA_UNITS] = {"rows_1", "rows_2", "rows_4", "rows_8",
                                                    "rows_16"};
  const omc_type *table = &omc_in(node, 0)->type;
  omc_rows_form f;
  OMC_TRY(form(node, &table->shape, &f));
  OMC_TRY(rows_of(device, node, &f, &p->rows));
  p->row_bytes = f.inner * (int64_t)omc_dtype_size(table->dtype);
  p->picked = f.outer * f.n;
  return omc_cuda_kernels_in(device, source, names, (size_t)1 << unit_of(p, 0), p->kernels);
}

typedef struct lines_params {
  omc_gather_lines lines;
  omc_cuda_kernel kernel;
} lines_params;

static omc_status run_lines(const omc_kernel_args *args) {
  lines_params *p = (lines_params *)(uintptr_t)args->params;
  omc_gather_lines lines = p->lines;
  lines.src = args->in[0].data, lines.dst = args->out[0].data, lines.ids.data = args->in[1].data;
  return omc_cuda_launch(&p->kernel, grid_of(lines.n), &lines, args->queue);
}

static omc_status params_lines(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                               void *params) {
  static const char *const names[] = {"lines_1", "lines_2", "lines_4", "lines_8"};
  (void)arena;
  lines_params *p = params;
  const omc_type *table = &omc_in(node, 0)->type;
  OMC_TRY(lines_of(device, node, &table->shape, &p->lines));
  return omc_cuda_kernel_in(device, source, names[__builtin_ctzll(omc_dtype_size(table->dtype))],
                            &p->kernel);
}

/* ---- gradients ---- */

typedef struct grad_params {
  omc_row_keys rows; /* one of the two */
  omc_line_keys lines;
  bool by_lines;
  int64_t repeats;
  uint32_t base, src; /* inputs: what the result begins as, if it is there, and what is put in */
  omc_scatter scatter;
  omc_cuda_kernel keys, tiles, parts;
  omc_cuda_sort sort;
  size_t sort_bytes, parts_bytes;
} grad_params;

/* What the result is added to, or zeros. */
static omc_status begin_from(const omc_tensor *base, const omc_tensor *out, void *queue) {
  const size_t bytes =
      (size_t)omc_shape_numel(&out->type->shape) * omc_dtype_size(out->type->dtype);
  const omc_cuda_ptr to = (omc_cuda_ptr)(uintptr_t)out->data;
  if (bytes == 0 || (base && base->data == out->data)) return OMC_OK;
  if (base)
    OMC_CUDA_TRY(cuMemcpyDtoDAsync_v2, to, (omc_cuda_ptr)(uintptr_t)base->data, bytes, queue);
  else
    OMC_CUDA_TRY(cuMemsetD8Async, to, 0, bytes, queue);
  return OMC_OK;
}

static omc_status write_keys(grad_params *p, const omc_kernel_args *args) {
  const omc_cuda_grid grid = grid_of(p->scatter.n);
  if (p->by_lines) {
    omc_line_keys keys = p->lines;
    keys.lines.ids.data = args->in[1].data, keys.to.keys = args->workspace;
    return omc_cuda_launch(&p->keys, grid, &keys, args->queue);
  }
  omc_row_keys keys = p->rows;
  keys.rows.ids.data = args->in[1].data, keys.to.keys = args->workspace;
  return omc_cuda_launch(&p->keys, grid, &keys, args->queue);
}

static omc_status run_grad(const omc_kernel_args *args) {
  grad_params *p = (grad_params *)(uintptr_t)args->params;
  omc_scatter s = p->scatter;
  const bool has_base = args->n_in > p->base && args->in[p->base].type;
  OMC_TRY(begin_from(has_base ? &args->in[p->base] : NULL, &args->out[0], args->queue));
  if (s.n == 0) return OMC_OK;
  OMC_TRY(write_keys(p, args));
  OMC_TRY(omc_cuda_sort_run(&p->sort, args->workspace, s.n, s.rows, args->queue, &s.keys,
                            &s.positions));
  s.src = args->in[p->src].data, s.dst = args->out[0].data;
  s.parts = (char *)args->workspace + p->sort_bytes;
  OMC_TRY(omc_cuda_launch(&p->tiles, grid_of(s.sums), &s, args->queue));
  if (s.tiles.by == 1) return OMC_OK;
  return omc_cuda_launch(&p->parts, grid_of(s.sums), &s, args->queue);
}

/* Of n picked rows of `inner` elements, for `rows` of the gradient. */
static omc_status finish_grad(omc_cuda_device *device, const omc_node *node, int64_t n,
                              int64_t rows, int64_t inner, omc_join join, grad_params *p) {
  static const char *const defines[] = {[OMC_JOIN_SUM] = "",
                                        [OMC_JOIN_PRODUCT] = "#define OMC_JOIN_PRODUCT\n",
                                        [OMC_JOIN_MOST] = "#define OMC_JOIN_MOST\n",
                                        [OMC_JOIN_LEAST] = "#define OMC_JOIN_LEAST\n"};
  const omc_dtype dtype = omc_in(node, 0)->type.dtype;
  const int64_t tiles = omc_ceil_div(n, OMC_GATHER_TILE), sums = p->repeats * tiles * inner;
  omc_scatter *s = &p->scatter;
  s->n = n, s->rows = rows, s->sums = sums;
  s->inner = omc_gpu_divisor_of(inner), s->tiles = omc_gpu_divisor_of(tiles);
  p->rows.to = p->lines.to = (omc_gather_keys){NULL, n, rows};
  p->sort_bytes = omc_cuda_sort_bytes(n);
  p->parts_bytes = tiles > 1 ? 2 * (size_t)sums * omc_dtype_size(omc_dtype_acc(dtype)) : 0;
  OMC_TRY(omc_cuda_kernel_in(device, source, p->by_lines ? "line_keys" : "row_keys", &p->keys));
  OMC_TRY(omc_cuda_sort_of(device, &p->sort));
  OMC_TRY(
      omc_cuda_kernel_of(device, "gather", dtype, defines[join], "scatter_tiles", "", &p->tiles));
  return omc_cuda_kernel_of(device, "gather", dtype, defines[join], "scatter_parts", "", &p->parts);
}

static omc_status params_rows_grad(omc_cuda_device *device, const omc_node *node, rows_form form,
                                   grad_params *p) {
  omc_rows_form f;
  OMC_TRY(form(node, &omc_out(node, 0)->type.shape, &f));
  OMC_TRY(rows_of(device, node, &f, &p->rows.rows));
  p->base = 2, p->scatter.padding = f.padding, p->scatter.by_freq = f.by_freq;
  p->repeats = f.outer_ids ? 1 : f.outer;
  const int64_t outer = f.outer_ids ? f.outer : 1;
  return finish_grad(device, node, outer * f.n, outer * f.dim, f.inner, OMC_JOIN_SUM, p);
}

static omc_status params_put_in(omc_cuda_device *device, const omc_node *node, grad_params *p) {
  const omc_shape *table = &omc_out(node, 0)->type.shape;
  omc_lines_form f;
  OMC_TRY(omc_gather_elements_form_of(node, table, &f));
  OMC_TRY(lines_of(device, node, table, &p->lines.lines));
  p->by_lines = true, p->repeats = 1, p->scatter.padding = -1;
  return finish_grad(device, node, p->lines.lines.n, omc_shape_numel(table), 1, f.join, p);
}

static omc_status params_lines_grad(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                    void *params) {
  (void)arena;
  grad_params *p = params;
  p->base = 2;
  return params_put_in(device, node, p);
}

static omc_status params_scatter(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                 void *params) {
  (void)arena;
  grad_params *p = params;
  p->src = 2;
  return params_put_in(device, node, p);
}

static size_t grad_workspace(const void *params) {
  const grad_params *p = params;
  return p->sort_bytes + p->parts_bytes;
}

/* An op that picks rows, and its gradient. */
#define GRAD(name, decode)                                                 \
  const omc_cuda_op omc_cuda_##name = {.run = run_grad,                    \
                                       .params_size = sizeof(grad_params), \
                                       .params = decode,                   \
                                       .workspace = grad_workspace};
#define ROWS(name, id)                                                                           \
  static omc_status params_##id(omc_cuda_device *device, const omc_node *node, omc_arena *arena, \
                                void *params) {                                                  \
    (void)arena;                                                                                 \
    return params_rows(device, node, omc_##id##_form_of, params);                                \
  }                                                                                              \
  static omc_status params_##id##_grad(omc_cuda_device *device, const omc_node *node,            \
                                       omc_arena *arena, void *params) {                         \
    (void)arena;                                                                                 \
    return params_rows_grad(device, node, omc_##id##_form_of, params);                           \
  }                                                                                              \
  const omc_cuda_op omc_cuda_##name = {                                                          \
      .run = run_rows, .params_size = sizeof(rows_params), .params = params_##id};               \
  GRAD(name##Grad, params_##id##_grad)
ROWS(Gather, gather)
ROWS(GatherND, gather_nd)
ROWS(Embedding, embedding)
const omc_cuda_op omc_cuda_GatherElements = {
    .run = run_lines, .params_size = sizeof(lines_params), .params = params_lines};
GRAD(GatherElementsGrad, params_lines_grad)
GRAD(ScatterElements, params_scatter)
