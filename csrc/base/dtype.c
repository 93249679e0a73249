#include "base/dtype.h"

#include <string.h>

static const omc_dtype_info infos[OMC_N_DTYPE] = {
#define OMC_DTYPE(name, text, onnx, dl_code, bits, kind) \
  {text, onnx, dl_code, bits, bits / 8, OMC_KIND_##kind},
#include "base/dtype.def"
#undef OMC_DTYPE
};

const omc_dtype_info *omc_dtype_get(omc_dtype dtype) { return &infos[dtype]; }

bool omc_dtype_from_text(const char *text, size_t n, omc_dtype *out) {
  for (int d = 0; d < OMC_N_DTYPE; d++)
    if (strlen(infos[d].text) == n && !memcmp(infos[d].text, text, n)) {
      *out = (omc_dtype)d;
      return true;
    }
  return false;
}

bool omc_dtype_from_onnx(int64_t code, omc_dtype *out) {
  for (int d = 0; d < OMC_N_DTYPE; d++)
    if (infos[d].onnx == code) {
      *out = (omc_dtype)d;
      return true;
    }
  return false;
}

bool omc_dtype_from_dlpack(uint8_t code, uint8_t bits, omc_dtype *out) {
  for (int d = 0; d < OMC_N_DTYPE; d++)
    if (infos[d].dl_code == code && infos[d].bits == bits) {
      *out = (omc_dtype)d;
      return true;
    }
  return false;
}
