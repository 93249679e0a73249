#include "cuda/api.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

/* By the names they are loaded under, the newest first. PyTorch has loaded them, but for the
 * compiler, which it loads where it lies beside the others when it is first wanted. */
enum { DRIVER, NVRTC, CUBLASLT, TORCH, N_LIBRARIES, MAX_NAMES = 3 };
static const struct {
  const char *names[MAX_NAMES];
  const char *comes_with;
} libraries[N_LIBRARIES] = {
    [DRIVER] = {{"libcuda.so.1"}, "NVIDIA's driver"},
    [NVRTC] = {{"libnvrtc.so.13", "libnvrtc.so.12"}, "PyTorch for CUDA (nvidia-cuda-nvrtc)"},
    [CUBLASLT] = {{"libcublasLt.so.13", "libcublasLt.so.12"}, "PyTorch for CUDA (nvidia-cublas)"},
    [TORCH] = {{"libtorch_cuda.so"}, "PyTorch for CUDA"},
};

static const struct {
  int library;
  const char *name;
  size_t slot;
} functions[] = {
#define OMC_CUDA_API(library, result, name, parameters) \
  {library, #name, offsetof(omc_cuda_api, name)},
#include "cuda/api.def"
#undef OMC_CUDA_API
};

static const char *says_nothing(void) { return NULL; }

/* Stand for functions that came with PyTorch 2.13: before, stderr alone tells of exceptions. */
static const struct {
  const char *name;
  const char *(*called)(void);
} stand_ins[] = {
    {"torch_exception_get_what_without_backtrace", says_nothing},
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static omc_cuda_api api;
static bool loaded;

static void *open_library(int library, int flags) {
  void *handle = NULL;
  for (int k = 0; k < MAX_NAMES && libraries[library].names[k] && !handle; k++)
    handle = dlopen(libraries[library].names[k], flags);
  return handle;
}

static omc_status open_libraries(void **handles) {
  for (int i = 0; i < N_LIBRARIES; i++) {
    handles[i] = open_library(i, RTLD_LAZY | RTLD_NOLOAD);
    if (!handles[i] && i != TORCH) handles[i] = open_library(i, RTLD_LAZY);
    if (!handles[i])
      OMC_FAIL(EUNSUPPORTED, "no %s in this process: it comes with %s", libraries[i].names[0],
               libraries[i].comes_with);
  }
  return OMC_OK;
}

static void *find(void *library, const char *name) {
  void *address = dlsym(library, name);
  for (size_t i = 0; i < sizeof stand_ins / sizeof *stand_ins && !address; i++)
    if (strcmp(stand_ins[i].name, name) == 0)
      memcpy(&address, &stand_ins[i].called, sizeof address);
  return address;
}

static omc_status look_up(void) {
  void *handles[N_LIBRARIES];
  OMC_TRY(open_libraries(handles));
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
    void *address = find(handles[functions[i].library], functions[i].name);
    if (!address)
      OMC_FAIL(EUNSUPPORTED, "%s has no %s", libraries[functions[i].library].names[0],
               functions[i].name);
    memcpy((char *)&api + functions[i].slot, &address, sizeof address);
  }
  return OMC_OK;
}

omc_status omc_cuda_api_load(const omc_cuda_api **out) {
  pthread_mutex_lock(&mutex);
  const omc_status status = loaded ? OMC_OK : look_up();
  loaded = status == OMC_OK;
  pthread_mutex_unlock(&mutex);
  *out = &api;
  return status;
}

const omc_cuda_api *omc_cuda_api_get(void) { return &api; }

enum { OUT_OF_MEMORY = 2 };

/* After these nothing works in the context any more: the memory of the device, an instruction, a
 * kernel that ran for too long, a launch. */
static const int fatal[] = {214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719};

static omc_status status_of(int result) {
  for (size_t i = 0; i < sizeof fatal / sizeof *fatal; i++)
    if (result == fatal[i]) return OMC_EDEVICE;
  return result == OUT_OF_MEMORY ? OMC_EDEVICEMEM : OMC_EINTERNAL;
}

omc_status omc_cuda_check(int result, const char *what) {
  if (result == 0) return OMC_OK;
  const char *name = NULL, *text = NULL;
  api.cuGetErrorName(result, &name);
  api.cuGetErrorString(result, &text);
  return omc_fail(status_of(result), "%s: %s (%s)", what, name ? name : "unknown error",
                  text ? text : "");
}

enum { ALLOC_FAILED = 3, EXECUTION_FAILED = 13 };

omc_status omc_cublaslt_check(int result, const char *what) {
  if (result == 0) return OMC_OK;
  const omc_status status = result == ALLOC_FAILED       ? OMC_EDEVICEMEM
                            : result == EXECUTION_FAILED ? OMC_EDEVICE
                                                         : OMC_EINTERNAL;
  return omc_fail(status, "%s: %s (%s)", what, api.cublasLtGetStatusName(result),
                  api.cublasLtGetStatusString(result));
}

omc_status omc_nvrtc_check(int result, const char *what) {
  if (result == 0) return OMC_OK;
  OMC_FAIL(EINTERNAL, "%s: %s", what, api.nvrtcGetErrorString(result));
}

/* PyTorch tells of its failures by words alone, which are the driver's where that has failed. */
static omc_status status_said(const char *said) {
  if (strstr(said, "out of memory")) return OMC_EDEVICEMEM;
  for (size_t i = 0; i < sizeof fatal / sizeof *fatal; i++) {
    const char *text = NULL;
    if (api.cuGetErrorString(fatal[i], &text) == 0 && text && strstr(said, text))
      return OMC_EDEVICE;
  }
  return OMC_EINTERNAL;
}

omc_status omc_torch_check(int result, const char *what) {
  if (result == 0) return OMC_OK;
  const char *said = api.torch_exception_get_what_without_backtrace();
  if (!said) said = "it does not say why";
  return omc_fail(status_said(said), "%s failed in PyTorch: %s", what, said);
}
