/* Pooling over the last axes, but for channels that come last, up to OMC_POOL_AXES of them; all
 * before them are planes. */
#include <string.h>

#include "base/int.h"
#include "ops/forms.h"
#include "ops/infer.h"
#include "ops/op.h"

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

/* Taps are counted in 32 bits. */
static omc_status check_taps(const omc_node *node, const omc_pool_form *g) {
  int64_t taps = 1;
  for (int32_t i = 0; i < OMC_POOL_AXES; i++)
    if (__builtin_mul_overflow(taps, g->kernel[i], &taps) || taps > INT32_MAX)
      OMC_NODE_FAIL(node, EUNSUPPORTED, "a window of %lld x %lld x %lld: 32 bits count its taps",
                    (long long)g->kernel[0], (long long)g->kernel[1], (long long)g->kernel[2]);
  return OMC_OK;
}

static omc_status read_windows(const omc_node *node, const omc_shape *x, omc_pool_form *g) {
  const int32_t n = g->axes, from = OMC_POOL_AXES - n;
  const uint32_t axes = (uint32_t)n;
  int64_t pads[2 * OMC_POOL_AXES];
  for (int32_t i = 0; i < from; i++) g->kernel[i] = g->stride[i] = g->dilation[i] = 1;
  OMC_TRY(omc_node_list(node, "kernel_shape", axes, g->kernel + from));
  OMC_TRY(omc_node_list(node, "strides", axes, g->stride + from));
  OMC_TRY(omc_node_list(node, "dilations", axes, g->dilation + from));
  OMC_TRY(omc_node_list(node, "pads", 2 * axes, pads));
  for (int32_t i = 0; i < n; i++) {
    g->before[from + i] = pads[i];
    g->after[from + i] = pads[n + i];
    if (omc_max(pads[i], pads[n + i]) * 2 > g->kernel[from + i])
      OMC_NODE_FAIL(node, ESHAPE, "padding %lld is more than half of kernel %lld",
                    (long long)omc_max(pads[i], pads[n + i]), (long long)g->kernel[from + i]);
  }
  if (node->op == OMC_OP_AveragePool || node->op == OMC_OP_AveragePoolGrad) {
    g->with_pad = omc_node_int(node, "count_include_pad") != 0;
    g->divisor = omc_node_int(node, "divisor_override");
  }
  if (node->op == OMC_OP_MaxPool || node->op == OMC_OP_MaxPoolGrad) OMC_TRY(check_taps(node, g));
  for (int32_t i = 0; i < OMC_POOL_AXES; i++) {
    g->out[i] = windows(g, i, omc_node_int(node, "ceil_mode") != 0);
    if (g->out[i] < 1) return no_windows(node, x, g);
  }
  return OMC_OK;
}

/* The first axis that is pooled. */
static int32_t first_axis(const omc_node *node, const omc_shape *x, int32_t axes) {
  return x->rank - axes - omc_is_channels_last(node);
}

omc_status omc_pool_form_of(const omc_node *node, const omc_shape *x, omc_pool_form *g) {
  const bool adaptive =
      node->op == OMC_OP_AdaptiveAvgPool || node->op == OMC_OP_AdaptiveAvgPoolGrad;
  const char *const sizes = adaptive ? "output_size" : "kernel_shape";
  uint32_t axes;
  omc_node_ints(node, sizes, &axes);
  if (axes < 1 || axes > OMC_POOL_AXES || first_axis(node, x, (int32_t)axes) < 0)
    OMC_NODE_FAIL(node, EUNSUPPORTED, "pooling of rank %d over %u axes", x->rank, axes);
  *g = (omc_pool_form){
      .axes = (int32_t)axes, .adaptive = adaptive, .in = {1, 1, 1}, .out = {1, 1, 1}};
  const int32_t from = OMC_POOL_AXES - g->axes, first = first_axis(node, x, g->axes);
  for (int32_t i = 0; i < g->axes; i++) g->in[from + i] = x->dims[first + i];
  g->planes = omc_shape_span(x, 0, first);
  g->channels = omc_shape_span(x, first + g->axes, x->rank);
  return adaptive ? omc_node_list(node, sizes, axes, g->out + from) : read_windows(node, x, g);
}

omc_pool_window omc_pool_window_at(const omc_pool_form *g, int32_t axis, int64_t k) {
  const int64_t in = g->in[axis], out = g->out[axis];
  const int64_t start = g->adaptive ? k * in / out : k * g->stride[axis] - g->before[axis];
  const int64_t end = g->adaptive ? omc_ceil_div((k + 1) * in, out)
                                  : omc_min(start + g->kernel[axis], in + g->after[axis]);
  omc_pool_window w = {.start = omc_max(start, 0), .end = omc_min(end, in)};
  w.size = omc_max(g->with_pad ? end - start : w.end - w.start, 1);
  return w;
}

int64_t omc_pool_taps(const omc_pool_form *g) { return g->kernel[0] * g->kernel[1] * g->kernel[2]; }

omc_dtype omc_pool_tap_dtype(const omc_pool_form *g) {
  return omc_pool_taps(g) <= UINT8_MAX + 1 ? OMC_U8 : OMC_I32;
}

static omc_shape pooled_shape(const omc_node *node, const omc_shape *x, const omc_pool_form *g) {
  const int32_t first = first_axis(node, x, g->axes);
  omc_shape shape = *x;
  for (int32_t i = 0; i < g->axes; i++) shape.dims[first + i] = g->out[OMC_POOL_AXES - g->axes + i];
  return shape;
}

static omc_status infer_pool(omc_node *node) {
  omc_pool_form g;
  OMC_TRY(omc_need_float(node, 0));
  OMC_TRY(omc_pool_form_of(node, omc_in_shape(node, 0), &g));
  const omc_shape shape = pooled_shape(node, omc_in_shape(node, 0), &g);
  omc_set_shape(node, &shape);
  if (node->op != OMC_OP_MaxPool) return OMC_OK;
  omc_set_type(node, 1, OMC_I64, &shape);
  omc_set_type(node, 2, omc_pool_tap_dtype(&g), &shape);
  return OMC_OK;
}

static omc_status build_grad(omc_grad *g, omc_op_id op, uint32_t n_in, omc_value *const *in) {
  g->grad_in[0] = omc_nary_like(&g->b, op, n_in, in, g->node, omc_in_shape(g->node, 0));
  return g->b.status;
}

static omc_status infer_pool_grad(omc_node *node) {
  omc_pool_form g;
  omc_shape x;
  OMC_TRY(omc_need_float(node, 0));
  OMC_TRY(omc_need_shape(node, &x));
  OMC_TRY(omc_pool_form_of(node, &x, &g));
  const omc_shape shape = pooled_shape(node, &x, &g);
  OMC_TRY(omc_need_gradient(node, &shape));
  omc_set_shape(node, &x);
  if (node->op != OMC_OP_MaxPoolGrad) return OMC_OK;
  return omc_need_type(node, 1, "taps", omc_pool_tap_dtype(&g), &shape);
}

/* ---- MaxPool: the largest of each window, its index in the plane as ONNX counts, and for the
 * gradient which tap of the window it is, a byte where an index takes eight ---- */

static omc_status grad_max_pool(omc_grad *g) {
  OMC_TRY(omc_need_output(g, 2));
  omc_value *const in[] = {g->grad_out[0], omc_out(g->node, 2)};
  return build_grad(g, OMC_OP_MaxPoolGrad, 2, in);
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

static omc_status grad_adaptive(omc_grad *g) {
  return build_grad(g, OMC_OP_AdaptiveAvgPoolGrad, 1, g->grad_out);
}

/* ---- records ---- */

OMC_RECORD(MaxPool, 1, 1, 3, .spared = 1u << 1 | 1u << 2, .infer = infer_pool,
           .grad = grad_max_pool)
OMC_RECORD(MaxPoolGrad, 2, 2, 1, .flags = OMC_OP_FAILS, .infer = infer_pool_grad)
OMC_RECORD(AveragePool, 1, 1, 1, .infer = infer_average, .grad = grad_average)
OMC_RECORD(AveragePoolGrad, 1, 1, 1, .infer = infer_pool_grad)
OMC_RECORD(AdaptiveAvgPool, 1, 1, 1, .infer = infer_pool, .grad = grad_adaptive)
OMC_RECORD(AdaptiveAvgPoolGrad, 1, 1, 1, .infer = infer_pool_grad)
