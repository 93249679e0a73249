/* What the two stages of the layout share: lending, then the arena. */
#ifndef OMC_PLAN_LAYOUT_H
#define OMC_PLAN_LAYOUT_H

#include "plan/plan.h"

/* Memory that one value and its aliases share, or the scratch memory of one step. */
typedef struct omc_block {
  uint32_t begin, end;
  size_t bytes;         /* a multiple of the provider's alignment */
  const uint32_t *last; /* as of its live range; NULL: scratch memory */
  uint32_t lender;
  size_t offset;
} omc_block;

/* Blocks come by descending `first`, then ascending `second`, then ascending number. */
typedef struct omc_rank {
  size_t first, second;
  uint32_t block;
} omc_rank;

void omc_sort_ranks(omc_rank *ranks, uint32_t n);

/* Gives some of the first n blocks memory for gradients: sets their lenders and offsets, and
 * plan->lends, lends_any and lent_bytes. live[s], the bytes at step s, becomes those that are left
 * for the arena. */
omc_status omc_plan_lend(omc_plan *plan, omc_block *blocks, uint32_t n, size_t *live,
                         omc_arena *scratch) OMC_MUST_USE;

#endif
