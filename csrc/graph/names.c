#include "graph/names.h"

#include <string.h>

#include "base/hash.h"

void omc_names_init(omc_names *names, const omc_allocator *allocator) {
  *names = (omc_names){allocator, NULL, 0, 0};
}

void omc_names_deinit(omc_names *names) {
  omc_free(names->allocator, names->slots, names->cap, sizeof *names->slots);
  omc_names_init(names, names->allocator);
}

/* The slot that holds the name, or the free one where it belongs. */
static omc_value **slot_of(const omc_names *names, const char *name, size_t n) {
  for (size_t i = (size_t)omc_hash_bytes(name, n);; i++) {
    omc_value **slot = &names->slots[i & (names->cap - 1)];
    if (!*slot || (strlen((*slot)->name) == n && !memcmp((*slot)->name, name, n))) return slot;
  }
}

omc_value *omc_names_find(const omc_names *names, const char *name, size_t n) {
  return names->cap ? *slot_of(names, name, n) : NULL;
}

static omc_status grow(omc_names *names) {
  omc_names grown = *names;
  grown.cap = names->cap ? 2 * names->cap : 64;
  grown.slots = omc_alloc_zero(names->allocator, grown.cap, sizeof *grown.slots);
  if (!grown.slots) OMC_FAIL(ENOMEM, "no memory for a table of %zu names", names->n);
  for (size_t i = 0; i < names->cap; i++) {
    omc_value *v = names->slots[i];
    if (v) *slot_of(&grown, v->name, strlen(v->name)) = v;
  }
  omc_names_deinit(names);
  *names = grown;
  return OMC_OK;
}

omc_status omc_names_add(omc_names *names, omc_value *v) {
  if (2 * (names->n + 1) > names->cap) OMC_TRY(grow(names));
  omc_value **slot = slot_of(names, v->name, strlen(v->name));
  if (*slot) OMC_FAIL(EINVALID, "%%%s is defined twice", v->name);
  *slot = v;
  names->n++;
  return OMC_OK;
}

bool omc_name_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         (c && strchr("_.:/-", c));
}

bool omc_name_valid(const char *name, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (!omc_name_char(name[i])) return false;
  return n > 0;
}

/* ---- values without a name ---- */

#define UNNUMBERED UINT32_MAX

/* Calls `visit` on every value of the graph in the order of its text; constants once per use. */
static void each_value(const omc_graph *g, void (*visit)(const omc_value *v, void *ctx),
                       void *ctx) {
  for (uint32_t i = 0; i < g->n_inputs; i++) visit(g->inputs[i], ctx);
  for (uint32_t i = 0; i < g->cap_grads; i++)
    if (g->grads[i]) visit(g->grads[i], ctx);
  for (const omc_node *n = g->first;; n = n->next) {
    const omc_node *node = n ? n : g->result;
    for (uint32_t i = 0; i < node->n_in; i++)
      if (omc_is_const(omc_in(node, i))) visit(omc_in(node, i), ctx);
    for (uint32_t i = 0; i < node->n_out; i++)
      if (node->out[i]) visit(node->out[i], ctx);
    if (!n) return;
  }
}

typedef struct numbering {
  const omc_graph *graph;
  bool *taken; /* n_values: some value is named by that number */
  uint32_t *number;
  uint32_t next;
} numbering;

static void take_number(const omc_value *v, void *ctx) {
  numbering *c = ctx;
  uint64_t k = 0;
  if (!v->name || (v->name[0] == '0' && v->name[1])) return;
  for (const char *s = v->name; *s; s++) {
    if (*s < '0' || *s > '9' || k >= c->graph->n_values) return;
    k = 10 * k + (uint64_t)(*s - '0');
  }
  if (k < c->graph->n_values) c->taken[k] = true;
}

static void give_number(const omc_value *v, void *ctx) {
  numbering *c = ctx;
  if (v->name || c->number[v->id] != UNNUMBERED) return;
  while (c->taken[c->next]) c->next++;
  c->number[v->id] = c->next++;
}

omc_status omc_number_values(const omc_graph *g, const omc_allocator *allocator, uint32_t *number) {
  numbering c = {g, omc_alloc_zero(allocator, g->n_values, sizeof(bool)), number, 0};
  if (!c.taken) OMC_FAIL(ENOMEM, "no memory to number %u values", g->n_values);
  for (uint32_t i = 0; i < g->n_values; i++) number[i] = UNNUMBERED;
  each_value(g, take_number, &c);
  each_value(g, give_number, &c);
  omc_free(allocator, c.taken, g->n_values, sizeof(bool));
  return OMC_OK;
}
