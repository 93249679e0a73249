/* The CPU as a provider: pooled host memory, kernels by dtype and instruction set. */
#include <string.h>
#include <time.h>

#include "cpu/elementwise.h"
#include "cpu/parallel.h"
#include "cpu/pool.h"
#include "ops/op.h"
#include "provider.h"

static omc_status cpu_alloc(void *ctx, size_t bytes, void **out) {
  (void)ctx;
  return omc_pool_alloc(bytes, out);
}

static void cpu_free(void *ctx, void *ptr, size_t bytes) {
  (void)ctx;
  omc_pool_free(ptr, bytes);
}

static omc_status cpu_copy(void *ctx, void *dst, const void *src, size_t bytes, void *stream) {
  (void)ctx, (void)stream;
  if (bytes) memmove(dst, src, bytes);
  return OMC_OK;
}

static omc_kernel cpu_kernel(void *ctx, omc_op_id id, omc_dtype dtype) {
  (void)ctx;
  const omc_op *op = omc_op_get(id);
  if (op->ew) return omc_ew_pick(op->ew, omc_ew_dtype_class(dtype)) ? omc_ew_run : NULL;
  return op->cpu ? omc_kernels_pick(op->cpu, dtype) : NULL;
}

static int cpu_threads(void *ctx) {
  (void)ctx;
  return omc_cpu_threads();
}

static omc_status cpu_sync(void *ctx, void *stream) {
  (void)ctx, (void)stream;
  return OMC_OK;
}

static double cpu_clock(void *ctx, void *stream) {
  (void)ctx, (void)stream;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

const omc_provider *omc_cpu_provider(void) {
  static const omc_provider provider = {.name = "cpu",
                                        .alignment = OMC_POOL_ALIGNMENT,
                                        .alloc = cpu_alloc,
                                        .free = cpu_free,
                                        .copy_in = cpu_copy,
                                        .copy_out = cpu_copy,
                                        .copy = cpu_copy,
                                        .kernel = cpu_kernel,
                                        .threads = cpu_threads,
                                        .sync = cpu_sync,
                                        .clock = cpu_clock};
  return &provider;
}
