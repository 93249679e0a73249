/* Offsets in the arena, of what is not lent memory: a search over a few orders of placement, each
 * block going to the lowest gap between the blocks that are live with it, until the bound is
 * reached. */
#include "plan/layout.h"

#include <stdlib.h>
#include <string.h>

typedef omc_block block;
typedef omc_rank rank;

/* Where a block is, for how long. */
typedef struct placed {
  uint32_t begin, end;
  size_t bottom, top;
} placed;

/* Steps are divided into spans of 32, these into spans of 32 spans, and so on until one has them
 * all. A block belongs to the narrowest span that has all its steps, so that few are looked at of
 * those that are never live with it. */
enum { SPAN_BITS = 5, MOST_LEVELS = 7 };

/* The blocks of a span placed so far, lowest first. */
typedef struct span {
  placed *first;
  uint32_t n;
} span;

typedef struct search {
  const size_t *live; /* bytes live in the arena at each step */
  block *blocks;
  uint32_t n;
  rank *ranks;                /* order of placement, */
  uint32_t n_ranks;           /* of so many */
  span *levels[MOST_LEVELS];  /* by level: its spans */
  uint32_t n_levels, n_spans; /* of all levels, which follow each other */
  size_t *best;               /* offsets of the best layout so far */
  size_t best_bytes;
} search;

static rank by_size(const search *s, uint32_t b) {
  return (rank){s->blocks[b].bytes, s->blocks[b].begin, b};
}

static rank by_begin(const search *s, uint32_t b) {
  return (rank){SIZE_MAX - s->blocks[b].begin, SIZE_MAX - s->blocks[b].bytes, b};
}

static rank by_end(const search *s, uint32_t b) {
  return (rank){s->blocks[b].end, SIZE_MAX - s->blocks[b].bytes, b};
}

/* The most that is live while a block is. */
static size_t breadth(const search *s, uint32_t b) {
  size_t most = 0;
  for (uint32_t t = s->blocks[b].begin; t <= s->blocks[b].end; t++)
    if (s->live[t] > most) most = s->live[t];
  return most;
}

/* Blocks that live where most is live come first, of these the largest, or those that come last. */
static rank by_breadth(const search *s, uint32_t b) {
  return (rank){breadth(s, b), SIZE_MAX - s->blocks[b].bytes, b};
}
static rank by_late_breadth(const search *s, uint32_t b) {
  return (rank){breadth(s, b), SIZE_MAX - s->blocks[b].begin, b};
}

static rank (*const orders[])(const search *, uint32_t) = {by_size, by_breadth, by_late_breadth,
                                                           by_end, by_begin};

static int compare_ranks(const void *left, const void *right) {
  const rank *a = left, *b = right;
  if (a->first != b->first) return a->first > b->first ? -1 : 1;
  if (a->second != b->second) return a->second < b->second ? -1 : 1;
  return a->block < b->block ? -1 : 1;
}

void omc_sort_ranks(rank *ranks, uint32_t n) { qsort(ranks, n, sizeof *ranks, compare_ranks); }

static uint32_t span_at(uint32_t level, uint32_t step) {
  return (uint32_t)((uint64_t)step >> SPAN_BITS * (level + 1));
}

/* The span that a block belongs to. */
static span *span_of(const search *s, const block *x) {
  uint32_t level = 0;
  while (span_at(level, x->begin) != span_at(level, x->end)) level++;
  return &s->levels[level][span_at(level, x->begin)];
}

/* The first of a span's blocks that lies above an offset. */
static uint32_t first_above(const span *in, size_t offset) {
  uint32_t low = 0, high = in->n;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if (in->first[middle].bottom > offset)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

/* The lowest offset from one on that is clear of the span's blocks. */
static size_t above(const span *in, const block *x, size_t offset) {
  const uint32_t begin = x->begin, end = x->end;
  const size_t bytes = x->bytes;
  for (const placed *y = in->first; y < in->first + in->n; y++) {
    if (y->top <= offset || y->end < begin || end < y->begin) continue;
    if (y->bottom >= offset && y->bottom - offset >= bytes) break;
    offset = y->top;
  }
  return offset;
}

/* The lowest gap: what one span's blocks move up, those of another may move further. */
static size_t lowest_gap(const search *s, const block *x) {
  size_t offset = 0, before;
  do {
    before = offset;
    for (uint32_t level = 0; level < s->n_levels; level++)
      for (uint32_t i = span_at(level, x->begin); i <= span_at(level, x->end); i++)
        offset = above(&s->levels[level][i], x, offset);
  } while (offset != before);
  return offset;
}

/* Puts a block into the lowest gap; returns where it ends. */
static size_t put(const search *s, block *x) {
  span *const in = span_of(s, x);
  x->offset = lowest_gap(s, x);
  placed *const at = in->first + first_above(in, x->offset);
  memmove(at + 1, at, (size_t)(in->first + in->n++ - at) * sizeof *at);
  *at = (placed){x->begin, x->end, x->offset, x->offset + x->bytes};
  return at->top;
}

/* Places every block in the order of the ranks and keeps the layout if it is the best so far; gives
 * up where it has `enough` bytes. Returns the place in that order of the block that ends highest.
 */
static uint32_t try_order(search *s, size_t enough) {
  size_t bytes = 0;
  uint32_t top = 0;
  for (uint32_t i = 0; i < s->n_spans; i++) s->levels[0][i].n = 0;
  for (uint32_t i = 0; i < s->n_ranks && bytes < enough; i++) {
    const size_t end = put(s, &s->blocks[s->ranks[i].block]);
    if (end > bytes) {
      bytes = end;
      top = i;
    }
  }
  if (bytes < s->best_bytes) { /* then it has not given up */
    s->best_bytes = bytes;
    for (uint32_t b = 0; b < s->n; b++) s->best[b] = s->blocks[b].offset;
  }
  return top;
}

static bool is_near(const search *s, size_t bound) { return s->best_bytes - bound <= bound / 128; }

/* Tries one order; while the best layout is not near the bound, moves the block that ends highest
 * to the front and tries again. */
static void follow(search *s, size_t bound, rank (*order)(const search *, uint32_t), size_t tries) {
  s->n_ranks = 0;
  for (uint32_t b = 0; b < s->n; b++)
    if (s->blocks[b].lender == OMC_NO_LENDER) s->ranks[s->n_ranks++] = order(s, b);
  omc_sort_ranks(s->ranks, s->n_ranks);
  uint32_t top = try_order(s, tries ? SIZE_MAX : s->best_bytes);
  for (size_t i = 0; i < tries && !is_near(s, bound); i++) {
    const rank moved = s->ranks[top];
    for (; top > 0; top--) s->ranks[top] = s->ranks[top - 1];
    s->ranks[0] = moved;
    top = try_order(s, SIZE_MAX);
  }
}

/* All orders as they are, then each with as many repairs as cost a millisecond or two. */
static void find_layout(search *s, size_t bound) {
  static const size_t n_orders = sizeof orders / sizeof *orders, most_tries = 32;
  const size_t pairs = (size_t)s->n * s->n + 1, afford = ((size_t)1 << 20) / pairs;
  s->best_bytes = SIZE_MAX;
  for (size_t o = 0; o < n_orders && s->best_bytes > bound; o++) follow(s, bound, orders[o], 0);
  for (size_t o = 0; afford && o < n_orders && !is_near(s, bound); o++)
    follow(s, bound, orders[o], afford < most_tries ? afford : most_tries);
}

/* Divides the steps into spans that have room for all their blocks. */
static bool divide(search *s, uint32_t n_steps, omc_arena *scratch) {
  const uint32_t last = n_steps ? n_steps - 1 : 0;
  do s->n_spans += span_at(s->n_levels, last) + 1;
  while (span_at(s->n_levels++, last) > 0);
  span *spans = OMC_NEW_ARRAY(scratch, span, s->n_spans);
  placed *room = OMC_NEW_ARRAY(scratch, placed, s->n);
  if (!spans || !room) return false;
  for (uint32_t level = 0, i = 0; level < s->n_levels; level++) {
    s->levels[level] = &spans[i];
    i += span_at(level, last) + 1;
  }
  for (uint32_t b = 0; b < s->n; b++) span_of(s, &s->blocks[b])->n++;
  for (uint32_t i = 0; i < s->n_spans; room += spans[i++].n) spans[i].first = room;
  return true;
}

static bool in_arena(const omc_plan *plan, uint32_t v) {
  return plan->slots[v].place == OMC_AT_ARENA;
}

/* One block for each live range, then one for each step with scratch memory. */
static void fill_blocks(const omc_liveness *l, size_t alignment, const size_t *workspace,
                        search *s) {
  for (uint32_t r = 0; r < l->n_ranges; r++) {
    const omc_live_range *range = &l->ranges[r];
    s->blocks[s->n++] = (block){.begin = range->begin,
                                .end = range->end,
                                .bytes = omc_round_up(range->bytes, alignment),
                                .last = range->last,
                                .lender = OMC_NO_LENDER};
  }
  for (uint32_t t = 0; t < l->n_steps; t++)
    if (workspace[t])
      s->blocks[s->n++] = (block){.begin = t,
                                  .end = t,
                                  .bytes = omc_round_up(workspace[t], alignment),
                                  .lender = OMC_NO_LENDER};
}

/* Whether a value or scratch memory of backward, or a gradient, lies over a value that forward
 * saved.
 */
static bool consumes_saved(const omc_plan *plan, const search *s, const uint32_t *range_of) {
  for (uint32_t v = 0; v < plan->graph->n_values; v++)
    if (in_arena(plan, v) && plan->slots[v].begin >= plan->n_forward &&
        s->blocks[range_of[v]].begin < plan->n_forward)
      return true;
  for (uint32_t i = 0; i < plan->n_saved; i++) {
    const omc_span *saved = &plan->saved[i];
    if (saved->lender != OMC_NO_LENDER) return true;
    for (uint32_t j = 0; j < s->n; j++) {
      const block *x = &s->blocks[j];
      if (x->begin >= plan->n_forward && x->lender == OMC_NO_LENDER &&
          x->offset < saved->offset + saved->bytes && saved->offset < x->offset + x->bytes)
        return true;
    }
  }
  return false;
}

static bool is_saved(const omc_plan *plan, const block *x) {
  return x->begin < plan->n_forward && x->end >= plan->n_forward;
}

/* Lists the blocks that hold something at the end of forward. */
static omc_status note_saved(omc_plan *plan, const search *s) {
  uint32_t n = 0;
  for (uint32_t b = 0; b < s->n; b++) n += is_saved(plan, &s->blocks[b]);
  plan->saved = OMC_NEW_ARRAY(&plan->memory, omc_span, n);
  if (!plan->saved) OMC_FAIL(ENOMEM, "no memory to list what a plan saves");
  for (uint32_t b = 0; b < s->n; b++) {
    const block *x = &s->blocks[b];
    if (!is_saved(plan, x)) continue;
    plan->saved[plan->n_saved++] = (omc_span){x->lender, x->offset, x->bytes};
    plan->forward_bytes += x->bytes;
  }
  return OMC_OK;
}

static void put_value(omc_slot *slot, const block *x) {
  slot->offset = x->offset;
  if (x->lender == OMC_NO_LENDER) return;
  slot->place = OMC_AT_LENT;
  slot->index = x->lender;
}

omc_status omc_plan_layout(omc_plan *plan, const omc_liveness *l, omc_arena *scratch) {
  const size_t alignment = plan->provider->alignment;
  const uint32_t most = l->n_ranges + l->n_steps;
  size_t *live = OMC_NEW_ARRAY(scratch, size_t, l->n_steps + 1);
  size_t *workspace = OMC_NEW_ARRAY(scratch, size_t, l->n_steps);
  search s = {.live = live,
              .blocks = OMC_NEW_ARRAY(scratch, block, most),
              .ranks = OMC_NEW_ARRAY(scratch, rank, most),
              .best = OMC_NEW_ARRAY(scratch, size_t, most)};
  if (!live || !workspace || !s.blocks || !s.ranks || !s.best)
    OMC_FAIL(ENOMEM, "no memory to lay out %u values", plan->graph->n_values);

  for (uint32_t t = 0; t < l->n_steps; t++) workspace[t] = plan->steps[t].workspace_bytes;
  OMC_TRY(omc_live_bytes(l, alignment, workspace, live));
  plan->live_bytes = live[omc_live_peak(live, l->n_steps)];
  fill_blocks(l, alignment, workspace, &s);
  OMC_TRY(omc_plan_lend(plan, s.blocks, l->n_ranges, live, scratch));
  plan->bound_bytes = live[omc_live_peak(live, l->n_steps)];
  if (!divide(&s, l->n_steps, scratch))
    OMC_FAIL(ENOMEM, "no memory to lay out the %u steps of a plan", l->n_steps);
  find_layout(&s, plan->bound_bytes);
  plan->arena_bytes = s.best_bytes;

  for (uint32_t b = 0; b < s.n; b++) s.blocks[b].offset = s.best[b];
  OMC_TRY(note_saved(plan, &s));
  plan->consumes = consumes_saved(plan, &s, l->range_of);
  for (uint32_t v = 0; v < plan->graph->n_values; v++)
    if (in_arena(plan, v)) put_value(&plan->slots[v], &s.blocks[l->range_of[v]]);
  uint32_t scratch_block = l->n_ranges;
  for (uint32_t t = 0; t < l->n_steps; t++)
    if (workspace[t]) plan->steps[t].workspace_offset = s.blocks[scratch_block++].offset;
  return OMC_OK;
}
