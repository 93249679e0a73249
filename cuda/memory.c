#include "cuda/memory.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/lock.h"
#include "cuda/api.h"

enum { MAX_ORDINALS = 64, WHAT_BYTES = 80 };

/* A block that is out, and the stream that is to come to where it is freed: that which was current
 * when it was made, for which the allocator keeps it. */
typedef struct block {
  struct block *next;
  void *at, *queue;
} block;

OMC_PROCESS_LOCK(mutex) /* of what follows; a forked child drops what it has of blocks, too */
static block *blocks;
static omc_memory_stats stats[MAX_ORDINALS];

omc_status omc_cuda_follow(void *queue, void *other) {
  void *event;
  OMC_CUDA_TRY(cuEventCreate, &event, 2 /* no times */);
  omc_status status =
      omc_cuda_check(omc_cuda_api_get()->cuEventRecord(event, other), "cuEventRecord");
  if (status == OMC_OK)
    status =
        omc_cuda_check(omc_cuda_api_get()->cuStreamWaitEvent(queue, event, 0), "cuStreamWaitEvent");
  omc_cuda_api_get()->cuEventDestroy_v2(event);
  return status;
}

/* PyTorch gives memory of the device whose context is current; before it has none left it gives
 * back to CUDA what it has cached. */
static omc_status allocate(const omc_cuda_device *d, size_t bytes, void **out) {
  char what[WHAT_BYTES];
  snprintf(what, sizeof what, "an allocation of %zu bytes on GPU %d", bytes, d->ordinal);
  OMC_TORCH_TRY(what, aoti_torch_cuda_caching_allocator_raw_alloc, bytes, out);
  return OMC_OK;
}

omc_status omc_cuda_alloc(void *ctx, size_t bytes, void *queue, void **out) {
  const omc_cuda_device *d = ctx;
  omc_memory_stats *const s = &stats[d->ordinal];
  OMC_TRY(omc_cuda_enter(d));
  const omc_status status = allocate(d, bytes, out);
  omc_cuda_leave(d);
  OMC_TRY(status);
  block *b = malloc(sizeof *b);
  if (!b) {
    omc_cuda_api_get()->aoti_torch_cuda_caching_allocator_raw_delete(*out);
    OMC_FAIL(ENOMEM, "no memory for a block's record");
  }
  pthread_mutex_lock(&mutex);
  *b = (block){blocks, *out, queue};
  blocks = b;
  s->used_bytes += bytes;
  if (s->used_bytes > s->peak_bytes) s->peak_bytes = s->used_bytes;
  pthread_mutex_unlock(&mutex);
  return OMC_OK;
}

void omc_cuda_free(void *ctx, void *ptr, size_t bytes, void *queue) {
  const omc_cuda_device *d = ctx;
  if (!ptr) return;
  pthread_mutex_lock(&mutex);
  block **link = &blocks;
  while (*link && (*link)->at != ptr) link = &(*link)->next;
  block *const b = *link;
  if (b) *link = b->next;
  stats[d->ordinal].used_bytes -= bytes;
  pthread_mutex_unlock(&mutex);
  const omc_status entered = omc_cuda_enter(d);
  /* Work that has failed is not going to read it. */
  omc_status status = OMC_OK;
  if (b && b->queue != queue) status = omc_cuda_follow(b->queue, queue);
  if (status != OMC_OK) status = omc_cuda_wait();
  free(b);
  omc_cuda_api_get()->aoti_torch_cuda_caching_allocator_raw_delete(ptr);
  if (entered == OMC_OK) omc_cuda_leave(d);
}

omc_memory_stats omc_cuda_memory(void *ctx) {
  const omc_cuda_device *d = ctx;
  pthread_mutex_lock(&mutex);
  const omc_memory_stats now = stats[d->ordinal];
  pthread_mutex_unlock(&mutex);
  return now;
}
