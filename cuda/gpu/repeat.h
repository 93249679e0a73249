/* What cuBLASLt leaves to do of a product: OMC_FROM is the dtype read, OMC_TO the one written,
 * OMC_ACC between them. Read by the host as C11. */
#ifndef OMC_GPU_REPEAT_H
#define OMC_GPU_REPEAT_H

#include "cuda/gpu/target.h"

enum { OMC_PRODUCT_THREADS = 256 };

/* y[i] = x[i % n], for i below count. */
typedef struct omc_product_copy {
  void *y;
  const void *x;
  int64_t count, n;
} omc_product_copy;

#ifdef OMC_GPU
#include "cuda/gpu/numbers.h"

OMC_GLOBAL(copy_rows, OMC_PRODUCT_THREADS, omc_product_copy, p) {
  const int64_t i = (int64_t)blockIdx.x * OMC_PRODUCT_THREADS + threadIdx.x;
  if (i < p.count)
    ((OMC_TO *)p.y)[i] = element<OMC_TO>(number<OMC_ACC>(((const OMC_FROM *)p.x)[i % p.n]));
}
#endif

#endif
