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
  const bool *out_grads;  /* n_outputs: gradient will be given; all false: forward only */
  bool retain;            /* backward may run more than once per forward; costs memory */
} omc_signature;

typedef struct omc_session_stats {
  uint64_t plans_built, plan_hits, plans_evicted;
  double bind_seconds, simplify_seconds, differentiate_seconds, fuse_seconds,
      plan_seconds;        /* summed over plans built */
  uint64_t constant_bytes; /* held by the plans cached, beside the constants of the template */
  uint32_t plans_cached, runs_live;
} omc_session_stats;

/* Parses a template (graph/text.h); constants found by `find` must outlive the session. `host`
 * (copied; may be NULL) serves TorchCall nodes. `max_plans` bounds the cache, at least 1; the
 * least recently used plan goes first. The caller owns *out. */
omc_status omc_session_create(const char *text, size_t n, omc_find_data find, void *find_ctx,
                              const omc_host *host, const omc_provider *provider,
                              const omc_allocator *allocator, uint32_t max_plans,
                              omc_session **out) OMC_MUST_USE;

/* Plans and runs keep what they need; a session may go before them. NULL is accepted. */
void omc_session_destroy(omc_session *session);

const omc_graph *omc_session_template(const omc_session *session);

/* The plan for a signature and the provider's present number of threads: from the cache, or bind,
 * simplify, differentiate, fuse and plan. The caller owns one reference to *out. Any thread; plans
 * are built one at a time under a lock, so the caller holds no lock that host->infer takes. */
omc_status omc_session_plan(omc_session *session, const omc_signature *signature,
                            omc_plan **out) OMC_MUST_USE;

omc_session_stats omc_session_get_stats(omc_session *session);

/* Runs forward. plan: one that omc_session_plan made. inputs: graph->n_inputs data pointers of
 * dense tensors of the signature's types; outputs: n_outputs pointers to memory for the results.
 * Both are borrowed for the call. If the plan is joint (graph->n_grads > 0) *out is a new run,
 * which the caller owns, else NULL (`out` may be NULL then). Any thread. */
omc_status omc_run_forward(omc_plan *plan, void *const *inputs, void *const *outputs, uint64_t seed,
                           omc_run **out) OMC_MUST_USE;

/* Runs backward: any number of times, but once only if plan->consumes (then OMC_ECONSUMED).
 * inputs and outputs: as given to forward, needed only where plan->saves_input / saves_output says
 * so, elsewhere NULL; grads: n_outputs pointers, those of the signature's out_grads; results:
 * n_inputs pointers, NULL where the plan has no gradient. Of two threads that call it for one run
 * at once the second gets OMC_ESTATE. */
omc_status omc_run_backward(omc_run *run, void *const *inputs, void *const *outputs,
                            void *const *grads, void *const *results) OMC_MUST_USE;

const omc_plan *omc_run_plan(const omc_run *run);

/* Gives the arena back. NULL is accepted. */
void omc_run_destroy(omc_run *run);

/* Seconds spent in each of the plan's steps, summed over runs, if OMC_PROFILE is set; else NULL.
 * Borrowed from the plan; a run under way may be adding to them. */
const double *omc_plan_profile(const omc_plan *plan);

#endif
