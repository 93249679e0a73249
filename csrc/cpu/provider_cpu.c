/* The CPU as a provider: pooled host memory, kernels by dtype and instruction set. */
#include <string.h>
#include <time.h>

#include "base/env.h"
#include "cpu/memory_pool.h"
#include "cpu/ops/block.h"
#include "cpu/parallel.h"
#include "cpu/update.h"
#include "ops/op.h"

#pragma GCC visibility push(hidden)
#define OMC_OP(name, family, domain, ...) extern const omc_cpu_op omc_cpu_##name;
#include "ops.def"
#undef OMC_OP
#pragma GCC visibility pop

static const omc_cpu_op *const records[OMC_N_OPS] = {
#define OMC_OP(name, family, domain, ...) &omc_cpu_##name,
#include "ops.def"
#undef OMC_OP
};

const omc_cpu_op *omc_cpu_op_get(omc_op_id id) { return records[id]; }

omc_status omc_no_memory(const omc_node *node) {
  OMC_NODE_FAIL(node, ENOMEM, "no memory for kernel parameters");
}

/* ---- nodes ---- */

static omc_kernel kernel_of(omc_op_id id, omc_dtype dtype) {
  const omc_cpu_op *op = omc_cpu_op_get(id);
  if (op->ew) return omc_ew_pick(op->ew, omc_dtype_acc(dtype)) ? omc_ew_run : NULL;
  return op->kernels ? omc_kernels_pick(op->kernels, dtype) : NULL;
}

static bool cpu_fusible(void *ctx, const omc_node *node) {
  (void)ctx;
  const omc_cpu_op *op = omc_cpu_op_get(node->op);
  return op->ew && omc_ew_pick(op->ew, omc_ew_computed_in(omc_ew_class(node)));
}

/* The kernel of elementwise programs takes a pointer to the program. */
static omc_status prepare_elementwise(const omc_node *node, omc_arena *arena, int threads,
                                      omc_call *out) {
  omc_ew_program **program = OMC_NEW(arena, omc_ew_program *);
  if (!program) return omc_no_memory(node);
  OMC_TRY(omc_ew_compile(node, arena, program));
  out->params = program;
  out->workspace_bytes = omc_ew_workspace(*program, threads);
  return OMC_OK;
}

/* Convolutions and pools have kernels of [N, C, ...] alone. */
static omc_status need_channels_second(const omc_node *node) {
  const omc_attr *given = omc_node_attr(node, "channels_last");
  if (!given || !given->v.i) return OMC_OK;
  OMC_NODE_FAIL(node, EUNSUPPORTED, "cpu has no kernel for channels_last=1");
}

static omc_status cpu_prepare(void *ctx, const omc_node *node, int threads, omc_arena *arena,
                              omc_call *out) {
  (void)ctx;
  const omc_cpu_op *op = omc_cpu_op_get(node->op);
  const omc_dtype dtype = omc_node_dtype(node);
  OMC_TRY(need_channels_second(node));
  *out = (omc_call){.kernel = kernel_of(node->op, dtype)};
  if (!out->kernel)
    OMC_NODE_FAIL(node, EUNSUPPORTED, "cpu has no kernel for %s", omc_dtype_get(dtype)->text);
  if (out->kernel == omc_ew_run) return prepare_elementwise(node, arena, threads, out);
  if (op->params) {
    void *params = omc_arena_alloc(arena, 1, op->params_size);
    if (!params) return omc_no_memory(node);
    OMC_TRY(op->params(node, arena, params));
    out->params = params;
  }
  if (op->workspace) out->workspace_bytes = op->workspace(node, out->params, threads);
  return OMC_OK;
}

/* ---- memory ---- */

static omc_status cpu_alloc(void *ctx, size_t bytes, void *queue, void **out) {
  (void)ctx, (void)queue;
  return omc_pool_alloc(bytes, out);
}

static void cpu_free(void *ctx, void *ptr, size_t bytes, void *queue) {
  (void)ctx, (void)queue;
  omc_pool_free(ptr, bytes);
}

static omc_memory_stats cpu_memory(void *ctx) {
  (void)ctx;
  return omc_pool_get_stats();
}

static void cpu_trim(void *ctx) {
  (void)ctx;
  omc_pool_trim();
}

/* Constants serve where they are. */
static omc_status cpu_upload(void *ctx, const void *host, size_t bytes, const void **out) {
  (void)ctx, (void)bytes;
  *out = host;
  return OMC_OK;
}

static void cpu_unload(void *ctx, const void *uploaded, size_t bytes) {
  (void)ctx, (void)uploaded, (void)bytes;
}

static omc_status cpu_copy(void *ctx, void *dst, const void *src, size_t bytes, void *queue) {
  (void)ctx, (void)queue;
  if (bytes) memmove(dst, src, bytes);
  return OMC_OK;
}

static omc_status cpu_zero(void *ctx, void *dst, size_t bytes, void *queue) {
  (void)ctx, (void)queue;
  if (bytes) memset(dst, 0, bytes);
  return OMC_OK;
}

/* ---- the machine ---- */

static int cpu_threads(void *ctx) {
  (void)ctx;
  return omc_cpu_threads();
}

/* Torch's BLAS is to find its own threads free. */
static void cpu_hold(void *ctx, int threads, uint32_t *jobs, void (*fn)(void *arg), void *arg) {
  (void)ctx;
  omc_parallel_hold(omc_env_get()->gemm == OMC_GEMM_TORCH ? 1 : threads, jobs, fn, arg);
}

static omc_status cpu_sync(void *ctx, void *queue) {
  (void)ctx, (void)queue;
  return OMC_OK;
}

static omc_status cpu_sync_all(void *ctx) {
  (void)ctx;
  return OMC_OK;
}

static omc_status cpu_order(void *ctx, void *queue, void *other) {
  (void)ctx, (void)queue, (void)other;
  return OMC_OK;
}

static double cpu_clock(void *ctx, void *queue) {
  (void)ctx, (void)queue;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static const char *const isa_names[OMC_N_ISA] = {OMC_ISA_NAMES};

static const char *cpu_variant(void *ctx, uint32_t i) {
  (void)ctx;
  return i <= (uint32_t)omc_cpu_isa() ? isa_names[i] : NULL;
}

static bool cpu_set_variant(void *ctx, const char *name) {
  (void)ctx;
  int isa = name ? 0 : OMC_N_ISA;
  while (isa < OMC_N_ISA && strcmp(isa_names[isa], name) != 0) isa++;
  if (name && isa == OMC_N_ISA) return false;
  omc_cpu_set_isa((omc_isa)isa);
  return true;
}

omc_status omc_cpu_provider(int32_t ordinal, const omc_provider **out);
omc_status omc_cpu_provider(int32_t ordinal, const omc_provider **out) {
  static const omc_provider provider = {.name = "cpu",
                                        .device = {1, 0},
                                        .alignment = OMC_POOL_ALIGNMENT,
                                        .prepare = cpu_prepare,
                                        .fusible = cpu_fusible,
                                        .alloc = cpu_alloc,
                                        .free = cpu_free,
                                        .memory = cpu_memory,
                                        .trim = cpu_trim,
                                        .upload = cpu_upload,
                                        .unload = cpu_unload,
                                        .copy = cpu_copy,
                                        .zero = cpu_zero,
                                        .step = omc_cpu_step,
                                        .threads = cpu_threads,
                                        .hold = cpu_hold,
                                        .sync = cpu_sync,
                                        .sync_all = cpu_sync_all,
                                        .order = cpu_order,
                                        .clock = cpu_clock,
                                        .variant = cpu_variant,
                                        .set_variant = cpu_set_variant};
  if (ordinal != 0)
    OMC_FAIL(EUNSUPPORTED, "there is one cpu, number 0, and none of number %d", ordinal);
  *out = &provider;
  return OMC_OK;
}
