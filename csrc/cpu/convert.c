#include "cpu/convert.h"

extern const omc_convert omc_convert_f32_base, omc_convert_f64_base, omc_convert_i64_base;
#if defined(__x86_64__)
extern const omc_convert omc_convert_f32_avx2, omc_convert_f32_avx512, omc_convert_f64_avx2,
    omc_convert_f64_avx512;
#endif

const omc_convert *omc_convert_pick(omc_class cls) {
  static const omc_convert *const table[OMC_N_CLASS][OMC_N_ISA] = {
#if defined(__x86_64__)
      [OMC_CLASS_F32] = {&omc_convert_f32_base, &omc_convert_f32_avx2, &omc_convert_f32_avx512},
      [OMC_CLASS_F64] = {&omc_convert_f64_base, &omc_convert_f64_avx2, &omc_convert_f64_avx512},
#else
      [OMC_CLASS_F32] = {&omc_convert_f32_base},
      [OMC_CLASS_F64] = {&omc_convert_f64_base},
#endif
      [OMC_CLASS_I64] = {&omc_convert_i64_base},
  };
  const omc_convert *best = NULL;
  for (int isa = 0; isa <= (int)omc_cpu_isa(); isa++)
    if (table[cls][isa]) best = table[cls][isa];
  return best;
}
