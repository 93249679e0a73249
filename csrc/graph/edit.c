#include "graph/edit.h"

static void unlink_use(omc_use *use) {
  if (!use->value) return;
  if (use->prev)
    use->prev->next = use->next;
  else
    use->value->uses = use->next;
  if (use->next) use->next->prev = use->prev;
  use->value = NULL;
  use->prev = use->next = NULL;
}

void omc_set_input(omc_node *node, uint32_t i, omc_value *v) {
  omc_use *use = &node->in[i];
  unlink_use(use);
  if (!v) return;
  use->value = v;
  use->next = v->uses;
  if (v->uses) v->uses->prev = use;
  v->uses = use;
}

void omc_replace_uses(omc_value *from, omc_value *to) {
  if (from == to) return;
  while (from->uses) omc_set_input(from->uses->node, from->uses->index, to);
}

void omc_link_node(omc_graph *g, omc_node *node, omc_node *before) {
  node->next = before;
  node->prev = before ? before->prev : g->last;
  *(node->prev ? &node->prev->next : &g->first) = node;
  *(before ? &before->prev : &g->last) = node;
}

omc_node *omc_erase_node(omc_graph *g, omc_node *node) {
  omc_node *next = node->next;
  for (uint32_t i = 0; i < node->n_in; i++) unlink_use(&node->in[i]);
  *(node->prev ? &node->prev->next : &g->first) = next;
  *(next ? &next->prev : &g->last) = node->prev;
  node->prev = node->next = NULL;
  return next;
}

bool omc_is_used(const omc_node *node) {
  for (uint32_t i = 0; i < node->n_out; i++)
    if (node->out[i] && node->out[i]->uses) return true;
  return false;
}

uint32_t omc_erase_unused(omc_graph *g) {
  uint32_t n = 0;
  for (omc_node *node = g->last, *prev; node; node = prev) {
    prev = node->prev;
    if (omc_is_used(node)) continue;
    omc_erase_node(g, node);
    n++;
  }
  return n;
}
