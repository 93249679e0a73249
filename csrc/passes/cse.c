#include <string.h>

#include "graph/edit.h"
#include "ops/op.h"
#include "passes/passes.h"

/* Equal constants above this size are left apart: comparing them costs more than it saves. */
#define MAX_CONST_BYTES 4096

/* An open-addressing table of nodes or of constants, whichever `equal` compares. */
typedef struct table {
  void **slots;
  size_t mask;
} table;

typedef bool (*equal_fn)(const void *a, const void *b);

/* The entry equal to `item`; `item` itself, entered, if there was none. */
static void *find_or_add(table *t, uint64_t hash, void *item, equal_fn equal) {
  size_t at = hash & t->mask;
  while (t->slots[at] && t->slots[at] != item && !equal(t->slots[at], item))
    at = (at + 1) & t->mask;
  if (!t->slots[at]) t->slots[at] = item;
  return t->slots[at];
}

static uint64_t mix(uint64_t hash, uint64_t x) {
  hash = (hash ^ x) * 0x9e3779b97f4a7c15u;
  return hash ^ hash >> 29;
}

static uint64_t hash_bytes(const void *data, size_t n) {
  uint64_t hash = n;
  for (size_t i = 0; i < n; i++) hash = mix(hash, ((const unsigned char *)data)[i]);
  return hash;
}

/* ---- constants ---- */

static size_t const_bytes(const omc_value *v) {
  return (size_t)omc_shape_numel(&v->type.shape) * omc_dtype_size(v->type.dtype);
}

static bool same_const(const void *a, const void *b) {
  const omc_value *x = a, *y = b;
  return omc_type_equal(&x->type, &y->type) && memcmp(x->data, y->data, const_bytes(x)) == 0;
}

static void merge_constants(table *t, omc_node *node) {
  for (uint32_t i = 0; i < node->n_in; i++) {
    omc_value *v = omc_in(node, i);
    if (!omc_is_const(v) || const_bytes(v) > MAX_CONST_BYTES) continue;
    omc_value *first = find_or_add(t, hash_bytes(v->data, const_bytes(v)), v, same_const);
    if (first != v) omc_set_input(node, i, first);
  }
}

/* ---- nodes ---- */

static bool same_attr(const omc_attr *a, const omc_attr *b) {
  if (strcmp(a->name, b->name) != 0 || a->kind != b->kind || a->n != b->n) return false;
  for (uint32_t i = 0; i < a->n; i++) {
    const omc_attr x = omc_attr_element(a, i), y = omc_attr_element(b, i);
    if (x.kind == OMC_ATTR_STRING ? strcmp(x.v.s, y.v.s) != 0 : memcmp(&x.v, &y.v, sizeof x.v) != 0)
      return false;
  }
  return true;
}

static bool same_inputs(const omc_node *a, const omc_node *b) {
  if (a->n_in != b->n_in) return false;
  uint32_t from = 0;
  if (a->n_in >= 2 && (omc_op_get(a->op)->flags & OMC_OP_COMMUTES)) {
    const bool crossed = omc_in(a, 0) == omc_in(b, 1) && omc_in(a, 1) == omc_in(b, 0);
    from = crossed ? 2 : 0;
  }
  for (uint32_t i = from; i < a->n_in; i++)
    if (omc_in(a, i) != omc_in(b, i)) return false;
  return true;
}

static bool same_node(const void *a, const void *b) {
  const omc_node *x = a, *y = b;
  if (x->op != y->op || x->phase != y->phase || x->n_out != y->n_out || x->n_attr != y->n_attr)
    return false;
  for (uint32_t i = 0; i < x->n_attr; i++)
    if (!same_attr(&x->attr[i], &y->attr[i])) return false;
  return same_inputs(x, y);
}

static uint64_t hash_node(const omc_node *node) {
  uint64_t inputs = 0;
  for (uint32_t i = 0; i < node->n_in; i++) /* a sum, so that order does not matter */
    inputs += mix(1, omc_in(node, i) ? omc_in(node, i)->id : UINT64_MAX);
  return mix(mix((uint64_t)node->op, (uint64_t)node->phase), inputs);
}

static bool gives_all_outputs(const omc_node *first, const omc_node *node) {
  for (uint32_t k = 0; k < node->n_out; k++)
    if (node->out[k] && node->out[k]->uses && !first->out[k]) return false;
  return true;
}

static void merge_node(omc_graph *g, table *t, omc_node *node) {
  if (omc_op_get(node->op)->flags & (OMC_OP_RANDOM | OMC_OP_CALLBACK)) return;
  omc_node *first = find_or_add(t, hash_node(node), node, same_node);
  if (first == node || !gives_all_outputs(first, node)) return;
  for (uint32_t k = 0; k < node->n_out; k++)
    if (node->out[k] && first->out[k]) omc_replace_uses(node->out[k], first->out[k]);
  omc_erase_node(g, node);
}

omc_status omc_cse(omc_graph *g) {
  size_t items = 1, room = 16;
  for (const omc_node *node = g->first; node; node = node->next) items += 1 + node->n_in;
  while (room < 2 * items) room *= 2;
  const omc_allocator *a = g->arena.allocator;
  table nodes = {omc_alloc_zero(a, room, sizeof(void *)), room - 1};
  table constants = {omc_alloc_zero(a, room, sizeof(void *)), room - 1};
  omc_status status = OMC_OK;
  if (nodes.slots && constants.slots) {
    for (omc_node *node = g->first, *next; node; node = next) {
      next = node->next;
      merge_constants(&constants, node);
      merge_node(g, &nodes, node);
    }
  } else {
    status = omc_fail(OMC_ENOMEM, "no memory to compare %zu nodes and constants", items);
  }
  omc_free(a, nodes.slots, room, sizeof(void *));
  omc_free(a, constants.slots, room, sizeof(void *));
  return status;
}
