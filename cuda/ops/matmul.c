/* MatMul and FusedMatMul: products of cuda/product.h, of a batch whose last dim is cuBLASLt's. */
#include "base/int.h"
#include "cuda/product.h"
#include "ops/forms.h"

typedef struct params {
  omc_products_form form;
  omc_cuda_product product; /* of one call */
  bool
      narrows; /* the right operand is rounded to the dtype of the left before, all n_right of it */
  int64_t n_right;
  omc_cuda_kernel narrow;
} params;

/* ---- plan time ---- */

static omc_status params_matmul(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                void *params_) {
  (void)arena;
  params *p = params_;
  omc_products_form *f = &p->form;
  OMC_TRY(omc_products_form_of(node, f));
  const int32_t last = f->dims.rank ? f->dims.rank - 1 : 0; /* strides of no batch are 0 */
  const int64_t batch = f->dims.rank ? f->dims.dims[last] : 0;
  if (batch > INT32_MAX)
    OMC_NODE_FAIL(node, EUNSUPPORTED, "cuBLASLt has no batches of %lld", (long long)batch);
  p->product = (omc_cuda_product){.device = device,
                                  .dtype = omc_in(node, 0)->type.dtype,
                                  .result = node->out[0]->type.dtype,
                                  .m = f->m,
                                  .n = f->n,
                                  .k = f->k,
                                  .trans_a = f->trans_a,
                                  .trans_b = f->trans_b,
                                  .a_row = f->trans_a ? f->m : f->k,
                                  .b_row = f->trans_b ? f->k : f->n,
                                  .d_row = f->n,
                                  .batch = (int32_t)batch,
                                  .a_stride = f->a_strides[last],
                                  .b_stride = f->b_strides[last],
                                  .alpha = f->alpha,
                                  .biased = omc_in(node, 2) != NULL};
  const omc_type *right = &omc_in(node, 1)->type;
  p->narrows = right->dtype != p->product.dtype;
  p->n_right = omc_shape_numel(&right->shape);
  if (f->batch == 0) return OMC_OK;
  OMC_TRY(omc_cuda_enter(device));
  omc_status status = omc_cuda_product_plan(&p->product, node);
  if (status == OMC_OK && p->narrows)
    status = omc_cuda_repeat_of(device, right->dtype, p->product.dtype, &p->narrow);
  omc_cuda_leave(device);
  return status;
}

static size_t narrowed_at(const params *p) {
  return omc_round_up(p->product.workspace_bytes, OMC_PRODUCT_ALIGNMENT);
}

static size_t matmul_workspace(const void *params_) {
  const params *p = params_;
  if (!p->narrows) return p->product.workspace_bytes;
  return narrowed_at(p) + (size_t)p->n_right * omc_dtype_size(p->product.dtype);
}

/* ---- run time ---- */

static omc_status run_matmul(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  const omc_products_form *f = &p->form;
  const void *right = args->in[1].data;
  if (p->narrows && f->batch * f->m * f->n > 0) {
    right = (char *)args->workspace + narrowed_at(p);
    OMC_TRY(omc_cuda_repeat(&p->narrow, (void *)(uintptr_t)right, args->in[1].data, p->n_right,
                            p->n_right, args->queue));
  }
  const int64_t size = (int64_t)omc_dtype_size(p->product.dtype);
  const int64_t matrix = f->m * f->n * (int64_t)omc_dtype_size(p->product.result);
  const int64_t of_call = p->product.batch ? p->product.batch : 1;
  for (int64_t i = 0; i < f->batch; i += of_call) { /* all dims but cuBLASLt's own, in turn */
    int64_t a, b;
    omc_products_at(f, i, &a, &b);
    const omc_cuda_operands operands = {.a = (const char *)args->in[0].data + a * size,
                                        .b = (const char *)right + b * size,
                                        .bias = omc_cuda_in(args, 2),
                                        .d = (char *)args->out[0].data + i * matrix};
    OMC_TRY(omc_cuda_product_run(&p->product, &operands, args->workspace, args->node, args->queue));
  }
  return OMC_OK;
}

#define MATMUL                    \
  {.run = run_matmul,             \
   .params_size = sizeof(params), \
   .params = params_matmul,       \
   .workspace = matmul_workspace}
const omc_cuda_op omc_cuda_MatMul = MATMUL;
const omc_cuda_op omc_cuda_FusedMatMul = MATMUL;
