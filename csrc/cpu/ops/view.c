/* Views have no kernel: whoever runs a graph shares the memory. */
#include "cpu/kernel.h"

#ifndef OMC_VARIANT

#define VIEW(name) const omc_cpu_op omc_cpu_##name = {0};
VIEW(Detach)
VIEW(Flatten)
VIEW(Identity)
VIEW(Reshape)
VIEW(Squeeze)
VIEW(Unsqueeze)
VIEW(WithGradientOf)

#endif
