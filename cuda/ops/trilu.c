/* Trilu, element by element. */
#include "cuda/ops/trilu.h"

#include "base/int.h"
#include "cuda/launch.h"
#include "ops/infer.h"

typedef struct params {
  omc_cuda_kernel kernel;
  omc_trilu trilu;
} params;

static omc_status run_trilu(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_trilu trilu = p->trilu;
  trilu.x = args->in[0].data, trilu.y = args->out[0].data;
  const int64_t of_block = OMC_TRILU_THREADS * OMC_TRILU_UNITS;
  const omc_cuda_grid grid = {omc_ceil_div(trilu.n, of_block), OMC_TRILU_THREADS, 0};
  return omc_cuda_launch(&p->kernel, grid, &trilu, args->queue);
}

static omc_status params_trilu(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                               void *params_) {
  (void)arena;
  static const char *const names[] = {"trilu_1", "trilu_2", "trilu_4", "trilu_8"};
  params *p = params_;
  const omc_type *x = &omc_in(node, 0)->type;
  const int64_t rows = x->shape.dims[x->shape.rank - 2], cols = x->shape.dims[x->shape.rank - 1];
  const int64_t k = omc_in(node, 1) ? omc_const_int(omc_in(node, 1), 0) : 0;
  p->trilu = (omc_trilu){.n = omc_shape_numel(&x->shape),
                         .rows = omc_gpu_divisor_of(rows),
                         .cols = omc_gpu_divisor_of(cols),
                         .k = k,
                         .upper = omc_node_int(node, "upper") != 0};
  const int size = __builtin_ctzll(omc_dtype_size(x->dtype));
  return omc_cuda_kernel_in(device, "#include \"cuda/ops/trilu.h\"\n", names[size], &p->kernel);
}

const omc_cuda_op omc_cuda_Trilu = {
    .run = run_trilu, .params_size = sizeof(params), .params = params_trilu};
