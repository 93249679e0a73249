/* What is put together and taken apart again: parts are taken as they are. So a loop that writes
 * its steps into places of a tensor, each of which is a tensor with one part exchanged, is one
 * Concat. */
#include "base/int.h"
#include "ops/forms.h"
#include "ops/infer.h"
#include "ops/op.h"
#include "passes/rewrite.h"

/* Whether v is put together along an axis. */
static bool is_concat(const omc_value *v, int32_t axis) {
  const omc_node *node = v->producer;
  int32_t along;
  return node && node->op == OMC_OP_Concat &&
         omc_node_axis(node, omc_node_int(node, "axis"), v->type.shape.rank, &along) == OMC_OK &&
         along == axis;
}

bool omc_is_slice(const omc_node *node, const omc_shape *of, omc_axis_range *out) {
  omc_slice_form f;
  int32_t cut = 0;
  if (omc_slice_form_of(node, of, &f) != OMC_OK) return false;
  for (int32_t i = 0; i < of->rank; i++) {
    if (f.step[i] != 1 || f.shape.dims[i] == 0) return false;
    if (f.shape.dims[i] == of->dims[i]) continue;
    *out = (omc_axis_range){i, f.start[i], f.start[i] + f.shape.dims[i]};
    cut++;
  }
  return cut == 1;
}

bool omc_is_row(const omc_node *node, const omc_shape *of, omc_axis_range *out) {
  const omc_value *ids = omc_in(node, 1);
  if (!omc_is_const(ids) || omc_shape_numel(&ids->type.shape) != 1 ||
      omc_node_axis(node, omc_node_int(node, "axis"), of->rank, &out->axis) != OMC_OK)
    return false;
  const int64_t id = omc_const_int(ids, 0), row = id < 0 ? id + of->dims[out->axis] : id;
  out->start = row, out->end = row + 1;
  return row >= 0 && row < of->dims[out->axis];
}

/* Whether v is a Slice of one. */
static bool is_sliced(const omc_value *v, omc_axis_range *s) {
  const omc_node *node = v->producer;
  return node && node->op == OMC_OP_Slice && omc_is_slice(node, &omc_in(node, 0)->type.shape, s);
}

/* A stretch of x: of what x itself is a stretch of, if it is one. */
static omc_value *stretch_of(omc_builder *b, omc_value *x, omc_axis_range s) {
  omc_axis_range of;
  if (s.start == 0 && s.end == x->type.shape.dims[s.axis]) return x;
  if (is_sliced(x, &of) && of.axis == s.axis) {
    s.start += of.start, s.end += of.start;
    x = omc_in(x->producer, 0);
  }
  const int64_t axis = s.axis;
  omc_value *const in[] = {x, omc_ints(b, &s.start, 1), omc_ints(b, &s.end, 1),
                           omc_ints(b, &axis, 1)};
  return omc_nary(b, OMC_OP_Slice, 4, in, 0, NULL);
}

static omc_value *slice_slice(omc_match *m) {
  omc_value *x = omc_in(m->root, 0);
  omc_axis_range s, of;
  if (!is_sliced(m->capture[0], &s) || !is_sliced(x, &of) || of.axis != s.axis ||
      !omc_has_one_use(x))
    return NULL;
  return stretch_of(m->b, x, s);
}

/* The part of a Concat that has position `at` along the axis; *first: where that part begins. */
static omc_value *part_at(const omc_node *concat, int32_t axis, int64_t at, int64_t *first) {
  *first = 0;
  for (uint32_t i = 0;; i++) {
    omc_value *part = omc_in(concat, i);
    const int64_t n = part->type.shape.dims[axis];
    if (at < *first + n) return part;
    *first += n;
  }
}

/* Whether nobody but two slices, those before and behind a place, reads what is put together. */
static bool is_taken_apart(const omc_value *v) {
  uint32_t slices = 0;
  omc_axis_range s;
  for (const omc_use *u = v->uses; u && slices <= 2; u = u->next, slices++)
    if (u->node->op != OMC_OP_Slice || u->index != 0 || !is_sliced(u->node->out[0], &s))
      return false;
  return slices <= 2;
}

/* Of one part, or of several if that leaves the Concat unread. */
static omc_value *slice_concat(omc_match *m) {
  omc_value *x = omc_in(m->root, 0);
  const omc_node *concat = x->producer;
  omc_axis_range s;
  int64_t first;
  if (!is_sliced(m->capture[0], &s) || !is_concat(x, s.axis)) return NULL;
  omc_value *part = part_at(concat, s.axis, s.start, &first);
  if (s.end <= first + part->type.shape.dims[s.axis])
    return stretch_of(m->b, part, (omc_axis_range){s.axis, s.start - first, s.end - first});
  if (!is_taken_apart(x)) return NULL;
  omc_value **parts = OMC_NEW_ARRAY(&m->b->graph->arena, omc_value *, concat->n_in);
  if (!parts) {
    m->b->status = omc_fail(OMC_ENOMEM, "no memory for %u parts", concat->n_in);
    return NULL;
  }
  uint32_t n = 0;
  first = 0;
  for (uint32_t i = 0; i < concat->n_in; i++) {
    part = omc_in(concat, i);
    const int64_t size = part->type.shape.dims[s.axis];
    const int64_t start = omc_max(s.start - first, 0), end = omc_min(s.end - first, size);
    if (start < end) parts[n++] = stretch_of(m->b, part, (omc_axis_range){s.axis, start, end});
    first += size;
  }
  const omc_attr along = omc_attr_int("axis", s.axis);
  return omc_nary(m->b, OMC_OP_Concat, n, parts, 1, &along);
}

/* One row of a part. */
static omc_value *gather_concat(omc_match *m) {
  omc_value *x = omc_in(m->root, 0);
  omc_axis_range s;
  int64_t first;
  if (!omc_is_row(m->root, &x->type.shape, &s) || !is_concat(x, s.axis)) return NULL;
  omc_value *part = part_at(x->producer, s.axis, s.start, &first);
  part = stretch_of(m->b, part, (omc_axis_range){s.axis, s.start - first, s.end - first});
  return part ? omc_reshape(m->b, part, &m->capture[0]->type.shape) : NULL;
}

/* Whether part i is itself put together along the axis, for nobody else. */
static bool is_joined(const omc_node *root, uint32_t i, int32_t axis) {
  const omc_value *part = omc_in(root, i);
  return is_concat(part, axis) && omc_has_one_use(part);
}

static omc_value *concat_concat(omc_match *m) {
  const omc_node *root = m->root;
  int32_t axis;
  uint32_t n = 0;
  if (omc_node_axis(root, omc_node_int(root, "axis"), m->capture[0]->type.shape.rank, &axis) !=
      OMC_OK)
    return NULL;
  for (uint32_t i = 0; i < root->n_in; i++)
    n += is_joined(root, i, axis) ? omc_in(root, i)->producer->n_in : 1;
  if (n == root->n_in) return NULL;
  omc_value **parts = OMC_NEW_ARRAY(&m->b->graph->arena, omc_value *, n);
  if (!parts) {
    m->b->status = omc_fail(OMC_ENOMEM, "no memory for %u parts", n);
    return NULL;
  }
  n = 0;
  for (uint32_t i = 0; i < root->n_in; i++) {
    omc_value *part = omc_in(root, i);
    if (!is_joined(root, i, axis)) {
      parts[n++] = part;
      continue;
    }
    for (uint32_t k = 0; k < part->producer->n_in; k++) parts[n++] = omc_in(part->producer, k);
  }
  const omc_attr along = omc_attr_int("axis", axis);
  return omc_nary(m->b, OMC_OP_Concat, n, parts, 1, &along);
}

static const omc_rule rules[] = {
    {"slice_slice", OMC_EXACT, OMC_P_NODE(Slice, 0), slice_slice},
    {"slice_concat", OMC_EXACT, OMC_P_NODE(Slice, 0), slice_concat},
    {"gather_concat", OMC_EXACT, OMC_P_NODE(Gather, 0), gather_concat},
    {"concat_concat", OMC_EXACT, OMC_P_NODE(Concat, 0), concat_concat},
};

const omc_rules omc_concat_rules = {rules, sizeof rules / sizeof *rules};
