/* The reverse sweep: from a bound forward graph to a joint graph. */
#ifndef OMC_AUTODIFF_AUTODIFF_H
#define OMC_AUTODIFF_AUTODIFF_H

#include "graph/graph.h"

/* Extends `g` (typed, forward only) by the nodes of n_backwards backwards.
 *
 * out_grads[b * g->n_outputs + k] says that in backward b the caller will give the gradient of
 * forward output k; in_grads[i] (g->n_inputs entries) that it wants the gradient of input i. Adds
 * the GRAD values, calls the gradient rules in reverse order, sums broadcast gradients back to the
 * input's shape, adds up contributions, casts to the input's dtype, and sets the result to the
 * forward outputs followed by n_inputs gradients of each backward (NULL: not wanted, or zero
 * because nothing differentiable connects it). Integer and bool values carry no gradient. */
omc_status omc_differentiate(omc_graph *g, uint32_t n_backwards, const bool *out_grads,
                             const bool *in_grads) OMC_MUST_USE;

#endif
