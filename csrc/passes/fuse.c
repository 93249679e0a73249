/* Fusion: rules, then clusters of elementwise nodes that run as one program. */
#include <string.h>

#include "graph/edit.h"
#include "ops/op.h"
#include "ops/program.h"
#include "passes/passes.h"
#include "passes/rewrite.h"

#define NONE UINT32_MAX

/* Users of one input further apart than this many nodes are not brought together: what the later
 * one computes would be kept alive too long. */
#define NEIGHBOURS 16

/* Nodes are numbered by their position in the list; that of the result node is n. A cluster is
 * named by one of its members, runs at the position `at` of one of them, and lists them in
 * ascending order. Since all other nodes keep their places, a cluster is sound if whatever it
 * reads runs before `at` and whoever reads it runs after. */
typedef struct clusters {
  omc_graph *graph;
  uint32_t n, n_values;
  omc_node **node;
  bool *fits;         /* elementwise, with one output */
  uint32_t *of_value; /* value id: position of its producer */
  uint32_t *cluster;  /* position: its cluster; what follows is by cluster, but `next` */
  uint32_t *first, *next, *count, *at;
  omc_dtype *class; /* as omc_ew_class; OMC_BOOL joins any */
} clusters;

/* n also stands for the nodes that emit() adds. */
static uint32_t position(const clusters *s, const omc_node *node) {
  for (uint32_t k = 0; k < node->n_out; k++)
    if (node->out[k] && node->out[k]->id < s->n_values) return s->of_value[node->out[k]->id];
  return s->n;
}

/* The cluster that computes a value, NONE for inputs and constants. */
static uint32_t producer(const clusters *s, const omc_value *v) {
  return v->producer ? s->cluster[s->of_value[v->id]] : NONE;
}

static bool is_used_outside(const clusters *s, const omc_value *v, uint32_t a, uint32_t b) {
  for (const omc_use *u = v->uses; u; u = u->next) {
    const uint32_t at = position(s, u->node);
    if (at == s->n || (s->cluster[at] != a && s->cluster[at] != b)) return true;
  }
  return false;
}

/* Whether everybody who reads cluster `c`, but for `with`, runs after position `at`. */
static bool may_run_as_late(const clusters *s, uint32_t c, uint32_t with, uint32_t at) {
  for (uint32_t i = s->first[c]; i != NONE; i = s->next[i]) {
    for (const omc_use *u = s->node[i]->out[0]->uses; u; u = u->next) {
      const uint32_t user = position(s, u->node);
      if (user == s->n || s->cluster[user] == c || s->cluster[user] == with) continue;
      if (s->at[s->cluster[user]] <= at) return false;
    }
  }
  return true;
}

/* Whether everything cluster `c` reads, but for what `with` computes, is there at `at`. */
static bool may_run_as_early(const clusters *s, uint32_t c, uint32_t with, uint32_t at) {
  for (uint32_t i = s->first[c]; i != NONE; i = s->next[i]) {
    const omc_node *node = s->node[i];
    for (uint32_t k = 0; k < node->n_in; k++) {
      if (!omc_in(node, k)) continue;
      const uint32_t p = producer(s, omc_in(node, k));
      if (p != NONE && p != c && p != with && s->at[p] >= at) return false;
    }
  }
  return true;
}

/* Instructions compute in the class. A value that another one reads must be what the class holds:
 * of its own dtype or bool, or come from a Cast, which rounds by itself. (An integer that a float
 * class has cast to is one that this class holds.) */
static bool is_held(const omc_value *v, omc_dtype class) {
  return v->type.dtype == class || v->type.dtype == OMC_BOOL || v->producer->op == OMC_OP_Cast;
}

/* One of 16 bits is then rounded by an instruction of its own, as it would be in memory. */
static bool is_rounded(const omc_value *v, omc_dtype class) {
  return !is_held(v, class) && omc_dtype_is_float(v->type.dtype) &&
         omc_dtype_acc(v->type.dtype) == class;
}

static bool is_used_inside(const clusters *s, const omc_value *v, uint32_t a, uint32_t b) {
  for (const omc_use *u = v->uses; u; u = u->next) {
    const uint32_t at = position(s, u->node);
    if (at < s->n && (s->cluster[at] == a || s->cluster[at] == b)) return true;
  }
  return false;
}

/* Distinct values that clusters a and b read from outside, and how many of theirs others read;
 * false if that is too much for one program. */
static bool fits_in_program(const clusters *s, uint32_t a, uint32_t b, omc_dtype class) {
  const omc_value *in[OMC_EW_MAX_INPUTS];
  uint32_t n_in = 0, n_out = 0, n_instructions = s->count[a] + s->count[b];
  const uint32_t both[] = {a, b};
  for (int side = 0; side < 2; side++) {
    for (uint32_t i = s->first[both[side]]; i != NONE; i = s->next[i]) {
      const omc_node *node = s->node[i];
      n_out += is_used_outside(s, node->out[0], a, b);
      n_instructions += is_rounded(node->out[0], class) && is_used_inside(s, node->out[0], a, b);
      for (uint32_t k = 0; k < node->n_in; k++) {
        const omc_value *v = omc_in(node, k);
        if (!v) continue;
        const uint32_t p = producer(s, v);
        if (p == a || p == b) {
          if (!is_held(v, class) && !is_rounded(v, class)) return false;
          continue;
        }
        uint32_t seen = 0;
        while (seen < n_in && in[seen] != v) seen++;
        if (seen < n_in) continue;
        if (n_in == OMC_EW_MAX_INPUTS) return false;
        in[n_in++] = v;
      }
    }
  }
  return n_out <= OMC_EW_MAX_OUTPUTS && n_instructions <= OMC_EW_MAX_INSTRUCTIONS;
}

static bool are_alike(const omc_node *a, const omc_node *b) {
  return a->phase == b->phase && omc_shape_equal(&a->out[0]->type.shape, &b->out[0]->type.shape);
}

/* Merges two clusters where one of them stands, if that is sound. */
static void try_merge(clusters *s, uint32_t a, uint32_t b) {
  if (a == b || !are_alike(s->node[s->first[a]], s->node[s->first[b]])) return;
  const omc_dtype class = s->class[a] == OMC_BOOL ? s->class[b] : s->class[a];
  if (s->class[b] != OMC_BOOL && s->class[b] != class) return;
  const uint32_t early = s->at[a] < s->at[b] ? a : b, late = early == a ? b : a;
  uint32_t at;
  if (may_run_as_late(s, early, late, s->at[late])) {
    at = s->at[late];
  } else if (may_run_as_early(s, late, early, s->at[early])) {
    at = s->at[early];
  } else {
    return;
  }
  if (!fits_in_program(s, a, b, class)) return;
  uint32_t x = s->first[a], y = s->first[b], *end = &s->first[a];
  while (x != NONE || y != NONE) {
    uint32_t *from = x < y ? &x : &y;
    *end = *from;
    s->cluster[*from] = a;
    end = &s->next[*from];
    *from = *end;
  }
  s->count[a] += s->count[b];
  s->at[a] = at;
  s->class[a] = class;
}

static void merge_with_producers(clusters *s, uint32_t i) {
  const omc_node *node = s->node[i];
  for (uint32_t k = 0; k < node->n_in; k++) {
    const omc_value *v = omc_in(node, k);
    if (v && v->producer && s->fits[s->of_value[v->id]])
      try_merge(s, producer(s, v), s->cluster[i]);
  }
}

static bool reads(const omc_node *node, const omc_value *v) {
  for (uint32_t k = 0; k < node->n_in; k++)
    if (omc_in(node, k) == v) return true;
  return false;
}

/* Merges with earlier readers of the same values: each value is then loaded once. */
static void merge_with_siblings(clusters *s, uint32_t i) {
  const omc_node *node = s->node[i];
  const uint32_t first = i > NEIGHBOURS ? i - NEIGHBOURS : 0;
  for (uint32_t k = 0; k < node->n_in; k++) {
    const omc_value *v = omc_in(node, k);
    if (!v || !omc_shape_equal(&v->type.shape, &node->out[0]->type.shape)) continue;
    for (uint32_t other = first; other < i; other++)
      if (s->fits[other] && reads(s->node[other], v))
        try_merge(s, s->cluster[other], s->cluster[i]);
  }
}

/* ---- the fused node ---- */

typedef struct instruction {
  const omc_node *node;   /* NULL: it rounds what the one before gives */
  const omc_value *value; /* what operands refer to; NULL: they refer to the one that rounds it */
} instruction;

typedef struct program {
  omc_value *in[OMC_EW_MAX_INPUTS];
  instruction instruction[OMC_EW_MAX_INSTRUCTIONS];
  omc_value *out[OMC_EW_MAX_OUTPUTS]; /* values of members that others read */
  int64_t outs[OMC_EW_MAX_OUTPUTS];   /* their operand numbers */
  int64_t dtypes[OMC_EW_MAX_OUTPUTS]; /* their ONNX codes */
  uint32_t n_in, n_instructions, n_out;
} program;

/* The operand number of a value: its instruction's, else that of an input. */
static int64_t operand(const program *p, const omc_value *v) {
  if (!v) return -1;
  for (uint32_t i = 0; i < p->n_instructions; i++)
    if (p->instruction[i].value == v) return p->n_in + i;
  for (uint32_t i = 0; i < p->n_in; i++)
    if (p->in[i] == v) return i;
  return -1;
}

static void gather(const clusters *s, uint32_t c, program *p) {
  for (uint32_t i = s->first[c]; i != NONE; i = s->next[i]) {
    const omc_node *node = s->node[i];
    omc_value *v = node->out[0];
    for (uint32_t k = 0; k < node->n_in; k++)
      if (operand(p, omc_in(node, k)) < 0 && omc_in(node, k)) p->in[p->n_in++] = omc_in(node, k);
    const bool rounded = is_rounded(v, s->class[c]) && is_used_inside(s, v, c, c);
    p->instruction[p->n_instructions++] = (instruction){node, rounded ? NULL : v};
    if (rounded) p->instruction[p->n_instructions++] = (instruction){NULL, v};
  }
  for (uint32_t i = s->first[c]; i != NONE; i = s->next[i]) {
    omc_value *v = s->node[i]->out[0];
    if (!is_used_outside(s, v, c, c)) continue;
    p->outs[p->n_out] = operand(p, v);
    p->dtypes[p->n_out] = omc_dtype_get(v->type.dtype)->onnx;
    p->out[p->n_out++] = v;
  }
}

static omc_status emit(clusters *s, uint32_t c) {
  program p = {.n_in = 0};
  gather(s, c, &p);
  const uint32_t n = p.n_instructions;
  const char *ops[OMC_EW_MAX_INSTRUCTIONS];
  int64_t args[3 * OMC_EW_MAX_INSTRUCTIONS];
  double imm[OMC_EW_IMM * OMC_EW_MAX_INSTRUCTIONS] = {0};
  for (uint32_t i = 0; i < n; i++) {
    const omc_node *node = p.instruction[i].node;
    ops[i] = omc_op_name(node ? node->op : OMC_OP_Cast);
    for (uint32_t k = 0; k < 3; k++) args[3 * i + k] = node ? operand(&p, omc_in(node, k)) : -1;
    if (node) {
      OMC_TRY(omc_op_get(node->op)->imm(node, &imm[OMC_EW_IMM * i]));
    } else {
      args[3 * i] = p.n_in + i - 1;
      imm[OMC_EW_IMM * i] = p.instruction[i].value->type.dtype;
    }
  }
  const omc_attr attr[] = {
      {"ops", OMC_ATTR_STRINGS, n, {.ss = ops}},
      omc_attr_ints("args", args, 3 * n),
      {"imm", OMC_ATTR_FLOATS, OMC_EW_IMM * n, {.fs = imm}},
      omc_attr_ints("outs", p.outs, p.n_out),
      omc_attr_ints("dtypes", p.dtypes, p.n_out),
      omc_attr_string("class", omc_dtype_get(omc_ew_computed_in(s->class[c]))->text)};
  omc_node *at = s->node[s->at[c]];
  omc_builder b = {s->graph, at, at->phase, at->name, OMC_OK};
  omc_value *out[OMC_EW_MAX_OUTPUTS];
  omc_build(&b, OMC_OP_FusedElementwise, p.n_in, p.in, 0, sizeof attr / sizeof *attr, attr, p.n_out,
            out);
  OMC_TRY(b.status);
  for (uint32_t k = 0; k < p.n_out; k++) omc_replace_uses(p.out[k], out[k]);
  omc_node *members[OMC_EW_MAX_INSTRUCTIONS];
  uint32_t n_members = 0;
  for (uint32_t i = s->first[c]; i != NONE; i = s->next[i]) members[n_members++] = s->node[i];
  while (n_members > 0) omc_erase_node(s->graph, members[--n_members]);
  return OMC_OK;
}

/* ---- the pass ---- */

static omc_status init(clusters *s, omc_graph *g, const omc_provider *provider, omc_arena *arena) {
  *s = (clusters){.graph = g, .n_values = g->n_values};
  for (const omc_node *node = g->first; node; node = node->next) s->n++;
  s->node = OMC_NEW_ARRAY(arena, omc_node *, s->n + 1);
  s->fits = OMC_NEW_ARRAY(arena, bool, s->n + 1);
  s->of_value = OMC_NEW_ARRAY(arena, uint32_t, s->n_values + 1);
  uint32_t **const lists[] = {&s->cluster, &s->first, &s->next, &s->count, &s->at};
  s->class = OMC_NEW_ARRAY(arena, omc_dtype, s->n + 1);
  bool complete = s->node && s->fits && s->of_value && s->class;
  for (size_t k = 0; k < sizeof lists / sizeof *lists; k++) {
    *lists[k] = OMC_NEW_ARRAY(arena, uint32_t, s->n + 1);
    complete = complete && *lists[k];
  }
  if (!complete) OMC_FAIL(ENOMEM, "no memory to fuse %u nodes", s->n);
  uint32_t i = 0;
  for (omc_node *node = g->first; node; node = node->next, i++) {
    s->node[i] = node;
    s->fits[i] =
        omc_op_get(node->op)->imm && node->n_out == 1 && provider->fusible(provider->ctx, node);
    for (uint32_t k = 0; k < node->n_out; k++)
      if (node->out[k]) s->of_value[node->out[k]->id] = i;
    s->class[i] = omc_ew_class(node);
    s->cluster[i] = s->first[i] = s->at[i] = i;
    s->next[i] = NONE;
    s->count[i] = 1;
  }
  return OMC_OK;
}

static omc_status run(omc_graph *g, const omc_provider *provider, omc_arena *arena) {
  clusters s;
  OMC_TRY(init(&s, g, provider, arena));
  for (uint32_t i = 0; i < s.n; i++) {
    if (!s.fits[i]) continue;
    merge_with_producers(&s, i);
    merge_with_siblings(&s, i);
  }
  for (uint32_t i = 0; i < s.n; i++)
    if (s.cluster[i] == i && s.count[i] > 1) OMC_TRY(emit(&s, i));
  return OMC_OK;
}

omc_status omc_fuse(omc_graph *g, const omc_provider *provider) {
  uint32_t changes;
  OMC_TRY(omc_apply_rules(g, &omc_fuse_rules, &changes));
  omc_arena arena;
  omc_arena_init(&arena, g->arena.allocator);
  const omc_status status = run(g, provider, &arena);
  omc_arena_deinit(&arena);
  return status;
}
