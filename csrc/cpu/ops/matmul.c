/* MatMul and FusedMatMul as a batch of products. */
#include "base/int.h"
#include "cpu/gemm.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/forms.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

#include "cpu/rows.h"

typedef struct {
  const omc_kernel_args *args;
  const omc_products_form *p;
  size_t thread_bytes; /* of workspace */
} matmul_job;

/* The matrix that begins `at` elements into a tensor. */
static omc_matrix matrix(const omc_tensor *t, int64_t at, int64_t rs, int64_t cs) {
  const omc_dtype dtype = t->type->dtype;
  return (omc_matrix){.data = (char *)t->data + at * (int64_t)omc_dtype_size(dtype),
                      .rs = rs,
                      .cs = cs,
                      .dtype = dtype,
                      .read_as = OMC_STORAGE};
}

static omc_gemm_args one_product(const omc_kernel_args *args, const omc_products_form *p,
                                 int64_t index) {
  int64_t a, b;
  omc_products_at(p, index, &a, &b);
  return (omc_gemm_args){.m = p->m,
                         .n = p->n,
                         .k = p->k,
                         .a = matrix(&args->in[0], a, p->trans_a ? 1 : p->k, p->trans_a ? p->m : 1),
                         .b = matrix(&args->in[1], b, p->trans_b ? 1 : p->n, p->trans_b ? p->k : 1),
                         .c = matrix(&args->out[0], index * p->m * p->n, p->n, 1),
                         .alpha = p->alpha,
                         .bias = omc_in_data(args, 2)};
}

/* Whether packing a product would take longer than summing it where it lies. */
static bool is_small(const omc_kernel_args *args, const omc_products_form *p) {
  enum { MOST_PRODUCTS = 512, MOST_DEPTH = 32 };
  return OMC_STORES_ACC && p->m * p->n * p->k <= MOST_PRODUCTS && p->k <= MOST_DEPTH &&
         args->in[0].type->dtype == OMC_ACC && args->in[1].type->dtype == OMC_ACC &&
         args->out[0].type->dtype == OMC_ACC;
}

/* n <= OMC_VL elements `step` apart. */
OMC_INLINE vacc_t vld_apart(const acc_t *x, int64_t step, int64_t n) {
  if (step == 1) return vldr_upto(x, n);
  acc_t lanes[OMC_VL] = {0};
  for (int64_t i = 0; i < n; i++) lanes[i] = x[i * step];
  return vldr(lanes);
}

/* A product with the sums of omc_gemm: each is a chain of multiply-adds along K. */
static void small_product(const omc_gemm_args *g) {
  const acc_t *const a = g->a.data, *const b = g->b.data, *const bias = g->bias;
  acc_t *const c = g->c.data;
  for (int64_t j = 0; j < g->n; j += OMC_VL) {
    const int64_t n = omc_min(g->n - j, OMC_VL);
    for (int64_t i = 0; i < g->m; i++) {
      vacc_t sum = vset(0);
      for (int64_t k = 0; k < g->k; k++)
        sum = vfma(vset(a[i * g->a.rs + k * g->a.cs]),
                   vld_apart(b + k * g->b.rs + j * g->b.cs, g->b.cs, n), sum);
      if (g->alpha != 1) sum *= vset((acc_t)g->alpha);
      if (bias) sum += vldr_upto(bias + j, n);
      vstr_upto(c + i * g->c.rs + j, sum, n);
    }
  }
}

static void small_products(omc_range range, void *ctx) {
  const matmul_job *job = ctx;
  for (int64_t i = range.begin; i < range.end; i++) {
    const omc_gemm_args g = one_product(job->args, job->p, i);
    small_product(&g);
  }
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
  const omc_products_form *p = args->params;
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
  omc_parallel_for(p->batch, omc_grain(OMC_GRAIN_PRODUCTS, work), args->threads,
                   is_small(args, p) ? small_products : products, &job);
  return OMC_OK;
}

#endif

#ifndef OMC_VARIANT

OMC_FORM(params_matmul, omc_products_form_of)

static size_t matmul_workspace(const omc_node *node, const void *params, int threads) {
  const omc_products_form *p = params;
  return omc_gemm_workspace(omc_in(node, 0)->type.dtype, p->m, p->n, p->k, threads);
}

OMC_KERNELS(MatMul)

#define MATMUL(name)                                                     \
  OMC_CPU_OP(name, MatMul, OMC_PARAMS(omc_products_form, params_matmul), \
             .workspace = matmul_workspace)
MATMUL(MatMul)
MATMUL(FusedMatMul)

#endif
