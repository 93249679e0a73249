#include "cuda/launch.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/api.h"

const char *omc_cuda_storage(omc_dtype dtype) {
  static const char *const names[OMC_N_DTYPE] = {
      [OMC_F32] = "float",   [OMC_F64] = "double",   [OMC_F16] = "f16",     [OMC_BF16] = "bf16",
      [OMC_I64] = "int64_t", [OMC_I32] = "int32_t",  [OMC_I16] = "int16_t", [OMC_I8] = "int8_t",
      [OMC_U8] = "uint8_t",  [OMC_BOOL] = "boolean",
  };
  return names[dtype];
}

const char *omc_cuda_class(omc_dtype acc) {
  return acc == OMC_F32 ? "F32" : acc == OMC_F64 ? "F64" : "I64";
}

int64_t omc_cuda_narrow(void) { return (int64_t)1 << 31; }

omc_status omc_cuda_kernel_in(omc_cuda_device *device, const char *source, const char *name,
                              omc_cuda_kernel *out) {
  *out = (omc_cuda_kernel){0};
  OMC_TRY(omc_cuda_unit_of(device, source, name, &out->unit));
  omc_cuda_unit_ask(out->unit);
  return OMC_OK;
}

omc_status omc_cuda_kernels_in(omc_cuda_device *device, const char *source,
                               const char *const names[OMC_CUDA_UNITS], size_t likely,
                               omc_cuda_kernel out[OMC_CUDA_UNITS]) {
  for (int i = 0; i < OMC_CUDA_UNITS; i++) {
    out[i] = (omc_cuda_kernel){0};
    if (names[i]) OMC_TRY(omc_cuda_unit_of(device, source, names[i], &out[i].unit));
  }
  if (likely) omc_cuda_unit_ask(out[__builtin_ctzll(likely)].unit);
  return OMC_OK;
}

omc_status omc_cuda_kernel_of(omc_cuda_device *device, const char *file, omc_dtype dtype,
                              const char *defines, const char *name, const char *ending,
                              omc_cuda_kernel *out) {
  char source[256], text[64];
  snprintf(source, sizeof source,
           "#define OMC_COMPUTE_%s\n#define OMC_STORAGE %s\n%s#include \"cuda/ops/%s.h\"\n",
           omc_cuda_class(omc_dtype_acc(dtype)), omc_cuda_storage(dtype), defines, file);
  snprintf(text, sizeof text, "%s%s", name, ending);
  return omc_cuda_kernel_in(device, source, text, out);
}

enum { MOST_BLOCKS = INT32_MAX };

/* Of two threads that look it up the later may note fewer bytes: it is looked up once more then. */
static omc_status function_of(omc_cuda_kernel *kernel, uint32_t shared_bytes, void **out) {
  *out = __atomic_load_n(&kernel->function, __ATOMIC_ACQUIRE);
  if (*out && shared_bytes <= __atomic_load_n(&kernel->shared_bytes, __ATOMIC_RELAXED))
    return OMC_OK;
  OMC_TRY(omc_cuda_function_of(kernel->unit, shared_bytes, out));
  __atomic_store_n(&kernel->shared_bytes, shared_bytes, __ATOMIC_RELAXED);
  __atomic_store_n(&kernel->function, *out, __ATOMIC_RELEASE);
  return OMC_OK;
}

omc_status omc_cuda_launch(omc_cuda_kernel *kernel, omc_cuda_grid grid, const void *parameters,
                           void *queue) {
  if (grid.blocks == 0) return OMC_OK;
  if (grid.blocks > MOST_BLOCKS)
    OMC_FAIL(EUNSUPPORTED, "kernel '%s' would take %lld blocks, a launch has %d at most",
             omc_cuda_unit_name(kernel->unit), (long long)grid.blocks, MOST_BLOCKS);
  void *function;
  OMC_TRY(function_of(kernel, grid.shared_bytes, &function));
  void *list[] = {(void *)(uintptr_t)parameters};
  OMC_CUDA_TRY(cuLaunchKernel, function, (unsigned)grid.blocks, 1, 1, grid.threads, 1, 1,
               grid.shared_bytes, queue, list, NULL);
  return OMC_OK;
}

/* ---- names ---- */

typedef struct entry {
  struct entry *next;
  char text[];
} entry;

/* Those of the nodes whose kernels may write letters, which outlive their plans. */
static const char *kept(const char *text) {
  static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  static entry *names;
  pthread_mutex_lock(&mutex);
  entry *n = names;
  while (n && strcmp(n->text, text) != 0) n = n->next;
  const size_t bytes = strlen(text) + 1;
  if (!n && (n = malloc(sizeof *n + bytes))) {
    memcpy(n->text, text, bytes);
    n->next = names;
    names = n;
  }
  pthread_mutex_unlock(&mutex);
  return n ? n->text : NULL;
}

omc_status omc_cuda_sender_of(const omc_cuda_device *device, const omc_node *node,
                              omc_sender *out) {
  char text[OMC_NODE_TEXT];
  const char *name = kept(omc_node_text(node, text, sizeof text));
  if (!name) OMC_NODE_FAIL(node, ENOMEM, "no memory for its name");
  *out = (omc_sender){device->letter_of_kernels, (uint64_t)(uintptr_t)name};
  return OMC_OK;
}
