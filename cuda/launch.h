/* How the provider's ops are written: what they know of a node at plan time, and launches. */
#ifndef OMC_CUDA_LAUNCH_H
#define OMC_CUDA_LAUNCH_H

#include "cuda/gpu/philox.h"
#include "cuda/unit.h"
#include "graph/graph.h"
#include "provider.h"

/* What a GPU knows of an op: a row of ops.def that has a kernel has an omc_cuda_NAME. */
typedef struct omc_cuda_op {
  omc_kernel run;
  /* Decodes a typed node into `params_size` zeroed bytes, and has its units compiled. Variable
   * parts come from `arena`, which lives as long as they are used. OMC_EUNSUPPORTED: no kernel. */
  size_t params_size;
  omc_status (*params)(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                       void *params);
  size_t (*workspace)(const void *params); /* bytes of scratch memory; NULL: none */
  bool varies;                             /* as omc_call.varies */
} omc_cuda_op;

/* A kernel that a plan will launch; its function is looked up at the first launch, and at one with
 * more shared memory than those before. */
typedef struct omc_cuda_kernel {
  omc_cuda_unit *unit;
  void *function;
  uint32_t shared_bytes; /* that the function was looked up for */
} omc_cuda_kernel;

typedef struct omc_cuda_grid {
  int64_t blocks; /* none: nothing to do */
  uint32_t threads;
  uint32_t shared_bytes;
} omc_cuda_grid;

/* Launches a kernel on a stream with its struct of parameters, which is copied. */
omc_status omc_cuda_launch(omc_cuda_kernel *kernel, omc_cuda_grid grid, const void *parameters,
                           void *queue) OMC_MUST_USE;

/* The kernel `name` of a source, which is compiled from now on. */
omc_status omc_cuda_kernel_in(omc_cuda_device *device, const char *source, const char *name,
                              omc_cuda_kernel *out) OMC_MUST_USE;

/* Of kernels for units of 1, 2, 4, 8 and 16 bytes, of which addresses decide when they are known,
 * the one for `likely` bytes, if that is not 0, is compiled from now on. A name may be NULL: there
 * is none. */
enum { OMC_CUDA_UNITS = 5 };
omc_status omc_cuda_kernels_in(omc_cuda_device *device, const char *source,
                               const char *const names[OMC_CUDA_UNITS], size_t likely,
                               omc_cuda_kernel out[OMC_CUDA_UNITS]) OMC_MUST_USE;

/* A kernel of device code cuda/ops/FILE.h for what is stored as `dtype`: it has OMC_STORAGE and
 * OMC_COMPUTE defined, and what `defines` says. Its name is `name` and `ending`. */
omc_status omc_cuda_kernel_of(omc_cuda_device *device, const char *file, omc_dtype dtype,
                              const char *defines, const char *name, const char *ending,
                              omc_cuda_kernel *out) OMC_MUST_USE;

/* Elements of an input or output; NULL if it is left out. */
static inline void *omc_cuda_in(const omc_kernel_args *args, uint32_t i) {
  return i < args->n_in && args->in[i].type ? args->in[i].data : NULL;
}
static inline void *omc_cuda_out(const omc_kernel_args *args, uint32_t i) {
  return i < args->n_out && args->out[i].type ? args->out[i].data : NULL;
}

static inline omc_gpu_seed omc_cuda_seed(const omc_kernel_args *args) {
  return (omc_gpu_seed){args->seed, args->seed_at};
}

/* Who a kernel's letters are from. The name is kept for the process. */
omc_status omc_cuda_sender_of(const omc_cuda_device *device, const omc_node *node,
                              omc_sender *out) OMC_MUST_USE;

/* Programs of elementwise ops (ops/fused.c). */
extern const omc_cuda_op omc_cuda_program, omc_cuda_FusedElementwise;

/* Kernels that hold indices in 32 bits are given those below this: 2^31, but in tests. */
int64_t omc_cuda_narrow(void);

/* The words in which device code names a dtype, "bf16", and its class, "F32". */
const char *omc_cuda_storage(omc_dtype dtype);
const char *omc_cuda_class(omc_dtype acc);

#endif
