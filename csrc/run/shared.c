#include "run/shared.h"

#include <stdatomic.h>

omc_status omc_shared_create(omc_graph *template, const omc_callbacks *callbacks,
                             const omc_provider *provider, const omc_allocator *allocator,
                             omc_shared **out) {
  omc_shared *s = omc_alloc_zero(allocator, 1, sizeof *s);
  if (!s) {
    omc_graph_destroy(template);
    OMC_FAIL(ENOMEM, "no memory for a session");
  }
  s->allocator = allocator;
  s->provider = provider;
  s->template = template;
  s->has_callbacks = callbacks != NULL;
  if (callbacks) s->callbacks = *callbacks;
  omc_constants_init(&s->constants, allocator, provider);
  atomic_init(&s->references, 1);
  atomic_init(&s->runs_live, 0);
  atomic_init(&s->replays, 0);
  *out = s;
  return OMC_OK;
}

omc_shared *omc_shared_retain(omc_shared *s) {
  atomic_fetch_add_explicit(&s->references, 1, memory_order_relaxed);
  return s;
}

void omc_shared_release(omc_shared *s) {
  if (atomic_fetch_sub_explicit(&s->references, 1, memory_order_acq_rel) != 1) return;
  omc_constants_deinit(&s->constants);
  omc_graph_destroy(s->template);
  omc_free(s->allocator, s, 1, sizeof *s);
}
