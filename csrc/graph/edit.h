/* Changes of a graph that passes make. None of them allocates or fails. */
#ifndef OMC_GRAPH_EDIT_H
#define OMC_GRAPH_EDIT_H

#include "graph/graph.h"

/* Makes input `i` of `node` use `v` (NULL: left out). */
void omc_set_input(omc_node *node, uint32_t i, omc_value *v);

/* Every use of `from`, the result node's included, becomes a use of `to`. */
void omc_replace_uses(omc_value *from, omc_value *to);

/* Takes the node out of the list and its inputs out of their use lists. Its outputs must be
 * unused. Returns the node that followed it. */
omc_node *omc_erase_node(omc_graph *g, omc_node *node);

/* Puts a node that is in no list in front of `before` (NULL: at the end). */
void omc_link_node(omc_graph *g, omc_node *node, omc_node *before);

/* Whether anybody uses an output of the node. */
bool omc_is_used(const omc_node *node);

/* Erases, in one backward sweep, every node none of whose outputs is used. Returns how many. */
uint32_t omc_erase_unused(omc_graph *g);

#endif
