#include "passes/rewrite.h"

#include <string.h>

#include "base/element.h"
#include "graph/edit.h"
#include "ops/op.h"

#define MAX_SWEEPS 16
#define MAX_NODES 32
#define MAX_CHOICES 32

/* One attempt at a match. Where a pattern can be tried in several ways (commutative inputs,
 * alternatives) the way is read from `choice`; a failed attempt is repeated with the next one. */
typedef struct matcher {
  omc_value *capture[OMC_MAX_CAPTURES];
  omc_node *nodes[MAX_NODES]; /* matched; the root first */
  bool shared[MAX_NODES];
  uint32_t n_nodes;
  uint8_t choice[MAX_CHOICES], ways[MAX_CHOICES];
  uint32_t n_choices;
} matcher;

static uint32_t choose(matcher *m, uint32_t ways) {
  if (m->n_choices == MAX_CHOICES) return 0;
  m->ways[m->n_choices] = (uint8_t)ways;
  return m->choice[m->n_choices++];
}

/* Steps to the next combination of choices; false: all have been tried. */
static bool next_choice(matcher *m) {
  while (m->n_choices > 0) {
    const uint32_t k = --m->n_choices;
    if (++m->choice[k] < m->ways[k]) return true;
    m->choice[k] = 0;
  }
  return false;
}

bool omc_const_all(const omc_value *v, double x) {
  if (!omc_is_const(v)) return false;
  const omc_dtype dtype = v->type.dtype;
  const int64_t n = omc_shape_numel(&v->type.shape);
  const size_t size = omc_dtype_size(dtype);
  const char *bytes = v->data;
  uint64_t element = 0;
  omc_element_set_float(dtype, &element, 0, x);
  if (!omc_dtype_is_float(dtype) && omc_element_float(dtype, &element, 0) != x) return false;
  if (n == 0 || memcmp(bytes, &element, size) != 0) return false;
  return n == 1 || memcmp(bytes, bytes + size, (size_t)(n - 1) * size) == 0;
}

omc_value *omc_match_identity(omc_match *m) {
  return omc_type_equal(&m->capture[1]->type, &m->capture[0]->type) ? m->capture[1] : NULL;
}

static bool match_value(matcher *m, const omc_pat *pat, omc_value *v);

static bool note_node(matcher *m, omc_node *node, bool shared) {
  if (m->n_nodes == MAX_NODES) return false;
  m->shared[m->n_nodes] = shared;
  m->nodes[m->n_nodes++] = node;
  return true;
}

/* What `v` is a Cast of if that goes from f32 to 16 bits, or, `widened`, back; else NULL. */
static omc_value *cast_of_halves(matcher *m, omc_value *v, bool widened) {
  if (!v || !v->producer || v->producer->op != OMC_OP_Cast) return NULL;
  omc_value *const x = omc_in(v->producer, 0);
  const omc_dtype narrow = widened ? x->type.dtype : v->type.dtype;
  const omc_dtype wide = widened ? v->type.dtype : x->type.dtype;
  const bool of_halves = (narrow == OMC_BF16 || narrow == OMC_F16) && wide == OMC_F32;
  return of_halves && note_node(m, v->producer, widened) ? x : NULL;
}

static bool match_node(matcher *m, const omc_pat *pat, omc_value *v) {
  omc_value *const rounded = pat->halves ? cast_of_halves(m, v, false) : NULL;
  if (rounded) v = rounded;
  omc_node *const node = v->producer;
  if (!node || v->index != 0 || node->op != pat->op || !note_node(m, node, pat->shared))
    return false;
  if (pat->n_in == 0) return true;
  for (uint32_t i = pat->n_in; i < node->n_in; i++)
    if (omc_in(node, i)) return false;
  const bool two_ways =
      (omc_op_get(node->op)->flags & OMC_OP_COMMUTES) && omc_in(node, 0) != omc_in(node, 1);
  const uint32_t swap = two_ways ? choose(m, 2) : 0;
  for (uint32_t i = 0; i < pat->n_in; i++) {
    omc_value *in = omc_in(node, i < 2 ? i ^ swap : i);
    omc_value *const narrow = rounded ? cast_of_halves(m, in, true) : NULL;
    if (!match_value(m, pat->in[i], narrow ? narrow : in)) return false;
  }
  return true;
}

static bool match_value(matcher *m, const omc_pat *pat, omc_value *v) {
  if (!v) return false;
  if (pat->capture) {
    omc_value **seen = &m->capture[pat->capture];
    if (*seen && *seen != v) return false;
    *seen = v;
  }
  switch (pat->kind) {
    case OMC_PAT_ANY:
      return true;
    case OMC_PAT_CONST:
      return omc_is_const(v) && (isnan(pat->value) || omc_const_all(v, pat->value));
    case OMC_PAT_EITHER:
      return match_value(m, pat->in[choose(m, pat->n_in)], v);
    case OMC_PAT_OP:
      return match_node(m, pat, v);
  }
  return false;
}

static bool has_node(const matcher *m, const omc_node *node) {
  for (uint32_t i = 0; i < m->n_nodes; i++)
    if (m->nodes[i] == node) return true;
  return false;
}

/* Whether every matched node but the root and the shared ones serves the match alone: only then
 * does a rewrite replace work rather than repeat it. */
static bool serves_match_only(const matcher *m) {
  for (uint32_t i = 1; i < m->n_nodes; i++) {
    if (m->shared[i]) continue;
    for (uint32_t k = 0; k < m->nodes[i]->n_out; k++) {
      const omc_value *v = m->nodes[i]->out[k];
      for (const omc_use *u = v ? v->uses : NULL; u; u = u->next)
        if (!has_node(m, u->node)) return false;
    }
  }
  return true;
}

static bool find_match(matcher *m, const omc_pat *pattern, omc_node *root) {
  memset(m->choice, 0, sizeof m->choice);
  do {
    memset(m->capture, 0, sizeof m->capture);
    m->n_nodes = m->n_choices = 0;
    if (match_value(m, pattern, root->out[0]) && serves_match_only(m)) return true;
  } while (next_choice(m));
  return false;
}

static omc_op_id root_op(const omc_pat *pattern) {
  while (pattern->kind == OMC_PAT_EITHER) pattern = pattern->in[0];
  return pattern->op;
}

/* Erases matched nodes that nobody uses any more, so that they do not count as users of what
 * later matches look at. */
static void erase_matched(omc_graph *g, matcher *m) {
  for (bool again = true; again;) {
    again = false;
    for (uint32_t i = 0; i < m->n_nodes; i++) {
      omc_node *node = m->nodes[i];
      if (!node || omc_is_used(node)) continue;
      for (uint32_t k = 0; k < m->n_nodes; k++)
        if (m->nodes[k] == node) m->nodes[k] = NULL;
      omc_erase_node(g, node);
      again = true;
    }
  }
}

static omc_status try_rule(omc_graph *g, const omc_rule *rule, omc_node *root, bool *changed) {
  *changed = false;
  matcher m;
  if (root->op != root_op(rule->pattern) || !find_match(&m, rule->pattern, root)) return OMC_OK;
  omc_value *old = root->out[0];
  omc_builder b = {g, root, root->phase, root->name, OMC_OK};
  omc_match match = {.b = &b, .root = root};
  memcpy(match.capture, m.capture, sizeof match.capture);
  match.capture[0] = old;
  omc_value *value = rule->rewrite(&match);
  OMC_TRY(b.status);
  if (!value) return OMC_OK;
  *changed = true;
  if (value == old) return OMC_OK;
  if (!omc_type_equal(&value->type, &old->type)) {
    char text[OMC_NODE_TEXT], was[OMC_TYPE_TEXT], is[OMC_TYPE_TEXT];
    OMC_FAIL(EINTERNAL, "rule %s changes the type of %s from %s to %s", rule->name,
             omc_node_text(root, text, sizeof text), omc_type_text(&old->type, was, sizeof was),
             omc_type_text(&value->type, is, sizeof is));
  }
  omc_replace_uses(old, value);
  erase_matched(g, &m);
  return OMC_OK;
}

/* Looks for unused nodes only where there may be some: one has been seen or added, or a rewrite has
 * taken users away. */
static omc_status sweep(omc_graph *g, const omc_rules *rules, const bool *roots,
                        uint32_t *changes) {
  const uint32_t n_values = g->n_values;
  bool unused = false;
  for (omc_node *node = g->first, *next; node; node = next) {
    next = node->next;
    bool changed = !omc_out(node, 0) || !node->out[0]->uses;
    for (uint32_t r = 0; roots[node->op] && r < rules->n && !changed; r++) {
      OMC_TRY(try_rule(g, &rules->rules[r], node, &changed));
      *changes += changed;
    }
    unused |= changed;
  }
  if (unused || g->n_values != n_values) omc_erase_unused(g);
  return OMC_OK;
}

omc_status omc_apply_rules(omc_graph *g, const omc_rules *rules, uint32_t *changes) {
  bool roots[OMC_N_OPS] = {false}; /* by op: of one of the patterns */
  for (uint32_t r = 0; r < rules->n; r++) roots[root_op(rules->rules[r].pattern)] = true;
  *changes = 0;
  for (int k = 0; k < MAX_SWEEPS; k++) {
    const uint32_t before = *changes;
    OMC_TRY(sweep(g, rules, roots, changes));
    if (*changes == before) break;
  }
  return OMC_OK;
}

const omc_rules *const omc_rule_sets[OMC_N_RULE_SETS] = {
    &omc_movement_rules,  &omc_concat_rules, &omc_arithmetic_rules, &omc_network_rules,
    &omc_attention_rules, &omc_matmul_rules, &omc_fuse_rules};

const omc_rule *omc_rule_find(const char *name) {
  for (size_t i = 0; i < OMC_N_RULE_SETS; i++)
    for (uint32_t r = 0; r < omc_rule_sets[i]->n; r++)
      if (strcmp(omc_rule_sets[i]->rules[r].name, name) == 0) return &omc_rule_sets[i]->rules[r];
  return NULL;
}
