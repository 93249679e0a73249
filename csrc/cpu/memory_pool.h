/* A process-wide pool of large blocks: arenas of runs, results and gradients.
 *
 * Freed blocks are kept and handed out again, so that a training step faults in no page. Kept
 * bytes never exceed the most bytes that were in use at once, or 16 MiB if that is more; beyond
 * it the blocks that have waited longest go back to the system. Any thread; usable after fork. */
#ifndef OMC_CPU_MEMORY_POOL_H
#define OMC_CPU_MEMORY_POOL_H

#include "provider.h"

#define OMC_POOL_ALIGNMENT 64

/* Memory for `bytes` bytes, contents undefined; OMC_ENOMEM says how many were asked for. */
omc_status omc_pool_alloc(size_t bytes, void **out) OMC_MUST_USE;

/* Takes back what omc_pool_alloc gave for the same number of bytes; NULL is accepted. */
void omc_pool_free(void *ptr, size_t bytes);

/* Gives every kept block back to the system. */
void omc_pool_trim(void);

omc_memory_stats omc_pool_get_stats(void);

#endif
