/* Casts: as many tensors to a launch as its parameters have room for. */
#include "cuda/ops/cast.h"

#include <stdio.h>

#include "base/int.h"
#include "cuda/launch.h"

enum { MAX_PARAMETER_BYTES = 4096, SOURCE_BYTES = 160 };
_Static_assert(sizeof(omc_gpu_casts) <= MAX_PARAMETER_BYTES, "a launch has room for its tensors");

static omc_status params_casts(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                               void *kernel) {
  (void)arena;
  const omc_dtype from = omc_in(node, 0)->type.dtype, to = node->out[0]->type.dtype;
  char source[SOURCE_BYTES];
  snprintf(source, sizeof source,
           "#define OMC_FROM %s\n#define OMC_TO %s\n#define OMC_ACC %s\n#include "
           "\"cuda/ops/cast.h\"\n",
           omc_cuda_storage(from), omc_cuda_storage(to), omc_cuda_storage(omc_dtype_acc(from)));
  return omc_cuda_kernel_in(device, source, "cast_each", kernel);
}

static omc_status run_casts(const omc_kernel_args *args) {
  omc_cuda_kernel *kernel = (omc_cuda_kernel *)(uintptr_t)args->params;
  for (uint32_t begin = 0; begin < args->n_in; begin += OMC_CASTS) {
    const omc_tensor *in = args->in + begin, *out = args->out + begin;
    omc_gpu_casts p = {.n = args->n_in - begin};
    if (p.n > OMC_CASTS) p.n = OMC_CASTS;
    for (uint32_t i = 0; i < p.n; i++) {
      const int64_t n = omc_shape_numel(&in[i].type->shape);
      p.each[i] = (omc_gpu_cast){in[i].data, out[i].data, n};
      p.first[i + 1] = p.first[i] + (uint32_t)omc_ceil_div(n, OMC_CAST_PART);
    }
    const omc_cuda_grid grid = {p.first[p.n], OMC_CAST_THREADS, 0};
    OMC_TRY(omc_cuda_launch(kernel, grid, &p, args->queue));
  }
  return OMC_OK;
}

const omc_cuda_op omc_cuda_Casts = {
    .run = run_casts, .params_size = sizeof(omc_cuda_kernel), .params = params_casts};
