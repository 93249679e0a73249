/* FusedElementwise: whatever its class, the block interpreter runs it. */
#include "cpu/elementwise.h"

#ifndef OMC_VARIANT

static const omc_kernels omc_kernels_FusedElementwise = {.any = omc_ew_run};
OMC_CPU_OP(FusedElementwise, FusedElementwise)

#endif
