/* A program as the CPU runs it: how each input is brought before the block functions, and where
 * each result goes. Made by program.c, run by fused.c. */
#ifndef OMC_CPU_OPS_PROGRAM_H
#define OMC_CPU_OPS_PROGRAM_H

#include "cpu/convert.h"
#include "cpu/ops/block.h"

/* How a block's part of an input is brought before the block functions. */
typedef enum {
  OMC_EW_DIRECT, /* dense, and as block functions take it: read where it lies */
  OMC_EW_DENSE,  /* as many elements as the iteration shape: converted */
  OMC_EW_TILE,   /* repeats with a short period: laid out once per thread, one block longer */
  OMC_EW_RUNS,   /* anything else but those below: run by run along the last axis */
  OMC_EW_SCALAR, /* one element: spread once per thread, and from there on the same in every block
                  */
  OMC_EW_ABSENT  /* left out: nothing reads it */
} omc_ew_access;

typedef struct omc_ew_input {
  omc_ew_access kind;
  omc_dtype dtype;
  size_t bytes;     /* of an element */
  bool taken;       /* by block functions as it is */
  int32_t last_use; /* instruction */
  int32_t rank;     /* OMC_EW_RUNS: axes left after those that lie in a row are joined */
  int64_t dims[OMC_MAX_RANK], strides[OMC_MAX_RANK]; /* elements; the last stride is 0 or 1 */
  int64_t period;                                    /* OMC_EW_TILE */
  size_t scratch; /* bytes from the start of a thread's scratch */
} omc_ew_input;

typedef struct omc_ew_instruction {
  omc_op_id op;
  omc_ew_fn fn;    /* NULL: nothing to do */
  bool divides;    /* args[1] are integers that may not be 0 */
  bool spread;     /* all operands but the first are one number each, or left out */
  int32_t args[3]; /* operands; those that are none: -1, and once placed the first */
  omc_dtype dtype; /* that its result is kept in */
  size_t bytes;    /* of an element of that */
  size_t scratch;  /* where that goes if not straight to an output */
  double imm[OMC_EW_IMM];
} omc_ew_instruction;

typedef struct omc_ew_output {
  omc_dtype dtype;
  int32_t operand;
  bool claims; /* may be written to by an instruction: no other output is */
} omc_ew_output;

struct omc_ew_program {
  const omc_convert *convert;
  int64_t numel; /* of the iteration shape */
  int32_t n_in, n_code, n_out;
  size_t scratch_bytes; /* per thread */
  omc_ew_input *in;
  omc_ew_instruction *code;
  omc_ew_output *out;
};

#endif
