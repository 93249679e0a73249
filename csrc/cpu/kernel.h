/* How CPU kernels are written once and compiled for several dtypes and instruction sets.
 *
 * setup.py compiles each cpu/ops/FAMILY.c once as it is (tables, parameters) and once per row of
 * cpu/variants.def with OMC_VARIANT (kernels). In a kernel, `storage_t` is the storage type,
 * `acc_t` the type computed in, `vacc_t` a vector of OMC_VL of them; vld and vst convert. A kernel
 * that only moves bytes is written once, outside of the variants, and serves every dtype.
 *
 *   #ifdef OMC_VARIANT
 *   OMC_KERNEL(Softmax, args) { const omc_axis_form *p = args->params; ... return OMC_OK; }
 *   #else
 *   OMC_KERNELS(Softmax)                       // declares them all, defines the table
 *   OMC_FORM(params_softmax, omc_axis_form_of)
 *   OMC_CPU_OP(Softmax, Softmax, OMC_PARAMS(omc_axis_form, params_softmax))
 *   #endif
 *
 * Elementwise ops are rows instead, see ops/elementwise.h. */
#ifndef OMC_CPU_KERNEL_H
#define OMC_CPU_KERNEL_H

#include "base/isa.h"
#include "cpu/variants.def"
#include "graph/graph.h"
#include "provider.h"

/* One function per dtype stored and instruction set; NULL: not compiled for it. `any` serves every
 * dtype and wins if set. */
typedef struct omc_kernels {
  omc_kernel any;
  omc_kernel fn[OMC_N_DTYPE][OMC_N_ISA];
} omc_kernels;

typedef struct omc_ew omc_ew; /* block functions, see cpu/ops/block.h */

/* What the CPU knows of an op: each row of ops.def has an omc_cpu_NAME in cpu/ops/FAMILY.c. */
typedef struct omc_cpu_op {
  const omc_kernels *kernels; /* NULL for elementwise and view ops */
  const omc_ew *ew;           /* elementwise ops only */

  /* Decodes attributes and shapes into the kernel's typed parameters, `params_size` zeroed bytes.
   * NULL with size 0: the kernel has none. Runs once per plan; variable-length parts come from
   * `arena`, which lives as long as the plan. */
  size_t params_size;
  omc_status (*params)(const omc_node *node, omc_arena *arena, void *params);

  /* Bytes of scratch memory the kernel wants with that many threads; NULL: none. */
  size_t (*workspace)(const omc_node *node, const void *params, int threads);
} omc_cpu_op;

/* The record of an op id below OMC_N_OPS. */
const omc_cpu_op *omc_cpu_op_get(omc_op_id id);

/* Fails: there is no memory for the parameters of a node. */
omc_status omc_no_memory(const omc_node *node) OMC_MUST_USE;

/* The best instruction set this machine has, bounded by OMC_ISA; decided once. */
omc_isa omc_cpu_isa(void);

/* Lowers the bound for kernels picked from now on (tests); OMC_N_ISA: back to the best. */
void omc_cpu_set_isa(omc_isa isa);

/* Sets `best` to the entry of the best instruction set not above omc_cpu_isa() that `row`, of a
 * table
 * [..][OMC_N_ISA], has one for. */
#define OMC_PICK_ISA(best, row)                            \
  for (int isa_ = 0; isa_ <= (int)omc_cpu_isa(); isa_++) { \
    if ((row)[isa_]) best = (row)[isa_];                   \
  }

/* The function for a dtype on this machine: best compiled ISA not above omc_cpu_isa(). NULL: none.
 */
omc_kernel omc_kernels_pick(const omc_kernels *k, omc_dtype dtype);

/* Lanes of the widest vector of any variant: rows that vectors run over have room for that many. */
#define OMC_MAX_VL 16

static inline int64_t omc_whole_vectors(int64_t n) {
  return (n + OMC_MAX_VL - 1) / OMC_MAX_VL * OMC_MAX_VL;
}

/* Columns worked on together where the axis that is gone along is not the last: what runs along it
 * stays in L1, and loads are of whole cache lines. A multiple of any OMC_VL. */
enum { OMC_COLUMNS = 64 };

/* Bytes of an element of scratch memory of the kernels of a dtype: their acc_t. */
static inline size_t omc_acc_size(omc_dtype dtype) { return omc_dtype_size(omc_dtype_acc(dtype)); }

/* Bytes for n sums that are not kept where they are stored in the end, see sums_of in cpu/rows.h.
 */
static inline size_t omc_sums_bytes(omc_dtype dtype, int64_t n) {
  return omc_dtype_acc(dtype) == dtype ? 0 : (size_t)n * omc_acc_size(dtype);
}

/* Elements of an input or output; NULL if it is left out. */
static inline const void *omc_in_data(const omc_kernel_args *args, uint32_t i) {
  return i < args->n_in && args->in[i].type ? args->in[i].data : NULL;
}
static inline void *omc_out_data(const omc_kernel_args *args, uint32_t i) {
  return i < args->n_out && args->out[i].type ? args->out[i].data : NULL;
}

/* Names: OMC_KERNEL(Softmax, args) in variant f32_avx2 defines omc_k_Softmax_f32_avx2. */
#define OMC_PASTE3_(a, b, c) a##b##_##c
#define OMC_PASTE3(a, b, c) OMC_PASTE3_(a, b, c)
#define OMC_VARIANT_NAME(name) OMC_PASTE3(omc_k_, name, OMC_VARIANT)

#ifdef OMC_VARIANT
#define OMC_KERNEL(name, args)                                \
  omc_status OMC_VARIANT_NAME(name)(const omc_kernel_args *); \
  omc_status OMC_VARIANT_NAME(name)(const omc_kernel_args *args)
#include "cpu/vec.h"
#endif

/* Kernels for dtypes that floats are stored in; OMC_KERNELS_NUM also for the integer that is. */
#define OMC_DECLARE_KERNEL_(name) omc_status name(const omc_kernel_args *);
#define OMC_KERNELS_(which, name)                               \
  OMC_VARIANT_DECLARE(which, OMC_DECLARE_KERNEL_, omc_k_##name) \
  static const omc_kernels omc_kernels_##name = {.fn = {OMC_VARIANT_TABLE(which, omc_k_##name)}};
#define OMC_KERNELS(name) OMC_KERNELS_(floats, name)
#define OMC_KERNELS_NUM(name) OMC_KERNELS_(all, name)

/* Kernels of floats, and of those whose panels hold pairs of them, see cpu/gemm_kernel.h. */
#define OMC_KERNELS_PAIRS(name)                                  \
  OMC_VARIANT_DECLARE(floats, OMC_DECLARE_KERNEL_, omc_k_##name) \
  OMC_VARIANT_DECLARE(pairs, OMC_DECLARE_KERNEL_, omc_k_##name)  \
  static const omc_kernels omc_kernels_##name = {                \
      .fn = {OMC_VARIANT_TABLE(floats, omc_k_##name) OMC_VARIANT_TABLE(pairs, omc_k_##name)}};

/* The omc_cpu_op of an op, with the kernels of that name. */
#define OMC_PARAMS(type, decode) .params_size = sizeof(type), .params = decode

/* Defines a `decode` whose parameters are a form (ops/forms.h) that `read` reads of the node. */
#define OMC_FORM(decode, read)                                                     \
  static omc_status decode(const omc_node *node, omc_arena *arena, void *params) { \
    (void)arena;                                                                   \
    return read(node, params);                                                     \
  }

#define OMC_CPU_OP(name, kernel, ...) \
  const omc_cpu_op omc_cpu_##name = {.kernels = &omc_kernels_##kernel, __VA_ARGS__};

/* A kernel that serves every dtype, defined outside of the variants with OMC_KERNEL_ANY(name,
 * args). */
#define OMC_KERNEL_ANY(name, args)                                           \
  static omc_status omc_k_##name##_any(const omc_kernel_args *);             \
  static const omc_kernels omc_kernels_##name = {.any = omc_k_##name##_any}; \
  static omc_status omc_k_##name##_any(const omc_kernel_args *args)

#endif
