/* What a row of csrc/ops/elementwise.h is on a GPU: a function of one lane, omc_ew_NAME(a, b, c,
 * i), of three operands, those that the op does not take or that are left out being the first, and
 * of the row's numbers. Files with rows are included after this one. */
#ifndef OMC_CUDA_OPS_ROWS_H
#define OMC_CUDA_OPS_ROWS_H

#include "cuda/gpu/lane.h"

#define OMC_VARIANT
#define OMC_ROWS_ARE_KERNELS
#include "ops/elementwise.h"

#define OMC_EW_FUNCTION(name) \
  OMC_INLINE vacc_t omc_ew_##name(vacc_t in0, vacc_t in1, vacc_t in2, const vacc_t *numbers)

/* Whether what is computed in is what rows of these types are for. */
#if OMC_IS_FLOAT
#define OMC_EW_ROWS_FLOAT(...) __VA_ARGS__
#define OMC_EW_ROWS_INT(...)
#else
#define OMC_EW_ROWS_FLOAT(...)
#define OMC_EW_ROWS_INT(...) __VA_ARGS__
#endif
#define OMC_EW_ROWS_ANY(...) __VA_ARGS__
#define OMC_EW_ROWS_FLOAT_TO_BOOL OMC_EW_ROWS_FLOAT
#define OMC_EW_ROWS_ANY_TO_BOOL(...) __VA_ARGS__
#define OMC_EW_ROWS_BOOL(...) __VA_ARGS__
#define OMC_EW_ROWS_CHOICE(...) __VA_ARGS__

#define OMC_ROW_(name, types, i, a, b, c, kernel)               \
  OMC_EW_ROWS_##types(OMC_EW_FUNCTION(name) {                   \
    const vacc_t a = in0, b = in1, c = in2, *const i = numbers; \
    (void)a, (void)b, (void)c, (void)i;                         \
    return kernel;                                              \
  })
#define UNARY_WITH(name, types, i, a, kernel, g, da, node, ...) \
  OMC_ROW_(name, types, i, a, b_, c_, (kernel))
#define UNARY_NO_GRAD(name, types, a, kernel) OMC_ROW_(name, types, i_, a, b_, c_, (kernel))
#define BINARY_WITH(name, types, flags, i, a, b, kernel, g, da, db, node, ...) \
  OMC_ROW_(name, types, i, a, b, c_, (kernel))
#define BINARY_NO_GRAD_WITH(name, types, flags, i, a, b, kernel, node, ...) \
  OMC_ROW_(name, types, i, a, b, c_, (kernel))
#define TERNARY(name, types, a, b, c, kernel, g, da, db, dc) \
  OMC_ROW_(name, types, i_, a, b, c, (kernel))
#define TERNARY_OPTIONAL_WITH(name, types, i, a, b, c, kernel, g, da, db, dc, node, ...) \
  OMC_ROW_(name, types, i, a, b, c, (kernel))

#endif
