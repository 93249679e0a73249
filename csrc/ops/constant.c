/* Ops whose output follows from shapes and constants alone; binding folds them. */
#include <math.h>
#include <string.h>

#include "base/element.h"
#include "cpu/kernel.h"
#include "ops/infer.h"
#include "ops/op.h"

#ifdef OMC_RECORDS

typedef struct shape_params {
  int32_t start, end;
} shape_params;

/* ONNX clamps both ends into the rank. */
static int32_t clamp_end(int64_t i, int32_t rank) {
  if (i < 0) i += rank;
  return (int32_t)(i < 0 ? 0 : i > rank ? rank : i);
}

static shape_params shape_range(const omc_node *node) {
  const int32_t rank = omc_in(node, 0)->type.shape.rank;
  shape_params p = {clamp_end(omc_attr_int(node, "start", 0), rank),
                    clamp_end(omc_attr_int(node, "end", rank), rank)};
  if (p.end < p.start) p.end = p.start;
  return p;
}

static omc_status shape_infer(omc_node *node) {
  const shape_params p = shape_range(node);
  const omc_shape shape = {1, {p.end - p.start}};
  omc_set_type(node, 0, OMC_I64, &shape);
  return OMC_OK;
}

static omc_status shape_decode(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  *(shape_params *)params = shape_range(node);
  return OMC_OK;
}

OMC_KERNEL_ANY(Shape) {
  const shape_params *p = args->params;
  int64_t *y = args->out[0].data;
  for (int32_t d = p->start; d < p->end; d++) y[d - p->start] = args->in[0].type->shape.dims[d];
  return OMC_OK;
}

static omc_status size_infer(omc_node *node) {
  const omc_shape scalar = {0, {0}};
  omc_set_type(node, 0, OMC_I64, &scalar);
  return OMC_OK;
}

OMC_KERNEL_ANY(Size) {
  *(int64_t *)args->out[0].data = omc_shape_numel(&args->in[0].type->shape);
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

static omc_status range_infer(omc_node *node) {
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

OMC_KERNEL_ANY(Range) {
  const omc_tensor *start = &args->in[0], *delta = &args->in[2], *y = &args->out[0];
  const omc_dtype dtype = y->type->dtype;
  const int64_t n = y->type->shape.dims[0];
  if (omc_dtype_is_float(dtype)) {
    const double from = omc_element_float(dtype, start->data, 0);
    const double step = omc_element_float(dtype, delta->data, 0);
    for (int64_t i = 0; i < n; i++)
      omc_element_set_float(dtype, y->data, i, from + (double)i * step);
  } else {
    const int64_t step = omc_element_int(dtype, delta->data, 0);
    int64_t x = omc_element_int(dtype, start->data, 0);
    for (int64_t i = 0; i < n; i++) {
      omc_element_set_int(dtype, y->data, i, x);
      if (i + 1 < n) x += step;
    }
  }
  return OMC_OK;
}

typedef struct fill_params {
  unsigned char element[8];
} fill_params;

static omc_status fill_infer(omc_node *node) {
  omc_dtype dtype;
  const int64_t code = omc_attr_int(node, "dtype", omc_dtype_get(OMC_F32)->onnx);
  if (!omc_dtype_from_onnx(code, &dtype))
    OMC_NODE_FAIL(node, EDTYPE, "dtype %lld is unknown", (long long)code);
  omc_shape shape = {0, {0}};
  OMC_TRY(omc_need_ints(node, 0, OMC_MAX_RANK, shape.dims, &shape.rank));
  for (int32_t d = 0; d < shape.rank; d++) {
    if (shape.dims[d] < 0)
      OMC_NODE_FAIL(node, ESHAPE, "dim %d is %lld", d, (long long)shape.dims[d]);
  }
  omc_set_type(node, 0, dtype, &shape);
  return OMC_OK;
}

/* The value may be written as an integer or as a float. */
static omc_status fill_decode(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  fill_params *p = params;
  const omc_dtype dtype = omc_out(node, 0)->type.dtype;
  const omc_attr *value = omc_attr_find(node, "value");
  if (value && value->kind == OMC_ATTR_INT)
    omc_element_set_int(dtype, p->element, 0, value->v.i);
  else
    omc_element_set_float(dtype, p->element, 0, omc_attr_float(node, "value", 0));
  return OMC_OK;
}

OMC_KERNEL_ANY(ConstantOfShape) {
  const fill_params *p = args->params;
  const omc_type *type = args->out[0].type;
  const size_t size = omc_dtype_size(type->dtype);
  const size_t bytes = (size_t)omc_shape_numel(&type->shape) * size;
  char *y = args->out[0].data;
  if (bytes) memcpy(y, p->element, size);
  for (size_t filled = size; filled < bytes; filled *= 2)
    memcpy(y + filled, y, filled < bytes - filled ? filled : bytes - filled);
  return OMC_OK;
}

const omc_op omc_op_Shape = {.name = "Shape",
                             .min_in = 1,
                             .max_in = 1,
                             .n_out = 1,
                             .flags = OMC_OP_SHAPE_ONLY,
                             .infer = shape_infer,
                             .params_size = sizeof(shape_params),
                             .params = shape_decode,
                             .cpu = &omc_kernels_Shape};
const omc_op omc_op_Size = {.name = "Size",
                            .min_in = 1,
                            .max_in = 1,
                            .n_out = 1,
                            .flags = OMC_OP_SHAPE_ONLY,
                            .infer = size_infer,
                            .cpu = &omc_kernels_Size};
const omc_op omc_op_Range = {.name = "Range",
                             .min_in = 3,
                             .max_in = 3,
                             .n_out = 1,
                             .infer = range_infer,
                             .cpu = &omc_kernels_Range};
const omc_op omc_op_ConstantOfShape = {.name = "ConstantOfShape",
                                       .min_in = 1,
                                       .max_in = 1,
                                       .n_out = 1,
                                       .infer = fill_infer,
                                       .params_size = sizeof(fill_params),
                                       .params = fill_decode,
                                       .cpu = &omc_kernels_ConstantOfShape};

#endif
