/* Programs of elementwise ops: each is written as a kernel, one row of csrc/ops after another, for
 * what it computes in, the dtypes that are stored and the way its inputs are broadcast. Sizes are
 * parameters: the same kernel serves other shapes. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/int.h"
#include "cuda/gpu/axis.h"
#include "cuda/launch.h"
#include "ops/op.h"
#include "ops/program.h"

enum { THREADS = 256, PACK_BYTES = 16, MIN_LANES = 4, MAX_LANES = 8, MAX_PARAMETER_BYTES = 4096 };

/* How a lane finds its element of an input. */
typedef enum { ABSENT, DENSE, NUMBER, BROADCAST } access;

typedef struct input {
  access access;
  int32_t rank; /* BROADCAST: axes */
  int64_t dims[OMC_MAX_RANK], strides[OMC_MAX_RANK];
  omc_dtype dtype;
} input;

typedef struct params {
  omc_cuda_kernel kernel;
  int64_t n;     /* elements of the iteration shape */
  int32_t lanes; /* of a thread: elements that it works on */
  uint32_t n_in, n_out;
  const input *in;
  size_t bytes;     /* of the parameters */
  char *parameters; /* those known at plan time */
} params;

/* ---- the parameters: what a kernel's struct has, in this order ---- */

typedef struct head {
  omc_sender sender;
  int64_t n;
  omc_gpu_seed seed;
} head;

static bool is_narrow(int64_t n) { return n < omc_cuda_narrow(); }

static void lay_out_axes(const input *in, bool narrow, char **to) {
  for (int32_t i = 0; i < in->rank; i++) {
    if (narrow) {
      const omc_gpu_axis axis = omc_gpu_axis_of(in->dims[i], in->strides[i]);
      memcpy(*to, &axis, sizeof axis);
    } else {
      const omc_gpu_wide_axis axis = {in->dims[i], in->strides[i]};
      memcpy(*to, &axis, sizeof axis);
    }
    *to += sizeof(omc_gpu_axis);
  }
}
_Static_assert(sizeof(omc_gpu_axis) == sizeof(omc_gpu_wide_axis), "axes take the same room");

static omc_status lay_out(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                          params *p) {
  size_t n_axes = 0;
  for (uint32_t i = 0; i < p->n_in; i++) n_axes += (size_t)p->in[i].rank;
  const size_t pointers = (p->n_in + p->n_out) * sizeof(void *);
  p->bytes = sizeof(head) + pointers + n_axes * sizeof(omc_gpu_axis);
  if (p->bytes > MAX_PARAMETER_BYTES)
    OMC_NODE_FAIL(node, EUNSUPPORTED, "a kernel has no room for %zu bytes of parameters", p->bytes);
  p->parameters = omc_arena_alloc(arena, 1, p->bytes);
  if (!p->parameters) OMC_NODE_FAIL(node, ENOMEM, "no memory for kernel parameters");
  head h = {.n = p->n};
  OMC_TRY(omc_cuda_sender_of(device, node, &h.sender));
  memcpy(p->parameters, &h, sizeof h);
  char *at = p->parameters + sizeof(head) + pointers;
  for (uint32_t i = 0; i < p->n_in; i++) lay_out_axes(&p->in[i], is_narrow(p->n), &at);
  return OMC_OK;
}

static omc_status run_program(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  if (p->n == 0) return OMC_OK;
  char parameters[MAX_PARAMETER_BYTES];
  memcpy(parameters, p->parameters, p->bytes);
  const omc_gpu_seed seed = omc_cuda_seed(args);
  memcpy(parameters + offsetof(head, seed), &seed, sizeof seed);
  char *at = parameters + sizeof(head);
  for (uint32_t i = 0; i < p->n_in + p->n_out; i++, at += sizeof(void *)) {
    const omc_tensor *t = i < p->n_in ? &args->in[i] : &args->out[i - p->n_in];
    void *const data = t->type ? t->data : NULL;
    memcpy(at, &data, sizeof data);
  }
  const int64_t of_block = (int64_t)THREADS * p->lanes;
  const omc_cuda_grid grid = {(p->n + of_block - 1) / of_block, THREADS, 0};
  return omc_cuda_launch(&p->kernel, grid, parameters, args->queue);
}

/* ---- the source ---- */

typedef struct writer {
  FILE *out;
  const omc_program *program;
  const params *params;
} writer;

static void put(const writer *w, const char *format, ...) OMC_PRINTF(2, 3);
static void put(const writer *w, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vfprintf(w->out, format, args);
  va_end(args);
}

/* By its bits: a decimal point is the locale's. */
static void put_number(const writer *w, double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  put(w, "(acc_t)__longlong_as_double(0x%llxll)", (unsigned long long)bits);
}

static void put_parameters(const writer *w) {
  const params *p = w->params;
  put(w, "struct params {\n  omc_sender sender;\n  int64_t n;\n  omc_gpu_seed seed;\n");
  for (uint32_t i = 0; i < p->n_in; i++)
    put(w, "  const %s *x%u;\n", omc_cuda_storage(p->in[i].dtype), i);
  for (uint32_t i = 0; i < p->n_out; i++)
    put(w, "  %s *y%u;\n", omc_cuda_storage(w->program->out[i].dtype), i);
  for (uint32_t i = 0; i < p->n_in; i++)
    if (p->in[i].rank)
      put(w, "  %s a%u[%d];\n", is_narrow(p->n) ? "omc_gpu_axis" : "omc_gpu_wide_axis", i,
          p->in[i].rank);
  put(w, "};\n");
}

/* What is read before the lanes take turns, and room for what is written after. */
static void put_loads(const writer *w) {
  const params *p = w->params;
  for (uint32_t i = 0; i < p->n_in; i++) {
    const char *storage = omc_cuda_storage(p->in[i].dtype);
    if (p->in[i].access == DENSE)
      put(w, "  omc_loaded<%s, OMC_LANES_OF_THREAD> d%u;\n  omc_load(d%u, p.x%u + first, lanes);\n",
          storage, i, i, i);
    if (p->in[i].access == NUMBER) put(w, "  const %s d%u = *p.x%u;\n", storage, i, i);
  }
  for (uint32_t i = 0; i < p->n_out; i++)
    put(w, "  %s r%u[OMC_LANES_OF_THREAD];\n", omc_cuda_storage(w->program->out[i].dtype), i);
}

static void put_operand(const writer *w, uint32_t i) {
  const input *in = &w->params->in[i];
  if (in->access == ABSENT) return;
  put(w, "    const vacc_t v%u = number<acc_t>(", i);
  if (in->access == BROADCAST)
    put(w, "p.x%u[omc_offset(p.a%u, index)]", i, i);
  else
    put(w, "d%u%s", i, in->access == DENSE ? "[l]" : "");
  put(w, ");\n");
}

static void put_words(const writer *w) {
  for (uint32_t k = 0; k < w->program->n_code; k++) {
    const omc_instruction *code = &w->program->code[k];
    if (code->op != OMC_OP_Dropout) continue;
    put(w,
        "  uint32_t w%u[OMC_LANES_OF_THREAD];\n"
        "  omc_draws(p.seed, %uu, (uint64_t)first / 4, w%u);\n",
        k, (uint32_t)code->imm[2], k);
  }
}

static void put_instruction(const writer *w, uint32_t k) {
  const omc_instruction *code = &w->program->code[k];
  const uint32_t result = w->program->n_in + k;
  if (code->op == OMC_OP_Cast) {
    put(w, "    const vacc_t v%u = omc_rounded<%s>(v%d);\n", result,
        omc_cuda_storage((omc_dtype)code->imm[0]), code->args[0]);
    return;
  }
  if (code->op == OMC_OP_Dropout) {
    put(w, "    const vacc_t v%u = omc_dropped(v%d, w%u[l], %uu, ", result, code->args[0], k,
        (uint32_t)code->imm[0]);
    put_number(w, code->imm[1]);
    put(w, ");\n");
    return;
  }
  if (code->divides)
    put(w, "    if (v%d.x == 0) omc_write(p.sender, OMC_LETTER_DIVISION, 0, 0);\n", code->args[1]);
  put(w, "    const vacc_t i%u[] = {", k);
  for (int j = 0; j < OMC_EW_IMM; j++) {
    put_number(w, code->imm[j]);
    put(w, j + 1 < OMC_EW_IMM ? ", " : "};\n");
  }
  put(w, "    const vacc_t v%u = omc_ew_%s(", result, omc_op_name(code->op));
  for (int a = 0; a < 3; a++) put(w, "v%d, ", code->args[a] < 0 ? code->args[0] : code->args[a]);
  put(w, "i%u);\n", k);
}

static bool broadcasts(const writer *w) {
  bool any = false;
  for (uint32_t i = 0; i < w->params->n_in; i++) any |= w->params->in[i].access == BROADCAST;
  return any;
}

/* Whether lanes past the end may do as others, of what nobody wants. */
static bool is_harmless(const writer *w) {
  bool harmless = !broadcasts(w);
  for (uint32_t k = 0; k < w->program->n_code; k++) harmless &= !w->program->code[k].divides;
  return harmless;
}

static void put_program(const writer *w) {
  const omc_program *program = w->program;
  put(w,
      "#define OMC_COMPUTE_%s\n#define OMC_LANES_OF_THREAD %d\n"
      "#include \"cuda/ops/program.h\"\n\n",
      omc_cuda_class(program->cls), w->params->lanes);
  put_parameters(w);
  /* Of 64 bits, and with places to be computed, four lanes would spill in the registers that the
   * compiler gives by itself. */
  const bool is_wide = omc_dtype_size(program->cls) == sizeof(uint64_t) || broadcasts(w);
  put(w, "\nOMC_GLOBAL%s(program, %d, params, p) {\n", is_wide ? "_WIDE" : "", THREADS);
  put(w,
      "  const int64_t first = ((int64_t)blockIdx.x * %d + threadIdx.x) * OMC_LANES_OF_THREAD;\n"
      "  if (first >= p.n) return;\n"
      "  const int lanes = p.n - first < OMC_LANES_OF_THREAD ? (int)(p.n - first)\n"
      "                                                      : OMC_LANES_OF_THREAD;\n",
      THREADS);
  put_loads(w);
  put_words(w);
  put(w,
      "#pragma unroll\n  for (int l = 0; l < OMC_LANES_OF_THREAD; l++) {\n"
      "%s    const %s index = (%s)(first + l);\n    (void)index;\n",
      is_harmless(w) ? "" : "    if (l >= lanes) break;\n",
      is_narrow(w->params->n) ? "uint32_t" : "int64_t",
      is_narrow(w->params->n) ? "uint32_t" : "int64_t");
  for (uint32_t i = 0; i < program->n_in; i++) put_operand(w, i);
  for (uint32_t k = 0; k < program->n_code; k++) put_instruction(w, k);
  for (uint32_t i = 0; i < program->n_out; i++)
    put(w, "    r%u[l] = element<%s>(v%d.x);\n", i, omc_cuda_storage(program->out[i].dtype),
        program->out[i].operand);
  put(w, "  }\n");
  for (uint32_t i = 0; i < program->n_out; i++)
    put(w, "  if (p.y%u) omc_store(p.y%u + first, r%u, lanes);\n", i, i, i);
  put(w, "}\n");
}

/* To be given to free(); NULL: no memory. */
static char *source_of(const omc_program *program, const params *p) {
  char *text = NULL;
  size_t bytes;
  const writer w = {open_memstream(&text, &bytes), program, p};
  if (!w.out) return NULL;
  put_program(&w);
  if (fclose(w.out) == 0) return text;
  free(text);
  return NULL;
}

/* ---- plan time ---- */

static input input_of(const omc_value *v, const omc_shape *shape) {
  input in = {.access = ABSENT, .dtype = OMC_F32};
  if (!v) return in;
  const int64_t numel = omc_shape_numel(&v->type.shape);
  in.dtype = v->type.dtype;
  in.access = numel == omc_shape_numel(shape) ? DENSE : numel == 1 ? NUMBER : BROADCAST;
  if (in.access == BROADCAST) in.rank = omc_join_axes(&v->type.shape, shape, in.dims, in.strides);
  return in;
}

/* As many as a pack has of the largest elements that are read or written. Of 64 bits there are no
 * registers for more than the fewest, and what is broadcast is read one by one. */
static int32_t lanes_of(const params *p, const omc_program *program) {
  int64_t bytes = PACK_BYTES / MAX_LANES;
  if (omc_dtype_size(program->cls) == sizeof(uint64_t)) return MIN_LANES;
  for (uint32_t i = 0; i < p->n_in; i++) {
    if (p->in[i].access == BROADCAST) return MIN_LANES;
    if (p->in[i].access == DENSE) bytes = omc_max(bytes, (int64_t)omc_dtype_size(p->in[i].dtype));
  }
  for (uint32_t i = 0; i < p->n_out; i++)
    bytes = omc_max(bytes, (int64_t)omc_dtype_size(program->out[i].dtype));
  return (int32_t)omc_max(PACK_BYTES / bytes, MIN_LANES);
}

static omc_status params_program(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                 void *params_) {
  params *p = params_;
  omc_program program;
  OMC_TRY(omc_program_of(node, arena, &program));
  p->n = omc_shape_numel(&program.shape);
  if (p->n == 0) return OMC_OK;
  input *in = OMC_NEW_ARRAY(arena, input, node->n_in);
  if (!in) OMC_NODE_FAIL(node, ENOMEM, "no memory for kernel parameters");
  for (uint32_t i = 0; i < node->n_in; i++) in[i] = input_of(omc_in(node, i), &program.shape);
  p->n_in = program.n_in, p->n_out = program.n_out, p->in = in;
  p->lanes = lanes_of(p, &program);
  OMC_TRY(lay_out(device, node, arena, p));
  char *source = source_of(&program, p);
  if (!source) OMC_NODE_FAIL(node, ENOMEM, "no memory for device code");
  const omc_status status = omc_cuda_kernel_in(device, source, "program", &p->kernel);
  free(source);
  return status;
}

#define PROGRAM {.run = run_program, .params_size = sizeof(params), .params = params_program}
const omc_cuda_op omc_cuda_program = PROGRAM;
const omc_cuda_op omc_cuda_FusedElementwise = PROGRAM;
