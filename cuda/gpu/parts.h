/* Lists that one launch works on, each entry by as many blocks as it takes. */
#ifndef OMC_GPU_PARTS_H
#define OMC_GPU_PARTS_H

#include "cuda/gpu/target.h"

#ifdef OMC_GPU

/* The entry, of n, that this block works on, and which block of it this one is. `first` says which
 * block is the first of each; those of entries that take none are not asked. */
OMC_INLINE uint32_t omc_entry_of_block(const uint32_t *first, uint32_t n, int64_t *block) {
  uint32_t low = 0, high = n;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (first[middle] <= blockIdx.x)
      low = middle;
    else
      high = middle;
  }
  *block = blockIdx.x - first[low];
  return low;
}

#endif

#endif
