/* Clusters of elementwise nodes that run as one program. */
#ifndef OMC_PASSES_FUSE_ELEMENTWISE_H
#define OMC_PASSES_FUSE_ELEMENTWISE_H

#include "graph/graph.h"

/* Gathers elementwise nodes of one phase, compute class and output shape that share a value into
 * FusedElementwise nodes. */
omc_status omc_fuse_elementwise(omc_graph *g) OMC_MUST_USE;

#endif
