/* The graph: values and nodes, allocated in one arena and linked both ways.
 *
 * A graph is first a template (dims may be -1), then bound to concrete shapes. Nodes form one list
 * in topological order; that order is also the order of execution. Values are dense row-major
 * tensors. Everything a graph points to lives in its arena or was borrowed for its whole life, so
 * destroying it is one call. A graph is used by one thread at a time. */
#ifndef OMC_GRAPH_GRAPH_H
#define OMC_GRAPH_GRAPH_H

#include "base/arena.h"
#include "base/op_id.h"
#include "base/shape.h"

typedef struct omc_value omc_value;
typedef struct omc_node omc_node;
typedef struct omc_graph omc_graph;

/* One appearance of a value as a node's input, linked into the value's list of uses. */
typedef struct omc_use {
  omc_value *value; /* NULL: optional input left out */
  omc_node *node;
  uint32_t index; /* which input of node */
  struct omc_use *prev, *next;
} omc_use;

typedef enum {
  OMC_ROLE_NODE,  /* output of a node */
  OMC_ROLE_INPUT, /* given by the caller at each forward: user tensor, parameter or buffer */
  OMC_ROLE_GRAD,  /* given by the caller at backward: gradient of output number `index` */
  OMC_ROLE_CONST  /* `data` holds the elements */
} omc_role;

/* How to compute again a constant that a pass has computed. */
typedef struct omc_recipe {
  omc_node *node;       /* in no list, or linked again */
  omc_value *const *in; /* its inputs: constants, NULL where left out */
  uint32_t depth;       /* recipes below one another down to this one */
  bool linked;
} omc_recipe;

struct omc_value {
  const char *name; /* unique in the graph; may be NULL for values made by passes */
  omc_type type;    /* rank -1: not inferred yet */
  omc_role role;
  uint32_t id;        /* below graph->n_values; index of side arrays */
  uint32_t index;     /* NODE: which output; INPUT: which input; GRAD: of which output; CONST that
                         a pass has computed: which output of the node that gave it */
  bool requires_grad; /* INPUT only: the caller may ask for its gradient */
  omc_node *producer; /* NODE only, else NULL */
  const void *data;   /* CONST only, else NULL */
  omc_recipe *recipe; /* CONST whose data is in the graph's scratch arena, else NULL */
  bool sets_shape;    /* a shape rule has asked for its elements: as CONST it stays one */
  omc_use *uses;      /* first use or NULL */
};

/* Scalars, then the lists of each of them. */
typedef enum {
  OMC_ATTR_INT,
  OMC_ATTR_FLOAT,
  OMC_ATTR_STRING,
  OMC_ATTR_INTS,
  OMC_ATTR_FLOATS,
  OMC_ATTR_STRINGS
} omc_attr_kind;

typedef struct omc_attr {
  const char *name;
  omc_attr_kind kind;
  uint32_t n; /* elements; 1 of a scalar */
  union {
    int64_t i;
    double f;
    const char *s;
    const int64_t *is;
    const double *fs;
    const char *const *ss;
  } v;
} omc_attr;

/* When a node runs. A graph has one forward and any number of backwards, each for gradients of
 * other outputs; phase OMC_BACKWARD + b is that of number b. Backwards read what forward made, and
 * nothing of each other. */
typedef uint32_t omc_phase;
enum { OMC_FORWARD, OMC_BACKWARD };

struct omc_node {
  omc_op_id op; /* OMC_N_OPS marks the result node */
  omc_phase phase;
  const char *name; /* where it came from, for messages; may be NULL */
  uint32_t n_in, n_out, n_attr;
  omc_use *in;     /* n_in uses */
  omc_value **out; /* n_out values; NULL: optional output left out */
  const omc_attr *attr;
  omc_node *prev, *next;
};

/* The inputs of the result node are the graph's outputs: first the forward outputs, then, in a
 * joint graph, for each backward in turn the gradient of every input (NULL value: no gradient). */
struct omc_graph {
  omc_arena arena;
  omc_arena scratch;      /* large constants computed by passes; empty once settled */
  size_t constant_bytes;  /* of constants computed by passes, in `arena` */
  omc_node *first, *last; /* topological order, the result node not among them */
  omc_node *result;
  omc_value **inputs; /* n_inputs of role INPUT, in the caller's order */
  omc_value **grads;  /* n_outputs entries of role GRAD or NULL; joint graphs only */
  omc_value **over;   /* n_outputs entries: the input that an output is written over, or NULL;
                         itself NULL: none is */
  uint32_t n_inputs, cap_inputs, cap_grads;
  uint32_t n_outputs; /* forward outputs */
  uint32_t n_grads;   /* gradients after them in the result node: n_inputs for each backward */
  uint32_t n_values;  /* ids given out */
};

/* Creates an empty graph; `allocator` must outlive it. The caller owns *out. */
omc_status omc_graph_create(const omc_allocator *allocator, omc_graph **out) OMC_MUST_USE;
void omc_graph_destroy(omc_graph *graph); /* NULL is accepted */

/* Adds an input or a constant. `name` is copied, `type` too; `data` is borrowed for the graph's
 * life (copy it into graph->arena first if need be). */
omc_status omc_graph_add_input(omc_graph *g, const char *name, const omc_type *type,
                               bool requires_grad, omc_value **out) OMC_MUST_USE;
omc_status omc_graph_add_const(omc_graph *g, const char *name, const omc_type *type,
                               const void *data, omc_value **out) OMC_MUST_USE;

/* Adds the value through which the caller gives the gradient of forward output `index`, of that
 * output's type. It may come before the result is set; its rank is then -1. OMC_EINVALID: there is
 * no such output, or it has a gradient already. */
omc_status omc_graph_add_grad(omc_graph *g, uint32_t index, omc_value **out) OMC_MUST_USE;

/* What omc_graph_add_node needs. Inputs may be NULL where the op allows it. Attributes and names
 * are copied deeply; attributes are held to the op's schema, see graph/schema.h. `before` NULL:
 * appended. Outputs get rank -1 and no name. */
typedef struct omc_node_spec {
  omc_op_id op;
  omc_phase phase;
  const char *name;
  uint32_t n_in, n_out, n_attr;
  omc_value *const *in;
  const omc_attr *attr;
  omc_node *before;
} omc_node_spec;

omc_status omc_graph_add_node(omc_graph *g, const omc_node_spec *spec, omc_node **out) OMC_MUST_USE;

/* Names a value (copied). A name is letters, digits and any of "_.:/-", else OMC_EINVALID; that no
 * other value has it is for the caller to see to. */
omc_status omc_graph_name_value(omc_graph *g, omc_value *v, const char *name) OMC_MUST_USE;

/* Sets the result: n_outputs forward outputs, then n_grads gradients (n_inputs for each backward,
 * NULL for an input without). OMC_EINVALID: another number, an output left out, or the gradient of
 * an output that is not among them has been added. As many outputs as before are written over the
 * same inputs as before, else none is. */
omc_status omc_graph_set_result(omc_graph *g, omc_value *const *values, uint32_t n_outputs,
                                uint32_t n_grads) OMC_MUST_USE;

/* Declares that once forward is done the caller's memory of `input` holds output number `output`.
 * All that reads `input`, backwards and other outputs included, reads what it was before.
 * OMC_EINVALID: there is no such output, `input` is none, or another output is written over it.
 * That both have one type is for the caller to see to: see omc_graph_check_over. */
omc_status omc_graph_write_over(omc_graph *g, uint32_t output, omc_value *input) OMC_MUST_USE;

/* OMC_EDTYPE or OMC_ESHAPE, with both types, if an output of a typed graph is not of the type of
 * the input that it is written over. */
omc_status omc_graph_check_over(const omc_graph *g) OMC_MUST_USE;

/* The same if the gradient of an output is not of the type of the output. */
omc_status omc_graph_check_grads(const omc_graph *g) OMC_MUST_USE;

/* Copies the nodes of a graph, and of its values those in use, which get new ids. Constants are
 * borrowed from `from`, which must outlive the copy. */
omc_status omc_graph_clone(const omc_graph *from, const omc_allocator *allocator,
                           omc_graph **out) OMC_MUST_USE;

/* Gives elements equal to these in memory that outlives the graph. */
typedef omc_status (*omc_keep_elements)(void *ctx, const void *elements, size_t bytes,
                                        const void **out);

/* Exchanges a settled graph for one of the same nodes that holds nothing passes have left behind,
 * and whose ids are those of the values in use. The elements of constants that lie in its arena are
 * given to `keep`. On an error *graph stays. */
omc_status omc_graph_compact(omc_graph **graph, omc_keep_elements keep, void *ctx) OMC_MUST_USE;

static inline omc_value *omc_in(const omc_node *n, uint32_t i) {
  return i < n->n_in ? n->in[i].value : NULL;
}
static inline omc_value *omc_out(const omc_node *n, uint32_t i) {
  return i < n->n_out ? n->out[i] : NULL;
}
static inline bool omc_is_const(const omc_value *v) { return v && v->role == OMC_ROLE_CONST; }

static inline uint32_t omc_n_backwards(const omc_graph *g) {
  return g->n_inputs ? g->n_grads / g->n_inputs : 0;
}

/* The input that forward output k is written over; NULL: none. */
static inline omc_value *omc_over(const omc_graph *g, uint32_t k) {
  return g->over && k < g->n_outputs ? g->over[k] : NULL;
}

/* The phase that gives input r of the result node. */
static inline omc_phase omc_result_phase(const omc_graph *g, uint32_t r) {
  return r < g->n_outputs ? OMC_FORWARD : OMC_BACKWARD + (r - g->n_outputs) / g->n_inputs;
}

/* Whether that phase may read the value: forward reads nothing of a backward, and a backward
 * nothing of another one. */
static inline bool omc_may_read(omc_phase phase, const omc_value *v) {
  if (v->role == OMC_ROLE_GRAD) return phase != OMC_FORWARD;
  return !v->producer || v->producer->phase == OMC_FORWARD || v->producer->phase == phase;
}

/* The attribute of that name; NULL: the node does not give it. */
const omc_attr *omc_node_attr(const omc_node *n, const char *name);

/* What the node gives, else the default in ops.def; an int also serves as a float. It is a mistake
 * of the caller, which builds with assertions stop at, to ask for what the schema of the node's op
 * has not or has as another kind, or where it has no default and the node does not give it. */
int64_t omc_node_int(const omc_node *n, const char *name);
double omc_node_float(const omc_node *n, const char *name);
const char *omc_node_string(const omc_node *n, const char *name);
omc_dtype omc_node_to_dtype(const omc_node *n, const char *name); /* of its ONNX code */

/* The n integers of a list, or the default for each; OMC_ESHAPE: the node gives another number. */
omc_status omc_node_list(const omc_node *node, const char *name, uint32_t n,
                         int64_t *out) OMC_MUST_USE;

/* The list that the node gives, *n_out integers of it, or none. */
const int64_t *omc_node_ints(const omc_node *n, const char *name, uint32_t *n_out);

/* Attribute values for omc_node_spec. */
static inline omc_attr omc_attr_int(const char *name, int64_t i) {
  omc_attr a = {name, OMC_ATTR_INT, 1, {.i = i}};
  return a;
}
static inline omc_attr omc_attr_float(const char *name, double f) {
  omc_attr a = {name, OMC_ATTR_FLOAT, 1, {.f = f}};
  return a;
}
static inline omc_attr omc_attr_string(const char *name, const char *s) {
  omc_attr a = {name, OMC_ATTR_STRING, 1, {.s = s}};
  return a;
}
static inline omc_attr omc_attr_ints(const char *name, const int64_t *is, uint32_t n) {
  omc_attr a = {name, OMC_ATTR_INTS, n, {.is = is}};
  return a;
}

static inline bool omc_attr_is_list(const omc_attr *a) { return a->kind >= OMC_ATTR_INTS; }

/* Element i of a list, or of a scalar itself, as a scalar; strings are borrowed. */
omc_attr omc_attr_element(const omc_attr *a, uint32_t i);

/* The list of n scalars, of the name that *list has, in memory of the arena; of none, one of ints.
 * OMC_EDTYPE: they are not all of one kind. */
omc_status omc_attr_list(omc_arena *arena, const omc_attr *items, uint32_t n,
                         omc_attr *list) OMC_MUST_USE;

/* Reads element i of an integer or bool constant as int64, and of any constant as double. */
int64_t omc_const_int(const omc_value *v, int64_t i);
double omc_const_float(const omc_value *v, int64_t i);

/* The source name of a node, or its op's where it has none. */
const char *omc_node_name(const omc_node *n);

/* "Softmax '/encoder/attn'": op and source name of a node, for messages. Returns buf. */
#define OMC_NODE_TEXT 160
const char *omc_node_text(const omc_node *n, char *buf, size_t size);

/* As omc_fail and OMC_FAIL, the detail starting with the node: "Softmax '/encoder/attn': ". */
omc_status omc_node_fail(const omc_node *n, omc_status code, const char *fmt, ...)
    OMC_PRINTF(3, 4) OMC_MUST_USE;
#define OMC_NODE_FAIL(node, code, ...) return omc_node_fail((node), OMC_##code, __VA_ARGS__)

#endif
