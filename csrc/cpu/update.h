/* Kernels of optimizers: what is done to a run of the elements of one tensor. */
#ifndef OMC_CPU_UPDATE_H
#define OMC_CPU_UPDATE_H

#include "base/isa.h"
#include "cpu/kernel.h"
#include "optim/optim.h"

/* Elements that are summed together, whoever does it: sums do not depend on the number of threads.
 * A part begins at a multiple of it. */
enum { OMC_UPDATE_BLOCK = 1 << 14 };

typedef struct omc_update_part {
  const omc_optim_step *step;
  uint32_t index;     /* of the tensor */
  int64_t begin, end; /* its elements */
  double scale, clip; /* gradients are divided by one, then multiplied by the other */
  double length;      /* of the step of LAMB_APPLY */
  double out[2];      /* LAMB_MOMENTS: squares of p and of the step, added up; SQUARES: of the
                         gradients; LARGEST: the largest magnitude of a gradient, NaN if one is */
} omc_update_part;

enum {
  OMC_UPDATE_ADAM,
  OMC_UPDATE_SGD,
  OMC_UPDATE_LAMB_MOMENTS,
  OMC_UPDATE_LAMB_APPLY,
  OMC_UPDATE_SCALE,
  OMC_UPDATE_SQUARES,
  OMC_UPDATE_LARGEST,
  OMC_N_UPDATE
};

/* Of one dtype of parameters, on one instruction set. */
typedef struct omc_updates {
  void (*fn[OMC_N_UPDATE])(omc_update_part *part);
} omc_updates;

/* `step` of omc_provider. */
omc_status omc_cpu_step(void *ctx, const omc_optim_step *step, void *queue) OMC_MUST_USE;

#endif
