/* LayerNormalization, RmsNorm, GroupNorm and BatchNorm (training), and their gradients. With
 * xhat = (x - mean) * rstd, y = xhat * gamma + beta, and mean and rstd are kept for backward. The
 * mean of RmsNorm is 0, and its beta too. Where x is of float32, y of the first two may be rounded
 * to 16 bits, by attribute `to`, and so may its gradient be.
 *
 * To y of BatchNorm something may be added, and what is below 0 of that may become 0, by attribute
 * `relu`: each time as if y had been stored before. Its gradient, with that attribute, is 0 where
 * y, computed again, is not above 0; for this beta is kept as it was, which is called the shift. */
#include "ops/forms.h"
#include "ops/infer.h"
#include "ops/op.h"

enum { ADDED = 5, SHIFT = 5 }; /* input of BatchNorm; its output, and input of its gradient */

/* A parameter or running statistic: of x's dtype, or of the one that is computed in. */
static omc_status need_param(const omc_node *node, uint32_t i, const char *what, omc_dtype x,
                             const omc_shape *shape) {
  const omc_value *v = omc_in(node, i);
  const bool wide = v && v->type.dtype == omc_dtype_acc(x);
  return omc_need_type(node, i, what, wide ? omc_dtype_acc(x) : x, shape);
}

/* gamma and beta. */
static omc_status need_params(const omc_node *node, const omc_shape *shape) {
  const omc_dtype x = omc_in(node, 0)->type.dtype;
  OMC_TRY(need_param(node, 1, "gamma", x, shape));
  return need_param(node, 2, "beta", x, shape);
}

/* Sets the types of y, mean and rstd. */
static omc_status set_types(omc_node *node, omc_dtype y, const omc_shape *stats) {
  const omc_type *x = &omc_in(node, 0)->type;
  if (!omc_out(node, 0)) OMC_NODE_FAIL(node, EINVALID, "output y must be there");
  omc_set_type(node, 0, y, &x->shape);
  omc_set_type(node, 1, omc_dtype_acc(x->dtype), stats);
  omc_set_type(node, 2, omc_dtype_acc(x->dtype), stats);
  return OMC_OK;
}

/* Whether y, or its gradient, may be of that dtype. */
static bool fits(omc_dtype y, omc_dtype x) {
  return y == x || (x == OMC_F32 && omc_dtype_acc(y) == x);
}

omc_status omc_layer_form_of(const omc_node *node, uint32_t x, omc_shape *params, omc_shape *stats,
                             omc_layer_form *p) {
  OMC_TRY(omc_need_float(node, x));
  const omc_shape *shape = &omc_in(node, x)->type.shape;
  int32_t axis;
  OMC_TRY(omc_need_axis(node, shape->rank, &axis));
  *params = (omc_shape){.rank = shape->rank - axis};
  *stats = *shape;
  for (int32_t i = axis; i < shape->rank; i++) {
    params->dims[i - axis] = shape->dims[i];
    stats->dims[i] = 1;
  }
  *p = (omc_layer_form){.rows = omc_shape_span(shape, 0, axis),
                        .n = omc_shape_numel(params),
                        .epsilon = omc_node_float(node, "epsilon")};
  return OMC_OK;
}

static omc_status infer_layer(omc_node *node) {
  omc_shape params, stats;
  omc_layer_form p;
  OMC_TRY(omc_layer_form_of(node, 0, &params, &stats, &p));
  OMC_TRY(need_params(node, &params));
  const omc_type *x = &omc_in(node, 0)->type;
  const omc_dtype y = omc_node_attr(node, "to") ? omc_node_to_dtype(node, "to") : x->dtype;
  if (!fits(y, x->dtype))
    OMC_NODE_FAIL(node, EDTYPE, "what is made of %s cannot be %s", omc_dtype_get(x->dtype)->text,
                  omc_dtype_get(y)->text);
  return set_types(node, y, &stats);
}

/* Gradient of any of these: `params` is the shape of gamma and beta, `stats` that of the
 * statistics. The parameters' gradients are sums, and come as they are computed. */
static omc_status infer_grad(omc_node *node, const omc_shape *params, const omc_shape *stats) {
  static const char *const names[] = {"mean", "rstd", "shift"};
  const omc_type *x = &omc_in(node, 1)->type;
  const uint32_t first = node->op == OMC_OP_RmsNormGrad ? 2 : 3;
  OMC_TRY(need_param(node, 2, "gamma", x->dtype, params));
  for (uint32_t i = 3; i < node->n_in; i++)
    OMC_TRY(omc_need_type(node, i, names[i - first], omc_dtype_acc(x->dtype), stats));
  omc_set_type(node, 0, x->dtype, &x->shape);
  omc_set_type(node, 1, omc_dtype_acc(x->dtype), params);
  omc_set_type(node, 2, omc_dtype_acc(x->dtype), params);
  return OMC_OK;
}

static omc_status infer_layer_grad(omc_node *node) {
  omc_shape params, stats;
  omc_layer_form p;
  OMC_TRY(omc_layer_form_of(node, 1, &params, &stats, &p));
  const omc_type *dy = &omc_in(node, 0)->type, *x = &omc_in(node, 1)->type;
  const bool narrow = fits(dy->dtype, x->dtype);
  OMC_TRY(omc_need_type(node, 0, "dy", narrow ? dy->dtype : x->dtype, &x->shape));
  return infer_grad(node, &params, &stats);
}

/* Gradient node: (dy, x, gamma?, mean, rstd) -> dx, dgamma, dbeta; `statistics`: how many of these
 * two the op keeps. Attribute `less` is the op's alone. */
static omc_status gradient(omc_grad *g, omc_value *dy, omc_op_id op, uint32_t statistics,
                           const char *less) {
  const omc_node *node = g->node;
  OMC_TRY(omc_need_saved(g, 1 + statistics));
  if (!dy) return OMC_OK;
  omc_value *in[] = {dy, omc_in(node, 0), omc_in(node, 1), omc_out(node, 1), omc_out(node, 2)};
  const uint32_t n_out = omc_in(node, 2) ? 3 : omc_in(node, 1) ? 2 : 1;
  omc_value *out[3] = {NULL, NULL, NULL};
  omc_attr *attr = OMC_NEW_ARRAY(&g->b.graph->arena, omc_attr, node->n_attr + 1);
  if (!attr) OMC_NODE_FAIL(node, ENOMEM, "no memory for its attributes");
  const uint32_t n_attr = omc_attrs_without(node, less, attr);
  omc_build(&g->b, op, 3 + statistics, in, 1u << 2, n_attr, attr, n_out, out);
  for (uint32_t i = 0; i < n_out; i++)
    if (omc_in(node, i)) g->grad_in[i] = out[i];
  return g->b.status;
}
static omc_status grad_layer(omc_grad *g) {
  return gradient(g, g->grad_out[0], OMC_OP_LayerNormGrad, 2, "to");
}
static omc_status grad_rms(omc_grad *g) {
  return gradient(g, g->grad_out[0], OMC_OP_RmsNormGrad, 1, "to");
}
static omc_status grad_group(omc_grad *g) {
  return gradient(g, g->grad_out[0], OMC_OP_GroupNormGrad, 2, "to");
}
static omc_status grad_batch(omc_grad *g) {
  omc_value *dy = g->grad_out[0];
  if (dy && omc_node_int(g->node, "relu"))
    dy = omc_binary(&g->b, OMC_OP_ReluGrad, dy, omc_out(g->node, 0));
  if (omc_in(g->node, ADDED)) g->grad_in[ADDED] = dy;
  return gradient(g, dy, OMC_OP_BatchNormGrad, 2, "relu");
}

omc_status omc_group_form_of(const omc_node *node, uint32_t x, omc_shape *params, omc_shape *stats,
                             omc_group_form *p) {
  char type[OMC_TYPE_TEXT];
  OMC_TRY(omc_need_float(node, x));
  const omc_shape *shape = &omc_in(node, x)->type.shape;
  const int64_t groups = omc_node_int(node, "num_groups");
  if (shape->rank < 2 || shape->dims[1] % groups)
    OMC_NODE_FAIL(node, ESHAPE, "the channels of input %s are not %lld groups of one size",
                  omc_type_text(&omc_in(node, x)->type, type, sizeof type), (long long)groups);
  *params = (omc_shape){.rank = 1, .dims = {shape->dims[1]}};
  *stats = (omc_shape){.rank = 2, .dims = {shape->dims[0], groups}};
  *p = (omc_group_form){.batch = shape->dims[0],
                        .groups = groups,
                        .channels = shape->dims[1] / groups,
                        .inner = omc_shape_span(shape, 2, shape->rank),
                        .epsilon = omc_node_float(node, "epsilon")};
  return OMC_OK;
}

static omc_status infer_group(omc_node *node) {
  omc_shape params, stats;
  omc_group_form p;
  OMC_TRY(omc_group_form_of(node, 0, &params, &stats, &p));
  OMC_TRY(need_params(node, &params));
  return set_types(node, omc_in(node, 0)->type.dtype, &stats);
}

static omc_status infer_group_grad(omc_node *node) {
  omc_shape params, stats;
  omc_group_form p;
  OMC_TRY(omc_group_form_of(node, 1, &params, &stats, &p));
  const omc_type *x = &omc_in(node, 1)->type;
  OMC_TRY(omc_need_type(node, 0, "dy", x->dtype, &x->shape));
  return infer_grad(node, &params, &stats);
}

omc_status omc_batch_form_of(const omc_node *node, uint32_t x, omc_shape *channels,
                             omc_batch_form *p) {
  char type[OMC_TYPE_TEXT];
  OMC_TRY(omc_need_float(node, x));
  const omc_shape *shape = &omc_in(node, x)->type.shape;
  if (shape->rank < 2)
    OMC_NODE_FAIL(node, ESHAPE, "input %s has no channel axis",
                  omc_type_text(&omc_in(node, x)->type, type, sizeof type));
  *channels = (omc_shape){.rank = 1, .dims = {shape->dims[1]}};
  *p = (omc_batch_form){.batch = shape->dims[0],
                        .channels = shape->dims[1],
                        .inner = omc_shape_span(shape, 2, shape->rank),
                        .epsilon = omc_node_float(node, "epsilon"),
                        .momentum = omc_node_float(node, "momentum"),
                        .relu = omc_node_int(node, "relu") != 0};
  if (p->batch * p->inner == 1)
    OMC_NODE_FAIL(node, ESHAPE,
                  "expected more than 1 value per channel when training, got input %s",
                  omc_type_text(&omc_in(node, x)->type, type, sizeof type));
  return OMC_OK;
}

static omc_status infer_batch(omc_node *node) {
  omc_shape channels;
  omc_batch_form p;
  OMC_TRY(omc_batch_form_of(node, 0, &channels, &p));
  const omc_type *x = &omc_in(node, 0)->type;
  static const char *const names[] = {"gamma", "beta", "running_mean", "running_var"};
  for (uint32_t i = 1; i <= 4; i++) OMC_TRY(need_param(node, i, names[i - 1], x->dtype, &channels));
  OMC_TRY(omc_need_type(node, ADDED, "what is added", x->dtype, &x->shape));
  for (uint32_t i = 3; i <= 4; i++)
    if (omc_out(node, i) && !omc_in(node, i))
      OMC_NODE_FAIL(node, EINVALID, "output %u is the update of %s, which is left out", i,
                    names[i - 1]);
  if (!omc_out(node, 1) || !omc_out(node, 2))
    OMC_NODE_FAIL(node, EINVALID, "outputs mean and rstd must be there");
  OMC_TRY(set_types(node, x->dtype, &channels));
  for (uint32_t i = 3; i <= 4; i++)
    if (omc_in(node, i)) omc_set_type(node, i, omc_in(node, i)->type.dtype, &channels);
  omc_set_type(node, SHIFT, omc_dtype_acc(x->dtype), &channels);
  return OMC_OK;
}

static omc_status infer_batch_grad(omc_node *node) {
  omc_shape channels;
  omc_batch_form p;
  OMC_TRY(omc_batch_form_of(node, 1, &channels, &p));
  const omc_type *x = &omc_in(node, 1)->type;
  OMC_TRY(omc_need_type(node, 0, "dy", x->dtype, &x->shape));
  if (p.relu != (omc_in(node, SHIFT) != NULL))
    OMC_NODE_FAIL(node, EINVALID, "input %u, the shift, is there for attribute relu, and only then",
                  SHIFT);
  return infer_grad(node, &channels, &channels);
}

OMC_RECORD(LayerNormalization, 1, 3, 3, .in_place = 1u << 0, .infer = infer_layer,
           .grad = grad_layer)
OMC_RECORD(RmsNorm, 1, 2, 2, .in_place = 1u << 0, .infer = infer_layer, .grad = grad_rms)
OMC_RECORD(GroupNorm, 1, 3, 3, .in_place = 1u << 0, .infer = infer_group, .grad = grad_group)
OMC_RECORD(BatchNorm, 1, 6, 6, .in_place = 1u << 0 | 1u << ADDED, .updates = 1u << 3 | 1u << 4,
           .infer = infer_batch, .grad = grad_batch)

#define NORM_GRAD(name, least_in, most_in, n_out, infer_)                                        \
  OMC_RECORD(name, least_in, most_in, n_out, .in_place = 1u << 0 | 1u << 1, .optional = 1u << 2, \
             .chosen_by = 1, .infer = infer_)
NORM_GRAD(LayerNormGrad, 5, 5, 3, infer_layer_grad)
NORM_GRAD(RmsNormGrad, 4, 4, 2, infer_layer_grad)
NORM_GRAD(GroupNormGrad, 5, 5, 3, infer_group_grad)
NORM_GRAD(BatchNormGrad, 5, 6, 3, infer_batch_grad)
