/* Programs of elementwise ops, made ready for blocks. */
#include "cpu/ops/program.h"

#ifndef OMC_VARIANT

#include <string.h>

#include "ops/op.h"

#define LONGEST_TILE 4096 /* numbers: a shorter period is laid out once per thread */
#define NEVER INT32_MAX

omc_ew_fn omc_ew_pick(const omc_ew *ew, omc_dtype compute) {
  omc_ew_fn best = NULL;
  OMC_PICK_ISA(best, ew->fn[compute])
  return best;
}

static omc_status refuse(const omc_node *node, const char *why) {
  OMC_NODE_FAIL(node, EUNSUPPORTED, "%s", why);
}

/* Chooses the access and returns the numbers of scratch it wants. */
static int64_t plan_input(omc_ew_input *in, const omc_type *type, const omc_shape *shape) {
  in->rank = omc_join_axes(&type->shape, shape, in->dims, in->strides);
  const int64_t numel = omc_shape_numel(shape);
  if (omc_shape_numel(&type->shape) == numel) {
    in->kind = in->taken ? OMC_EW_DIRECT : OMC_EW_DENSE;
    return OMC_EW_BLOCK;
  }
  if (omc_shape_numel(&type->shape) == 1) {
    in->kind = OMC_EW_SCALAR;
    return OMC_EW_BLOCK;
  }
  in->period = in->dims[in->rank - 1];
  const bool periodic = in->rank == 2 && in->strides[1] == 1 && in->strides[0] == 0;
  in->kind =
      periodic && in->period <= LONGEST_TILE && numel >= 4 * in->period ? OMC_EW_TILE : OMC_EW_RUNS;
  return in->kind == OMC_EW_TILE ? omc_whole_vectors(in->period) + OMC_EW_BLOCK : OMC_EW_BLOCK;
}

/* Notes which instruction reads each operand last; outputs are read at the end. */
static void find_last_uses(const omc_ew_program *p, int32_t *last) {
  for (int32_t i = 0; i < p->n_in + p->n_code; i++) last[i] = -1;
  for (int32_t k = 0; k < p->n_code; k++)
    for (int a = 0; a < 3 && p->code[k].fn; a++)
      if (p->code[k].args[a] >= 0) last[p->code[k].args[a]] = k;
  for (int32_t i = 0; i < p->n_out; i++) last[p->out[i].operand] = NEVER;
  for (int32_t i = 0; i < p->n_in; i++) p->in[i].last_use = last[i];
}

/* Whether instruction k may write where the result of an earlier one lies: that has been read, or
 * is read by k itself and at least as wide as what k writes. */
static bool may_write_over(const omc_ew_program *p, const int32_t *last, int32_t earlier,
                           int32_t k) {
  const int32_t read = last[p->n_in + earlier];
  return read < k || (read == k && p->code[earlier].dtype == p->convert->dtype);
}

/* Gives every result a block of scratch. Returns how many blocks there are. */
static int32_t place_results(omc_ew_program *p, const int32_t *last, size_t base, size_t block) {
  int32_t holder[OMC_EW_MAX_INSTRUCTIONS], n = 0; /* the instruction whose result a block holds */
  for (int32_t k = 0; k < p->n_code; k++) {
    if (!p->code[k].fn) continue;
    int32_t b = 0;
    while (b < n && !may_write_over(p, last, holder[b], k)) b++;
    if (b == n) n++;
    holder[b] = k;
    p->code[k].scratch = base + (size_t)b * block;
  }
  return n;
}

static void take_code(const omc_program *from, omc_ew_program *p) {
  for (int32_t k = 0; k < p->n_code; k++) {
    const omc_instruction *code = &from->code[k];
    p->code[k].op = code->op, p->code[k].divides = code->divides;
    memcpy(p->code[k].args, code->args, sizeof code->args);
    memcpy(p->code[k].imm, code->imm, sizeof code->imm);
  }
  for (int32_t i = 0; i < p->n_out; i++)
    p->out[i] = (omc_ew_output){.dtype = from->out[i].dtype, .operand = from->out[i].operand};
}

static omc_status pick_functions(const omc_node *node, omc_dtype cls, omc_ew_program *p) {
  for (int32_t k = 0; k < p->n_code; k++) {
    p->code[k].fn = omc_ew_pick(omc_cpu_op_get(p->code[k].op)->ew, cls);
    if (!p->code[k].fn) return refuse(node, "an op does not compute in the class of its dtypes");
  }
  return OMC_OK;
}

/* A conversion to the class itself: its operand is of numbers of the class already. */
static bool is_identity(const omc_ew_program *p, const omc_ew_instruction *code) {
  return (omc_dtype)code->imm[0] == p->convert->dtype && omc_dtype_is_float(p->convert->dtype);
}

static void replace_operand(omc_ew_program *p, int32_t from, int32_t to) {
  for (int32_t k = 0; k < p->n_code; k++)
    for (int a = 0; a < 3; a++)
      if (p->code[k].args[a] == from) p->code[k].args[a] = to;
  for (int32_t i = 0; i < p->n_out; i++)
    if (p->out[i].operand == from) p->out[i].operand = to;
}

/* Leaves instructions that only convert to the stores of their results, if nothing else reads
 * these, or to nobody, if they change nothing. An input is stored only where no other output could
 * have been written over it, and no instruction can convert it in one go. */
static void drop_conversions(omc_ew_program *p) {
  for (int32_t k = 0; k < p->n_code; k++) {
    const int32_t result = p->n_in + k, operand = p->code[k].args[0];
    if (!(omc_op_get(p->code[k].op)->flags & OMC_OP_CONVERTS)) continue;
    const bool identity = is_identity(p, &p->code[k]);
    const omc_dtype to = (omc_dtype)p->code[k].imm[0];
    const bool takes = omc_ew_takes(p->convert->dtype, to);
    bool needed = false;
    for (int32_t i = 0; i < p->n_out; i++)
      needed |= p->out[i].operand == result &&
                (p->out[i].dtype != to || (operand < p->n_in && (p->n_out > 1 || takes)));
    for (int32_t j = k + 1; j < p->n_code; j++)
      for (int a = 0; a < 3; a++) {
        int32_t *const read = &p->code[j].args[a];
        if (*read == result && identity) *read = operand;
        needed |= *read == result;
      }
    if (needed) continue;
    p->code[k].fn = NULL;
    for (int32_t i = 0; i < p->n_out; i++)
      if (p->out[i].operand == result) p->out[i].operand = operand;
  }
}

/* What an instruction rounds to 16 bits, and nothing else; OMC_N_DTYPE: it is none of these. */
static omc_dtype rounded_to(const omc_ew_program *p, const omc_ew_instruction *code) {
  if (!code->fn || !(omc_op_get(code->op)->flags & OMC_OP_CONVERTS)) return OMC_N_DTYPE;
  const omc_dtype to = (omc_dtype)code->imm[0], cls = p->convert->dtype;
  return to != cls && omc_ew_takes(cls, to) ? to : OMC_N_DTYPE;
}

/* What a result is kept in: 16 bits if all who read it have it rounded to them. */
static omc_dtype kept_in(const omc_ew_program *p, int32_t k) {
  const omc_dtype own = rounded_to(p, &p->code[k]), cls = p->convert->dtype;
  omc_dtype all = own;
  for (int32_t i = 0; i < p->n_out; i++) {
    if (p->out[i].operand != p->n_in + k) continue;
    if (all == OMC_N_DTYPE) all = p->out[i].dtype;
    if (all != p->out[i].dtype) return cls;
  }
  for (int32_t j = k + 1; j < p->n_code && own == OMC_N_DTYPE; j++)
    for (int a = 0; a < 3; a++) {
      if (!p->code[j].fn || p->code[j].args[a] != p->n_in + k) continue;
      const omc_dtype to = rounded_to(p, &p->code[j]);
      if (all == OMC_N_DTYPE) all = to;
      if (to == OMC_N_DTYPE || all != to || kept_in(p, j) != to) return cls;
    }
  return omc_ew_takes(cls, all) ? all : cls;
}

/* Whether all that instruction j does is to round result k to the 16 bits that it is kept in. */
static bool rounds_in_vain(const omc_ew_program *p, int32_t j, int32_t k) {
  const omc_dtype dtype = p->code[k].dtype;
  return p->code[j].args[0] == p->n_in + k && rounded_to(p, &p->code[j]) == dtype &&
         kept_in(p, j) == dtype;
}

/* Results that are rounded before they are read are kept so, by the store of their block; the
 * instructions that would round them are left out. */
static void keep_rounded(omc_ew_program *p) {
  for (int32_t k = 0; k < p->n_code; k++) {
    p->code[k].dtype = kept_in(p, k);
    p->code[k].bytes = omc_dtype_size(p->code[k].dtype);
    for (int32_t j = k + 1; j < p->n_code; j++) {
      if (!rounds_in_vain(p, j, k)) continue;
      p->code[j].fn = NULL;
      replace_operand(p, p->n_in + j, p->n_in + k);
    }
  }
}

/* The first output that holds an instruction's result as it is may take it straight. */
static void claim_outputs(omc_ew_program *p) {
  for (int32_t i = 0; i < p->n_out; i++) {
    omc_ew_output *out = &p->out[i];
    out->claims = out->operand >= p->n_in && out->dtype == p->code[out->operand - p->n_in].dtype;
    for (int32_t j = 0; j < i; j++)
      if (p->out[j].operand == out->operand) out->claims = false;
  }
}

static bool is_spread(const omc_ew_program *p, int32_t operand) {
  return operand < 0 || (operand < p->n_in && p->in[operand].kind == OMC_EW_SCALAR);
}

/* Outputs are stored from numbers of the class, so that an input which is one becomes such. */
static bool is_taken(const omc_ew_program *p, int32_t input, omc_dtype dtype) {
  bool stored = false;
  for (int32_t i = 0; i < p->n_out; i++) stored |= p->out[i].operand == input;
  return stored ? dtype == p->convert->dtype : omc_ew_takes(p->convert->dtype, dtype);
}

/* Lays out a thread's scratch: a block or tile for each input, then blocks for results. */
static void place(const omc_node *node, const omc_shape *shape, omc_ew_program *p) {
  int32_t last[OMC_EW_MAX_INPUTS + OMC_EW_MAX_INSTRUCTIONS];
  size_t used = 0;
  for (int32_t i = 0; i < p->n_in; i++) {
    const omc_value *v = omc_in(node, (uint32_t)i);
    p->in[i].kind = OMC_EW_ABSENT;
    p->in[i].scratch = used;
    if (!v) continue;
    p->in[i].dtype = v->type.dtype;
    p->in[i].bytes = omc_dtype_size(v->type.dtype);
    p->in[i].taken = is_taken(p, i, v->type.dtype);
    used += (size_t)plan_input(&p->in[i], &v->type, shape) * p->convert->size;
  }
  for (int32_t k = 0; k < p->n_code; k++) {
    int32_t *operands = p->code[k].args;
    p->code[k].spread = is_spread(p, operands[1]) && is_spread(p, operands[2]);
    for (int a = 1; a < 3; a++)
      if (operands[a] < 0) operands[a] = operands[0];
  }
  find_last_uses(p, last);
  const size_t block = OMC_EW_BLOCK * p->convert->size;
  p->scratch_bytes = used + (size_t)place_results(p, last, used, block) * block;
}

omc_status omc_ew_compile(const omc_node *node, omc_arena *arena, omc_ew_program **out) {
  omc_program program;
  OMC_TRY(omc_program_of(node, arena, &program));
  omc_ew_program *p = OMC_NEW(arena, omc_ew_program);
  if (!p) return omc_no_memory(node);
  p->convert = omc_convert_pick(program.cls);
  p->numel = omc_shape_numel(&program.shape);
  p->n_in = (int32_t)program.n_in, p->n_code = (int32_t)program.n_code;
  p->n_out = (int32_t)program.n_out;
  p->in = OMC_NEW_ARRAY(arena, omc_ew_input, program.n_in);
  p->code = OMC_NEW_ARRAY(arena, omc_ew_instruction, program.n_code);
  p->out = OMC_NEW_ARRAY(arena, omc_ew_output, program.n_out);
  if (!p->in || !p->code || !p->out) return omc_no_memory(node);

  take_code(&program, p);
  OMC_TRY(pick_functions(node, program.cls, p));
  drop_conversions(p);
  keep_rounded(p);
  claim_outputs(p);
  place(node, &program.shape, p);
  *out = p;
  return OMC_OK;
}

size_t omc_ew_workspace(const omc_ew_program *program, int threads) {
  return program->scratch_bytes * (size_t)threads;
}

#endif
