/* The libraries that drive a GPU: looked up in the process at run time, never linked. */
#ifndef OMC_CUDA_API_H
#define OMC_CUDA_API_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef unsigned long long omc_cuda_ptr; /* an address of the device's */

/* What cuBLASLt describes a product by, with room for that of any version; made where it lies and
 * never freed. */
typedef struct omc_cublaslt_descriptor {
  uint64_t data[64];
} omc_cublaslt_descriptor;

/* How cuBLASLt would compute a product. */
typedef struct omc_cublaslt_plan {
  uint64_t algo[8];
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
} omc_cublaslt_plan;

typedef struct omc_cuda_api {
#define OMC_CUDA_API(library, result, name, parameters) result(*name) parameters;
#include "cuda/api.def"
#undef OMC_CUDA_API
} omc_cuda_api;

/* All functions of api.def, once they have been found. Any thread. OMC_EUNSUPPORTED names the
 * library, or the function of it, that is not there; a later call looks again. */
omc_status omc_cuda_api_load(const omc_cuda_api **out) OMC_MUST_USE;

/* Of a load that has succeeded. */
const omc_cuda_api *omc_cuda_api_get(void);

/* What the driver's result says of `what`: OMC_OK, OMC_EDEVICEMEM, OMC_EDEVICE where nothing works
 * any more, or OMC_EINTERNAL, with its name. */
omc_status omc_cuda_check(int result, const char *what) OMC_MUST_USE;

/* Calls a function of the driver, and returns if it fails. */
#define OMC_CUDA_TRY(name, ...) \
  OMC_TRY(omc_cuda_check(omc_cuda_api_get()->name(__VA_ARGS__), #name))

/* The same of cuBLASLt. */
omc_status omc_cublaslt_check(int result, const char *what) OMC_MUST_USE;
#define OMC_CUBLASLT_TRY(name, ...) \
  OMC_TRY(omc_cublaslt_check(omc_cuda_api_get()->name(__VA_ARGS__), #name))

/* The same of NVRTC. */
omc_status omc_nvrtc_check(int result, const char *what) OMC_MUST_USE;
#define OMC_NVRTC_TRY(name, ...) \
  OMC_TRY(omc_nvrtc_check(omc_cuda_api_get()->name(__VA_ARGS__), #name))

/* What an exception of PyTorch's says of `what`, a node or whatever it was asked for: OMC_OK if
 * result is 0 and there was none, OMC_EDEVICEMEM, OMC_EDEVICE where nothing works any more, or
 * OMC_EINTERNAL. */
omc_status omc_torch_check(int result, const char *what) OMC_MUST_USE;
#define OMC_TORCH_TRY(what, name, ...) \
  OMC_TRY(omc_torch_check(omc_cuda_api_get()->name(__VA_ARGS__), (what)))

#endif
