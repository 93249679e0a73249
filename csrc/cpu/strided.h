/* Strided copies: a box of elements from one tensor to another, each with its own strides. Every
 * layout change is one: a transposition, a repetition (source stride 0), a slice, a part of a
 * concatenation. */
#ifndef OMC_CPU_STRIDED_H
#define OMC_CPU_STRIDED_H

#include "base/shape.h"

#define OMC_STRIDED_RANK (2 * OMC_MAX_RANK) /* Tile makes two dims of each axis */

typedef struct omc_strided {
  int32_t rank;
  int64_t dims[OMC_STRIDED_RANK], src[OMC_STRIDED_RANK], dst[OMC_STRIDED_RANK]; /* strides */
  int64_t src_offset, dst_offset; /* of the first element; all in elements */
  size_t size;                    /* bytes of an element; set by omc_strided_prepare, as is: */
  void (*row)(void *dst, int64_t ds, const void *src, int64_t ss, int64_t n); /* NULL: by tiles */
} omc_strided;

/* Brings a copy, given by all but the last two fields, into the form that is run: fewest dims, and
 * the way to move its rows. `size` is 1, 2, 4 or 8. */
void omc_strided_prepare(omc_strided *c, size_t size);

/* Copies. Source and destination do not overlap. */
void omc_strided_copy(const omc_strided *c, void *dst, const void *src, int threads);

/* Sets n elements to *value, to zero if it is NULL. */
void omc_strided_fill(void *dst, int64_t n, size_t size, const void *value, int threads);

#endif
