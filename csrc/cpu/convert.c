#include "cpu/convert.h"

#define DECLARE(name) extern const omc_convert name;
OMC_VARIANT_DECLARE(computed, DECLARE, omc_convert)

const omc_convert *omc_convert_pick(omc_dtype compute) {
  static const omc_convert *const table[OMC_N_DTYPE][OMC_N_ISA] = {
      OMC_VARIANT_TABLE(computed, omc_convert)};
  const omc_convert *best = NULL;
  for (int isa = 0; isa <= (int)omc_cpu_isa(); isa++)
    if (table[compute][isa]) best = table[compute][isa];
  return best;
}
