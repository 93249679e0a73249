#include "cuda/device.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#include "base/lock.h"
#include "cuda/api.h"

enum { LEAST_ARCHITECTURE = 80, MOST_ARCHITECTURES = 256 };

/* Of CUDA, whose cuBLASLt is called here. */
enum { FIRST_MAJOR = 12, LAST_MAJOR = 13 };

/* Of the driver's interface. */
enum {
  MULTIPROCESSOR_COUNT = 16,
  L2_CACHE_SIZE = 38,
  COMPUTE_CAPABILITY_MAJOR = 75,
  COMPUTE_CAPABILITY_MINOR = 76,
  MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
  HOST_ALLOC_PORTABLE = 1,
  HOST_ALLOC_MAPPED = 2
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* of what follows */
static omc_cuda_device devices[OMC_CUDA_DEVICES];

omc_status omc_cuda_enter(const omc_cuda_device *device) {
  OMC_CUDA_TRY(cuCtxPushCurrent_v2, device->context);
  return OMC_OK;
}

void omc_cuda_leave(const omc_cuda_device *device) {
  (void)device;
  void *left;
  omc_cuda_api_get()->cuCtxPopCurrent_v2(&left);
}

int omc_cuda_capture_mode(int mode) {
  omc_cuda_api_get()->cuThreadExchangeStreamCaptureMode(&mode);
  return mode;
}

static omc_status ask(int attribute, int handle, int *out) {
  OMC_CUDA_TRY(cuDeviceGetAttribute, out, attribute, handle);
  return OMC_OK;
}

static omc_status describe(int handle, omc_cuda_device *d) {
  int major, minor, shared_bytes;
  OMC_TRY(ask(COMPUTE_CAPABILITY_MAJOR, handle, &major));
  OMC_TRY(ask(COMPUTE_CAPABILITY_MINOR, handle, &minor));
  OMC_TRY(ask(MULTIPROCESSOR_COUNT, handle, &d->multiprocessors));
  OMC_TRY(ask(L2_CACHE_SIZE, handle, &d->cache_bytes));
  OMC_TRY(ask(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, handle, &shared_bytes));
  d->architecture = 10 * major + minor;
  d->shared_bytes = (size_t)shared_bytes;
  if (d->architecture < LEAST_ARCHITECTURE)
    OMC_FAIL(EUNSUPPORTED, "GPU %d is of sm_%d, kernels are for sm_%d and later", d->ordinal,
             d->architecture, LEAST_ARCHITECTURE);
  return OMC_OK;
}

/* A driver loads what a compiler of its own major version makes, or of an earlier one. */
static omc_status check_versions(void) {
  int driver, major, minor;
  OMC_CUDA_TRY(cuDriverGetVersion, &driver);
  OMC_NVRTC_TRY(nvrtcVersion, &major, &minor);
  if (driver / 1000 < major)
    OMC_FAIL(EUNSUPPORTED, "the driver is one for CUDA %d.%d, NVRTC one of CUDA %d.%d",
             driver / 1000, driver % 1000 / 10, major, minor);
  const size_t cublaslt = omc_cuda_api_get()->cublasLtGetVersion() / 10000;
  if (cublaslt < FIRST_MAJOR || cublaslt > LAST_MAJOR)
    OMC_FAIL(EUNSUPPORTED, "cuBLASLt is of version %zu, what is known here is %d to %d", cublaslt,
             FIRST_MAJOR, LAST_MAJOR);
  return OMC_OK;
}

static omc_status check_compiler(const omc_cuda_device *d) {
  int n, known[MOST_ARCHITECTURES];
  OMC_NVRTC_TRY(nvrtcGetNumSupportedArchs, &n);
  if (n > MOST_ARCHITECTURES) OMC_FAIL(EINTERNAL, "NVRTC says that it knows %d architectures", n);
  OMC_NVRTC_TRY(nvrtcGetSupportedArchs, known);
  for (int i = 0; i < n; i++)
    if (known[i] == d->architecture) return OMC_OK;
  OMC_FAIL(EUNSUPPORTED, "GPU %d is of sm_%d, for which this NVRTC does not compile", d->ordinal,
           d->architecture);
}

static omc_status make_letter_box(omc_cuda_device *d) {
  omc_cuda_ptr seen;
  if (!d->box) {
    OMC_CUDA_TRY(cuMemHostAlloc, &d->box, sizeof(omc_letter),
                 HOST_ALLOC_PORTABLE | HOST_ALLOC_MAPPED);
    memset(d->box, 0, sizeof(omc_letter));
  }
  OMC_CUDA_TRY(cuMemHostGetDevicePointer_v2, &seen, d->box, 0);
  d->letter_of_kernels = (omc_letter *)(uintptr_t)seen;
  d->letter = d->box;
  return OMC_OK;
}

/* What needs the device's context. */
static omc_status furnish(omc_cuda_device *d) {
  if (!d->cublaslt) OMC_CUBLASLT_TRY(cublasLtCreate, &d->cublaslt);
  return make_letter_box(d);
}

/* May have been done in part by a call that has failed. */
static omc_status open_device(int ordinal, omc_cuda_device *d) {
  const omc_cuda_api *api;
  int handle;
  OMC_TRY(omc_cuda_api_load(&api));
  OMC_CUDA_TRY(cuInit, 0);
  OMC_TRY(check_versions());
  OMC_CUDA_TRY(cuDeviceGet, &handle, ordinal);
  d->ordinal = ordinal;
  OMC_TRY(describe(handle, d));
  OMC_TRY(check_compiler(d));
  if (!d->context) OMC_CUDA_TRY(cuDevicePrimaryCtxRetain, &d->context, handle);
  OMC_TRY(omc_cuda_enter(d));
  const omc_status status = furnish(d);
  omc_cuda_leave(d);
  return status;
}

omc_status omc_cuda_device_get(int ordinal, omc_cuda_device **out) {
  if (ordinal < 0 || ordinal >= OMC_CUDA_DEVICES)
    OMC_FAIL(EUNSUPPORTED, "there is no GPU %d: at most %d are known", ordinal, OMC_CUDA_DEVICES);
  omc_cuda_device *d = *out = &devices[ordinal];
  pthread_mutex_lock(&mutex);
  const omc_status status = d->letter ? OMC_OK : open_device(ordinal, d);
  pthread_mutex_unlock(&mutex);
  return status;
}

OMC_PROCESS_LOCK(capturing)
void omc_cuda_capture_lock(void) { capturing_acquire(); }
void omc_cuda_capture_unlock(void) { capturing_release(); }

omc_status omc_cuda_wait(void) {
  capturing_acquire();
  const int error = omc_cuda_api_get()->cuCtxSynchronize();
  capturing_release();
  return omc_cuda_check(error, "cuCtxSynchronize");
}

/* Empties the box, unless another thread has: then a kernel may be writing the next letter. */
static omc_letter take_letter(volatile omc_letter *letter) {
  omc_letter read = {.kind = OMC_LETTER_NONE};
  pthread_mutex_lock(&mutex);
  if (__atomic_load_n(&letter->kind, __ATOMIC_ACQUIRE) != OMC_LETTER_NONE) {
    read = *letter;
    letter->kind = OMC_LETTER_NONE;
    __atomic_store_n(&letter->taken, 0, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&mutex);
  return read;
}

omc_status omc_cuda_read_letter(omc_cuda_device *d) {
  if (__atomic_load_n(&d->letter->kind, __ATOMIC_ACQUIRE) == OMC_LETTER_NONE) return OMC_OK;
  const omc_letter read = take_letter(d->letter);
  const char *node = (const char *)(uintptr_t)read.node;
  switch ((omc_letter_kind)read.kind) {
    case OMC_LETTER_NONE: /* another thread has read it */
      return OMC_OK;
    case OMC_LETTER_DIVISION:
      OMC_FAIL(EDIVISION, "'%s' divides an integer by 0", node);
    case OMC_LETTER_INDEX:
      OMC_FAIL(EINDEX, "'%s': index %lld is out of range, there are %lld", node,
               (long long)read.value, (long long)read.bound);
    case OMC_LETTER_BOUNDS:
      OMC_FAIL(EBOUNDS, "'%s': index %lld is out of range, there are %lld", node,
               (long long)read.value, (long long)read.bound);
    case OMC_LETTER_DOMAIN:
      OMC_FAIL(EDOMAIN, "'%s' is given a number outside of its domain", node);
  }
  OMC_FAIL(EINTERNAL, "GPU %d wrote a letter of kind %u", d->ordinal, read.kind);
}
