/* The block interpreter: programs of elementwise ops (ops/program.h) run over blocks that stay in
 * L1. */
#ifndef OMC_CPU_ELEMENTWISE_H
#define OMC_CPU_ELEMENTWISE_H

#include "cpu/kernel.h"
#include "ops/program.h"

/* Elements a block function works on at most, a multiple of any OMC_VL. */
#define OMC_EW_BLOCK 512

typedef struct omc_ew_block {
  void *out;         /* n reals */
  const void *in[3]; /* n reals each, NULL: none */
  const double *imm; /* OMC_EW_IMM of them */
  int64_t n;         /* whole vectors, at most OMC_EW_BLOCK; out may equal an input */
  int64_t index;     /* row-major position of the first element in the iteration shape */
  uint64_t seed;     /* of the step */
} omc_ew_block;

typedef void omc_ew_body(const omc_ew_block *blk);
typedef omc_ew_body *omc_ew_fn;

/* The block functions of an op, by what they compute in; NULL: not compiled for it. */
struct omc_ew {
  omc_ew_fn fn[OMC_N_DTYPE][OMC_N_ISA];
};

/* In the variant part OMC_EW_KERNEL(Cast) { ... blk ... } is a block function written out, and
 * OMC_EW1, 2, 3 one whose result is an expression: `a`, `b`, `c` are the operands, `i0`..`i3` the
 * immediates, all vacc_t. Elsewhere OMC_EW_TABLE(Cast, ANY) is the op's omc_cpu_op; FLOAT instead
 * of ANY: not compiled for integers. Most ops are rows, see cpu/elementwise_rows.h. */
#ifdef OMC_VARIANT
#define OMC_EW_NAME_(name) OMC_PASTE3(omc_ew_, name, OMC_VARIANT)
#define OMC_EW_KERNEL(name)       \
  omc_ew_body OMC_EW_NAME_(name); \
  void OMC_EW_NAME_(name)(const omc_ew_block *blk)
#define OMC_EW_BODY_(name, loads, expr)                                        \
  OMC_EW_KERNEL(name) {                                                        \
    const vacc_t i0 = vset((acc_t)blk->imm[0]), i1 = vset((acc_t)blk->imm[1]), \
                 i2 = vset((acc_t)blk->imm[2]), i3 = vset((acc_t)blk->imm[3]); \
    (void)i0, (void)i1, (void)i2, (void)i3;                                    \
    for (int64_t k = 0; k < blk->n; k += OMC_VL) {                             \
      loads;                                                                   \
      vstr((acc_t *)blk->out + k, (expr));                                     \
    }                                                                          \
  }
#define OMC_EW_LD_(x, i) const vacc_t x = vldr((const acc_t *)blk->in[i] + k)
#define OMC_EW1(name, expr) OMC_EW_BODY_(name, OMC_EW_LD_(a, 0), expr)
#define OMC_EW2(name, expr) OMC_EW_BODY_(name, OMC_EW_LD_(a, 0); OMC_EW_LD_(b, 1), expr)
#define OMC_EW3(name, expr) \
  OMC_EW_BODY_(name, OMC_EW_LD_(a, 0); OMC_EW_LD_(b, 1); OMC_EW_LD_(c, 2), expr)
#endif

/* The variants of ops of these types. */
#define OMC_EW_ROWS_FLOAT computed_floats
#define OMC_EW_ROWS_ANY computed

#define OMC_EW_DECLARE_(name) omc_ew_body name;
#define OMC_EW_TABLE(name, types)                                          \
  OMC_VARIANT_DECLARE(OMC_EW_ROWS_##types, OMC_EW_DECLARE_, omc_ew_##name) \
  static const omc_ew omc_ew_##name = {                                    \
      .fn = {OMC_VARIANT_TABLE(OMC_EW_ROWS_##types, omc_ew_##name)}};      \
  const omc_cpu_op omc_cpu_##name = {.ew = &omc_ew_##name};

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
