/* The rows of ops/elementwise.h as CPU kernels: in a variant a row is its block function, elsewhere
 * the table of them. Included before the file of the rows. */
#ifndef OMC_CPU_ELEMENTWISE_ROWS_H
#define OMC_CPU_ELEMENTWISE_ROWS_H

#define OMC_ROWS_ARE_KERNELS
#include "cpu/elementwise.h"
#include "ops/elementwise.h"

#define OMC_EW_ROWS_FLOAT_TO_BOOL OMC_EW_ROWS_FLOAT
#define OMC_EW_ROWS_ANY_TO_BOOL OMC_EW_ROWS_ANY
#define OMC_EW_ROWS_BOOL OMC_EW_ROWS_ANY
#define OMC_EW_ROWS_CHOICE OMC_EW_ROWS_ANY

/* What follows if the variant being compiled is one of a choice. */
#define OMC_ROW_OF_KIND_(which, kind, ...) OMC_ROW_PICKED_(which, kind, __VA_ARGS__)
#define OMC_ROW_PICKED_(which, kind, ...) OMC_ROWS_##which##_##kind(__VA_ARGS__)

#if !defined(OMC_VARIANT)
#define OMC_ROW_(name, types, ...) OMC_EW_TABLE(name, types)
#else
#define OMC_ROW_(name, types, ...) OMC_ROW_OF_KIND_(OMC_EW_ROWS_##types, OMC_KIND, __VA_ARGS__)
#endif
#define UNARY(name, types, kernel, da, ...) OMC_ROW_(name, types, OMC_EW1(name, kernel))
#define UNARY_NO_GRAD(name, types, kernel, ...) OMC_ROW_(name, types, OMC_EW1(name, kernel))
#define BINARY(name, types, flags, kernel, da, db, ...) OMC_ROW_(name, types, OMC_EW2(name, kernel))
#define BINARY_NO_GRAD(name, types, flags, kernel, ...) OMC_ROW_(name, types, OMC_EW2(name, kernel))
#define TERNARY(name, types, kernel, da, db, dc, ...) OMC_ROW_(name, types, OMC_EW3(name, kernel))

#endif
