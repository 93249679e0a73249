/* Conv, its gradients, and ConvTranspose, which is one of them. */
#include "ops/forms.h"
#include "ops/infer.h"
#include "ops/op.h"

/* ---- geometry ---- */

bool omc_is_channels_last(const omc_node *node) { return omc_node_int(node, "channels_last") != 0; }

omc_shape omc_channels_second(const omc_node *node, const omc_shape *shape) {
  omc_shape s = *shape;
  if (!omc_is_channels_last(node) || s.rank < 3) return s;
  s.dims[1] = shape->dims[s.rank - 1];
  for (int32_t d = 2; d < s.rank; d++) s.dims[d] = shape->dims[d - 1];
  return s;
}

/* From a shape with channels second to where the node has them. */
static omc_shape laid_out(const omc_node *node, const omc_shape *shape) {
  omc_shape s = *shape;
  if (!omc_is_channels_last(node)) return s;
  for (int32_t d = 2; d < s.rank; d++) s.dims[d - 1] = shape->dims[d];
  s.dims[s.rank - 1] = shape->dims[1];
  return s;
}

/* Attribute `name`, a value for each of the last `rank` axes, `neutral` where there is none such.
 * Pads have a second list, `after`. */
static omc_status read_axes(const omc_node *node, const char *name, int32_t rank, int64_t neutral,
                            int64_t *out, int64_t *after) {
  int64_t values[2 * OMC_CONV_AXES];
  OMC_TRY(omc_node_list(node, name, (uint32_t)(after ? 2 * rank : rank), values));
  for (int32_t a = 0; a < OMC_CONV_AXES; a++) {
    const int32_t d = a + rank - OMC_CONV_AXES;
    out[a] = d >= 0 ? values[d] : neutral;
    if (after) after[a] = d >= 0 ? values[d + rank] : neutral;
  }
  return OMC_OK;
}

/* Space dims of a tensor. */
static void read_dims(const omc_shape *shape, int64_t *out) {
  for (int32_t a = 0; a < OMC_CONV_AXES; a++) {
    const int32_t d = a + shape->rank - OMC_CONV_AXES;
    out[a] = d >= 2 ? shape->dims[d] : 1;
  }
}

static omc_status read_windows(const omc_node *node, int32_t rank, omc_conv_form *f) {
  if (rank < 1 || rank > OMC_CONV_AXES)
    OMC_NODE_FAIL(node, EUNSUPPORTED, "convolution over %d space dims", rank);
  *f = (omc_conv_form){.group = omc_node_int(node, "group")};
  OMC_TRY(read_axes(node, "strides", rank, 1, f->stride, NULL));
  OMC_TRY(read_axes(node, "dilations", rank, 1, f->dilation, NULL));
  return read_axes(node, "pads", rank, 0, f->before, f->after);
}

/* The form of a convolution of x by w, with channels second, with the node's attributes. */
static omc_status read_form(const omc_node *node, const omc_shape *x, const omc_shape *w,
                            omc_conv_form *f) {
  char tx[OMC_TYPE_TEXT], tw[OMC_TYPE_TEXT];
  OMC_TRY(read_windows(node, x->rank - 2, f));
  f->n = x->dims[0], f->c = x->dims[1];
  read_dims(x, f->in);
  bool fits = w->rank == x->rank && w->dims[1] * f->group == f->c && w->dims[0] % f->group == 0;
  if (fits) {
    f->o = w->dims[0], f->cg = w->dims[1];
    read_dims(w, f->kernel);
  }
  for (int a = 0; fits && a < OMC_CONV_AXES; a++) {
    const int64_t spare =
        f->in[a] + f->before[a] + f->after[a] - f->dilation[a] * (f->kernel[a] - 1) - 1;
    f->out[a] = spare / f->stride[a] + 1;
    fits = spare >= 0 && f->kernel[a] > 0;
  }
  if (fits) return OMC_OK;
  OMC_NODE_FAIL(node, ESHAPE, "input %s does not fit weight %s in %lld groups",
                omc_shape_text(x, tx, sizeof tx), omc_shape_text(w, tw, sizeof tw),
                (long long)f->group);
}

omc_status omc_conv_form_of(const omc_node *node, omc_conv_form *out) {
  const omc_shape x = omc_channels_second(node, omc_in_shape(node, 0));
  const omc_shape w = omc_channels_second(node, omc_in_shape(node, 1));
  return read_form(node, &x, &w, out);
}

static omc_shape output_shape(const omc_node *node, const omc_conv_form *f, int32_t rank) {
  omc_shape y = {rank, {f->n, f->o}};
  for (int32_t d = 2; d < rank; d++) y.dims[d] = f->out[d + OMC_CONV_AXES - rank];
  return laid_out(node, &y);
}

/* *shape has its channels second. */
static omc_status read_transpose(const omc_node *node, const omc_shape *x, const omc_shape *w,
                                 omc_shape *shape, omc_conv_form *f) {
  int64_t extra[OMC_CONV_AXES], dims[OMC_CONV_AXES];
  const int32_t rank = x->rank - 2;
  OMC_TRY(read_windows(node, rank, f));
  OMC_TRY(read_axes(node, "output_padding", rank, 0, extra, NULL));
  if (w->rank != x->rank || w->dims[0] != x->dims[1])
    OMC_NODE_FAIL(node, ESHAPE, "a weight of rank %d for %lld channels of rank %d", w->rank,
                  (long long)x->dims[1], x->rank);
  read_dims(x, dims);
  read_dims(w, f->kernel);
  *shape = (omc_shape){x->rank, {x->dims[0], w->dims[1] * f->group}};
  for (int a = OMC_CONV_AXES - rank; a < OMC_CONV_AXES; a++) {
    /* Rows past the last window, which its gradient would be asked for. */
    if (extra[a] >= f->stride[a])
      OMC_NODE_FAIL(node, EUNSUPPORTED, "output_padding of %lld for a stride of %lld",
                    (long long)extra[a], (long long)f->stride[a]);
    const int64_t span = (f->kernel[a] - 1) * f->dilation[a] + 1 - f->before[a] - f->after[a];
    const int64_t dim = (dims[a] - 1) * f->stride[a] + span + extra[a];
    if (dim < 1) OMC_NODE_FAIL(node, ESHAPE, "a result of size %lld", (long long)dim);
    shape->dims[a + x->rank - OMC_CONV_AXES] = dim;
  }
  return read_form(node, shape, w, f);
}

omc_status omc_conv_transpose_form_of(const omc_node *node, omc_shape *shape, omc_conv_form *f) {
  const omc_shape x = omc_channels_second(node, omc_in_shape(node, 0));
  const omc_shape w = omc_channels_second(node, omc_in_shape(node, 1));
  OMC_TRY(read_transpose(node, &x, &w, shape, f));
  *shape = laid_out(node, shape);
  return OMC_OK;
}

/* Both factors are of one float dtype, and so is the bias, one for each channel of the result. */
static omc_status need_factors(const omc_node *node) {
  OMC_TRY(omc_need_float(node, 0));
  return omc_need_dtype(node, 1, omc_in(node, 0)->type.dtype);
}
static omc_status need_bias(const omc_node *node, int64_t channels) {
  const omc_shape shape = {1, {channels}};
  return omc_need_type(node, 2, "bias", omc_in(node, 0)->type.dtype, &shape);
}

static omc_status infer_conv(omc_node *node) {
  omc_conv_form f;
  OMC_TRY(need_factors(node));
  OMC_TRY(omc_conv_form_of(node, &f));
  OMC_TRY(need_bias(node, f.o));
  const omc_shape out = output_shape(node, &f, omc_in_shape(node, 0)->rank);
  omc_set_shape(node, &out);
  return OMC_OK;
}

static omc_status infer_transpose(omc_node *node) {
  omc_conv_form f;
  omc_shape out;
  OMC_TRY(need_factors(node));
  OMC_TRY(omc_conv_transpose_form_of(node, &out, &f));
  OMC_TRY(need_bias(node, f.c));
  omc_set_shape(node, &out);
  return OMC_OK;
}

/* Both gradients know one shape by their attribute `shape`: x's, or the weight's. */
omc_status omc_conv_grad_form_of(const omc_node *node, bool of_input, omc_shape *out,
                                 omc_conv_form *f) {
  OMC_TRY(omc_need_shape(node, out));
  const omc_shape given = omc_channels_second(node, out);
  const omc_shape other = omc_channels_second(node, omc_in_shape(node, 1));
  OMC_TRY(read_form(node, of_input ? &given : &other, of_input ? &other : &given, f));
  const omc_shape y = output_shape(node, f, out->rank);
  return omc_need_gradient(node, &y);
}

static omc_status infer_grad(omc_node *node, bool of_input) {
  omc_conv_form f;
  omc_shape out;
  OMC_TRY(need_factors(node));
  OMC_TRY(omc_conv_grad_form_of(node, of_input, &out, &f));
  omc_set_shape(node, &out);
  return OMC_OK;
}

static omc_status infer_grad_input(omc_node *node) { return infer_grad(node, true); }
static omc_status infer_grad_weight(omc_node *node) { return infer_grad(node, false); }

/* ---- gradient rule and records ---- */

static void sum_to_bias(omc_grad *g) {
  static const int64_t axes[2][OMC_CONV_AXES + 1] = {{0, 2, 3, 4}, {0, 1, 2, 3}};
  omc_value *dy = g->grad_out[0];
  if (omc_in(g->node, 2) && g->needs[2])
    g->grad_in[2] = omc_reduce_sum(&g->b, dy, axes[omc_is_channels_last(g->node)],
                                   dy->type.shape.rank - 1, false);
}

static omc_status grad_conv(omc_grad *g) {
  omc_value *x = omc_in(g->node, 0), *w = omc_in(g->node, 1);
  omc_value *const dy_w[] = {g->grad_out[0], w}, *const dy_x[] = {g->grad_out[0], x};
  if (g->needs[0])
    g->grad_in[0] = omc_nary_like(&g->b, OMC_OP_ConvGradInput, 2, dy_w, g->node, &x->type.shape);
  if (g->needs[1])
    g->grad_in[1] = omc_nary_like(&g->b, OMC_OP_ConvGradWeight, 2, dy_x, g->node, &w->type.shape);
  sum_to_bias(g);
  return g->b.status;
}

static omc_status grad_transpose(omc_grad *g) {
  omc_value *x = omc_in(g->node, 0), *w = omc_in(g->node, 1);
  omc_value *const dy_w[] = {g->grad_out[0], w}, *const x_dy[] = {x, g->grad_out[0]};
  if (g->needs[0]) g->grad_in[0] = omc_nary_like(&g->b, OMC_OP_Conv, 2, dy_w, g->node, NULL);
  if (g->needs[1])
    g->grad_in[1] = omc_nary_like(&g->b, OMC_OP_ConvGradWeight, 2, x_dy, g->node, &w->type.shape);
  sum_to_bias(g);
  return g->b.status;
}

/* Each element of y, or of its gradient, meets one filter: a product and a sum for each weight. And
 * a sum for each element of the result if there is a bias. */
static omc_status cost_of(const omc_node *node, const omc_value *y, const omc_value *weight,
                          omc_cost *cost) {
  const double filters = (double)weight->type.shape.dims[0];
  const double all = (double)omc_shape_numel(&weight->type.shape);
  cost->flops = filters > 0 ? 2 * (double)omc_shape_numel(&y->type.shape) * (all / filters) : 0;
  if (omc_in(node, 2)) cost->flops += (double)omc_shape_numel(&node->out[0]->type.shape);
  return OMC_OK;
}
static omc_status conv_cost(const omc_node *node, omc_cost *cost) {
  return cost_of(node, node->out[0], omc_in(node, 1), cost);
}
/* In a transposed convolution x stands for the gradient. */
static omc_status input_grad_cost(const omc_node *node, omc_cost *cost) {
  return cost_of(node, omc_in(node, 0), omc_in(node, 1), cost);
}
static omc_status weight_grad_cost(const omc_node *node, omc_cost *cost) {
  return cost_of(node, omc_in(node, 0), node->out[0], cost);
}

OMC_RECORD(Conv, 2, 3, 1, .infer = infer_conv, .grad = grad_conv, .cost = conv_cost)
OMC_RECORD(ConvTranspose, 2, 3, 1, .infer = infer_transpose, .grad = grad_transpose,
           .cost = input_grad_cost)
OMC_RECORD(ConvGradInput, 2, 2, 1, .infer = infer_grad_input, .cost = input_grad_cost)
OMC_RECORD(ConvGradWeight, 2, 2, 1, .infer = infer_grad_weight, .cost = weight_grad_cost)
