/* Programs of elementwise ops: what one is, on every device.
 *
 * A program computes in one class, f32, f64 or i64, over one iteration shape, the broadcast shape
 * of its inputs. Inputs have any dtype (converted on load); outputs have the iteration shape and
 * any dtype (converted on store: to bool by != 0, to integers by truncation). A single elementwise
 * node is a program of one instruction; FusedElementwise carries its program in attributes:
 *   ops=["Add", "Gelu"]  args=[0, 1, -1,  2, -1, -1]  imm=[4 floats per instruction]  outs=[3]
 *   dtypes=[1]  class="f32"
 * args: three operands per instruction; 0 .. n_in-1 are the inputs, n_in + k is the result of
 * instruction k, -1 is none. imm: as the op's record decodes them. outs: the operand, an
 * instruction's result, that each output holds; dtypes: that output's ONNX dtype code. class:
 * what every instruction computes in, whatever the dtypes of inputs and outputs. Whoever makes such
 * a node sees to it that it will do for the omc_ew_class of each of the nodes that became
 * instructions, that a result which another instruction reads is one that the class holds exactly,
 * and that the operand of a random op has the iteration shape. */
#ifndef OMC_OPS_PROGRAM_H
#define OMC_OPS_PROGRAM_H

#include "graph/graph.h"

#define OMC_EW_IMM 4
#define OMC_EW_MAX_INSTRUCTIONS 48
#define OMC_EW_MAX_INPUTS 24
#define OMC_EW_MAX_OUTPUTS 12

/* The class a single elementwise node computes in: the widest omc_dtype_acc of its inputs and
 * outputs that are no bools, of i64, f32 and f64. OMC_BOOL: all are bools, for which any will do.
 */
omc_dtype omc_ew_class(const omc_node *node);

/* The class itself, or one in place of any. */
omc_dtype omc_ew_computed_in(omc_dtype cls);

/* The class of a fused node, OMC_N_DTYPE if its attribute names none. */
omc_dtype omc_ew_fused_class(const omc_node *node);

typedef struct omc_instruction {
  omc_op_id op;
  bool divides;    /* args[1] are integers that may not be 0 */
  int32_t args[3]; /* operands; those that are none: -1 */
  double imm[OMC_EW_IMM];
} omc_instruction;

typedef struct omc_program_output {
  omc_dtype dtype;
  int32_t operand;
} omc_program_output;

/* A typed node's program. */
typedef struct omc_program {
  omc_dtype cls;
  omc_shape shape; /* of the iteration */
  uint32_t n_in, n_code, n_out;
  omc_instruction *code;
  omc_program_output *out;
} omc_program;

/* Reads a program of a node, elementwise or FusedElementwise, into `arena`. OMC_EINVALID names the
 * attribute that makes no sense; OMC_EUNSUPPORTED: it is larger than a program can be. */
omc_status omc_program_of(const omc_node *node, omc_arena *arena, omc_program *out) OMC_MUST_USE;

/* Axes of `to` along which a tensor of shape `from`, broadcast to it, goes on evenly are joined:
 * how many are left, OMC_MAX_RANK at most, with their sizes and strides in elements. */
int32_t omc_join_axes(const omc_shape *from, const omc_shape *to, int64_t *dims, int64_t *strides);

#endif
