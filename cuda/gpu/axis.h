/* Where an element of a broadcast tensor lies: axes of the iteration shape, by which an index is
 * divided with multiplications. Read by the host as C11. */
#ifndef OMC_GPU_AXIS_H
#define OMC_GPU_AXIS_H

#include "cuda/gpu/target.h"

/* Of size d and, in elements, stride s. The quotient of n < 2^31 is (n * multiplier / 2^32 + n) /
 * 2^shift: Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994. */
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
  const uint32_t quotient = (__umulhi(*index, axis.multiplier) + *index) >> axis.shift;
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
  uint32_t shift = 0;
  while (shift < 31 && ((int64_t)1 << shift) < size) shift++;
  const uint64_t d = (uint64_t)size;
  return (omc_gpu_axis){(uint32_t)size, (uint32_t)stride,
                        (uint32_t)(((((uint64_t)1 << shift) - d) << 32) / d + 1), shift};
}

#endif

#endif
