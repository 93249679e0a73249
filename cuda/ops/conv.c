/* Conv, ConvTranspose and the gradients, which are PyTorch's: cuDNN by the algorithms that it picks
 * there, or kernels of its own. What PyTorch gives is copied to where the plan has it. To PyTorch
 * channels are second whatever comes last in memory, from which it takes the layout that it
 * computes in.
 *
 * PyTorch pads an axis alike on both sides. What one side has more is a margin: zeros that x is
 * given, or what is cut off where x is the result. */
#include "base/box.h"
#include "base/int.h"
#include "cuda/copies.h"
#include "cuda/torch_call.h"
#include "ops/forms.h"

enum { AXES = OMC_CONV_AXES };

/* The operands, then the result. */
enum { FIRST, SECOND, RESULT, N_TENSORS };

/* By axes, of which the first are there. */
typedef struct windows {
  int64_t stride[AXES], padding[AXES], dilation[AXES], output_padding[AXES];
} windows;

typedef struct params {
  omc_cuda_device *device;
  omc_dtype dtype;
  int32_t axes;
  int64_t group;
  bool channels_last;
  windows by;
  omc_shape shapes[N_TENSORS]; /* as PyTorch sees them, x with its margins */
  omc_shape x;                 /* without */
  int x_is;                    /* which of the three */
  int64_t margin[AXES];        /* before x */
  size_t wide_bytes;           /* of x with margins; 0: it has none */
  omc_cuda_copy widen;
  omc_cuda_copier fetch;
  bool empty; /* there is nothing to sum */
} params;

/* ---- plan time ---- */

/* In memory of ours. */
static void strides_of(const params *p, const omc_shape *shape, int64_t *strides) {
  omc_shape_strides(shape, strides);
  if (!p->channels_last) return;
  strides[1] = 1;
  for (int32_t d = 2; d < shape->rank; d++) strides[d] *= shape->dims[1];
}

/* Elements of a tensor, where they have `src` and `dst` strides, in the order of our memory. */
static omc_box box_of(const params *p, const omc_shape *shape, const int64_t *src,
                      const int64_t *dst) {
  omc_box b = {.rank = shape->rank};
  for (int32_t d = 0; d < shape->rank; d++)
    b.dims[d] = shape->dims[d], b.src[d] = src[d], b.dst[d] = dst[d];
  if (p->channels_last) omc_box_move_axis(&b, 1, b.rank - 1);
  return b;
}

/* From the first element of what has margins to the first of x. */
static int64_t offset_of(const params *p, const int64_t *strides) {
  int64_t offset = 0;
  for (int32_t a = 0; a < p->axes; a++) offset += p->margin[a] * strides[2 + a];
  return offset;
}

static void decode_axes(const omc_conv_form *f, params *p) {
  for (int32_t a = 0; a < p->axes; a++) {
    const int32_t s = AXES - p->axes + a;
    const int64_t padding = omc_min(f->before[s], f->after[s]);
    const int64_t span = f->in[s] + f->before[s] + f->after[s];
    const int64_t met = (f->out[s] - 1) * f->stride[s] + f->dilation[s] * (f->kernel[s] - 1) + 1;
    p->by.stride[a] = f->stride[s];
    p->by.dilation[a] = f->dilation[s];
    p->by.padding[a] = padding;
    p->by.output_padding[a] = span - met;
    p->margin[a] = f->before[s] - padding;
    p->shapes[p->x_is].dims[2 + a] = span - 2 * padding;
  }
}

/* Room for x with margins, and how it comes there. */
static omc_status decode_margins(params *p) {
  int64_t narrow[OMC_MAX_RANK], wide[OMC_MAX_RANK];
  if (omc_shape_equal(&p->x, &p->shapes[p->x_is])) return OMC_OK;
  OMC_TRY(omc_type_bytes(&(omc_type){p->dtype, p->shapes[p->x_is]}, &p->wide_bytes));
  strides_of(p, &p->x, narrow);
  strides_of(p, &p->shapes[p->x_is], wide);
  omc_box box = box_of(p, &p->x, narrow, wide);
  box.dst_offset = offset_of(p, wide);
  return omc_cuda_copy_of(p->device, &box, omc_dtype_size(p->dtype), &p->widen);
}

/* What PyTorch gives, x without its margins, where it has `src` strides. */
static omc_box box_of_result(const params *p, const int64_t *src) {
  const bool of_x = p->x_is == RESULT;
  const omc_shape *shape = of_x ? &p->x : &p->shapes[RESULT];
  int64_t dst[OMC_MAX_RANK];
  strides_of(p, shape, dst);
  omc_box box = box_of(p, shape, src, dst);
  if (of_x) box.src_offset = offset_of(p, src);
  return box;
}

/* A result has most likely the layout that PyTorch is lent the operands in. */
static omc_status decode_result(params *p) {
  int64_t src[OMC_MAX_RANK];
  strides_of(p, &p->shapes[RESULT], src);
  const omc_box likely = box_of_result(p, src);
  return omc_cuda_copier_of(p->device, &likely, omc_dtype_size(p->dtype), &p->fetch);
}

static omc_status decode(omc_cuda_device *device, const omc_node *node, const omc_conv_form *f,
                         int x_is, params *p) {
  const omc_shape *shapes[] = {&omc_in(node, 0)->type.shape, &omc_in(node, 1)->type.shape,
                               &node->out[0]->type.shape};
  *p = (params){.device = device,
                .dtype = omc_in(node, 0)->type.dtype,
                .axes = shapes[FIRST]->rank - 2,
                .group = f->group,
                .channels_last = omc_is_channels_last(node),
                .x_is = x_is};
  for (int i = 0; i < N_TENSORS; i++) p->shapes[i] = omc_channels_second(node, shapes[i]);
  p->x = p->shapes[x_is];
  p->empty = omc_shape_numel(shapes[FIRST]) == 0 || omc_shape_numel(shapes[SECOND]) == 0;
  if (p->empty && omc_in(node, 2) && omc_shape_numel(shapes[RESULT]) > 0)
    OMC_NODE_FAIL(node, EUNSUPPORTED, "cuda has no kernel for a bias of sums of nothing");
  decode_axes(f, p);
  OMC_TRY(decode_margins(p));
  return decode_result(p);
}

static omc_status params_conv(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                              void *p) {
  omc_conv_form f;
  (void)arena;
  OMC_TRY(omc_conv_form_of(node, &f));
  return decode(device, node, &f, FIRST, p);
}
static omc_status params_transpose(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                   void *p) {
  omc_conv_form f;
  omc_shape x;
  (void)arena;
  OMC_TRY(omc_conv_transpose_form_of(node, &x, &f));
  return decode(device, node, &f, RESULT, p);
}
static omc_status params_grad_input(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                    void *p) {
  omc_conv_form f;
  omc_shape x;
  (void)arena;
  OMC_TRY(omc_conv_grad_form_of(node, true, &x, &f));
  return decode(device, node, &f, RESULT, p);
}
static omc_status params_grad_weight(omc_cuda_device *device, const omc_node *node,
                                     omc_arena *arena, void *p) {
  omc_conv_form f;
  omc_shape weight;
  (void)arena;
  OMC_TRY(omc_conv_grad_form_of(node, false, &weight, &f));
  return decode(device, node, &f, SECOND, p);
}

static size_t workspace(const void *p) { return ((const params *)p)->wide_bytes; }

/* ---- run time ---- */

/* Addresses of the three tensors as PyTorch sees them, and what gives the result. */
typedef struct operands {
  const void *data[N_TENSORS], *bias;
  const omc_type *of_bias;
} operands;
typedef omc_status (*torch_op)(const params *p, const operands *given, omc_torch_call *call,
                               void **result);

static omc_status lend(const params *p, const operands *given, int i, omc_torch_call *call,
                       void **out) {
  int64_t strides[OMC_MAX_RANK];
  strides_of(p, &p->shapes[i], strides);
  return omc_torch_lend(call, given->data[i], p->dtype, &p->shapes[i], strides, out);
}

static const int64_t no_axes[AXES];

static omc_status forward(const params *p, const operands *given, omc_torch_call *call,
                          void **result) {
  const bool transposed = p->x_is == RESULT;
  const windows *by = &p->by;
  const int64_t dense = 1;
  void *input, *weight, *bias;
  OMC_TRY(lend(p, given, FIRST, call, &input));
  OMC_TRY(lend(p, given, SECOND, call, &weight));
  if (given->bias)
    OMC_TRY(omc_torch_lend(call, given->bias, p->dtype, &given->of_bias->shape, &dense, &bias));
  OMC_TORCH_TRY(call->node, aoti_torch_cuda_convolution, input, weight, given->bias ? &bias : NULL,
                by->stride, p->axes, by->padding, p->axes, by->dilation, p->axes, transposed,
                transposed ? by->output_padding : no_axes, p->axes, p->group, result);
  return OMC_OK;
}

/* Of what it gives the gradient of, PyTorch wants the shape alone: a tensor of which nothing is
 * read. */
static omc_status backward(const params *p, const operands *given, omc_torch_call *call,
                           void **result) {
  const bool of_x = p->x_is == RESULT;
  const int32_t wanted[] = {of_x, !of_x, false};
  const windows *by = &p->by;
  void *tensors[N_TENSORS];
  for (int i = 0; i < N_TENSORS; i++) OMC_TRY(lend(p, given, i, call, &tensors[i]));
  OMC_TORCH_TRY(call->node, aoti_torch_cuda_convolution_backward, tensors[FIRST],
                tensors[of_x ? RESULT : SECOND], tensors[of_x ? SECOND : RESULT], NULL, 0,
                by->stride, p->axes, by->padding, p->axes, by->dilation, p->axes, false, no_axes,
                p->axes, p->group, wanted, 3, of_x ? result : NULL, of_x ? NULL : result, NULL);
  return OMC_OK;
}

/* x in the midst of zeros. */
static omc_status widen(const params *p, const void *x, void *wide, void *queue) {
  OMC_CUDA_TRY(cuMemsetD8Async, (omc_cuda_ptr)(uintptr_t)wide, 0, p->wide_bytes, queue);
  return omc_cuda_copy_run(&p->widen, wide, x, queue);
}

/* A result to where the plan has it. */
static omc_status fetch(const params *p, const omc_torch_call *call, void *result, void *to,
                        void *queue) {
  const void *from;
  const int64_t *src;
  OMC_TRY(omc_torch_read(call, result, &from, &src));
  const omc_box box = box_of_result(p, src);
  return omc_cuda_copier_run(&p->fetch, &box, to, from, queue);
}

static omc_status run_within(const omc_kernel_args *args, torch_op op, omc_torch_call *call) {
  const params *p = args->params;
  operands given = {.data = {args->in[0].data, args->in[1].data, args->out[0].data},
                    .bias = omc_cuda_in(args, 2)};
  if (given.bias) given.of_bias = args->in[2].type;
  if (p->wide_bytes) {
    if (p->x_is != RESULT) OMC_TRY(widen(p, given.data[p->x_is], args->workspace, args->queue));
    given.data[p->x_is] = args->workspace;
  }
  void **result = omc_torch_result(call);
  OMC_TRY(op(p, &given, call, result));
  return fetch(p, call, *result, args->out[0].data, args->queue);
}

static omc_status run(const omc_kernel_args *args, torch_op op) {
  const params *p = args->params;
  const omc_type *out = args->out[0].type;
  const size_t bytes = (size_t)omc_shape_numel(&out->shape) * omc_dtype_size(out->dtype);
  if (bytes == 0) return OMC_OK;
  if (p->empty) {
    OMC_CUDA_TRY(cuMemsetD8Async, (omc_cuda_ptr)(uintptr_t)args->out[0].data, 0, bytes,
                 args->queue);
    return OMC_OK;
  }
  omc_torch_call call;
  omc_status status = omc_torch_begin(p->device, args->node, args->queue, &call);
  if (status == OMC_OK) status = run_within(args, op, &call);
  omc_torch_end(&call);
  return status;
}

static omc_status run_forward(const omc_kernel_args *args) { return run(args, forward); }
static omc_status run_backward(const omc_kernel_args *args) { return run(args, backward); }

#define CONV(name, id, direction)                                     \
  const omc_cuda_op omc_cuda_##name = {.run = run_##direction,        \
                                       .params_size = sizeof(params), \
                                       .params = params_##id,         \
                                       .workspace = workspace,        \
                                       .varies = true};
CONV(Conv, conv, forward)
CONV(ConvTranspose, transpose, forward)
CONV(ConvGradInput, grad_input, backward)
CONV(ConvGradWeight, grad_weight, backward)
