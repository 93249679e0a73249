/* Lending: memory for the gradient of an input is asked for before forward, and holds other values
 * until the gradient is written. What forward saves is gone, bit by bit, as gradients are written,
 * so that a step need not have room for all of both. */
#include "plan/layout.h"

enum { LEAST_LENT = 4096 /* bytes of a gradient that is worth asking */ };

/* Memory for a gradient. */
typedef struct lender {
  uint32_t input;
  size_t bytes;
  const uint32_t *written; /* by backward: the step from which on it holds the gradient */
  uint32_t first;          /* of its blocks, lowest first; UINT32_MAX: none */
  size_t top;              /* where the highest of them ends */
} lender;

typedef struct lending {
  const omc_plan *plan;
  omc_block *blocks;
  uint32_t n;
  uint32_t *next; /* by block: in its lender */
  lender *lenders;
  uint32_t n_lenders, n_backwards;
  omc_rank *order, *left; /* of blocks: all, and those that may find room yet */
  const size_t *all;      /* bytes live at each step, */
  size_t *live;           /* and those of them in the arena */
  omc_block *best;        /* the blocks as they are best lent memory, */
  size_t best_spared;     /* and what the arena is spared by that */
} lending;

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
    for (uint32_t b = 0; b < l->n_backwards; b++)
      always &= omc_gradient_written(g, plan->slots, plan->parts, b, i, &written[b]);
    if (!always) continue;
    const size_t bytes = plan->slots[omc_in(g->result, g->n_outputs + i)->id].bytes;
    if (bytes >= LEAST_LENT)
      l->lenders[l->n_lenders++] = (lender){.input = i, .bytes = bytes, .written = written};
  }
  return OMC_OK;
}

/* Whether each backward is done with the block before it has the gradient. What several backwards
 * read is lost to the others then: of a plan that consumes, one runs. */
static bool in_time(const lending *l, const lender *from, const omc_block *x) {
  for (uint32_t b = 0; b < l->n_backwards; b++)
    if (x->last[b] != UINT32_MAX && x->last[b] >= from->written[b]) return false;
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

/* Puts the block where least is left above it; adds what a new lender is asked for. */
static bool lend(lending *l, uint32_t block, size_t *asked) {
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
  if (best->top == 0) *asked += best->bytes;
  if (x->offset + x->bytes > best->top) best->top = x->offset + x->bytes;
  uint32_t *link = best_after == UINT32_MAX ? &best->first : &l->next[best_after];
  l->next[block] = *link;
  *link = block;
  return true;
}

/* The first n blocks that were lent memory are the best so far, if they spare more. */
static void note_best(lending *l, const uint32_t *lent, uint32_t n, size_t spared) {
  if (spared <= l->best_spared) return;
  l->best_spared = spared;
  for (uint32_t b = 0; b < l->n; b++) l->best[b].lender = OMC_NO_LENDER;
  for (uint32_t i = 0; i < n; i++) l->best[lent[i]] = l->blocks[lent[i]];
}

/* Between forward and backward a run holds all that it is lent, filled or not. The gradients need
 * that memory in the end, so it costs something only where several forwards wait for their
 * backwards, and then less, the less of it is left empty. */
static bool is_worth(size_t asked, size_t spared) { return asked <= 2 * spared; }

/* Lends while there is a block at the step where most is live that finds room. What is needed
 * longest finds the fewest lenders, and is asked for first; what finds no room will not find any
 * later. Counts as far as it is worth it. Returns whether that is to the end. */
static bool lend_all(lending *l, uint32_t *lent) {
  uint32_t n = l->n, n_lent = 0, n_worth = 0;
  size_t spared = 0, asked = 0;
  const size_t most = l->all[omc_live_peak(l->all, l->plan->n_steps)];
  for (uint32_t i = 0; i < l->n_lenders; i++)
    l->lenders[i].first = UINT32_MAX, l->lenders[i].top = 0;
  for (uint32_t i = 0; i < n; i++) l->left[i] = l->order[i];
  for (uint32_t s = 0; s < l->plan->n_steps; s++) l->live[s] = l->all[s];
  for (;;) {
    const uint32_t peak = omc_live_peak(l->live, l->plan->n_steps);
    const size_t now = most - l->live[peak];
    if (is_worth(asked, now)) spared = now, n_worth = n_lent;
    uint32_t i = 0;
    while (i < n &&
           (l->blocks[l->left[i].block].begin > peak || l->blocks[l->left[i].block].end < peak))
      i++;
    if (i == n) break;
    const uint32_t block = l->left[i].block;
    for (n--; i < n; i++) l->left[i] = l->left[i + 1];
    const omc_block *x = &l->blocks[block];
    if (!lend(l, block, &asked)) continue;
    lent[n_lent++] = block;
    for (uint32_t s = x->begin; s <= x->end; s++) l->live[s] -= x->bytes;
  }
  note_best(l, lent, n_worth, spared);
  return n_worth == n_lent;
}

/* Keeps the lenders of which so many eighths or more are taken. */
static void keep_filled(lending *l, size_t eighths) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < l->n_lenders; i++)
    if (l->lenders[i].top / eighths >= l->lenders[i].bytes / 8) l->lenders[n++] = l->lenders[i];
  l->n_lenders = n;
}

/* Gives the blocks the memory that was found best. */
static void settle(lending *l, omc_plan *plan) {
  for (uint32_t s = 0; s < plan->n_steps; s++) l->live[s] = l->all[s];
  for (uint32_t b = 0; b < l->n; b++) {
    omc_block *x = &l->blocks[b];
    *x = l->best[b];
    if (x->lender == OMC_NO_LENDER) continue;
    if (!plan->lends[x->lender])
      plan->lent_bytes +=
          plan->slots[omc_in(plan->graph->result, plan->graph->n_outputs + x->lender)->id].bytes;
    plan->lends[x->lender] = plan->lends_any = true;
    for (uint32_t s = x->begin; s <= x->end; s++) l->live[s] -= x->bytes;
  }
}

omc_status omc_plan_lend(omc_plan *plan, omc_block *blocks, uint32_t n, size_t *live,
                         omc_arena *scratch) {
  static const size_t eighths[] = {2, 4, 6, 7};
  size_t *all = OMC_NEW_ARRAY(scratch, size_t, plan->n_steps);
  uint32_t *lent = OMC_NEW_ARRAY(scratch, uint32_t, n);
  lending l = {.plan = plan,
               .blocks = blocks,
               .n = n,
               .next = OMC_NEW_ARRAY(scratch, uint32_t, n),
               .order = OMC_NEW_ARRAY(scratch, omc_rank, n),
               .left = OMC_NEW_ARRAY(scratch, omc_rank, n),
               .all = all,
               .live = live,
               .best = OMC_NEW_ARRAY(scratch, omc_block, n)};
  plan->lends = OMC_NEW_ARRAY(&plan->memory, bool, plan->graph->n_inputs);
  if (!all || !lent || !l.next || !l.order || !l.left || !l.best || !plan->lends)
    OMC_FAIL(ENOMEM, "no memory to lend that of gradients");
  OMC_TRY(find_lenders(&l, scratch));
  if (!l.n_lenders) return OMC_OK;
  for (uint32_t s = 0; s < plan->n_steps; s++) all[s] = live[s];
  for (uint32_t b = 0; b < n; b++) {
    l.best[b] = blocks[b];
    l.order[b] = (omc_rank){blocks[b].end, SIZE_MAX - blocks[b].bytes, b};
  }
  omc_sort_ranks(l.order, n);
  bool ends = lend_all(&l, lent);
  for (size_t i = 0; !ends && i < sizeof eighths / sizeof *eighths; i++) {
    keep_filled(&l, eighths[i]);
    ends = lend_all(&l, lent);
  }
  settle(&l, plan);
  return OMC_OK;
}
