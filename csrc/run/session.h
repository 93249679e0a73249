/* The session: one template and its plans. */
#ifndef OMC_RUN_SESSION_H
#define OMC_RUN_SESSION_H

#include "graph/text.h"
#include "run/run.h"

typedef struct omc_session omc_session;

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
  uint64_t constant_bytes; /* computed when plans were made and held by them, what is equal once */
  uint64_t replays;        /* phases that the device was given as it had noted them */
  uint32_t plans_cached, runs_live;
} omc_session_stats;

#define OMC_MOST_CONSTANT_BYTES ((size_t)16 << 20)

/* Parses a template (graph/text.h); constants found by `find` must outlive the session. `callbacks`
 * (copied; may be NULL) serves TorchCall nodes. `max_plans`, at least 1, bounds the cache, and so
 * do OMC_MOST_CONSTANT_BYTES, in which the last plan alone need not fit; the least recently used
 * plan goes first. The caller owns *out. */
omc_status omc_session_create(const char *text, size_t n, omc_find_data find, void *find_ctx,
                              const omc_callbacks *callbacks, const omc_provider *provider,
                              const omc_allocator *allocator, uint32_t max_plans,
                              omc_session **out) OMC_MUST_USE;

/* Plans and runs keep what they need; a session may go before them. NULL is accepted. */
void omc_session_destroy(omc_session *session);

/* How large arenas of plans that are made from now on may be; at first there is no bound. Results
 * do not depend on it. OMC_EINVALID: the share is not from 0 to 1. Any thread. */
omc_status omc_session_set_budget(omc_session *session, const omc_budget *budget) OMC_MUST_USE;

/* The graph as it was parsed, dims of -1 being open; borrowed until the session is destroyed, and
 * never changed. Any thread. */
const omc_graph *omc_session_template(const omc_session *session);

/* The plan for a signature and the provider's present number of threads: from the cache, or
 * specialize, canonicalize, differentiate, fuse and plan. The caller owns one reference to *out.
 * Any thread; plans are built one at a time under a lock, so the caller holds no lock that
 * callbacks->infer takes. */
omc_status omc_session_plan(omc_session *session, const omc_signature *signature,
                            omc_plan **out) OMC_MUST_USE;

/* What there has been so far, and is now. Any thread; while another one builds a plan it waits for
 * that, so the caller holds no lock that callbacks->infer takes. */
omc_session_stats omc_session_get_stats(omc_session *session);

#endif
