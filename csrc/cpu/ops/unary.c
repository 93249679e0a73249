#include "cpu/elementwise_rows.h"

#include "ops/unary.c"
