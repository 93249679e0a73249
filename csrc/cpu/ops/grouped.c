/* GroupedMatMul and the gradient of its matrices: a product for each group, large ones on all
 * threads in turn, small ones on a thread each. */
#include <string.h>

#include "cpu/gemm.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/forms.h"

/* Of the workspace, for one thread; a group may have any of the rows. */
static inline size_t product_bytes(const omc_grouped_form *p, omc_dtype dtype) {
  return omc_gemm_workspace(dtype, p->rows, p->n, p->k, 1);
}

static inline size_t gradient_bytes(const omc_grouped_form *p, omc_dtype dtype) {
  const int64_t m = p->trans_b ? p->n : p->k, n = p->trans_b ? p->k : p->n;
  return omc_gemm_workspace(dtype, m, n, p->rows, 1);
}

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

typedef omc_gemm_args product_of(const omc_kernel_args *args, int64_t group, int64_t row,
                                 int64_t rows);

typedef struct {
  const omc_kernel_args *args;
  product_of *of;
  size_t thread_bytes; /* of workspace */
} grouped_job;

static int64_t first_row(const omc_kernel_args *args, int64_t group) {
  return group ? ((const int64_t *)args->in[2].data)[group - 1] : 0;
}

static omc_gemm_args product_at(const grouped_job *job, int64_t group) {
  const int64_t row = first_row(job->args, group);
  return job->of(job->args, group, row, first_row(job->args, group + 1) - row);
}

static int64_t work_of(const omc_gemm_args *g) { return g->m * g->n * g->k; }

static bool is_large(const grouped_job *job, const omc_gemm_args *g) {
  return work_of(g) >= (int64_t)OMC_GRAIN_PRODUCTS * job->args->threads;
}

static omc_status check_ends(const omc_kernel_args *args) {
  const omc_grouped_form *p = args->params;
  for (int64_t i = 0; i < p->groups; i++) {
    const int64_t end = first_row(args, i + 1), least = first_row(args, i);
    if (end < least || end > p->rows)
      OMC_FAIL(EINDEX, "end %lld of the groups is %lld, expected %lld to %lld ('%s')", (long long)i,
               (long long)end, (long long)least, (long long)p->rows, args->node);
  }
  return OMC_OK;
}

static void small_products(omc_range range, void *ctx) {
  const grouped_job *job = ctx;
  char *workspace = (char *)job->args->workspace + (size_t)range.thread * job->thread_bytes;
  for (int64_t i = range.begin; i < range.end; i++) {
    const omc_gemm_args g = product_at(job, i);
    if (g.m > 0 && g.n > 0 && !is_large(job, &g)) omc_gemm_serial(&g, workspace);
  }
}

static omc_status multiply(const omc_kernel_args *args, product_of *of, size_t thread_bytes) {
  const omc_grouped_form *p = args->params;
  OMC_TRY(check_ends(args));
  if (p->groups == 0) return OMC_OK;
  const grouped_job job = {args, of, thread_bytes};
  int64_t small = 0;
  for (int64_t i = 0; i < p->groups; i++) {
    const omc_gemm_args g = product_at(&job, i);
    if (is_large(&job, &g))
      omc_gemm(&g, args->threads, args->workspace);
    else
      small += work_of(&g);
  }
  const int64_t unit = small / p->groups;
  omc_parallel_for(p->groups, omc_grain(OMC_GRAIN_PRODUCTS, unit), args->threads, small_products,
                   (void *)&job);
  return OMC_OK;
}

/* A matrix of `columns` from an element of a tensor on; or transposed. */
static omc_matrix matrix(const omc_tensor *t, int64_t at, int64_t columns, bool transposed) {
  const storage_t *data = (const storage_t *)t->data + at;
  return transposed ? omc_matrix_columns(data, columns, OMC_STORAGE)
                    : omc_matrix_rows(data, columns, OMC_STORAGE);
}

static omc_gemm_args rows_times_matrix(const omc_kernel_args *args, int64_t group, int64_t row,
                                       int64_t rows) {
  const omc_grouped_form *p = args->params;
  return (omc_gemm_args){
      .m = rows,
      .n = p->n,
      .k = p->k,
      .a = matrix(&args->in[0], row * p->k, p->k, false),
      .b = matrix(&args->in[1], group * p->k * p->n, p->trans_b ? p->k : p->n, p->trans_b),
      .c = matrix(&args->out[0], row * p->n, p->n, false),
      .alpha = 1};
}

/* Of no rows zeros, as of every product along nothing. */
static omc_gemm_args rows_times_gradient(const omc_kernel_args *args, int64_t group, int64_t row,
                                         int64_t rows) {
  const omc_grouped_form *p = args->params;
  const omc_matrix x = matrix(&args->in[0], row * p->k, p->k, !p->trans_b);
  const omc_matrix dy = matrix(&args->in[1], row * p->n, p->n, p->trans_b);
  const int64_t columns = p->trans_b ? p->k : p->n;
  return (omc_gemm_args){.m = p->trans_b ? p->n : p->k,
                         .n = columns,
                         .k = rows,
                         .a = p->trans_b ? dy : x,
                         .b = p->trans_b ? x : dy,
                         .c = matrix(&args->out[0], group * p->k * p->n, columns, false),
                         .alpha = 1};
}

OMC_KERNEL(GroupedMatMul, args) {
  const omc_grouped_form *p = args->params;
  OMC_TRY(multiply(args, rows_times_matrix, product_bytes(p, OMC_STORAGE)));
  const int64_t covered = first_row(args, p->groups), left = (p->rows - covered) * p->n;
  if (left > 0)
    memset((storage_t *)args->out[0].data + covered * p->n, 0, (size_t)left * sizeof(storage_t));
  return OMC_OK;
}

OMC_KERNEL(GroupedMatMulGradWeight, args) {
  return multiply(args, rows_times_gradient, gradient_bytes(args->params, OMC_STORAGE));
}

#endif

#ifndef OMC_VARIANT

OMC_FORM(params_grouped, omc_grouped_form_of)

static size_t product_workspace(const omc_node *node, const void *params, int threads) {
  return (size_t)threads * product_bytes(params, omc_in(node, 0)->type.dtype);
}

static size_t gradient_workspace(const omc_node *node, const void *params, int threads) {
  return (size_t)threads * gradient_bytes(params, omc_in(node, 0)->type.dtype);
}

OMC_KERNELS(GroupedMatMul)
OMC_KERNELS(GroupedMatMulGradWeight)
OMC_CPU_OP(GroupedMatMul, GroupedMatMul, OMC_PARAMS(omc_grouped_form, params_grouped),
           .workspace = product_workspace)
OMC_CPU_OP(GroupedMatMulGradWeight, GroupedMatMulGradWeight,
           OMC_PARAMS(omc_grouped_form, params_grouped), .workspace = gradient_workspace)

#endif
