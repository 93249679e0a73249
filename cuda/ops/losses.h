/* Launches of the kernels of loss.h, of which ops of losses are made. */
#ifndef OMC_CUDA_OPS_LOSSES_H
#define OMC_CUDA_OPS_LOSSES_H

#include "cuda/launch.h"
#include "cuda/ops/loss.h"

struct omc_loss_form; /* ops/forms.h */

/* What is done of each row. */
typedef struct omc_cuda_loss {
  omc_cuda_kernel kernel;
  omc_cuda_grid grid;
  omc_loss given; /* but for addresses */
} omc_cuda_loss;

/* Kernel `name` for logits stored as `dtype`, weights of classes as `weights`, from one sample to
 * the next `sample` elements. A team of threads is for each row if `by_lines`, else a thread. */
omc_status omc_cuda_loss_of(omc_cuda_device *device, const omc_node *node,
                            const struct omc_loss_form *form, omc_dtype dtype, omc_dtype weights,
                            int64_t sample, const char *name, bool by_lines,
                            omc_cuda_loss *out) OMC_MUST_USE;

/* What all rows are reduced to: in parts, where there are many. */
typedef struct omc_cuda_loss_sums {
  omc_cuda_kernel rows, parts;
  omc_cuda_grid rows_grid, parts_grid;
  omc_loss_total reduced, joined; /* but for addresses */
} omc_cuda_loss_sums;

omc_status omc_cuda_loss_sums_of(omc_cuda_device *device, const struct omc_loss_form *form,
                                 omc_dtype dtype, omc_cuda_loss_sums *out) OMC_MUST_USE;

/* Bytes of scratch memory, of doubles. */
size_t omc_cuda_loss_sums_bytes(const omc_cuda_loss_sums *sums);

/* Reduces the losses of rows to what is asked for; only the addresses of `of` are read. */
omc_status omc_cuda_loss_sums_run(omc_cuda_loss_sums *sums, const omc_loss_total *of,
                                  void *queue) OMC_MUST_USE;

#endif
