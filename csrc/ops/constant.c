/* Ops whose output follows from shapes and constants alone; binding folds them. */
#include <math.h>

#include "base/element.h"
#include "base/int.h"
#include "ops/forms.h"
#include "ops/infer.h"
#include "ops/op.h"

/* ONNX clamps both ends into the rank. */
static int32_t clamp_end(int64_t i, int32_t rank) {
  return (int32_t)omc_clamp(i < 0 ? i + rank : i, 0, rank);
}

omc_shape_form omc_shape_form_of(const omc_node *node) {
  const int32_t rank = omc_in(node, 0)->type.shape.rank;
  omc_shape_form p = {clamp_end(omc_node_int(node, "start"), rank),
                      clamp_end(omc_node_int(node, "end"), rank)};
  if (p.end < p.start) p.end = p.start;
  return p;
}

/* The value may be written as an integer or as a float. */
void omc_filling_of(const omc_node *node, void *element) {
  const omc_dtype dtype = omc_out(node, 0)->type.dtype;
  const omc_attr *value = omc_node_attr(node, "value");
  if (value && value->kind == OMC_ATTR_INT)
    omc_element_set_int(dtype, element, 0, value->v.i);
  else
    omc_element_set_float(dtype, element, 0, omc_node_float(node, "value"));
}

static omc_status infer_shape(omc_node *node) {
  const omc_shape_form p = omc_shape_form_of(node);
  const omc_shape shape = {1, {p.end - p.start}};
  omc_set_type(node, 0, OMC_I64, &shape);
  return OMC_OK;
}

static omc_status infer_size(omc_node *node) {
  const omc_shape scalar = {0, {0}};
  omc_set_type(node, 0, OMC_I64, &scalar);
  return OMC_OK;
}

/* Elements from start to limit in steps of delta; negative: there is no such number. */
static int64_t range_length(const omc_node *node) {
  const omc_value *start = omc_in(node, 0), *limit = omc_in(node, 1), *delta = omc_in(node, 2);
  if (omc_dtype_is_float(start->type.dtype)) {
    const double n =
        ceil((omc_const_float(limit, 0) - omc_const_float(start, 0)) / omc_const_float(delta, 0));
    return n < 9e18 ? (n > 0 ? (int64_t)n : 0) : -1;
  }
  const int64_t step = omc_const_int(delta, 0), from = omc_const_int(start, 0);
  const int64_t to = omc_const_int(limit, 0);
  if (step == 0) return -1;
  if (step > 0 ? to <= from : to >= from) return 0;
  const uint64_t distance =
      step > 0 ? (uint64_t)to - (uint64_t)from : (uint64_t)from - (uint64_t)to;
  const uint64_t stride = step > 0 ? (uint64_t)step : 0 - (uint64_t)step;
  const uint64_t n = (distance - 1) / stride + 1;
  return n > INT64_MAX ? -1 : (int64_t)n;
}

static omc_status infer_range(omc_node *node) {
  const omc_dtype dtype = omc_in(node, 0)->type.dtype;
  for (uint32_t i = 0; i < 3; i++) {
    OMC_TRY(omc_need_const(node, i));
    OMC_TRY(omc_need_dtype(node, i, dtype));
    if (omc_shape_numel(&omc_in(node, i)->type.shape) != 1)
      OMC_NODE_FAIL(node, ESHAPE, "input %u is not one number", i);
  }
  const omc_shape shape = {1, {range_length(node)}};
  if (shape.dims[0] < 0)
    OMC_NODE_FAIL(node, EINVALID, "no range from %g to %g in steps of %g",
                  omc_const_float(omc_in(node, 0), 0), omc_const_float(omc_in(node, 1), 0),
                  omc_const_float(omc_in(node, 2), 0));
  omc_set_type(node, 0, dtype, &shape);
  return OMC_OK;
}

static omc_status infer_fill(omc_node *node) {
  omc_shape shape = {0, {0}};
  OMC_TRY(omc_need_ints(node, 0, OMC_MAX_RANK, shape.dims, &shape.rank));
  for (int32_t d = 0; d < shape.rank; d++)
    if (shape.dims[d] < 0)
      OMC_NODE_FAIL(node, ESHAPE, "dim %d is %lld", d, (long long)shape.dims[d]);
  omc_set_type(node, 0, omc_node_to_dtype(node, "dtype"), &shape);
  return OMC_OK;
}

OMC_RECORD(Shape, 1, 1, 1, .flags = OMC_OP_SHAPE_ONLY, .infer = infer_shape)
OMC_RECORD(Size, 1, 1, 1, .flags = OMC_OP_SHAPE_ONLY, .infer = infer_size)
OMC_RECORD(Range, 3, 3, 1, .infer = infer_range)
OMC_RECORD(ConstantOfShape, 1, 1, 1, .infer = infer_fill)
