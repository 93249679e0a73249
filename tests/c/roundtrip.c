#include "roundtrip.h"

#include <string.h>

#include "graph/verify.h"

omc_status omc_find_zeros(void *ctx, const char *name, const void **data, size_t *bytes) {
  static _Alignas(64) const char zeros[4096];
  const size_t *size = ctx;
  if (*size > sizeof zeros) OMC_FAIL(EINVALID, "no elements of %s", name);
  *data = zeros;
  *bytes = *size;
  return OMC_OK;
}

/* The size that `@` finds: that of the first type of the text that stands before an `@`, which is
 * what it takes for texts with one such constant. */
static size_t zeros_wanted(const char *text, size_t n) {
  const char *at = n ? memchr(text, '@', n) : NULL;
  omc_type type;
  size_t used, bytes = 0;
  while (at && at > text && *at != ':') at--;
  if (!at || *at != ':' || at + 2 > text + n) return 0;
  at++;
  if (*at == ' ') at++;
  if (omc_type_parse(at, (size_t)(text + n - at), &type, &used) != OMC_OK) return 0;
  return omc_type_bytes(&type, &bytes) == OMC_OK ? bytes : 0;
}

typedef struct printed {
  char *text;
  size_t bytes;
} printed;

/* Finds the elements that a graph, which is `ctx`, has for a constant. */
static omc_status find_again(void *ctx, const char *name, const void **data, size_t *bytes) {
  const omc_graph *g = ctx;
  for (const omc_node *n = g->first;; n = n->next) {
    const omc_node *reader = n ? n : g->result;
    for (uint32_t i = 0; i < reader->n_in; i++) {
      const omc_value *v = omc_in(reader, i);
      if (!omc_is_const(v) || strcmp(v->name, name) != 0) continue;
      *data = v->data;
      return omc_type_bytes(&v->type, bytes);
    }
    if (!n) OMC_FAIL(EINVALID, "no elements of %s", name);
  }
}

/* The text that a graph's own text parses and prints to must be that text again. */
static const char *check_fixpoint(const omc_allocator *allocator, omc_graph *g) {
  printed first, second;
  omc_graph *again;
  const char *breach = NULL;
  if (omc_graph_print(g, allocator, &first.text, &first.bytes) != OMC_OK) return NULL;
  const omc_status status =
      omc_graph_parse(allocator, first.text, first.bytes - 1, find_again, g, &again);
  if (status == OMC_OK) {
    if (omc_graph_print(again, allocator, &second.text, &second.bytes) == OMC_OK) {
      if (strcmp(first.text, second.text) != 0) breach = "printing is not a fixpoint";
      omc_free(allocator, second.text, 1, second.bytes);
    }
    omc_graph_destroy(again);
  } else if (status != OMC_ENOMEM) {
    breach = "the printed text does not parse";
  }
  omc_free(allocator, first.text, 1, first.bytes);
  return breach;
}

static const char *check_clone(const omc_allocator *allocator, const omc_graph *g) {
  printed first, second;
  omc_graph *clone;
  const char *breach = NULL;
  if (omc_graph_clone(g, allocator, &clone) != OMC_OK) return NULL;
  if (omc_graph_verify(clone, false) == OMC_EINTERNAL) breach = "a clone is not valid";
  if (omc_graph_print(g, allocator, &first.text, &first.bytes) == OMC_OK) {
    if (omc_graph_print(clone, allocator, &second.text, &second.bytes) == OMC_OK) {
      if (strcmp(first.text, second.text) != 0) breach = "a clone prints otherwise";
      omc_free(allocator, second.text, 1, second.bytes);
    }
    omc_free(allocator, first.text, 1, first.bytes);
  }
  omc_graph_destroy(clone);
  return breach;
}

const char *omc_roundtrip(const omc_allocator *allocator, const char *text, size_t n) {
  size_t zeros = zeros_wanted(text, n);
  omc_graph *g;
  const omc_status status = omc_graph_parse(allocator, text, n, omc_find_zeros, &zeros, &g);
  if (status == OMC_EPARSE || status == OMC_EINVALID || status == OMC_EUNSUPPORTED ||
      status == OMC_ENOMEM)
    return NULL;
  if (status != OMC_OK) return "parsing fails with another status than it may";
  const char *breach = NULL;
  if (omc_graph_verify(g, false) == OMC_EINTERNAL) breach = "a parsed graph is not valid";
  if (!breach) breach = check_fixpoint(allocator, g);
  if (!breach) breach = check_clone(allocator, g);
  omc_graph_destroy(g);
  return breach;
}
