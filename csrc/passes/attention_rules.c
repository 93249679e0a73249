/* Attention takes in the transposes and the split around it; masks that say nothing, or say what
 * is_causal says, are taken out. */
#include <string.h>

#include "graph/edit.h"
#include "ops/forms.h"
#include "ops/op.h"
#include "passes/rewrite.h"

enum { MASK = 3 }; /* an input of an Attention node */

/* ---- masks ---- */

static omc_value *attention_no_mask(omc_match *m) {
  const omc_value *mask = omc_in(m->root, MASK);
  if (!omc_is_const(mask)) return NULL;
  const bool says_nothing = mask->type.dtype == OMC_BOOL
                                ? omc_const_all(mask, 1)
                                : omc_const_all(mask, 0) || omc_const_all(mask, -0.0);
  if (!says_nothing) return NULL;
  omc_set_input(m->root, MASK, NULL);
  return m->capture[0];
}

/* Whether n elements of `size` bytes are the same bits. */
static bool repeats(const char *data, int64_t n, size_t size) {
  return memcmp(data, data + size, (size_t)(n - 1) * size) == 0;
}

/* Whether a constant n x n mask lets position i see j <= i and nothing else. A float mask hides
 * with numbers so low that the exponential of any score plus them is zero. */
static bool is_lower_triangle(const omc_value *mask, int64_t n) {
  const bool is_bool = mask->type.dtype == OMC_BOOL;
  const size_t size = omc_dtype_size(mask->type.dtype);
  const char *data = mask->data;
  for (int64_t i = 0; i < n; i++) {
    const char *row = data + (size_t)(i * n) * size;
    const double seen = omc_const_float(mask, i * n);
    if (seen != (is_bool ? 1 : 0) || !repeats(row, i + 1, size)) return false;
    if (i + 1 == n) break;
    const double hidden = omc_const_float(mask, i * n + i + 1);
    const bool hides = is_bool ? hidden == 0 : hidden <= -1e30;
    if (!hides || !repeats(row + (size_t)(i + 1) * size, n - i - 1, size)) return false;
  }
  return true;
}

/* The same of a mask of any rank, all of whose matrices must be equal. */
static bool is_causal_pattern(const omc_value *mask) {
  const omc_shape *shape = &mask->type.shape;
  if (shape->rank < 2 || omc_shape_numel(shape) == 0) return false;
  const int64_t size = shape->dims[shape->rank - 1];
  if (shape->dims[shape->rank - 2] != size || !is_lower_triangle(mask, size)) return false;
  const size_t bytes = (size_t)(size * size) * omc_dtype_size(mask->type.dtype);
  const size_t matrices = (size_t)omc_shape_span(shape, 0, shape->rank - 2);
  return memcmp(mask->data, (const char *)mask->data + bytes, (matrices - 1) * bytes) == 0;
}

static omc_value *attention_causal(omc_match *m) {
  const omc_value *mask = omc_in(m->root, MASK);
  if (!omc_is_const(mask) || !is_causal_pattern(mask)) return NULL;
  const int64_t size = mask->type.shape.dims[mask->type.shape.rank - 1];
  omc_attention_form f;
  m->b->status = omc_attention_form_of(m->root, &f);
  if (m->b->status != OMC_OK || f.queries != size || f.keys != size) return NULL;
  omc_set_input(m->root, MASK, NULL);
  m->b->status = omc_set_attr(m->b->graph, m->root, omc_attr_int("is_causal", 1));
  return m->capture[0];
}

/* ---- layout ---- */

/* Whether a node swaps heads and tokens. */
static bool swaps_heads(const omc_node *node) {
  static const int64_t swapped[] = {0, 2, 1, 3};
  if (!node || node->op != OMC_OP_Transpose) return false;
  uint32_t n;
  const int64_t *perm = omc_node_ints(node, "perm", &n);
  return n == 4 && memcmp(perm, swapped, sizeof swapped) == 0;
}

/* Swaps the axes of heads and tokens of those of q, k, v and y whose bit is set in `swap`. */
static void swap_layouts(omc_builder *b, omc_node *node, uint32_t swap) {
  int64_t *axes = OMC_NEW_ARRAY(&b->graph->arena, int64_t, OMC_N_HEADS);
  if (!axes) {
    b->status = omc_fail(OMC_ENOMEM, "no memory for attribute head_axes");
    return;
  }
  b->status = omc_head_axes_of(node, axes);
  for (int i = 0; i < OMC_N_HEADS && b->status == OMC_OK; i++)
    if (swap >> i & 1) axes[i] = 3 - axes[i];
  if (b->status == OMC_OK)
    b->status = omc_set_attr(b->graph, node, omc_attr_ints("head_axes", axes, OMC_N_HEADS));
}

static bool is_packed(const omc_node *node) { return omc_node_int(node, "kv_heads") > 0; }

/* Reads q, k and v through their transposes. */
static omc_value *attention_transpose(omc_match *m) {
  uint32_t swap = 0;
  if (is_packed(m->root)) return NULL;
  for (uint32_t i = OMC_HEADS_OF_Q; i <= OMC_HEADS_OF_V; i++) {
    const omc_node *transpose = omc_in(m->root, i)->producer;
    if (!swaps_heads(transpose)) continue;
    omc_set_input(m->root, i, omc_in(transpose, 0));
    swap |= 1u << i;
  }
  if (swap == 0) return NULL;
  swap_layouts(m->b, m->root, swap);
  return m->capture[0];
}

/* Writes y as its transpose, of which it is the only use. */
static omc_value *transpose_attention(omc_match *m) {
  omc_node *node = m->capture[1]->producer;
  if (!swaps_heads(m->root)) return NULL;
  swap_layouts(m->b, node, 1u << OMC_HEADS_OF_Y);
  if (m->b->status == OMC_OK) m->b->status = omc_op_get(node->op)->infer(node);
  return m->capture[1];
}

/* The split of a last axis that gives input i, its heads behind the tokens, and gives nobody else
 * what is at i. */
static const omc_node *split_of(const omc_node *node, uint32_t i) {
  const omc_value *v = omc_in(node, i);
  const int64_t heads = v->type.shape.dims[2] * v->type.shape.dims[3];
  if (v->producer && v->producer->op == OMC_OP_Reshape && !v->uses->next)
    v = omc_in(v->producer, 0);
  const omc_node *split = v->producer;
  if (!split || split->op != OMC_OP_Split || split->n_out != 3 || v->index != i || v->uses->next)
    return NULL;
  const omc_shape *shape = &v->type.shape;
  int32_t axis;
  const bool last = omc_axis(omc_node_int(split, "axis"), shape->rank, "axis", &axis) == OMC_OK &&
                    axis == shape->rank - 1;
  return last && shape->dims[axis] == heads ? split : NULL;
}

/* Reads q, k and v where a projection has all three. */
static omc_value *attention_split(omc_match *m) {
  omc_node *node = m->root;
  const omc_value *mask = omc_in(node, MASK);
  int64_t axes[OMC_N_HEADS];
  if (is_packed(node) || (mask && mask->type.dtype != OMC_BOOL)) return NULL;
  m->b->status = omc_head_axes_of(node, axes);
  if (m->b->status != OMC_OK) return NULL;
  const omc_node *split = NULL;
  for (uint32_t i = OMC_HEADS_OF_Q; i <= OMC_HEADS_OF_V; i++) {
    const omc_node *of = axes[i] == 2 ? split_of(node, i) : NULL;
    if (!of || (split && of != split)) return NULL;
    split = of;
  }
  const int64_t *q = omc_in(node, OMC_HEADS_OF_Q)->type.shape.dims,
                *k = omc_in(node, OMC_HEADS_OF_K)->type.shape.dims,
                *v = omc_in(node, OMC_HEADS_OF_V)->type.shape.dims;
  if (q[1] != k[1] || q[3] != v[3]) return NULL;
  const int64_t kv_heads = k[2];
  const omc_shape all = {4, {q[0], q[1], q[2] + 2 * kv_heads, q[3]}};
  omc_value *x = omc_reshape(m->b, omc_in(split, 0), &all);
  if (!x) return NULL;
  omc_set_input(node, OMC_HEADS_OF_Q, x);
  omc_set_input(node, OMC_HEADS_OF_K, NULL);
  omc_set_input(node, OMC_HEADS_OF_V, NULL);
  m->b->status = omc_set_attr(m->b->graph, node, omc_attr_int("kv_heads", kv_heads));
  return m->capture[0];
}

static const omc_rule rules[] = {
    {"attention_no_mask", OMC_EXACT, OMC_P_NODE(Attention, 0), attention_no_mask},
    {"attention_causal", OMC_FINITE, OMC_P_NODE(Attention, 0), attention_causal},
    {"attention_transpose", OMC_EXACT, OMC_P_NODE(Attention, 0), attention_transpose},
    {"transpose_attention", OMC_EXACT, OMC_P_OP(Transpose, 0, OMC_P_NODE(Attention, 1)),
     transpose_attention},
    {"attention_split", OMC_EXACT, OMC_P_NODE(Attention, 0), attention_split},
};

const omc_rules omc_attention_rules = {rules, sizeof rules / sizeof *rules};
