/* The id of every op and its name, expanded from ops.def. */
#ifndef OMC_BASE_OP_ID_H
#define OMC_BASE_OP_ID_H

#include <stdbool.h>
#include <stddef.h>

typedef enum {
#define OMC_OP(name, family, domain, ...) OMC_OP_##name,
#include "ops.def"
#undef OMC_OP
  OMC_N_OPS
} omc_op_id;

/* The name, for example "Softmax"; "return" for OMC_N_OPS, the result node. */
const char *omc_op_name(omc_op_id op);

/* True if the op is one of ONNX's own domain, false if it is of "ai.ortmodule_c". */
bool omc_op_is_onnx(omc_op_id op);

/* Finds an op by name (n bytes); false: no such op. */
bool omc_op_from_name(const char *name, size_t n, omc_op_id *out);

#endif
