/* MatMul with numpy semantics, and FusedMatMul: transposed operands, a factor and a bias. */
#include "cpu/gemm.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/infer.h"
#include "ops/op.h"

/* `batch` products of [m, k] by [k, n]. The batch dims of C are a mixed-radix number whose digits
 * step through a and b by the strides below, 0 where an operand is repeated. */
typedef struct {
  omc_dtype dtype;
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
                         .a = {(elem *)args->in[0].data + a, p->a_rs, p->a_cs},
                         .b = {(elem *)args->in[1].data + b, p->b_rs, p->b_cs},
                         .c = {(elem *)args->out[0].data + index * p->m * p->n, p->n, 1},
                         .alpha = p->alpha,
                         .bias = args->n_in > 2 && args->in[2].type ? args->in[2].data : NULL};
}

static void products(int64_t begin, int64_t end, int thread, void *ctx) {
  const matmul_job *job = ctx;
  char *workspace = (char *)job->args->workspace + (size_t)thread * job->thread_bytes;
  for (int64_t i = begin; i < end; i++) {
    const omc_gemm_args g = one_product(job->args, job->p, i);
    omc_gemm_serial(job->p->dtype, &g, workspace);
  }
}

/* Few products on all threads in turn, many on a thread each. */
static omc_status matmul(const omc_kernel_args *args) {
  enum { GRAIN = 1 << 17 /* multiply-adds for a thread */, ROUNDS = 4 };
  const matmul_params *p = args->params;
  if (p->m == 0 || p->n == 0) return OMC_OK;
  const int64_t work = p->m * p->n * (p->k ? p->k : 1);
  const bool uneven = p->batch % args->threads && p->batch < ROUNDS * args->threads;
  if (p->batch == 1 || (uneven && work >= GRAIN * args->threads)) {
    for (int64_t i = 0; i < p->batch; i++) {
      const omc_gemm_args g = one_product(args, p, i);
      omc_gemm(p->dtype, &g, args->threads, args->workspace);
    }
    return OMC_OK;
  }
  matmul_job job = {args, p, omc_gemm_workspace(p->dtype, p->m, p->n, p->k, 1)};
  omc_parallel_for(p->batch, GRAIN / work + 1, args->threads, products, &job);
  return OMC_OK;
}

OMC_KERNEL(MatMul) { return matmul(args); }
OMC_KERNEL(FusedMatMul) { return matmul(args); }

#endif

#ifdef OMC_RECORDS

/* A node's operands as matrices: a vector is a row on the left and a column on the right. */
typedef struct {
  omc_shape a, b, c; /* c with the dims that vectors add */
  bool trans_a, trans_b;
  bool a_vector, b_vector;
  int64_t m, n, k;
} matmul_form;

static omc_shape batch_dims(const omc_shape *matrix) {
  omc_shape out = *matrix;
  out.rank -= 2;
  return out;
}

static omc_status read_form(const omc_node *node, matmul_form *f) {
  char text[OMC_NODE_TEXT], ta[OMC_TYPE_TEXT], tb[OMC_TYPE_TEXT];
  const omc_type *a = &omc_in(node, 0)->type, *b = &omc_in(node, 1)->type;
  if (a->shape.rank == 0 || b->shape.rank == 0)
    OMC_NODE_FAIL(node, ESHAPE, "cannot multiply %s by %s", omc_type_text(a, ta, sizeof ta),
                  omc_type_text(b, tb, sizeof tb));
  *f = (matmul_form){
      .a = a->shape, .b = b->shape, .a_vector = a->shape.rank == 1, .b_vector = b->shape.rank == 1};
  if (f->a_vector) f->a = (omc_shape){2, {1, a->shape.dims[0]}};
  if (f->b_vector) f->b = (omc_shape){2, {b->shape.dims[0], 1}};
  f->trans_a = !f->a_vector && omc_attr_int(node, "transA", 0);
  f->trans_b = !f->b_vector && omc_attr_int(node, "transB", 0);
  const int64_t *da = f->a.dims + f->a.rank - 2, *db = f->b.dims + f->b.rank - 2;
  f->m = da[f->trans_a];
  f->k = da[!f->trans_a];
  f->n = db[!f->trans_b];
  if (db[f->trans_b] != f->k)
    OMC_NODE_FAIL(node, ESHAPE, "cannot multiply %s by %s: %lld columns meet %lld rows",
                  omc_type_text(a, ta, sizeof ta), omc_type_text(b, tb, sizeof tb), (long long)f->k,
                  (long long)db[f->trans_b]);
  const omc_shape batch_a = batch_dims(&f->a), batch_b = batch_dims(&f->b);
  OMC_TRY(omc_shape_broadcast(&batch_a, &batch_b, omc_node_text(node, text, sizeof text), &f->c));
  f->c.dims[f->c.rank++] = f->m;
  f->c.dims[f->c.rank++] = f->n;
  return OMC_OK;
}

static omc_status matmul_infer(omc_node *node) {
  char type[OMC_TYPE_TEXT];
  matmul_form f;
  OMC_TRY(omc_need_float(node, 0));
  const omc_dtype dtype = omc_in(node, 0)->type.dtype;
  OMC_TRY(omc_need_dtype(node, 1, dtype));
  OMC_TRY(read_form(node, &f));
  if (omc_in(node, 2)) {
    OMC_TRY(omc_need_dtype(node, 2, dtype));
    OMC_TRY(omc_need_rank(node, 2, 1));
    const omc_type *bias = &omc_in(node, 2)->type;
    if (bias->shape.dims[0] != f.n)
      OMC_NODE_FAIL(node, ESHAPE, "bias is %s for %lld columns",
                    omc_type_text(bias, type, sizeof type), (long long)f.n);
  }
  omc_shape out = batch_dims(&f.c);
  if (!f.a_vector) out.dims[out.rank++] = f.m;
  if (!f.b_vector) out.dims[out.rank++] = f.n;
  omc_set_type(node, 0, dtype, &out);
  return OMC_OK;
}

static omc_status matmul_decode(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  matmul_params *p = params;
  matmul_form f;
  OMC_TRY(read_form(node, &f));
  *p = (matmul_params){.dtype = omc_in(node, 0)->type.dtype,
                       .m = f.m,
                       .n = f.n,
                       .k = f.k,
                       .a_rs = f.trans_a ? 1 : f.k,
                       .a_cs = f.trans_a ? f.m : 1,
                       .b_rs = f.trans_b ? 1 : f.n,
                       .b_cs = f.trans_b ? f.k : 1,
                       .dims = batch_dims(&f.c),
                       .alpha = omc_attr_float(node, "alpha", 1.0)};
  const omc_shape batch_a = batch_dims(&f.a), batch_b = batch_dims(&f.b);
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
  (void)node;
  const matmul_params *p = params;
  return omc_gemm_workspace(p->dtype, p->m, p->n, p->k, threads);
}

static omc_value *product(omc_builder *b, omc_value *x, bool trans_x, omc_value *y, bool trans_y,
                          double alpha) {
  omc_value *const in[] = {x, y};
  const omc_attr attr[] = {omc_ai("transA", trans_x), omc_ai("transB", trans_y),
                           omc_af("alpha", alpha)};
  return omc_bn(b, OMC_OP_FusedMatMul, 2, in, 3, attr);
}

/* Its matrices stacked into one: [..., r, c] as [... * r, c]. */
static omc_value *stacked(omc_builder *b, omc_value *x, const omc_shape *shape) {
  const int32_t last = shape->rank - 1;
  const omc_shape flat = {2, {omc_shape_span(shape, 0, last), shape->dims[last]}};
  return omc_reshape(b, x, &flat);
}

/* With A and B as multiplied and dC given: dA = dC B', dB = A' dC, each transposed if its operand
 * was, by the flags of the product alone. */
static omc_status matmul_grad(omc_grad *g) {
  matmul_form f;
  OMC_TRY(read_form(g->node, &f));
  omc_builder *b = &g->b;
  const double alpha = omc_attr_float(g->node, "alpha", 1.0);
  omc_value *left = omc_reshape(b, omc_in(g->node, 0), &f.a);
  omc_value *right = omc_reshape(b, omc_in(g->node, 1), &f.b);
  omc_value *dc = omc_reshape(b, g->dout[0], &f.c);
  if (g->needs[0]) {
    omc_value *da = f.trans_a ? product(b, right, f.trans_b, dc, true, alpha)
                              : product(b, dc, false, right, !f.trans_b, alpha);
    g->din[0] = f.a_vector ? omc_sum_to(b, da, &omc_in(g->node, 0)->type.shape) : da;
  }
  if (g->needs[1]) {
    /* One matrix on the right of a batch: a single long product sums over the batch. */
    const bool stack = f.b.rank == 2 && f.a.rank > 2 && !f.trans_a;
    omc_value *x = stack ? stacked(b, left, &f.a) : left;
    omc_value *dy = stack ? stacked(b, dc, &f.c) : dc;
    omc_value *db = f.trans_b ? product(b, dy, true, x, f.trans_a, alpha)
                              : product(b, x, !f.trans_a, dy, false, alpha);
    if (db && f.b_vector)
      db = omc_reshape(b, omc_sum_to(b, db, &f.b), &omc_in(g->node, 1)->type.shape);
    g->din[1] = db;
  }
  if (omc_in(g->node, 2) && g->needs[2])
    g->din[2] = omc_sum_to(b, dc, &omc_in(g->node, 2)->type.shape);
  return b->status;
}

#define MATMUL_OP(name_, most_in)                                      \
  OMC_KERNELS(name_)                                                   \
  const omc_op omc_op_##name_ = {.name = #name_,                       \
                                 .min_in = 2,                          \
                                 .max_in = most_in,                    \
                                 .n_out = 1,                           \
                                 .infer = matmul_infer,                \
                                 .grad = matmul_grad,                  \
                                 .params_size = sizeof(matmul_params), \
                                 .params = matmul_decode,              \
                                 .workspace = matmul_workspace,        \
                                 .cpu = &omc_kernels_##name_};
MATMUL_OP(MatMul, 2)
MATMUL_OP(FusedMatMul, 3)

#endif
