/* Tensors, as kernels and programs are given them. */
#ifndef OMC_BASE_TENSOR_H
#define OMC_BASE_TENSOR_H

#include "base/shape.h"

/* A dense row-major tensor, borrowed. An optional one left out has type NULL. A tensor of zero
 * elements may have data NULL. */
typedef struct omc_tensor {
  void *data;
  const omc_type *type;
} omc_tensor;

#endif
