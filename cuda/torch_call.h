/* Kernels that are PyTorch's: ops called by the C functions that it exports, on tensors over memory
 * of ours. They run as they do in eager, with PyTorch's choice of algorithms, by its flags, in the
 * stream that it works in, and take memory from its allocator. So a run is to be in that stream:
 * what is captured in another one would use memory that is nobody's any more when it is launched.
 */
#ifndef OMC_CUDA_TORCH_CALL_H
#define OMC_CUDA_TORCH_CALL_H

#include "base/shape.h"
#include "cuda/api.h"
#include "cuda/device.h"

enum { OMC_TORCH_TENSORS = 4 };

/* A call, and the tensors that are there while it lasts. */
typedef struct omc_torch_call {
  const omc_cuda_device *device;
  const char *node;                 /* a name for messages */
  void *tensors[OMC_TORCH_TENSORS]; /* at most, results included */
  int n;
} omc_torch_call;

/* Begins a call, with the device's context entered. Where any of these fails, omc_torch_end is
 * still to be called. OMC_EINTERNAL, OMC_EDEVICE and OMC_EDEVICEMEM: PyTorch's exceptions;
 * OMC_EUNSUPPORTED: the queue is not the stream that PyTorch works in. */
omc_status omc_torch_begin(const omc_cuda_device *device, const char *node, void *queue,
                           omc_torch_call *out) OMC_MUST_USE;

/* Adds a tensor over memory of ours, with strides in elements. `dtype` is one of floats. */
omc_status omc_torch_lend(omc_torch_call *call, const void *data, omc_dtype dtype,
                          const omc_shape *shape, const int64_t *strides, void **out) OMC_MUST_USE;

/* Where an op writes a result that it gives. */
void **omc_torch_result(omc_torch_call *call);

/* The elements of a result, and its strides, both until the end of the call; they are there once
 * the stream is. */
omc_status omc_torch_read(const omc_torch_call *call, void *result, const void **data,
                          const int64_t **strides) OMC_MUST_USE;

/* Ends a call; memory of results is PyTorch's again, to be used in the same stream. */
void omc_torch_end(omc_torch_call *call);

#endif
