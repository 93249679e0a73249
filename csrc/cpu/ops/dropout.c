/* Dropout as a block function. */
#include "cpu/ops/block.h"
#include "cpu/rng.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT && OMC_STORES_ACC

/* Immediates: threshold, scale, subsequence. */
OMC_EW_KERNEL(Dropout, blk) {
  const uint32_t threshold = (uint32_t)blk->imm[0], subsequence = (uint32_t)blk->imm[2];
  const acc_t scale = (acc_t)blk->imm[1], *x = blk->in[0];
  acc_t *y = blk->out;
  _Alignas(64) uint32_t words[OMC_EW_BLOCK];
  omc_philox_words(blk->seed, subsequence, (uint64_t)blk->index, blk->n, words);
  for (int64_t k = 0; k < blk->n; k++) y[k] = x[k] * (words[k] >= threshold ? scale : 0);
}

#endif

#ifndef OMC_VARIANT

OMC_EW_TABLE(Dropout, FLOAT)

#endif
