/* Memory of PyTorch's caching allocator for CUDA, and the order of streams. */
#ifndef OMC_CUDA_MEMORY_H
#define OMC_CUDA_MEMORY_H

#include "cuda/device.h"
#include "provider.h"

/* As a provider has them; `ctx` is the omc_cuda_device. OMC_EDEVICEMEM: there is no more;
 * OMC_EDEVICE: nothing works any more. */
omc_status omc_cuda_alloc(void *ctx, size_t bytes, void *queue, void **out) OMC_MUST_USE;
void omc_cuda_free(void *ctx, void *ptr, size_t bytes, void *queue);

/* Work that may read constants is given to a stream. */
void omc_cuda_use(const omc_cuda_device *device, void *queue);

/* Frees what such work may read. Waits for nothing, nor does omc_cuda_free: what would have to, as
 * where streams are captured, is kept until the device is waited for. */
void omc_cuda_free_used(const omc_cuda_device *device, void *ptr, size_t bytes);
size_t omc_cuda_keeps(const omc_cuda_device *device); /* bytes of such memory */

/* Waits for all streams and gives back what was kept until then. With the device's context entered.
 */
omc_status omc_cuda_finish(const omc_cuda_device *device) OMC_MUST_USE;

omc_memory_stats omc_cuda_memory(void *ctx);

/* What is given to `queue` from now on waits for what `other` was given before. With the device's
 * context entered. */
omc_status omc_cuda_follow(void *queue, void *other) OMC_MUST_USE;

#endif
