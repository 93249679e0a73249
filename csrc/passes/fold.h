/* Constants computed at plan time. Small ones stay with the plan. Larger ones are there for passes
 * to look at, such as a causal mask, and then become computations again, so that they take memory
 * in the arena of a run, while they are needed, and not in every plan. */
#ifndef OMC_PASSES_FOLD_H
#define OMC_PASSES_FOLD_H

#include "graph/graph.h"

/* Replaces a typed node by constants if its inputs are constants or only their shapes matter.
 * Random ops and callbacks are left alone, and so is what is above 64 MiB, or would bring the
 * graph's scratch arena above 256 MiB. The node may be gone afterwards. */
omc_status omc_fold_node(omc_graph *g, omc_node *node) OMC_MUST_USE;

#endif
