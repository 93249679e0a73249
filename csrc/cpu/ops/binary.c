#include "cpu/ops/block.h"

#include "ops/binary.c"
