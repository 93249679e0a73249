/* Attention and its gradient in tiles; nothing of T x S elements is stored. */
#include "cuda/ops/attention.h"

#include <stdio.h>

#include "base/alloc.h"
#include "base/int.h"
#include "cuda/launch.h"
#include "ops/forms.h"
#include "ops/random.h"

/* Elements of a head whose sums registers hold. */
enum { MOST_BYTES = 512 };

typedef struct params {
  omc_cuda_kernel forward, rows_of_grad, dq, dkv;
  omc_attention given; /* but for addresses and the seed */
  int64_t rows;        /* of scores */
  int64_t query_blocks, key_blocks;
  size_t acc_bytes;
  uint32_t shared_bytes; /* forward, and for each operand more that backward keeps */
  uint32_t more_bytes;
} params;

static omc_attention_strides strides_of(const omc_head_strides *s) {
  return (omc_attention_strides){s->sample, s->head, s->token};
}

static omc_attention given_of(const omc_attention_form *f) {
  omc_attention a = {.q_at = strides_of(&f->q),
                     .k_at = strides_of(&f->k),
                     .v_at = strides_of(&f->v),
                     .y_at = strides_of(&f->y),
                     .heads = (int32_t)f->heads,
                     .kv_heads = (int32_t)f->kv_heads,
                     .queries = (int32_t)f->queries,
                     .keys = (int32_t)f->keys,
                     .scale = f->scale,
                     .keep_scale = f->p < 1 ? 1 / (1 - f->p) : 0,
                     .drop_below = omc_drop_threshold(f->p),
                     .subsequence = f->subsequence};
  for (int i = 0; i < 4; i++) a.mask_at[i] = f->mask_strides[i];
  return a;
}

static omc_status kernels_of(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                             const omc_attention_form *f, bool masked, params *p) {
  char defines[160];
  snprintf(defines, sizeof defines,
           "#define OMC_DIM %d\n#define OMC_VALUE_DIM %d\n#define OMC_MASK %d\n"
           "#define OMC_CAUSAL %d\n#define OMC_DROPS %d\n",
           (int)f->dim, (int)f->value_dim,
           !masked           ? 0
           : f->mask_is_bool ? 1
                             : 2,
           f->causal, f->p > 0);
  static const char *const names[] = {"attention", "attention_rows", "attention_dq",
                                      "attention_dkv"};
  omc_cuda_kernel *const kernels[] = {&p->forward, &p->rows_of_grad, &p->dq, &p->dkv};
  for (int i = 0; i < 4; i++)
    OMC_TRY(omc_cuda_kernel_of(device, node, arena, "attention", f->dtype, defines, names[i], "",
                               kernels[i]));
  return OMC_OK;
}

static omc_status params_attention(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                   void *params_) {
  params *p = params_;
  omc_attention_form f;
  OMC_TRY(omc_attention_form_of(node, &f));
  if (omc_max(f.queries, f.keys) > INT32_MAX - OMC_TILE || f.heads > INT32_MAX)
    OMC_NODE_FAIL(node, EUNSUPPORTED, "cuda has no kernel for %lld queries and %lld keys",
                  (long long)f.queries, (long long)f.keys);
  p->given = given_of(&f);
  p->rows = f.batch * f.heads * f.queries;
  p->query_blocks = f.batch * f.heads * omc_ceil_div(f.queries, OMC_TILE);
  p->key_blocks = f.batch * f.kv_heads * omc_ceil_div(f.keys, OMC_TILE);
  p->acc_bytes = omc_dtype_size(omc_dtype_acc(f.dtype));
  const int64_t deepest = omc_max(f.dim, f.value_dim), acc_bytes = (int64_t)p->acc_bytes;
  if (omc_min(f.dim, f.value_dim) < 1 || deepest * acc_bytes > MOST_BYTES)
    OMC_NODE_FAIL(node, EUNSUPPORTED, "cuda has no kernel for heads of %lld and %lld elements",
                  (long long)f.dim, (long long)f.value_dim);
  const int64_t kept = OMC_ATTENTION_ROOM(deepest) + OMC_TILE * OMC_TILE_PITCH;
  p->shared_bytes = (uint32_t)((kept + f.dim * OMC_TILE_PITCH) * acc_bytes);
  p->more_bytes = (uint32_t)(f.value_dim * OMC_TILE_PITCH * acc_bytes);
  if (p->shared_bytes + p->more_bytes > device->shared_bytes)
    OMC_NODE_FAIL(node, EUNSUPPORTED, "cuda has no kernel for heads that take %u bytes of a block",
                  p->shared_bytes + p->more_bytes);
  const uint32_t mask = node->op == OMC_OP_Attention ? 3 : 5;
  return kernels_of(device, node, arena, &f, omc_in(node, mask) != NULL, p);
}

static void *data_of(const omc_tensor *tensors, uint32_t n, uint32_t i) {
  return i < n && tensors[i].type ? tensors[i].data : NULL;
}

static omc_status launch(omc_cuda_kernel *kernel, int64_t blocks, uint32_t shared_bytes,
                         const omc_attention *given, void *queue) {
  const omc_cuda_grid grid = {blocks, OMC_ATTENTION_THREADS, shared_bytes};
  return omc_cuda_launch(kernel, grid, given, queue);
}

static omc_status run_attention(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_attention a = p->given;
  a.q = args->in[0].data, a.k = args->in[1].data, a.v = args->in[2].data;
  a.mask = data_of(args->in, args->n_in, 3);
  a.y = args->out[0].data, a.lse = data_of(args->out, args->n_out, 1);
  a.tiles = (int32_t)omc_ceil_div(a.queries, OMC_TILE);
  a.seed = omc_cuda_seed(args);
  return launch(&p->forward, p->query_blocks, p->shared_bytes, &a, args->queue);
}

/* Of each row its share and delta. */
static size_t grad_workspace(const void *params_) {
  const params *p = params_;
  return 2 * (size_t)p->rows * p->acc_bytes;
}

static omc_status run_attention_grad(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_attention a = p->given;
  a.dy = args->in[0].data, a.lse = args->in[4].data;
  a.q = args->in[1].data, a.k = args->in[2].data, a.v = args->in[3].data;
  a.mask = data_of(args->in, args->n_in, 5);
  a.dq = args->out[0].data, a.dk = args->out[1].data, a.dv = args->out[2].data;
  a.share = args->workspace;
  a.delta = (char *)args->workspace + (size_t)p->rows * p->acc_bytes;
  a.seed = omc_cuda_seed(args);
  const uint32_t shared_bytes = p->shared_bytes + p->more_bytes;
  a.tiles = (int32_t)omc_ceil_div(a.queries, OMC_TILE);
  OMC_TRY(launch(&p->rows_of_grad, p->query_blocks, shared_bytes, &a, args->queue));
  OMC_TRY(launch(&p->dq, p->query_blocks, shared_bytes, &a, args->queue));
  a.tiles = (int32_t)omc_ceil_div(a.keys, OMC_TILE);
  return launch(&p->dkv, p->key_blocks, shared_bytes, &a, args->queue);
}

const omc_cuda_op omc_cuda_Attention = {
    .run = run_attention, .params_size = sizeof(params), .params = params_attention};
const omc_cuda_op omc_cuda_AttentionGrad = {.run = run_attention_grad,
                                            .params_size = sizeof(params),
                                            .params = params_attention,
                                            .workspace = grad_workspace};
