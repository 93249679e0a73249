/* cuBLASLt sees the columns of a matrix where a tensor has rows: it is asked for D' = B' A'. A bias
 * is added by it where it can, else D is filled with it before. */
#include "cuda/product.h"

#include <stdio.h>

#include "base/lock.h"
#include "cuda/gpu/repeat.h"

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
enum { ALIGNED = 16, MOST_WORKSPACE_BYTES = 32 << 20 };

enum { EXACT, TF32 };

/* One call to cuBLASLt, in its own terms: A is the right operand, B the left one. */
typedef struct call {
  int compute;
  const void *a, *b, *bias;
  void *d;
  omc_cublaslt_descriptor op, a_layout, b_layout, d_layout;
} call;

static int compute_of(const omc_cuda_product *p, int precision) {
  return p->dtype == OMC_F64 ? COMPUTE_F64 : precision == TF32 ? COMPUTE_TF32 : COMPUTE_F32;
}

/* ---- descriptions ---- */

static omc_status set_op(call *x, int attribute, const void *value, size_t bytes) {
  OMC_CUBLASLT_TRY(cublasLtMatmulDescSetAttribute, &x->op, attribute, value, bytes);
  return OMC_OK;
}

static omc_status describe_op(const omc_cuda_product *p, call *x) {
  const int32_t trans_a = p->trans_b, trans_b = p->trans_a;
  const uint32_t epilogue = EPILOGUE_BIAS;
  OMC_CUBLASLT_TRY(cublasLtMatmulDescInit_internal, &x->op, sizeof x->op, x->compute,
                   p->dtype == OMC_F64 ? R_64F : R_32F);
  OMC_TRY(set_op(x, OP_TRANS_A, &trans_a, sizeof trans_a));
  OMC_TRY(set_op(x, OP_TRANS_B, &trans_b, sizeof trans_b));
  if (!x->bias) return OMC_OK;
  OMC_TRY(set_op(x, OP_EPILOGUE, &epilogue, sizeof epilogue));
  return set_op(x, OP_BIAS_POINTER, &x->bias, sizeof x->bias);
}

/* A matrix of `rows` rows in memory, `row` elements from one to the next, which are its columns to
 * cuBLASLt; `stride` is from one matrix of the batch to the next. */
static omc_status describe_matrix(const omc_cuda_product *p, omc_dtype dtype, int64_t rows,
                                  int64_t columns, int64_t row, int64_t stride,
                                  omc_cublaslt_descriptor *out) {
  OMC_CUBLASLT_TRY(cublasLtMatrixLayoutInit_internal, out, sizeof *out, cublaslt_types[dtype],
                   (uint64_t)columns, (uint64_t)rows, row);
  if (p->batch == 0) return OMC_OK;
  OMC_CUBLASLT_TRY(cublasLtMatrixLayoutSetAttribute, out, LAYOUT_BATCH_COUNT, &p->batch,
                   sizeof p->batch);
  OMC_CUBLASLT_TRY(cublasLtMatrixLayoutSetAttribute, out, LAYOUT_BATCH_OFFSET, &stride,
                   sizeof stride);
  return OMC_OK;
}

static omc_status describe(const omc_cuda_product *p, call *x) {
  OMC_TRY(describe_op(p, x));
  OMC_TRY(describe_matrix(p, p->dtype, p->trans_b ? p->n : p->k, p->trans_b ? p->k : p->n, p->b_row,
                          p->b_stride, &x->a_layout));
  OMC_TRY(describe_matrix(p, p->dtype, p->trans_a ? p->k : p->m, p->trans_a ? p->m : p->k, p->a_row,
                          p->a_stride, &x->b_layout));
  return describe_matrix(p, p->result, p->m, p->n, p->d_row, p->m * p->d_row, &x->d_layout);
}

/* The best plan for operands so aligned; without one out->status says NOT_SUPPORTED. Sums that are
 * cut are put together in what is computed in. */
static omc_status ask(const omc_cuda_product *p, const call *x, uint32_t alignment,
                      size_t most_bytes, omc_cublaslt_plan *out) {
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

static omc_status plan_as(omc_cuda_product *p, bool bias_within) {
  p->bias_within = bias_within;
  for (int i = 0; i < (p->dtype == OMC_F32 ? 2 : 1); i++) {
    call x = {.compute = compute_of(p, i)};
    if (bias_within) x.bias = (const void *)(uintptr_t)ALIGNED; /* how it is aligned */
    OMC_TRY(describe(p, &x));
    OMC_TRY(ask(p, &x, ALIGNED, MOST_WORKSPACE_BYTES, &p->plans[i]));
    if (p->plans[i].status != 0) break;
    if (p->plans[i].workspace_bytes > p->workspace_bytes)
      p->workspace_bytes = p->plans[i].workspace_bytes;
  }
  return OMC_OK;
}

static bool is_planned(const omc_cuda_product *p) {
  return p->plans[EXACT].status == 0 && p->plans[TF32].status == 0;
}

omc_status omc_cuda_product_plan(omc_cuda_product *p, const omc_node *node) {
  if (p->m == 0 || p->n == 0) return OMC_OK;
  if (p->k > 0) {
    OMC_TRY(plan_as(p, p->biased));
    if (!is_planned(p) && p->biased) OMC_TRY(plan_as(p, false));
    if (!is_planned(p))
      OMC_NODE_FAIL(node, EUNSUPPORTED, "cuBLASLt has nothing for products of %s",
                    omc_dtype_get(p->dtype)->text);
  }
  if (p->biased) /* within, it may yet lie where cuBLASLt cannot add it */
    return omc_cuda_repeat_of(p->device, p->result, p->result, &p->fill);
  return OMC_OK;
}

/* ---- run time ---- */

static uint32_t multiple_of(uint64_t addresses) {
  return addresses % ALIGNED ? (uint32_t)(addresses & -addresses) : ALIGNED;
}

/* A bias counts: cuBLASLt has no wish for its own, and does not say that it reads any. */
static uint32_t alignment_of(const call *x) {
  return multiple_of((uintptr_t)x->a | (uintptr_t)x->b | (uintptr_t)x->d | (uintptr_t)x->bias);
}

OMC_PROCESS_LOCK(answers) /* those of all products: threads may run one at a time each */

/* The plan for operands as they lie: the one there is, or one for fewer bytes or without a bias,
 * for which cuBLASLt is asked once while they lie so. */
static omc_status plan_for(omc_cuda_product *p, call *x, int precision, omc_cublaslt_plan *out) {
  const uint32_t alignment = alignment_of(x), of_bias = multiple_of((uintptr_t)x->bias);
  *out = p->plans[precision];
  OMC_TRY(describe(p, x));
  if (alignment == ALIGNED && (x->bias != NULL) == p->bias_within) return OMC_OK;
  omc_cuda_answer *known = &p->others[__builtin_ctz(alignment)][x->bias != NULL];
  omc_cuda_answer asked = {.of = 2 * of_bias + (precision == TF32)};
  answers_acquire();
  const bool is_known = known->of == asked.of;
  if (is_known) *out = known->plan;
  answers_release();
  if (is_known) return OMC_OK;
  OMC_TRY(ask(p, x, alignment, p->workspace_bytes, &asked.plan));
  *out = asked.plan;
  answers_acquire();
  *known = asked;
  answers_release();
  return OMC_OK;
}

static omc_status multiply(const omc_cuda_product *p, const call *x, const omc_cublaslt_plan *plan,
                           bool adds, void *workspace, void *queue) {
  const double wide[] = {p->alpha, adds};
  const float narrow[] = {(float)wide[0], (float)wide[1]};
  const bool is_wide = p->dtype == OMC_F64;
  const void *alpha = is_wide ? (const void *)&wide[0] : &narrow[0];
  const void *beta = is_wide ? (const void *)&wide[1] : &narrow[1];
  OMC_CUBLASLT_TRY(cublasLtMatmul, p->device->cublaslt, &x->op, alpha, x->a, &x->a_layout, x->b,
                   &x->b_layout, beta, x->d, &x->d_layout, x->d, &x->d_layout, plan->algo,
                   workspace, p->workspace_bytes, queue);
  return OMC_OK;
}

omc_status omc_cuda_product_run(omc_cuda_product *p, const omc_cuda_operands *operands,
                                void *workspace, const char *node, void *queue) {
  if (p->m == 0 || p->n == 0) return OMC_OK;
  const int64_t count = (p->batch ? p->batch : 1) * p->m * p->d_row;
  const int precision =
      p->dtype == OMC_F32 && __atomic_load_n(&p->device->tf32, __ATOMIC_RELAXED) ? TF32 : EXACT;
  omc_cublaslt_plan plan = {.status = 0};
  call x = {.compute = compute_of(p, precision),
            .a = operands->b,
            .b = operands->a,
            .bias = p->bias_within ? operands->bias : NULL,
            .d = operands->d};
  if (p->k > 0) OMC_TRY(plan_for(p, &x, precision, &plan));
  if (plan.status != 0 && x.bias) { /* there may be one for the product alone */
    x.bias = NULL;
    OMC_TRY(plan_for(p, &x, precision, &plan));
  }
  if (plan.status != 0)
    OMC_FAIL(EUNSUPPORTED, "'%s': cuBLASLt has nothing for operands at multiples of %u bytes", node,
             alignment_of(&x));
  const bool fills = p->biased && (p->k == 0 || !x.bias);
  if (fills)
    OMC_TRY(omc_cuda_repeat(&p->fill, operands->d, operands->bias, count, p->d_row, queue));
  if (p->k == 0 && !fills && !operands->adds)
    OMC_CUDA_TRY(cuMemsetD8Async, (omc_cuda_ptr)(uintptr_t)operands->d, 0,
                 (size_t)count * omc_dtype_size(p->result), queue);
  if (p->k == 0) return OMC_OK;
  return multiply(p, &x, &plan, fills || operands->adds, workspace, queue);
}

/* ---- copies ---- */

omc_status omc_cuda_repeat_of(omc_cuda_device *device, omc_dtype from, omc_dtype to,
                              omc_cuda_kernel *out) {
  char source[256];
  snprintf(source, sizeof source,
           "#define OMC_TO %s\n#define OMC_FROM %s\n#define OMC_ACC %s\n#include "
           "\"cuda/gpu/repeat.h\"\n",
           omc_cuda_storage(to), omc_cuda_storage(from), omc_cuda_storage(omc_dtype_acc(to)));
  return omc_cuda_kernel_in(device, source, "copy_rows", out);
}

omc_status omc_cuda_repeat(omc_cuda_kernel *kernel, void *y, const void *x, int64_t count,
                           int64_t n, void *queue) {
  const omc_product_copy c = {y, x, count, n};
  const int64_t of_block = (int64_t)OMC_PRODUCT_THREADS * OMC_PRODUCT_PACK;
  const int64_t blocks = (count + of_block - 1) / of_block;
  return omc_cuda_launch(kernel, (omc_cuda_grid){blocks, OMC_PRODUCT_THREADS, 0}, &c, queue);
}
