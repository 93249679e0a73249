/* MatMul and FusedMatMul by cuBLASLt, which sees the columns of a matrix where a tensor has rows:
 * it is asked for C' = B' A'. A bias is added by it where it can, else C is filled with it before.
 */
#include <stdio.h>

#include "cuda/api.h"
#include "cuda/launch.h"
#include "cuda/ops/matmul.h"
#include "ops/forms.h"

/* Of cuBLASLt's interface. */
enum { NOT_SUPPORTED = 15 };
enum { COMPUTE_F32 = 68, COMPUTE_F64 = 70, COMPUTE_TF32 = 77 };
enum { R_32F = 0, R_64F = 1 };
enum { OP_TRANS_A = 3, OP_TRANS_B = 4, OP_EPILOGUE = 7, OP_BIAS_POINTER = 8, EPILOGUE_BIAS = 4 };
enum { LAYOUT_BATCH_COUNT = 5, LAYOUT_BATCH_OFFSET = 6 };
enum { MOST_WORKSPACE = 1, REDUCTIONS = 3, ALIGNMENT_OF_A = 5, N_ALIGNMENTS = 4, IN_F32 = 2 };

static const int cublaslt_types[OMC_N_DTYPE] = {
    [OMC_F32] = R_32F, [OMC_F64] = R_64F, [OMC_F16] = 2, [OMC_BF16] = 14};

/* What a kernel of cuBLASLt's may want for its loads, and memory that it may want for its sums. */
enum { ALIGNED = 16, WORKSPACE_ALIGNMENT = 256, MOST_WORKSPACE_BYTES = 32 << 20 };

enum { EXACT, TF32, N_PRECISIONS };

typedef struct params {
  omc_products_form form;
  omc_cuda_device *device;
  omc_dtype dtype, result;
  bool narrows; /* the right operand is rounded to `dtype` before, all n_right of it */
  int64_t n_right;
  bool bias_after;                       /* by cuBLASLt */
  omc_cublaslt_plan plans[N_PRECISIONS]; /* for operands that are aligned */
  size_t product_bytes;                  /* of workspace, which what is rounded comes after */
  omc_cuda_kernel fill, narrow;
} params;

/* One call to cuBLASLt, in its own terms: A is the right operand, B the left one. */
typedef struct product {
  int compute;
  const void *a, *b, *bias;
  void *d;
  omc_cublaslt_descriptor op, a_layout, b_layout, d_layout;
} product;

static int compute_of(const params *p, int precision) {
  return p->dtype == OMC_F64 ? COMPUTE_F64 : precision == TF32 ? COMPUTE_TF32 : COMPUTE_F32;
}

/* ---- descriptions ---- */

static omc_status set_op(product *x, int attribute, const void *value, size_t bytes) {
  OMC_CUBLASLT_TRY(cublasLtMatmulDescSetAttribute, &x->op, attribute, value, bytes);
  return OMC_OK;
}

static omc_status describe_op(const params *p, product *x) {
  const int32_t trans_a = p->form.trans_b, trans_b = p->form.trans_a;
  const uint32_t epilogue = EPILOGUE_BIAS;
  OMC_CUBLASLT_TRY(cublasLtMatmulDescInit_internal, &x->op, sizeof x->op, x->compute,
                   p->dtype == OMC_F64 ? R_64F : R_32F);
  OMC_TRY(set_op(x, OP_TRANS_A, &trans_a, sizeof trans_a));
  OMC_TRY(set_op(x, OP_TRANS_B, &trans_b, sizeof trans_b));
  if (!x->bias) return OMC_OK;
  OMC_TRY(set_op(x, OP_EPILOGUE, &epilogue, sizeof epilogue));
  return set_op(x, OP_BIAS_POINTER, &x->bias, sizeof x->bias);
}

/* The last dim of the batch is cuBLASLt's; `stride` is from one matrix of it to the next. */
static omc_status describe_matrix(const params *p, omc_dtype dtype, int64_t rows, int64_t columns,
                                  int64_t stride, omc_cublaslt_descriptor *out) {
  OMC_CUBLASLT_TRY(cublasLtMatrixLayoutInit_internal, out, sizeof *out, cublaslt_types[dtype],
                   (uint64_t)rows, (uint64_t)columns, rows);
  if (p->form.dims.rank == 0) return OMC_OK;
  const int32_t count = (int32_t)p->form.dims.dims[p->form.dims.rank - 1];
  OMC_CUBLASLT_TRY(cublasLtMatrixLayoutSetAttribute, out, LAYOUT_BATCH_COUNT, &count, sizeof count);
  OMC_CUBLASLT_TRY(cublasLtMatrixLayoutSetAttribute, out, LAYOUT_BATCH_OFFSET, &stride,
                   sizeof stride);
  return OMC_OK;
}

static omc_status describe(const params *p, product *x) {
  const omc_products_form *f = &p->form;
  const int32_t last = f->dims.rank ? f->dims.rank - 1 : 0; /* strides of no batch are 0 */
  OMC_TRY(describe_op(p, x));
  OMC_TRY(describe_matrix(p, p->dtype, f->trans_b ? f->k : f->n, f->trans_b ? f->n : f->k,
                          f->b_strides[last], &x->a_layout));
  OMC_TRY(describe_matrix(p, p->dtype, f->trans_a ? f->m : f->k, f->trans_a ? f->k : f->m,
                          f->a_strides[last], &x->b_layout));
  return describe_matrix(p, p->result, f->n, f->m, f->m * f->n, &x->d_layout);
}

/* The best plan for operands so aligned; without one out->status says NOT_SUPPORTED. Sums that are
 * cut are put together in what is computed in. */
static omc_status ask(const params *p, const product *x, uint32_t alignment, size_t most_bytes,
                      omc_cublaslt_plan *out) {
  omc_cublaslt_descriptor wish;
  const uint32_t reductions = IN_F32;
  OMC_CUBLASLT_TRY(cublasLtMatmulPreferenceInit_internal, &wish, sizeof wish);
  OMC_CUBLASLT_TRY(cublasLtMatmulPreferenceSetAttribute, &wish, MOST_WORKSPACE, &most_bytes,
                   sizeof(uint64_t));
  OMC_CUBLASLT_TRY(cublasLtMatmulPreferenceSetAttribute, &wish, REDUCTIONS, &reductions,
                   sizeof reductions);
  for (int i = 0; i < N_ALIGNMENTS; i++)
    OMC_CUBLASLT_TRY(cublasLtMatmulPreferenceSetAttribute, &wish, ALIGNMENT_OF_A + i, &alignment,
                     sizeof alignment);
  int found = 0;
  const int error = omc_cuda_api_get()->cublasLtMatmulAlgoGetHeuristic(
      p->device->cublaslt, &x->op, &x->a_layout, &x->b_layout, &x->d_layout, &x->d_layout, &wish, 1,
      out, &found);
  if (error == NOT_SUPPORTED || (error == 0 && found == 0)) {
    out->status = NOT_SUPPORTED;
    return OMC_OK;
  }
  return omc_cublaslt_check(error, "cublasLtMatmulAlgoGetHeuristic");
}

/* ---- plan time ---- */

static bool is_empty(const params *p) {
  return p->form.m == 0 || p->form.n == 0 || p->form.batch == 0;
}

static omc_status plan_products(params *p, bool biased) {
  for (int i = 0; i < (p->dtype == OMC_F32 ? N_PRECISIONS : 1); i++) {
    product x = {.compute = compute_of(p, i)};
    if (biased) x.bias = (const void *)(uintptr_t)ALIGNED; /* how it is aligned */
    OMC_TRY(describe(p, &x));
    OMC_TRY(ask(p, &x, ALIGNED, MOST_WORKSPACE_BYTES, &p->plans[i]));
    if (p->plans[i].status != 0) break;
    if (p->plans[i].workspace_bytes > p->product_bytes)
      p->product_bytes = p->plans[i].workspace_bytes;
  }
  return OMC_OK;
}

static bool is_planned(const params *p) {
  return p->plans[EXACT].status == 0 && p->plans[TF32].status == 0;
}

static omc_status unit_of(params *p, omc_dtype from, omc_dtype to, omc_cuda_kernel *out) {
  char source[256];
  snprintf(source, sizeof source,
           "#define OMC_TO %s\n#define OMC_FROM %s\n#define OMC_ACC %s\n#include "
           "\"cuda/ops/matmul.h\"\n",
           omc_cuda_storage(to), omc_cuda_storage(from), omc_cuda_storage(omc_dtype_acc(to)));
  *out = (omc_cuda_kernel){.device = p->device, .name = "copy_rows"};
  return omc_cuda_unit_of(p->device, source, &out->unit);
}

static omc_status plan_all(params *p, const omc_node *node) {
  const bool biased = omc_in(node, 2) != NULL;
  if (p->narrows) OMC_TRY(unit_of(p, omc_in(node, 1)->type.dtype, p->dtype, &p->narrow));
  if (p->form.k > 0) {
    OMC_TRY(plan_products(p, biased));
    p->bias_after = biased && is_planned(p);
    if (biased && !is_planned(p)) OMC_TRY(plan_products(p, false));
    if (!is_planned(p))
      OMC_NODE_FAIL(node, EUNSUPPORTED, "cuBLASLt has nothing for products of %s",
                    omc_dtype_get(p->dtype)->text);
  }
  if (biased && !p->bias_after) OMC_TRY(unit_of(p, p->result, p->result, &p->fill));
  return OMC_OK;
}

static omc_status params_matmul(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                void *params_) {
  (void)arena;
  params *p = params_;
  OMC_TRY(omc_products_form_of(node, &p->form));
  p->device = device;
  p->dtype = omc_in(node, 0)->type.dtype;
  p->result = node->out[0]->type.dtype;
  p->narrows = omc_in(node, 1)->type.dtype != p->dtype;
  p->n_right = omc_shape_numel(&omc_in(node, 1)->type.shape);
  const omc_shape *dims = &p->form.dims;
  if (dims->rank && dims->dims[dims->rank - 1] > INT32_MAX)
    OMC_NODE_FAIL(node, EUNSUPPORTED, "cuBLASLt has no batches of %lld",
                  (long long)dims->dims[dims->rank - 1]);
  if (is_empty(p)) return OMC_OK;
  OMC_TRY(omc_cuda_enter(device));
  const omc_status status = plan_all(p, node);
  omc_cuda_leave(device);
  return status;
}

static size_t matmul_workspace(const void *params_) {
  const params *p = params_;
  if (!p->narrows) return p->product_bytes;
  return omc_round_up(p->product_bytes, WORKSPACE_ALIGNMENT) +
         (size_t)p->n_right * omc_dtype_get(p->dtype)->size;
}

/* ---- run time ---- */

static omc_status copy(omc_cuda_kernel *kernel, void *y, const void *x, int64_t count, int64_t n,
                       void *queue) {
  const omc_product_copy c = {y, x, count, n};
  const int64_t blocks = (count + OMC_PRODUCT_THREADS - 1) / OMC_PRODUCT_THREADS;
  return omc_cuda_launch(kernel, (omc_cuda_grid){blocks, OMC_PRODUCT_THREADS, 0}, &c, queue);
}

static uint32_t alignment_of(const product *x) {
  const uint64_t all = (uintptr_t)x->a | (uintptr_t)x->b | (uintptr_t)x->d | (uintptr_t)x->bias;
  return all % ALIGNED ? (uint32_t)(all & -all) : ALIGNED;
}

/* C is kept and added to if `adds`. */
static omc_status multiply(const params *p, product *x, int precision, bool adds,
                           const omc_kernel_args *args) {
  omc_cublaslt_plan plan = p->plans[precision];
  OMC_TRY(describe(p, x));
  if (alignment_of(x) < ALIGNED) {
    OMC_TRY(ask(p, x, alignment_of(x), p->product_bytes, &plan));
    if (plan.status != 0)
      OMC_FAIL(EUNSUPPORTED, "'%s': cuBLASLt has nothing for operands at multiples of %u bytes",
               args->node, alignment_of(x));
  }
  const double wide[] = {p->form.alpha, adds};
  const float narrow[] = {(float)wide[0], (float)wide[1]};
  const bool is_wide = p->dtype == OMC_F64;
  const void *alpha = is_wide ? (const void *)&wide[0] : &narrow[0];
  const void *beta = is_wide ? (const void *)&wide[1] : &narrow[1];
  OMC_CUBLASLT_TRY(cublasLtMatmul, p->device->cublaslt, &x->op, alpha, x->a, &x->a_layout, x->b,
                   &x->b_layout, beta, x->d, &x->d_layout, x->d, &x->d_layout, plan.algo,
                   args->workspace, p->product_bytes, args->queue);
  return OMC_OK;
}

/* All dims of the batch but cuBLASLt's own, in turn. */
static omc_status multiply_all(const params *p, const void *right, const omc_kernel_args *args) {
  const omc_products_form *f = &p->form;
  const int32_t rank = f->dims.rank;
  const int64_t of_call = rank ? f->dims.dims[rank - 1] : 1;
  const int64_t size = (int64_t)omc_dtype_get(p->dtype)->size;
  const int64_t result_size = (int64_t)omc_dtype_get(p->result)->size;
  const int precision =
      p->dtype == OMC_F32 && __atomic_load_n(&p->device->tf32, __ATOMIC_RELAXED) ? TF32 : EXACT;
  const bool biased = args->n_in > 2 && args->in[2].type;
  for (int64_t i = 0; i < f->batch; i += of_call) {
    int64_t a, b;
    omc_products_at(f, i, &a, &b);
    product x = {.compute = compute_of(p, precision),
                 .a = (const char *)right + b * size,
                 .b = (const char *)args->in[0].data + a * size,
                 .bias = p->bias_after ? args->in[2].data : NULL,
                 .d = (char *)args->out[0].data + i * f->m * f->n * result_size};
    OMC_TRY(multiply(p, &x, precision, biased && !p->bias_after, args));
  }
  return OMC_OK;
}

static omc_status run_matmul(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  if (is_empty(p)) return OMC_OK;
  const omc_products_form *f = &p->form;
  const omc_tensor *y = &args->out[0], *bias = args->n_in > 2 ? &args->in[2] : NULL;
  const int64_t count = f->batch * f->m * f->n;
  if (bias && bias->type && !p->bias_after)
    OMC_TRY(copy(&p->fill, y->data, bias->data, count, f->n, args->queue));
  else if (f->k == 0)
    OMC_CUDA_TRY(cuMemsetD8Async, (omc_cuda_ptr)(uintptr_t)y->data, 0,
                 (size_t)count * omc_dtype_get(p->result)->size, args->queue);
  if (f->k == 0) return OMC_OK;
  const void *right = args->in[1].data;
  if (p->narrows) {
    right = (char *)args->workspace + omc_round_up(p->product_bytes, WORKSPACE_ALIGNMENT);
    OMC_TRY(copy(&p->narrow, (void *)(uintptr_t)right, args->in[1].data, p->n_right, p->n_right,
                 args->queue));
  }
  return multiply_all(p, right, args);
}

#define MATMUL                    \
  {.run = run_matmul,             \
   .params_size = sizeof(params), \
   .params = params_matmul,       \
   .workspace = matmul_workspace}
const omc_cuda_op omc_cuda_MatMul = MATMUL;
const omc_cuda_op omc_cuda_FusedMatMul = MATMUL;
