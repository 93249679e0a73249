/* What a device must offer, and what a kernel is given. Valid C11 and C++17.
 *
 * A kernel sees its arguments only: tensors, decoded parameters, scratch memory. It allocates
 * nothing, locks nothing, reads no environment, and may run on several threads of its own by
 * cpu/parallel.h. */
#ifndef OMC_PROVIDER_H
#define OMC_PROVIDER_H

#include "base/op_id.h"
#include "base/shape.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A dense row-major tensor, borrowed. An optional one left out has type NULL. A tensor of zero
 * elements may have data NULL. */
typedef struct omc_tensor {
  void *data;
  const omc_type *type;
} omc_tensor;

/* Calls into the user's Python for ops without a kernel; filled in by bind/, NULL elsewhere.
 * `index` is the node's attribute of that name, `run` identifies the forward/backward pair. */
typedef struct omc_host {
  void *ctx;
  omc_status (*infer)(void *ctx, int64_t index, const omc_type *in, uint32_t n_in, omc_type *out,
                      uint32_t n_out);
  omc_status (*forward)(void *ctx, void **run, int64_t index, const omc_tensor *in, uint32_t n_in,
                        const omc_tensor *out, uint32_t n_out);
  omc_status (*backward)(void *ctx, void **run, int64_t index, const omc_tensor *dout,
                         uint32_t n_dout, const omc_tensor *din, uint32_t n_din);
  void (*drop)(void *ctx, void *run); /* releases what forward put into *run; NULL is accepted */
} omc_host;

typedef struct omc_kernel_args {
  const omc_tensor *in;
  const omc_tensor *out;
  uint32_t n_in, n_out;
  const void *params;   /* as decoded by the op's params function */
  void *workspace;      /* as many bytes as its workspace function asked for; 64-byte aligned */
  int threads;          /* at most; at least 1 */
  uint64_t seed;        /* of this step, for random ops */
  const char *node;     /* source name for messages */
  const omc_host *host; /* ops with OMC_OP_HOST only */
  void **run;
  void *stream; /* device queue; NULL on the CPU */
} omc_kernel_args;

typedef omc_status (*omc_kernel)(const omc_kernel_args *args);

typedef struct omc_provider {
  const char *name;
  size_t alignment; /* of every arena slot, bytes, a power of two */
  void *ctx;
  /* Pooled device memory: freed blocks are kept and handed out again. Any thread. */
  omc_status (*alloc)(void *ctx, size_t bytes, void **out);
  void (*free)(void *ctx, void *ptr, size_t bytes);
  /* Copies between host and device and within the device; plain memcpy on the CPU. */
  omc_status (*copy_in)(void *ctx, void *dst, const void *src, size_t bytes, void *stream);
  omc_status (*copy_out)(void *ctx, void *dst, const void *src, size_t bytes, void *stream);
  omc_status (*copy)(void *ctx, void *dst, const void *src, size_t bytes, void *stream);
  /* The kernel of an op for a dtype; NULL if there is none. */
  omc_kernel (*kernel)(void *ctx, omc_op_id op, omc_dtype dtype);
  int (*threads)(void *ctx); /* threads kernels may use now */
  omc_status (*sync)(void *ctx, void *stream);
  double (*clock)(void *ctx, void *stream); /* seconds, for profiles */
} omc_provider;

/* The CPU provider; lives for the process. */
const omc_provider *omc_cpu_provider(void);

/* Kernels of one op by compute class and instruction set; see cpu/kernel.h. */
typedef struct omc_kernels omc_kernels;

#ifdef __cplusplus
}
#endif

#endif
