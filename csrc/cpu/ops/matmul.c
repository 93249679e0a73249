/* MatMul and FusedMatMul as a batch of products. */
#include "cpu/gemm.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/forms.h"

/* `batch` products of [m, k] by [k, n]. The batch dims of C are a mixed-radix number whose digits
 * step through a and b by the strides below, 0 where an operand is repeated. */
typedef struct {
  int64_t m, n, k, batch;
  int64_t a_rs, a_cs, b_rs, b_cs;
  omc_shape dims; /* of the batch */
  int64_t a_strides[OMC_MAX_RANK], b_strides[OMC_MAX_RANK];
  double alpha;
} matmul_params;

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

typedef struct {
  const omc_kernel_args *args;
  const matmul_params *p;
  size_t thread_bytes; /* of workspace */
} matmul_job;

/* The matrix that begins `at` elements into a tensor. */
static omc_matrix matrix(const omc_tensor *t, int64_t at, int64_t rs, int64_t cs) {
  const omc_dtype dtype = t->type->dtype;
  return (omc_matrix){.data = (char *)t->data + at * (int64_t)omc_dtype_get(dtype)->size,
                      .rs = rs,
                      .cs = cs,
                      .dtype = dtype,
                      .read_as = OMC_STORAGE};
}

static omc_gemm_args one_product(const omc_kernel_args *args, const matmul_params *p,
                                 int64_t index) {
  int64_t a = 0, b = 0, rest = index;
  for (int32_t d = p->dims.rank - 1; d >= 0; d--) {
    const int64_t digit = rest % p->dims.dims[d];
    rest /= p->dims.dims[d];
    a += digit * p->a_strides[d];
    b += digit * p->b_strides[d];
  }
  return (omc_gemm_args){.m = p->m,
                         .n = p->n,
                         .k = p->k,
                         .a = matrix(&args->in[0], a, p->a_rs, p->a_cs),
                         .b = matrix(&args->in[1], b, p->b_rs, p->b_cs),
                         .c = matrix(&args->out[0], index * p->m * p->n, p->n, 1),
                         .alpha = p->alpha,
                         .bias = args->n_in > 2 && args->in[2].type ? args->in[2].data : NULL};
}

static void products(omc_range range, void *ctx) {
  const matmul_job *job = ctx;
  char *workspace = (char *)job->args->workspace + (size_t)range.thread * job->thread_bytes;
  for (int64_t i = range.begin; i < range.end; i++) {
    const omc_gemm_args g = one_product(job->args, job->p, i);
    omc_gemm_serial(&g, workspace);
  }
}

/* Few products on all threads in turn, many on a thread each. */
OMC_KERNEL(MatMul, args) {
  enum { ROUNDS = 4 };
  const matmul_params *p = args->params;
  if (p->m == 0 || p->n == 0) return OMC_OK;
  const int64_t work = p->m * p->n * (p->k ? p->k : 1);
  const bool uneven = p->batch % args->threads && p->batch < ROUNDS * args->threads;
  if (p->batch == 1 || (uneven && work >= OMC_GRAIN_PRODUCTS * args->threads)) {
    for (int64_t i = 0; i < p->batch; i++) {
      const omc_gemm_args g = one_product(args, p, i);
      omc_gemm(&g, args->threads, args->workspace);
    }
    return OMC_OK;
  }
  matmul_job job = {args, p, omc_gemm_workspace(OMC_STORAGE, p->m, p->n, p->k, 1)};
  omc_parallel_for(p->batch, omc_grain(OMC_GRAIN_PRODUCTS, work), args->threads, products, &job);
  return OMC_OK;
}

#endif

#ifndef OMC_VARIANT

static omc_status params_matmul(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  matmul_params *p = params;
  omc_matmul_form f;
  OMC_TRY(omc_matmul_form_of(node, &f));
  *p = (matmul_params){.m = f.m,
                       .n = f.n,
                       .k = f.k,
                       .a_rs = f.trans_a ? 1 : f.k,
                       .a_cs = f.trans_a ? f.m : 1,
                       .b_rs = f.trans_b ? 1 : f.n,
                       .b_cs = f.trans_b ? f.k : 1,
                       .dims = omc_batch_dims(&f.c),
                       .alpha = f.alpha};
  const omc_shape batch_a = omc_batch_dims(&f.a), batch_b = omc_batch_dims(&f.b);
  p->batch = omc_shape_numel(&p->dims);
  /* One matrix on the right: the batch only makes the left one taller. */
  if (omc_shape_numel(&batch_b) == 1 && omc_shape_numel(&batch_a) == p->batch && !f.trans_a) {
    p->m *= p->batch;
    p->batch = 1;
    p->dims.rank = 0;
    return OMC_OK;
  }
  omc_broadcast_strides(&batch_a, &p->dims, p->a_strides);
  omc_broadcast_strides(&batch_b, &p->dims, p->b_strides);
  for (int32_t d = 0; d < p->dims.rank; d++) {
    p->a_strides[d] *= f.m * f.k;
    p->b_strides[d] *= f.k * f.n;
  }
  return OMC_OK;
}

static size_t matmul_workspace(const omc_node *node, const void *params, int threads) {
  const matmul_params *p = params;
  return omc_gemm_workspace(omc_in(node, 0)->type.dtype, p->m, p->n, p->k, threads);
}

OMC_KERNELS(MatMul)

#define MATMUL(name) \
  OMC_CPU_OP(name, MatMul, OMC_PARAMS(matmul_params, params_matmul), .workspace = matmul_workspace)
MATMUL(MatMul)
MATMUL(FusedMatMul)

#endif
