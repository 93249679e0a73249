/* How the cells of recurrent layers are computed, and the scratch memory that this takes.
 *
 * A step is a product of a few rows, the batch, with the same weights each time: they are packed
 * once, in panels of OMC_GEMM_MAX_NR units of the layer at most. An item of a step is such a block
 * of units, for some rows of the batch: the product, forward with a panel for each gate, and what
 * the cell makes of it, while that is in the cache. The next step begins when all items are done.
 */
#ifndef OMC_CPU_OPS_RECURRENT_H
#define OMC_CPU_OPS_RECURRENT_H

#include "base/int.h"
#include "cpu/gemm_kernel.h"
#include "cpu/kernel.h"
#include "ops/forms.h"

/* Rows of the batch that are packed, and multiplied, together. */
enum { OMC_STEP_ROWS = 64 };

/* Parts of the workspace, in elements of what is computed in. */
typedef struct {
  int64_t pitch;  /* of rows of units: whole panels */
  int64_t packed; /* weights */
  int64_t bias;
  int64_t sums;    /* [batch, products, pitch]: forward one of each gate, backward one */
  int64_t carried; /* [batch, pitch]: c of an Lstm, or its gradient */
  int64_t rows;    /* packed rows, of each thread */
} steps_layout;

static inline steps_layout steps_layout_of(const omc_steps_form *p, bool backward) {
  const int64_t pitch = omc_ceil_div(p->hidden, OMC_GEMM_MAX_NR) * OMC_GEMM_MAX_NR;
  const int64_t width = p->gates * p->hidden, rows = omc_min(p->batch, OMC_STEP_ROWS);
  const int64_t depth = backward ? width : p->hidden;
  return (steps_layout){
      .pitch = pitch,
      .packed = omc_whole_vectors(width * pitch + OMC_GEMM_SLACK),
      .bias = backward ? 0 : omc_whole_vectors(width) + OMC_GEMM_MAX_NR,
      .sums = p->batch * (backward ? 1 : p->gates) * pitch,
      .carried = p->batch * pitch,
      .rows = omc_whole_vectors(rows * omc_gemm_most_units(depth) + OMC_GEMM_SLACK)};
}

#endif
