/* An NVIDIA GPU as a provider: PyTorch's memory and streams, kernels compiled on first use. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/lock.h"
#include "cuda/api.h"
#include "cuda/launch.h"
#include "cuda/optimize.h"
#include "ops/op.h"

enum { MAX_ORDINALS = 64, KDLCUDA = 2, ALIGNMENT = 256 };

/* Ops that have a kernel. */
#pragma GCC visibility push(hidden)
#define OMC_OP(name, family, domain, ...) \
  extern const omc_cuda_op omc_cuda_##name __attribute__((weak));
#include "ops.def"
#undef OMC_OP
#pragma GCC visibility pop

static const omc_cuda_op *const records[OMC_N_OPS] = {
#define OMC_OP(name, family, domain, ...) &omc_cuda_##name,
#include "ops.def"
#undef OMC_OP
};

/* ---- nodes ---- */

/* Those whose records decode numbers are elementwise: programs know them all. */
static const omc_cuda_op *record_of(omc_op_id op) {
  return omc_op_get(op)->imm ? &omc_cuda_program : records[op];
}

static bool cuda_fusible(void *ctx, const omc_node *node) {
  (void)ctx;
  return omc_op_get(node->op)->imm != NULL;
}

static omc_status cuda_prepare(void *ctx, const omc_node *node, int threads, omc_arena *arena,
                               omc_call *out) {
  (void)threads;
  const omc_cuda_op *op = record_of(node->op);
  if (!op)
    OMC_NODE_FAIL(node, EUNSUPPORTED, "cuda has no kernel for %s",
                  omc_dtype_get(omc_node_dtype(node))->text);
  *out = (omc_call){.kernel = op->run};
  if (op->params) {
    void *params = omc_arena_alloc(arena, 1, op->params_size);
    if (!params) OMC_NODE_FAIL(node, ENOMEM, "no memory for kernel parameters");
    OMC_TRY(op->params(ctx, node, arena, params));
    out->params = params;
  }
  if (op->workspace) out->workspace_bytes = op->workspace(out->params);
  return OMC_OK;
}

/* ---- memory: PyTorch's caching allocator's ---- */

/* A block that is out, and the stream that is to come to where it is freed: that which was current
 * when it was made, for which the allocator keeps it. */
typedef struct block {
  struct block *next;
  void *at, *queue;
} block;

OMC_PROCESS_LOCK(mutex) /* of what follows; a forked child drops what it has of blocks, too */
static block *blocks;
static omc_memory_stats stats[MAX_ORDINALS];

static omc_status wait_for(void *queue, void *other) {
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

/* PyTorch gives memory of the device whose context is current. */
static omc_status allocate(const omc_cuda_device *d, size_t bytes, void **out) {
  if (omc_cuda_api_get()->aoti_torch_cuda_caching_allocator_raw_alloc(bytes, out) == 0)
    return OMC_OK;
  OMC_FAIL(ENOMEM, "CUDA out of memory: GPU %d has no %zu bytes left", d->ordinal, bytes);
}

static omc_status cuda_alloc(void *ctx, size_t bytes, void *queue, void **out) {
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

static void cuda_free(void *ctx, void *ptr, size_t bytes, void *queue) {
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
  if (b && b->queue != queue && wait_for(b->queue, queue) != OMC_OK)
    omc_cuda_api_get()->cuCtxSynchronize();
  free(b);
  omc_cuda_api_get()->aoti_torch_cuda_caching_allocator_raw_delete(ptr);
  if (entered == OMC_OK) omc_cuda_leave(d);
}

static omc_memory_stats cuda_memory(void *ctx) {
  const omc_cuda_device *d = ctx;
  pthread_mutex_lock(&mutex);
  const omc_memory_stats now = stats[d->ordinal];
  pthread_mutex_unlock(&mutex);
  return now;
}

/* What is kept is PyTorch's to give back: torch.cuda.empty_cache(). */
static void cuda_trim(void *ctx) { (void)ctx; }

static omc_status upload(const void *host, size_t bytes, const void **out) {
  omc_cuda_ptr at;
  OMC_CUDA_TRY(cuMemAlloc_v2, &at, bytes ? bytes : 1);
  omc_status status =
      omc_cuda_check(omc_cuda_api_get()->cuMemcpyHtoD_v2(at, host, bytes), "cuMemcpyHtoD");
  if (status == OMC_OK)
    status = omc_cuda_check(omc_cuda_api_get()->cuStreamSynchronize(NULL), "cuStreamSynchronize");
  if (status == OMC_OK)
    *out = (const void *)(uintptr_t)at;
  else
    omc_cuda_api_get()->cuMemFree_v2(at);
  return status;
}

static omc_status cuda_upload(void *ctx, const void *host, size_t bytes, const void **out) {
  OMC_TRY(omc_cuda_enter(ctx));
  const omc_status status = upload(host, bytes, out);
  omc_cuda_leave(ctx);
  return status;
}

static void cuda_unload(void *ctx, const void *uploaded, size_t bytes) {
  (void)bytes;
  if (omc_cuda_enter(ctx) != OMC_OK) return;
  omc_cuda_api_get()->cuMemFree_v2((omc_cuda_ptr)(uintptr_t)uploaded);
  omc_cuda_leave(ctx);
}

static omc_status cuda_copy(void *ctx, void *dst, const void *src, size_t bytes, void *queue) {
  if (bytes == 0) return OMC_OK;
  OMC_TRY(omc_cuda_enter(ctx));
  const int error = omc_cuda_api_get()->cuMemcpyDtoDAsync_v2(
      (omc_cuda_ptr)(uintptr_t)dst, (omc_cuda_ptr)(uintptr_t)src, bytes, queue);
  omc_cuda_leave(ctx);
  return omc_cuda_check(error, "cuMemcpyDtoDAsync");
}

static omc_status cuda_zero(void *ctx, void *dst, size_t bytes, void *queue) {
  if (bytes == 0) return OMC_OK;
  OMC_TRY(omc_cuda_enter(ctx));
  const int error =
      omc_cuda_api_get()->cuMemsetD8Async((omc_cuda_ptr)(uintptr_t)dst, 0, bytes, queue);
  omc_cuda_leave(ctx);
  return omc_cuda_check(error, "cuMemsetD8Async");
}

static omc_status cuda_step(void *ctx, const omc_optim_step *step, void *queue) {
  const size_t bytes = omc_cuda_step_bytes(step);
  void *room;
  OMC_TRY(cuda_alloc(ctx, bytes, queue, &room));
  omc_status status = omc_cuda_enter(ctx);
  if (status == OMC_OK) {
    status = omc_cuda_take_step(ctx, step, room, queue);
    omc_cuda_leave(ctx);
  }
  cuda_free(ctx, room, bytes, queue);
  return status;
}

/* ---- the machine ---- */

static void cuda_allow_tf32(void *ctx, bool allow) {
  omc_cuda_device *d = ctx;
  __atomic_store_n(&d->tf32, allow, __ATOMIC_RELAXED);
}

static int cuda_threads(void *ctx) {
  (void)ctx;
  return 1;
}

/* Launches are of the device's context. */
static void cuda_hold(void *ctx, int threads, uint32_t *jobs, void (*fn)(void *arg), void *arg) {
  (void)threads, (void)jobs;
  const omc_status entered = omc_cuda_enter(ctx);
  fn(arg); /* fails by itself without a context */
  if (entered == OMC_OK) omc_cuda_leave(ctx);
}

static omc_status cuda_sync(void *ctx, void *queue) {
  OMC_TRY(omc_cuda_enter(ctx));
  const int error = omc_cuda_api_get()->cuStreamSynchronize(queue);
  omc_cuda_leave(ctx);
  OMC_TRY(omc_cuda_check(error, "cuStreamSynchronize"));
  return omc_cuda_read_letter(ctx);
}

static omc_status cuda_sync_all(void *ctx) {
  OMC_TRY(omc_cuda_enter(ctx));
  const int error = omc_cuda_api_get()->cuCtxSynchronize();
  omc_cuda_leave(ctx);
  return omc_cuda_check(error, "cuCtxSynchronize");
}

static omc_status cuda_order(void *ctx, void *queue, void *other) {
  OMC_TRY(omc_cuda_enter(ctx));
  const omc_status status = wait_for(queue, other);
  omc_cuda_leave(ctx);
  return status;
}

static double cuda_clock(void *ctx, void *queue) {
  struct timespec now;
  if (omc_cuda_enter(ctx) == OMC_OK) {
    omc_cuda_api_get()->cuStreamSynchronize(queue);
    omc_cuda_leave(ctx);
  }
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static const char *cuda_variant(void *ctx, uint32_t i) {
  (void)ctx;
  return i == 0 ? "cuda" : NULL;
}

static bool cuda_set_variant(void *ctx, const char *variant) {
  (void)ctx, (void)variant;
  return !variant || strcmp(variant, "cuda") == 0;
}

omc_status omc_cuda_provider(int32_t ordinal, const omc_provider **out);
omc_status omc_cuda_provider(int32_t ordinal, const omc_provider **out) {
  static omc_provider providers[MAX_ORDINALS];
  static char names[MAX_ORDINALS][16];
  static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
  omc_cuda_device *device;
  OMC_TRY(omc_cuda_device_get(ordinal, &device));
  omc_provider *p = &providers[ordinal];
  pthread_mutex_lock(&opening);
  if (!p->name) {
    snprintf(names[ordinal], sizeof names[ordinal], "cuda:%d", ordinal);
    *p = (omc_provider){.name = names[ordinal],
                        .device = {KDLCUDA, ordinal},
                        .alignment = ALIGNMENT,
                        .ctx = device,
                        .prepare = cuda_prepare,
                        .fusible = cuda_fusible,
                        .alloc = cuda_alloc,
                        .free = cuda_free,
                        .memory = cuda_memory,
                        .trim = cuda_trim,
                        .upload = cuda_upload,
                        .unload = cuda_unload,
                        .copy = cuda_copy,
                        .zero = cuda_zero,
                        .step = cuda_step,
                        .allow_tf32 = cuda_allow_tf32,
                        .precision_of = "cuda",
                        .threads = cuda_threads,
                        .hold = cuda_hold,
                        .sync = cuda_sync,
                        .sync_all = cuda_sync_all,
                        .order = cuda_order,
                        .clock = cuda_clock,
                        .variant = cuda_variant,
                        .set_variant = cuda_set_variant};
  }
  pthread_mutex_unlock(&opening);
  *out = p;
  return OMC_OK;
}
