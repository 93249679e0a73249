/* Where the values of a graph will be and for how long, before there is a plan: nothing is chosen
 * here but what shares memory with what. So a pass may ask what a change would cost. */
#ifndef OMC_PLAN_LIVENESS_H
#define OMC_PLAN_LIVENESS_H

#include "graph/graph.h"

typedef enum {
  OMC_AT_NONE,   /* never materialised */
  OMC_AT_INPUT,  /* caller's tensor number `index`; written there if an output is written over it */
  OMC_AT_GRAD,   /* caller's gradient of output number `index` */
  OMC_AT_CONST,  /* `data` of the value */
  OMC_AT_OUTPUT, /* result tensor number `index`, forward */
  OMC_AT_RESULT, /* gradient of input number `index`, of a backward */
  OMC_AT_ARENA,  /* `offset` in the arena */
  OMC_AT_LENT    /* `offset` in memory for the gradient of input number `index`, not yet written */
} omc_place;

/* Where a value lives and for how long. Steps are numbered through, forward first; a value is
 * live from the start of step `begin` to the end of step `end`. An alias has the place and offset
 * of the value it shares memory with. */
typedef struct omc_slot {
  omc_place place;
  uint32_t index;
  size_t offset, bytes; /* offset: 0 until there is a plan */
  uint32_t begin, end;
  uint32_t alias; /* id of the step's or view's input whose memory it shares, or its own id */
} omc_slot;

/* The id of the value whose memory a value has, its own if it shares none. */
static inline uint32_t omc_slot_root(const omc_slot *slots, uint32_t id) {
  while (slots[id].alias != id) id = slots[id].alias;
  return id;
}

/* Forward outputs and gradients that are no step's own output: a result that is an input, a
 * constant, or a second name of another result is copied after the last step of its phase. */
typedef struct omc_copy {
  uint32_t from, to; /* value id; input of the result node */
} omc_copy;

/* Steps and copies of one phase: from `step` to before `end_step`, `copy` to before `end_copy`; of
 * a backward, which of the caller's inputs and outputs it reads. */
typedef struct omc_part {
  uint32_t step, end_step, copy, end_copy;
  bool *reads_input, *reads_output; /* graph->n_inputs, graph->n_outputs */
} omc_part;

/* Memory of the arena that a value and its aliases share, live as a slot is. Of one that several
 * backwards read that is longer than any of them needs it: last[b] is the last step of backward `b`
 * that reads or writes it, UINT32_MAX: it does not. */
typedef struct omc_live_range {
  uint32_t begin, end;
  size_t bytes;
  uint32_t *last;
} omc_live_range;

typedef struct omc_liveness {
  omc_slot *slots; /* by value id */
  omc_part *parts; /* by phase */
  omc_copy *copies;
  omc_live_range *ranges;
  uint32_t *range_of;          /* by value id, of those in the arena */
  const omc_node **nodes;      /* by step; views have none */
  uint32_t n_phases;           /* forward and the backwards, at least one */
  uint32_t n_forward, n_steps; /* steps of backwards are n_forward .. n_steps-1 */
  uint32_t n_copies, n_ranges;
} omc_liveness;

/* Of a typed graph. With `retain_graph` what forward saves is live to the end. Slots, parts and
 * copies are in `kept`, the rest is in `scratch`, which may be the same. OMC_EINVALID: a node is in
 * no phase of the graph's. */
omc_status omc_live_ranges(const omc_graph *g, bool retain_graph, omc_arena *kept,
                           omc_arena *scratch, omc_liveness *out) OMC_MUST_USE;

/* live[s] gets the bytes at step s, and has room for n_steps + 1. `alignment` is that of the
 * provider, a power of two; workspace[s], in bytes, is what the kernel of step s wants beside its
 * operands, NULL: not known yet. OMC_ENOMEM if the sum of all is no size_t. */
omc_status omc_live_bytes(const omc_liveness *l, size_t alignment, const size_t *workspace,
                          size_t *live) OMC_MUST_USE;

/* The step from which on the memory for the gradient that backward `b` gives of input i, a tensor
 * of the caller's, holds it: before that it may serve others. One that is copied comes after the
 * last step, which other copies may need as it is. False: that backward gives none. */
bool omc_gradient_written(const omc_graph *g, const omc_slot *slots, const omc_part *parts,
                          uint32_t b, uint32_t i, uint32_t *step);

/* The first step at which most is live, 0 if there is none: no layout is smaller than that. */
uint32_t omc_live_peak(const size_t *live, uint32_t n_steps);

#endif
