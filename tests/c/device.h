/* A device that is none, to hold the core to csrc/provider.h: CPU kernels behind memory and queues
 * of their own. Its addresses are mapped without any access, so that the host traps where it reads
 * or writes them; kernels see the same memory elsewhere, and refuse whatever lies outside of it.
 * What is given to a queue is done by a thread of that queue, when it gets there. */
#ifndef OMC_TESTS_DEVICE_H
#define OMC_TESTS_DEVICE_H

#include "provider.h"

/* Lives for the process, as do its queues. */
const omc_provider *device_provider(void);

/* Another queue than NULL, the device's own; NULL: there is none left. */
void *device_queue(void);

/* A paused queue takes what it is given and does nothing of it. */
void device_pause(void *queue);
void device_resume(void *queue);

/* Copies between host and device, at once: whoever calls has waited for what matters. */
void device_write(void *device, const void *host, size_t bytes);
void device_read(void *host, const void *device, size_t bytes);

/* What has been done so far. */
typedef struct device_counts {
  uint64_t kernels, copies_within, uploads, from_and_to_host;
} device_counts;
device_counts device_counted(void);

#endif
