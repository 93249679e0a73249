/* MatMul with numpy semantics, and FusedMatMul: transposed operands, a factor and a bias. Of
 * operands of 16 bits its right one may be of what they are computed in, and is then rounded to the
 * dtype of the left one as it is read; its result may be of that too, by `to`, and the bias is of
 * the result's dtype. */
#include "ops/forms.h"
#include "ops/infer.h"
#include "ops/op.h"

/* The operands as matrices: a vector is a row on the left and a column on the right. */
typedef struct {
  omc_shape a, b, c; /* c with the dims that vectors add */
  bool trans_a, trans_b;
  bool a_vector, b_vector;
  int64_t m, n, k;
  double alpha;
} matmul_form;

/* All but the last two. */
static omc_shape batch_dims(const omc_shape *matrix) {
  omc_shape out = *matrix;
  out.rank -= 2;
  return out;
}

static omc_status form_of(const omc_node *node, matmul_form *f) {
  char text[OMC_NODE_TEXT], ta[OMC_TYPE_TEXT], tb[OMC_TYPE_TEXT];
  const omc_type *a = &omc_in(node, 0)->type, *b = &omc_in(node, 1)->type;
  if (a->shape.rank == 0 || b->shape.rank == 0)
    OMC_NODE_FAIL(node, ESHAPE, "cannot multiply %s by %s", omc_type_text(a, ta, sizeof ta),
                  omc_type_text(b, tb, sizeof tb));
  *f = (matmul_form){
      .a = a->shape, .b = b->shape, .a_vector = a->shape.rank == 1, .b_vector = b->shape.rank == 1};
  if (f->a_vector) f->a = (omc_shape){2, {1, a->shape.dims[0]}};
  if (f->b_vector) f->b = (omc_shape){2, {b->shape.dims[0], 1}};
  const bool fused = node->op == OMC_OP_FusedMatMul;
  f->trans_a = fused && !f->a_vector && omc_node_int(node, "transA");
  f->trans_b = fused && !f->b_vector && omc_node_int(node, "transB");
  f->alpha = fused ? omc_node_float(node, "alpha") : 1;
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

/* Neighbouring dims that both operands step through evenly become one. */
static void join_dims(omc_products_form *p) {
  int32_t rank = 0;
  for (int32_t d = 0; d < p->dims.rank; d++) {
    const int64_t size = p->dims.dims[d], a = p->a_strides[d], b = p->b_strides[d];
    if (size == 1) continue;
    const bool even =
        rank && p->a_strides[rank - 1] == a * size && p->b_strides[rank - 1] == b * size;
    const int32_t to = even ? rank - 1 : rank++;
    p->dims.dims[to] = even ? p->dims.dims[to] * size : size;
    p->a_strides[to] = a, p->b_strides[to] = b;
  }
  p->dims.rank = rank;
}

omc_status omc_products_form_of(const omc_node *node, omc_products_form *p) {
  matmul_form f;
  OMC_TRY(form_of(node, &f));
  *p = (omc_products_form){.m = f.m,
                           .n = f.n,
                           .k = f.k,
                           .trans_a = f.trans_a,
                           .trans_b = f.trans_b,
                           .dims = batch_dims(&f.c),
                           .alpha = f.alpha};
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
  join_dims(p);
  return OMC_OK;
}

void omc_products_at(const omc_products_form *p, int64_t index, int64_t *a, int64_t *b) {
  *a = *b = 0;
  for (int32_t d = p->dims.rank - 1; d >= 0; d--) {
    const int64_t digit = index % p->dims.dims[d];
    index /= p->dims.dims[d];
    *a += digit * p->a_strides[d];
    *b += digit * p->b_strides[d];
  }
}

static omc_status infer_matmul(omc_node *node) {
  matmul_form f;
  OMC_TRY(omc_need_float(node, 0));
  const omc_dtype dtype = omc_in(node, 0)->type.dtype, wide = omc_dtype_acc(dtype);
  const bool fused = node->op == OMC_OP_FusedMatMul;
  if (!fused || omc_in(node, 1)->type.dtype != wide) OMC_TRY(omc_need_dtype(node, 1, dtype));
  OMC_TRY(form_of(node, &f));
  const omc_dtype result =
      fused && omc_node_attr(node, "to") ? omc_node_to_dtype(node, "to") : dtype;
  if (result != dtype && result != wide)
    OMC_NODE_FAIL(node, EDTYPE, "a product of %s cannot be %s", omc_dtype_get(dtype)->text,
                  omc_dtype_get(result)->text);
  OMC_TRY(omc_need_type(node, 2, "bias", result, &(omc_shape){1, {f.n}}));
  omc_shape out = batch_dims(&f.c);
  if (!f.a_vector) out.dims[out.rank++] = f.m;
  if (!f.b_vector) out.dims[out.rank++] = f.n;
  omc_set_type(node, 0, result, &out);
  return OMC_OK;
}

/* Its matrices stacked into one: [..., r, c] as [... * r, c]. */
static omc_value *stacked(omc_builder *b, omc_value *x, const omc_shape *shape) {
  const int32_t last = shape->rank - 1;
  const omc_shape flat = {2, {omc_shape_span(shape, 0, last), shape->dims[last]}};
  return omc_reshape(b, x, &flat);
}

/* With A and B as multiplied and dC given: dA = dC B', dB = A' dC, each transposed if its operand
 * was, by the flags of the product alone. */
static omc_status grad_matmul(omc_grad *g) {
  matmul_form f;
  OMC_TRY(form_of(g->node, &f));
  omc_builder *b = &g->b;
  const omc_dtype dtype = omc_in(g->node, 0)->type.dtype;
  omc_value *left = omc_reshape(b, omc_in(g->node, 0), &f.a);
  omc_value *right = omc_reshape(b, omc_cast(b, omc_in(g->node, 1), dtype), &f.b);
  omc_value *dy = omc_reshape(b, g->grad_out[0], &f.c), *dc = omc_cast(b, dy, dtype);
  if (g->needs[0]) {
    omc_value *da = f.trans_a ? omc_product(b, right, f.trans_b, dc, true, f.alpha, NULL)
                              : omc_product(b, dc, false, right, !f.trans_b, f.alpha, NULL);
    g->grad_in[0] = f.a_vector ? omc_sum_to(b, da, &omc_in(g->node, 0)->type.shape) : da;
  }
  if (g->needs[1]) {
    /* One matrix on the right of a batch: a single long product sums over the batch. */
    const bool stack = f.b.rank == 2 && f.a.rank > 2 && !f.trans_a;
    omc_value *x = stack ? stacked(b, left, &f.a) : left;
    omc_value *d = stack ? stacked(b, dc, &f.c) : dc;
    omc_value *db = f.trans_b ? omc_product(b, d, true, x, f.trans_a, f.alpha, NULL)
                              : omc_product(b, x, !f.trans_a, d, false, f.alpha, NULL);
    if (db && f.b_vector)
      db = omc_reshape(b, omc_sum_to(b, db, &f.b), &omc_in(g->node, 1)->type.shape);
    g->grad_in[1] = omc_cast(b, db, omc_in(g->node, 1)->type.dtype);
  }
  if (omc_in(g->node, 2) && g->needs[2])
    g->grad_in[2] = omc_sum_to(b, dy, &omc_in(g->node, 2)->type.shape);
  return b->status;
}

static omc_status matmul_cost(const omc_node *node, omc_cost *cost) {
  matmul_form f;
  OMC_TRY(form_of(node, &f));
  const double results = (double)omc_shape_numel(&f.c);
  cost->flops = 2 * results * (double)f.k + (omc_in(node, 2) ? results : 0);
  return OMC_OK;
}

OMC_RECORD(MatMul, 2, 2, 1, .infer = infer_matmul, .cost = matmul_cost, .grad = grad_matmul)
OMC_RECORD(FusedMatMul, 2, 3, 1, .infer = infer_matmul, .cost = matmul_cost, .grad = grad_matmul)
