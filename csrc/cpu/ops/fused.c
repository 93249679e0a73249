/* The block interpreter, and FusedElementwise: whatever its class, the interpreter runs it. */
#include "cpu/ops/block.h"

#ifndef OMC_VARIANT

#include <stdatomic.h>
#include <string.h>

#include "cpu/convert.h"
#include "cpu/parallel.h"
#include "ops/op.h"

#define LONGEST_TILE 4096 /* numbers: a shorter period is laid out once per thread */
#define NEVER INT32_MAX

/* How a block's part of an input is brought before the block functions. */
typedef enum {
  DIRECT, /* dense and of the class's dtype: read where it lies */
  DENSE,  /* as many elements as the iteration shape: converted */
  TILE,   /* repeats with a short period: laid out once per thread, one block longer */
  RUNS,   /* anything else but those below: run by run along the last axis */
  SCALAR, /* one element: spread once per thread, and from there on the same in every block */
  ABSENT  /* left out: nothing reads it */
} access_kind;

typedef struct input_plan {
  access_kind kind;
  omc_dtype dtype;
  int32_t last_use; /* instruction */
  int32_t rank;     /* RUNS: axes left after those that lie in a row are joined */
  int64_t dims[OMC_MAX_RANK], strides[OMC_MAX_RANK]; /* elements; the last stride is 0 or 1 */
  int64_t period;                                    /* TILE */
  size_t scratch; /* bytes from the start of a thread's scratch */
} input_plan;

typedef struct instruction {
  omc_op_id op;
  omc_ew_fn fn;    /* NULL: nothing to do */
  bool divides;    /* args[1] are integers that may not be 0 */
  bool spread;     /* all operands but the first are one number each, or left out */
  int32_t args[3]; /* operands; those that are none: -1, and once placed the first */
  size_t scratch;  /* where its result goes if not straight to an output */
  double imm[OMC_EW_IMM];
} instruction;

typedef struct output_plan {
  omc_dtype dtype;
  int32_t operand;
  bool claims; /* may be written to by an instruction: no other output is */
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

omc_ew_fn omc_ew_pick(const omc_ew *ew, omc_dtype compute) {
  omc_ew_fn best = NULL;
  OMC_PICK_ISA(best, ew->fn[compute])
  return best;
}

/* ---- compiling ---- */

static omc_status refuse(const omc_node *node, const char *why) {
  OMC_NODE_FAIL(node, EUNSUPPORTED, "%s", why);
}

static omc_status no_memory(const omc_node *node) {
  OMC_NODE_FAIL(node, ENOMEM, "no memory for its program");
}

/* Chooses the access and returns the numbers of scratch it wants. */
static int64_t plan_input(input_plan *in, const omc_type *type, const omc_shape *shape,
                          const omc_convert *convert) {
  in->dtype = type->dtype;
  in->rank = omc_join_axes(&type->shape, shape, in->dims, in->strides);
  const int64_t numel = omc_shape_numel(shape);
  if (omc_shape_numel(&type->shape) == numel) {
    in->kind = type->dtype == convert->dtype ? DIRECT : DENSE;
    return OMC_EW_BLOCK;
  }
  if (omc_shape_numel(&type->shape) == 1) {
    in->kind = SCALAR;
    return OMC_EW_BLOCK;
  }
  in->period = in->dims[in->rank - 1];
  const bool periodic = in->rank == 2 && in->strides[1] == 1 && in->strides[0] == 0;
  in->kind = periodic && in->period <= LONGEST_TILE && numel >= 4 * in->period ? TILE : RUNS;
  return in->kind == TILE ? omc_whole_vectors(in->period) + OMC_EW_BLOCK : OMC_EW_BLOCK;
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

/* Gives every result a block of scratch, taking those whose contents have been read; an
 * instruction may write over its own operand. Returns how many blocks there are. */
static int32_t place_results(omc_ew_program *p, const int32_t *last, size_t base, size_t block) {
  int32_t holder[OMC_EW_MAX_INSTRUCTIONS], n = 0; /* the instruction whose result a block holds */
  for (int32_t k = 0; k < p->n_code; k++) {
    if (!p->code[k].fn) continue;
    int32_t b = 0;
    while (b < n && last[p->n_in + holder[b]] > k) b++;
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
    p->out[i] = (output_plan){.dtype = from->out[i].dtype, .operand = from->out[i].operand};
}

static omc_status pick_functions(const omc_node *node, omc_dtype cls, omc_ew_program *p) {
  for (int32_t k = 0; k < p->n_code; k++) {
    p->code[k].fn = omc_ew_pick(omc_cpu_op_get(p->code[k].op)->ew, cls);
    if (!p->code[k].fn) return refuse(node, "an op does not compute in the class of its dtypes");
  }
  return OMC_OK;
}

/* A conversion to the class itself: its operand is of numbers of the class already. */
static bool is_identity(const omc_ew_program *p, const instruction *code) {
  return (omc_dtype)code->imm[0] == p->convert->dtype && omc_dtype_is_float(p->convert->dtype);
}

/* Leaves instructions that only convert to the stores of their results, if nothing else reads
 * these, or to nobody, if they change nothing. An input is stored only where no other output could
 * have been written over it. */
static void drop_conversions(omc_ew_program *p) {
  for (int32_t k = 0; k < p->n_code; k++) {
    const int32_t result = p->n_in + k, operand = p->code[k].args[0];
    if (!(omc_op_get(p->code[k].op)->flags & OMC_OP_CONVERTS)) continue;
    const bool identity = is_identity(p, &p->code[k]);
    bool needed = false;
    for (int32_t i = 0; i < p->n_out; i++)
      needed |= p->out[i].operand == result && operand < p->n_in && p->n_out > 1;
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

/* The first output that holds an instruction's result as it is may take it straight. */
static void claim_outputs(omc_ew_program *p) {
  for (int32_t i = 0; i < p->n_out; i++) {
    output_plan *out = &p->out[i];
    out->claims = out->operand >= p->n_in && out->dtype == p->convert->dtype;
    for (int32_t j = 0; j < i; j++)
      if (p->out[j].operand == out->operand) out->claims = false;
  }
}

static bool is_spread(const omc_ew_program *p, int32_t operand) {
  return operand < 0 || (operand < p->n_in && p->in[operand].kind == SCALAR);
}

/* Lays out a thread's scratch: a block or tile for each input, then blocks for results. */
static void place(const omc_node *node, const omc_shape *shape, omc_ew_program *p) {
  int32_t last[OMC_EW_MAX_INPUTS + OMC_EW_MAX_INSTRUCTIONS];
  size_t used = 0;
  for (int32_t i = 0; i < p->n_in; i++) {
    const omc_value *v = omc_in(node, (uint32_t)i);
    p->in[i].kind = ABSENT;
    p->in[i].scratch = used;
    if (v) used += (size_t)plan_input(&p->in[i], &v->type, shape, p->convert) * p->convert->size;
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
  if (!p) return no_memory(node);
  p->convert = omc_convert_pick(program.cls);
  p->numel = omc_shape_numel(&program.shape);
  p->n_in = (int32_t)program.n_in, p->n_code = (int32_t)program.n_code;
  p->n_out = (int32_t)program.n_out;
  p->in = OMC_NEW_ARRAY(arena, input_plan, program.n_in);
  p->code = OMC_NEW_ARRAY(arena, instruction, program.n_code);
  p->out = OMC_NEW_ARRAY(arena, output_plan, program.n_out);
  if (!p->in || !p->code || !p->out) return no_memory(node);

  take_code(&program, p);
  OMC_TRY(pick_functions(node, program.cls, p));
  drop_conversions(p);
  claim_outputs(p);
  place(node, &program.shape, p);
  *out = p;
  return OMC_OK;
}

size_t omc_ew_workspace(const omc_ew_program *program, int threads) {
  return program->scratch_bytes * (size_t)threads;
}

/* ---- running ---- */

/* One call, shared by its threads. */
typedef struct call {
  const omc_ew_program *program;
  const omc_kernel_args *args;
  char *direct[OMC_EW_MAX_INSTRUCTIONS]; /* output memory that takes the result; NULL: scratch */
  bool stored[OMC_EW_MAX_OUTPUTS];       /* copied from scratch at the end of a block */
  atomic_bool divided_by_zero;
} call;

/* Where a thread is in an input read run by run. */
typedef struct cursor {
  int64_t at[OMC_MAX_RANK]; /* position along each joined axis */
  int64_t offset;           /* elements from the start of the input */
} cursor;

static void cursor_seek(cursor *c, const input_plan *in, int64_t index) {
  c->offset = 0;
  for (int32_t i = in->rank - 1; i >= 0; i--) {
    c->at[i] = index % in->dims[i];
    index /= in->dims[i];
    c->offset += c->at[i] * in->strides[i];
  }
}

/* Moves on by n elements, at most to the end of the run. */
static void cursor_advance(cursor *c, const input_plan *in, int64_t n) {
  int32_t i = in->rank - 1;
  c->at[i] += n;
  c->offset += n * in->strides[i];
  for (; i > 0 && c->at[i] == in->dims[i]; i--) {
    c->at[i] = 0;
    c->offset += in->strides[i - 1] - in->dims[i] * in->strides[i];
    c->at[i - 1]++;
  }
}

static const void *load_runs(const omc_convert *convert, const input_plan *in, cursor *c,
                             const char *data, char *block, int64_t n, bool whole) {
  const int32_t axis = in->rank - 1;
  const size_t size = omc_dtype_size(in->dtype);
  const bool repeats = in->strides[axis] == 0;
  if (whole && !repeats && in->dtype == convert->dtype && in->dims[axis] - c->at[axis] >= n) {
    const char *here = data + (size_t)c->offset * size;
    cursor_advance(c, in, n);
    return here;
  }
  for (int64_t done = 0, run; done < n; done += run) {
    char *to = block + (size_t)done * convert->size;
    run = in->dims[axis] - c->at[axis];
    if (run > n - done) run = n - done;
    convert->load[in->dtype](data + (size_t)c->offset * size, to, repeats ? 1 : run);
    if (repeats) convert->spread(to, run);
    cursor_advance(c, in, run);
  }
  return block;
}

/* What is the same for every block: scalars and tiles. */
static void load_constant(const omc_convert *convert, const input_plan *in, const void *data,
                          char *scratch) {
  if (in->kind == SCALAR) {
    convert->load[in->dtype](data, scratch, 1);
    convert->spread(scratch, OMC_EW_BLOCK);
  }
  if (in->kind != TILE) return;
  convert->load[in->dtype](data, scratch, in->period);
  for (int64_t i = in->period, n; i < in->period + OMC_EW_BLOCK; i += n) {
    n = in->period + OMC_EW_BLOCK - i < in->period ? in->period + OMC_EW_BLOCK - i : in->period;
    memcpy(scratch + (size_t)i * convert->size, scratch, (size_t)n * convert->size);
  }
}

/* The n numbers of a block from element `index` on. Block functions are given whole vectors, so
 * a last block that is none may not be read where it lies. */
static const void *load_block(const omc_convert *convert, const input_plan *in, cursor *c,
                              const char *data, char *scratch, int64_t index, int64_t n,
                              bool whole) {
  switch (in->kind) {
    case TILE:
      return scratch + (size_t)(index % in->period) * convert->size;
    case RUNS:
      return load_runs(convert, in, c, data, scratch, n, whole);
    case DIRECT:
      if (whole) return data + (size_t)index * convert->size;
      break;
    case DENSE:
      break;
    case SCALAR:
    case ABSENT:
      return scratch;
  }
  convert->load[in->dtype](data + (size_t)index * omc_dtype_size(in->dtype), scratch, n);
  return scratch;
}

static bool has_zero(const int64_t *x, int64_t n) {
  bool any = false;
  for (int64_t i = 0; i < n; i++) any |= x[i] == 0;
  return any;
}

static void run_blocks(omc_range range, void *ctx) {
  call *c = ctx;
  const omc_ew_program *p = c->program;
  const omc_kernel_args *args = c->args;
  const omc_convert *convert = p->convert;
  char *scratch = (char *)args->workspace + (size_t)range.thread * p->scratch_bytes;
  cursor cursors[OMC_EW_MAX_INPUTS];
  const void *operands[OMC_EW_MAX_INPUTS + OMC_EW_MAX_INSTRUCTIONS];
  for (int32_t i = 0; i < p->n_in; i++) {
    operands[i] = scratch + p->in[i].scratch;
    load_constant(convert, &p->in[i], args->in[i].data, scratch + p->in[i].scratch);
    if (p->in[i].kind == RUNS) cursor_seek(&cursors[i], &p->in[i], range.begin * OMC_EW_BLOCK);
  }

  for (int64_t b = range.begin; b < range.end; b++) {
    const int64_t index = b * OMC_EW_BLOCK;
    const int64_t n = p->numel - index < OMC_EW_BLOCK ? p->numel - index : OMC_EW_BLOCK;
    const int64_t padded = omc_whole_vectors(n);
    const bool whole = n == padded;
    for (int32_t i = 0; i < p->n_in; i++)
      if (p->in[i].kind < SCALAR)
        operands[i] = load_block(convert, &p->in[i], &cursors[i], args->in[i].data,
                                 scratch + p->in[i].scratch, index, n, whole);
    for (int32_t k = 0; k < p->n_code; k++) {
      const instruction *code = &p->code[k];
      if (!code->fn) continue;
      char *to = whole && c->direct[k] ? c->direct[k] + (size_t)index * convert->size
                                       : scratch + code->scratch;
      omc_ew_block block = {.out = to,
                            .imm = code->imm,
                            .n = padded,
                            .index = index,
                            .seed = args->seed,
                            .spread = code->spread};
      for (int a = 0; a < 3; a++) block.in[a] = operands[code->args[a]];
      if (code->divides && has_zero(block.in[1], n))
        atomic_store_explicit(&c->divided_by_zero, true, memory_order_relaxed);
      code->fn(&block);
      operands[p->n_in + k] = to;
    }
    for (int32_t i = 0; i < p->n_out; i++) {
      const output_plan *out = &p->out[i];
      if ((whole && !c->stored[i]) || !args->out[i].type) continue;
      char *to = (char *)args->out[i].data + (size_t)index * omc_dtype_size(out->dtype);
      convert->store[out->dtype](operands[out->operand], to, n);
    }
  }
}

/* A result may go straight to an output unless an input that shares its memory is read later. */
static bool may_write_direct(const omc_ew_program *p, const omc_kernel_args *args, int32_t i) {
  if (!p->out[i].claims || !args->out[i].type) return false;
  for (int32_t j = 0; j < p->n_in; j++)
    if (args->in[j].data == args->out[i].data && p->in[j].last_use > p->out[i].operand - p->n_in)
      return false;
  return true;
}

omc_status omc_ew_run(const omc_kernel_args *args) {
  const omc_ew_program *p = *(omc_ew_program *const *)args->params;
  call c = {.program = p, .args = args};
  for (int32_t i = 0; i < p->n_out; i++) {
    c.stored[i] = !may_write_direct(p, args, i);
    if (!c.stored[i]) c.direct[p->out[i].operand - p->n_in] = args->out[i].data;
  }
  const int64_t blocks = (p->numel + OMC_EW_BLOCK - 1) / OMC_EW_BLOCK;
  omc_parallel_for(blocks, omc_grain(OMC_GRAIN_ELEMENTS, OMC_EW_BLOCK), args->threads, run_blocks,
                   &c);
  if (atomic_load(&c.divided_by_zero))
    OMC_FAIL(EDIVISION, "'%s' divides an integer by 0", args->node ? args->node : "");
  return OMC_OK;
}

static const omc_kernels omc_kernels_FusedElementwise = {.any = omc_ew_run};
OMC_CPU_OP(FusedElementwise, FusedElementwise)

#endif
