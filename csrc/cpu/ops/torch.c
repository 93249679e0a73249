/* Callbacks for ops that run in PyTorch. */
#include "cpu/kernel.h"
#include "graph/graph.h"

#ifndef OMC_VARIANT

typedef struct torch_params {
  int64_t index;
} torch_params;

static omc_status params_torch(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  ((torch_params *)params)->index = omc_node_int(node, "index");
  return OMC_OK;
}

static omc_status need_host(const omc_kernel_args *args) {
  if (args->callbacks) return OMC_OK;
  OMC_FAIL(EUNSUPPORTED, "'%s' runs in PyTorch, and the session has no callbacks", args->node);
}

OMC_KERNEL_ANY(TorchCall, args) {
  const torch_params *p = args->params;
  OMC_TRY(need_host(args));
  return args->callbacks->forward(args->callbacks->ctx, args->run, p->index, args->in, args->n_in,
                                  args->out, args->n_out);
}

OMC_KERNEL_ANY(TorchCallGrad, args) {
  const torch_params *p = args->params;
  OMC_TRY(need_host(args));
  return args->callbacks->backward(args->callbacks->ctx, args->run, p->index, args->in, args->n_in,
                                   args->out, args->n_out);
}

OMC_CPU_OP(TorchCall, TorchCall, OMC_PARAMS(torch_params, params_torch))
OMC_CPU_OP(TorchCallGrad, TorchCallGrad, OMC_PARAMS(torch_params, params_torch))

#endif
