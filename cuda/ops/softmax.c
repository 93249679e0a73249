/* Softmax and LogSoftmax of a tensor [outer, n, inner] over n, and their gradients. */
#include "cuda/ops/softmax.h"

#include "cuda/teams.h"
#include "ops/forms.h"
#include "ops/op.h"

typedef struct params {
  omc_cuda_kernel kernel;
  omc_cuda_grid grid;
  omc_gpu_lines lines;
} params;

static omc_status params_softmax(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                 void *params_) {
  (void)arena;
  params *p = params_;
  omc_axis_form form;
  const omc_dtype dtype = omc_node_dtype(node);
  OMC_TRY(omc_axis_form_of(node, &form));
  if (form.n == 0) return OMC_OK;
  p->lines.kept = omc_cuda_places(form.outer, form.n * form.inner);
  if (form.inner != 1) omc_cuda_add_group(&p->lines.kept, form.inner, 1);
  p->lines.along = omc_cuda_places(form.n, form.inner);
  const omc_cuda_team team = omc_cuda_team_of(&p->lines, omc_dtype_size(dtype), false);
  p->grid = team.grid;
  return omc_cuda_kernel_of(device, "softmax", dtype, "", omc_op_name(node->op), team.name,
                            &p->kernel);
}

static omc_status run_softmax(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  const omc_softmax given = {.lines = p->lines,
                             .a = args->in[0].data,
                             .b = args->n_in > 1 ? args->in[1].data : NULL,
                             .out = args->out[0].data};
  return omc_cuda_launch(&p->kernel, p->grid, &given, args->queue);
}

#define SOFTMAX(name)                   \
  const omc_cuda_op omc_cuda_##name = { \
      .run = run_softmax, .params_size = sizeof(params), .params = params_softmax};
SOFTMAX(Softmax)
SOFTMAX(SoftmaxGrad)
SOFTMAX(LogSoftmax)
SOFTMAX(LogSoftmaxGrad)
