#include "cpu/elementwise_rows.h"

#include "ops/binary.c"
