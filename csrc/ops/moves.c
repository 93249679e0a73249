/* What ops that move elements do, as boxes. */
#include <string.h>

#include "ops/forms.h"
#include "ops/infer.h"

static omc_status reserve(const omc_node *node, omc_arena *arena, uint32_t n, omc_moves_form *f) {
  f->moves = OMC_NEW_ARRAY(arena, omc_move, n);
  if (f->moves) return OMC_OK;
  OMC_NODE_FAIL(node, ENOMEM, "no memory for %u moves", n);
}

static void push(omc_moves_form *f, uint32_t from, uint32_t to, const omc_box *box) {
  f->moves[f->n++] = (omc_move){from, to, *box};
}

/* All of `shape`, both sides being dense tensors of the shapes given. */
static omc_box between(const omc_shape *shape, const omc_shape *src, const omc_shape *dst) {
  omc_box c = {.rank = shape->rank};
  memcpy(c.dims, shape->dims, (size_t)shape->rank * sizeof c.dims[0]);
  omc_shape_strides(src, c.src);
  omc_shape_strides(dst, c.dst);
  return c;
}

static omc_status transpose(const omc_node *node, omc_arena *arena, omc_moves_form *f) {
  int32_t perm[OMC_MAX_RANK];
  int64_t strides[OMC_MAX_RANK];
  OMC_TRY(omc_perm_of(node, perm));
  OMC_TRY(reserve(node, arena, 1, f));
  const omc_shape *out = &node->out[0]->type.shape;
  omc_box c = between(out, out, out);
  omc_shape_strides(omc_in_shape(node, 0), strides);
  for (int32_t i = 0; i < c.rank; i++) c.src[i] = strides[perm[i]];
  push(f, 0, 0, &c);
  return OMC_OK;
}

static omc_status expand(const omc_node *node, omc_arena *arena, omc_moves_form *f) {
  OMC_TRY(reserve(node, arena, 1, f));
  const omc_shape *out = &node->out[0]->type.shape;
  omc_box c = between(out, out, out);
  omc_broadcast_strides(omc_in_shape(node, 0), out, c.src);
  push(f, 0, 0, &c);
  return OMC_OK;
}

static omc_status concat(const omc_node *node, omc_arena *arena, omc_moves_form *f) {
  int32_t axis;
  OMC_TRY(omc_need_axis(node, omc_in_shape(node, 0)->rank, &axis));
  OMC_TRY(reserve(node, arena, node->n_in, f));
  int64_t at = 0;
  for (uint32_t i = 0; i < node->n_in; i++) {
    const omc_shape *x = omc_in_shape(node, i);
    omc_box c = between(x, x, &node->out[0]->type.shape);
    c.dst_offset = at * c.dst[axis];
    at += x->dims[axis];
    push(f, i, 0, &c);
  }
  return OMC_OK;
}

static omc_status split(const omc_node *node, omc_arena *arena, omc_moves_form *f) {
  const omc_shape *x = omc_in_shape(node, 0);
  int32_t axis;
  OMC_TRY(omc_need_axis(node, x->rank, &axis));
  OMC_TRY(reserve(node, arena, node->n_out, f));
  int64_t at = 0;
  for (uint32_t k = 0; k < node->n_out; k++) {
    const int64_t size = omc_const_int(omc_in(node, 1), k);
    if (node->out[k]) {
      const omc_shape *out = &node->out[k]->type.shape;
      omc_box c = between(out, x, out);
      c.src_offset = at * c.src[axis];
      push(f, 0, k, &c);
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

static omc_status slice(const omc_node *node, omc_arena *arena, omc_moves_form *f) {
  omc_slice_form s;
  OMC_TRY(omc_slice_form_of(node, omc_in_shape(node, 0), &s));
  OMC_TRY(reserve(node, arena, 1, f));
  omc_box c = between(&s.shape, omc_in_shape(node, 0), &s.shape);
  take_slice(&s, c.src, &c.src_offset);
  push(f, 0, 0, &c);
  return OMC_OK;
}

static omc_status slice_grad(const omc_node *node, omc_arena *arena, omc_moves_form *f) {
  omc_slice_form s;
  OMC_TRY(omc_slice_form_of(node, &node->out[0]->type.shape, &s));
  OMC_TRY(reserve(node, arena, 1, f));
  f->fill = !omc_shape_equal(&s.shape, &node->out[0]->type.shape);
  omc_box c = between(&s.shape, &s.shape, &node->out[0]->type.shape);
  take_slice(&s, c.dst, &c.dst_offset);
  push(f, 0, 0, &c);
  return OMC_OK;
}

static omc_status pad(const omc_node *node, omc_arena *arena, omc_moves_form *f) {
  const omc_shape *x = omc_in_shape(node, 0), *out = &node->out[0]->type.shape;
  int64_t pads[2 * OMC_MAX_RANK];
  OMC_TRY(omc_pads_of(node, pads));
  OMC_TRY(reserve(node, arena, 1, f));
  omc_box c = between(x, x, out);
  for (int32_t i = 0; i < c.rank; i++) {
    const int64_t before = pads[i], after = pads[c.rank + i];
    f->fill |= before > 0 || after > 0;
    c.dims[i] += (before < 0 ? before : 0) + (after < 0 ? after : 0);
    if (c.dims[i] < 0) c.dims[i] = 0;
    c.src_offset += before < 0 ? -before * c.src[i] : 0;
    c.dst_offset += before > 0 ? before * c.dst[i] : 0;
  }
  f->pad = 2;
  push(f, 0, 0, &c);
  return OMC_OK;
}

static omc_status tile(const omc_node *node, omc_arena *arena, omc_moves_form *f) {
  const omc_shape *x = omc_in_shape(node, 0), *out = &node->out[0]->type.shape;
  int64_t src[OMC_MAX_RANK], dst[OMC_MAX_RANK];
  OMC_TRY(reserve(node, arena, 1, f));
  omc_shape_strides(x, src);
  omc_shape_strides(out, dst);
  omc_box c = {.rank = 2 * x->rank};
  for (int32_t i = 0; i < x->rank; i++) {
    c.dims[2 * i] = omc_const_int(omc_in(node, 1), i);
    c.dst[2 * i] = dst[i] * x->dims[i];
    c.dims[2 * i + 1] = x->dims[i];
    c.src[2 * i + 1] = src[i];
    c.dst[2 * i + 1] = dst[i];
  }
  push(f, 0, 0, &c);
  return OMC_OK;
}

omc_status omc_moves_form_of(const omc_node *node, omc_arena *arena, omc_moves_form *out) {
  static omc_status (*const readers[OMC_N_OPS])(const omc_node *, omc_arena *, omc_moves_form *) = {
      [OMC_OP_Concat] = concat, [OMC_OP_Expand] = expand,        [OMC_OP_Pad] = pad,
      [OMC_OP_Slice] = slice,   [OMC_OP_SliceGrad] = slice_grad, [OMC_OP_Split] = split,
      [OMC_OP_Tile] = tile,     [OMC_OP_Transpose] = transpose,
  };
  *out = (omc_moves_form){0};
  return readers[node->op](node, arena, out);
}
