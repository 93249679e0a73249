#include "passes/passes.h"
#include "passes/rewrite.h"

/* Each set may make room for another; the count only bounds rules that would undo each other. */
#define MAX_ROUNDS 8

omc_status omc_simplify(omc_graph *g) {
  const omc_rules *const sets[] = {&omc_movement_rules, &omc_arithmetic_rules, &omc_network_rules,
                                   &omc_attention_rules, &omc_matmul_rules};
  OMC_TRY(omc_cse(g)); /* patterns that name a value twice want it computed once */
  for (int k = 0; k < MAX_ROUNDS; k++) {
    uint32_t total = 0;
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
      uint32_t changes;
      OMC_TRY(omc_apply_rules(g, sets[i], &changes));
      total += changes;
    }
    if (total == 0) break;
  }
  return OMC_OK;
}
