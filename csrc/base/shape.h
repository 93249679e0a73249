/* Shapes and types. Dims are element counts; -1 stands for a dim not yet bound (templates only). */
#ifndef OMC_BASE_SHAPE_H
#define OMC_BASE_SHAPE_H

#include "base/dtype.h"
#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define OMC_MAX_RANK 8

typedef struct omc_shape {
  int32_t rank; /* 0 to OMC_MAX_RANK; -1: not inferred yet (graph values only) */
  int64_t dims[OMC_MAX_RANK];
} omc_shape;

typedef struct omc_type {
  omc_dtype dtype;
  omc_shape shape;
} omc_type;

/* Number of elements: 1 for rank 0, 0 if any dim is 0; INT64_MAX if there are more. Only for shapes
 * without -1. */
OMC_API int64_t omc_shape_numel(const omc_shape *shape);

/* Product of dims[from .. to-1], in the same way. */
int64_t omc_shape_span(const omc_shape *shape, int32_t from, int32_t to);

/* Whether rank and dims are the same, of a type the dtype too; -1 is equal to -1 alone. */
bool omc_shape_equal(const omc_shape *a, const omc_shape *b);
bool omc_type_equal(const omc_type *a, const omc_type *b);

/* Row-major strides in elements, one for each dim. */
void omc_shape_strides(const omc_shape *shape, int64_t *out);

/* Numpy broadcasting of two shapes; OMC_ESHAPE names `what` and both shapes if they do not fit. */
omc_status omc_shape_broadcast(const omc_shape *a, const omc_shape *b, const char *what,
                               omc_shape *out) OMC_MUST_USE;

/* Strides in elements of `from` seen as the broadcast shape `to`, one for each dim of `to` (0 where
 * `from` is repeated). `from` must broadcast to `to`. */
void omc_broadcast_strides(const omc_shape *from, const omc_shape *to, int64_t *out);

/* Maps a negative axis to 0..rank-1; OMC_ESHAPE names `what` if it is outside -rank..rank-1. */
omc_status omc_axis(int64_t axis, int32_t rank, const char *what, int32_t *out) OMC_MUST_USE;

/* Bytes of a dense tensor; OMC_ESHAPE if a dim is negative or they are more than PTRDIFF_MAX. */
OMC_API omc_status omc_type_bytes(const omc_type *type, size_t *out) OMC_MUST_USE;

/* "f32[8,64]", or "[8,64]" for a shape; at most n bytes with the terminating zero, of which
 * OMC_TYPE_TEXT are enough for any. Returns buf. */
#define OMC_TYPE_TEXT 192
OMC_API const char *omc_type_text(const omc_type *type, char *buf, size_t n);
const char *omc_shape_text(const omc_shape *shape, char *buf, size_t n);

/* Reads "f32[8,?]" from the start of n bytes of text (`?` gives -1); *used counts the bytes read.
 * OMC_EPARSE says what was expected. */
omc_status omc_type_parse(const char *text, size_t n, omc_type *out, size_t *used) OMC_MUST_USE;

#ifdef __cplusplus
}
#endif

#endif
