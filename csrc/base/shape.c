#include "base/shape.h"

#include <stdio.h>
#include <string.h>

#include "base/alloc.h"

int64_t omc_shape_span(const omc_shape *shape, int32_t from, int32_t to) {
  int64_t n = 1;
  for (int32_t i = from; i < to; i++)
    if (__builtin_mul_overflow(n, shape->dims[i], &n)) n = INT64_MAX;
  return n;
}

int64_t omc_shape_numel(const omc_shape *shape) { return omc_shape_span(shape, 0, shape->rank); }

bool omc_shape_equal(const omc_shape *a, const omc_shape *b) {
  if (a->rank != b->rank) return false;
  for (int32_t i = 0; i < a->rank; i++)
    if (a->dims[i] != b->dims[i]) return false;
  return true;
}

bool omc_type_equal(const omc_type *a, const omc_type *b) {
  return a->dtype == b->dtype && omc_shape_equal(&a->shape, &b->shape);
}

void omc_shape_strides(const omc_shape *shape, int64_t *out) {
  for (int32_t i = 0; i < shape->rank; i++) out[i] = omc_shape_span(shape, i + 1, shape->rank);
}

omc_status omc_shape_broadcast(const omc_shape *a, const omc_shape *b, const char *what,
                               omc_shape *out) {
  const omc_shape *longer = a->rank >= b->rank ? a : b, *shorter = longer == a ? b : a;
  const int32_t lead = longer->rank - shorter->rank;
  omc_shape shape = *longer;
  for (int32_t i = lead; i < longer->rank; i++) {
    const int64_t x = longer->dims[i], y = shorter->dims[i - lead];
    if (x != y && x != 1 && y != 1) {
      char ta[OMC_TYPE_TEXT], tb[OMC_TYPE_TEXT];
      OMC_FAIL(ESHAPE, "%s: shapes %s and %s do not broadcast", what,
               omc_shape_text(a, ta, sizeof ta), omc_shape_text(b, tb, sizeof tb));
    }
    shape.dims[i] = x == 1 ? y : x;
  }
  *out = shape;
  return OMC_OK;
}

void omc_broadcast_strides(const omc_shape *from, const omc_shape *to, int64_t *out) {
  const int32_t lead = to->rank - from->rank;
  int64_t strides[OMC_MAX_RANK];
  omc_shape_strides(from, strides);
  for (int32_t i = 0; i < to->rank; i++)
    out[i] = i < lead || from->dims[i - lead] == 1 ? 0 : strides[i - lead];
}

omc_status omc_axis(int64_t axis, int32_t rank, const char *what, int32_t *out) {
  if (axis < -rank || axis >= rank)
    OMC_FAIL(ESHAPE, "%s: axis %lld is out of range for rank %d", what, (long long)axis, rank);
  *out = (int32_t)(axis < 0 ? axis + rank : axis);
  return OMC_OK;
}

/* Offsets into tensors are int64 and pointer differences, so half of size_t is the limit. */
omc_status omc_type_bytes(const omc_type *type, size_t *out) {
  size_t bytes = omc_dtype_size(type->dtype);
  bool fits = true, negative = type->shape.rank < 0, empty = false;
  for (int32_t i = 0; i < type->shape.rank; i++) {
    const int64_t dim = type->shape.dims[i];
    negative |= dim < 0;
    empty |= dim == 0;
    fits = fits && omc_mul_size(bytes, (size_t)dim, &bytes) && bytes <= PTRDIFF_MAX;
  }
  if (negative || (!fits && !empty)) {
    char text[OMC_TYPE_TEXT];
    OMC_FAIL(ESHAPE, "%s has %s", omc_type_text(type, text, sizeof text),
             negative ? "an unknown dim" : "more bytes than memory can hold");
  }
  *out = empty ? 0 : bytes;
  return OMC_OK;
}

const char *omc_shape_text(const omc_shape *shape, char *buf, size_t n) {
  if (shape->rank < 0) {
    snprintf(buf, n, "[...]");
    return buf;
  }
  size_t used = 0;
  for (int32_t i = 0; i <= shape->rank && used < n; i++) {
    int more;
    if (i == shape->rank)
      more = snprintf(buf + used, n - used, "%s", i ? "]" : "[]");
    else if (shape->dims[i] < 0)
      more = snprintf(buf + used, n - used, "%c?", i ? ',' : '[');
    else
      more = snprintf(buf + used, n - used, "%c%lld", i ? ',' : '[', (long long)shape->dims[i]);
    used += (size_t)more;
  }
  return buf;
}

const char *omc_type_text(const omc_type *type, char *buf, size_t n) {
  const int used = snprintf(buf, n, "%s", omc_dtype_get(type->dtype)->text);
  if ((size_t)used < n) omc_shape_text(&type->shape, buf + used, n - (size_t)used);
  return buf;
}

static size_t skip_blanks(const char *text, size_t n, size_t at) {
  while (at < n && (text[at] == ' ' || text[at] == '\t')) at++;
  return at;
}

/* Reads a dim at *at: digits or `?`. */
static omc_status parse_dim(const char *text, size_t n, size_t *at, int64_t *out) {
  size_t i = *at;
  int64_t dim = 0;
  if (i < n && text[i] == '?') {
    dim = -1;
    i++;
  } else {
    for (; i < n && text[i] >= '0' && text[i] <= '9'; i++)
      if (__builtin_mul_overflow(dim, 10, &dim) || __builtin_add_overflow(dim, text[i] - '0', &dim))
        OMC_FAIL(EPARSE, "a dim does not fit in 64 bits");
    if (i == *at) OMC_FAIL(EPARSE, "expected a dim, a number or '?'");
  }
  *at = i;
  *out = dim;
  return OMC_OK;
}

omc_status omc_type_parse(const char *text, size_t n, omc_type *out, size_t *used) {
  omc_type type = {OMC_F32, {0, {0}}};
  size_t at = 0;
  while (at < n && ((text[at] >= 'a' && text[at] <= 'z') || (text[at] >= '0' && text[at] <= '9')))
    at++;
  if (!omc_dtype_from_text(text, at, &type.dtype))
    OMC_FAIL(EPARSE, "expected a dtype such as f32, not '%.*s'", (int)(at < 16 ? at : 16), text);
  if (at == n || text[at] != '[') OMC_FAIL(EPARSE, "expected '[' after the dtype");
  at = skip_blanks(text, n, at + 1);
  while (at < n && text[at] != ']') {
    if (type.shape.rank == OMC_MAX_RANK)
      OMC_FAIL(EPARSE, "a shape has more than %d dims", OMC_MAX_RANK);
    OMC_TRY(parse_dim(text, n, &at, &type.shape.dims[type.shape.rank++]));
    at = skip_blanks(text, n, at);
    if (at < n && text[at] == ']') break;
    if (at == n || text[at] != ',') OMC_FAIL(EPARSE, "expected ',' or ']' after a dim");
    at = skip_blanks(text, n, at + 1);
    if (at < n && text[at] == ']') OMC_FAIL(EPARSE, "expected a dim after ','");
  }
  if (at == n) OMC_FAIL(EPARSE, "expected ']' after the dims");
  *out = type;
  *used = at + 1;
  return OMC_OK;
}
