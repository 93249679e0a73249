/* Resample, a thread for each number it gives. */
#include "cuda/ops/resample.h"

#include "base/int.h"
#include "cuda/launch.h"
#include "ops/forms.h"

typedef struct params {
  omc_cuda_kernel kernel;
  omc_resampling resampling;
} params;

static omc_status run_resample(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_resampling r = p->resampling;
  r.x = args->in[0].data, r.places = args->in[1].data, r.weights = args->in[2].data;
  r.y = args->out[0].data;
  const omc_cuda_grid grid = {omc_ceil_div(r.numel, OMC_RESAMPLE_THREADS), OMC_RESAMPLE_THREADS, 0};
  return omc_cuda_launch(&p->kernel, grid, &r, args->queue);
}

static omc_status params_resample(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                  void *params_) {
  (void)arena;
  params *p = params_;
  omc_resample_form f;
  OMC_TRY(omc_resample_form_of(node, &f));
  const omc_type *y = &omc_out(node, 0)->type;
  p->resampling = (omc_resampling){.numel = omc_shape_numel(&y->shape),
                                   .from = f.from,
                                   .most = f.most,
                                   .inner = omc_gpu_divisor_of(f.inner),
                                   .to = omc_gpu_divisor_of(f.to)};
  return omc_cuda_kernel_of(device, "resample", y->dtype, "", "resample", "", &p->kernel);
}

const omc_cuda_op omc_cuda_Resample = {
    .run = run_resample, .params_size = sizeof(params), .params = params_resample};
