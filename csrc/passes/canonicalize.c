#include "passes/passes.h"
#include "passes/rewrite.h"

/* Each set may make room for another; the count only bounds rules that would undo each other. */
#define MAX_ROUNDS 8
#define N_SETS (OMC_N_RULE_SETS - 1) /* the last is omc_fuse's */

/* Applies one set after the other until none of them has changed anything since its turn. */
omc_status omc_canonicalize(omc_graph *g) {
  OMC_TRY(omc_cse(g)); /* patterns that name a value twice want it computed once */
  for (size_t i = 0, idle = 0; idle < N_SETS && i < MAX_ROUNDS * N_SETS; i++) {
    uint32_t changes;
    OMC_TRY(omc_apply_rules(g, omc_rule_sets[i % N_SETS], &changes));
    idle = changes ? 0 : idle + 1;
  }
  return OMC_OK;
}
