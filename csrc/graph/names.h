/* A table of values by name. */
#ifndef OMC_GRAPH_NAMES_H
#define OMC_GRAPH_NAMES_H

#include "graph/graph.h"

typedef struct omc_names {
  const omc_allocator *allocator;
  omc_value **slots; /* open addressing, `cap` a power of two or 0 */
  size_t n, cap;
} omc_names;

void omc_names_init(omc_names *names, const omc_allocator *allocator);
void omc_names_deinit(omc_names *names);

/* The value of that name (n bytes) or NULL. */
omc_value *omc_names_find(const omc_names *names, const char *name, size_t n);

/* Enters a named value, borrowed with its name; OMC_EINVALID if that is taken. */
omc_status omc_names_add(omc_names *names, omc_value *v) OMC_MUST_USE;

/* True for letters, digits and any of "_.:/-"; a name is one or more of them. */
bool omc_name_char(char c);
bool omc_name_valid(const char *name, size_t n);

/* For values without a name, numbers that stand for them in what is written of the graph, in its
 * order; no value is named so. number[v->id] is theirs, n_values of them; of no meaning for others.
 */
omc_status omc_number_values(const omc_graph *g, const omc_allocator *allocator,
                             uint32_t *number) OMC_MUST_USE;

#endif
