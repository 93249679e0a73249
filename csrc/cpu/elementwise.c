#include "cpu/elementwise.h"

#include <stdatomic.h>
#include <string.h>

#include "cpu/convert.h"
#include "cpu/parallel.h"
#include "ops/op.h"

#define GRAIN 32         /* blocks: what is worth a thread */
#define LONGEST_TILE 4096 /* reals: a shorter period is laid out once per thread */
#define NEVER INT32_MAX

/* How a block's part of an input is brought before the block functions. */
typedef enum {
  DIRECT, /* dense and of the class's dtype: read where it lies */
  DENSE,  /* as many elements as the iteration shape: converted */
  SCALAR, /* one element: spread once per thread */
  TILE,   /* repeats with a short period: laid out once per thread, one block longer */
  RUNS    /* anything else: run by run along the last axis */
} access_kind;

typedef struct input_plan {
  access_kind kind;
  omc_dtype dtype;
  int32_t last_use;  /* instruction */
  int32_t rank;      /* RUNS: axes left after those that lie in a row are joined */
  int64_t dims[OMC_MAX_RANK], strides[OMC_MAX_RANK]; /* elements; the last stride is 0 or 1 */
  int64_t period;    /* TILE */
  size_t scratch;    /* bytes from the start of a thread's scratch */
} input_plan;

typedef struct instruction {
  omc_ew_fn fn;
  int32_t args[3];   /* operands; -1: none */
  size_t scratch;    /* where its result goes if not straight to an output */
  double imm[OMC_EW_IMM];
} instruction;

typedef struct output_plan {
  omc_dtype dtype;
  int32_t instruction;
  bool claims; /* may take the result straight: no other output does */
} output_plan;

struct omc_ew_program {
  const omc_convert *convert;
  int64_t numel; /* of the iteration shape */
  int32_t n_in, n_code, n_out;
  size_t scratch_bytes; /* per thread */
  input_plan *in;
  instruction *code;
  output_plan *out;
};

/* ---- classes ---- */

omc_class omc_ew_dtype_class(omc_dtype dtype) {
  if (dtype == OMC_F64) return OMC_CLASS_F64;
  return omc_dtype_is_float(dtype) ? OMC_CLASS_F32 : OMC_CLASS_I64;
}

static omc_class wider_class(omc_class a, const omc_value *v) {
  const omc_class b = v ? omc_ew_dtype_class(v->type.dtype) : OMC_CLASS_I64;
  if (a == OMC_CLASS_F64 || b == OMC_CLASS_F64) return OMC_CLASS_F64;
  return a == OMC_CLASS_F32 || b == OMC_CLASS_F32 ? OMC_CLASS_F32 : OMC_CLASS_I64;
}

omc_class omc_ew_class(const omc_node *node) {
  omc_class cls = OMC_CLASS_I64;
  for (uint32_t i = 0; i < node->n_in; i++) cls = wider_class(cls, omc_in(node, i));
  for (uint32_t k = 0; k < node->n_out; k++) cls = wider_class(cls, omc_out(node, k));
  return cls;
}

omc_ew_fn omc_ew_pick(const omc_ew *ew, omc_class cls) {
  omc_ew_fn best = NULL;
  for (int isa = 0; isa <= (int)omc_cpu_isa(); isa++)
    if (ew->fn[cls][isa]) best = ew->fn[cls][isa];
  return best;
}

#define ROWS(OP)      \
  OP(F32, f32, BASE, base) \
  OP(F64, f64, BASE, base) \
  OP(I64, i64, BASE, base)
#if defined(__x86_64__)
#define ROWS_X86(OP) OP(F32, f32, AVX2, avx2) OP(F32, f32, AVX512, avx512)
#else
#define ROWS_X86(OP)
#endif
#define DECLARE(cls, cls_text, isa, isa_text) extern const omc_convert omc_convert_##cls_text##_##isa_text;
#define ENTRY(cls, cls_text, isa, isa_text) \
  [OMC_CLASS_##cls][OMC_ISA_##isa] = &omc_convert_##cls_text##_##isa_text,
ROWS(DECLARE)
ROWS_X86(DECLARE)

const omc_convert *omc_convert_pick(omc_class cls) {
  static const omc_convert *const table[OMC_N_CLASS][OMC_N_ISA] = {ROWS(ENTRY) ROWS_X86(ENTRY)};
  const omc_convert *best = NULL;
  for (int isa = 0; isa <= (int)omc_cpu_isa(); isa++)
    if (table[cls][isa]) best = table[cls][isa];
  return best;
}
