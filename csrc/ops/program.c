#include "ops/program.h"

#include <math.h>
#include <string.h>

#include "ops/infer.h"
#include "ops/op.h"

static omc_status malformed(const omc_node *node, const char *attribute) {
  OMC_NODE_FAIL(node, EINVALID, "malformed attribute %s", attribute);
}

static omc_status decode_single(const omc_node *node, omc_program *p) {
  omc_instruction *code = &p->code[0];
  code->op = node->op;
  for (int32_t a = 0; a < 3; a++)
    code->args[a] = a < (int32_t)p->n_in && omc_in(node, (uint32_t)a) ? a : -1;
  OMC_TRY(omc_op_get(node->op)->imm(node, code->imm));
  p->out[0] =
      (omc_program_output){.dtype = omc_out(node, 0)->type.dtype, .operand = (int32_t)p->n_in};
  return OMC_OK;
}

/* An instruction of a fused node: the operands that the op has as inputs, all known before it. */
static bool decode_instruction(const char *name, const int64_t *args, const double *imm,
                               int32_t known, omc_instruction *code) {
  omc_op_id id;
  if (!omc_op_from_name(name, strlen(name), &id) || !omc_op_get(id)->imm) return false;
  code->op = id;
  memcpy(code->imm, imm, sizeof code->imm);
  for (int32_t a = 0; a < 3; a++) {
    const bool needed = a < omc_op_get(id)->min_in, taken = a < omc_op_get(id)->max_in;
    if ((args[a] < 0 && needed) || (args[a] >= 0 && !taken) || args[a] >= known) return false;
    code->args[a] = args[a] < 0 ? -1 : (int32_t)args[a];
  }
  return true;
}

static bool is_whole(double x, double most) { return x >= 0 && x <= most && x == floor(x); }

/* Whether immediates are what kernels take them for: a dtype, and words to draw by. */
static bool are_immediates(const omc_instruction *code) {
  const uint32_t flags = omc_op_get(code->op)->flags;
  if (flags & OMC_OP_CONVERTS) return is_whole(code->imm[0], OMC_N_DTYPE - 1);
  if (flags & OMC_OP_RANDOM)
    return is_whole(code->imm[0], UINT32_MAX) && is_whole(code->imm[2], UINT32_MAX);
  return true;
}

static omc_status decode_fused(const omc_node *node, omc_program *p) {
  uint32_t n_args, n_outs, n_dtypes;
  const char *const *ops = omc_node_attr(node, "ops")->v.ss;
  const omc_attr *imm = omc_node_attr(node, "imm");
  const int64_t *args = omc_node_ints(node, "args", &n_args);
  const int64_t *outs = omc_node_ints(node, "outs", &n_outs);
  const int64_t *dtypes = omc_node_ints(node, "dtypes", &n_dtypes);
  if (n_args != 3 * p->n_code) return malformed(node, "args");
  if (!imm || imm->kind != OMC_ATTR_FLOATS || imm->n != OMC_EW_IMM * p->n_code)
    return malformed(node, "imm");
  if (n_outs != node->n_out) return malformed(node, "outs");
  if (n_dtypes != node->n_out) return malformed(node, "dtypes");
  for (uint32_t k = 0; k < p->n_code; k++) {
    if (!decode_instruction(ops[k], args + 3 * k, imm->v.fs + OMC_EW_IMM * k,
                            (int32_t)(p->n_in + k), &p->code[k]))
      return malformed(node, "ops or args");
    if (!are_immediates(&p->code[k])) return malformed(node, "imm");
  }
  for (uint32_t i = 0; i < n_outs; i++) {
    if (outs[i] < p->n_in || outs[i] >= p->n_in + p->n_code) return malformed(node, "outs");
    if (!omc_dtype_from_onnx(dtypes[i], &p->out[i].dtype)) return malformed(node, "dtypes");
    p->out[i].operand = (int32_t)outs[i];
  }
  return OMC_OK;
}

static omc_status iteration_shape(const omc_node *node, omc_shape *out) {
  for (uint32_t i = 0; i < omc_op_get(node->op)->min_in; i++)
    if (!omc_in(node, i)) OMC_NODE_FAIL(node, EUNSUPPORTED, "an input is left out");
  return omc_broadcast_inputs(node, out);
}

omc_status omc_program_of(const omc_node *node, omc_arena *arena, omc_program *out) {
  const bool fused = !omc_op_get(node->op)->imm;
  const omc_attr *ops = omc_node_attr(node, "ops");
  if (fused && (!ops || ops->kind != OMC_ATTR_STRINGS || ops->n == 0))
    return malformed(node, "ops");
  const uint32_t n_code = fused ? ops->n : 1;
  if (n_code > OMC_EW_MAX_INSTRUCTIONS || node->n_in > OMC_EW_MAX_INPUTS ||
      node->n_out > OMC_EW_MAX_OUTPUTS)
    OMC_NODE_FAIL(node, EUNSUPPORTED, "more instructions, inputs or outputs than a program holds");
  *out = (omc_program){.n_in = node->n_in, .n_code = n_code, .n_out = node->n_out};
  OMC_TRY(iteration_shape(node, &out->shape));
  out->cls = fused ? omc_ew_fused_class(node) : omc_ew_computed_in(omc_ew_class(node));
  if (out->cls == OMC_N_DTYPE) return malformed(node, "class");
  out->code = OMC_NEW_ARRAY(arena, omc_instruction, n_code);
  out->out = OMC_NEW_ARRAY(arena, omc_program_output, node->n_out);
  if (!out->code || !out->out) OMC_NODE_FAIL(node, ENOMEM, "no memory for its program");
  OMC_TRY(fused ? decode_fused(node, out) : decode_single(node, out));
  for (uint32_t k = 0; k < n_code; k++)
    out->code[k].divides =
        out->cls == OMC_I64 && (omc_op_get(out->code[k].op)->flags & OMC_OP_DIVIDES) != 0;
  return OMC_OK;
}

int32_t omc_join_axes(const omc_shape *from, const omc_shape *to, int64_t *dims, int64_t *strides) {
  int64_t all[OMC_MAX_RANK];
  int32_t rank = 0;
  omc_broadcast_strides(from, to, all);
  for (int32_t i = 0; i < to->rank; i++) {
    if (to->dims[i] == 1) continue;
    const int32_t last = rank - 1;
    if (last >= 0 && strides[last] == all[i] * to->dims[i]) {
      dims[last] *= to->dims[i];
      strides[last] = all[i];
    } else {
      dims[rank] = to->dims[i];
      strides[rank++] = all[i];
    }
  }
  return rank;
}
