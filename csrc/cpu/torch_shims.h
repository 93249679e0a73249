/* Functions found in the libtorch that the process has already loaded; never a dependency. */
#ifndef OMC_CPU_TORCH_SHIMS_H
#define OMC_CPU_TORCH_SHIMS_H

#include <stdint.h>

/* The BLAS that torch carries, by its Fortran names: column-major, dims of 32 bits. */
typedef void (*omc_sgemm_fn)(const char *transa, const char *transb, const int32_t *m,
                             const int32_t *n, const int32_t *k, const float *alpha, const float *a,
                             const int32_t *lda, const float *b, const int32_t *ldb,
                             const float *beta, float *c, const int32_t *ldc);
typedef void (*omc_dgemm_fn)(const char *transa, const char *transb, const int32_t *m,
                             const int32_t *n, const int32_t *k, const double *alpha,
                             const double *a, const int32_t *lda, const double *b,
                             const int32_t *ldb, const double *beta, double *c, const int32_t *ldc);

typedef struct omc_torch_shims {
  omc_sgemm_fn sgemm; /* each NULL if this torch does not have it */
  omc_dgemm_fn dgemm;
  int (*set_num_threads_local)(int threads); /* MKL's; returns the former value */
} omc_torch_shims;

/* Looked up at first use; thread-safe; lives for the process. */
const omc_torch_shims *omc_torch_shims_get(void);

#endif
