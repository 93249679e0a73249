/* What it takes to run a node: its kernel, decoded parameters and scratch size. */
#ifndef OMC_OPS_CALL_H
#define OMC_OPS_CALL_H

#include "graph/graph.h"
#include "provider.h"

typedef struct omc_call {
  omc_kernel kernel;
  const void *params; /* for omc_kernel_args.params; NULL if the kernel has none */
  size_t workspace_bytes;
} omc_call;

/* Picks the provider's kernel for a typed node, decodes its parameters into `arena` and asks for
 * its scratch size with `threads` threads. Views have no kernel: the caller shares the memory.
 * OMC_EUNSUPPORTED names the node and the dtype if there is no kernel for it. */
omc_status omc_call_prepare(const omc_node *node, const omc_provider *provider, omc_arena *arena,
                            int threads, omc_call *out) OMC_MUST_USE;

#endif
