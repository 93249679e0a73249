/* Dropout as a block function. */
#include "cpu/ops/block.h"
#include "cpu/rng.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT && OMC_STORES_ACC

/* Immediates: threshold, scale, subsequence. */
OMC_EW_KERNEL(Dropout, block) {
  const omc_ew_block blk = *block;
  const uint32_t threshold = (uint32_t)blk.imm[0], subsequence = (uint32_t)blk.imm[2];
  const acc_t scale = (acc_t)blk.imm[1];
  _Alignas(64) uint32_t words[OMC_EW_BLOCK];
  _Alignas(64) acc_t factors[OMC_EW_BLOCK];
  omc_philox_draws(blk.seed, subsequence, (uint64_t)blk.index, blk.n, words);
  for (int64_t k = 0; k < blk.n; k++) factors[k] = words[k] >= threshold ? scale : 0;
  for (int64_t k = 0; k < blk.n; k += OMC_VL)
    vst_as(blk.out_dtype, blk.out, k,
           vld_as(blk.in_dtype[0], blk.in[0], k, OMC_VL) * vldr(factors + k), OMC_VL);
}

#endif

#ifndef OMC_VARIANT

OMC_EW_TABLE(Dropout, FLOAT)

#endif
