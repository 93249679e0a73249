#include "cpu/ops/block.h"

#include "ops/unary.c"
