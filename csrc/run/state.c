/* Run states: what one forward leaves for its backward. */
#include <stdatomic.h>
#include <string.h>

#include "run/exec.h"

static void free_run(const omc_exec *x, omc_run *run) {
  const omc_allocator *a = omc_session_allocator(x->session);
  omc_free(a, run->operands, x->n_operands, sizeof *run->operands);
  omc_free(a, run->bases, x->n_bases, sizeof *run->bases);
  omc_free(a, run, 1, sizeof *run);
}

void omc_runs_free(const omc_exec *exec, omc_run *runs) {
  while (runs) {
    omc_run *next = runs->next;
    free_run(exec, runs);
    runs = next;
  }
}

static omc_status new_run(omc_exec *x, omc_run **out) {
  const omc_allocator *a = omc_session_allocator(x->session);
  omc_run *run = omc_alloc_zero(a, 1, sizeof *run);
  if (!run) OMC_FAIL(ENOMEM, "no memory for a run");
  run->exec = x;
  run->operands = omc_alloc(a, x->n_operands, sizeof *run->operands);
  run->bases = omc_alloc_zero(a, x->n_bases, sizeof *run->bases);
  if (!run->operands || !run->bases) {
    free_run(x, run);
    OMC_FAIL(ENOMEM, "no memory for a run with %u operands", x->n_operands);
  }
  memcpy(run->operands, x->operands, x->n_operands * sizeof *run->operands);
  *out = run;
  return OMC_OK;
}

/* Gives back the arena and what the host kept, and puts the run aside to be used again. */
static void finish(omc_run *run) {
  omc_exec *x = run->exec;
  const omc_provider *p = x->plan->provider;
  const omc_host *host = omc_session_host(x->session);
  if (run->host_state) host->drop(host->ctx, run->host_state);
  run->host_state = NULL;
  if (run->bases[0]) p->free(p->ctx, run->bases[0], x->plan->arena_bytes);
  run->bases[0] = NULL;
  omc_exec_lock();
  const bool keep = x->n_idle < OMC_MAX_IDLE;
  if (keep) {
    run->next = x->idle;
    x->idle = run;
    x->n_idle++;
  }
  omc_exec_unlock();
  if (!keep) free_run(x, run);
}

/* A run with an arena of its own. */
static omc_status start(omc_exec *x, uint64_t seed, omc_run **out) {
  const omc_plan *plan = x->plan;
  const omc_provider *p = plan->provider;
  omc_exec_lock();
  omc_run *run = x->idle;
  if (run) {
    x->idle = run->next;
    x->n_idle--;
  }
  omc_exec_unlock();
  if (!run) OMC_TRY(new_run(x, &run));

  run->seed = seed;
  run->consumed = false;
  if (plan->arena_bytes > 0) {
    const omc_status status = p->alloc(p->ctx, plan->arena_bytes, &run->bases[0]);
    if (status != OMC_OK) {
      run->bases[0] = NULL;
      finish(run);
      return status;
    }
  }
  *out = run;
  return OMC_OK;
}

static void set_bases(omc_run *run, omc_place place, void *const *pointers, uint32_t n) {
  void **bases = run->bases + omc_exec_base(run->exec->plan, place, 0);
  for (uint32_t i = 0; i < n; i++) bases[i] = pointers ? pointers[i] : NULL;
}

omc_status omc_run_forward(omc_plan *plan, void *const *inputs, void *const *outputs, uint64_t seed,
                           omc_run **out) {
  omc_exec *x = plan->attached;
  const omc_graph *g = plan->graph;
  omc_run *run;
  if (out) *out = NULL;
  if (!out && g->n_grads > 0)
    OMC_FAIL(EINVALID, "a plan with a backward needs a place for its run");
  OMC_TRY(start(x, seed, &run));
  set_bases(run, OMC_AT_INPUT, inputs, g->n_inputs);
  set_bases(run, OMC_AT_OUTPUT, outputs, g->n_outputs);
  const omc_status status = omc_exec_phase(run, OMC_FORWARD);
  if (status != OMC_OK || g->n_grads == 0) {
    finish(run);
    return status;
  }
  omc_plan_retain(plan);
  omc_session_count_runs(x->session, 1);
  *out = run;
  return OMC_OK;
}

static omc_status run_backward(omc_run *run, void *const *inputs, void *const *outputs,
                               void *const *grads, void *const *results) {
  const omc_plan *plan = run->exec->plan;
  const omc_graph *g = plan->graph;
  if (run->consumed)
    OMC_FAIL(ECONSUMED,
             "backward ran already and wrote over what forward had saved; a plan made "
             "with retain keeps it");
  set_bases(run, OMC_AT_INPUT, inputs, g->n_inputs);
  set_bases(run, OMC_AT_OUTPUT, outputs, g->n_outputs);
  set_bases(run, OMC_AT_GRAD, grads, g->n_outputs);
  set_bases(run, OMC_AT_RESULT, results, g->n_grads);
  return omc_exec_phase(run, OMC_BACKWARD);
}

omc_status omc_run_backward(omc_run *run, void *const *inputs, void *const *outputs,
                            void *const *grads, void *const *results) {
  if (atomic_exchange(&run->busy, true))
    OMC_FAIL(ESTATE, "another thread is running the backward of the same forward");
  const omc_status status = run_backward(run, inputs, outputs, grads, results);
  atomic_store(&run->busy, false);
  return status;
}

const omc_plan *omc_run_plan(const omc_run *run) { return run->exec->plan; }

void omc_run_destroy(omc_run *run) {
  if (!run) return;
  omc_plan *plan = run->exec->plan;
  omc_session_count_runs(run->exec->session, -1);
  finish(run);
  omc_plan_release(plan);
}
