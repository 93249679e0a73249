/* Parameters and workspaces of the cells of recurrent layers. */
#include "cpu/ops/recurrent.h"

#ifndef OMC_VARIANT

OMC_FORM(params_steps, omc_steps_form_of)

static size_t workspace_of(const omc_steps_form *p, bool backward, int threads) {
  const steps_layout at = steps_layout_of(p, backward);
  const int64_t elements = at.packed + at.bias + at.sums + at.carried + threads * at.rows;
  return (size_t)elements * omc_acc_size(p->dtype);
}
static size_t forward_workspace(const omc_node *node, const void *params, int threads) {
  (void)node;
  return workspace_of(params, false, threads);
}
static size_t backward_workspace(const omc_node *node, const void *params, int threads) {
  (void)node;
  return workspace_of(params, true, threads);
}

#define CELLS(name, workspace_) \
  OMC_KERNELS_PAIRS(name)       \
  OMC_CPU_OP(name, name, OMC_PARAMS(omc_steps_form, params_steps), .workspace = workspace_)
CELLS(LstmCells, forward_workspace)
CELLS(LstmCellsGrad, backward_workspace)
CELLS(GruCells, forward_workspace)
CELLS(GruCellsGrad, backward_workspace)
CELLS(RnnCells, forward_workspace)
CELLS(RnnCellsGrad, backward_workspace)

#endif
