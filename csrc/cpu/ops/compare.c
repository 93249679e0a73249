#include "cpu/ops/block.h"

#include "ops/compare.c"
