/* Ops that move elements: copies of boxes. */
#include "cuda/copies.h"
#include "ops/forms.h"

typedef struct params {
  omc_moves_form form;
  omc_cuda_copy *copies;
  bool joins; /* them to launches of several */
  omc_cuda_copies joined;
  omc_cuda_fill fill;
} params;

static omc_cuda_copying copying_of(const params *p, uint32_t i, const omc_kernel_args *args) {
  const omc_move *move = &p->form.moves[i];
  return (omc_cuda_copying){&p->copies[i], args->out[move->to].data, args->in[move->from].data};
}

static omc_status run_joined(const params *p, const omc_kernel_args *args) {
  omc_cuda_copying list[OMC_CUDA_COPIES];
  for (uint32_t i = 0; i < p->form.n;) {
    uint32_t n = 0;
    while (i < p->form.n && n < OMC_CUDA_COPIES) list[n++] = copying_of(p, i++, args);
    OMC_TRY(omc_cuda_copies_run(&p->joined, list, n, args->queue));
  }
  return OMC_OK;
}

static omc_status run_move(const omc_kernel_args *args) {
  const params *p = args->params;
  const omc_moves_form *f = &p->form;
  if (f->fill) {
    const omc_type *out = args->out[0].type;
    const void *value = f->pad && f->pad < args->n_in ? args->in[f->pad].data : NULL;
    OMC_TRY(omc_cuda_fill_run(&p->fill, args->out[0].data, omc_shape_numel(&out->shape),
                              omc_dtype_size(out->dtype), value, 0, args->queue));
  }
  if (p->joins) return run_joined(p, args);
  for (uint32_t i = 0; i < f->n; i++) {
    const omc_cuda_copying c = copying_of(p, i, args);
    OMC_TRY(omc_cuda_copy_run(c.copy, c.dst, c.src, args->queue));
  }
  return OMC_OK;
}

static omc_status params_move(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                              void *params_) {
  params *p = params_;
  OMC_TRY(omc_moves_form_of(node, arena, &p->form));
  if (p->form.fill) OMC_TRY(omc_cuda_fill_of(device, &p->fill));
  p->copies = OMC_NEW_ARRAY(arena, omc_cuda_copy, p->form.n);
  if (!p->copies) OMC_NODE_FAIL(node, ENOMEM, "no memory for %u copies", p->form.n);
  p->joins = p->form.n > 1;
  for (uint32_t i = 0; i < p->form.n; i++) {
    OMC_TRY(omc_cuda_copy_of(device, &p->form.moves[i].box,
                             omc_dtype_size(omc_in(node, 0)->type.dtype), &p->copies[i]));
    p->joins &= omc_cuda_copy_joins(&p->copies[i]);
  }
  return p->joins ? omc_cuda_copies_of(device, &p->copies[0], &p->joined) : OMC_OK;
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
