/* Clusters of elementwise nodes that run as one program. */
#ifndef OMC_PASSES_FUSE_ELEMENTWISE_H
#define OMC_PASSES_FUSE_ELEMENTWISE_H

#include "graph/graph.h"
#include "provider.h"

/* Gathers elementwise nodes of one phase, compute class and output shape that share a value, and
 * that the provider calls fusible, into FusedElementwise nodes. */
omc_status omc_fuse_elementwise(omc_graph *g, const omc_provider *provider) OMC_MUST_USE;

#endif
