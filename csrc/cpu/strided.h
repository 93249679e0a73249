/* Strided copies: boxes of elements, see base/box.h. */
#ifndef OMC_CPU_STRIDED_H
#define OMC_CPU_STRIDED_H

#include "base/box.h"

typedef struct omc_strided {
  omc_box box;
  size_t size; /* bytes of an element */
  void (*row)(void *dst, int64_t ds, const void *src, int64_t ss, int64_t n); /* NULL: by tiles */
} omc_strided;

/* The copy of a box in the form that is run: fewest dims, and the way to move its rows. `size` is
 * 1, 2, 4 or 8. */
omc_strided omc_strided_of(const omc_box *box, size_t size);

/* Copies. Source and destination do not overlap. */
void omc_strided_copy(const omc_strided *c, void *dst, const void *src, int threads);

/* Sets n elements to *value, to zero if it is NULL. */
void omc_strided_fill(void *dst, int64_t n, size_t size, const void *value, int threads);

#endif
