/* Boxes: elements that go from one tensor to another, each with its own strides. Every layout
 * change is one: a transposition, a repetition (source stride 0), a slice, a part of a
 * concatenation. */
#ifndef OMC_BASE_BOX_H
#define OMC_BASE_BOX_H

#include "base/shape.h"

#define OMC_BOX_RANK (2 * OMC_MAX_RANK) /* Tile makes two dims of each axis */

typedef struct omc_box {
  int32_t rank;
  int64_t dims[OMC_BOX_RANK], src[OMC_BOX_RANK], dst[OMC_BOX_RANK]; /* strides */
  int64_t src_offset, dst_offset; /* of the first element; all in elements */
} omc_box;

/* How many elements go: the product of its dims, of none 1. It must fit in an int64. */
int64_t omc_box_numel(const omc_box *box);

/* Drops dims of 1, turns round those that dst steps through backwards, and joins neighbours that
 * both sides step through evenly; one dim is left at least. */
void omc_box_collapse(omc_box *box);

/* Moves the axis `from` behind those up to `to`, which is not before it. */
void omc_box_move_axis(omc_box *box, int32_t from, int32_t to);

/* The axis along which the source is contiguous while the destination is so along the last, both
 * for 4 elements at least; -1: there is none. */
int32_t omc_box_transposed_axis(const omc_box *box);

#endif
