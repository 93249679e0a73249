/* From a template to a plan. */
#ifndef OMC_RUN_PIPELINE_H
#define OMC_RUN_PIPELINE_H

#include "run/session.h"

typedef struct omc_build_inputs {
  const omc_graph *template;
  const omc_signature *signature;
  const omc_callbacks *callbacks;
  const omc_provider *provider;
  const omc_allocator *allocator;
} omc_build_inputs;

/* Specializes, canonicalizes, differentiates (if an output's gradient will be given), fuses and
 * plans; a plain signature is specialized, differentiated and planned. Adds the seconds of each
 * stage to *stats. OMC_DUMP=DIR writes the graph after every stage to DIR/planMMM-NN-STAGE.txt, MMM
 * counting the plans of the process; OMC_VERIFY=1 verifies it. The caller owns *out. */
omc_status omc_build_plan(const omc_build_inputs *in, omc_session_stats *stats,
                          omc_plan **out) OMC_MUST_USE;

#endif
