/* What follows from shapes and constants alone and is too large to be folded. */
#include "cuda/ops/constant.h"

#include <string.h>

#include "base/element.h"
#include "base/int.h"
#include "cuda/copies.h"
#include "ops/forms.h"
#include "ops/infer.h"

/* ---- Range ---- */

typedef struct range_params {
  omc_cuda_kernel kernel;
  omc_range_of range;
} range_params;

static omc_status run_range(const omc_kernel_args *args) {
  range_params *p = (range_params *)(uintptr_t)args->params;
  omc_range_of range = p->range;
  range.y = args->out[0].data;
  const omc_cuda_grid grid = {omc_ceil_div(range.n, OMC_RANGE_THREADS), OMC_RANGE_THREADS, 0};
  return omc_cuda_launch(&p->kernel, grid, &range, args->queue);
}

static omc_status params_range(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                               void *params) {
  (void)arena;
  range_params *p = params;
  const omc_value *start = omc_in(node, 0), *delta = omc_in(node, 2);
  const omc_type *type = &omc_out(node, 0)->type;
  p->range.n = type->shape.dims[0];
  if (omc_dtype_is_float(type->dtype))
    p->range.from = omc_const_float(start, 0), p->range.step = omc_const_float(delta, 0);
  else
    p->range.first = omc_const_int(start, 0), p->range.delta = omc_const_int(delta, 0);
  return omc_cuda_kernel_of(device, "constant", type->dtype, "", "range", "", &p->kernel);
}

const omc_cuda_op omc_cuda_Range = {
    .run = run_range, .params_size = sizeof(range_params), .params = params_range};

/* ---- ConstantOfShape ---- */

typedef struct fill_params {
  omc_cuda_fill fill;
  uint64_t pattern;
} fill_params;

static omc_status run_fill(const omc_kernel_args *args) {
  const fill_params *p = args->params;
  const omc_type *type = args->out[0].type;
  return omc_cuda_fill_run(&p->fill, args->out[0].data, omc_shape_numel(&type->shape),
                           omc_dtype_size(type->dtype), NULL, p->pattern, args->queue);
}

static omc_status params_fill(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                              void *params) {
  (void)arena;
  fill_params *p = params;
  unsigned char element[sizeof p->pattern], *pattern = (unsigned char *)&p->pattern;
  omc_filling_of(node, element);
  const size_t size = omc_dtype_size(omc_out(node, 0)->type.dtype);
  for (size_t at = 0; at < sizeof p->pattern; at += size) memcpy(pattern + at, element, size);
  return omc_cuda_fill_of(device, &p->fill);
}

const omc_cuda_op omc_cuda_ConstantOfShape = {
    .run = run_fill, .params_size = sizeof(fill_params), .params = params_fill};
