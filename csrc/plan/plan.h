/* The plan: everything decided before the first byte is computed.
 *
 * A plan holds the joint graph, the steps of forward and backward, where each value lives, and
 * the size of one arena that serves all phases of one run. Until a gradient of an input is written,
 * its memory serves the arena (plan/lend.c). Several backwards, for gradients of
 * different outputs, may share the forward: after it runs one of them or, if the plan retains, any
 * of them in any order. A plan is immutable once the checker
 * has accepted it, shared by its runs and reference-counted (any thread). */
#ifndef OMC_PLAN_PLAN_H
#define OMC_PLAN_PLAN_H

#include <stdio.h>

#include "graph/graph.h"
#include "ops/op.h"
#include "plan/liveness.h"
#include "provider.h"

typedef struct omc_step {
  omc_kernel kernel;
  const omc_op *op;
  const omc_node *node;
  const void *params;
  uint32_t n_in, n_out;
  const uint32_t *values; /* n_in + n_out value ids; UINT32_MAX: left out */
  size_t workspace_offset, workspace_bytes;
  bool varies; /* as omc_call.varies */
} omc_step;

/* Memory of the arena or, if `lender` is not OMC_NO_LENDER, for the gradient of that input. */
typedef struct omc_span {
  uint32_t lender;
  size_t offset, bytes;
} omc_span;

#define OMC_NO_LENDER UINT32_MAX

typedef struct omc_plan {
  const omc_allocator *allocator;
  const omc_provider *provider;
  omc_graph *graph;
  omc_arena memory; /* steps, slots, params */
  omc_step *steps;
  omc_part *parts;             /* by phase */
  uint32_t n_phases;           /* forward and the backwards, at least one */
  uint32_t n_forward, n_steps; /* steps of backwards are n_forward .. n_steps-1 */
  omc_slot *slots;             /* graph->n_values of them */
  omc_copy *copies;
  uint32_t n_copies;
  bool *lends; /* by input: memory for its gradient is there from forward on */
  bool lends_any;
  size_t lent_bytes;    /* of these gradients together */
  size_t live_bytes;    /* most bytes live at any step, in the arena and lent */
  size_t arena_bytes;   /* what layout reached */
  size_t bound_bytes;   /* most bytes live in the arena at any step: no layout is smaller */
  size_t forward_bytes; /* bytes that hold values read by a backward, */
  omc_span *saved;      /* and where they are */
  uint32_t n_saved;
  bool random;       /* needs a seed */
  bool retain_graph; /* backward leaves what forward saved as it was */
  bool consumes;     /* a backward writes over it: one can run, once per forward */
  int threads;       /* workspaces are sized for that many */
  _Atomic int references;
  /* What run/ keeps with the plan, and how it is freed; NULL: nothing. If that fails a device may
   * still read what belongs to the plan, which is then left to it. */
  void *attached;
  omc_status (*detach)(void *attached) OMC_MUST_USE;
} omc_plan;

/* Makes a plan of a typed joint (or forward only) graph and checks it. With `retain_graph`
 * backwards may run any number of times after one forward, at the price of memory. Takes over
 * `graph` in either case. The caller owns one reference to *out. */
omc_status omc_plan_create(omc_graph *graph, const omc_provider *provider, bool retain_graph,
                           const omc_allocator *allocator, omc_plan **out) OMC_MUST_USE;
omc_plan *omc_plan_retain(omc_plan *plan);
void omc_plan_release(omc_plan *plan); /* NULL is accepted */

/* How large an arena may be. */
typedef struct omc_budget {
  double share; /* of what it would be, from 0 to 1, which is no bound */
  size_t bytes; /* SIZE_MAX: no bound */
} omc_budget;

/* Has backwards make again what forward has made, until a plan of the typed joint graph has no
 * larger arena than the budget allows, or until nothing helps. Results are the same bits. Nothing
 * may come after it that would merge what is made twice. */
omc_status omc_recompute(omc_graph *graph, const omc_provider *provider, bool retain_graph,
                         const omc_budget *budget, const omc_allocator *allocator) OMC_MUST_USE;

/* The stage of omc_plan_create after all but offsets is known: sets these, what is lent,
 * live_bytes, arena_bytes, bound_bytes, forward_bytes, saved, consumes. `scratch` serves while it
 * works: nothing of the plan points into it. */
omc_status omc_plan_layout(omc_plan *plan, const omc_liveness *l, omc_arena *scratch) OMC_MUST_USE;

/* What a backward's gradients of the inputs `wanted` (graph->n_inputs) need of it: by step, and
 * then by copy, n_steps + n_copies together, whether that is needed; and which of the caller's
 * inputs and outputs are read by it. OMC_ENOMEM. Any thread. */
omc_status omc_plan_needed(const omc_plan *plan, uint32_t backward, const bool *wanted,
                           bool *needed, bool *reads_input, bool *reads_output) OMC_MUST_USE;

/* When a backward uses an input of the plan and its gradient. An end is the step from which on it
 * does not; 0: it never does, UINT32_MAX: its copies do. */
typedef struct omc_uses {
  uint32_t begin; /* the first step that uses memory that is the gradient's alone; the part's
                     end_step: a copy is the first, UINT32_MAX: there is no gradient */
  uint32_t read;  /* end of what reads the input */
  uint32_t end;   /* of what uses the input or its gradient, or what was lent for that */
} omc_uses;

/* By input of the plan when a backward uses it; and by output the ends of what reads that, or its
 * gradient. `inputs` has graph->n_inputs elements, the others graph->n_outputs or are NULL. Any
 * thread. */
void omc_plan_uses(const omc_plan *plan, uint32_t backward, omc_uses *inputs, uint32_t *outputs,
                   uint32_t *grads);

/* Writes the steps and where each of their values is, for OMC_DUMP. */
void omc_plan_print(const omc_plan *plan, FILE *file);

/* Proves, from the graph and the slots alone and sharing no code with the planner, that every
 * value a step reads was written earlier and not overwritten since, that no two live slots
 * overlap unless one is declared an alias of the other and the op allows it, and that everything
 * lies inside the arena and is aligned. OMC_EINTERNAL names the step and both values. */
omc_status omc_plan_check(const omc_plan *plan) OMC_MUST_USE;

#endif
