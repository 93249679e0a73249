/* From a template to a plan. */
#ifndef OMC_RUN_PIPELINE_H
#define OMC_RUN_PIPELINE_H

#include "run/session.h"
#include "run/shared.h"

/* Specializes, canonicalizes, differentiates (if an output's gradient will be given), fuses, keeps
 * to the budget and plans; a plain signature is specialized, differentiated and planned. Adds the
 * seconds of each stage to *stats. OMC_DUMP=DIR writes the graph after every stage to
 * DIR/planMMM-NN-STAGE.txt, MMM counting the plans of the process; OMC_VERIFY=1 verifies it.
 * *constants gets what the plan's constants lie in, on an error too. The caller owns *out. */
omc_status omc_build_plan(omc_shared *shared, const omc_signature *signature,
                          const omc_budget *budget, omc_constants_taken *constants,
                          omc_session_stats *stats, omc_plan **out) OMC_MUST_USE;

#endif
