/* What follows from shapes and constants alone. */
#include <string.h>

#include "base/element.h"
#include "cpu/kernel.h"
#include "ops/forms.h"

#ifndef OMC_VARIANT

static omc_status params_shape(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  *(omc_shape_form *)params = omc_shape_form_of(node);
  return OMC_OK;
}

OMC_KERNEL_ANY(Shape, args) {
  const omc_shape_form *p = args->params;
  int64_t *y = args->out[0].data;
  for (int32_t d = p->start; d < p->end; d++) y[d - p->start] = args->in[0].type->shape.dims[d];
  return OMC_OK;
}

OMC_KERNEL_ANY(Size, args) {
  *(int64_t *)args->out[0].data = omc_shape_numel(&args->in[0].type->shape);
  return OMC_OK;
}

OMC_KERNEL_ANY(Range, args) {
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
  unsigned char element[sizeof(int64_t)];
} fill_params;

static omc_status params_fill(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  omc_filling_of(node, ((fill_params *)params)->element);
  return OMC_OK;
}

OMC_KERNEL_ANY(ConstantOfShape, args) {
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

OMC_CPU_OP(Shape, Shape, OMC_PARAMS(omc_shape_form, params_shape))
OMC_CPU_OP(Size, Size)
OMC_CPU_OP(Range, Range)
OMC_CPU_OP(ConstantOfShape, ConstantOfShape, OMC_PARAMS(fill_params, params_fill))

#endif
