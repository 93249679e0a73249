/* Ops that move elements: strided copies. */
#include "cpu/kernel.h"
#include "cpu/strided.h"
#include "ops/forms.h"

#ifndef OMC_VARIANT

typedef struct move_params {
  omc_moves_form form;
  omc_strided *copies;
  bool zips; /* the two of them */
} move_params;

OMC_KERNEL_ANY(Move, args) {
  const move_params *p = args->params;
  const omc_moves_form *f = &p->form;
  if (f->fill) {
    const omc_type *out = args->out[0].type;
    omc_strided_fill(args->out[0].data, omc_shape_numel(&out->shape), omc_dtype_size(out->dtype),
                     f->pad ? omc_in_data(args, f->pad) : NULL, args->threads);
  }
  if (p->zips) {
    omc_strided_zip(&p->copies[0], &p->copies[1], args->out[0].data,
                    args->in[f->moves[0].from].data, args->in[f->moves[1].from].data,
                    args->threads);
    return OMC_OK;
  }
  for (uint32_t i = 0; i < f->n; i++)
    omc_strided_copy(&p->copies[i], args->out[f->moves[i].to].data, args->in[f->moves[i].from].data,
                     args->threads);
  return OMC_OK;
}

static omc_status params_move(const omc_node *node, omc_arena *arena, void *params) {
  move_params *p = params;
  OMC_TRY(omc_moves_form_of(node, arena, &p->form));
  p->copies = OMC_NEW_ARRAY(arena, omc_strided, p->form.n);
  if (!p->copies) OMC_NODE_FAIL(node, ENOMEM, "no memory for %u copies", p->form.n);
  for (uint32_t i = 0; i < p->form.n; i++)
    p->copies[i] =
        omc_strided_of(&p->form.moves[i].box, omc_dtype_size(omc_in(node, 0)->type.dtype));
  p->zips = p->form.n == 2 && node->n_out == 1 && omc_strided_zips(&p->copies[0], &p->copies[1]);
  return OMC_OK;
}

#define MOVE(name) OMC_CPU_OP(name, Move, OMC_PARAMS(move_params, params_move))
MOVE(Concat)
MOVE(Expand)
MOVE(Pad)
MOVE(Slice)
MOVE(SliceGrad)
MOVE(Split)
MOVE(Tile)
MOVE(Transpose)

#endif
