/* Single elements of any dtype, for constants: read, written and compared one at a time. */
#ifndef OMC_BASE_ELEMENT_H
#define OMC_BASE_ELEMENT_H

#include "base/dtype.h"

/* Element i of `data` as double, or as int64: floats are cut towards zero and clamped, NaN is 0. */
double omc_element_float(omc_dtype dtype, const void *data, int64_t i);
int64_t omc_element_int(omc_dtype dtype, const void *data, int64_t i);

/* Writes element i. Floats are rounded to nearest even; an integer keeps its low bits, and a float
 * becomes one as omc_element_int reads it; a bool is "not zero". */
void omc_element_set_float(omc_dtype dtype, void *data, int64_t i, double x);
void omc_element_set_int(omc_dtype dtype, void *data, int64_t i, int64_t x);

#endif
