/* What the compilers of device code differ in, OMC_GPU being defined for all of them: NVRTC, nvcc,
 * clang for AMD, and a C++ compiler that makes functions of the host of them, whose emulator.h says
 * what a GPU's names mean there. No header of theirs is needed but by the last. */
#ifndef OMC_GPU_TARGET_H
#define OMC_GPU_TARGET_H

#if defined(OMC_EMULATED)
#define OMC_GPU
#include "emulator.h"
#elif defined(__HIP__) || defined(__CUDACC_RTC__)
#define OMC_GPU
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#ifdef __HIP__
#include "cuda/gpu/hip.h"
#endif
#else
#include <stdint.h>
#ifdef __CUDACC__
#define OMC_GPU
#endif
#endif

#ifdef OMC_GPU

#ifndef INT32_MIN
#define INT32_MIN (-2147483647 - 1)
#endif
#ifndef INT64_MIN
#define INT64_MIN (-9223372036854775807ll - 1)
#endif
#undef NAN
#undef INFINITY
#define NAN omc_bits_float(0x7fc00000u)
#define INFINITY omc_bits_float(0x7f800000u)

#define OMC_METHOD __device__ __forceinline__
#define OMC_INLINE static OMC_METHOD

/* OMC_GLOBAL(softmax_f32, 256, softmax, p) { ... }: a kernel, of blocks of 256 threads at most,
 * which is given one struct of its parameters. A unit has the one kernel that it wants: it begins
 * with `#define OMC_WANTED_softmax_f32 ,`; others are templates that nobody instantiates. */
#define OMC_GLOBAL(name, threads, type, p) \
  OMC_SECOND(OMC_WANTED_##name OMC_KERNEL, OMC_NO_KERNEL, )(name, threads, type, p)
/* One that has all registers that it asks for, however few blocks then run at a time; and one that
 * has so many that at least `blocks` do. */
#define OMC_GLOBAL_WIDE(name, threads, type, p) OMC_GLOBAL_BLOCKS(name, threads, 1, type, p)
#define OMC_GLOBAL_BLOCKS(name, threads, blocks, type, p)                 \
  OMC_SECOND(OMC_WANTED_##name OMC_BLOCKS_KERNEL, OMC_NO_BLOCKS_KERNEL, ) \
  (name, threads, blocks, type, p)
#define OMC_SECOND(...) OMC_SECOND_(__VA_ARGS__)
#define OMC_SECOND_(first, second, ...) second
#define OMC_NO_KERNEL(name, threads, type, p) \
  template <typename>                         \
  OMC_INLINE void name(const type &p)
#define OMC_NO_BLOCKS_KERNEL(name, threads, blocks, type, p) OMC_NO_KERNEL(name, threads, type, p)
#ifndef OMC_KERNEL
#define OMC_KERNEL(name, threads, type, p) \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ type p)
#define OMC_BLOCKS_KERNEL(name, threads, blocks, type, p) \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ type p)
#endif

/* The memory that a launch asks for, which the threads of a block share. */
#ifndef OMC_SHARED_BYTES
#define OMC_SHARED_BYTES(name) extern __shared__ __align__(32) unsigned char name[]
#endif

OMC_INLINE uint32_t omc_float_bits(float x) { return __float_as_uint(x); }
OMC_INLINE float omc_bits_float(uint32_t u) { return __uint_as_float(u); }

#endif

#endif
