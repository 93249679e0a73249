/* What a gradient rule sees.
 *
 * The sweep calls a rule once per forward node that some gradient reaches. The rule sets grad_in[i]
 * for each i with needs[i]; leaving it NULL means zero. grad_in[i] may still have the broadcast
 * shape of the output: the sweep sums it back to the input's shape, adds up contributions and
 * casts. grad_out[k] is NULL where no gradient reaches output k; at least one is not. The rule must
 * not look at needs to decide correctness, only to save work. */
#ifndef OMC_OPS_GRAD_H
#define OMC_OPS_GRAD_H

#include "ops/builder.h"

typedef struct omc_grad {
  omc_builder b;              /* phase backward, appends */
  const omc_node *node;       /* the forward node */
  omc_value *const *grad_out; /* node->n_out gradients of its outputs, NULL: zero */
  omc_value **grad_in;        /* to set, NULL at entry: one for each input the op may have */
  const bool *needs;          /* for each of these: somebody wants it; false of one left out */
  bool at_once;               /* inside AT_ONCE() of ops/elementwise.h */
} omc_grad;

/* Fails naming the forward node unless it has output i, which its rule reads. */
static inline omc_status omc_need_output(const omc_grad *g, uint32_t i) {
  if (!omc_out(g->node, i))
    OMC_NODE_FAIL(g->node, EINVALID, "its gradient needs output %u, which is left out", i);
  return OMC_OK;
}

/* The same of its first n outputs. */
static inline omc_status omc_need_saved(const omc_grad *g, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) OMC_TRY(omc_need_output(g, i));
  return OMC_OK;
}

#endif
