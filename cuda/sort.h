/* Sorting on a GPU. */
#ifndef OMC_CUDA_SORT_H
#define OMC_CUDA_SORT_H

#include "cuda/launch.h"

enum { OMC_CUDA_SORT_KERNELS = 3 };

typedef struct omc_cuda_sort {
  omc_cuda_kernel kernels[OMC_CUDA_SORT_KERNELS];
} omc_cuda_sort;

/* What a plan keeps. */
omc_status omc_cuda_sort_of(omc_cuda_device *device, omc_cuda_sort *out) OMC_MUST_USE;

/* Bytes of room to sort n keys in, the first n of which, of 64 bits, are the keys. */
size_t omc_cuda_sort_bytes(int64_t n);

/* Sorts n keys from 0 to `most`, equal ones in the order they had. *keys and *positions, where each
 * was, are in the room. */
omc_status omc_cuda_sort_run(const omc_cuda_sort *sort, void *room, int64_t n, int64_t most,
                             void *queue, const int64_t **keys,
                             const int64_t **positions) OMC_MUST_USE;

#endif
