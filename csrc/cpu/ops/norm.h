/* What norms have in common: parameters, sums of squares, and elements of one channel. */
#ifndef OMC_CPU_OPS_NORM_H
#define OMC_CPU_OPS_NORM_H

#include "cpu/kernel.h"
#include "ops/op.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

#include "cpu/rows.h"

/* Sums of numbers and of their squares, in the lanes of vectors. */
typedef struct {
  vacc_t numbers, squares;
} moments;

enum { CHAINS = 4 /* vectors added up side by side, so that none waits for its last term */ };

/* Adds up chains, which begin anew. */
OMC_INLINE void close_chains(vacc_t *chains, vacc_t *sum) {
  *sum += (chains[0] + chains[1]) + (chains[2] + chains[3]);
  OMC_UNROLL for (int i = 0; i < CHAINS; i++) chains[i] = vset(0);
}

/* Adds those of n elements, each less `near`: what cancels is small if that is near the mean. */
OMC_INLINE moments add_moments(const storage_t *x, int64_t n, acc_t near, moments sums) {
  const vacc_t shift = vset(near);
  vacc_t numbers[CHAINS] = {{0}}, squares[CHAINS] = {{0}};
  int64_t k = 0;
  while (k + CHAINS * OMC_VL <= n) {
    OMC_UNROLL for (int i = 0; i < CHAINS; i++, k += OMC_VL) {
      const vacc_t off = vld(x + k) - shift;
      numbers[i] += off;
      squares[i] = vfma(off, off, squares[i]);
    }
    if (k % OMC_ROW_PIECE == 0)
      close_chains(numbers, &sums.numbers), close_chains(squares, &sums.squares);
  }
  for (; k < n; k += OMC_VL) {
    const vacc_t off = vld_fill(x + k, n - k, near) - shift;
    numbers[0] += off;
    squares[0] = vfma(off, off, squares[0]);
  }
  close_chains(numbers, &sums.numbers), close_chains(squares, &sums.squares);
  return sums;
}

/* n elements of one channel. */
OMC_INLINE void normalize_plane(const storage_t *x, int64_t n, acc_t mean, acc_t scale, acc_t shift,
                                storage_t *y) {
  const vacc_t vmean = vset(mean), vscale = vset(scale), vshift = vset(shift);
  for (int64_t k = 0, left = n; k < n; k += OMC_VL, left -= OMC_VL)
    vst_upto(y + k, vfma(vld_fill(x + k, left, 0) - vmean, vscale, vshift), left);
}

/* Sum of dy * xhat, which of lanes past the end is 0, not 0 times infinity. */
OMC_INLINE acc_t sum_of_slopes(const storage_t *dy, const storage_t *x, int64_t n, acc_t mean,
                               acc_t rstd) {
  const vacc_t vmean = vset(mean), vrstd = vset(rstd);
  return OMC_ROW_SUM(k, left, n,
                     vld_fill(dy + k, left, 0) * (vld_fill(x + k, left, mean) - vmean) * vrstd);
}

#endif

#ifndef OMC_VARIANT

/* Room for as many parameters of n elements, should they be stored as a half is. */
static inline size_t omc_norm_room(const omc_node *node, int64_t n, int64_t how_many) {
  return omc_sums_bytes(omc_node_dtype(node), how_many * n);
}

#endif

#endif
