#include "cpu/convert.h"

#define DECLARE(name) extern const omc_convert name;
OMC_VARIANT_DECLARE(computed, DECLARE, omc_convert)

const omc_convert *omc_convert_pick(omc_dtype compute) {
  static const omc_convert *const table[OMC_N_DTYPE][OMC_N_ISA] = {
      OMC_VARIANT_TABLE(computed, omc_convert)};
  const omc_convert *best = NULL;
  OMC_PICK_ISA(best, table[compute])
  return best;
}
