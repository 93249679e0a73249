/* What one forward leaves for its backwards. */
#include <stdatomic.h>
#include <string.h>

#include "base/extent.h"
#include "run/exec.h"

static void free_work(const omc_exec *x, omc_work *work) {
  const omc_allocator *a = x->shared->allocator;
  omc_free(a, work->operands, x->n_operands, sizeof *work->operands);
  omc_free(a, work->bases, x->n_bases, sizeof *work->bases);
  omc_free(a, work->used, x->n_bases, sizeof *work->used);
  omc_free(a, work, 1, sizeof *work);
}

void omc_work_free(const omc_exec *exec, omc_work *list) {
  while (list) {
    omc_work *next = list->next;
    free_work(exec, list);
    list = next;
  }
}

static omc_status new_work(omc_exec *x, omc_work **out) {
  const omc_allocator *a = x->shared->allocator;
  omc_work *work = omc_alloc_zero(a, 1, sizeof *work);
  if (!work) OMC_FAIL(ENOMEM, "no memory for a run");
  work->operands = omc_alloc(a, x->n_operands, sizeof *work->operands);
  work->bases = omc_alloc_zero(a, x->n_bases, sizeof *work->bases);
  work->used = omc_alloc(a, x->n_bases, sizeof *work->used);
  if (!work->operands || !work->bases || !work->used) {
    free_work(x, work);
    OMC_FAIL(ENOMEM, "no memory for a run with %u operands", x->n_operands);
  }
  memcpy(work->operands, x->operands, x->n_operands * sizeof *work->operands);
  *out = work;
  return OMC_OK;
}

static omc_status start_work(omc_exec *x, omc_work **out) {
  omc_exec_lock();
  omc_work *work = x->idle;
  if (work) {
    x->idle = work->next;
    x->n_idle--;
  }
  omc_exec_unlock();
  if (!work) return new_work(x, out);
  *out = work;
  return OMC_OK;
}

/* Puts work aside to be used again. */
static void finish_work(omc_exec *x, omc_work *work) {
  omc_exec_lock();
  const bool keep = x->n_idle < OMC_MAX_IDLE;
  if (keep) {
    work->next = x->idle;
    x->idle = work;
    x->n_idle++;
  }
  omc_exec_unlock();
  if (!keep) free_work(x, work);
}

static void set_bases(const omc_exec *x, omc_work *work, omc_place place, void *const *pointers,
                      uint32_t n) {
  void **bases = work->bases + omc_exec_base(x->plan, place, 0);
  for (uint32_t i = 0; i < n; i++) bases[i] = pointers ? pointers[i] : NULL;
}

static omc_status new_arena(const omc_plan *plan, void *queue, void **out) {
  *out = NULL;
  if (plan->arena_bytes == 0) return OMC_OK;
  return plan->provider->alloc(plan->provider->ctx, plan->arena_bytes, queue, out);
}

static void free_arena(const omc_plan *plan, void *queue, void *arena) {
  if (arena) plan->provider->free(plan->provider->ctx, arena, plan->arena_bytes, queue);
}

/* Frees the run and all it holds but for the plan. */
static void free_run(omc_run *run) {
  const omc_exec *x = run->exec;
  const omc_callbacks *callbacks = omc_shared_callbacks(x->shared);
  if (run->callback_state) callbacks->drop(callbacks->ctx, run->callback_state);
  free_arena(x->plan, run->queue, run->arena);
  omc_free(x->shared->allocator, run->lent, x->plan->graph->n_inputs, sizeof *run->lent);
  omc_free(x->shared->allocator, run, 1, sizeof *run);
}

/* The extents of what forward writes over, in order; OMC_EINVALID if two share memory. */
static omc_status find_overwritten(const omc_plan *plan, void *const *inputs, omc_extent *out,
                                   size_t *n_out) {
  const omc_graph *g = plan->graph;
  size_t n = 0;
  for (uint32_t k = 0; k < g->n_outputs; k++) {
    const omc_value *over = omc_over(g, k);
    const size_t bytes = over ? plan->slots[over->id].bytes : 0;
    if (bytes) out[n++] = omc_extent_of(inputs[over->index], bytes, over->index);
  }
  *n_out = n;
  const omc_extent *second = omc_extents_sort(out, n);
  if (!second) return OMC_OK;
  OMC_FAIL(EINVALID, "input %u is written over and shares memory with input %u", second->owner,
           second[-1].owner);
}

/* That what forward writes over does not change another tensor that it is given. */
static omc_status check_apart(const omc_plan *plan, void *const *inputs, void *const *outputs,
                              omc_extent *overwritten) {
  const omc_graph *g = plan->graph;
  size_t n;
  OMC_TRY(find_overwritten(plan, inputs, overwritten, &n));
  for (uint32_t r = 0; r < g->n_inputs + g->n_outputs; r++) {
    const uint32_t k = r - g->n_inputs;
    const bool is_input = r < g->n_inputs;
    if (!is_input && omc_over(g, k)) continue;
    const omc_value *v = is_input ? g->inputs[r] : omc_in(g->result, k);
    const size_t bytes = plan->slots[v->id].bytes;
    if (!bytes) continue;
    const omc_extent given = omc_extent_of(is_input ? inputs[r] : outputs[k], bytes, r);
    const omc_extent *over = omc_extents_meet(overwritten, n, &given);
    if (over && !(is_input && over->owner == r))
      OMC_FAIL(EINVALID, "input %u is written over and shares memory with %s %u", over->owner,
               is_input ? "input" : "output", is_input ? r : k);
  }
  return OMC_OK;
}

static omc_status check_given(const omc_exec *x, void *const *inputs, void *const *outputs) {
  const omc_graph *g = x->plan->graph;
  const omc_allocator *a = x->shared->allocator;
  if (!g->over) return OMC_OK;
  omc_extent *overwritten = omc_alloc(a, g->n_outputs, sizeof *overwritten);
  if (!overwritten) OMC_FAIL(ENOMEM, "no memory for a run of %u outputs", g->n_outputs);
  const omc_status status = check_apart(x->plan, inputs, outputs, overwritten);
  omc_free(a, overwritten, g->n_outputs, sizeof *overwritten);
  return status;
}

/* Keeps the pointers to what is lent. */
static omc_status borrow(omc_run *run, void *const *lent) {
  const omc_plan *plan = run->exec->plan;
  const uint32_t n = plan->graph->n_inputs;
  if (!plan->lends_any) return OMC_OK;
  run->lent = omc_alloc_zero(run->exec->shared->allocator, n, sizeof *run->lent);
  if (!run->lent) OMC_FAIL(ENOMEM, "no memory for a run of %u inputs", n);
  for (uint32_t i = 0; i < n; i++) {
    if (!plan->lends[i]) continue;
    if (!lent || !lent[i]) OMC_FAIL(EINVALID, "input %u lends memory and it was not given", i);
    run->lent[i] = lent[i];
  }
  return OMC_OK;
}

static omc_status run_forward(omc_run *run, void *const *inputs, void *const *outputs) {
  omc_exec *x = run->exec;
  const omc_graph *g = x->plan->graph;
  omc_work *work;
  OMC_TRY(check_given(x, inputs, outputs));
  OMC_TRY(new_arena(x->plan, run->queue, &run->arena));
  OMC_TRY(start_work(x, &work));
  work->bases[0] = run->arena;
  set_bases(x, work, OMC_AT_INPUT, inputs, g->n_inputs);
  set_bases(x, work, OMC_AT_OUTPUT, outputs, g->n_outputs);
  set_bases(x, work, OMC_AT_LENT, run->lent, g->n_inputs);
  for (uint32_t k = 0; k < g->n_outputs; k++)
    if (omc_over(g, k))
      work->bases[omc_exec_base(x->plan, OMC_AT_OUTPUT, k)] = inputs[omc_over(g, k)->index];
  const omc_stretch whole = {OMC_FORWARD, NULL, 0, UINT32_MAX};
  const omc_status status = omc_exec_run(run, work, &whole, run->queue);
  finish_work(x, work);
  return status;
}

omc_status omc_run_forward(omc_plan *plan, void *const *inputs, void *const *outputs,
                           void *const *lent, uint64_t seed, void *queue, omc_run **out) {
  omc_exec *x = plan->attached;
  const bool joint = plan->graph->n_grads > 0;
  if (out) *out = NULL;
  if (!out && joint) OMC_FAIL(EINVALID, "a plan with a backward needs a place for its run");
  omc_run *run = omc_alloc_zero(x->shared->allocator, 1, sizeof *run);
  if (!run) OMC_FAIL(ENOMEM, "no memory for a run");
  run->exec = x;
  run->seed = seed;
  run->queue = run->home = queue;
  omc_status status = borrow(run, lent);
  if (status == OMC_OK) status = run_forward(run, inputs, outputs);
  if (status != OMC_OK || !joint) {
    free_run(run);
    return status;
  }
  omc_plan_retain(plan);
  atomic_fetch_add(&x->shared->runs_live, 1);
  *out = run;
  return OMC_OK;
}

/* Where a span is, in an arena and memory for gradients. */
static char *place_of(const omc_span *span, void *arena, void *const *lent) {
  return (char *)(span->lender == OMC_NO_LENDER ? arena : lent[span->lender]) + span->offset;
}

/* An arena, and memory for the gradients, with what is saved: from packed bytes or from where the
 * run has it. */
static omc_status copy_of_arena(const omc_run *run, const omc_backward *b, void **out) {
  const omc_plan *plan = run->exec->plan;
  const omc_provider *p = plan->provider;
  OMC_TRY(new_arena(plan, b->queue, out));
  const char *at = b->packed;
  omc_status status = OMC_OK;
  for (uint32_t i = 0; status == OMC_OK && i < plan->n_saved; i++) {
    const omc_span *span = &plan->saved[i];
    if (span->bytes == 0) continue;
    const char *from = b->packed ? at : place_of(span, run->arena, run->lent);
    status = p->copy(p->ctx, place_of(span, *out, b->results), from, span->bytes, b->queue);
    if (b->packed) at += span->bytes;
  }
  if (status != OMC_OK) {
    free_arena(plan, b->queue, *out);
    *out = NULL;
  }
  return status;
}

static omc_status follow(const omc_plan *plan, void *queue, void *other) {
  const omc_provider *p = plan->provider;
  return queue == other ? OMC_OK : p->order(p->ctx, queue, other);
}

/* Keeps backwards away from what forward saved, or says why there is nothing to pack. *before is
 * the queue that it is in. */
static omc_status claim(omc_run *run, void *queue, void **before) {
  omc_exec_lock();
  const bool packed = run->packed, gone = run->consumed || run->lent_is_gone, used = run->users > 0,
             may = !packed && !gone && !used;
  *before = run->queue;
  if (may) run->packed = true, run->queue = queue;
  omc_exec_unlock();
  if (packed) OMC_FAIL(EINVALID, "a run is packed once");
  if (used) OMC_FAIL(EINVALID, "a run is packed before any backward, and one is under way");
  if (gone)
    OMC_FAIL(EINVALID, "a run is packed before any backward, and one wrote over what was saved");
  return OMC_OK;
}

/* Copies in `queue`, which waits for `before`, and lets the queue that memory was lent for wait for
 * that: all that can fail. */
static omc_status copy_saved(const omc_run *run, char *at, void *queue) {
  const omc_plan *plan = run->exec->plan;
  const omc_provider *p = plan->provider;
  for (uint32_t i = 0; i < plan->n_saved; at += plan->saved[i++].bytes)
    OMC_TRY(p->copy(p->ctx, at, place_of(&plan->saved[i], run->arena, run->lent),
                    plan->saved[i].bytes, queue));
  return plan->lends_any ? follow(plan, run->home, queue) : OMC_OK;
}

omc_status omc_run_pack(omc_run *run, void *bytes, void *queue) {
  const omc_plan *plan = run->exec->plan;
  void *before;
  OMC_TRY(claim(run, queue, &before));
  const omc_status followed = follow(plan, queue, before);
  const omc_status status = followed == OMC_OK ? copy_saved(run, bytes, queue) : followed;
  void *const arena = run->arena;
  omc_exec_lock();
  if (status == OMC_OK)
    run->arena = NULL, run->lent_is_gone = true;
  else
    run->packed = false;
  if (followed != OMC_OK) run->queue = before; /* which nothing of this waits for */
  omc_exec_unlock();
  if (status == OMC_OK) free_arena(plan, queue, arena);
  return status;
}

static void undo_enter(omc_run *run, const omc_backward *b) {
  omc_exec_lock();
  run->users--;
  if (b->in_place) run->consumed = false;
  if (b->takes_lent) run->lent_is_gone = false;
  omc_exec_unlock();
}

/* Backward works where forward did if nobody else does and nobody will miss what it writes over,
 * else in a copy. What was lent it takes over in the queue for which that was made. */
omc_status omc_run_enter(omc_run *run, omc_backward *b) {
  const omc_plan *plan = run->exec->plan;
  const uint32_t n = omc_n_backwards(plan->graph);
  const bool consumes = plan->consumes, at_home = b->queue == run->home;
  b->in_place = b->takes_lent = false;
  b->step = 0, b->work = NULL, b->arena = NULL;
  if (b->number >= n) OMC_FAIL(EINVALID, "backward %u of a plan with %u", b->number, n);
  omc_exec_lock();
  const bool consumed = run->consumed,
             lacks_bytes = !b->packed && run->packed && plan->forward_bytes;
  void *const before = run->queue;
  if (!consumed && !lacks_bytes) {
    b->in_place = !run->packed && run->users == 0 &&
                  !(consumes && (b->keep || (plan->lends_any && !at_home)));
    b->takes_lent = b->in_place && plan->lends_any && at_home && !run->lent_is_gone;
    run->users++;
    run->consumed = b->in_place && consumes;
    run->lent_is_gone |= b->takes_lent;
    run->queue = b->queue;
  }
  omc_exec_unlock();
  if (lacks_bytes)
    OMC_FAIL(EINVALID, "backward needs the %zu bytes packed after forward", plan->forward_bytes);
  if (consumed)
    OMC_FAIL(ECONSUMED,
             "backward ran already and wrote over what forward had saved; it keeps that "
             "if it is told to, or if the plan retains");
  const omc_status status = follow(plan, b->queue, before);
  if (status != OMC_OK) { /* nothing was given to the queue: the run is as it was */
    undo_enter(run, b);
    omc_exec_lock();
    if (run->queue == b->queue) run->queue = before;
    omc_exec_unlock();
  }
  return status;
}

/* What was lent is what is given. */
static omc_status check_lent(const omc_run *run, const omc_backward *b) {
  const omc_plan *plan = run->exec->plan;
  for (uint32_t i = 0; b->takes_lent && i < plan->graph->n_inputs; i++)
    if (plan->lends[i] && b->results[i] != run->lent[i])
      OMC_FAIL(EINVALID, "the gradient of input %u goes elsewhere than what forward was lent", i);
  return OMC_OK;
}

/* Where the caller has what a stretch works with. */
static omc_status find(const omc_run *run, const omc_backward *b, const omc_stretch *stretch,
                       omc_work *work) {
  const omc_exec *x = run->exec;
  const omc_graph *g = x->plan->graph;
  set_bases(x, work, OMC_AT_INPUT, b->inputs, g->n_inputs);
  set_bases(x, work, OMC_AT_OUTPUT, b->outputs, g->n_outputs);
  set_bases(x, work, OMC_AT_GRAD, b->grads, g->n_outputs);
  set_bases(x, work, OMC_AT_RESULT, b->results, g->n_inputs);
  return omc_exec_check(x, work, stretch);
}

static omc_status begin(omc_run *run, omc_backward *b, const omc_stretch *first, omc_work *work) {
  OMC_TRY(find(run, b, first, work));
  OMC_TRY(check_lent(run, b));
  if (!b->in_place) OMC_TRY(copy_of_arena(run, b, &b->arena));
  work->bases[0] = b->in_place ? run->arena : b->arena;
  b->work = work;
  return OMC_OK;
}

/* The steps from where it is to before `end`, and the copies where those are the last. */
static omc_stretch stretch_to(const omc_plan *plan, const omc_backward *b, uint32_t end) {
  const omc_phase phase = OMC_BACKWARD + b->number;
  const omc_part *part = &plan->parts[phase];
  const bool is_last =
      end > part->end_step || (end == part->end_step && part->copy == part->end_copy);
  return (omc_stretch){phase, b->needed, b->work ? b->step : part->step,
                       is_last ? UINT32_MAX : end};
}

omc_status omc_run_advance(omc_run *run, omc_backward *b, uint32_t end) {
  omc_exec *x = run->exec;
  const omc_stretch stretch = stretch_to(x->plan, b, end);
  if (stretch.end <= stretch.begin) return OMC_OK;
  if (b->work) {
    OMC_TRY(find(run, b, &stretch, b->work));
  } else {
    omc_work *work;
    OMC_TRY(start_work(x, &work));
    const omc_status status = begin(run, b, &stretch, work);
    if (status != OMC_OK) {
      finish_work(x, work);
      return status;
    }
  }
  OMC_TRY(omc_exec_run(run, b->work, &stretch, b->queue));
  b->step = stretch.end;
  return OMC_OK;
}

/* The run's arena is freed in the queue that came last, and what is lent in its own: they wait for
 * this one too. */
omc_status omc_run_leave(omc_run *run, omc_backward *b) {
  omc_exec *x = run->exec;
  if (!b->work) {
    undo_enter(run, b);
    return OMC_OK;
  }
  free_arena(x->plan, b->queue, b->arena);
  finish_work(x, b->work);
  b->work = NULL;
  b->arena = NULL;
  omc_exec_lock();
  run->users--;
  void *const last = run->queue;
  omc_exec_unlock();
  OMC_TRY(follow(x->plan, last, b->queue));
  return x->plan->lends_any ? follow(x->plan, run->home, b->queue) : OMC_OK;
}

omc_status omc_run_backward(omc_run *run, omc_backward *b) {
  const omc_status status = omc_run_advance(run, b, UINT32_MAX);
  const omc_status left = omc_run_leave(run, b);
  return status == OMC_OK ? left : status;
}

const omc_plan *omc_run_plan(const omc_run *run) { return run->exec->plan; }

void omc_run_destroy(omc_run *run) {
  if (!run) return;
  omc_plan *plan = run->exec->plan;
  atomic_fetch_sub(&run->exec->shared->runs_live, 1);
  free_run(run);
  omc_plan_release(plan);
}
