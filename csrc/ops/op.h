/* The record of an op: everything the compiler and the CPU provider know of it.
 *
 * Each row of ops.def has one record `omc_op_NAME` in csrc/ops/FAMILY.c; a missing one does not
 * link. Nothing outside the family's file names an op, but for passes/ that rewrite it. */
#ifndef OMC_OPS_OP_H
#define OMC_OPS_OP_H

#include "graph/graph.h"
#include "ops/grad.h"
#include "provider.h"

typedef enum {
  OMC_OP_COMMUTES = 1 << 0, /* in[0] and in[1] may be swapped */
  OMC_OP_VIEW = 1 << 1,     /* out[0] is in[0]'s elements in the same order: costs nothing */
  OMC_OP_POINTWISE = 1
      << 2, /* an output may share memory with an input of as many elements and bytes */
  OMC_OP_INPLACE_0 = 1 << 3,  /* out[0] may share memory with in[0] */
  OMC_OP_INPLACE_1 = 1 << 4,  /* out[0] may share memory with in[1] */
  OMC_OP_RANDOM = 1 << 5,     /* never folded, never merged */
  OMC_OP_SHAPE_ONLY = 1 << 6, /* reads shapes of its inputs, never their elements */
  OMC_OP_HOST = 1 << 7,       /* runs in Python through the host callbacks */
  OMC_OP_INPLACE_2 = 1 << 8,  /* out[0] may share memory with in[2] */
  OMC_OP_DIVIDES = 1 << 9     /* elementwise: fails where in[1] is an integer 0 */
} omc_op_flags;

#define OMC_VARIADIC 255

/* Elementwise ops give a block function, and the block interpreter does the rest: broadcasting,
 * loads and stores of any dtype, threads. See cpu/elementwise.h. */
struct omc_ew;

typedef struct omc_op {
  const char *name;
  uint8_t min_in, max_in; /* OMC_VARIADIC: any number */
  uint8_t n_out;          /* most outputs; OMC_VARIADIC: as many as the node has */
  uint32_t flags;
  uint32_t optional; /* bit i: input i may be left out though below min_in */

  /* Sets the type of every output from input types, attributes and constant inputs. Inputs are
   * typed and concrete. Fails with ESHAPE, EDTYPE or EUNSUPPORTED naming node and numbers. */
  omc_status (*infer)(omc_node *node);

  /* Builds the gradients of the inputs; NULL: none flows through this op. See ops/grad.h. */
  omc_status (*grad)(omc_grad *g);

  /* Decodes attributes and shapes into the kernel's typed parameters, `params_size` zeroed bytes.
   * NULL with size 0: the kernel has none. Runs once per plan; variable-length parts come from
   * `arena`, which lives as long as the plan. */
  size_t params_size;
  omc_status (*params)(const omc_node *node, omc_arena *arena, void *params);

  /* Bytes of scratch memory the kernel wants with that many threads; NULL: none. */
  size_t (*workspace)(const omc_node *node, const void *params, int threads);

  const omc_kernels *cpu;  /* NULL for elementwise and view ops */
  const struct omc_ew *ew; /* elementwise ops only */
} omc_op;

/* The record of an op id below OMC_N_OPS. */
const omc_op *omc_op_get(omc_op_id id);

/* The dtype that chooses a node's kernel variant: its first float input or output, else that of
 * in[0], else that of out[0]. */
omc_dtype omc_node_dtype(const omc_node *node);

/* Checks a node against its record: how many inputs and outputs, that none needed is left out, and
 * that it has no attribute which its op would not read. */
omc_status omc_node_check(const omc_node *node) OMC_MUST_USE;

#endif
