/* Runs of a plan: forward, and the backwards after it. */
#ifndef OMC_RUN_RUN_H
#define OMC_RUN_RUN_H

#include "plan/plan.h"

typedef struct omc_run omc_run;

/* Runs forward. plan: one that omc_session_plan made. inputs: graph->n_inputs data pointers of
 * dense tensors of the signature's types; outputs: n_outputs pointers to memory for the results;
 * lent: n_inputs, where plan->lends says so to memory for the gradient of that input, which is the
 * run's until a backward takes it over, the run is packed or ends (NULL where none lends). All
 * are arrays of the host's, borrowed for the call, of memory of the plan's provider. An output
 * that is written over an input has its place in that, which may share memory with no other tensor
 * given (OMC_EINVALID), and is written once nothing can fail any more; outputs[k] is not looked at.
 * The work is given to `queue` (provider.h), and is done when that is. If the plan is joint
 * (graph->n_grads > 0) *out is a new run, which the caller owns, else NULL (`out` may be NULL
 * then). Any thread. */
omc_status omc_run_forward(omc_plan *plan, void *const *inputs, void *const *outputs,
                           void *const *lent, uint64_t seed, void *queue,
                           omc_run **out) OMC_MUST_USE;

/* Copies what backwards read of the arena and of what was lent to `bytes`, plan->forward_bytes of
 * them, and gives the arena back, both in `queue`, which waits for forward's; each backward then
 * needs the bytes. To be called once, before any backward: OMC_EINVALID while one is under way,
 * where one has written over what is to be copied, and the second time. After any failure the run
 * is as it was, but for the queue that its arena is freed in. Any thread. */
omc_status omc_run_pack(omc_run *run, void *bytes, void *queue) OMC_MUST_USE;

/* What a backward is given. inputs and outputs: n_inputs and n_outputs pointers to what was given
 * to forward, needed only where plan->parts[OMC_BACKWARD + number] says that it reads them,
 * elsewhere NULL. All is borrowed until the backward is left. */
typedef struct omc_backward {
  uint32_t number;    /* which one, in the order of the signature */
  bool keep;          /* another backward may follow */
  void *queue;        /* that the work is given to */
  const void *packed; /* what omc_run_pack wrote; NULL if the run was not packed */
  void *const *inputs, *const *outputs;
  void *const *grads;   /* n_outputs, those of this backward's out_grads */
  void *const *results; /* n_inputs, NULL where the plan has no gradient; see omc_run_advance */
  const bool *needed;   /* of omc_plan_needed: no more has to be computed; NULL: all is needed */
  /* Set by omc_run_enter. */
  bool in_place;   /* it works where forward did */
  bool takes_lent; /* results of inputs that lend are what was lent to forward, not other memory */
  /* Kept by omc_run_advance. */
  uint32_t step;         /* the next one of the plan */
  struct omc_work *work; /* NULL: nothing has run */
  void *arena;           /* a copy that it works in, if not in place */
} omc_backward;

/* Begins one of the plan's backwards: any of them in any order and any number of times. Only if the
 * plan consumes what forward saved, one that is not told to keep it is the last: after it
 * OMC_ECONSUMED. Any thread; where two would work in one arena, or keep what the plan consumes, it
 * works in a copy. Reads number, keep, queue and packed, and says what `results` must be. Unless it
 * fails, omc_run_leave or omc_run_backward must follow. */
omc_status omc_run_enter(omc_run *run, omc_backward *backward) OMC_MUST_USE;

/* Runs the backward that was begun from where it is to before step `end` of the plan, or for
 * UINT32_MAX to its end, with its copies: omc_plan_uses says what is done with by then. Of the
 * caller's tensors only those must be there that these steps use, and from the first call on the
 * results that lend; where they are may be another place at each call. One thread at a time. What
 * it lacks of the caller's tensors it says before any of these steps runs (OMC_EINVALID); after any
 * other failure nothing but leaving makes sense. */
omc_status omc_run_advance(omc_run *run, omc_backward *backward, uint32_t end) OMC_MUST_USE;

/* Ends a backward that was begun, wherever it is. If nothing of it has run, the run is as it was,
 * but for the queue that its arena is freed in. OMC_EDEVICE: it has ended all the same. */
omc_status omc_run_leave(omc_run *run, omc_backward *backward) OMC_MUST_USE;

/* Runs the backward that was begun, and ends it. */
omc_status omc_run_backward(omc_run *run, omc_backward *backward) OMC_MUST_USE;

/* The plan that it is a run of, which it keeps; borrowed until the run is destroyed. Any thread. */
const omc_plan *omc_run_plan(const omc_run *run);

/* Gives the arena back. NULL is accepted. */
void omc_run_destroy(omc_run *run);

/* What a step of a plan took so far. */
typedef struct omc_step_time {
  double seconds; /* of all its runs together */
  uint64_t runs;
} omc_step_time;

/* Times of the plan's steps, if OMC_PROFILE is set; else NULL. Borrowed from the plan; a run under
 * way may be adding to them. */
const omc_step_time *omc_plan_profile(const omc_plan *plan);

#endif
