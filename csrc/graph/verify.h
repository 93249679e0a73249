/* Structural invariants of a graph. */
#ifndef OMC_GRAPH_VERIFY_H
#define OMC_GRAPH_VERIFY_H

#include "graph/graph.h"

/* OMC_EINTERNAL names the node that breaks a rule: definitions before uses, use lists that agree
 * with inputs both ways, ids below n_values, no forward node that reads a backward value, unique
 * names, outputs that point back to their node, and, if `typed`, no rank or dim of -1. */
omc_status omc_graph_verify(const omc_graph *g, bool typed) OMC_MUST_USE;

#endif
