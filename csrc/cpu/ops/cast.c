/* Cast as a block function, and Casts. */
#include "base/int.h"
#include "cpu/convert.h"
#include "cpu/ops/block.h"
#include "cpu/parallel.h"

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

typedef struct casting {
  const omc_convert *convert;
  omc_dtype from, to;
  const char *x;
  char *y;
  int64_t n;
} casting;

/* Units are blocks of elements. */
static void cast_blocks(omc_range range, void *ctx) {
  const casting *c = ctx;
  _Alignas(64) char numbers[OMC_EW_BLOCK * sizeof(int64_t)];
  for (int64_t u = range.begin; u < range.end; u++) {
    const int64_t at = u * OMC_EW_BLOCK, n = omc_min(c->n - at, OMC_EW_BLOCK);
    c->convert->load[c->from](c->x + at * (int64_t)omc_dtype_size(c->from), numbers, n);
    c->convert->store[c->to](numbers, c->y + at * (int64_t)omc_dtype_size(c->to), n);
  }
}

OMC_KERNEL_ANY(Casts, args) {
  const omc_dtype from = args->in[0].type->dtype, to = args->out[0].type->dtype;
  const omc_convert *convert = omc_convert_pick(omc_dtype_acc(from));
  for (uint32_t i = 0; i < args->n_in; i++) {
    casting c = {convert,
                 from,
                 to,
                 args->in[i].data,
                 args->out[i].data,
                 omc_shape_numel(&args->in[i].type->shape)};
    omc_parallel_for(omc_ceil_div(c.n, OMC_EW_BLOCK), omc_grain(OMC_GRAIN_ELEMENTS, OMC_EW_BLOCK),
                     args->threads, cast_blocks, &c);
  }
  return OMC_OK;
}

OMC_CPU_OP(Casts, Casts)

#endif
