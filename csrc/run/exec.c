#include "run/exec.h"

#include <stdatomic.h>

#include "base/env.h"
#include "base/lock.h"

OMC_PROCESS_LOCK(tables)
void omc_exec_lock(void) { tables_acquire(); }
void omc_exec_unlock(void) { tables_release(); }

uint32_t omc_exec_base(const omc_plan *plan, omc_place place, uint32_t index) {
  const uint32_t inputs = plan->graph->n_inputs, outputs = plan->graph->n_outputs;
  const uint32_t first[] = {[OMC_AT_ARENA] = 0,
                            [OMC_AT_INPUT] = 1,
                            [OMC_AT_GRAD] = 1 + inputs,
                            [OMC_AT_OUTPUT] = 1 + inputs + outputs,
                            [OMC_AT_RESULT] = 1 + inputs + 2 * outputs,
                            [OMC_AT_LENT] = 1 + inputs + 2 * outputs};
  return first[place] + index;
}

/* The elements of a constant, or of a view of one, where kernels find them. */
static omc_status find_constant(const omc_exec *x, const omc_value *v, size_t bytes, void **out) {
  while (v->role == OMC_ROLE_NODE) v = omc_in(v->producer, 0);
  return omc_constants_upload(&x->shared->constants, v->data, bytes, out);
}

/* Where what takes no memory is on the host, as functions of C take no NULL. */
static void *nowhere(const omc_plan *plan) {
  static _Alignas(64) char bytes[64];
  return plan->provider == omc_provider_host() ? bytes : NULL;
}

/* Sets what is the same in every run; data of the arena and the caller is found by each run. */
static omc_status add_operand(omc_exec *x, uint32_t operand, const omc_value *v) {
  if (!v) return OMC_OK;
  const omc_slot *slot = &x->plan->slots[v->id];
  x->operands[operand].type = &v->type;
  if (slot->bytes == 0) {
    x->operands[operand].data = nowhere(x->plan);
    return OMC_OK;
  }
  if (slot->place == OMC_AT_CONST)
    return find_constant(x, v, slot->bytes, &x->operands[operand].data);
  x->relocs[x->n_relocs++] =
      (omc_reloc){operand, omc_exec_base(x->plan, slot->place, slot->index), slot->offset};
  return OMC_OK;
}

static uint32_t result_base(const omc_plan *plan, uint32_t r) {
  const uint32_t outputs = plan->graph->n_outputs;
  if (r < outputs) return omc_exec_base(plan, OMC_AT_OUTPUT, r);
  return omc_exec_base(plan, OMC_AT_RESULT, (r - outputs) % plan->graph->n_inputs);
}

static bool calls_back(const omc_plan *plan, uint32_t s) {
  return plan->steps[s].op->flags & OMC_OP_CALLBACK;
}

static uint32_t first_reloc(const omc_exec *x, omc_phase phase) {
  return phase == OMC_FORWARD ? 0 : x->tracks[phase - 1].end_reloc;
}

/* Once its operands are known. */
static omc_status add_track(omc_exec *x, omc_phase phase) {
  omc_plan *plan = x->plan;
  const omc_part *part = &plan->parts[phase];
  omc_track *t = &x->tracks[phase];
  t->end_reloc = x->n_relocs;
  t->recurs = !x->times && !omc_env_get()->sync;
  t->uses = OMC_NEW_ARRAY(&plan->memory, bool, x->n_bases);
  if (!t->uses) OMC_FAIL(ENOMEM, "no memory for the tables of a plan of %u steps", plan->n_steps);
  t->uses[omc_exec_base(plan, OMC_AT_ARENA, 0)] = true;
  for (uint32_t r = first_reloc(x, phase); r < t->end_reloc; r++) t->uses[x->relocs[r].base] = true;
  for (uint32_t copy = part->copy; copy < part->end_copy; copy++)
    t->uses[result_base(plan, plan->copies[copy].to)] = true;
  for (uint32_t step = part->step; step < part->end_step; step++)
    t->recurs = t->recurs && !calls_back(plan, step) && !plan->steps[step].varies;
  return OMC_OK;
}

static omc_status add_phase(omc_exec *x, omc_phase phase) {
  const omc_plan *plan = x->plan;
  const omc_part *part = &plan->parts[phase];
  for (uint32_t step = part->step; step < part->end_step; step++) {
    const omc_node *node = plan->steps[step].node;
    const uint32_t first = x->first_operand[step];
    for (uint32_t i = 0; i < node->n_in; i++) OMC_TRY(add_operand(x, first + i, omc_in(node, i)));
    for (uint32_t k = 0; k < node->n_out; k++)
      OMC_TRY(add_operand(x, first + node->n_in + k, omc_out(node, k)));
    x->end_reloc[step] = x->n_relocs;
  }
  for (uint32_t copy = part->copy; copy < part->end_copy; copy++)
    OMC_TRY(add_operand(x, x->first_operand[plan->n_steps] + copy,
                        omc_in(plan->graph->result, plan->copies[copy].to)));
  return add_track(x, phase);
}

static omc_status fill(omc_exec *x, omc_plan *plan) {
  x->first_operand = OMC_NEW_ARRAY(&plan->memory, uint32_t, plan->n_steps + 1);
  if (!x->first_operand) goto no_memory;
  for (uint32_t s = 0; s < plan->n_steps; s++)
    x->first_operand[s + 1] = x->first_operand[s] + plan->steps[s].n_in + plan->steps[s].n_out;
  x->n_operands = x->first_operand[plan->n_steps] + plan->n_copies;
  x->n_bases = omc_exec_base(plan, OMC_AT_RESULT, plan->graph->n_inputs);
  x->operands = OMC_NEW_ARRAY(&plan->memory, omc_tensor, x->n_operands);
  x->relocs = OMC_NEW_ARRAY(&plan->memory, omc_reloc, x->n_operands);
  x->tracks = OMC_NEW_ARRAY(&plan->memory, omc_track, plan->n_phases);
  x->end_reloc = OMC_NEW_ARRAY(&plan->memory, uint32_t, plan->n_steps);
  x->jobs = OMC_NEW_ARRAY(&plan->memory, uint32_t, 2 * (size_t)plan->n_steps);
  if (!x->operands || !x->relocs || !x->tracks || !x->end_reloc || !x->jobs) goto no_memory;
  if (omc_env_get()->profile) {
    x->times = OMC_NEW_ARRAY(&plan->memory, omc_step_time, plan->n_steps);
    if (!x->times) goto no_memory;
  }
  for (omc_phase p = 0; p < plan->n_phases; p++) OMC_TRY(add_phase(x, p));
  return OMC_OK;
no_memory:
  OMC_FAIL(ENOMEM, "no memory for the tables of a plan of %u steps", plan->n_steps);
}

/* What the device has still to do may read constants and parameters. */
static omc_status detach(void *attached) {
  omc_exec *x = attached;
  const omc_provider *p = x->plan->provider;
  if (p->sync_all) OMC_TRY(p->sync_all(p->ctx));
  for (omc_phase phase = 0; phase < x->plan->n_phases; phase++)
    if (x->tracks[phase].notes) p->forget(p->ctx, x->tracks[phase].notes);
  omc_work_free(x, x->idle);
  omc_constants_drop(&x->constants);
  omc_shared_release(x->shared);
  return OMC_OK;
}

omc_status omc_exec_attach(omc_plan *plan, omc_shared *shared,
                           const omc_constants_taken *constants) {
  omc_exec *x = OMC_NEW(&plan->memory, omc_exec);
  if (!x) OMC_FAIL(ENOMEM, "no memory for the tables of a plan of %u steps", plan->n_steps);
  x->plan = plan;
  x->shared = shared;
  OMC_TRY(fill(x, plan));
  omc_shared_retain(shared);
  x->constants = *constants;
  plan->attached = x;
  plan->detach = detach;
  return OMC_OK;
}

const omc_step_time *omc_plan_profile(const omc_plan *plan) {
  const omc_exec *x = plan->attached;
  return x ? x->times : NULL;
}

static omc_status missing(const omc_plan *plan, uint32_t base) {
  static const struct {
    omc_place place;
    const char *what;
  } kinds[] = {{OMC_AT_RESULT, "memory for the gradient of input"},
               {OMC_AT_OUTPUT, "memory of output"},
               {OMC_AT_GRAD, "gradient of output"},
               {OMC_AT_INPUT, "input"}};
  for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
    const uint32_t first = omc_exec_base(plan, kinds[k].place, 0);
    if (base >= first)
      OMC_FAIL(EINVALID, "%s %u is needed and was not given", kinds[k].what, base - first);
  }
  OMC_FAIL(EINTERNAL, "a plan without an arena uses it");
}

/* The relocations of a stretch: from *begin to before the result. */
static uint32_t relocs_of(const omc_exec *x, const omc_stretch *stretch, uint32_t *begin) {
  const omc_part *part = &x->plan->parts[stretch->phase];
  const bool begins = stretch->begin <= part->step, ends = stretch->end == UINT32_MAX;
  *begin = begins ? first_reloc(x, stretch->phase) : x->end_reloc[stretch->begin - 1];
  return ends ? x->tracks[stretch->phase].end_reloc : x->end_reloc[stretch->end - 1];
}

omc_status omc_exec_check(const omc_exec *x, const omc_work *work, const omc_stretch *stretch) {
  const uint32_t arena = omc_exec_base(x->plan, OMC_AT_ARENA, 0);
  uint32_t r;
  const uint32_t end = relocs_of(x, stretch, &r);
  for (; r < end; r++) {
    const uint32_t base = x->relocs[r].base;
    if (base != arena && !work->bases[base]) return missing(x->plan, base);
  }
  return OMC_OK;
}

static omc_status resolve(const omc_exec *x, omc_work *work, const omc_stretch *stretch) {
  uint32_t i;
  const uint32_t end = relocs_of(x, stretch, &i);
  for (; i < end; i++) {
    const omc_reloc *r = &x->relocs[i];
    char *base = work->bases[r->base];
    if (!base) return missing(x->plan, r->base);
    work->operands[r->operand].data = base + r->offset;
  }
  return OMC_OK;
}

/* ---- failures of the device, which may be told late ---- */

/* Steps begin .. end-1 of a plan at work. */
typedef struct steps {
  omc_kernel_args *args;
  omc_exec *x;
  const omc_work *work;
  const bool *needed; /* by step; NULL: all are */
  uint32_t begin, end;
  omc_status status;
} steps;

/* Whether a kernel has found what it was given to be wrong. */
static bool is_of_values(omc_status status) {
  return status == OMC_EINDEX || status == OMC_EBOUNDS || status == OMC_EDIVISION ||
         status == OMC_EDOMAIN;
}

/* What a step has failed in that was given, which is waited for, or that could not be given. Of
 * values it is the device's word: PyTorch, which tells of them on the host, looks at none there. */
static omc_status with_node(const steps *these, const omc_step *step, omc_status status) {
  const omc_provider *p = these->x->plan->provider;
  char node[OMC_NODE_TEXT];
  omc_node_text(step->node, node, sizeof node);
  if (status == OMC_OK) {
    const omc_status done = p->sync(p->ctx, these->args->queue);
    if (done == OMC_OK) return OMC_OK;
    return omc_fail(is_of_values(done) ? OMC_EDEVICE : done, "%s: %s", node, omc_status_detail());
  }
  if (status != OMC_EDEVICE) return status;
  if (omc_env_get()->sync) return omc_fail(status, "%s: %s", node, omc_status_detail());
  OMC_FAIL(EDEVICE, "noticed at %s, perhaps of an earlier step (OMC_SYNC=1 tells which): %s", node,
           omc_status_detail());
}

static omc_status run_step(const steps *these, uint32_t s) {
  const omc_exec *x = these->x;
  const omc_work *work = these->work;
  const omc_step *step = &x->plan->steps[s];
  omc_kernel_args *args = these->args;
  args->in = work->operands + x->first_operand[s];
  args->out = args->in + step->n_in;
  args->n_in = step->n_in;
  args->n_out = step->n_out;
  args->params = step->params;
  args->workspace =
      step->workspace_bytes ? (char *)work->bases[0] + step->workspace_offset : nowhere(x->plan);
  args->node = omc_node_name(step->node);
  const omc_status status = step->kernel(args);
  return status == OMC_EDEVICE || omc_env_get()->sync ? with_node(these, step, status) : status;
}

static omc_status time_step(const steps *these, uint32_t s) {
  const omc_provider *p = these->x->plan->provider;
  const double start = p->clock(p->ctx, these->args->queue);
  OMC_TRY(run_step(these, s));
  const double seconds = p->clock(p->ctx, these->args->queue) - start;
  omc_exec_lock();
  these->x->times[s].seconds += seconds;
  these->x->times[s].runs++;
  omc_exec_unlock();
  return OMC_OK;
}

static void run_these(void *arg) {
  steps *these = arg;
  omc_status (*const run)(const steps *, uint32_t) = these->x->times ? time_step : run_step;
  these->status = OMC_OK;
  for (uint32_t s = these->begin; these->status == OMC_OK && s < these->end; s++)
    if (!these->needed || these->needed[s]) these->status = run(these, s);
}

/* What the device learns of steps begin .. end-1, which it holds its threads for. */
static uint32_t *jobs_of(omc_exec *x, const omc_part *part, uint32_t begin, uint32_t end) {
  const bool begins = begin == part->step || calls_back(x->plan, begin - 1);
  const bool ends = end == part->end_step || calls_back(x->plan, end);
  return &x->jobs[begins && ends ? begin : x->plan->n_steps + end - 1];
}

/* The device's threads are held from one step that calls back to the next: those are for torch. */
static omc_status run_steps(omc_kernel_args *args, omc_exec *x, const omc_work *work,
                            const omc_stretch *stretch) {
  const omc_provider *p = x->plan->provider;
  const omc_part *part = &x->plan->parts[stretch->phase];
  const uint32_t last = stretch->end < part->end_step ? stretch->end : part->end_step;
  uint32_t begin = stretch->begin > part->step ? stretch->begin : part->step;
  for (uint32_t end; begin < last; begin = end) {
    const bool alone = calls_back(x->plan, begin);
    end = begin + 1;
    while (!alone && end < last && !calls_back(x->plan, end)) end++;
    steps these = {args, x, work, stretch->needed, begin, end, OMC_OK};
    if (alone || !p->hold)
      run_these(&these);
    else
      p->hold(p->ctx, args->threads, jobs_of(x, part, begin, end), run_these, &these);
    OMC_TRY(these.status);
  }
  return OMC_OK;
}

static omc_status run_copies(const omc_exec *x, const omc_work *work, const omc_stretch *stretch,
                             void *queue) {
  const omc_plan *plan = x->plan;
  const omc_provider *p = plan->provider;
  const omc_part *part = &plan->parts[stretch->phase];
  for (uint32_t c = part->copy; c < part->end_copy; c++) {
    const omc_tensor *from = &work->operands[x->first_operand[plan->n_steps] + c];
    const size_t bytes = plan->slots[plan->copies[c].from].bytes;
    if (bytes == 0 || (stretch->needed && !stretch->needed[plan->n_steps + c])) continue;
    const uint32_t base = result_base(plan, plan->copies[c].to);
    if (!work->bases[base]) return missing(plan, base);
    OMC_TRY(p->copy(p->ctx, work->bases[base], from->data, bytes, queue));
  }
  return OMC_OK;
}

/* A stretch of a run, with its operands where they are. */
typedef struct stretch_of {
  omc_run *run;
  const omc_work *work;
  omc_stretch stretch;
} stretch_of;

static omc_status give_stretch(void *arg, const uint64_t *seed_at, void *queue) {
  const stretch_of *these = arg;
  omc_run *run = these->run;
  omc_exec *x = run->exec;
  const omc_plan *plan = x->plan;
  const int threads = plan->provider->threads(plan->provider->ctx);
  omc_kernel_args args = {.threads = threads < plan->threads ? threads : plan->threads,
                          .seed = run->seed,
                          .seed_at = seed_at,
                          .callbacks = omc_shared_callbacks(x->shared),
                          .run = &run->callback_state,
                          .queue = queue};
  OMC_TRY(run_steps(&args, x, these->work, &these->stretch));
  if (these->stretch.end < UINT32_MAX) return OMC_OK;
  return run_copies(x, these->work, &these->stretch, queue);
}

/* What recurs is a phase as a whole. */
omc_status omc_exec_run(omc_run *run, omc_work *work, const omc_stretch *stretch, void *queue) {
  omc_exec *x = run->exec;
  const omc_plan *plan = x->plan;
  const omc_provider *p = plan->provider;
  omc_track *track = &x->tracks[stretch->phase];
  stretch_of these = {run, work, *stretch};
  bool replayed = false;
  OMC_TRY(omc_provider_told(p));
  OMC_TRY(resolve(x, work, stretch));
  if (!p->give) return give_stretch(&these, NULL, queue);
  const bool whole =
      stretch->begin <= plan->parts[stretch->phase].step && stretch->end == UINT32_MAX;
  if (whole) these.stretch.needed = NULL;
  for (uint32_t b = 0; b < x->n_bases; b++) work->used[b] = track->uses[b] ? work->bases[b] : NULL;
  const omc_recurring again = {.give = give_stretch,
                               .arg = &these,
                               .tensors = work->used,
                               .n_tensors = x->n_bases,
                               .recurs = track->recurs && whole,
                               .random = plan->random,
                               .seed = run->seed};
  OMC_TRY(p->give(p->ctx, &again, queue, &track->notes, &replayed));
  if (replayed) atomic_fetch_add_explicit(&x->shared->replays, 1, memory_order_relaxed);
  return OMC_OK;
}
