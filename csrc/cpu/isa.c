#include <stdatomic.h>

#include "base/env.h"
#include "cpu/kernel.h"
#include "cpu/tiles.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* Not all compilers know it by name; where a virtual machine hides it, it may be missing. */
static bool has_f16c(void) {
  unsigned a, b, c = 0, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

/* Whether the instruction that sums two products of bf16 does so at the rate at which one of f32 is
 * added. AMD's CPUs start as many of either; Intel's half as many, so that panels of f32, which
 * keep denormals, are no slower. */
static bool dots_pay(void) { return __builtin_cpu_is("amd"); }
#endif

/* The best that there is; for those above the limit no permission is asked. */
static omc_isa machine_isa(int limit) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c())
    return OMC_ISA_BASE;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return OMC_ISA_AVX2;
  if (!__builtin_cpu_supports("avx512bf16")) return OMC_ISA_AVX512;
  const omc_tiles tiles = limit >= OMC_ISA_AMX ? omc_tiles_get() : OMC_TILES_NONE;
  return tiles == OMC_TILES_F16    ? OMC_ISA_AMXFP16
         : tiles == OMC_TILES_BF16 ? OMC_ISA_AMX
         : dots_pay()              ? OMC_ISA_AVX512BF16
                                   : OMC_ISA_AVX512;
#else
  (void)limit;
  return OMC_ISA_BASE;
#endif
}

static omc_isa best_isa(void) {
  const int limit = omc_env_get()->isa, machine = (int)machine_isa(limit);
  return (omc_isa)(limit < machine ? limit : machine);
}

static _Atomic int bound = OMC_N_ISA;

omc_isa omc_cpu_isa(void) {
  static _Atomic int best = OMC_N_ISA; /* not asked for yet */
  int isa = atomic_load_explicit(&best, memory_order_relaxed);
  if (isa == OMC_N_ISA) {
    isa = (int)best_isa();
    atomic_store_explicit(&best, isa, memory_order_relaxed);
  }
  const int limit = atomic_load_explicit(&bound, memory_order_relaxed);
  return (omc_isa)(limit < isa ? limit : isa);
}

void omc_cpu_set_isa(omc_isa isa) { atomic_store_explicit(&bound, (int)isa, memory_order_relaxed); }

omc_kernel omc_kernels_pick(const omc_kernels *k, omc_dtype dtype) {
  omc_kernel best = k->any;
  if (!best) OMC_PICK_ISA(best, k->fn[dtype])
  return best;
}
