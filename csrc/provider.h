/* What a device must offer, and what a kernel is given. Valid C11 and C++17.
 *
 * A kernel sees its arguments only: tensors, decoded parameters, scratch memory. It allocates
 * nothing, locks nothing, and may use as many threads as it is given. Nothing else sways it but
 * what its provider has decided for the process, such as the instructions of products. */
#ifndef OMC_PROVIDER_H
#define OMC_PROVIDER_H

#include <stdbool.h>

#include "base/arena.h"
#include "base/op_id.h"
#include "base/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Calls into the user's Python for ops without a kernel; filled in by python/, NULL elsewhere.
 * `index` is the node's attribute of that name, `run` identifies the forward/backward pair. */
typedef struct omc_callbacks {
  void *ctx;
  omc_status (*infer)(void *ctx, int64_t index, const omc_type *in, uint32_t n_in, omc_type *out,
                      uint32_t n_out);
  omc_status (*forward)(void *ctx, void **run, int64_t index, const omc_tensor *in, uint32_t n_in,
                        const omc_tensor *out, uint32_t n_out);
  omc_status (*backward)(void *ctx, void **run, int64_t index, const omc_tensor *grad_out,
                         uint32_t n_grad_out, const omc_tensor *grad_in, uint32_t n_grad_in);
  void (*drop)(void *ctx, void *run); /* releases what forward put into *run; NULL is accepted */
} omc_callbacks;

typedef struct omc_kernel_args {
  const omc_tensor *in;
  const omc_tensor *out;
  uint32_t n_in, n_out;
  const void *params;             /* of its omc_call */
  void *workspace;                /* as many bytes as that asks for; 64-byte aligned */
  int threads;                    /* at most; at least 1 */
  uint64_t seed;                  /* of this step, for random ops */
  const uint64_t *seed_at;        /* not NULL: it is there instead, on the device, in due time */
  const char *node;               /* omc_node_name of it, for messages */
  const omc_callbacks *callbacks; /* ops with OMC_OP_CALLBACK only */
  void **run;
  void *queue;
} omc_kernel_args;

typedef omc_status (*omc_kernel)(const omc_kernel_args *args);

/* What it takes to run a node. */
typedef struct omc_call {
  omc_kernel kernel;
  const void *params; /* for omc_kernel_args.params; NULL: the kernel has none */
  size_t workspace_bytes;
  bool varies; /* what it gives a queue hangs on more than addresses and the seed */
} omc_call;

struct omc_node;       /* graph/graph.h */
struct omc_optim_step; /* optim/optim.h */

typedef struct omc_memory_stats {
  size_t used_bytes;   /* handed out now, sizes rounded up as the provider does */
  size_t peak_bytes;   /* the most there has been of it */
  size_t cached_bytes; /* freed and kept */
} omc_memory_stats;

/* Work that may come again. Where it `recurs`, `give` gives a queue the same whenever `tensors` are
 * the same, but for the seed, which it is told or finds on the device; it waits for nothing and
 * calls nobody back. */
typedef struct omc_recurring {
  omc_status (*give)(void *arg, const uint64_t *seed_at, void *queue);
  void *arg;
  void *const *tensors; /* addresses of all that may be elsewhere next time; some are NULL */
  uint32_t n_tensors;   /* the same each time */
  bool recurs;          /* else it is given as it is */
  bool random;          /* there is a seed */
  uint64_t seed;
} omc_recurring;

/* A device may work behind the caller's back: what is given to a queue is done in order, some time
 * later, and what fails then is told by the next `sync` of it. Kernels and copies have read what
 * they are given of the host's memory when they return, but for omc_call.params. A queue is the
 * caller's, such as the stream that PyTorch works in; NULL is the device's own, and where there is
 * one only, as on the CPU, all are that. Any thread may use any queue. */
typedef struct omc_provider {
  const char *name;
  struct {
    int32_t type, id; /* as in DLPack */
  } device;
  size_t alignment; /* of every arena slot, bytes, a power of two */
  void *ctx;

  /* Picks the kernel of a typed node, decodes its parameters into `arena`, which lives as long as
   * they are used, and says how much scratch memory it wants with `threads` threads. Views are not
   * asked for: whoever runs a graph shares their memory. OMC_EUNSUPPORTED names the node and the
   * dtype if there is no kernel for it. */
  omc_status (*prepare)(void *ctx, const struct omc_node *node, int threads, omc_arena *arena,
                        omc_call *out) OMC_MUST_USE;
  /* Whether an elementwise node may become an instruction of a program (ops/program.h). */
  bool (*fusible)(void *ctx, const struct omc_node *node);
  bool reuses_results; /* see omc_reuse_results */
  bool channels_last;  /* see omc_lay_channels_last */
  bool gathers_casts;  /* see omc_gather_casts */

  /* Pooled device memory: freed blocks are kept and handed out again, to be used in `queue`. What
   * was freed is not used by others before `queue` has come to where it was freed. */
  omc_status (*alloc)(void *ctx, size_t bytes, void *queue, void **out) OMC_MUST_USE;
  void (*free)(void *ctx, void *ptr, size_t bytes, void *queue);
  omc_memory_stats (*memory)(void *ctx);
  void (*trim)(void *ctx); /* gives back what is cached */
  /* Results are tensors of the framework's own making, in the memory that `alloc` takes, too. Where
   * it has none left for one: whether the provider has given back any that it can do without. NULL:
   * results are allocated here. */
  bool (*make_room)(void *ctx);
  /* Constants: elements in the host's memory, which outlive it, as kernels may read them. */
  omc_status (*upload)(void *ctx, const void *host, size_t bytes, const void **out) OMC_MUST_USE;
  void (*unload)(void *ctx, const void *uploaded, size_t bytes);
  /* Within the device: copies, and sets bytes to 0. */
  omc_status (*copy)(void *ctx, void *dst, const void *src, size_t bytes, void *queue) OMC_MUST_USE;
  omc_status (*zero)(void *ctx, void *dst, size_t bytes, void *queue) OMC_MUST_USE;

  /* Takes a step of an optimizer over tensors of the device, which nobody else uses meanwhile. What
   * the step lists has been read when this returns; what it points to on the device is read and
   * written in the queue. OMC_EUNSUPPORTED: the device has no optimizers. */
  omc_status (*step)(void *ctx, const struct omc_optim_step *step, void *queue) OMC_MUST_USE;

  /* Whether products of float32 may round their operands to TF32 from now on, as PyTorch says of
   * devices of that name; NULL: there is no such choice. */
  void (*allow_tf32)(void *ctx, bool allow);
  const char *precision_of;

  int (*threads)(void *ctx); /* threads kernels may use now */
  /* Calls fn(arg), which runs kernels on at most `threads` threads, with those held ready where
   * that pays. `jobs` is the caller's, one for all calls with the same fn and work, 0 at first:
   * what the device has learned of it. NULL: the device has nothing to hold. */
  void (*hold)(void *ctx, int threads, uint32_t *jobs, void (*fn)(void *arg), void *arg);
  /* Gives work to a queue, by work->give, or as the device has noted it while that gave the same:
   * *replayed says so. `*notes` is the caller's, NULL at first and one for all work of an origin;
   * `forget` ends it, once sync_all is through, where there is one. NULL: the device notes nothing.
   */
  omc_status (*give)(void *ctx, const omc_recurring *work, void *queue, void **notes,
                     bool *replayed) OMC_MUST_USE;
  void (*forget)(void *ctx, void *notes);
  /* What is known by now to have failed of what was given to any queue; told once, and waits for
   * nothing. NULL: nothing fails behind the caller's back. */
  omc_status (*told)(void *ctx) OMC_MUST_USE;
  /* Waits until a queue, or the whole device, is done; the failure of what it did. Before plans are
   * dropped the whole device is waited for; NULL: it need not be, as parameters are read when work
   * is given, and the memory of constants is kept for as long as it takes. */
  omc_status (*sync)(void *ctx, void *queue) OMC_MUST_USE;
  omc_status (*sync_all)(void *ctx) OMC_MUST_USE;
  /* What is given to `queue` from now on waits for what `other` was given before. */
  omc_status (*order)(void *ctx, void *queue, void *other) OMC_MUST_USE;
  double (*clock)(void *ctx, void *queue); /* seconds, when the queue is done; for profiles */

  /* Names of the kernel variants that this machine runs, plainest first; NULL after the last. And a
   * bound on those that nodes are prepared with from now on (tests), NULL: none; false: there is no
   * such variant. */
  const char *(*variant)(void *ctx, uint32_t i);
  bool (*set_variant)(void *ctx, const char *name);
} omc_provider;

/* The provider of that name, which lives for the process: "cpu", "cuda:1"; without a number that of
 * number 0. OMC_EINVALID: there is none; OMC_EUNSUPPORTED says what the device's lacks here. */
omc_status omc_provider_find(const char *name, const omc_provider **out) OMC_MUST_USE;

/* OMC_EDEVICE: what p is known by now to have failed of what it was given before; told once, and
 * waits for nothing. */
omc_status omc_provider_told(const omc_provider *p) OMC_MUST_USE;

/* The one that computes in the host's memory: constants are folded with it. */
const omc_provider *omc_provider_host(void);

#ifdef __cplusplus
}
#endif

#endif
