#include "cpu/update.h"

#include <math.h>

#include "base/arena.h"
#include "base/int.h"
#include "cpu/parallel.h"

#define DECLARE(name) extern const omc_updates name;
OMC_VARIANT_DECLARE(floats, DECLARE, omc_updates)

static const omc_updates *pick(omc_dtype dtype) {
  static const omc_updates *const table[OMC_N_DTYPE][OMC_N_ISA] = {
      OMC_VARIANT_TABLE(floats, omc_updates)};
  const omc_updates *best = NULL;
  OMC_PICK_ISA(best, table[dtype])
  return best;
}

/* All tensors as one row of blocks, which threads share. */
typedef struct {
  const omc_optim_step *step;
  int64_t *first;    /* block of each tensor, and the number of all of them */
  double (*sums)[2]; /* room for those of each block */
  double (*out)[2];  /* the same while a kernel sums, else NULL */
  double *length;    /* of each tensor's step, for LAMB_APPLY */
  double scale, clip;
  int kernel, threads;
} row;

static uint32_t tensor_of(const row *r, int64_t block) {
  uint32_t low = 0, high = r->step->n;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    if (r->first[middle] <= block)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/* Sums are of one block each; all else is done a tensor at a time. */
static void run_blocks(omc_range range, void *ctx) {
  const row *r = ctx;
  int64_t block = range.begin;
  for (uint32_t index = tensor_of(r, block); block < range.end; index++) {
    const omc_optim_tensor *t = &r->step->tensors[index];
    const omc_updates *updates = pick(t->dtype);
    const int64_t last = omc_min(r->first[index + 1], range.end);
    while (block < last) {
      const int64_t next = r->out ? block + 1 : last, begin = block - r->first[index];
      omc_update_part part = {
          .step = r->step,
          .index = index,
          .begin = begin * OMC_UPDATE_BLOCK,
          .end = omc_min((next - r->first[index]) * OMC_UPDATE_BLOCK, t->n),
          .scale = r->scale,
          .clip = r->clip,
          .length = r->length[index],
      };
      updates->fn[r->kernel](&part);
      if (r->out) r->out[block][0] = part.out[0], r->out[block][1] = part.out[1];
      block = next;
    }
  }
}

static void run(row *r, int kernel) {
  r->kernel = kernel;
  omc_parallel_for(r->first[r->step->n], 1, r->threads, run_blocks, r);
}

/* The norm of all gradients, of what was summed of each block. */
static double norm_of(row *r) {
  const bool most = isinf(r->step->norm_type);
  run(r, most ? OMC_UPDATE_LARGEST : OMC_UPDATE_SQUARES);
  double all = 0;
  for (int64_t b = 0; b < r->first[r->step->n]; b++) {
    const double of = r->out[b][0];
    if (!most)
      all += of;
    else if (of > all || isnan(of))
      all = isnan(all) ? all : of;
  }
  return (most ? all : sqrt(all)) / r->scale;
}

static void adam(row *r) { run(r, OMC_UPDATE_ADAM); }

static void sgd(row *r) { run(r, OMC_UPDATE_SGD); }

static void scale(row *r) {
  if (r->clip != 1) run(r, OMC_UPDATE_SCALE);
}

/* The step of each tensor has its length once all of the tensor is known. */
static void lamb(row *r) {
  r->out = r->sums;
  run(r, OMC_UPDATE_LAMB_MOMENTS);
  r->out = NULL;
  for (uint32_t i = 0; i < r->step->n; i++) {
    const omc_optim_numbers *numbers = r->step->tensors[i].numbers;
    double p = 0, step = 0;
    for (int64_t b = r->first[i]; b < r->first[i + 1]; b++)
      p += r->sums[b][0], step += r->sums[b][1];
    r->length[i] = omc_lamb_length(numbers, p, step);
  }
  run(r, OMC_UPDATE_LAMB_APPLY);
}

static void (*const rules[OMC_N_RULE])(row *) = {
    [OMC_RULE_ADAM] = adam,
    [OMC_RULE_SGD] = sgd,
    [OMC_RULE_LAMB] = lamb,
    [OMC_RULE_SCALE] = scale,
};

static omc_status lay_out(row *r, omc_arena *arena) {
  const omc_optim_step *step = r->step;
  r->first = OMC_NEW_ARRAY(arena, int64_t, (size_t)step->n + 1);
  r->length = OMC_NEW_ARRAY(arena, double, (size_t)step->n + 1);
  if (!r->first || !r->length) OMC_FAIL(ENOMEM, "for a step of %u tensors", step->n);
  for (uint32_t i = 0; i < step->n; i++)
    r->first[i + 1] = r->first[i] + omc_ceil_div(step->tensors[i].n, OMC_UPDATE_BLOCK);
  const size_t blocks = (size_t)r->first[step->n];
  r->sums = omc_arena_alloc(arena, blocks + 1, sizeof *r->sums);
  if (!r->sums) OMC_FAIL(ENOMEM, "for the sums of %zu blocks", blocks);
  return OMC_OK;
}

static omc_status take_step(row *r, omc_arena *arena) {
  const omc_optim_step *step = r->step;
  OMC_TRY(lay_out(r, arena));
  bool overlap;
  OMC_TRY(omc_optim_overlap(step, arena, &overlap));
  r->threads = overlap ? 1 : omc_cpu_threads();
  if (step->clips || step->norm) {
    r->out = r->sums;
    const double norm = norm_of(r);
    r->out = NULL;
    if (step->clips) r->clip = omc_clip_coefficient(norm, step->max_norm);
    if (step->norm) *step->norm = norm;
  }
  if (step->found_inf && *step->found_inf != 0) return OMC_OK;
  for (uint32_t i = 0; i < step->n; i++)
    if (step->tensors[i].step) *step->tensors[i].step += 1;
  rules[step->rule](r);
  return OMC_OK;
}

omc_status omc_cpu_step(void *ctx, const omc_optim_step *step, void *queue) {
  (void)ctx, (void)queue;
  omc_arena arena;
  omc_arena_init(&arena, omc_default_allocator());
  row r = {.step = step, .scale = step->grad_scale ? *step->grad_scale : 1, .clip = 1};
  const omc_status status = take_step(&r, &arena);
  omc_arena_deinit(&arena);
  return status;
}
