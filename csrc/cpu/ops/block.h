/* Elementwise ops as functions of blocks of elements, and the interpreter that runs programs of
 * them (ops/program.h) block by block inside L1. */
#ifndef OMC_CPU_OPS_BLOCK_H
#define OMC_CPU_OPS_BLOCK_H

#include "cpu/kernel.h"
#include "ops/program.h"
#define OMC_ROWS_ARE_KERNELS
#include "ops/elementwise.h"

/* Elements a block function works on at most, a multiple of any OMC_VL. */
#define OMC_EW_BLOCK 512

typedef struct omc_ew_block {
  void *out;         /* n acc_t */
  const void *in[3]; /* n acc_t each; those that are none, the first */
  const double *imm; /* OMC_EW_IMM of them */
  int64_t n;         /* whole vectors, at most OMC_EW_BLOCK; out may equal an input */
  int64_t index;     /* row-major position of the first element in the iteration shape */
  uint64_t seed;     /* of the step */
  bool spread;       /* in[1] and in[2] are the same number again and again, or none */
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
/* Pointers are taken out of the block first: for all the compiler knows, a store might change them.
 */
#define OMC_EW_ROW_(name, i, loops)                                                          \
  OMC_EW_KERNEL(name, block_) {                                                              \
    const vacc_t i[OMC_EW_IMM] = {vset((acc_t)block_->imm[0]), vset((acc_t)block_->imm[1]),  \
                                  vset((acc_t)block_->imm[2]), vset((acc_t)block_->imm[3])}; \
    const acc_t *const in_[] = {block_->in[0], block_->in[1], block_->in[2]};                \
    acc_t *const out_ = block_->out;                                                         \
    const int64_t n_ = block_->n;                                                            \
    (void)i;                                                                                 \
    loops                                                                                    \
  }
#define OMC_EW_LOOP_(loads, expr)               \
  for (int64_t k_ = 0; k_ < n_; k_ += OMC_VL) { \
    loads;                                      \
    vstr(out_ + k_, (expr));                    \
  }
#define OMC_EW_LOAD_(x, operand, at) const vacc_t x = vldr(in_[operand] + (at))
#define OMC_EW_LOAD1_(a) OMC_EW_LOAD_(a, 0, k_)
#define OMC_EW_LOAD2_(a, b) \
  OMC_EW_LOAD1_(a);         \
  OMC_EW_LOAD_(b, 1, k_)
#define OMC_EW_LOAD3_(a, b, c) \
  OMC_EW_LOAD2_(a, b);         \
  OMC_EW_LOAD_(c, 2, k_)
/* Operands that may be left out are mostly numbers, which are loaded once. */
#define OMC_EW_LOOP_OPTIONAL_(a, b, c, expr)   \
  if (block_->spread) {                        \
    OMC_EW_LOAD_(b, 1, 0);                     \
    OMC_EW_LOAD_(c, 2, 0);                     \
    OMC_EW_LOOP_(OMC_EW_LOAD1_(a), expr)       \
  } else {                                     \
    OMC_EW_LOOP_(OMC_EW_LOAD3_(a, b, c), expr) \
  }

/* The variants of ops of these types. */
#define OMC_EW_ROWS_FLOAT computed_floats
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
