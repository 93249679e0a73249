#include "cpu/elementwise_rows.h"

#include "ops/compare.c"
