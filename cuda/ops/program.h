/* What programs of elementwise ops are made of (ops/fused.c writes them): each thread works on
 * OMC_LANES_OF_THREAD neighbours, which a counter of random bits has words for. */
#ifndef OMC_CUDA_OPS_PROGRAM_H
#define OMC_CUDA_OPS_PROGRAM_H

#include "cuda/gpu/axis.h"
#include "cuda/gpu/letter.h"
#include "cuda/gpu/philox.h"
#include "cuda/ops/rows.h"

#include "ops/binary.c"
#include "ops/compare.c"
#include "ops/unary.c"

#define OMC_LANES_OF_THREAD 4

template <typename E>
struct alignas(OMC_LANES_OF_THREAD * sizeof(E)) omc_pack {
  E e[OMC_LANES_OF_THREAD];
};

template <typename E>
OMC_INLINE bool omc_is_packed(const E *at, int lanes) {
  return lanes == OMC_LANES_OF_THREAD && (uint64_t)at % sizeof(omc_pack<E>) == 0;
}

/* The first `lanes` of neighbours, in one access if they are all there and aligned. */
template <typename E>
OMC_INLINE void omc_load(E (&to)[OMC_LANES_OF_THREAD], const E *from, int lanes) {
  if (omc_is_packed(from, lanes)) {
    const omc_pack<E> pack = *(const omc_pack<E> *)from;
    for (int l = 0; l < OMC_LANES_OF_THREAD; l++) to[l] = pack.e[l];
  } else {
    for (int l = 0; l < OMC_LANES_OF_THREAD; l++)
      if (l < lanes) to[l] = from[l];
  }
}
template <typename E>
OMC_INLINE void omc_store(E *to, const E (&from)[OMC_LANES_OF_THREAD], int lanes) {
  if (omc_is_packed(to, lanes)) {
    omc_pack<E> pack;
    for (int l = 0; l < OMC_LANES_OF_THREAD; l++) pack.e[l] = from[l];
    *(omc_pack<E> *)to = pack;
  } else {
    for (int l = 0; l < OMC_LANES_OF_THREAD; l++)
      if (l < lanes) to[l] = from[l];
  }
}

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
