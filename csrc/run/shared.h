/* What a session, its plans and their runs share; it lives as long as one of them does. */
#ifndef OMC_RUN_SHARED_H
#define OMC_RUN_SHARED_H

#include "graph/graph.h"
#include "run/constants.h"

typedef struct omc_shared {
  const omc_allocator *allocator;
  const omc_provider *provider;
  omc_graph *template; /* plans borrow its constants */
  omc_callbacks callbacks;
  bool has_callbacks;
  omc_constants constants;
  _Atomic uint32_t references, runs_live;
  _Atomic uint64_t replays;
} omc_shared;

/* `callbacks` (copied) may be NULL; `template` is taken over, in either case. The caller owns one
 * reference to *out. */
omc_status omc_shared_create(omc_graph *template, const omc_callbacks *callbacks,
                             const omc_provider *provider, const omc_allocator *allocator,
                             omc_shared **out) OMC_MUST_USE;
omc_shared *omc_shared_retain(omc_shared *shared);
void omc_shared_release(omc_shared *shared);

static inline const omc_callbacks *omc_shared_callbacks(const omc_shared *s) {
  return s->has_callbacks ? &s->callbacks : NULL;
}

#endif
