/* Steps of optimizers on a GPU. */
#ifndef OMC_CUDA_OPTIMIZE_H
#define OMC_CUDA_OPTIMIZE_H

#include "cuda/device.h"
#include "optim/optim.h"

/* Bytes of room that a step takes. */
size_t omc_cuda_step_bytes(const omc_optim_step *step);

/* `step` of omc_provider, within the device's context, with room of its memory. Waits for
 * nothing. */
omc_status omc_cuda_take_step(omc_cuda_device *device, const omc_optim_step *step, void *room,
                              void *queue) OMC_MUST_USE;

#endif
