/* SegmentSum and SegmentSpread, a thread for each number they give. */
#include "cuda/ops/segment.h"

#include "base/int.h"
#include "cuda/launch.h"
#include "ops/forms.h"

typedef struct params {
  omc_cuda_kernel kernel;
  omc_segments segments;
} params;

static omc_status run_segments(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_segments s = p->segments;
  s.src = args->in[0].data, s.offsets = args->in[1].data, s.dst = args->out[0].data;
  const int64_t n = omc_max(s.numel, s.n_offsets);
  const omc_cuda_grid grid = {omc_ceil_div(n, OMC_SEGMENT_THREADS), OMC_SEGMENT_THREADS, 0};
  return omc_cuda_launch(&p->kernel, grid, &s, args->queue);
}

static omc_status params_segments(omc_cuda_device *device, const omc_node *node, const char *name,
                                  params *p) {
  omc_segment_form f;
  OMC_TRY(omc_segment_form_of(node, &f));
  const omc_type *out = &omc_out(node, 0)->type;
  p->segments = (omc_segments){.n_offsets = omc_in(node, 1)->type.shape.dims[0],
                               .segments = f.segments,
                               .rows = f.n,
                               .numel = omc_shape_numel(&out->shape),
                               .inner = omc_gpu_divisor_of(f.inner)};
  OMC_TRY(omc_cuda_sender_of(device, node, &p->segments.sender));
  return omc_cuda_kernel_of(device, "segment", out->dtype, "", name, "", &p->kernel);
}

#define SEGMENT(name, kernel)                                                      \
  static omc_status params_##kernel(omc_cuda_device *device, const omc_node *node, \
                                    omc_arena *arena, void *params_) {             \
    (void)arena;                                                                   \
    return params_segments(device, node, #kernel, params_);                        \
  }                                                                                \
  const omc_cuda_op omc_cuda_##name = {                                            \
      .run = run_segments, .params_size = sizeof(params), .params = params_##kernel};
SEGMENT(SegmentSum, segment_sum)
SEGMENT(SegmentSpread, segment_spread)
