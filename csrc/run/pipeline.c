#include "run/pipeline.h"

#include <stdatomic.h>
#include <stdio.h>

#include "autodiff/autodiff.h"
#include "base/env.h"
#include "graph/verify.h"
#include "passes/passes.h"

typedef struct building {
  omc_shared *shared;
  const omc_signature *signature;
  const omc_budget *budget;
  omc_constants_taken *constants;
  omc_graph *graph; /* NULL before the first stage, and once the plan has it */
  omc_plan *plan;
  bool settled; /* something */
} building;

static omc_status specialize(building *b) {
  return omc_specialize(b->shared->template, b->signature->inputs, omc_shared_callbacks(b->shared),
                        b->shared->allocator, &b->graph);
}
static omc_status canonicalize(building *b) { return omc_canonicalize(b->graph); }
static omc_status cse(building *b) { return omc_cse(b->graph); }
static omc_status fold(building *b) { return omc_fold(b->graph); }
static omc_status settle(building *b) { return omc_settle(b->graph, &b->settled); }
static omc_status canonicalize_settled(building *b) {
  return b->settled ? omc_canonicalize(b->graph) : OMC_OK;
}
static omc_status save(building *b) { return omc_save_overwritten(b->graph); }
static omc_status trim(building *b) {
  omc_trim(b->graph);
  return OMC_OK;
}
static omc_status lay_out(building *b) {
  return b->shared->provider->channels_last ? omc_lay_channels_last(b->graph) : OMC_OK;
}
static omc_status reuse(building *b) { return omc_reuse_results(b->graph, b->shared->provider); }
static omc_status widen_again(building *b) {
  return omc_widen_again(b->graph, b->shared->provider);
}
static omc_status fuse(building *b) { return omc_fuse(b->graph, b->shared->provider); }
static bool has_budget(const building *b) {
  return b->budget->share < 1 || b->budget->bytes < SIZE_MAX;
}
static omc_status recompute(building *b) {
  if (!has_budget(b)) return OMC_OK;
  return omc_recompute(b->graph, b->shared->provider, b->signature->retain_graph, b->budget,
                       b->shared->allocator);
}
/* Casts made early may be kept where forward takes most memory. */
static omc_status gather_casts(building *b) {
  const bool gathers = b->shared->provider->gathers_casts && !has_budget(b);
  return gathers ? omc_gather_casts(b->graph) : OMC_OK;
}

static omc_status differentiate(building *b) {
  const omc_signature *s = b->signature;
  return omc_differentiate(b->graph, s->n_backwards, s->out_grads, s->in_grads);
}

static omc_status keep(void *ctx, const void *elements, size_t bytes, const void **out) {
  return omc_constants_take(ctx, elements, bytes, out);
}

static omc_status plan(building *b) {
  OMC_TRY(omc_graph_compact(&b->graph, keep, b->constants)); /* plans are kept */
  omc_graph *graph = b->graph;
  b->graph = NULL;
  return omc_plan_create(graph, b->shared->provider, b->signature->retain_graph,
                         b->shared->allocator, &b->plan);
}

static const struct stage {
  const char *name;
  omc_status (*apply)(building *b);
  bool joint_only, rewrites;
  size_t seconds; /* field of omc_session_stats */
} stages[] = {
    {"specialize", specialize, false, false, offsetof(omc_session_stats, specialize_seconds)},
    /* Before, too: rules look for one value at several places. */
    {"cse", cse, false, true, offsetof(omc_session_stats, canonicalize_seconds)},
    {"canonicalize", canonicalize, false, true, offsetof(omc_session_stats, canonicalize_seconds)},
    {"cse-canonical", cse, false, true, offsetof(omc_session_stats, canonicalize_seconds)},
    {"fold", fold, false, true, offsetof(omc_session_stats, canonicalize_seconds)},
    {"differentiate", differentiate, true, false,
     offsetof(omc_session_stats, differentiate_seconds)},
    {"canonicalize-joint", canonicalize, true, true,
     offsetof(omc_session_stats, canonicalize_seconds)},
    {"cse-joint", cse, true, true, offsetof(omc_session_stats, canonicalize_seconds)},
    {"settle", settle, false, false, offsetof(omc_session_stats, canonicalize_seconds)},
    {"canonicalize-settled", canonicalize_settled, false, true,
     offsetof(omc_session_stats, canonicalize_seconds)},
    {"channels-last", lay_out, false, true, offsetof(omc_session_stats, fuse_seconds)},
    {"reuse", reuse, true, true, offsetof(omc_session_stats, fuse_seconds)},
    {"widen-again", widen_again, true, true, offsetof(omc_session_stats, fuse_seconds)},
    {"fuse", fuse, false, true, offsetof(omc_session_stats, fuse_seconds)},
    {"trim", trim, false, true, offsetof(omc_session_stats, fuse_seconds)},
    {"save", save, false, false, offsetof(omc_session_stats, plan_seconds)},
    {"recompute", recompute, true, true, offsetof(omc_session_stats, plan_seconds)},
    {"trim-copies", trim, true, true, offsetof(omc_session_stats, plan_seconds)},
    {"gather-casts", gather_casts, false, true, offsetof(omc_session_stats, plan_seconds)},
    {"plan", plan, false, false, offsetof(omc_session_stats, plan_seconds)},
};

/* The graph, or the plan once there is one. */
static omc_status write_stage(const building *b, FILE *file) {
  char *text;
  size_t bytes;
  if (b->plan) {
    omc_plan_print(b->plan, file);
    return OMC_OK;
  }
  OMC_TRY(omc_graph_print(b->graph, b->shared->allocator, &text, &bytes));
  fputs(text, file);
  omc_free(b->shared->allocator, text, 1, bytes);
  return OMC_OK;
}

static omc_status dump(const building *b, const char *dir, unsigned plan_number, size_t stage) {
  char path[4096];
  const int n = snprintf(path, sizeof path, "%s/plan%03u-%02zu-%s.txt", dir, plan_number, stage,
                         stages[stage].name);
  if (n < 0 || (size_t)n >= sizeof path) OMC_FAIL(EINVALID, "OMC_DUMP: path is too long");
  FILE *file = fopen(path, "w");
  if (!file) OMC_FAIL(EINVALID, "OMC_DUMP: cannot write '%s'", path);
  const omc_status status = write_stage(b, file);
  const bool written = !ferror(file);
  if (fclose(file) == 0 && written) return status;
  OMC_FAIL(EINVALID, "OMC_DUMP: cannot write '%s'", path);
}

static omc_status inspect(const building *b, unsigned plan_number, size_t stage) {
  const omc_env *env = omc_env_get();
  if (env->verify) OMC_TRY(omc_graph_verify(b->plan ? b->plan->graph : b->graph, true));
  return *env->dump ? dump(b, env->dump, plan_number, stage) : OMC_OK;
}

static bool wants_backward(const omc_graph *template, const omc_signature *s) {
  for (uint32_t k = 0; k < s->n_backwards * template->n_outputs; k++)
    if (s->out_grads[k]) return true;
  return false;
}

static omc_status apply_stages(building *b, omc_session_stats *stats) {
  static _Atomic unsigned plans;
  const unsigned plan_number = atomic_fetch_add(&plans, 1);
  const omc_provider *p = omc_provider_host(); /* planning is the host's work */
  const bool joint = wants_backward(b->shared->template, b->signature);
  for (size_t i = 0; i < sizeof stages / sizeof *stages; i++) {
    if ((stages[i].joint_only && !joint) || (stages[i].rewrites && b->signature->plain)) continue;
    const double start = p->clock(p->ctx, NULL);
    OMC_TRY(stages[i].apply(b));
    *(double *)((char *)stats + stages[i].seconds) += p->clock(p->ctx, NULL) - start;
    OMC_TRY(inspect(b, plan_number, i));
  }
  return OMC_OK;
}

omc_status omc_build_plan(omc_shared *shared, const omc_signature *signature,
                          const omc_budget *budget, omc_constants_taken *constants,
                          omc_session_stats *stats, omc_plan **out) {
  building b = {.shared = shared, .signature = signature, .budget = budget, .constants = constants};
  const omc_status status = apply_stages(&b, stats);
  if (status == OMC_OK) {
    *out = b.plan;
    return OMC_OK;
  }
  omc_graph_destroy(b.graph);
  omc_plan_release(b.plan);
  return status;
}
