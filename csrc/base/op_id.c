#include "base/op_id.h"

#include <string.h>

enum { DOMAIN_ONNX, DOMAIN_OWN };

static const struct {
  const char *name;
  int domain;
} ops[OMC_N_OPS] = {
#define OMC_OP(name, family, domain, ...) {#name, DOMAIN_##domain},
#include "ops.def"
#undef OMC_OP
};

const char *omc_op_name(omc_op_id op) { return op < OMC_N_OPS ? ops[op].name : "return"; }

bool omc_op_is_onnx(omc_op_id op) { return op < OMC_N_OPS && ops[op].domain == DOMAIN_ONNX; }

bool omc_op_from_name(const char *name, size_t n, omc_op_id *out) {
  for (int op = 0; op < OMC_N_OPS; op++)
    if (strlen(ops[op].name) == n && !memcmp(ops[op].name, name, n)) {
      *out = (omc_op_id)op;
      return true;
    }
  return false;
}
