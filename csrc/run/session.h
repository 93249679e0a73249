/* The session: one template, its plans, and the runs made with them. */
#ifndef OMC_RUN_SESSION_H
#define OMC_RUN_SESSION_H

#include "graph/text.h"
#include "plan/plan.h"

typedef struct omc_session omc_session;
typedef struct omc_run omc_run;

/* What a plan depends on. Arrays are borrowed for the call. */
typedef struct omc_signature {
  const omc_type *inputs; /* n_inputs */
  const bool *in_grads;   /* n_inputs: gradient wanted */
  const bool *out_grads;  /* n_outputs for each backward: gradient will be given */
  uint32_t n_backwards;   /* 0, or none that is given a gradient: forward only */
  bool retain_graph;      /* backwards may run more than once per forward; costs memory */
  bool plain;             /* no rewrites: the graph as it was written, for comparison */
} omc_signature;

typedef struct omc_session_stats {
  uint64_t plans_built, plan_hits, plans_evicted;
  double specialize_seconds, canonicalize_seconds, differentiate_seconds, fuse_seconds,
      plan_seconds;        /* summed over plans built */
  uint64_t constant_bytes; /* held by the plans cached, beside the constants of the template */
  uint32_t plans_cached, runs_live;
} omc_session_stats;

/* Parses a template (graph/text.h); constants found by `find` must outlive the session. `callbacks`
 * (copied; may be NULL) serves TorchCall nodes. `max_plans` bounds the cache, at least 1; the
 * least recently used plan goes first. The caller owns *out. */
omc_status omc_session_create(const char *text, size_t n, omc_find_data find, void *find_ctx,
                              const omc_callbacks *callbacks, const omc_provider *provider,
                              const omc_allocator *allocator, uint32_t max_plans,
                              omc_session **out) OMC_MUST_USE;

/* Plans and runs keep what they need; a session may go before them. NULL is accepted. */
void omc_session_destroy(omc_session *session);

const omc_graph *omc_session_template(const omc_session *session);

/* The plan for a signature and the provider's present number of threads: from the cache, or
 * specialize, canonicalize, differentiate, fuse and plan. The caller owns one reference to *out.
 * Any thread; plans are built one at a time under a lock, so the caller holds no lock that
 * callbacks->infer takes. */
omc_status omc_session_plan(omc_session *session, const omc_signature *signature,
                            omc_plan **out) OMC_MUST_USE;

omc_session_stats omc_session_get_stats(omc_session *session);

/* Runs forward. plan: one that omc_session_plan made. inputs: graph->n_inputs data pointers of
 * dense tensors of the signature's types; outputs: n_outputs pointers to memory for the results.
 * Both are arrays of the host's, borrowed for the call, of memory of the plan's provider. An output
 * that is written over an input has its place in that, which may share memory with no other tensor
 * given (OMC_EINVALID), and is written once nothing can fail any more; outputs[k] is not looked at.
 * The work is given to `queue` (provider.h), and is done when that is. If the plan is joint
 * (graph->n_grads > 0) *out is a new run, which the caller owns, else NULL (`out` may be NULL
 * then). Any thread. */
omc_status omc_run_forward(omc_plan *plan, void *const *inputs, void *const *outputs, uint64_t seed,
                           void *queue, omc_run **out) OMC_MUST_USE;

/* Copies what backwards read of the arena to `bytes`, plan->forward_bytes of them, and gives the
 * arena back. To be called at most once, right after forward; each backward then needs the bytes.
 */
omc_status omc_run_pack(omc_run *run, void *bytes) OMC_MUST_USE;

/* What a backward is given. inputs and outputs: n_inputs and n_outputs pointers as given to
 * forward, needed only where plan->parts[OMC_BACKWARD + number] says that it reads them, elsewhere
 * NULL. All is borrowed for the call. */
typedef struct omc_backward {
  uint32_t number;    /* which one, in the order of the signature */
  bool keep;          /* another backward may follow */
  void *queue;        /* that the work is given to */
  const void *packed; /* what omc_run_pack wrote; NULL if the run was not packed */
  void *const *inputs, *const *outputs;
  void *const *grads;   /* n_outputs, those of this backward's out_grads */
  void *const *results; /* n_inputs, NULL where the plan has no gradient */
} omc_backward;

/* Runs one of the plan's backwards: any of them in any order and any number of times. Only if the
 * plan consumes what forward saved, one that is not told to keep it is the last: after it
 * OMC_ECONSUMED. Any thread; where two would work in one arena, or keep what the plan consumes, it
 * works in a copy. */
omc_status omc_run_backward(omc_run *run, const omc_backward *backward) OMC_MUST_USE;

const omc_plan *omc_run_plan(const omc_run *run);

/* Gives the arena back. NULL is accepted. */
void omc_run_destroy(omc_run *run);

/* Seconds spent in each of the plan's steps, summed over runs, if OMC_PROFILE is set; else NULL.
 * Borrowed from the plan; a run under way may be adding to them. */
const double *omc_plan_profile(const omc_plan *plan);

#endif
