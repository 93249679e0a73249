/* Ops that move elements: copies of boxes. */
#include "cuda/copies.h"
#include "ops/forms.h"

typedef struct params {
  omc_moves_form form;
  omc_cuda_copy *copies;
  omc_cuda_fill fill;
} params;

static omc_status run_move(const omc_kernel_args *args) {
  const params *p = args->params;
  const omc_moves_form *f = &p->form;
  if (f->fill) {
    const omc_type *out = args->out[0].type;
    const void *value = f->pad && f->pad < args->n_in ? args->in[f->pad].data : NULL;
    OMC_TRY(omc_cuda_fill_run(&p->fill, args->out[0].data, omc_shape_numel(&out->shape),
                              omc_dtype_size(out->dtype), value, 0, args->queue));
  }
  for (uint32_t i = 0; i < f->n; i++)
    OMC_TRY(omc_cuda_copy_run(&p->copies[i], args->out[f->moves[i].to].data,
                              args->in[f->moves[i].from].data, args->queue));
  return OMC_OK;
}

static omc_status params_move(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                              void *params_) {
  params *p = params_;
  OMC_TRY(omc_moves_form_of(node, arena, &p->form));
  if (p->form.fill) OMC_TRY(omc_cuda_fill_of(device, &p->fill));
  p->copies = OMC_NEW_ARRAY(arena, omc_cuda_copy, p->form.n);
  if (!p->copies) OMC_NODE_FAIL(node, ENOMEM, "no memory for %u copies", p->form.n);
  for (uint32_t i = 0; i < p->form.n; i++)
    OMC_TRY(omc_cuda_copy_of(device, &p->form.moves[i].box,
                             omc_dtype_size(omc_in(node, 0)->type.dtype), &p->copies[i]));
  return OMC_OK;
}

#define MOVE(name)                      \
  const omc_cuda_op omc_cuda_##name = { \
      .run = run_move, .params_size = sizeof(params), .params = params_move};
MOVE(Concat)
MOVE(Expand)
MOVE(Pad)
MOVE(Slice)
MOVE(SliceGrad)
MOVE(Split)
MOVE(Tile)
MOVE(Transpose)
