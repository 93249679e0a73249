/* The rewrite engine: rules are patterns as data and one function each. */
#ifndef OMC_PASSES_REWRITE_H
#define OMC_PASSES_REWRITE_H

#include <math.h>

#include "ops/builder.h"

#define OMC_MAX_CAPTURES 16

typedef enum { OMC_PAT_ANY, OMC_PAT_OP, OMC_PAT_CONST, OMC_PAT_EITHER } omc_pat_kind;

/* A pattern tree. Where a capture appears twice both places must be the same value. */
typedef struct omc_pat {
  omc_pat_kind kind;
  omc_op_id op;   /* OP */
  int8_t capture; /* 1..OMC_MAX_CAPTURES-1, or 0: not captured */
  bool shared;    /* OP: may have users outside the match (root excepted) */
  bool halves;    /* OP: where its operands and its result are of 16 bits, it may be one of f32
                     between casts, as what a number of Python's scales is */
  double value;   /* CONST: every element is this, as omc_const_all says; NaN: any constant */
  uint8_t n_in;   /* OP: patterns of the first inputs, the node has no more; 0: any inputs */
  const struct omc_pat *const *in; /* EITHER: the alternatives */
} omc_pat;

/* Forms for writing patterns as static data; see the tables at the ends of the files of rules. */
#define OMC_P_LIST_(...)                                                     \
  .n_in = sizeof((const omc_pat *const[]){__VA_ARGS__}) / sizeof(omc_pat *), \
  .in = (const omc_pat *const[]) {                                           \
    __VA_ARGS__                                                              \
  }
#define OMC_P_ANY(cap) (&(const omc_pat){.kind = OMC_PAT_ANY, .capture = (cap)})
#define OMC_P_CONST(val) (&(const omc_pat){.kind = OMC_PAT_CONST, .value = (val)})
#define OMC_P_CONSTANT(cap) \
  (&(const omc_pat){.kind = OMC_PAT_CONST, .capture = (cap), .value = (double)NAN})
#define OMC_P_OP_(op_, cap, ...) \
  .kind = OMC_PAT_OP, .op = OMC_OP_##op_, .capture = (cap), __VA_ARGS__
#define OMC_P_OP(op_, cap, ...) (&(const omc_pat){OMC_P_OP_(op_, cap, OMC_P_LIST_(__VA_ARGS__))})
#define OMC_P_SHARED(op_, cap, ...) \
  (&(const omc_pat){OMC_P_OP_(op_, cap, .shared = true, OMC_P_LIST_(__VA_ARGS__))})
#define OMC_P_OF_HALVES(op_, cap, ...) \
  (&(const omc_pat){OMC_P_OP_(op_, cap, .halves = true, OMC_P_LIST_(__VA_ARGS__))})
#define OMC_P_NODE(op_, cap) (&(const omc_pat){OMC_P_OP_(op_, cap, .n_in = 0)})
#define OMC_P_EITHER(...) (&(const omc_pat){.kind = OMC_PAT_EITHER, OMC_P_LIST_(__VA_ARGS__)})
/* A product of either form. */
#define OMC_P_PRODUCT(cap) OMC_P_EITHER(OMC_P_NODE(MatMul, cap), OMC_P_NODE(FusedMatMul, cap))

typedef struct omc_match {
  omc_builder *b; /* inserts before the root */
  omc_node *root;
  omc_value *capture[OMC_MAX_CAPTURES]; /* [0]: the root's output 0 */
} omc_match;

/* Returns the value that replaces the root's output 0, capture[0] itself if the rule has changed
 * the graph in place, or NULL for "no" (or for a failure, which the builder has latched). */
typedef omc_value *(*omc_rewrite)(omc_match *m);

/* What a rule promises for any inputs, and tests/passes holds it to; of gradients, sums may be
 * taken in another order. */
typedef enum {
  OMC_EXACT,       /* the same bits, though one NaN may be another */
  OMC_FINITE,      /* the same bits if all inputs are finite: what a mask hides is not looked at */
  OMC_SUMS,        /* sums in another order, a zero perhaps of the other sign */
  OMC_FINITE_SUMS, /* the same, if all inputs are finite */
  OMC_UNROUNDED,   /* within a rounding to bf16, which is left out */
  OMC_LAYER, /* another formula for the same layer: rounding differs by ulps of the largest element,
              * NaN and infinities stand at the same places unless a step overflows */
  OMC_N_CLAIMS
} omc_claim;

typedef struct omc_rule {
  const char *name; /* tests/passes/rules/NAME.txt is its golden text */
  omc_claim claim;
  const omc_pat *pattern; /* of kind OP, or alternatives with the same op as root */
  omc_rewrite rewrite;
} omc_rule;

typedef struct omc_rules {
  const omc_rule *rules;
  uint32_t n;
} omc_rules;

/* Applies rules until none matches (at most 16 sweeps), commutative inputs in both orders, erases
 * what became unused. *changes counts rewrites. */
omc_status omc_apply_rules(omc_graph *g, const omc_rules *rules, uint32_t *changes) OMC_MUST_USE;

/* The sets. All but the last are canonical forms, applied before differentiation and again after
 * it; the last looks for patterns of joint graphs that have a better kernel. */
extern const omc_rules omc_movement_rules;
extern const omc_rules omc_concat_rules;
extern const omc_rules omc_arithmetic_rules;
extern const omc_rules omc_network_rules;
extern const omc_rules omc_attention_rules;
extern const omc_rules omc_matmul_rules;
extern const omc_rules omc_fuse_rules;

#define OMC_N_RULE_SETS 7
extern const omc_rules *const omc_rule_sets[OMC_N_RULE_SETS]; /* in the order of application */

/* Lookup of one rule by name over all sets (NULL: none) for tests. */
const omc_rule *omc_rule_find(const char *name);

/* The rewrite of identities: capture 1 if it has the root's type, else NULL. */
omc_value *omc_match_identity(omc_match *m);

static inline bool omc_has_one_use(const omc_value *v) { return v->uses && !v->uses->next; }

/* From `start` to before `end` along one axis, and not all of it. */
typedef struct omc_axis_range {
  int32_t axis;
  int64_t start, end;
} omc_axis_range;

/* Whether a Slice of a tensor of shape `of`, or its gradient, is of a range that is not empty;
 * whether a Gather, or its gradient, is of a single row that is known. */
bool omc_is_slice(const omc_node *node, const omc_shape *of, omc_axis_range *out);
bool omc_is_row(const omc_node *node, const omc_shape *of, omc_axis_range *out);

/* The rewrite of sums of gradients, placed_gradients.c. */
omc_value *omc_place_gradients(omc_match *m);

/* True if a constant's elements are all x, rounded to its dtype if that is a float; -0 is not 0. */
bool omc_const_all(const omc_value *v, double x);

#endif
