/* What cuBLASLt leaves to do of a product: OMC_FROM is the dtype read, OMC_TO the one written,
 * OMC_ACC between them. Read by the host as C11. */
#ifndef OMC_GPU_REPEAT_H
#define OMC_GPU_REPEAT_H

#include "cuda/gpu/target.h"

enum { OMC_PRODUCT_THREADS = 256, OMC_PRODUCT_PACK = 4 /* elements of a thread */ };

/* y[i] = x[i % n], for i below count. */
typedef struct omc_product_copy {
  void *y;
  const void *x;
  int64_t count, n;
} omc_product_copy;

#ifdef OMC_GPU
#include "cuda/gpu/numbers.h"
#include "cuda/gpu/pack.h"

OMC_GLOBAL(copy_rows, OMC_PRODUCT_THREADS, omc_product_copy, p) {
  const int64_t first =
      ((int64_t)blockIdx.x * OMC_PRODUCT_THREADS + threadIdx.x) * OMC_PRODUCT_PACK;
  if (first >= p.count) return;
  const int64_t rest = p.count - first, at = p.n < p.count ? first % p.n : first;
  const int lanes = rest < OMC_PRODUCT_PACK ? (int)rest : OMC_PRODUCT_PACK;
  const OMC_FROM *const x = (const OMC_FROM *)p.x;
  omc_loaded<OMC_FROM, OMC_PRODUCT_PACK> from;
  OMC_TO to[OMC_PRODUCT_PACK];
  if (at + lanes <= p.n) {
    omc_load(from, x + at, lanes);
  } else {
    int64_t next = at;
#pragma unroll
    for (int l = 0; l < OMC_PRODUCT_PACK; l++) {
      if (l < lanes) from.e[l] = x[next];
      next = next + 1 < p.n ? next + 1 : 0;
    }
  }
#pragma unroll
  for (int l = 0; l < OMC_PRODUCT_PACK; l++)
    if (l < lanes) to[l] = element<OMC_TO>(number<OMC_ACC>(from[l]));
  omc_store((OMC_TO *)p.y + first, to, lanes);
}
#endif

#endif
