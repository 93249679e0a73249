/* Floating point numbers as text, whatever the process's locale says of the decimal point. */
#ifndef OMC_GRAPH_NUMBER_H
#define OMC_GRAPH_NUMBER_H

#include "base/dtype.h"

/* A text that reads back as the same element of a float dtype, with as few decimals as that takes.
 * It has a point or an exponent, or is inf, -inf or nan. Returns buf. */
#define OMC_NUMBER_TEXT 40
const char *omc_number_text(double x, omc_dtype dtype, char buf[OMC_NUMBER_TEXT]);

/* Reads what omc_number_text writes, and integers, from n bytes; false: no number. */
bool omc_number_read(const char *text, size_t n, double *out);

#endif
