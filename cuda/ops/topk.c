/* TopK, a block for each line, or a thread for each short one. */
#include "cuda/ops/topk.h"

#include "base/int.h"
#include "cuda/launch.h"
#include "ops/forms.h"

enum { MOST_STEPS = 512 }; /* of a thread along a line, k times n */

typedef struct params {
  omc_cuda_kernel kernel;
  omc_topk topk;
  int64_t blocks;
  bool is_short;
} params;

static omc_status run_topk(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_topk topk = p->topk;
  topk.x = args->in[0].data, topk.rooms = args->workspace;
  topk.values = omc_cuda_out(args, 0), topk.places = omc_cuda_out(args, 1);
  const omc_cuda_grid grid = {p->blocks, OMC_TOPK_THREADS, 0};
  return omc_cuda_launch(&p->kernel, grid, &topk, args->queue);
}

static omc_status params_topk(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                              void *params_) {
  (void)arena;
  params *p = params_;
  omc_topk_form f;
  OMC_TRY(omc_topk_form_of(node, &f));
  const int64_t lines = f.k > 0 ? f.outer * f.inner : 0;
  p->topk = (omc_topk){.lines = lines,
                       .n = f.n,
                       .k = f.k,
                       .inner = omc_gpu_divisor_of(f.inner),
                       .largest = f.largest};
  p->is_short = f.n <= MOST_STEPS / omc_max(f.k, 1);
  p->blocks = p->is_short ? omc_ceil_div(lines, OMC_TOPK_THREADS) : omc_min(lines, OMC_TOPK_BLOCKS);
  return omc_cuda_kernel_of(device, "topk", omc_in(node, 0)->type.dtype, "", "topk",
                            p->is_short ? "_short" : "", &p->kernel);
}

static size_t rooms_bytes(const void *params_) {
  const params *p = params_;
  return p->is_short ? 0 : 2 * (size_t)(p->blocks * p->topk.k) * sizeof(int64_t);
}

const omc_cuda_op omc_cuda_TopK = {.run = run_topk,
                                   .params_size = sizeof(params),
                                   .params = params_topk,
                                   .workspace = rooms_bytes};
