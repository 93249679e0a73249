/* Images with their channels last, [N, H, W, C] in place of [N, C, H, W]: as convolutions of 16
 * bits are computed on a GPU, which would turn images around and back for each of them.
 *
 * A convolution takes its images and its weight turned and gives what it gives turned; who reads
 * that reads a Transpose of it, back to where it was. Whatever can be computed of turned images is,
 * if it reads one that was turned back, and so on. Then Transposes that meet cancel, and those that
 * nobody reads go: an image is turned where it comes in, and where somebody wants it as it was.
 *
 * A graph in which a convolution has groups of several channels is left as it is: these are said to
 * take up to thirty times as long channels last (PyTorch's Inductor has the same rule). So is a
 * convolution of float32, of which PyTorch says only when it runs whether it is one of TF32. */
#include "graph/edit.h"
#include "ops/builder.h"
#include "ops/forms.h"
#include "ops/op.h"
#include "passes/passes.h"
#include "passes/rewrite.h"

enum { RANK = 4, EVERY = ~0u };

static const int64_t to_last[RANK] = {0, 2, 3, 1}, to_second[RANK] = {0, 3, 1, 2};

typedef struct turning {
  omc_graph *graph;
  omc_arena *arena;
  uint32_t n_values;  /* that there were */
  omc_value **turned; /* of these, by id: what has been turned; NULL: nobody has read it so */
} turning;

/* ---- values ---- */

static omc_shape permuted(const omc_shape *shape, const int64_t *perm) {
  omc_shape s = {.rank = RANK};
  for (int32_t d = 0; d < RANK; d++) s.dims[d] = shape->dims[perm[d]];
  return s;
}

/* With axes of one element in front. */
static omc_shape with_all_axes(const omc_shape *shape) {
  const int32_t lead = RANK - shape->rank;
  omc_shape s = {.rank = RANK};
  for (int32_t d = 0; d < RANK; d++) s.dims[d] = d < lead ? 1 : shape->dims[d - lead];
  return s;
}

/* What an image is turned back from; NULL: it is not. */
static omc_value *source_of(const omc_value *v) {
  int32_t perm[OMC_MAX_RANK];
  const omc_node *node = v->producer;
  if (!node || node->op != OMC_OP_Transpose || v->type.shape.rank != RANK) return NULL;
  if (omc_perm_of(node, perm) != OMC_OK) return NULL;
  for (int32_t d = 0; d < RANK; d++)
    if (perm[d] != to_second[d]) return NULL;
  return omc_in(node, 0);
}

static bool widens(const omc_node *node) {
  return node->op == OMC_OP_Cast &&
         omc_dtype_size(omc_in(node, 0)->type.dtype) < omc_dtype_size(node->out[0]->type.dtype);
}

/* Whether it, or what it is widened from, is turned back. */
static bool is_there_turned(const omc_value *v) {
  if (v->producer && widens(v->producer)) v = omc_in(v->producer, 0);
  return source_of(v) != NULL;
}

static bool is_one(const omc_value *v) { return omc_shape_numel(&v->type.shape) == 1; }

static omc_value *turned(turning *t, omc_builder *b, omc_value *v);

/* Of what has been repeated or widened, that which there was before. */
static omc_value *new_turned(turning *t, omc_builder *b, omc_value *v) {
  const omc_shape shape = with_all_axes(&v->type.shape), last = permuted(&shape, to_last);
  omc_value *const before = v->producer ? omc_in(v->producer, 0) : NULL;
  if (before && v->producer->op == OMC_OP_Expand)
    return omc_expand(b, is_one(before) ? before : turned(t, b, before), &last);
  if (before && widens(v->producer)) return omc_cast(b, turned(t, b, before), v->type.dtype);
  return omc_transpose(b, omc_reshape(b, v, &shape), to_last);
}

/* A value of at most four axes, channels last. What the caller has is turned anew for a backward,
 * rather than kept for it. */
static omc_value *turned(turning *t, omc_builder *b, omc_value *v) {
  omc_value *last = source_of(v);
  omc_value **const known = v->id < t->n_values ? &t->turned[v->id] : &last;
  if (last) return last;
  const bool kept = *known && omc_may_read(b->phase, *known);
  if (kept && (v->producer || (*known)->producer->phase == b->phase)) return *known;
  return *known = new_turned(t, b, v);
}

/* ---- what changes of a node but its images ---- */

/* Of the result, which a gradient is told. */
static omc_status turn_shape(omc_builder *b, omc_node *node) {
  const omc_attr *given = omc_node_attr(node, "shape");
  if (!given) return OMC_OK;
  int64_t *shape = OMC_NEW_ARRAY(&b->graph->arena, int64_t, RANK);
  if (!shape) OMC_NODE_FAIL(node, ENOMEM, "no memory for its shape");
  for (int32_t d = 0; d < RANK; d++) shape[d] = given->v.is[to_last[d]];
  return omc_set_attr(b->graph, node, omc_attr_ints("shape", shape, RANK));
}

static omc_status adapt_windows(omc_builder *b, omc_node *node) {
  OMC_TRY(omc_set_attr(b->graph, node, omc_attr_int("channels_last", 1)));
  return turn_shape(b, node);
}

static omc_status adapt_axis(omc_builder *b, omc_node *node) {
  int32_t axis;
  OMC_TRY(omc_axis(omc_node_int(node, "axis"), RANK, omc_node_name(node), &axis));
  return omc_set_attr(b->graph, node, omc_attr_int("axis", to_second[axis]));
}

/* What is cut along axes that are not listed is left where it is. */
static omc_status adapt_slice(omc_builder *b, omc_node *node) {
  const omc_value *given = omc_in(node, 3);
  int64_t axes[RANK];
  const int32_t n = (int32_t)omc_shape_numel(&given->type.shape);
  for (int32_t i = 0; i < n; i++) {
    int32_t axis;
    OMC_TRY(omc_axis(omc_const_int(given, i), RANK, omc_node_name(node), &axis));
    axes[i] = to_second[axis];
  }
  omc_set_input(node, 3, omc_ints(b, axes, n));
  OMC_TRY(b->status);
  return turn_shape(b, node);
}

/* All axes are kept, as the order of those that are left may be another. */
static omc_status adapt_axes(omc_builder *b, omc_node *node) {
  bool reduced[OMC_MAX_RANK];
  int64_t axes[RANK];
  int32_t n = 0;
  OMC_TRY(omc_reduced_axes(node, reduced));
  for (int32_t d = 0; d < RANK; d++)
    if (reduced[to_last[d]]) axes[n++] = d;
  if (omc_in(node, 1)) omc_set_input(node, 1, omc_ints(b, axes, n));
  OMC_TRY(b->status);
  return omc_set_attr(b->graph, node, omc_attr_int("keepdims", 1));
}

static omc_status adapt_pads(omc_builder *b, omc_node *node) {
  int64_t second[2 * OMC_MAX_RANK], last[2 * RANK];
  OMC_TRY(omc_pads_of(node, second));
  for (int32_t d = 0; d < RANK; d++)
    last[d] = second[to_last[d]], last[RANK + d] = second[RANK + to_last[d]];
  omc_set_input(node, 1, omc_ints(b, last, 2 * RANK));
  return b->status;
}

enum { ADDED = 5 }; /* input of BatchNorm */

/* Images are rows of channels. */
static omc_status adapt_channels(omc_builder *b, omc_node *node) {
  const uint32_t images = node->op == OMC_OP_BatchNorm ? 1u | 1u << ADDED : 3u;
  for (uint32_t i = 0; i < node->n_in; i++) {
    if (!(images >> i & 1) || !omc_in(node, i)) continue;
    const omc_shape *x = &omc_in(node, i)->type.shape;
    const omc_shape rows = {2, {omc_shape_span(x, 0, RANK - 1), x->dims[RANK - 1]}};
    omc_set_input(node, i, omc_reshape(b, omc_in(node, i), &rows));
  }
  return b->status;
}

/* ---- ops ---- */

static bool convolves_halves(const omc_node *node) {
  return omc_dtype_size(omc_in(node, 0)->type.dtype) == 2 && !omc_is_channels_last(node);
}

static bool pools_planes(const omc_node *node) {
  const omc_attr *window = omc_node_attr(node, "kernel_shape");
  if (!window) window = omc_node_attr(node, "output_size");
  return window && window->n == 2 && !omc_is_channels_last(node);
}

/* Without a list of axes a slice is of the first ones, in their order. */
static bool lists_axes(const omc_node *node) {
  return omc_is_const(omc_in(node, 3)) && omc_shape_numel(&omc_in(node, 3)->type.shape) <= RANK;
}

/* What is widened is turned before, if somebody reads it so. */
static bool has_image(const omc_node *node) {
  return node->out[0]->type.shape.rank == RANK && !widens(node);
}

typedef enum {
  IF_TURNED, /* an image that is read has been turned back */
  IF_PLACED, /* or is of one place, which costs nothing to turn, and what it becomes meets one */
  ALWAYS
} turning_rule;

typedef struct op_images {
  uint32_t in, out; /* bits of inputs and outputs that are images, or weights */
  turning_rule when;
  bool (*may)(const omc_node *node); /* whether a node may take them turned; NULL: any */
  omc_status (*adapt)(omc_builder *b, omc_node *node); /* NULL: nothing else changes */
} op_images;

#define CONVOLUTION {3, 1, ALWAYS, convolves_halves, adapt_windows}
#define POOL(in, out, when) {in, out, when, pools_planes, adapt_windows}
#define OTHER(in, out, adapt) {in, out, IF_TURNED, NULL, adapt}
static const op_images ops[OMC_N_OPS] = {
    [OMC_OP_Conv] = CONVOLUTION,
    [OMC_OP_ConvTranspose] = CONVOLUTION,
    [OMC_OP_ConvGradInput] = CONVOLUTION,
    [OMC_OP_ConvGradWeight] = CONVOLUTION,
    [OMC_OP_MaxPool] = POOL(1, 7, IF_TURNED),
    [OMC_OP_MaxPoolGrad] = POOL(3, 1, IF_TURNED),
    [OMC_OP_AveragePool] = POOL(1, 1, IF_TURNED),
    [OMC_OP_AveragePoolGrad] = POOL(1, 1, IF_PLACED),
    [OMC_OP_AdaptiveAvgPool] = POOL(1, 1, IF_TURNED),
    [OMC_OP_AdaptiveAvgPoolGrad] = POOL(1, 1, IF_PLACED),
    [OMC_OP_BatchNorm] = OTHER(1u | 1u << ADDED, 1, adapt_channels),
    [OMC_OP_BatchNormGrad] = OTHER(3, 1, adapt_channels),
    [OMC_OP_ReduceSum] = OTHER(1, 1, adapt_axes),
    [OMC_OP_ReduceMean] = OTHER(1, 1, adapt_axes),
    [OMC_OP_ReduceMax] = OTHER(1, 1, adapt_axes),
    [OMC_OP_ReduceMin] = OTHER(1, 1, adapt_axes),
    [OMC_OP_ReduceProd] = OTHER(1, 1, adapt_axes),
    [OMC_OP_Concat] = OTHER(EVERY, 1, adapt_axis),
    [OMC_OP_Split] = OTHER(1, EVERY, adapt_axis),
    [OMC_OP_Pad] = OTHER(1, 1, adapt_pads),
    [OMC_OP_Slice] = {1, 1, IF_TURNED, lists_axes, adapt_slice},
    [OMC_OP_SliceGrad] = {1, 1, IF_TURNED, lists_axes, adapt_slice},
    [OMC_OP_Softmax] = OTHER(1, 1, adapt_axis),
    [OMC_OP_SoftmaxGrad] = OTHER(3, 1, adapt_axis),
    [OMC_OP_LogSoftmax] = OTHER(1, 1, adapt_axis),
    [OMC_OP_LogSoftmaxGrad] = OTHER(3, 1, adapt_axis),
};
static const op_images elementwise = {EVERY, 1, IF_TURNED, has_image, NULL};

/* Random numbers go by the order of elements. */
static const op_images *images_of(const omc_node *node) {
  const omc_op *op = omc_op_get(node->op);
  if (op->imm) return op->flags & OMC_OP_RANDOM ? NULL : &elementwise;
  return ops[node->op].in ? &ops[node->op] : NULL;
}

static bool has_bit(uint32_t bits, uint32_t i) { return i < 32 ? bits >> i & 1 : bits == EVERY; }

/* An input that is to be turned: a single element is as it was. */
static omc_value *image_in(const omc_node *node, const op_images *of, uint32_t i) {
  omc_value *v = has_bit(of->in, i) ? omc_in(node, i) : NULL;
  return v && !is_one(v) ? v : NULL;
}

/* Whether more bytes of the images that it reads have been turned than have not: of elementwise ops
 * those that are not repeated count. */
static bool reads_turned(const omc_node *node, const op_images *of) {
  double bytes = 0;
  bool any = false;
  for (uint32_t i = 0; i < node->n_in; i++) {
    const omc_value *v = image_in(node, of, i);
    if (!v) continue;
    if (of == &elementwise && !omc_shape_equal(&v->type.shape, &node->out[0]->type.shape)) continue;
    const double size =
        (double)omc_shape_numel(&v->type.shape) * (double)omc_dtype_size(v->type.dtype);
    bytes += is_there_turned(v) ? size : -size;
    any = any || is_there_turned(v);
  }
  return any && bytes >= 0;
}

/* Whether somebody who reads the result of a node reads an image beside it that has been turned. */
static bool meets_turned(const omc_node *node) {
  for (const omc_use *u = node->out[0]->uses; u; u = u->next)
    for (uint32_t i = 0; u->node->op != OMC_N_OPS && i < u->node->n_in; i++)
      if (omc_in(u->node, i) && is_there_turned(omc_in(u->node, i))) return true;
  return false;
}

static bool is_turned(const omc_node *node, const op_images *of) {
  if (!of || (of->may && !of->may(node))) return false;
  const omc_shape *x = &omc_in(node, 0)->type.shape;
  if (of->when == ALWAYS) return x->rank == RANK;
  const bool is_place = x->rank == RANK && omc_shape_span(x, 2, RANK) == 1;
  return reads_turned(node, of) || (of->when == IF_PLACED && is_place && meets_turned(node));
}

/* ---- the pass ---- */

/* Whoever reads output k, which was of shape `was`, reads it turned back. */
static omc_status turn_back(turning *t, omc_node *node, uint32_t k, const omc_shape *was) {
  omc_value *const y = node->out[k];
  omc_builder b = {t->graph, node->next, node->phase, node->name, OMC_OK};
  const omc_shape last = was->rank == RANK ? permuted(was, to_last) : y->type.shape;
  omc_value *const image = omc_reshape(&b, y, &last);
  omc_value *const second = omc_transpose(&b, image, to_second);
  omc_value *const back = omc_reshape(&b, second, was);
  OMC_TRY(b.status);
  omc_replace_uses(y, back);
  omc_set_input(image == y ? second->producer : image->producer, 0, y);
  return OMC_OK;
}

static omc_status turn(turning *t, omc_node *node, const op_images *of) {
  omc_builder b = {.graph = t->graph, .before = node, .phase = node->phase, .name = node->name};
  omc_shape *was = OMC_NEW_ARRAY(t->arena, omc_shape, node->n_out);
  if (!was) OMC_NODE_FAIL(node, ENOMEM, "no memory for shapes of %u images", node->n_out);
  for (uint32_t i = 0; i < node->n_in; i++)
    if (image_in(node, of, i)) omc_set_input(node, i, turned(t, &b, omc_in(node, i)));
  OMC_TRY(b.status);
  if (of->adapt) OMC_TRY(of->adapt(&b, node));
  for (uint32_t k = 0; k < node->n_out; k++)
    if (node->out[k]) was[k] = node->out[k]->type.shape;
  OMC_TRY(omc_op_get(node->op)->infer(node));
  for (uint32_t k = 0; k < node->n_out; k++)
    if (has_bit(of->out, k) && node->out[k] && node->out[k]->uses)
      OMC_TRY(turn_back(t, node, k, &was[k]));
  return OMC_OK;
}

static omc_status turn_all(turning *t) {
  t->turned = OMC_NEW_ARRAY(t->arena, omc_value *, t->n_values);
  if (!t->turned) OMC_FAIL(ENOMEM, "no memory for %u images", t->n_values);
  for (omc_node *node = t->graph->first, *next; node; node = next) {
    next = node->next;
    const op_images *of = images_of(node);
    if (is_turned(node, of)) OMC_TRY(turn(t, node, of));
  }
  return OMC_OK;
}

/* A weight is [.., channels of a group, ..]. */
static bool has_wide_groups(const omc_node *node) {
  const bool is_result = node->op == OMC_OP_ConvGradWeight;
  const omc_value *weight = is_result ? node->out[0] : omc_in(node, 1);
  return omc_node_int(node, "group") > 1 && weight->type.shape.dims[1] > 1;
}

static bool profits(const omc_graph *g) {
  bool any = false;
  for (const omc_node *node = g->first; node; node = node->next) {
    if (ops[node->op].when != ALWAYS || !is_turned(node, &ops[node->op])) continue;
    if (has_wide_groups(node)) return false;
    any = true;
  }
  return any;
}

omc_status omc_lay_channels_last(omc_graph *g) {
  uint32_t changes;
  omc_arena arena;
  if (!profits(g)) return OMC_OK;
  omc_arena_init(&arena, g->arena.allocator);
  turning t = {.graph = g, .arena = &arena, .n_values = g->n_values};
  const omc_status status = turn_all(&t);
  omc_arena_deinit(&arena);
  OMC_TRY(status);
  omc_erase_unused(g);
  return omc_apply_rules(g, &omc_movement_rules, &changes);
}
