/* What a stream is given again and again, as graphs of CUDA's: one call in the place of hundreds.
 *
 * Work whose tensors are a second time where they were once is captured, in a stream of its own
 * that runs nothing, and from then on launched as a whole. Its seed lies on the device, so that a
 * graph serves all steps. A graph is for one stream, one set of addresses and one precision of
 * products; the latest few of them are kept. Work whose capture fails three times is given as ever
 * from then on, and so is what a stream is given while its user captures it himself. */
#ifndef OMC_CUDA_REPLAY_H
#define OMC_CUDA_REPLAY_H

#include "cuda/device.h"
#include "provider.h"

/* Whether the queue is in a capture of its user's, or cannot be asked because of another.
 * OMC_EUNSUPPORTED: it is, and `repeats`, unless NULL, says what a graph of the user's would then
 * do wrongly at each launch. With the device's context entered. */
omc_status omc_cuda_is_captured(void *queue, const char *repeats, bool *out) OMC_MUST_USE;

/* As a provider has them; `ctx` is the omc_cuda_device. OMC_EUNSUPPORTED: as above. */
omc_status omc_cuda_give(void *ctx, const omc_recurring *work, void *queue, void **notes,
                         bool *replayed) OMC_MUST_USE;
void omc_cuda_forget(void *ctx, void *notes);

/* Ends all graphs of a device, which hold memory of it, and gives back what is kept; false: there
 * is nothing. Waits until the device is done. */
bool omc_cuda_end_graphs(omc_cuda_device *device);

#endif
