#include "passes/passes.h"
#include "passes/rewrite.h"

/* Each set may make room for another; the count only bounds rules that would undo each other. */
#define MAX_ROUNDS 8

omc_status omc_canonicalize(omc_graph *g) {
  OMC_TRY(omc_cse(g)); /* patterns that name a value twice want it computed once */
  for (int k = 0; k < MAX_ROUNDS; k++) {
    uint32_t total = 0;
    for (size_t i = 0; i < OMC_N_RULE_SETS - 1; i++) { /* the last is omc_fuse's */
      uint32_t changes;
      OMC_TRY(omc_apply_rules(g, omc_rule_sets[i], &changes));
      total += changes;
    }
    if (total == 0) break;
  }
  return OMC_OK;
}
