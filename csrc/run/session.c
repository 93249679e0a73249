#include "run/session.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "base/hash.h"
#include "run/exec.h"
#include "run/pipeline.h"

/* A cached plan; the types of its inputs are those of its graph. */
typedef struct entry {
  omc_plan *plan;      /* NULL: free */
  uint64_t hash, used; /* of the signature; when last asked for */
  bool *grads;         /* wanted of inputs, then given of outputs in each backward */
  uint32_t n_backwards;
  bool plain; /* as asked for */
} entry;

struct omc_session {
  omc_shared *shared;
  pthread_mutex_t lock; /* of what follows */
  omc_session_stats stats;
  omc_budget budget;
  entry *entries;
  uint32_t n_entries;
  uint64_t now; /* counts lookups */
};

static size_t n_grads(const omc_session *s, uint32_t n_backwards) {
  const omc_graph *template = s->shared->template;
  return template->n_inputs + (size_t)n_backwards * template->n_outputs;
}

omc_status omc_session_create(const char *text, size_t n, omc_find_data find, void *find_ctx,
                              const omc_callbacks *callbacks, const omc_provider *provider,
                              const omc_allocator *allocator, uint32_t max_plans,
                              omc_session **out) {
  if (max_plans == 0) OMC_FAIL(EINVALID, "max_plans is 0, at least 1 is needed");
  omc_graph *template;
  omc_shared *shared;
  OMC_TRY(omc_graph_parse(allocator, text, n, find, find_ctx, &template));
  OMC_TRY(omc_shared_create(template, callbacks, provider, allocator, &shared));
  omc_session *s = omc_alloc_zero(allocator, 1, sizeof *s);
  entry *entries = omc_alloc_zero(allocator, max_plans, sizeof *entries);
  if (!s || !entries || pthread_mutex_init(&s->lock, NULL) != 0) {
    omc_free(allocator, entries, max_plans, sizeof *entries);
    omc_free(allocator, s, 1, sizeof *s);
    omc_shared_release(shared);
    OMC_FAIL(ENOMEM, "no memory for a session of %u plans", max_plans);
  }
  s->shared = shared;
  s->budget = (omc_budget){1, SIZE_MAX};
  s->entries = entries;
  s->n_entries = max_plans;
  *out = s;
  return OMC_OK;
}

static void clear(omc_session *s, entry *e) {
  omc_plan_release(e->plan);
  omc_free(s->shared->allocator, e->grads, n_grads(s, e->n_backwards), sizeof *e->grads);
  *e = (entry){0};
}

void omc_session_destroy(omc_session *s) {
  if (!s) return;
  const omc_allocator *allocator = s->shared->allocator;
  for (uint32_t i = 0; i < s->n_entries; i++) clear(s, &s->entries[i]);
  pthread_mutex_destroy(&s->lock);
  omc_free(allocator, s->entries, s->n_entries, sizeof *s->entries);
  omc_shared_release(s->shared);
  omc_free(allocator, s, 1, sizeof *s);
}

omc_status omc_session_set_budget(omc_session *s, const omc_budget *budget) {
  if (!(budget->share >= 0 && budget->share <= 1))
    OMC_FAIL(EINVALID, "a budget of %g of the memory, which is not from 0 to 1", budget->share);
  pthread_mutex_lock(&s->lock);
  s->budget = *budget;
  pthread_mutex_unlock(&s->lock);
  return OMC_OK;
}

const omc_graph *omc_session_template(const omc_session *s) { return s->shared->template; }

omc_session_stats omc_session_get_stats(omc_session *s) {
  pthread_mutex_lock(&s->lock);
  omc_session_stats stats = s->stats;
  for (uint32_t i = 0; i < s->n_entries; i++) stats.plans_cached += s->entries[i].plan != NULL;
  pthread_mutex_unlock(&s->lock);
  stats.constant_bytes = omc_constants_bytes(&s->shared->constants);
  stats.runs_live = atomic_load(&s->shared->runs_live);
  stats.replays = atomic_load(&s->shared->replays);
  return stats;
}

static void mix(uint64_t *hash, uint64_t x) { *hash = omc_hash_mix(*hash, x); }

static uint64_t hash_signature(const omc_session *s, const omc_signature *g, int threads) {
  uint64_t hash = (uint64_t)threads << 2 | (uint64_t)g->plain << 1 | g->retain_graph;
  mix(&hash, g->n_backwards);
  for (uint32_t i = 0; i < s->shared->template->n_inputs; i++) {
    const omc_type *type = &g->inputs[i];
    mix(&hash, (uint64_t)type->dtype << 8 | (uint64_t)type->shape.rank << 1 | g->in_grads[i]);
    for (int32_t d = 0; d < type->shape.rank; d++) mix(&hash, (uint64_t)type->shape.dims[d]);
  }
  for (size_t k = 0; k < (size_t)g->n_backwards * s->shared->template->n_outputs; k++)
    mix(&hash, g->out_grads[k]);
  return hash;
}

static bool fits(const omc_session *s, const entry *e, const omc_signature *g, int threads) {
  const size_t n_in = s->shared->template->n_inputs, n_out = n_grads(s, g->n_backwards) - n_in;
  if (e->plan->retain_graph != g->retain_graph || e->plan->threads != threads ||
      e->n_backwards != g->n_backwards || e->plain != g->plain)
    return false;
  if ((n_in && memcmp(e->grads, g->in_grads, n_in * sizeof(bool)) != 0) ||
      (n_out && memcmp(e->grads + n_in, g->out_grads, n_out * sizeof(bool)) != 0))
    return false;
  for (uint32_t i = 0; i < n_in; i++)
    if (!omc_type_equal(&e->plan->graph->inputs[i]->type, &g->inputs[i])) return false;
  return true;
}

/* A free entry, or that of the least recently used plan. */
static entry *oldest(omc_session *s) {
  entry *e = s->entries;
  for (uint32_t i = 1; i < s->n_entries && e->plan; i++)
    if (!s->entries[i].plan || s->entries[i].used < e->used) e = &s->entries[i];
  return e;
}

static void evict(omc_session *s, entry *e) {
  s->stats.plans_evicted += e->plan != NULL;
  clear(s, e);
}

/* Evicts plans other than the one of now until the constants of those cached are not too many. */
static void bound_constants(omc_session *s) {
  while (omc_constants_bytes(&s->shared->constants) > OMC_MOST_CONSTANT_BYTES) {
    entry *first = NULL;
    for (entry *e = s->entries; e < s->entries + s->n_entries; e++)
      if (e->plan && e->used != s->now && (!first || e->used < first->used)) first = e;
    if (!first) return;
    evict(s, first);
  }
}

static omc_status make_plan(omc_session *s, const omc_signature *g, omc_constants_taken *constants,
                            omc_plan **out) {
  OMC_TRY(omc_build_plan(s->shared, g, &s->budget, constants, &s->stats, out));
  const omc_status status = omc_exec_attach(*out, s->shared, constants);
  if (status != OMC_OK) omc_plan_release(*out);
  return status;
}

static omc_status build(omc_session *s, const omc_signature *g, uint64_t hash, omc_plan **out) {
  omc_shared *shared = s->shared;
  const size_t n_in = shared->template->n_inputs, n = n_grads(s, g->n_backwards);
  omc_constants_taken constants = {.from = &shared->constants};
  omc_plan *plan;
  bool *grads = omc_alloc(shared->allocator, n, sizeof *grads);
  if (!grads) OMC_FAIL(ENOMEM, "no memory for the signature of a plan");
  const omc_status status = make_plan(s, g, &constants, &plan);
  if (status != OMC_OK) {
    omc_constants_drop(&constants);
    omc_free(shared->allocator, grads, n, sizeof *grads);
    return status;
  }
  if (n_in) memcpy(grads, g->in_grads, n_in * sizeof *grads);
  if (n > n_in) memcpy(grads + n_in, g->out_grads, (n - n_in) * sizeof *grads);

  entry *e = oldest(s);
  evict(s, e);
  *e = (entry){plan, hash, s->now, grads, g->n_backwards, g->plain};
  s->stats.plans_built++;
  bound_constants(s);
  *out = omc_plan_retain(plan);
  return OMC_OK;
}

static omc_status find_or_build(omc_session *s, const omc_signature *g, omc_plan **out) {
  const int threads = s->shared->provider->threads(s->shared->provider->ctx);
  const uint64_t hash = hash_signature(s, g, threads);
  s->now++;
  for (uint32_t i = 0; i < s->n_entries; i++) {
    entry *e = &s->entries[i];
    if (!e->plan || e->hash != hash || !fits(s, e, g, threads)) continue;
    e->used = s->now;
    s->stats.plan_hits++;
    *out = omc_plan_retain(e->plan);
    return OMC_OK;
  }
  return build(s, g, hash, out);
}

omc_status omc_session_plan(omc_session *s, const omc_signature *signature, omc_plan **out) {
  pthread_mutex_lock(&s->lock);
  const omc_status status = find_or_build(s, signature, out);
  pthread_mutex_unlock(&s->lock);
  return status;
}
