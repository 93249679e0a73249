/* The block interpreter: elementwise ops as short programs over blocks that stay in L1.
 *
 * A program computes in one class (f32, f64 or i64) over one iteration shape, the broadcast shape
 * of its inputs. Inputs have any dtype (converted on load); outputs have the iteration shape and
 * any dtype (converted on store: to bool by != 0, to integers by truncation). A single elementwise
 * node is a program of one instruction; FusedElementwise carries its program in attributes:
 *   ops=["Add", "Gelu"]  args=[0, 1, -1,  2, -1, -1]  imm=[4 floats per instruction]  outs=[3]
 *   dtypes=[1]  class="f32"
 * args: three operands per instruction; 0 .. n_in-1 are the inputs, n_in + k is the result of
 * instruction k, -1 is none. imm: as the op's omc_ew.imm decodes them. outs: the operand, an
 * instruction's result, that each output holds; dtypes: that output's ONNX dtype code. class:
 * what every instruction computes in, whatever the dtypes of inputs and outputs. Whoever makes such
 * a node sees to it that it is the omc_ew_class of each of the nodes that became instructions, that
 * a result which another instruction reads is one that the class holds exactly, and that the
 * operand of a random op has the iteration shape. */
#ifndef OMC_CPU_ELEMENTWISE_H
#define OMC_CPU_ELEMENTWISE_H

#include "cpu/kernel.h"
#include "graph/graph.h"

/* Elements a block function works on at most, a multiple of any OMC_VL. */
#define OMC_EW_BLOCK 512
#define OMC_EW_IMM 4
#define OMC_EW_MAX_INSTRUCTIONS 48
#define OMC_EW_MAX_INPUTS 24
#define OMC_EW_MAX_OUTPUTS 12

typedef struct omc_ew_block {
  void *out;         /* n reals */
  const void *in[3]; /* n reals each, NULL: none */
  const double *imm; /* OMC_EW_IMM of them */
  int64_t n;         /* a multiple of 16, at most OMC_EW_BLOCK; out may equal an input */
  int64_t index;     /* row-major position of the first element in the iteration shape */
  uint64_t seed;     /* of the step */
} omc_ew_block;

typedef void omc_ew_body(const omc_ew_block *blk);
typedef omc_ew_body *omc_ew_fn;

/* An op's elementwise part. imm() decodes attributes into the zeroed immediates. `converts`: all it
 * does is done again when its result is stored, so it need not run if nothing else reads it. */
typedef struct omc_ew {
  omc_ew_fn fn[OMC_N_CLASS][OMC_N_ISA];
  omc_status (*imm)(const omc_node *node, double *imm);
  bool converts;
} omc_ew;

/* In the variant part OMC_EW_KERNEL(Cast) { ... blk ... } is a block function written out, and
 * OMC_EW1, 2, 3 one whose result is an expression: `a`, `b`, `c` are the operands, `i0`..`i3` the
 * immediates, all vreal. In the records part OMC_EW_TABLE(Cast, ANY, .imm = cast_imm) defines
 * `omc_ew_Cast`; FLOAT instead of ANY: not compiled for integers. Most ops are rows of
 * ops/elementwise.h, which does both. */
#ifdef OMC_VARIANT
#define OMC_EW_NAME_(name) OMC_PASTE3(omc_ew_, name, OMC_VARIANT)
#define OMC_EW_KERNEL(name)       \
  omc_ew_body OMC_EW_NAME_(name); \
  void OMC_EW_NAME_(name)(const omc_ew_block *blk)
#define OMC_EW_BODY_(name, loads, expr)                                     \
  OMC_EW_KERNEL(name) {                                                     \
    const vreal i0 = vset((real)blk->imm[0]), i1 = vset((real)blk->imm[1]), \
                i2 = vset((real)blk->imm[2]), i3 = vset((real)blk->imm[3]); \
    (void)i0, (void)i1, (void)i2, (void)i3;                                 \
    for (int64_t k = 0; k < blk->n; k += OMC_VL) {                          \
      loads;                                                                \
      vstr((real *)blk->out + k, (expr));                                   \
    }                                                                       \
  }
#define OMC_EW_LD_(x, i) const vreal x = vldr((const real *)blk->in[i] + k)
#define OMC_EW1(name, expr) OMC_EW_BODY_(name, OMC_EW_LD_(a, 0), expr)
#define OMC_EW2(name, expr) OMC_EW_BODY_(name, OMC_EW_LD_(a, 0); OMC_EW_LD_(b, 1), expr)
#define OMC_EW3(name, expr) \
  OMC_EW_BODY_(name, OMC_EW_LD_(a, 0); OMC_EW_LD_(b, 1); OMC_EW_LD_(c, 2), expr)
#endif

/* OMC_EW_INT_TYPES(x): x if ops of these types compute in integers, else nothing. */
#define OMC_EW_INT_FLOAT(...)
#define OMC_EW_INT_ANY(...) __VA_ARGS__

#if defined(__x86_64__)
#define OMC_EW_ISAS_(name, cls) \
  {omc_ew_##name##_##cls##_base, omc_ew_##name##_##cls##_avx2, omc_ew_##name##_##cls##_avx512}
#else
#define OMC_EW_ISAS_(name, cls) {omc_ew_##name##_##cls##_base}
#endif
#define OMC_EW_TABLE(name, types, ...)                                                        \
  omc_ew_body omc_ew_##name##_f32_base, omc_ew_##name##_f32_avx2, omc_ew_##name##_f32_avx512, \
      omc_ew_##name##_f64_base, omc_ew_##name##_f64_avx2, omc_ew_##name##_f64_avx512,         \
      omc_ew_##name##_i64_base;                                                               \
  static const omc_ew omc_ew_##name = {                                                       \
      .fn = {[OMC_CLASS_F32] = OMC_EW_ISAS_(name, f32),                                       \
             [OMC_CLASS_F64] = OMC_EW_ISAS_(name, f64),                                       \
             [OMC_CLASS_I64] = {OMC_EW_INT_##types(omc_ew_##name##_i64_base, ) NULL}},        \
      __VA_ARGS__};

/* The class that serves a dtype: f64, f32 for the other floats, i64 for integers and bool. */
omc_class omc_ew_dtype_class(omc_dtype dtype);

/* The function for a class: best compiled ISA not above omc_cpu_isa(). NULL: none. */
omc_ew_fn omc_ew_pick(const omc_ew *ew, omc_class cls);

/* The class a single elementwise node computes in: f64 if an input or output is f64, else f32 if
 * one is any other float, else i64. */
omc_class omc_ew_class(const omc_node *node);

/* The name of a class in a fused node's attribute. */
const char *omc_ew_class_name(omc_class cls);

/* A decoded program, made at plan time from a node: elementwise or FusedElementwise. */
typedef struct omc_ew_program omc_ew_program;
omc_status omc_ew_compile(const omc_node *node, omc_arena *arena,
                          omc_ew_program **out) OMC_MUST_USE;

/* The kernel that runs a program; args->params points to a pointer to it. */
omc_status omc_ew_run(const omc_kernel_args *args) OMC_MUST_USE;

/* Scratch bytes of omc_ew_run. */
size_t omc_ew_workspace(const omc_ew_program *program, int threads);

#endif
