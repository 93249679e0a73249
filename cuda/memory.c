#include "cuda/memory.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/lock.h"
#include "cuda/api.h"
#include "cuda/replay.h"

enum { WHAT_BYTES = 80, LEAST_BYTES = 512 }; /* of a text; of a block of PyTorch's */

/* A block that is out, and the stream that is to come to where it is freed: that which was current
 * when it was made, for which the allocator keeps it. */
typedef struct block {
  struct block *next;
  void *at, *queue;
  size_t bytes;
} block;

OMC_PROCESS_LOCK(mutex) /* of what follows; a forked child drops what it has of blocks, too */
static block *blocks;
static block *kept[OMC_CUDA_DEVICES]; /* freed, until the device has been waited for */
static size_t kept_bytes[OMC_CUDA_DEVICES];
static omc_memory_stats stats[OMC_CUDA_DEVICES];
static struct {
  void *queue;
  bool any, several;
} used[OMC_CUDA_DEVICES]; /* streams */

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

/* Before PyTorch 2.13 there are no words: a device that still answers has no memory then. Callers
 * that try less look for those of PyTorch. */
static omc_status check_allocated(int error, const char *what) {
  size_t rest, all;
  if (error == 0 || omc_cuda_api_get()->torch_exception_get_what_without_backtrace())
    return omc_torch_check(error, what);
  OMC_TRY(omc_cuda_check(omc_cuda_api_get()->cuMemGetInfo_v2(&rest, &all), what));
  OMC_FAIL(EDEVICEMEM, "%s failed in PyTorch: CUDA out of memory. %zu of %zu bytes are free", what,
           rest, all);
}

/* PyTorch gives memory of the device that is current to it, which is another than that of the
 * context while a device that has none yet is; before it has none left it gives back to CUDA what
 * it has cached. */
static omc_status allocate(const omc_cuda_device *d, size_t bytes, void **out) {
  char what[WHAT_BYTES];
  void *guard;
  snprintf(what, sizeof what, "an allocation of %zu bytes on GPU %d", bytes, d->ordinal);
  OMC_TORCH_TRY(what, aoti_torch_create_cuda_guard, d->ordinal, &guard);
  const int mode = omc_cuda_capture_mode(OMC_CUDA_RELAXED);
  const int error = omc_cuda_api_get()->aoti_torch_cuda_caching_allocator_raw_alloc(bytes, out);
  omc_cuda_capture_mode(mode);
  const omc_status status = check_allocated(error, what);
  omc_cuda_api_get()->aoti_torch_delete_cuda_guard(guard);
  return status;
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
  *b = (block){blocks, *out, queue, bytes};
  blocks = b;
  s->used_bytes += bytes;
  if (s->used_bytes > s->peak_bytes) s->peak_bytes = s->used_bytes;
  pthread_mutex_unlock(&mutex);
  return OMC_OK;
}

/* ---- freeing ---- */

/* NULL: it is not out. */
static block *take(const omc_cuda_device *d, const void *ptr, size_t bytes) {
  pthread_mutex_lock(&mutex);
  block **link = &blocks;
  while (*link && (*link)->at != ptr) link = &(*link)->next;
  block *const b = *link;
  if (b) {
    *link = b->next;
    stats[d->ordinal].used_bytes -= bytes;
  }
  pthread_mutex_unlock(&mutex);
  return b;
}

static void keep(const omc_cuda_device *d, block *list) {
  pthread_mutex_lock(&mutex);
  for (block *next; list; list = next) {
    next = list->next;
    list->next = kept[d->ordinal];
    kept[d->ordinal] = list;
    kept_bytes[d->ordinal] += omc_round_up(list->bytes, LEAST_BYTES);
  }
  pthread_mutex_unlock(&mutex);
}

static void hand_back(block *list) {
  for (block *next; list; list = next) {
    next = list->next;
    omc_cuda_api_get()->aoti_torch_cuda_caching_allocator_raw_delete(list->at);
    free(list);
  }
}

/* What is captured is in no order with what is not. */
static bool is_captured(void *queue) {
  bool captured;
  return omc_cuda_is_captured(queue, NULL, &captured) != OMC_OK || captured;
}

static bool comes_after(void *queue, void *other) {
  if (queue == other) return true;
  return !is_captured(queue) && !is_captured(other) && omc_cuda_follow(queue, other) == OMC_OK;
}

static void release(const omc_cuda_device *d, block *b, bool ordered) {
  b->next = NULL;
  if (ordered)
    hand_back(b);
  else
    keep(d, b);
}

void omc_cuda_free(void *ctx, void *ptr, size_t bytes, void *queue) {
  const omc_cuda_device *d = ctx;
  block *const b = ptr ? take(d, ptr, bytes) : NULL;
  if (!b) return;
  const omc_status entered = omc_cuda_enter(d);
  release(d, b, comes_after(b->queue, queue));
  if (entered == OMC_OK) omc_cuda_leave(d);
}

void omc_cuda_use(const omc_cuda_device *d, void *queue) {
  pthread_mutex_lock(&mutex);
  used[d->ordinal].several |= used[d->ordinal].any && used[d->ordinal].queue != queue;
  used[d->ordinal].queue = queue, used[d->ordinal].any = true;
  pthread_mutex_unlock(&mutex);
}

void omc_cuda_free_used(const omc_cuda_device *d, void *ptr, size_t bytes) {
  block *const b = take(d, ptr, bytes);
  if (!b) return;
  pthread_mutex_lock(&mutex);
  const bool several = used[d->ordinal].several;
  pthread_mutex_unlock(&mutex);
  const omc_status entered = omc_cuda_enter(d);
  release(d, b, !several);
  if (entered == OMC_OK) omc_cuda_leave(d);
}

size_t omc_cuda_keeps(const omc_cuda_device *d) {
  pthread_mutex_lock(&mutex);
  const size_t bytes = kept_bytes[d->ordinal];
  pthread_mutex_unlock(&mutex);
  return bytes;
}

omc_status omc_cuda_finish(const omc_cuda_device *d) {
  pthread_mutex_lock(&mutex);
  block *list = kept[d->ordinal];
  kept[d->ordinal] = NULL, kept_bytes[d->ordinal] = 0;
  pthread_mutex_unlock(&mutex);
  const omc_status status = omc_cuda_wait();
  if (status == OMC_OK)
    hand_back(list);
  else
    keep(d, list);
  return status;
}

omc_memory_stats omc_cuda_memory(void *ctx) {
  const omc_cuda_device *d = ctx;
  pthread_mutex_lock(&mutex);
  const omc_memory_stats now = stats[d->ordinal];
  pthread_mutex_unlock(&mutex);
  return now;
}
