/* What programs of elementwise ops are made of (ops/fused.c writes them): each thread works on
 * OMC_LANES_OF_THREAD neighbours, 4 or 8, which draw the words of one counter of random bits. */
#ifndef OMC_CUDA_OPS_PROGRAM_H
#define OMC_CUDA_OPS_PROGRAM_H

#include "cuda/gpu/axis.h"
#include "cuda/gpu/letter.h"
#include "cuda/gpu/pack.h"
#include "cuda/gpu/philox.h"
#include "cuda/ops/rows.h"

#include "ops/binary.c"
#include "ops/compare.c"
#include "ops/unary.c"

/* A number as it is after being an E. */
template <typename E>
OMC_INLINE vacc_t omc_rounded(vacc_t x) {
  return number<acc_t>(element<E>(x.x));
}

#if OMC_IS_FLOAT
OMC_INLINE vacc_t omc_dropped(vacc_t x, uint32_t word, uint32_t threshold, acc_t scale) {
  return x * vset(word >= threshold ? scale : 0);
}
#endif

#endif
