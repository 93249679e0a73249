/* Parameters and workspaces of Attention and its gradient. */
#include "cpu/ops/attention.h"

#ifndef OMC_VARIANT

OMC_FORM(params_attention, omc_attention_form_of)

static omc_status params_attention_grad(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  attention_grad_params *p = params;
  const omc_attention_form *f = &p->form;
  OMC_TRY(omc_attention_form_of(node, &p->form));
  const int64_t items = f->batch * f->kv_heads, blocks = f->heads / f->kv_heads * n_blocks(f);
  const int64_t parts = items > 0 ? omc_ceil_div(OMC_LEAST_GRAD_ITEMS, items) : 1;
  p->parts = parts < blocks ? parts : blocks > 0 ? blocks : 1;
  return OMC_OK;
}

/* Scratch memory of the threads, and then what they share. */
static size_t forward_workspace(const omc_node *node, const void *params, int threads) {
  const omc_attention_form *f = params;
  return scratch_of(f, 1).total * (size_t)threads +
         hidden_length(f, omc_in(node, 3) != NULL) * omc_acc_size(f->dtype);
}
static size_t backward_workspace(const omc_node *node, const void *params, int threads) {
  const attention_grad_params *p = params;
  const omc_attention_form *f = &p->form;
  return scratch_of(f, 2).total * (size_t)threads +
         (hidden_length(f, omc_in(node, 5) != NULL) + (size_t)n_sums(p, threads)) *
             omc_acc_size(f->dtype);
}

OMC_KERNELS(Attention)
OMC_CPU_OP(Attention, Attention, OMC_PARAMS(omc_attention_form, params_attention),
           .workspace = forward_workspace)
OMC_KERNELS(AttentionGrad)
OMC_CPU_OP(AttentionGrad, AttentionGrad, OMC_PARAMS(attention_grad_params, params_attention_grad),
           .workspace = backward_workspace)

#endif
