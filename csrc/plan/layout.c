/* Offsets in the arena: a search over a few orders of placement, each block going to the lowest
 * gap between the blocks that are live with it, until the bound is reached. */
#include <stdlib.h>

#include "plan/plan.h"

/* Memory that one value and its aliases share, or the scratch memory of one step. */
typedef struct block {
  uint32_t begin, end;
  size_t bytes; /* a multiple of the provider's alignment */
  size_t offset;
} block;

typedef struct search {
  const size_t *live; /* bytes live at each step */
  block *blocks;
  uint32_t n;
  struct rank *ranks;  /* n: order of placement */
  uint32_t *by_offset; /* blocks placed so far, lowest first */
  size_t *best;        /* offsets of the best layout so far */
  size_t best_bytes;
} search;

/* Blocks are placed by descending `first`, then ascending `second`, then ascending number. */
typedef struct rank {
  size_t first, second;
  uint32_t block;
} rank;

static rank by_size(const search *s, uint32_t b) {
  return (rank){s->blocks[b].bytes, s->blocks[b].begin, b};
}

static rank by_begin(const search *s, uint32_t b) {
  return (rank){SIZE_MAX - s->blocks[b].begin, SIZE_MAX - s->blocks[b].bytes, b};
}

static rank by_end(const search *s, uint32_t b) {
  return (rank){s->blocks[b].end, SIZE_MAX - s->blocks[b].bytes, b};
}

/* Blocks that live where most is live come first. */
static rank by_breadth(const search *s, uint32_t b) {
  size_t widest = 0;
  for (uint32_t t = s->blocks[b].begin; t <= s->blocks[b].end; t++)
    if (s->live[t] > widest) widest = s->live[t];
  return (rank){widest, SIZE_MAX - s->blocks[b].bytes, b};
}

static rank (*const orders[])(const search *, uint32_t) = {by_size, by_breadth, by_end, by_begin};

static int compare_ranks(const void *left, const void *right) {
  const rank *a = left, *b = right;
  if (a->first != b->first) return a->first > b->first ? -1 : 1;
  if (a->second != b->second) return a->second < b->second ? -1 : 1;
  return a->block < b->block ? -1 : 1;
}

/* Puts block b, the n-th, into the lowest gap; returns where it ends. */
static size_t put(search *s, uint32_t n, uint32_t b) {
  block *x = &s->blocks[b];
  size_t offset = 0;
  for (uint32_t i = 0; i < n; i++) {
    const block *y = &s->blocks[s->by_offset[i]];
    if (y->end < x->begin || x->end < y->begin) continue;
    if (y->offset >= offset && y->offset - offset >= x->bytes) break;
    if (y->offset + y->bytes > offset) offset = y->offset + y->bytes;
  }
  x->offset = offset;
  uint32_t at = n;
  for (; at > 0 && s->blocks[s->by_offset[at - 1]].offset > offset; at--)
    s->by_offset[at] = s->by_offset[at - 1];
  s->by_offset[at] = b;
  return offset + x->bytes;
}

/* Places every block in the order of the ranks and keeps the layout if it is the best so far.
 * Returns the place in that order of the block that ends highest. */
static uint32_t try_order(search *s) {
  size_t bytes = 0;
  uint32_t top = 0;
  for (uint32_t i = 0; i < s->n; i++) {
    const size_t end = put(s, i, s->ranks[i].block);
    if (end > bytes) {
      bytes = end;
      top = i;
    }
  }
  if (bytes < s->best_bytes) {
    s->best_bytes = bytes;
    for (uint32_t b = 0; b < s->n; b++) s->best[b] = s->blocks[b].offset;
  }
  return top;
}

static bool is_near(const search *s, size_t bound) { return s->best_bytes - bound <= bound / 128; }

/* Tries one order; while the best layout is not near the bound, moves the block that ends highest
 * to the front and tries again. */
static void follow(search *s, size_t bound, rank (*order)(const search *, uint32_t), size_t tries) {
  for (uint32_t b = 0; b < s->n; b++) s->ranks[b] = order(s, b);
  qsort(s->ranks, s->n, sizeof *s->ranks, compare_ranks);
  uint32_t top = try_order(s);
  for (size_t i = 0; i < tries && !is_near(s, bound); i++) {
    const rank moved = s->ranks[top];
    for (; top > 0; top--) s->ranks[top] = s->ranks[top - 1];
    s->ranks[0] = moved;
    top = try_order(s);
  }
}

/* All orders as they are, then each with as many repairs as cost a millisecond or two. */
static void find_layout(search *s, size_t bound) {
  static const size_t n_orders = sizeof orders / sizeof *orders, most_tries = 32;
  const size_t pairs = (size_t)s->n * s->n + 1, afford = ((size_t)1 << 20) / pairs;
  s->best_bytes = SIZE_MAX;
  for (size_t o = 0; o < n_orders && s->best_bytes > bound; o++) follow(s, bound, orders[o], 0);
  for (size_t o = 0; o < n_orders && !is_near(s, bound); o++)
    follow(s, bound, orders[o], afford < most_tries ? afford : most_tries);
}

static uint32_t root_of(const omc_plan *plan, uint32_t v) {
  while (plan->slots[v].alias != v) v = plan->slots[v].alias;
  return v;
}

static bool in_arena(const omc_plan *plan, uint32_t v) {
  return plan->slots[v].place == OMC_AT_ARENA;
}

/* Fills one block for each value with memory of its own, then one for each step with scratch
 * memory. Value v belongs to block of[v]. */
static void fill_blocks(const omc_plan *plan, search *s, uint32_t *of) {
  const size_t alignment = plan->provider->alignment;
  for (uint32_t v = 0; v < plan->graph->n_values; v++) {
    const omc_slot *slot = &plan->slots[v];
    if (!in_arena(plan, v) || slot->alias != v) continue;
    of[v] = s->n;
    s->blocks[s->n++] = (block){slot->begin, slot->end, omc_round_up(slot->bytes, alignment), 0};
  }
  for (uint32_t v = 0; v < plan->graph->n_values; v++) {
    if (!in_arena(plan, v)) continue;
    of[v] = of[root_of(plan, v)];
    block *b = &s->blocks[of[v]];
    if (plan->slots[v].begin < b->begin) b->begin = plan->slots[v].begin;
    if (plan->slots[v].end > b->end) b->end = plan->slots[v].end;
  }
  for (uint32_t t = 0; t < plan->n_steps; t++)
    if (plan->steps[t].workspace_bytes)
      s->blocks[s->n++] = (block){t, t, omc_round_up(plan->steps[t].workspace_bytes, alignment), 0};
}

/* Sums the bytes live at each step; *bound is the most. */
static omc_status sum_live(const omc_plan *plan, const search *s, size_t *live, size_t *bound) {
  size_t total = 0;
  for (uint32_t b = 0; b < s->n; b++)
    if (!omc_add_size(total, s->blocks[b].bytes, &total))
      OMC_FAIL(ENOMEM, "the values of a plan are larger than memory can be");
  /* Differences from step to step wrap around, their sums do not. */
  for (uint32_t b = 0; b < s->n; b++) {
    live[s->blocks[b].begin] += s->blocks[b].bytes;
    live[s->blocks[b].end + 1] -= s->blocks[b].bytes;
  }
  *bound = 0;
  for (uint32_t t = 0; t < plan->n_steps; t++) {
    if (t > 0) live[t] += live[t - 1];
    if (live[t] > *bound) *bound = live[t];
  }
  return OMC_OK;
}

/* Whether a value or scratch memory of backward lies over a value that forward saved. */
static bool consumes_saved(const omc_plan *plan, const search *s, const uint32_t *of) {
  for (uint32_t v = 0; v < plan->graph->n_values; v++)
    if (in_arena(plan, v) && plan->slots[v].begin >= plan->n_forward &&
        s->blocks[of[v]].begin < plan->n_forward)
      return true;
  for (uint32_t i = 0; i < plan->n_saved; i++) {
    const omc_span *saved = &plan->saved[i];
    for (uint32_t j = 0; j < s->n; j++) {
      const block *x = &s->blocks[j];
      if (x->begin >= plan->n_forward && x->offset < saved->offset + saved->bytes &&
          saved->offset < x->offset + x->bytes)
        return true;
    }
  }
  return false;
}

/* Lists the blocks that hold something at the end of forward. */
static omc_status note_saved(omc_plan *plan, const search *s) {
  plan->saved = OMC_NEW_ARRAY(&plan->memory, omc_span, s->n);
  if (!plan->saved) OMC_FAIL(ENOMEM, "no memory to list what a plan saves");
  for (uint32_t b = 0; b < s->n; b++) {
    const block *x = &s->blocks[b];
    if (x->begin >= plan->n_forward || x->end < plan->n_forward) continue;
    plan->saved[plan->n_saved++] = (omc_span){x->offset, x->bytes};
    plan->forward_bytes += x->bytes;
  }
  return OMC_OK;
}

omc_status omc_plan_layout(omc_plan *plan, omc_arena *scratch) {
  const uint32_t most = plan->graph->n_values + plan->n_steps;
  uint32_t *of = OMC_NEW_ARRAY(scratch, uint32_t, plan->graph->n_values);
  size_t *live = OMC_NEW_ARRAY(scratch, size_t, plan->n_steps + 1);
  search s = {.live = live,
              .blocks = OMC_NEW_ARRAY(scratch, block, most),
              .ranks = OMC_NEW_ARRAY(scratch, rank, most),
              .by_offset = OMC_NEW_ARRAY(scratch, uint32_t, most),
              .best = OMC_NEW_ARRAY(scratch, size_t, most)};
  if (!of || !live || !s.blocks || !s.ranks || !s.by_offset || !s.best)
    OMC_FAIL(ENOMEM, "no memory to lay out %u values", plan->graph->n_values);

  fill_blocks(plan, &s, of);
  OMC_TRY(sum_live(plan, &s, live, &plan->bound_bytes));
  find_layout(&s, plan->bound_bytes);
  plan->arena_bytes = s.best_bytes;

  for (uint32_t b = 0; b < s.n; b++) s.blocks[b].offset = s.best[b];
  OMC_TRY(note_saved(plan, &s));
  for (uint32_t v = 0; v < plan->graph->n_values; v++)
    if (in_arena(plan, v)) plan->slots[v].offset = s.blocks[of[v]].offset;
  uint32_t scratch_block = s.n;
  for (uint32_t t = plan->n_steps; t-- > 0;)
    if (plan->steps[t].workspace_bytes)
      plan->steps[t].workspace_offset = s.blocks[--scratch_block].offset;
  plan->consumes = consumes_saved(plan, &s, of);
  return OMC_OK;
}
