/* Ops that move elements. Each is a list of strided copies, and one kernel runs them all. */
#include <string.h>

#include "cpu/kernel.h"
#include "cpu/strided.h"
#include "ops/forms.h"
#include "ops/infer.h"

#ifndef OMC_VARIANT

/* Copies of parts of inputs to parts of outputs. */
typedef struct move {
  uint32_t from, to; /* input, output */
  omc_strided part;
} move;

typedef struct move_params {
  uint32_t n;
  move *moves;
  bool fill;    /* out[0] is filled first, */
  uint32_t pad; /* with this input if there is one, else with zeros */
} move_params;

OMC_KERNEL_ANY(Move, args) {
  const move_params *p = args->params;
  if (p->fill) {
    const omc_type *out = args->out[0].type;
    omc_strided_fill(args->out[0].data, omc_shape_numel(&out->shape), omc_dtype_size(out->dtype),
                     p->pad ? omc_in_data(args, p->pad) : NULL, args->threads);
  }
  for (uint32_t i = 0; i < p->n; i++) {
    const move *m = &p->moves[i];
    omc_strided_copy(&m->part, args->out[m->to].data, args->in[m->from].data, args->threads);
  }
  return OMC_OK;
}

static omc_status reserve(const omc_node *node, omc_arena *arena, uint32_t n, move_params *p) {
  p->moves = OMC_NEW_ARRAY(arena, move, n);
  if (p->moves) return OMC_OK;
  OMC_NODE_FAIL(node, ENOMEM, "no memory for %u moves", n);
}

static void push(move_params *p, const omc_node *node, uint32_t from, uint32_t to,
                 const omc_strided *part) {
  move *m = &p->moves[p->n++];
  *m = (move){from, to, *part};
  omc_strided_prepare(&m->part, omc_dtype_size(omc_in(node, 0)->type.dtype));
}

/* All of `shape`, both sides being dense tensors of the shapes given. */
static omc_strided between(const omc_shape *shape, const omc_shape *src, const omc_shape *dst) {
  omc_strided c = {.rank = shape->rank};
  memcpy(c.dims, shape->dims, (size_t)shape->rank * sizeof c.dims[0]);
  omc_shape_strides(src, c.src);
  omc_shape_strides(dst, c.dst);
  return c;
}

static omc_status params_transpose(const omc_node *node, omc_arena *arena, void *params) {
  int32_t perm[OMC_MAX_RANK];
  int64_t strides[OMC_MAX_RANK];
  OMC_TRY(omc_perm_of(node, perm));
  OMC_TRY(reserve(node, arena, 1, params));
  const omc_shape *out = &node->out[0]->type.shape;
  omc_strided c = between(out, out, out);
  omc_shape_strides(omc_in_shape(node, 0), strides);
  for (int32_t i = 0; i < c.rank; i++) c.src[i] = strides[perm[i]];
  push(params, node, 0, 0, &c);
  return OMC_OK;
}

static omc_status params_expand(const omc_node *node, omc_arena *arena, void *params) {
  OMC_TRY(reserve(node, arena, 1, params));
  const omc_shape *out = &node->out[0]->type.shape;
  omc_strided c = between(out, out, out);
  omc_broadcast_strides(omc_in_shape(node, 0), out, c.src);
  push(params, node, 0, 0, &c);
  return OMC_OK;
}

static omc_status params_concat(const omc_node *node, omc_arena *arena, void *params) {
  int32_t axis;
  OMC_TRY(omc_need_axis(node, omc_in_shape(node, 0)->rank, &axis));
  OMC_TRY(reserve(node, arena, node->n_in, params));
  int64_t at = 0;
  for (uint32_t i = 0; i < node->n_in; i++) {
    const omc_shape *x = omc_in_shape(node, i);
    omc_strided c = between(x, x, &node->out[0]->type.shape);
    c.dst_offset = at * c.dst[axis];
    at += x->dims[axis];
    push(params, node, i, 0, &c);
  }
  return OMC_OK;
}

static omc_status params_split(const omc_node *node, omc_arena *arena, void *params) {
  const omc_shape *x = omc_in_shape(node, 0);
  int32_t axis;
  OMC_TRY(omc_need_axis(node, x->rank, &axis));
  OMC_TRY(reserve(node, arena, node->n_out, params));
  int64_t at = 0;
  for (uint32_t k = 0; k < node->n_out; k++) {
    const int64_t size = omc_const_int(omc_in(node, 1), k);
    if (node->out[k]) {
      const omc_shape *out = &node->out[k]->type.shape;
      omc_strided c = between(out, x, out);
      c.src_offset = at * c.src[axis];
      push(params, node, 0, k, &c);
    }
    at += size;
  }
  return OMC_OK;
}

/* Turns the side with these strides, that of the whole tensor, into the slice of it. */
static void take_slice(const omc_slice_form *s, int64_t *strides, int64_t *offset) {
  for (int32_t i = 0; i < s->shape.rank; i++) {
    *offset += s->start[i] * strides[i];
    strides[i] *= s->step[i];
  }
}

static omc_status params_slice(const omc_node *node, omc_arena *arena, void *params) {
  omc_slice_form s;
  OMC_TRY(omc_slice_form_of(node, omc_in_shape(node, 0), &s));
  OMC_TRY(reserve(node, arena, 1, params));
  omc_strided c = between(&s.shape, omc_in_shape(node, 0), &s.shape);
  take_slice(&s, c.src, &c.src_offset);
  push(params, node, 0, 0, &c);
  return OMC_OK;
}

static omc_status params_slice_grad(const omc_node *node, omc_arena *arena, void *params) {
  move_params *p = params;
  omc_slice_form s;
  OMC_TRY(omc_slice_form_of(node, &node->out[0]->type.shape, &s));
  OMC_TRY(reserve(node, arena, 1, p));
  p->fill = !omc_shape_equal(&s.shape, &node->out[0]->type.shape);
  omc_strided c = between(&s.shape, &s.shape, &node->out[0]->type.shape);
  take_slice(&s, c.dst, &c.dst_offset);
  push(p, node, 0, 0, &c);
  return OMC_OK;
}

static omc_status params_pad(const omc_node *node, omc_arena *arena, void *params) {
  move_params *p = params;
  const omc_shape *x = omc_in_shape(node, 0), *out = &node->out[0]->type.shape;
  int64_t pads[2 * OMC_MAX_RANK];
  OMC_TRY(omc_pads_of(node, pads));
  OMC_TRY(reserve(node, arena, 1, p));
  omc_strided c = between(x, x, out);
  for (int32_t i = 0; i < c.rank; i++) {
    const int64_t before = pads[i], after = pads[c.rank + i];
    p->fill |= before > 0 || after > 0;
    c.dims[i] += (before < 0 ? before : 0) + (after < 0 ? after : 0);
    if (c.dims[i] < 0) c.dims[i] = 0;
    c.src_offset += before < 0 ? -before * c.src[i] : 0;
    c.dst_offset += before > 0 ? before * c.dst[i] : 0;
  }
  p->pad = 2;
  push(p, node, 0, 0, &c);
  return OMC_OK;
}

static omc_status params_tile(const omc_node *node, omc_arena *arena, void *params) {
  const omc_shape *x = omc_in_shape(node, 0), *out = &node->out[0]->type.shape;
  int64_t src[OMC_MAX_RANK], dst[OMC_MAX_RANK];
  OMC_TRY(reserve(node, arena, 1, params));
  omc_shape_strides(x, src);
  omc_shape_strides(out, dst);
  omc_strided c = {.rank = 2 * x->rank};
  for (int32_t i = 0; i < x->rank; i++) {
    c.dims[2 * i] = omc_const_int(omc_in(node, 1), i);
    c.dst[2 * i] = dst[i] * x->dims[i];
    c.dims[2 * i + 1] = x->dims[i];
    c.src[2 * i + 1] = src[i];
    c.dst[2 * i + 1] = dst[i];
  }
  push(params, node, 0, 0, &c);
  return OMC_OK;
}

#define MOVE(name, id) OMC_CPU_OP(name, Move, OMC_PARAMS(move_params, params_##id))
MOVE(Concat, concat)
MOVE(Expand, expand)
MOVE(Pad, pad)
MOVE(Slice, slice)
MOVE(SliceGrad, slice_grad)
MOVE(Split, split)
MOVE(Tile, tile)
MOVE(Transpose, transpose)

#endif
