/* Evaluation of one node at plan time. */
#ifndef OMC_PASSES_FOLD_H
#define OMC_PASSES_FOLD_H

#include "graph/graph.h"

/* Replaces a typed node by constants if its inputs are constants or only their shapes matter;
 * leaves random and host ops and results above 64 MiB alone. The node may be gone afterwards. */
omc_status omc_fold_node(omc_graph *g, omc_node *node) OMC_MUST_USE;

#endif
