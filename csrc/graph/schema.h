/* The attributes that nodes of an op may have, expanded from ops.def. */
#ifndef OMC_GRAPH_SCHEMA_H
#define OMC_GRAPH_SCHEMA_H

#include "graph/graph.h"

typedef struct omc_attr_schema {
  const char *name;
  omc_attr_kind kind; /* an int also serves as a float, and an empty list as one of any kind */
  bool required;      /* a node without it is refused */
  bool absent;        /* it has no default: that it is not there means something */
  bool is_dtype;      /* values are ONNX codes of dtypes that there are */
  bool ranged;        /* values are from `low` to `high`; both are integers for ints */
  double low, high;
  const char *const *choices; /* strings allowed, NULL after the last; NULL: any */
  union {
    int64_t i;
    double f;
    const char *s;
  } otherwise; /* the default; of a list: of each of its elements */
} omc_attr_schema;

/* "int", "floats" and so on. */
const char *omc_attr_kind_name(omc_attr_kind kind);

/* All of an op, *n of them, or that of a name; NULL: it has no such attribute. */
const omc_attr_schema *omc_schema_of(omc_op_id op, uint32_t *n);
const omc_attr_schema *omc_schema_find(omc_op_id op, const char *name);

/* Holds a node to its op's schema. Naming node, attribute and value: OMC_EUNSUPPORTED, the op has
 * no such attribute or none of that choice; OMC_EINVALID, it is of another kind, out of its range,
 * or a required one is missing. */
omc_status omc_schema_check(const omc_node *node) OMC_MUST_USE;

#endif
