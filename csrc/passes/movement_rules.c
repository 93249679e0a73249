/* Canonical forms of ops that move elements: every view is a Reshape, and none is in vain. */
#include "graph/edit.h"
#include "ops/forms.h"
#include "ops/op.h"
#include "passes/rewrite.h"

static omc_value *to_reshape(omc_match *m) {
  return omc_reshape(m->b, omc_in(m->root, 0), &m->capture[0]->type.shape);
}

static omc_value *reshape_reshape(omc_match *m) {
  return omc_reshape(m->b, m->capture[1], &m->capture[0]->type.shape);
}

/* A transpose that leaves the axes longer than 1 in order moves nothing. */
static omc_value *transpose_view(omc_match *m) {
  int32_t perm[OMC_MAX_RANK], last = -1;
  if (omc_perm_of(m->root, perm) != OMC_OK) return NULL;
  const omc_shape *shape = &m->capture[0]->type.shape;
  for (int32_t i = 0; i < shape->rank; i++) {
    if (shape->dims[i] == 1) continue;
    if (perm[i] < last) return NULL;
    last = perm[i];
  }
  return to_reshape(m);
}

static omc_value *transpose_transpose(omc_match *m) {
  int32_t inner[OMC_MAX_RANK], outer[OMC_MAX_RANK];
  int64_t perm[OMC_MAX_RANK];
  if (omc_perm_of(m->capture[2]->producer, inner) != OMC_OK) return NULL;
  if (omc_perm_of(m->root, outer) != OMC_OK) return NULL;
  for (int32_t i = 0; i < m->capture[0]->type.shape.rank; i++) perm[i] = inner[outer[i]];
  return omc_transpose(m->b, m->capture[1], perm);
}

/* Whether use `u` broadcasts by itself what an Expand from `x` would repeat. */
static bool broadcasts_itself(const omc_use *u, const omc_value *x) {
  const omc_node *node = u->node;
  if (node->op == OMC_OP_Attention) return u->index == 3;
  if (node->op == OMC_N_OPS || !omc_op_get(node->op)->imm || node->n_in < 2) return false;
  omc_shape shape = x->type.shape;
  for (uint32_t i = 0; i < node->n_in; i++) {
    const omc_value *v = omc_in(node, i);
    if (!v || i == u->index) continue;
    if (v == u->value || omc_shape_broadcast(&shape, &v->type.shape, "operand", &shape) != OMC_OK)
      return false;
  }
  return omc_shape_equal(&shape, &node->out[0]->type.shape);
}

static omc_value *expand_broadcast(omc_match *m) {
  bool changed = false;
  for (omc_use *u = m->capture[0]->uses, *next; u; u = next) {
    next = u->next;
    if (!broadcasts_itself(u, m->capture[1])) continue;
    omc_set_input(u->node, u->index, m->capture[1]);
    changed = true;
  }
  return changed ? m->capture[0] : NULL;
}

/* Ids of single elements that an Expand repeats along all axes but one, as ids of rows; NULL: they
 * are none, or do not name whole rows of a table of this shape. */
static omc_value *ids_of_rows(omc_match *m, const omc_shape *table) {
  const omc_value *ids = omc_in(m->root, 1);
  const omc_shape *shape = &ids->type.shape;
  omc_lines_form form;
  if (!ids->producer || ids->producer->op != OMC_OP_Expand) return NULL;
  if (omc_gather_elements_form_of(m->root, table, &form) != OMC_OK) return NULL;
  omc_value *given = omc_in(ids->producer, 0);
  const int32_t left_out = shape->rank - given->type.shape.rank;
  for (int32_t i = 0; i < shape->rank; i++) {
    const int64_t dim = i < left_out ? 1 : given->type.shape.dims[i - left_out];
    if (dim != (i == form.axis ? shape->dims[i] : 1)) return NULL;
    if (i != form.axis && shape->dims[i] != table->dims[i]) return NULL;
  }
  const omc_shape row = {.rank = 1, .dims = {shape->dims[form.axis]}};
  return omc_reshape(m->b, given, &row);
}

static omc_value *gather_rows(omc_match *m) {
  omc_value *const ids = ids_of_rows(m, &omc_in(m->root, 0)->type.shape);
  omc_value *const in[] = {omc_in(m->root, 0), ids};
  return ids ? omc_nary_like(m->b, OMC_OP_Gather, 2, in, m->root, NULL) : NULL;
}

/* Of floats, which are added up row by row. */
static omc_value *add_rows(omc_match *m) {
  if (!omc_dtype_is_float(m->capture[0]->type.dtype)) return NULL;
  omc_value *const ids = ids_of_rows(m, &m->capture[0]->type.shape);
  omc_value *const in[] = {omc_in(m->root, 0), ids, omc_in(m->root, 2)};
  return ids ? omc_nary_like(m->b, OMC_OP_GatherGrad, in[2] ? 3 : 2, in, m->root, NULL) : NULL;
}

static omc_value *slice_full(omc_match *m) {
  omc_value *x = omc_in(m->root, 0);
  const omc_value *steps = omc_in(m->root, 4);
  if (steps && !omc_const_all(steps, 1)) return NULL;
  return omc_type_equal(&x->type, &m->capture[0]->type) ? x : NULL;
}

static omc_value *pad_nothing(omc_match *m) {
  return omc_const_all(omc_in(m->root, 1), 0) ? omc_in(m->root, 0) : NULL;
}

static omc_value *concat_one(omc_match *m) {
  return m->root->n_in == 1 ? omc_in(m->root, 0) : NULL;
}

static omc_value *split_one(omc_match *m) {
  return m->root->n_out == 1 ? omc_in(m->root, 0) : NULL;
}

static const omc_rule rules[] = {
    {"identity", OMC_EXACT, OMC_P_OP(Identity, 0, OMC_P_ANY(1)), omc_match_identity},
    {"squeeze", OMC_EXACT, OMC_P_NODE(Squeeze, 0), to_reshape},
    {"unsqueeze", OMC_EXACT, OMC_P_NODE(Unsqueeze, 0), to_reshape},
    {"flatten", OMC_EXACT, OMC_P_NODE(Flatten, 0), to_reshape},
    {"reshape_same", OMC_EXACT, OMC_P_OP(Reshape, 0, OMC_P_ANY(1), OMC_P_ANY(2)),
     omc_match_identity},
    {"reshape_reshape", OMC_EXACT,
     OMC_P_OP(Reshape, 0, OMC_P_SHARED(Reshape, 0, OMC_P_ANY(1), OMC_P_ANY(2)), OMC_P_ANY(3)),
     reshape_reshape},
    {"transpose_view", OMC_EXACT, OMC_P_NODE(Transpose, 0), transpose_view},
    {"transpose_transpose", OMC_EXACT,
     OMC_P_OP(Transpose, 0, OMC_P_SHARED(Transpose, 2, OMC_P_ANY(1))), transpose_transpose},
    {"expand_same", OMC_EXACT, OMC_P_OP(Expand, 0, OMC_P_ANY(1), OMC_P_ANY(2)), omc_match_identity},
    {"expand_broadcast", OMC_EXACT, OMC_P_OP(Expand, 0, OMC_P_ANY(1), OMC_P_ANY(2)),
     expand_broadcast},
    {"gather_rows", OMC_EXACT, OMC_P_NODE(GatherElements, 0), gather_rows},
    {"add_rows", OMC_EXACT, OMC_P_NODE(GatherElementsGrad, 0), add_rows},
    {"slice_full", OMC_EXACT, OMC_P_NODE(Slice, 0), slice_full},
    {"pad_nothing", OMC_EXACT, OMC_P_NODE(Pad, 0), pad_nothing},
    {"tile_once", OMC_EXACT, OMC_P_OP(Tile, 0, OMC_P_ANY(1), OMC_P_ANY(2)), omc_match_identity},
    {"concat_one", OMC_EXACT, OMC_P_NODE(Concat, 0), concat_one},
    {"split_one", OMC_EXACT, OMC_P_NODE(Split, 0), split_one},
};

const omc_rules omc_movement_rules = {rules, sizeof rules / sizeof *rules};
