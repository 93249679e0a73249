/* The names of CUDA C++ that device code uses, for clang's AMD target, without AMD's headers. A
 * group of 32 lanes is what CUDA calls a warp, on processors of 64 too. */
#ifndef OMC_GPU_HIP_H
#define OMC_GPU_HIP_H

#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(threads, ...) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define __grid_constant__

struct omc_hip_place {
  unsigned x;
};
#define threadIdx (omc_hip_place{__builtin_amdgcn_workitem_id_x()})
#define blockIdx (omc_hip_place{__builtin_amdgcn_workgroup_id_x()})
#define blockDim (omc_hip_place{__builtin_amdgcn_workgroup_size_x()})
#define gridDim (omc_hip_place{__builtin_amdgcn_grid_size_x() / blockDim.x})

#define OMC_HIP static __device__ __forceinline__

OMC_HIP unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
OMC_HIP float __uint_as_float(unsigned u) { return __builtin_bit_cast(float, u); }
OMC_HIP long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }
OMC_HIP double __longlong_as_double(long long u) { return __builtin_bit_cast(double, u); }
OMC_HIP unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }

OMC_HIP void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
OMC_HIP void __threadfence_system() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, ""); }
template <typename T>
OMC_HIP T atomicAdd(T *at, T x) {
  return __hip_atomic_fetch_add(at, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
OMC_HIP unsigned atomicCAS_system(unsigned *at, unsigned expected, unsigned desired) {
  __hip_atomic_compare_exchange_strong(at, &expected, desired, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST,
                                       __HIP_MEMORY_SCOPE_SYSTEM);
  return expected;
}

template <typename T>
OMC_HIP T omc_hip_from(T value, int lane) {
  struct words {
    int of[sizeof(T) / sizeof(int)];
  } w = __builtin_bit_cast(words, value);
  for (int &word : w.of) word = __builtin_amdgcn_ds_bpermute(4 * lane, word);
  return __builtin_bit_cast(T, w);
}
OMC_HIP int omc_hip_lane() {
  return (int)__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
}
/* What all lanes of a warp have. */
template <typename T>
struct omc_peers {
  T mine;
  __device__ __forceinline__ explicit omc_peers(const T &x) : mine(x) {}
  __device__ __forceinline__ T operator[](int lane) const {
    return omc_hip_from(mine, omc_hip_lane() / 32 * 32 + lane);
  }
};
template <typename T>
OMC_HIP T __shfl_sync(unsigned, T value, int from) {
  return omc_peers<T>(value)[from];
}
template <typename T>
OMC_HIP T __shfl_xor_sync(unsigned, T value, int mask) {
  return omc_hip_from(value, omc_hip_lane() ^ mask);
}
template <typename T>
OMC_HIP T __shfl_up_sync(unsigned, T value, int by) {
  const int lane = omc_hip_lane();
  return omc_hip_from(value, lane % 32 < by ? lane : lane - by);
}

/* At once. */
template <int BYTES>
OMC_HIP void omc_copy_later(void *to, const void *from, bool there) {
  struct alignas(BYTES) bytes {
    unsigned words[BYTES / sizeof(unsigned)];
  };
  *(bytes *)to = there ? *(const bytes *)from : bytes{};
}
OMC_HIP void omc_wait_for_copies() {}

/* Of the compiler, and of AMD's device library. */
#define OMC_HIP_BUILTIN(name, parameters, ...)                                         \
  OMC_HIP float name##f parameters(float) { return __builtin_##name##f(__VA_ARGS__); } \
  OMC_HIP double name parameters(double) { return __builtin_##name(__VA_ARGS__); }
#define OMC_HIP_1(type) (type x)
#define OMC_HIP_2(type) (type x, type y)
#define OMC_HIP_3(type) (type x, type y, type z)
OMC_HIP_BUILTIN(fma, OMC_HIP_3, x, y, z)
OMC_HIP_BUILTIN(copysign, OMC_HIP_2, x, y)
OMC_HIP_BUILTIN(fmax, OMC_HIP_2, x, y)
OMC_HIP_BUILTIN(sqrt, OMC_HIP_1, x)
OMC_HIP_BUILTIN(floor, OMC_HIP_1, x)
OMC_HIP_BUILTIN(rint, OMC_HIP_1, x)
OMC_HIP_BUILTIN(fabs, OMC_HIP_1, x)
#undef OMC_HIP_BUILTIN

#define OMC_HIP_LIBRARY(name, parameters, ...)                                         \
  extern "C" __device__ float __ocml_##name##_f32 parameters(float);                   \
  extern "C" __device__ double __ocml_##name##_f64 parameters(double);                 \
  OMC_HIP float name##f parameters(float) { return __ocml_##name##_f32(__VA_ARGS__); } \
  OMC_HIP double name parameters(double) { return __ocml_##name##_f64(__VA_ARGS__); }
OMC_HIP_LIBRARY(pow, OMC_HIP_2, x, y)
OMC_HIP_LIBRARY(fmod, OMC_HIP_2, x, y)
OMC_HIP_LIBRARY(atan2, OMC_HIP_2, x, y)
#define OMC_HIP_OF_ONE(name) OMC_HIP_LIBRARY(name, OMC_HIP_1, x)
OMC_HIP_OF_ONE(exp)
OMC_HIP_OF_ONE(exp2)
OMC_HIP_OF_ONE(expm1)
OMC_HIP_OF_ONE(log)
OMC_HIP_OF_ONE(log1p)
OMC_HIP_OF_ONE(log2)
OMC_HIP_OF_ONE(log10)
OMC_HIP_OF_ONE(sinh)
OMC_HIP_OF_ONE(cosh)
OMC_HIP_OF_ONE(tanh)
OMC_HIP_OF_ONE(asinh)
OMC_HIP_OF_ONE(acosh)
OMC_HIP_OF_ONE(atanh)
OMC_HIP_OF_ONE(erf)
OMC_HIP_OF_ONE(erfc)
OMC_HIP_OF_ONE(sin)
OMC_HIP_OF_ONE(cos)
OMC_HIP_OF_ONE(tan)
OMC_HIP_OF_ONE(asin)
OMC_HIP_OF_ONE(acos)
OMC_HIP_OF_ONE(atan)
#undef OMC_HIP_OF_ONE
#undef OMC_HIP_LIBRARY
#undef OMC_HIP_1
#undef OMC_HIP_2
#undef OMC_HIP_3

#endif
