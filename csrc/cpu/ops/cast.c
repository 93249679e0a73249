/* Cast as a block function. */
#include "cpu/convert.h"
#include "cpu/ops/block.h"

#ifdef OMC_VARIANT
#if OMC_STORES_ACC

extern const omc_convert OMC_PASTE3(omc_, convert, OMC_VARIANT);

#if defined(OMC_COMPUTE_F32)
#define ROUND_(in, out, n, half)             \
  for (int64_t k_ = 0; k_ < n; k_ += OMC_VL) \
    vstr(out + k_, omc_vfrom_##half(omc_vto_##half(vldr(in + k_))));
#endif

/* Numbers of the new dtype: inside a program too they are rounded. */
OMC_EW_KERNEL(Cast, blk) {
  const omc_convert *convert = &OMC_PASTE3(omc_, convert, OMC_VARIANT);
  const omc_dtype to = (omc_dtype)blk->imm[0];
#if defined(OMC_COMPUTE_F32)
  const acc_t *const in = blk->in[0];
  acc_t *const out = blk->out;
  if (to == OMC_BF16) {
    ROUND_(in, out, blk->n, bf16)
    return;
  }
  if (to == OMC_F16) {
    ROUND_(in, out, blk->n, f16)
    return;
  }
#endif
  _Alignas(64) char stored[OMC_EW_BLOCK * sizeof(int64_t)];
  convert->store[to](blk->in[0], stored, blk->n);
  convert->load[to](stored, blk->out, blk->n);
}

#endif
#else

OMC_EW_TABLE(Cast, ANY)

#endif
