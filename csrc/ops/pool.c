/* Pooling over the last axes, up to OMC_POOL_AXES of them; all before them are planes. */
#include <string.h>

#include "base/int.h"
#include "ops/forms.h"
#include "ops/infer.h"
#include "ops/op.h"

static omc_status need_spatial(const omc_node *node, const omc_shape *x, uint32_t axes) {
  if (axes >= 1 && axes <= OMC_POOL_AXES && x->rank >= (int32_t)axes) return OMC_OK;
  OMC_NODE_FAIL(node, EUNSUPPORTED, "pooling of rank %d over %u axes", x->rank, axes);
}

/* Outputs along an axis. With ceil_mode no window starts in the padding at the end. */
static int64_t windows(const omc_pool_form *g, int32_t i, bool ceil_mode) {
  const int64_t span =
      g->in[i] + g->before[i] + g->after[i] - g->dilation[i] * (g->kernel[i] - 1) - 1;
  const int64_t up = ceil_mode ? g->stride[i] - 1 : 0;
  if (span + up < 0) return 0;
  const int64_t n = (span + up) / g->stride[i] + 1;
  return ceil_mode && (n - 1) * g->stride[i] >= g->in[i] + g->before[i] ? n - 1 : n;
}

static omc_status no_windows(const omc_node *node, const omc_shape *x, const omc_pool_form *g) {
  char of[OMC_TYPE_TEXT], window[OMC_TYPE_TEXT];
  omc_shape kernel = {.rank = g->axes};
  for (int32_t i = 0; i < g->axes; i++) kernel.dims[i] = g->kernel[OMC_POOL_AXES - g->axes + i];
  OMC_NODE_FAIL(node, ESHAPE, "%s gives no windows of %s", omc_shape_text(x, of, sizeof of),
                omc_shape_text(&kernel, window, sizeof window));
}

omc_status omc_pool_form_of(const omc_node *node, const omc_shape *x, omc_pool_form *g) {
  uint32_t axes;
  omc_node_ints(node, "kernel_shape", &axes);
  OMC_TRY(need_spatial(node, x, axes));
  int64_t pads[2 * OMC_POOL_AXES];
  *g = (omc_pool_form){.axes = (int32_t)axes,
                       .in = {1, 1, 1},
                       .kernel = {1, 1, 1},
                       .stride = {1, 1, 1},
                       .dilation = {1, 1, 1}};
  const int32_t n = g->axes, from = OMC_POOL_AXES - n;
  OMC_TRY(omc_node_list(node, "kernel_shape", axes, g->kernel + from));
  OMC_TRY(omc_node_list(node, "strides", axes, g->stride + from));
  OMC_TRY(omc_node_list(node, "dilations", axes, g->dilation + from));
  OMC_TRY(omc_node_list(node, "pads", 2 * axes, pads));
  for (int32_t i = 0; i < n; i++) {
    g->in[from + i] = x->dims[x->rank - n + i];
    g->before[from + i] = pads[i];
    g->after[from + i] = pads[n + i];
    if (omc_max(pads[i], pads[n + i]) * 2 > g->kernel[from + i])
      OMC_NODE_FAIL(node, ESHAPE, "padding %lld is more than half of kernel %lld",
                    (long long)omc_max(pads[i], pads[n + i]), (long long)g->kernel[from + i]);
  }
  g->planes = omc_shape_span(x, 0, x->rank - n);
  for (int32_t i = 0; i < OMC_POOL_AXES; i++) {
    g->out[i] = windows(g, i, omc_node_int(node, "ceil_mode") != 0);
    if (g->out[i] < 1) return no_windows(node, x, g);
  }
  return OMC_OK;
}

static omc_shape pooled_shape(const omc_shape *x, int32_t axes, const int64_t *out) {
  omc_shape shape = *x;
  for (int32_t i = 0; i < axes; i++) shape.dims[x->rank - axes + i] = out[OMC_POOL_AXES - axes + i];
  return shape;
}

static omc_status infer_pool(omc_node *node) {
  omc_pool_form g;
  OMC_TRY(omc_need_float(node, 0));
  OMC_TRY(omc_pool_form_of(node, omc_in_shape(node, 0), &g));
  const omc_shape shape = pooled_shape(omc_in_shape(node, 0), g.axes, g.out);
  omc_set_shape(node, &shape);
  omc_set_type(node, 1, OMC_I64, &shape);
  return OMC_OK;
}

static omc_status build_grad(omc_grad *g, omc_op_id op, uint32_t n_in, omc_value *const *in) {
  g->grad_in[0] = omc_nary_shaped(&g->b, op, n_in, in, g->node, omc_in_shape(g->node, 0));
  return g->b.status;
}

static omc_status infer_pool_grad(omc_node *node) {
  omc_pool_form g;
  omc_shape x;
  OMC_TRY(omc_need_float(node, 0));
  OMC_TRY(omc_need_shape(node, &x));
  OMC_TRY(omc_pool_form_of(node, &x, &g));
  const omc_shape shape = pooled_shape(&x, g.axes, g.out);
  OMC_TRY(omc_need_gradient(node, &shape));
  omc_set_shape(node, &x);
  return OMC_OK;
}

/* ---- MaxPool ---- */

static omc_status grad_max_pool(omc_grad *g) {
  OMC_TRY(omc_need_saved(g, 2));
  omc_value *const in[] = {g->grad_out[0], omc_out(g->node, 1)};
  return build_grad(g, OMC_OP_MaxPoolGrad, 2, in);
}

static omc_status infer_max_pool_grad(omc_node *node) {
  OMC_TRY(infer_pool_grad(node));
  OMC_TRY(omc_need_dtype(node, 1, OMC_I64));
  if (omc_shape_equal(omc_in_shape(node, 0), omc_in_shape(node, 1))) return OMC_OK;
  OMC_NODE_FAIL(node, ESHAPE, "the gradient and the indices differ in shape");
}

/* ---- averages ---- */

static omc_status need_no_dilation(const omc_node *node) {
  uint32_t n;
  const int64_t *dilations = omc_node_ints(node, "dilations", &n);
  for (uint32_t i = 0; i < n; i++)
    if (dilations[i] != 1)
      OMC_NODE_FAIL(node, EUNSUPPORTED, "an average with dilation %lld", (long long)dilations[i]);
  return OMC_OK;
}

static omc_status infer_average(omc_node *node) {
  OMC_TRY(need_no_dilation(node));
  return infer_pool(node);
}

static omc_status grad_average(omc_grad *g) {
  return build_grad(g, OMC_OP_AveragePoolGrad, 1, g->grad_out);
}

/* ---- AdaptiveAvgPool: output_size windows that cover an axis evenly ---- */

omc_status omc_adaptive_sizes(const omc_node *node, const omc_shape *x, int32_t *axes,
                              int64_t *out) {
  uint32_t n;
  omc_node_ints(node, "output_size", &n);
  OMC_TRY(need_spatial(node, x, n));
  for (int32_t i = 0; i < OMC_POOL_AXES; i++) out[i] = 1;
  *axes = (int32_t)n;
  return omc_node_list(node, "output_size", n, out + OMC_POOL_AXES - *axes);
}

static omc_status infer_adaptive(omc_node *node) {
  int64_t out[OMC_POOL_AXES];
  int32_t axes;
  OMC_TRY(omc_need_float(node, 0));
  OMC_TRY(omc_adaptive_sizes(node, omc_in_shape(node, 0), &axes, out));
  const omc_shape shape = pooled_shape(omc_in_shape(node, 0), axes, out);
  omc_set_shape(node, &shape);
  return OMC_OK;
}

static omc_status infer_adaptive_grad(omc_node *node) {
  int64_t out[OMC_POOL_AXES];
  int32_t axes;
  omc_shape x;
  OMC_TRY(omc_need_float(node, 0));
  OMC_TRY(omc_need_shape(node, &x));
  OMC_TRY(omc_adaptive_sizes(node, &x, &axes, out));
  const omc_shape shape = pooled_shape(&x, axes, out);
  OMC_TRY(omc_need_gradient(node, &shape));
  omc_set_shape(node, &x);
  return OMC_OK;
}

static omc_status grad_adaptive(omc_grad *g) {
  return build_grad(g, OMC_OP_AdaptiveAvgPoolGrad, 1, g->grad_out);
}

/* ---- records ---- */

const omc_op omc_op_MaxPool = {.name = "MaxPool",
                               .min_in = 1,
                               .max_in = 1,
                               .n_out = 2,
                               .infer = infer_pool,
                               .grad = grad_max_pool};
const omc_op omc_op_MaxPoolGrad = {.name = "MaxPoolGrad",
                                   .min_in = 2,
                                   .max_in = 2,
                                   .n_out = 1,
                                   .flags = OMC_OP_FAILS,
                                   .infer = infer_max_pool_grad};

#define AVERAGE_OP(name_, infer_, grad_) \
  const omc_op omc_op_##name_ = {        \
      .name = #name_, .min_in = 1, .max_in = 1, .n_out = 1, .infer = infer_, .grad = grad_};
AVERAGE_OP(AveragePool, infer_average, grad_average)
AVERAGE_OP(AveragePoolGrad, infer_pool_grad, NULL)
AVERAGE_OP(AdaptiveAvgPool, infer_adaptive, grad_adaptive)
AVERAGE_OP(AdaptiveAvgPoolGrad, infer_adaptive_grad, NULL)
