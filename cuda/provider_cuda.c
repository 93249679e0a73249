/* An NVIDIA GPU as a provider: PyTorch's memory and streams, kernels compiled on first use. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "cuda/api.h"
#include "cuda/launch.h"
#include "cuda/memory.h"
#include "cuda/optimize.h"
#include "cuda/replay.h"
#include "ops/op.h"

enum { KDLCUDA = 2, ALIGNMENT = 256, MUCH_KEPT = 64 << 20 /* bytes, worth a wait */ };

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
  *out = (omc_call){.kernel = op->run, .varies = op->varies};
  if (op->params) {
    void *params = omc_arena_alloc(arena, 1, op->params_size);
    if (!params) OMC_NODE_FAIL(node, ENOMEM, "no memory for kernel parameters");
    OMC_TRY(op->params(ctx, node, arena, params));
    out->params = params;
  }
  if (op->workspace) out->workspace_bytes = op->workspace(out->params);
  return OMC_OK;
}

/* ---- memory ---- */

static bool cuda_make_room(void *ctx) { return omc_cuda_end_graphs(ctx); }

static omc_status cuda_alloc(void *ctx, size_t bytes, void *queue, void **out) {
  const omc_status status = omc_cuda_alloc(ctx, bytes, queue, out);
  if (status != OMC_EDEVICEMEM || !cuda_make_room(ctx)) return status;
  return omc_cuda_alloc(ctx, bytes, queue, out);
}

/* What is kept is PyTorch's to give back: torch.cuda.empty_cache(). */
static void cuda_trim(void *ctx) { (void)ctx; }

/* Of an empty constant there is a byte. */
static size_t room_of(size_t bytes) { return bytes ? bytes : 1; }

/* A wait for the whole device ends captures of others' and is refused while there is one: it is for
 * much memory alone, which may be given back later. */
static omc_status give_back(const omc_cuda_device *d) {
  if (omc_cuda_keeps(d) < MUCH_KEPT) return OMC_OK;
  const omc_status status = omc_cuda_finish(d);
  return status == OMC_EDEVICE ? status : OMC_OK;
}

static int wait_for(void *queue) {
  const int mode = omc_cuda_capture_mode(OMC_CUDA_RELAXED);
  const int error = omc_cuda_api_get()->cuStreamSynchronize(queue);
  omc_cuda_capture_mode(mode);
  return error;
}

static omc_status copy(void *at, const void *host, size_t bytes, void *queue) {
  const int mode = omc_cuda_capture_mode(OMC_CUDA_RELAXED);
  const int error =
      omc_cuda_api_get()->cuMemcpyHtoDAsync_v2((omc_cuda_ptr)(uintptr_t)at, host, bytes, queue);
  omc_cuda_capture_mode(mode);
  return omc_cuda_check(error, "cuMemcpyHtoDAsync");
}

/* Whoever had the memory before may still be using it, in the stream that it is for. All streams
 * may read it afterwards, and the host's memory may be another's: so the copy is waited for, which
 * within a capture it cannot be. */
static omc_status fill(const omc_cuda_device *d, void *at, const void *host, size_t bytes,
                       void *queue) {
  int capturing = 0;
  OMC_CUDA_TRY(cuStreamIsCapturing, queue, &capturing);
  if (capturing)
    OMC_FAIL(EINTERNAL,
             "a constant of %zu bytes cannot be uploaded while a CUDA graph is captured: "
             "let the module run once before, with the same shapes",
             bytes);
  OMC_TRY(give_back(d));
  if (bytes == 0) return OMC_OK;
  OMC_TRY(copy(at, host, bytes, queue));
  return omc_cuda_check(wait_for(queue), "cuStreamSynchronize");
}

static omc_status cuda_upload(void *ctx, const void *host, size_t bytes, const void **out) {
  const omc_cuda_device *d = ctx;
  void *at, *queue;
  OMC_TORCH_TRY("a constant", aoti_torch_get_current_cuda_stream, d->ordinal, &queue);
  omc_cuda_use(d, queue);
  OMC_TRY(cuda_alloc(ctx, room_of(bytes), queue, &at));
  omc_status status = omc_cuda_enter(ctx);
  if (status == OMC_OK) {
    status = fill(d, at, host, bytes, queue);
    omc_cuda_leave(ctx);
  }
  if (status == OMC_OK)
    *out = at;
  else
    omc_cuda_free(ctx, at, room_of(bytes), queue);
  return status;
}

static void cuda_unload(void *ctx, const void *uploaded, size_t bytes) {
  omc_cuda_free_used(ctx, (void *)(uintptr_t)uploaded, room_of(bytes));
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

/* Scaling alone takes no number of the host's that another launch should not have. */
static omc_status take_step(void *ctx, const omc_optim_step *step, void *queue) {
  const size_t bytes = omc_cuda_step_bytes(step);
  bool captured;
  void *room;
  if (step->rule != OMC_RULE_SCALE)
    OMC_TRY(omc_cuda_is_captured(
        queue, "take the step with the numbers of now, such as the learning rate", &captured));
  OMC_TRY(cuda_alloc(ctx, bytes, queue, &room));
  const omc_status status = omc_cuda_take_step(ctx, step, room, queue);
  omc_cuda_free(ctx, room, bytes, queue);
  return status;
}

static omc_status cuda_step(void *ctx, const omc_optim_step *step, void *queue) {
  OMC_TRY(omc_cuda_enter(ctx));
  const omc_status status = take_step(ctx, step, queue);
  omc_cuda_leave(ctx);
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

static omc_status cuda_told(void *ctx) { return omc_cuda_read_letter(ctx); }

static omc_status cuda_sync(void *ctx, void *queue) {
  OMC_TRY(omc_cuda_enter(ctx));
  const int error = wait_for(queue);
  omc_cuda_leave(ctx);
  OMC_TRY(omc_cuda_check(error, "cuStreamSynchronize"));
  return omc_cuda_read_letter(ctx);
}

static omc_status cuda_order(void *ctx, void *queue, void *other) {
  OMC_TRY(omc_cuda_enter(ctx));
  const omc_status status = omc_cuda_follow(queue, other);
  omc_cuda_leave(ctx);
  return status;
}

static double cuda_clock(void *ctx, void *queue) {
  struct timespec now;
  if (omc_cuda_enter(ctx) == OMC_OK) {
    (void)wait_for(queue);
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
  static omc_provider providers[OMC_CUDA_DEVICES];
  static char names[OMC_CUDA_DEVICES][16];
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
                        .reuses_results = true,
                        .channels_last = true,
                        .gathers_casts = true,
                        .alloc = cuda_alloc,
                        .free = omc_cuda_free,
                        .memory = omc_cuda_memory,
                        .trim = cuda_trim,
                        .make_room = cuda_make_room,
                        .upload = cuda_upload,
                        .unload = cuda_unload,
                        .copy = cuda_copy,
                        .zero = cuda_zero,
                        .step = cuda_step,
                        .allow_tf32 = cuda_allow_tf32,
                        .precision_of = "cuda",
                        .threads = cuda_threads,
                        .hold = cuda_hold,
                        .give = omc_cuda_give,
                        .forget = omc_cuda_forget,
                        .told = cuda_told,
                        .sync = cuda_sync,
                        .order = cuda_order,
                        .clock = cuda_clock,
                        .variant = cuda_variant,
                        .set_variant = cuda_set_variant};
  }
  pthread_mutex_unlock(&opening);
  *out = p;
  return OMC_OK;
}
