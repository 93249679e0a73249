/* Lending: memory for the gradient of an input is asked for before forward, and holds other values
 * until the gradient is written. So a step of training needs no more than the larger of what is
 * live in the middle of it and of what it leaves, where it would need the sum. */
#include "plan/layout.h"

enum { LEAST_LENT = 4096 }; /* bytes of a gradient that is worth asking */

/* Memory for a gradient. */
typedef struct lender {
  uint32_t input;
  size_t bytes;
  const uint32_t *written; /* by backward: the step from which on it holds the gradient */
  uint32_t first;          /* of its blocks, lowest first; UINT32_MAX: none */
} lender;

typedef struct lending {
  const omc_plan *plan;
  omc_block *blocks;
  uint32_t *next; /* by block: in its lender */
  lender *lenders;
  uint32_t n_lenders, n_backwards;
} lending;

/* The step from which on backward `b` has the gradient of input i; false: it has none. One that is
 * copied comes after the last step, which other copies may need as it is. */
static bool find_written(const omc_plan *plan, uint32_t b, uint32_t i, uint32_t *written) {
  const omc_graph *g = plan->graph;
  const omc_value *v = omc_in(g->result, g->n_outputs + b * g->n_inputs + i);
  const omc_part *part = &plan->parts[OMC_BACKWARD + b];
  if (!v || part->step == part->end_step) return false;
  const omc_slot *slot = &plan->slots[v->id];
  const bool direct = slot->place == OMC_AT_RESULT && slot->index == i;
  *written = direct && slot->begin >= part->step ? slot->begin : part->end_step - 1;
  return true;
}

/* The inputs whose gradient every backward gives. */
static omc_status find_lenders(lending *l, omc_arena *scratch) {
  const omc_plan *plan = l->plan;
  const omc_graph *g = plan->graph;
  l->n_backwards = omc_n_backwards(g);
  l->lenders = OMC_NEW_ARRAY(scratch, lender, g->n_inputs);
  uint32_t *written = OMC_NEW_ARRAY(scratch, uint32_t, (size_t)g->n_inputs * l->n_backwards);
  if (!l->lenders || !written) OMC_FAIL(ENOMEM, "no memory to find what gradients can lend");
  for (uint32_t i = 0; l->n_backwards && i < g->n_inputs; i++, written += l->n_backwards) {
    bool always = true;
    for (uint32_t b = 0; b < l->n_backwards; b++) always &= find_written(plan, b, i, &written[b]);
    if (!always) continue;
    const size_t bytes = plan->slots[omc_in(g->result, g->n_outputs + i)->id].bytes;
    if (bytes >= LEAST_LENT) l->lenders[l->n_lenders++] = (lender){i, bytes, written, UINT32_MAX};
  }
  return OMC_OK;
}

/* Whether the block is gone by the time that the gradient is there. */
static bool in_time(const lending *l, const lender *from, const omc_block *x) {
  for (uint32_t b = 0; b < l->n_backwards; b++)
    if (x->end >= from->written[b] && x->begin < l->plan->parts[OMC_BACKWARD + b].end_step)
      return false;
  return true;
}

/* The lowest gap for the block, and after which of the lender's blocks that is in the list. */
static bool find_gap(const lending *l, const lender *from, const omc_block *x, size_t *offset,
                     uint32_t *after) {
  *offset = 0;
  for (uint32_t b = from->first; b != UINT32_MAX; b = l->next[b]) {
    const omc_block *y = &l->blocks[b];
    if (y->end < x->begin || x->end < y->begin) continue;
    if (y->offset >= *offset && y->offset - *offset >= x->bytes) break;
    if (y->offset + y->bytes > *offset) *offset = y->offset + y->bytes;
  }
  *after = UINT32_MAX;
  for (uint32_t b = from->first; b != UINT32_MAX && l->blocks[b].offset <= *offset; b = l->next[b])
    *after = b;
  return *offset <= from->bytes && x->bytes <= from->bytes - *offset;
}

/* Puts the block where least is left above it. */
static bool lend(lending *l, uint32_t block) {
  omc_block *x = &l->blocks[block];
  lender *best = NULL;
  size_t least = SIZE_MAX;
  uint32_t best_after = UINT32_MAX;
  for (uint32_t i = 0; i < l->n_lenders; i++) {
    lender *from = &l->lenders[i];
    size_t offset;
    uint32_t after;
    if (x->bytes > from->bytes || !in_time(l, from, x) || !find_gap(l, from, x, &offset, &after))
      continue;
    if (from->bytes - offset - x->bytes >= least) continue;
    least = from->bytes - offset - x->bytes;
    best = from, best_after = after, x->offset = offset;
  }
  if (!best) return false;
  x->lender = best->input;
  uint32_t *link = best_after == UINT32_MAX ? &best->first : &l->next[best_after];
  l->next[block] = *link;
  *link = block;
  return true;
}

static uint32_t peak_of(const size_t *live, uint32_t n_steps) {
  uint32_t peak = 0;
  for (uint32_t s = 1; s < n_steps; s++)
    if (live[s] > live[peak]) peak = s;
  return peak;
}

/* What is needed longest finds the fewest lenders, and is asked for first. What finds no room will
 * not find any later. */
omc_status omc_plan_lend(omc_plan *plan, omc_block *blocks, uint32_t n, size_t *live,
                         omc_arena *scratch) {
  lending l = {.plan = plan, .blocks = blocks, .next = OMC_NEW_ARRAY(scratch, uint32_t, n)};
  omc_rank *left = OMC_NEW_ARRAY(scratch, omc_rank, n);
  plan->lends = OMC_NEW_ARRAY(&plan->memory, bool, plan->graph->n_inputs);
  if (!l.next || !left || !plan->lends) OMC_FAIL(ENOMEM, "no memory to lend that of gradients");
  OMC_TRY(find_lenders(&l, scratch));
  for (uint32_t b = 0; b < n; b++)
    left[b] = (omc_rank){blocks[b].end, SIZE_MAX - blocks[b].bytes, b};
  omc_sort_ranks(left, n);
  while (l.n_lenders && n) {
    const uint32_t peak = peak_of(live, plan->n_steps);
    uint32_t i = 0;
    while (i < n && (blocks[left[i].block].begin > peak || blocks[left[i].block].end < peak)) i++;
    if (i == n) break;
    const uint32_t block = left[i].block;
    for (n--; i < n; i++) left[i] = left[i + 1];
    const omc_block *x = &blocks[block];
    if (!lend(&l, block)) continue;
    plan->lends[x->lender] = plan->lends_any = true;
    for (uint32_t s = x->begin; s <= x->end; s++) live[s] -= x->bytes;
  }
  for (uint32_t i = 0; i < l.n_lenders; i++)
    if (plan->lends[l.lenders[i].input]) plan->lent_bytes += l.lenders[i].bytes;
  return OMC_OK;
}
