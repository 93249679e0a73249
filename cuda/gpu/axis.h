/* Where an element of a broadcast tensor lies: axes of the iteration shape, by which an index is
 * divided with multiplications. Read by the host as C11. */
#ifndef OMC_GPU_AXIS_H
#define OMC_GPU_AXIS_H

#include "cuda/gpu/divide.h"

/* Stride in elements; for an index below 2^31. */
typedef struct omc_gpu_axis {
  uint32_t size, stride, multiplier, shift;
} omc_gpu_axis;

/* The same for any index. */
typedef struct omc_gpu_wide_axis {
  int64_t size, stride;
} omc_gpu_wide_axis;

#ifdef OMC_GPU

/* Moves *offset by the place of *index along an axis, and leaves its place along those before. */
OMC_INLINE void omc_along(const omc_gpu_axis &axis, uint32_t *index, uint32_t *offset) {
  const uint32_t quotient = omc_quotient(*index, axis.multiplier, axis.shift);
  *offset += (*index - quotient * axis.size) * axis.stride;
  *index = quotient;
}
OMC_INLINE void omc_along(const omc_gpu_wide_axis &axis, int64_t *index, int64_t *offset) {
  const int64_t quotient = *index / axis.size;
  *offset += (*index - quotient * axis.size) * axis.stride;
  *index = quotient;
}

/* The element that `index` of the iteration shape reads. */
template <typename I, int N, typename Axis>
OMC_INLINE I omc_offset(const Axis (&axes)[N], I index) {
  I offset = 0;
#pragma unroll
  for (int i = N - 1; i > 0; i--) omc_along(axes[i], &index, &offset);
  return offset + index * (I)axes[0].stride;
}

#else

static inline omc_gpu_axis omc_gpu_axis_of(int64_t size, int64_t stride) {
  uint32_t shift;
  const uint32_t multiplier = omc_gpu_multiplier_of(size, &shift);
  return (omc_gpu_axis){(uint32_t)size, (uint32_t)stride, multiplier, shift};
}

#endif

#endif
