/* Conversion between stored elements of any dtype and the numbers, of an acc_t, that are computed
 * with. */
#ifndef OMC_CPU_CONVERT_H
#define OMC_CPU_CONVERT_H

#include "cpu/kernel.h"

/* n elements to n numbers and back; the two do not overlap. Floats stored as integers are cut
 * towards zero (what does not fit: see convert_variant.c); integers keep the low bits; a bool is
 * "not zero"; 16-bit floats are rounded to nearest even. */
typedef struct omc_convert {
  void (*load[OMC_N_DTYPE])(const void *elements, void *numbers, int64_t n);
  void (*store[OMC_N_DTYPE])(const void *numbers, void *elements, int64_t n);
  void (*spread)(void *numbers, int64_t n); /* copies the first number over the n - 1 after it */
  size_t size;                              /* bytes of a number */
  omc_dtype dtype;                          /* whose elements are numbers as they are */
} omc_convert;

/* For a type that is computed in, on this machine; NULL: it is none. */
const omc_convert *omc_convert_pick(omc_dtype compute);

#endif
