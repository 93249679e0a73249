/* Running sums and products, products of all others, and where the largest or the least is. */
#include "cuda/ops/scan.h"

#include "base/int.h"
#include "cuda/launch.h"
#include "ops/forms.h"
#include "ops/infer.h"

enum { SHORT = 32 }; /* elements of a row that a thread goes along in less time than a block */

typedef struct params {
  omc_cuda_kernel kernel;
  omc_scan_along scan;
  omc_cuda_grid grid;
  size_t scratch_bytes;
  bool slopes; /* of products: in[2] and in[3] are read too */
} params;

static omc_status run_scan(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_scan_along scan = p->scan;
  if (p->slopes) scan.of = args->in[2].data, scan.products = args->in[3].data;
  scan.x = args->in[0].data, scan.y = args->out[0].data, scan.scratch = args->workspace;
  return omc_cuda_launch(&p->kernel, p->grid, &scan, args->queue);
}

/* `by_rows` is the kernel with a block for each line, for lines that are long rows. */
static omc_status init(omc_cuda_device *device, const omc_node *node, const omc_axis_form *f,
                       const char *by_rows, const char *by_columns, params *p) {
  const bool rows = f->inner == 1 && f->n > SHORT && by_rows;
  p->scan.lines = f->outer * f->inner, p->scan.n = f->n;
  p->scan.inner = omc_gpu_divisor_of(f->inner);
  const int64_t blocks = rows ? f->outer : omc_ceil_div(p->scan.lines, OMC_SCAN_THREADS);
  p->grid = (omc_cuda_grid){f->n > 0 ? blocks : 0, OMC_SCAN_THREADS, 0};
  return omc_cuda_kernel_of(device, "scan", omc_in(node, 0)->type.dtype, "",
                            rows ? by_rows : by_columns, "", &p->kernel);
}

static omc_status params_cumsum(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                void *params_) {
  (void)arena;
  params *p = params_;
  omc_axis_form f;
  OMC_TRY(omc_running_form_of(node, &f));
  p->scan.reverse = omc_node_int(node, "reverse") != 0;
  p->scan.exclusive = omc_node_int(node, "exclusive") != 0;
  return init(device, node, &f, "cumsum_rows", "cumsum_columns", p);
}

static omc_status params_cumprod(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                 void *params_) {
  (void)arena;
  params *p = params_;
  omc_axis_form f;
  OMC_TRY(omc_running_form_of(node, &f));
  p->slopes = node->op == OMC_OP_CumProdGrad;
  return init(device, node, &f, NULL, p->slopes ? "cumprod_slopes" : "cumprod", p);
}

static omc_status params_arg(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                             void *params_) {
  (void)arena;
  params *p = params_;
  omc_axis_form f;
  OMC_TRY(omc_axis_form_of(node, &f));
  p->scan.least = node->op == OMC_OP_ArgMin;
  return init(device, node, &f, "arg_rows", "arg_columns", p);
}

static omc_status params_others(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                void *params_) {
  (void)arena;
  params *p = params_;
  omc_axis_form f;
  OMC_TRY(omc_axis_form_of(node, &f));
  const omc_type *x = &omc_in(node, 0)->type;
  p->scratch_bytes = (size_t)omc_shape_numel(&x->shape) * omc_dtype_size(omc_dtype_acc(x->dtype));
  return init(device, node, &f, NULL, "other_products", p);
}

static size_t scratch_of(const void *params_) { return ((const params *)params_)->scratch_bytes; }

#define SCAN(name, decode)              \
  const omc_cuda_op omc_cuda_##name = { \
      .run = run_scan, .params_size = sizeof(params), .params = decode, .workspace = scratch_of};
SCAN(CumSum, params_cumsum)
SCAN(CumProd, params_cumprod)
SCAN(CumProdGrad, params_cumprod)
SCAN(OtherProducts, params_others)
SCAN(ArgMax, params_arg)
SCAN(ArgMin, params_arg)
