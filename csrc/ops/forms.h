/* The forms of structural ops: what a node's attributes, types and constant inputs say, read once
 * for its shape rule, its gradient rule and the kernels of every device.
 *
 * Readers want a typed node; they fail with OMC_ESHAPE, OMC_EDTYPE, OMC_EINVALID, OMC_EUNSUPPORTED
 * or, where they are given an arena, OMC_ENOMEM, naming it. Sizes and strides are in elements. `x`
 * and `table` are the shape of what is read where that is no input of the node, as in a gradient.
 */
#ifndef OMC_OPS_FORMS_H
#define OMC_OPS_FORMS_H

#include "base/box.h"
#include "graph/graph.h"

/* ---- constant.c ---- */

/* Shape gives the dims [start, end). */
typedef struct omc_shape_form {
  int32_t start, end;
} omc_shape_form;

omc_shape_form omc_shape_form_of(const omc_node *node);

/* The element of its dtype, of 8 bytes at most, that a ConstantOfShape has everywhere. */
void omc_filling_of(const omc_node *node, void *element);

/* ---- scan.c: along one axis ---- */

/* The tensor is [outer, n, inner], n the elements along the axis; one of rank 0 is [1, 1, 1]. */
typedef struct omc_axis_form {
  int64_t outer, n, inner;
} omc_axis_form;

/* The axis is an attribute; that of CumSum and its like an input. */
omc_status omc_axis_form_of(const omc_node *node, omc_axis_form *out) OMC_MUST_USE;
omc_status omc_running_form_of(const omc_node *node, omc_axis_form *out) OMC_MUST_USE;

/* A shape rule: a float tensor along an axis of it, and gives its type. */
omc_status omc_infer_along(omc_node *node) OMC_MUST_USE;

/* ---- topk.c ---- */

/* The first k of each line of a tensor [outer, n, inner]. */
typedef struct omc_topk_form {
  int64_t outer, n, inner, k;
  bool largest; /* come first, else the least */
} omc_topk_form;

omc_status omc_topk_form_of(const omc_node *node, omc_topk_form *out) OMC_MUST_USE;

/* ---- reduce.c ---- */

/* Which axes of in[0] are reduced, OMC_MAX_RANK of them. */
omc_status omc_reduced_axes(const omc_node *node, bool *out) OMC_MUST_USE;

/* ---- movement.c ---- */

omc_status omc_perm_of(const omc_node *node, int32_t *out) OMC_MUST_USE; /* of a Transpose */

/* Pad: out[i] before and out[rank + i] after axis i; 2 * OMC_MAX_RANK of them. */
omc_status omc_pads_of(const omc_node *node, int64_t *out) OMC_MUST_USE;

typedef struct omc_slice_form {
  omc_shape shape; /* of the slice */
  int64_t start[OMC_MAX_RANK], step[OMC_MAX_RANK];
} omc_slice_form;

omc_status omc_slice_form_of(const omc_node *node, const omc_shape *x,
                             omc_slice_form *out) OMC_MUST_USE;

/* ---- moves.c: what the ops of movement.c do ---- */

typedef struct omc_move {
  uint32_t from, to; /* input, output */
  omc_box box;
} omc_move;

typedef struct omc_moves_form {
  uint32_t n;
  omc_move *moves;
  bool fill;    /* out[0] is filled first, */
  uint32_t pad; /* with this input if it is not 0 and there is one, else with zeros */
} omc_moves_form;

omc_status omc_moves_form_of(const omc_node *node, omc_arena *arena,
                             omc_moves_form *out) OMC_MUST_USE;

/* ---- matmul.c ---- */

/* `batch` products of [m, k] by [k, n]. The batch dims of C are a mixed-radix number whose digits
 * step through a and b by the strides below, 0 where an operand is repeated; they are as few as can
 * be. */
typedef struct omc_products_form {
  int64_t m, n, k, batch;
  bool trans_a, trans_b;
  omc_shape dims; /* of the batch */
  int64_t a_strides[OMC_MAX_RANK], b_strides[OMC_MAX_RANK];
  double alpha;
} omc_products_form;

omc_status omc_products_form_of(const omc_node *node, omc_products_form *out) OMC_MUST_USE;

/* Where the operands of a product of the batch begin. */
void omc_products_at(const omc_products_form *form, int64_t index, int64_t *a, int64_t *b);

/* ---- conv.c ---- */

/* Whether images, and weights that they are convolved with, lie with their channels last,
 * [N, ..., C] in place of [N, C, ...]: the attribute channels_last, which is 0 in ONNX. */
bool omc_is_channels_last(const omc_node *node);

/* The shape of one of them, with channels second. */
omc_shape omc_channels_second(const omc_node *node, const omc_shape *shape);

/* A convolution of at most three space dims, the last of them last; those that are not there have a
 * size of 1. */
enum { OMC_CONV_AXES = 3 };
typedef struct omc_conv_form {
  int64_t n, c, in[OMC_CONV_AXES];      /* x */
  int64_t o, cg, kernel[OMC_CONV_AXES]; /* weight */
  int64_t out[OMC_CONV_AXES];           /* y */
  int64_t stride[OMC_CONV_AXES], dilation[OMC_CONV_AXES];
  int64_t before[OMC_CONV_AXES], after[OMC_CONV_AXES]; /* padding of x */
  int64_t group;
} omc_conv_form;

omc_status omc_conv_form_of(const omc_node *node, omc_conv_form *out) OMC_MUST_USE;

/* Of ConvTranspose, as of the gradient that it is: its input is the y, its result the x, of which
 * *shape is the shape. */
omc_status omc_conv_transpose_form_of(const omc_node *node, omc_shape *shape,
                                      omc_conv_form *out) OMC_MUST_USE;

/* Of a gradient, and the shape of its result. */
omc_status omc_conv_grad_form_of(const omc_node *node, bool of_input, omc_shape *shape,
                                 omc_conv_form *out) OMC_MUST_USE;

/* ---- pool.c ---- */

/* Pooling by axis, those that are pooled last; axes before them are of one element, in a window of
 * one. With channels last a place has as many elements as there are channels, all of one plane. */
enum { OMC_POOL_AXES = 3 };
typedef struct omc_pool_form {
  int32_t axes;             /* 1 to OMC_POOL_AXES */
  int64_t planes, channels; /* of these 1, if they do not come last */
  int64_t in[OMC_POOL_AXES], out[OMC_POOL_AXES];
  bool adaptive; /* windows cover an axis evenly, and what follows is not known */
  int64_t kernel[OMC_POOL_AXES], stride[OMC_POOL_AXES], dilation[OMC_POOL_AXES];
  int64_t before[OMC_POOL_AXES], after[OMC_POOL_AXES];
  bool with_pad;   /* averages: padding counts */
  int64_t divisor; /* averages: instead of sizes, if not 0 */
} omc_pool_form;

omc_status omc_pool_form_of(const omc_node *node, const omc_shape *x,
                            omc_pool_form *out) OMC_MUST_USE;

/* Taps of a window, of one that is not adaptive, counted along the last axis first; and the dtype
 * of their numbers. */
int64_t omc_pool_taps(const omc_pool_form *form);
omc_dtype omc_pool_tap_dtype(const omc_pool_form *form);

/* [start, end) of an axis. An average is divided by the product of its sizes along all axes. */
typedef struct omc_pool_window {
  int64_t start, end, size;
} omc_pool_window;

/* Window k of an axis of an average. */
omc_pool_window omc_pool_window_at(const omc_pool_form *form, int32_t axis, int64_t k);

/* ---- norm.c ---- */

/* x is [rows, n], each row normalised. */
typedef struct omc_layer_form {
  int64_t rows, n;
  double epsilon;
} omc_layer_form;

/* x is [batch, groups, channels, inner], each group of each sample normalised. */
typedef struct omc_group_form {
  int64_t batch, groups, channels, inner;
  double epsilon;
} omc_group_form;

/* x is [batch, channels, inner], each channel normalised. */
typedef struct omc_batch_form {
  int64_t batch, channels, inner;
  double epsilon, momentum;
  bool relu;
} omc_batch_form;

/* Input x of a LayerNormalization or RmsNorm, or of its gradient: `params` is the shape of gamma
 * and beta, `stats` that of mean and rstd. */
omc_status omc_layer_form_of(const omc_node *node, uint32_t x, omc_shape *params, omc_shape *stats,
                             omc_layer_form *out) OMC_MUST_USE;

/* Input x of a GroupNorm or its gradient: `params` is the shape of gamma and beta, `stats` that of
 * mean and rstd. */
omc_status omc_group_form_of(const omc_node *node, uint32_t x, omc_shape *params, omc_shape *stats,
                             omc_group_form *out) OMC_MUST_USE;

/* Input x of a BatchNorm or its gradient; *channels is the shape of all per-channel values. */
omc_status omc_batch_form_of(const omc_node *node, uint32_t x, omc_shape *channels,
                             omc_batch_form *out) OMC_MUST_USE;

/* ---- resample.c ---- */

/* [outer, from, inner] becomes [outer, to, inner], each of a sum of at most so many. */
typedef struct omc_resample_form {
  int64_t outer, from, to, inner, most;
} omc_resample_form;

omc_status omc_resample_form_of(const omc_node *node, omc_resample_form *out) OMC_MUST_USE;

/* ---- segment.c ---- */

/* Rows [n, inner] cut into segments [segments, inner]: one from each offset to the next, or to the
 * last row; with `closed` the last offset is only an end. */
typedef struct omc_segment_form {
  int64_t n, inner, segments;
} omc_segment_form;

omc_status omc_segment_form_of(const omc_node *node, omc_segment_form *out) OMC_MUST_USE;

/* ---- grouped.c ---- */

/* Rows [rows, k], in groups of which each is multiplied by a matrix of its own, to [rows, n]. */
typedef struct omc_grouped_form {
  int64_t groups, rows, k, n;
  bool trans_b; /* the matrices are [n, k] each */
} omc_grouped_form;

/* Of a GroupedMatMul, or of its gradient of the matrices. */
omc_status omc_grouped_form_of(const omc_node *node, omc_grouped_form *out) OMC_MUST_USE;

/* ---- loss.c ---- */

typedef enum { OMC_LOSS_NONE, OMC_LOSS_MEAN, OMC_LOSS_SUM } omc_loss_reduction;

/* Logits are [outer, classes, inner]; a row is one (outer, inner). */
typedef struct omc_loss_form {
  int64_t outer, classes, inner, ignore_index;
  double smoothing;
  omc_loss_reduction reduction;
} omc_loss_form;

/* Logits are x w' + bias, with x [n, k] and w [classes, k]. */
typedef struct omc_linear_loss_form {
  int64_t n, k;
  omc_loss_form loss; /* of n rows; its reduction is never OMC_LOSS_NONE */
} omc_linear_loss_form;

omc_status omc_linear_loss_form_of(const omc_node *node, omc_linear_loss_form *out) OMC_MUST_USE;

/* Of a loss, with the shape of its targets; of CrossEntropyGrad; of the gradient of the other, with
 * the type of what it is the gradient of. */
omc_status omc_loss_form_of(const omc_node *node, omc_loss_form *out, omc_shape *rows) OMC_MUST_USE;
omc_status omc_cross_entropy_grad_form_of(const omc_node *node, omc_loss_form *out) OMC_MUST_USE;
omc_status omc_nll_grad_form_of(const omc_node *node, omc_loss_form *out,
                                omc_type *type) OMC_MUST_USE;

/* ---- recurrent.c ---- */

/* The steps of a recurrent layer: gates are [steps, batch, gates * hidden], states [batch, hidden].
 */
typedef struct omc_steps_form {
  int64_t steps, batch, hidden, gates;
  uint32_t states;        /* h, and c of an Lstm */
  omc_dtype dtype, state; /* of gates and weights; of states: that, or what it is computed in */
  bool reverse;           /* the last step is taken first */
  bool relu;              /* of an Rnn, in place of tanh */
} omc_steps_form;

omc_status omc_steps_form_of(const omc_node *node, omc_steps_form *out) OMC_MUST_USE;

/* ---- attention.c ---- */

typedef struct omc_head_strides {
  int64_t sample, head, token; /* elements from one to the next */
} omc_head_strides;

typedef struct omc_attention_form {
  int64_t batch, heads, kv_heads, queries, keys, dim, value_dim; /* B, H, Hkv, T, S, D, Dv */
  omc_head_strides q, k, v, y;                                   /* also of their gradients */
  bool packed;                                                   /* q, k and v are one tensor */
  int64_t k_start, v_start; /* then: elements before those of k and of v; else 0 */
  omc_shape y_shape;
  omc_dtype dtype;
  double scale, p;
  uint32_t subsequence;    /* of dropout */
  bool causal;             /* key j is seen by query i only if j <= i */
  bool mask_is_bool;       /* true: attend; else added to the scores */
  int64_t mask_strides[4]; /* elements, of the mask seen as [B,H,T,S] */
} omc_attention_form;

/* Where the heads of q, k, v and y are in turn, 1 or 2; tokens are at the other of the two. */
enum { OMC_HEADS_OF_Q, OMC_HEADS_OF_K, OMC_HEADS_OF_V, OMC_HEADS_OF_Y, OMC_N_HEADS };
omc_status omc_head_axes_of(const omc_node *node, int64_t axes[OMC_N_HEADS]) OMC_MUST_USE;

/* Of Attention or AttentionGrad. */
omc_status omc_attention_form_of(const omc_node *node, omc_attention_form *out) OMC_MUST_USE;

/* ---- gather.c ---- */

/* Gather, GatherND and Embedding: the table is [outer, dim, inner], the result [outer, n, inner].
 */
typedef struct omc_rows_form {
  int64_t outer, dim, inner, n;
  int64_t outer_ids; /* ids from one outer to the next: 0, all share them, or n */
  int64_t padding;   /* row without gradient, -1: none */
  bool by_freq;      /* gradients are divided by how often their row is used */
  bool negative;     /* ids below 0 count from the end */
  int32_t depth;     /* GatherND: length of an index into `dims`; 0: ids are rows */
  int64_t dims[OMC_MAX_RANK];
} omc_rows_form;

/* What becomes of an element and what is put into its place. */
typedef enum { OMC_JOIN_SUM, OMC_JOIN_PRODUCT, OMC_JOIN_MOST, OMC_JOIN_LEAST } omc_join;

/* GatherElements: elements of two tensors that differ along one axis, line by line. */
typedef struct omc_lines_form {
  int32_t rank;                                      /* of the other axes */
  int64_t dims[OMC_MAX_RANK];                        /* of ids */
  int64_t table[OMC_MAX_RANK], picked[OMC_MAX_RANK]; /* strides: of x, and of ids and y */
  int64_t n, count;                                  /* ids in a line, lines */
  int32_t axis;
  int64_t dim;   /* elements of x along the axis */
  bool negative; /* ids below 0 count from the end */
  int64_t table_step, picked_step;
  omc_join join; /* that of ScatterElements */
} omc_lines_form;

omc_status omc_gather_form_of(const omc_node *node, const omc_shape *table,
                              omc_rows_form *out) OMC_MUST_USE;
omc_status omc_embedding_form_of(const omc_node *node, const omc_shape *table,
                                 omc_rows_form *out) OMC_MUST_USE;
omc_status omc_gather_nd_form_of(const omc_node *node, const omc_shape *table,
                                 omc_rows_form *out) OMC_MUST_USE;
omc_status omc_gather_elements_form_of(const omc_node *node, const omc_shape *table,
                                       omc_lines_form *out) OMC_MUST_USE;

#endif
