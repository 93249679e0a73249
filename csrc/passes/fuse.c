#include "passes/fuse_elementwise.h"
#include "passes/passes.h"
#include "passes/rewrite.h"

omc_status omc_fuse(omc_graph *g, const omc_provider *provider) {
  uint32_t changes;
  OMC_TRY(omc_apply_rules(g, &omc_fuse_rules, &changes));
  return omc_fuse_elementwise(g, provider);
}
