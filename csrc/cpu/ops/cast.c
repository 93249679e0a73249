/* Cast as a block function. */
#include "cpu/convert.h"
#include "cpu/ops/block.h"

#ifdef OMC_VARIANT
#if OMC_STORES_ACC

extern const omc_convert OMC_PASTE3(omc_, convert, OMC_VARIANT);

/* Stored as the new dtype and loaded again: inside a program too the numbers are rounded. */
OMC_EW_KERNEL(Cast, blk) {
  const omc_convert *convert = &OMC_PASTE3(omc_, convert, OMC_VARIANT);
  const omc_dtype to = (omc_dtype)blk->imm[0];
  _Alignas(64) char stored[OMC_EW_BLOCK * sizeof(int64_t)];
  convert->store[to](blk->in[0], stored, blk->n);
  convert->load[to](stored, blk->out, blk->n);
}

#endif
#else

OMC_EW_TABLE(Cast, ANY)

#endif
