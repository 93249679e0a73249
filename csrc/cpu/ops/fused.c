/* The block interpreter, and FusedElementwise: whatever its class, the interpreter runs it. */
#include "cpu/ops/program.h"

#ifndef OMC_VARIANT

#include <stdatomic.h>
#include <string.h>

#include "cpu/parallel.h"

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
  int64_t spread;           /* offset of the element that fills the block, or -1 */
} cursor;

static void cursor_seek(cursor *c, const omc_ew_input *in, int64_t index) {
  c->offset = 0, c->spread = -1;
  for (int32_t i = in->rank - 1; i >= 0; i--) {
    c->at[i] = index % in->dims[i];
    index /= in->dims[i];
    c->offset += c->at[i] * in->strides[i];
  }
}

/* Moves on by n elements, at most to the end of the run. */
static void cursor_advance(cursor *c, const omc_ew_input *in, int64_t n) {
  int32_t i = in->rank - 1;
  c->at[i] += n;
  c->offset += n * in->strides[i];
  for (; i > 0 && c->at[i] == in->dims[i]; i--) {
    c->at[i] = 0;
    c->offset += in->strides[i - 1] - in->dims[i] * in->strides[i];
    c->at[i - 1]++;
  }
}

/* Where n elements of an operand lie, and as what. */
typedef struct operand {
  const void *data;
  omc_dtype dtype;
} operand;

static operand load_runs(const omc_convert *convert, const omc_ew_input *in, cursor *c,
                         const char *data, char *block, int64_t n, bool whole) {
  const int32_t axis = in->rank - 1;
  const size_t size = omc_dtype_size(in->dtype);
  const bool repeats = in->strides[axis] == 0, at_once = in->dims[axis] - c->at[axis] >= n;
  if (whole && !repeats && in->taken && at_once) {
    const operand here = {data + (size_t)c->offset * size, in->dtype};
    cursor_advance(c, in, n);
    return here;
  }
  if (repeats && at_once) {
    if (c->spread != c->offset) {
      convert->load[in->dtype](data + (size_t)c->offset * size, block, 1);
      convert->spread(block, OMC_EW_BLOCK);
      c->spread = c->offset;
    }
    cursor_advance(c, in, n);
    return (operand){block, convert->dtype};
  }
  c->spread = -1;
  for (int64_t done = 0, run; done < n; done += run) {
    char *to = block + (size_t)done * convert->size;
    run = in->dims[axis] - c->at[axis];
    if (run > n - done) run = n - done;
    convert->load[in->dtype](data + (size_t)c->offset * size, to, repeats ? 1 : run);
    if (repeats) convert->spread(to, run);
    cursor_advance(c, in, run);
  }
  return (operand){block, convert->dtype};
}

/* What is the same for every block: scalars and tiles. */
static void load_constant(const omc_convert *convert, const omc_ew_input *in, const void *data,
                          char *scratch) {
  if (in->kind == OMC_EW_SCALAR) {
    convert->load[in->dtype](data, scratch, 1);
    convert->spread(scratch, OMC_EW_BLOCK);
  }
  if (in->kind != OMC_EW_TILE) return;
  convert->load[in->dtype](data, scratch, in->period);
  for (int64_t i = in->period, n; i < in->period + OMC_EW_BLOCK; i += n) {
    n = in->period + OMC_EW_BLOCK - i < in->period ? in->period + OMC_EW_BLOCK - i : in->period;
    memcpy(scratch + (size_t)i * convert->size, scratch, (size_t)n * convert->size);
  }
}

/* The n numbers of a block from element `index` on. Block functions are given whole vectors, so
 * a last block that is none may not be read where it lies. */
static operand load_block(const omc_convert *convert, const omc_ew_input *in, cursor *c,
                          const char *data, char *scratch, int64_t index, int64_t n, bool whole) {
  const char *const here = data + (size_t)index * in->bytes;
  switch (in->kind) {
    case OMC_EW_TILE:
      return (operand){scratch + (size_t)(index % in->period) * convert->size, convert->dtype};
    case OMC_EW_RUNS:
      return load_runs(convert, in, c, data, scratch, n, whole);
    case OMC_EW_DIRECT:
      if (whole) return (operand){here, in->dtype};
      break;
    case OMC_EW_DENSE:
      break;
    case OMC_EW_SCALAR:
    case OMC_EW_ABSENT:
      return (operand){scratch, convert->dtype};
  }
  convert->load[in->dtype](here, scratch, n);
  return (operand){scratch, convert->dtype};
}

static void store_block(const omc_convert *convert, operand from, omc_dtype dtype, char *to,
                        int64_t n) {
  if (from.dtype == dtype)
    memcpy(to, from.data, (size_t)n * omc_dtype_size(dtype));
  else
    convert->store[dtype](from.data, to, n);
}

static bool has_zero(const int64_t *x, int64_t n) {
  bool any = false;
  for (int64_t i = 0; i < n; i++) any |= x[i] == 0;
  return any;
}

static void run_instruction(call *c, const omc_ew_instruction *code, const operand *operands,
                            void *out, int64_t index, int64_t n) {
  const omc_dtype cls = c->program->convert->dtype;
  omc_ew_block block = {.out = out,
                        .out_dtype = code->dtype,
                        .plain = code->dtype == cls,
                        .spread = code->spread,
                        .imm = code->imm,
                        .n = omc_whole_vectors(n),
                        .index = index,
                        .seed = c->args->seed};
  for (int a = 0; a < 3; a++) {
    const operand from = operands[code->args[a]];
    block.in[a] = from.data;
    block.in_dtype[a] = from.dtype;
    block.plain &= from.dtype == cls;
  }
  if (code->divides && has_zero(block.in[1], n))
    atomic_store_explicit(&c->divided_by_zero, true, memory_order_relaxed);
  code->fn(&block);
}

static void run_blocks(omc_range range, void *ctx) {
  call *c = ctx;
  const omc_ew_program *p = c->program;
  const omc_kernel_args *args = c->args;
  const omc_convert *convert = p->convert;
  char *scratch = (char *)args->workspace + (size_t)range.thread * p->scratch_bytes;
  cursor cursors[OMC_EW_MAX_INPUTS];
  operand operands[OMC_EW_MAX_INPUTS + OMC_EW_MAX_INSTRUCTIONS];
  for (int32_t i = 0; i < p->n_in; i++) {
    operands[i] = (operand){scratch + p->in[i].scratch, convert->dtype};
    load_constant(convert, &p->in[i], args->in[i].data, scratch + p->in[i].scratch);
    if (p->in[i].kind == OMC_EW_RUNS)
      cursor_seek(&cursors[i], &p->in[i], range.begin * OMC_EW_BLOCK);
  }

  for (int64_t b = range.begin; b < range.end; b++) {
    const int64_t index = b * OMC_EW_BLOCK;
    const int64_t n = p->numel - index < OMC_EW_BLOCK ? p->numel - index : OMC_EW_BLOCK;
    const bool whole = n == omc_whole_vectors(n);
    for (int32_t i = 0; i < p->n_in; i++)
      if (p->in[i].kind < OMC_EW_SCALAR)
        operands[i] = load_block(convert, &p->in[i], &cursors[i], args->in[i].data,
                                 scratch + p->in[i].scratch, index, n, whole);
    for (int32_t k = 0; k < p->n_code; k++) {
      const omc_ew_instruction *code = &p->code[k];
      if (!code->fn) continue;
      char *to = whole && c->direct[k] ? c->direct[k] + (size_t)index * code->bytes
                                       : scratch + code->scratch;
      run_instruction(c, code, operands, to, index, n);
      operands[p->n_in + k] = (operand){to, code->dtype};
    }
    for (int32_t i = 0; i < p->n_out; i++) {
      const omc_ew_output *out = &p->out[i];
      if ((whole && !c->stored[i]) || !args->out[i].type) continue;
      char *to = (char *)args->out[i].data + (size_t)index * omc_dtype_size(out->dtype);
      store_block(convert, operands[out->operand], out->dtype, to, n);
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
    OMC_FAIL(EDIVISION, "'%s' divides an integer by 0", args->node);
  return OMC_OK;
}

static const omc_kernels omc_kernels_FusedElementwise = {.any = omc_ew_run};
OMC_CPU_OP(FusedElementwise, FusedElementwise)

#endif
