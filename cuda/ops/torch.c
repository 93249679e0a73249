/* Ops that run in PyTorch, which gives them to the stream that it works in: the run's. */
#include "cuda/launch.h"

typedef struct params {
  int64_t index;
} params;

static omc_status params_torch(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                               void *params_) {
  (void)device, (void)arena;
  ((params *)params_)->index = omc_node_int(node, "index");
  return OMC_OK;
}

static omc_status need_host(const omc_kernel_args *args) {
  if (args->callbacks) return OMC_OK;
  OMC_FAIL(EUNSUPPORTED, "'%s' runs in PyTorch, and the session has no callbacks", args->node);
}

static omc_status call(const omc_kernel_args *args) {
  OMC_TRY(need_host(args));
  return args->callbacks->forward(args->callbacks->ctx, args->run,
                                  ((const params *)args->params)->index, args->in, args->n_in,
                                  args->out, args->n_out);
}

static omc_status call_grad(const omc_kernel_args *args) {
  OMC_TRY(need_host(args));
  return args->callbacks->backward(args->callbacks->ctx, args->run,
                                   ((const params *)args->params)->index, args->in, args->n_in,
                                   args->out, args->n_out);
}

#define TORCH(fn) {.run = (fn), .params_size = sizeof(params), .params = params_torch}
const omc_cuda_op omc_cuda_TorchCall = TORCH(call);
const omc_cuda_op omc_cuda_TorchCallGrad = TORCH(call_grad);
