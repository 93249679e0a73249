/* How CPU kernels are written once and compiled for several dtypes and instruction sets.
 *
 * setup.py compiles each csrc/ops/FAMILY.c once with OMC_RECORDS (shape rules, gradient rules,
 * records) and once per row of cpu/variants.def (kernels). In a kernel, `elem` is the storage
 * type, `real` the type computed in, `vreal` a vector of OMC_VL reals; vld and vst convert. A
 * kernel that only moves bytes is written once, in the records part, and serves every dtype.
 *
 *   #ifdef OMC_VARIANT
 *   OMC_KERNEL(Softmax) { const softmax_params *p = args->params; ... return OMC_OK; }
 *   #endif
 *   #ifdef OMC_RECORDS
 *   OMC_KERNELS(Softmax)                       // declares them all, defines the table
 *   const omc_op omc_op_Softmax = {.name = "Softmax", ..., .cpu = &omc_kernels_Softmax};
 *   #endif
 *
 * Layout of a family's file: includes and parameter structs; kernels under OMC_VARIANT; rules and
 * records under OMC_RECORDS. Elementwise ops are rows instead, see ops/elementwise.h. */
#ifndef OMC_CPU_KERNEL_H
#define OMC_CPU_KERNEL_H

#include "base/isa.h"
#include "provider.h"

typedef enum { OMC_CLASS_F32, OMC_CLASS_F64, OMC_CLASS_BF16, OMC_CLASS_I64, OMC_N_CLASS } omc_class;

/* One function per compute class and instruction set; NULL: not compiled for it. `any` serves
 * every dtype and wins if set. */
struct omc_kernels {
  omc_kernel any;
  omc_kernel fn[OMC_N_CLASS][OMC_N_ISA];
};

/* The best instruction set this machine has, bounded by OMC_ISA; decided once. */
omc_isa omc_cpu_isa(void);

/* Lowers the bound for kernels picked from now on (tests); OMC_N_ISA: back to the best. */
void omc_cpu_set_isa(omc_isa isa);

/* The function for a dtype on this machine: best compiled ISA not above omc_cpu_isa(). NULL if
 * the class is not compiled or the dtype has no class. */
omc_kernel omc_kernels_pick(const omc_kernels *k, omc_dtype dtype);

/* Elements of an input or output; NULL if it is left out. */
static inline const void *omc_in_data(const omc_kernel_args *args, uint32_t i) {
  return i < args->n_in && args->in[i].type ? args->in[i].data : NULL;
}
static inline void *omc_out_data(const omc_kernel_args *args, uint32_t i) {
  return i < args->n_out && args->out[i].type ? args->out[i].data : NULL;
}

/* Names: OMC_KERNEL(Softmax) in variant f32_avx2 defines omc_k_Softmax_f32_avx2. */
#define OMC_PASTE3_(a, b, c) a##b##_##c
#define OMC_PASTE3(a, b, c) OMC_PASTE3_(a, b, c)
#define OMC_VARIANT_NAME(name) OMC_PASTE3(omc_k_, name, OMC_VARIANT)

#ifdef OMC_VARIANT
#define OMC_KERNEL(name)                                      \
  omc_status OMC_VARIANT_NAME(name)(const omc_kernel_args *); \
  omc_status OMC_VARIANT_NAME(name)(const omc_kernel_args *args)
#include "cpu/vec.h"
#endif

#define OMC_DECLARE_(name, variant) omc_status omc_k_##name##_##variant(const omc_kernel_args *);

/* Kernels for float dtypes; OMC_KERNELS_NUM also for the integer class. */
/* The formatter never settles on these tables. */
/* clang-format off */
#if defined(__x86_64__)
#define OMC_DECLARE_FLOAT_(name)    \
  OMC_DECLARE_(name, f32_base)      \
  OMC_DECLARE_(name, f32_avx2)      \
  OMC_DECLARE_(name, f32_avx512)    \
  OMC_DECLARE_(name, f64_base)      \
  OMC_DECLARE_(name, f64_avx2)      \
  OMC_DECLARE_(name, f64_avx512)
#define OMC_FLOAT_ROWS_(name)                                                       \
  [OMC_CLASS_F32] = {omc_k_##name##_f32_base, omc_k_##name##_f32_avx2, omc_k_##name##_f32_avx512}, \
  [OMC_CLASS_F64] = {omc_k_##name##_f64_base, omc_k_##name##_f64_avx2, omc_k_##name##_f64_avx512}
#else
#define OMC_DECLARE_FLOAT_(name)    \
  OMC_DECLARE_(name, f32_base)      \
  OMC_DECLARE_(name, f64_base)
#define OMC_FLOAT_ROWS_(name)                         \
  [OMC_CLASS_F32] = {omc_k_##name##_f32_base},        \
  [OMC_CLASS_F64] = {omc_k_##name##_f64_base}
#endif
#define OMC_KERNELS(name)                         \
  OMC_DECLARE_FLOAT_(name)                        \
  static const omc_kernels omc_kernels_##name = {NULL, {OMC_FLOAT_ROWS_(name)}};
#define OMC_KERNELS_NUM(name)                     \
  OMC_DECLARE_FLOAT_(name)                        \
  OMC_DECLARE_(name, i64_base)                    \
  static const omc_kernels omc_kernels_##name = { \
      NULL, {OMC_FLOAT_ROWS_(name), [OMC_CLASS_I64] = {omc_k_##name##_i64_base}}};
/* clang-format on */

/* A kernel that serves every dtype, defined in the records part with OMC_KERNEL_ANY(name). */
#define OMC_KERNEL_ANY(name)                                                    \
  static omc_status omc_k_##name##_any(const omc_kernel_args *);                \
  static const omc_kernels omc_kernels_##name = {omc_k_##name##_any, {{NULL}}}; \
  static omc_status omc_k_##name##_any(const omc_kernel_args *args)

#endif
