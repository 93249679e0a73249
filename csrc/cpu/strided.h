/* Strided copies: boxes of elements, see base/box.h. */
#ifndef OMC_CPU_STRIDED_H
#define OMC_CPU_STRIDED_H

#include "base/box.h"

/* Rows of n elements: dst[i * ds + k * d] = src[i * ss + k * s] for i < rows, k < n. */
typedef struct omc_rows {
  int64_t rows, n, ds, d, ss, s;
} omc_rows;
typedef void (*omc_rows_fn)(void *dst, const void *src, const omc_rows *rows);

typedef struct omc_strided {
  omc_box box;
  size_t size;      /* bytes of an element */
  omc_rows_fn rows; /* NULL: by tiles */
} omc_strided;

/* The copy of a box in the form that is run: fewest dims, and the way to move its rows. `size` is
 * 1, 2, 4 or 8. */
omc_strided omc_strided_of(const omc_box *box, size_t size);

/* Copies. Source and destination do not overlap. */
void omc_strided_copy(const omc_strided *c, void *dst, const void *src, int threads);

/* Whether they bring what lies in one run each to the same destination, in turn, beginning with a.
 */
bool omc_strided_zips(const omc_strided *a, const omc_strided *b);

/* Runs two copies that do. */
void omc_strided_zip(const omc_strided *a, const omc_strided *b, void *dst, const void *src_a,
                     const void *src_b, int threads);

/* Sets n elements to *value, to zero if it is NULL. */
void omc_strided_fill(void *dst, int64_t n, size_t size, const void *value, int threads);

#endif
