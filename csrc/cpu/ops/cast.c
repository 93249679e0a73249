/* Cast as a block function. */
#include "cpu/convert.h"
#include "cpu/ops/block.h"

#ifdef OMC_VARIANT
#if OMC_STORES_ACC

extern const omc_convert OMC_PASTE3(omc_, convert, OMC_VARIANT);

/* out = round(in), vector by vector. */
#define EACH_(blk, round)                                             \
  const void *const in_ = (blk)->in[0];                               \
  const omc_dtype from_ = (blk)->in_dtype[0], to_ = (blk)->out_dtype; \
  void *const out_ = (blk)->out;                                      \
  for (int64_t k_ = 0, n_ = (blk)->n; k_ < n_; k_ += OMC_VL)          \
    vst_as(to_, out_, k_, round(vld_as(from_, in_, k_, OMC_VL)), OMC_VL);
#define AS_IT_IS_(x) (x)

#if defined(OMC_COMPUTE_F32)
OMC_INLINE vacc_t round_bf16(vacc_t x) { return omc_vfrom_bf16(omc_vto_bf16(x)); }
OMC_INLINE vacc_t round_f16(vacc_t x) { return omc_vfrom_f16(omc_vto_f16(x)); }
#endif

/* By way of elements of the new dtype. */
static void convert_block(const omc_ew_block *blk, omc_dtype to) {
  const omc_convert *convert = &OMC_PASTE3(omc_, convert, OMC_VARIANT);
  _Alignas(64) char stored[OMC_EW_BLOCK * sizeof(int64_t)];
  _Alignas(64) acc_t numbers[OMC_EW_BLOCK];
  for (int64_t k = 0; k < blk->n; k += OMC_VL)
    vstr(numbers + k, vld_as(blk->in_dtype[0], blk->in[0], k, OMC_VL));
  convert->store[to](numbers, stored, blk->n);
  convert->load[to](stored, numbers, blk->n);
  for (int64_t k = 0; k < blk->n; k += OMC_VL)
    vst_as(blk->out_dtype, blk->out, k, vldr(numbers + k), OMC_VL);
}

/* Numbers of the new dtype: inside a program too they are rounded, if it is not the store that does
 * so. */
OMC_EW_KERNEL(Cast, blk) {
  const omc_dtype to = (omc_dtype)blk->imm[0];
  if (to == blk->out_dtype) {
    EACH_(blk, AS_IT_IS_)
    return;
  }
#if defined(OMC_COMPUTE_F32)
  if (to == OMC_BF16) {
    EACH_(blk, round_bf16)
    return;
  }
  if (to == OMC_F16) {
    EACH_(blk, round_f16)
    return;
  }
#endif
  convert_block(blk, to);
}

#endif
#else

OMC_EW_TABLE(Cast, ANY)

#endif
