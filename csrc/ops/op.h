/* The record of an op: what is true of it on every device.
 *
 * Each row of ops.def has one record `omc_op_NAME` in csrc/ops/FAMILY.c; a missing one does not
 * link. Beside its family's files on each device an op is named by who makes nodes of it, as
 * gradient rules of others do, and by passes/ that rewrite it. */
#ifndef OMC_OPS_OP_H
#define OMC_OPS_OP_H

#include "graph/graph.h"
#include "ops/grad.h"

typedef enum {
  OMC_OP_COMMUTES = 1 << 0, /* in[0] and in[1] may be swapped */
  OMC_OP_VIEW = 1 << 1,     /* out[0] is in[0]'s elements in the same order: costs nothing */
  /* An output may share memory with an input of as many elements and bytes. */
  OMC_OP_POINTWISE = 1 << 2,
  OMC_OP_RANDOM = 1 << 3,     /* never folded, never merged */
  OMC_OP_SHAPE_ONLY = 1 << 4, /* reads shapes of its inputs, never their elements */
  OMC_OP_CALLBACK = 1 << 5,   /* runs in Python through callbacks */
  OMC_OP_DIVIDES = 1 << 6,    /* elementwise: fails where in[1] is an integer 0 */
  /* Elementwise: all it does is done again when its result is stored, so that it need not run if
   * nothing else reads that. */
  OMC_OP_CONVERTS = 1 << 7,
  OMC_OP_FAILS = 1 << 8 /* may fail by what its inputs hold; callbacks and divisions may anyway */
} omc_op_flags;

#define OMC_VARIADIC 255

/* What computing a node takes, before anything is known of a device. */
typedef struct omc_cost {
  double flops; /* on elements of any dtype; a multiplication and an addition are two */
  double bytes; /* read of inputs and written to outputs, each once */
} omc_cost;

typedef struct omc_op {
  uint8_t min_in, max_in; /* OMC_VARIADIC: any number */
  uint8_t n_out;          /* most outputs; OMC_VARIADIC: as many as the node has */
  uint8_t chosen_by;      /* the input whose dtype chooses the kernel, if it is there and a float */
  uint32_t flags;
  uint32_t in_place; /* bit i: out[0] may share memory with in[i] */
  uint32_t updates;  /* bit i: out[i] is in[i] brought up to date, and may share its memory */
  uint32_t spared;   /* bit i: out[i] takes work, which is saved where nobody reads it */
  uint32_t optional; /* bit i: input i may be left out though below min_in */

  /* Sets the type of every output from input types, attributes and constant inputs. Inputs are
   * typed and concrete. Fails with ESHAPE, EDTYPE, EINVALID or EUNSUPPORTED naming node and
   * numbers. */
  omc_status (*infer)(omc_node *node);

  /* Builds the gradients of the inputs; NULL: none flows through this op. See ops/grad.h. */
  omc_status (*grad)(omc_grad *g);

  /* Elementwise ops: decodes attributes into the OMC_EW_IMM zeroed immediates that an instruction
   * of a program has on every device, see ops/program.h. NULL: the op is none. */
  omc_status (*imm)(const omc_node *node, double *imm);

  /* Corrects a cost that is one operation for each element of the largest operand, and the bytes
   * of all. NULL: it is right. */
  omc_status (*cost)(const omc_node *node, omc_cost *cost);
} omc_op;

/* A record: fewest and most inputs, most outputs, and whatever else is not 0. */
#define OMC_RECORD(name, least_in, most_in, most_out, ...) \
  const omc_op omc_op_##name = {                           \
      .min_in = least_in, .max_in = most_in, .n_out = most_out, __VA_ARGS__};

/* The record of an op id below OMC_N_OPS. */
const omc_op *omc_op_get(omc_op_id id);

/* The dtype that chooses a node's kernel: that of the input that its op says, else of its first
 * float input or output, else that of in[0], else that of out[0]. */
omc_dtype omc_node_dtype(const omc_node *node);

/* Whether a node's result is the memory of its first input. */
static inline bool omc_is_view(const omc_node *node) {
  return (omc_op_get(node->op)->flags & OMC_OP_VIEW) != 0;
}

/* The flags of a node's op and, if it is a fused one, of the ops in it; whatever may fail has
 * OMC_OP_FAILS. */
uint32_t omc_node_flags(const omc_node *node);

/* The cost of a typed node. A view costs nothing; what runs in Python, as far as is known. */
omc_status omc_node_cost(const omc_node *node, omc_cost *out) OMC_MUST_USE;

/* A rule for cost: elements are moved, and no others read than those that are written. */
omc_status omc_cost_moved(const omc_node *node, omc_cost *cost) OMC_MUST_USE;

/* Checks a node against its record: how many inputs and outputs, and that none needed is left out.
 */
omc_status omc_node_check(const omc_node *node) OMC_MUST_USE;

#endif
