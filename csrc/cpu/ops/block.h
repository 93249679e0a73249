/* Elementwise ops as functions of blocks of elements, and the interpreter that runs programs of
 * them (ops/program.h) block by block inside L1. */
#ifndef OMC_CPU_OPS_BLOCK_H
#define OMC_CPU_OPS_BLOCK_H

#include "cpu/kernel.h"
#include "cpu/rows.h"
#include "ops/program.h"
#define OMC_ROWS_ARE_KERNELS
#include "ops/elementwise.h"

/* Elements a block function works on at most, a multiple of any OMC_VL. */
#define OMC_EW_BLOCK 512

/* What a block lies as: numbers of the class or, where that is f32, floats of 16 bits, which are
 * converted in registers. */
static inline bool omc_ew_takes(omc_dtype cls, omc_dtype dtype) {
  return dtype == cls || (cls == OMC_F32 && (dtype == OMC_BF16 || dtype == OMC_F16));
}

typedef struct omc_ew_block {
  void *out;                        /* n elements */
  const void *in[3];                /* n elements each; those that are none, the first */
  omc_dtype out_dtype, in_dtype[3]; /* such that omc_ew_takes() them */
  bool plain;                       /* all are of the class */
  bool spread;       /* in[1] and in[2] are the same number again and again, or none */
  const double *imm; /* OMC_EW_IMM of them */
  int64_t n;         /* whole vectors, at most OMC_EW_BLOCK; out may equal an input of its dtype */
  int64_t index;     /* row-major position of the first element in the iteration shape */
  uint64_t seed;     /* of the step */
} omc_ew_block;

typedef void omc_ew_body(const omc_ew_block *blk);
typedef omc_ew_body *omc_ew_fn;

/* The block functions of an op, by what they compute in; NULL: not compiled for it. */
struct omc_ew {
  omc_ew_fn fn[OMC_N_DTYPE][OMC_N_ISA];
};

/* In the variant part OMC_EW_KERNEL(Cast, blk) { ... } is a block function written out, and rows of
 * ops/elementwise.h are block functions whose result is an expression. Elsewhere a row, or
 * OMC_EW_TABLE(Cast, ANY), is the op's omc_cpu_op; FLOAT instead of ANY: not compiled for integers.
 */
#define OMC_EW_NAME_(name) OMC_PASTE3(omc_ew_, name, OMC_VARIANT)
#define OMC_EW_KERNEL(name, blk)  \
  omc_ew_body OMC_EW_NAME_(name); \
  void OMC_EW_NAME_(name)(const omc_ew_block *blk)

/* The block is copied first: for all the compiler knows, a store might change it. */
#define OMC_EW_BODY_(i, loops, is_plain)                                                     \
  {                                                                                          \
    const vacc_t i[OMC_EW_IMM] = {vset((acc_t)block_->imm[0]), vset((acc_t)block_->imm[1]),  \
                                  vset((acc_t)block_->imm[2]), vset((acc_t)block_->imm[3])}; \
    const omc_ew_block b_ = *block_;                                                         \
    const bool plain_ = is_plain;                                                            \
    (void)i;                                                                                 \
    loops                                                                                    \
  }
/* Blocks that are not plain have a function of their own, so that plain ones have all registers. */
#if defined(OMC_COMPUTE_F32)
#define OMC_EW_MIXED_(name, i, loops)                                                   \
  static __attribute__((noinline)) void omc_ew_mixed_##name(const omc_ew_block *block_) \
      OMC_EW_BODY_(i, loops, false)
#define OMC_EW_ROW_(name, i, loops) \
  OMC_EW_MIXED_(name, i, loops)     \
  OMC_EW_KERNEL(name, block_) {     \
    if (block_->plain)              \
      OMC_EW_BODY_(i, loops, true)  \
    else                            \
      omc_ew_mixed_##name(block_);  \
  }
#else
#define OMC_EW_ROW_(name, i, loops) OMC_EW_KERNEL(name, block_) OMC_EW_BODY_(i, loops, true)
#endif
#define OMC_EW_LOOP_(loads, expr)                                        \
  for (int64_t k_ = 0; k_ < b_.n; k_ += OMC_VL) {                        \
    loads;                                                               \
    vst_as(plain_ ? OMC_ACC : b_.out_dtype, b_.out, k_, (expr), OMC_VL); \
  }
#define OMC_EW_LOAD_(x, operand) \
  const vacc_t x = vld_as(plain_ ? OMC_ACC : b_.in_dtype[operand], b_.in[operand], k_, OMC_VL)
#define OMC_EW_LOAD1_(a) OMC_EW_LOAD_(a, 0)
#define OMC_EW_LOAD2_(a, b) \
  OMC_EW_LOAD1_(a);         \
  OMC_EW_LOAD_(b, 1)
#define OMC_EW_LOAD3_(a, b, c) \
  OMC_EW_LOAD2_(a, b);         \
  OMC_EW_LOAD_(c, 2)
/* Operands that may be left out are mostly numbers, which are loaded once. */
#define OMC_EW_LOAD_ONCE_(x, operand) \
  const vacc_t x = vld_as(b_.in_dtype[operand], b_.in[operand], 0, OMC_VL)
#define OMC_EW_LOOP_OPTIONAL_(a, b, c, expr)   \
  if (b_.spread) {                             \
    OMC_EW_LOAD_ONCE_(b, 1);                   \
    OMC_EW_LOAD_ONCE_(c, 2);                   \
    OMC_EW_LOOP_(OMC_EW_LOAD1_(a), expr)       \
  } else {                                     \
    OMC_EW_LOOP_(OMC_EW_LOAD3_(a, b, c), expr) \
  }

/* The variants of ops of these types. */
#define OMC_EW_ROWS_FLOAT computed_floats
#define OMC_EW_ROWS_INT computed_ints
#define OMC_EW_ROWS_ANY computed
#define OMC_EW_ROWS_FLOAT_TO_BOOL OMC_EW_ROWS_FLOAT
#define OMC_EW_ROWS_ANY_TO_BOOL OMC_EW_ROWS_ANY
#define OMC_EW_ROWS_BOOL OMC_EW_ROWS_ANY
#define OMC_EW_ROWS_CHOICE OMC_EW_ROWS_ANY

#define OMC_EW_DECLARE_(name) omc_ew_body name;
#define OMC_EW_TABLE(name, types)                                          \
  OMC_VARIANT_DECLARE(OMC_EW_ROWS_##types, OMC_EW_DECLARE_, omc_ew_##name) \
  static const omc_ew omc_ew_##name = {                                    \
      .fn = {OMC_VARIANT_TABLE(OMC_EW_ROWS_##types, omc_ew_##name)}};      \
  const omc_cpu_op omc_cpu_##name = {.ew = &omc_ew_##name};

/* What follows if the variant being compiled is one of a choice. */
#define OMC_ROW_OF_KIND_(which, kind, ...) OMC_ROW_PICKED_(which, kind, __VA_ARGS__)
#define OMC_ROW_PICKED_(which, kind, ...) OMC_ROWS_##which##_##kind(__VA_ARGS__)

#ifdef OMC_VARIANT
#define OMC_ROW_(name, types, i, loops) \
  OMC_ROW_OF_KIND_(OMC_EW_ROWS_##types, OMC_KIND, OMC_EW_ROW_(name, i, loops))
#else
#define OMC_ROW_(name, types, i, loops) OMC_EW_TABLE(name, types)
#endif
#define UNARY_WITH(name, types, i, a, kernel, g, da, node, ...) \
  OMC_ROW_(name, types, i, OMC_EW_LOOP_(OMC_EW_LOAD1_(a), kernel))
#define UNARY_NO_GRAD(name, types, a, kernel) \
  OMC_ROW_(name, types, i_, OMC_EW_LOOP_(OMC_EW_LOAD1_(a), kernel))
#define BINARY_WITH(name, types, flags, i, a, b, kernel, g, da, db, node, ...) \
  OMC_ROW_(name, types, i, OMC_EW_LOOP_(OMC_EW_LOAD2_(a, b), kernel))
#define BINARY_NO_GRAD_WITH(name, types, flags, i, a, b, kernel, node, ...) \
  OMC_ROW_(name, types, i, OMC_EW_LOOP_(OMC_EW_LOAD2_(a, b), kernel))
#define TERNARY(name, types, a, b, c, kernel, g, da, db, dc) \
  OMC_ROW_(name, types, i_, OMC_EW_LOOP_(OMC_EW_LOAD3_(a, b, c), kernel))
#define TERNARY_OPTIONAL_WITH(name, types, i, a, b, c, kernel, g, da, db, dc, node, ...) \
  OMC_ROW_(name, types, i, OMC_EW_LOOP_OPTIONAL_(a, b, c, kernel))

/* The function that computes in a dtype: best compiled ISA not above omc_cpu_isa(). NULL: none. */
omc_ew_fn omc_ew_pick(const omc_ew *ew, omc_dtype compute);

/* A decoded program, made at plan time from a node: elementwise or FusedElementwise. */
typedef struct omc_ew_program omc_ew_program;
omc_status omc_ew_compile(const omc_node *node, omc_arena *arena,
                          omc_ew_program **out) OMC_MUST_USE;

/* The kernel that runs a program; args->params points to a pointer to it. */
omc_status omc_ew_run(const omc_kernel_args *args) OMC_MUST_USE;

/* Scratch bytes of omc_ew_run. */
size_t omc_ew_workspace(const omc_ew_program *program, int threads);

#endif
