/* Threads on the OpenMP runtime that torch has loaded. */
#ifndef OMC_CPU_PARALLEL_H
#define OMC_CPU_PARALLEL_H

#include <stdint.h>

/* Items begin .. end-1, and the number of the thread that works on them. */
typedef struct omc_range {
  int64_t begin, end;
  int thread;
} omc_range;
typedef void (*omc_range_fn)(omc_range range, void *ctx);

/* Threads torch allows now (torch.set_num_threads); 1 in a child made by fork. */
int omc_cpu_threads(void);

/* Splits 0 .. n-1 into one contiguous range per thread, none shorter than `grain`, on at most
 * `threads` threads, the caller being one; returns when all are done. All of them
 * flush denormals if the caller does (torch.set_flush_denormal). Not for use inside another
 * parallel region: there it runs on the caller alone. */
void omc_parallel_for(int64_t n, int64_t grain, int threads, omc_range_fn fn, void *ctx);

/* Calls fn(ctx), and holds a team of at most `threads` threads ready meanwhile for what the caller
 * gives to omc_parallel_for. Those wait for work on the core for less than 0.1 ms, then asleep,
 * where the OpenMP runtime alone would spend milliseconds of the core's time on waiting. What one
 * of them has not begun when the caller is done with its own part, the caller does. Regions of
 * others (torch's) run on the caller alone meanwhile. `jobs` is the caller's, 0 at first: how many
 * jobs fn gave out the last time; a team is not worth waking for less than two. Threads may share
 * it. */
void omc_parallel_hold(int threads, uint32_t *jobs, void (*fn)(void *ctx), void *ctx);

/* What repays waking a thread. */
enum {
  OMC_GRAIN_ELEMENTS = 1 << 14, /* computed with */
  OMC_GRAIN_BYTES = 1 << 15,    /* copied */
  OMC_GRAIN_PRODUCTS = 1 << 17  /* multiplied and added */
};

/* The grain of items that are `unit` elements, bytes or products each. */
static inline int64_t omc_grain(int64_t worth, int64_t unit) { return 1 + worth / (unit + 1); }

#endif
