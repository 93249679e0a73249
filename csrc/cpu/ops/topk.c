/* TopK, a line at a time. Elements become entries, which are in the order in which the result has
 * them and of which no two are equal. Once k are known, an element that is not before the last of
 * them is passed over, a few vectors at a time. */
#include <string.h>

#include "base/int.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "ops/forms.h"

enum {
  FEW = 16,   /* entries that are kept in order as they come; more are sorted when there is no */
  ROOM = 64,  /* room, which is for twice as many and this */
  RUN = 8,    /* entries that sorting begins with */
  BESIDE = 16 /* lines that are gathered together, where they lie across rows */
};

static inline int64_t room_for(const omc_topk_form *p) {
  return p->k <= FEW ? p->k : omc_min(p->n, 2 * p->k + ROOM);
}

static inline int64_t gathered(const omc_topk_form *p) {
  return p->inner == 1 ? 0 : omc_min(p->inner, BESIDE);
}

/* What a thread has of the workspace: entries, twice, and the lines that it has gathered. */
static inline size_t entries_bytes(const omc_topk_form *p, size_t entry) {
  return omc_round_up(2 * (size_t)room_for(p) * entry, 64);
}

static inline size_t thread_bytes(const omc_topk_form *p, size_t entry, size_t element) {
  return entries_bytes(p, entry) + omc_round_up((size_t)(gathered(p) * p->n) * element, 64);
}

#ifdef OMC_VARIANT

/* ---- entries ---- */

#if defined(OMC_COMPUTE_F32)
typedef uint32_t rank_t;
typedef uint64_t entry; /* the rank, and below it the place */
OMC_INLINE entry entry_of(rank_t rank, int64_t place) {
  return (entry)rank << 32 | (uint32_t)place;
}
OMC_INLINE int64_t place_of(entry e) { return (int64_t)(uint32_t)e; }
OMC_INLINE bool before(entry a, entry b) { return a < b; }
#else
typedef uint64_t rank_t;
typedef struct entry {
  rank_t rank;
  int64_t place;
} entry;
OMC_INLINE entry entry_of(rank_t rank, int64_t place) { return (entry){rank, place}; }
OMC_INLINE int64_t place_of(entry e) { return e.place; }
OMC_INLINE bool before(entry a, entry b) {
  return (a.rank < b.rank) | ((a.rank == b.rank) & (a.place < b.place));
}
#endif

/* Numbers in their order, zeros being equal and NaN beyond all; turned round if the largest come
 * first. */
OMC_INLINE rank_t rank_of(acc_t x, bool largest) {
  const rank_t sign = (rank_t)1 << (8 * sizeof(rank_t) - 1);
  rank_t rank;
#if OMC_IS_FLOAT
  const acc_t number = x == 0 ? 0 : x;
  memcpy(&rank, &number, sizeof rank);
  rank = rank & sign ? ~rank : rank | sign;
  rank = OMC_IS_NAN(x) ? ~(rank_t)0 : rank;
#else
  rank = (rank_t)x ^ sign;
#endif
  return largest ? ~rank : rank;
}

/* Puts `e` where it belongs among n entries that are in order. */
OMC_INLINE void insert(entry *entries, int64_t n, entry e) {
  int64_t at = n;
  for (; at > 0 && before(e, entries[at - 1]); at--) entries[at] = entries[at - 1];
  entries[at] = e;
}

/* Two runs, [0, middle) and [middle, end). */
OMC_INLINE void merge(const entry *from, int64_t middle, int64_t end, entry *to) {
  int64_t i = 0, j = middle;
  while (i < middle && j < end) {
    const bool second = before(from[j], from[i]);
    *to++ = second ? from[j] : from[i];
    i += !second, j += second;
  }
  memcpy(to, from + i, (size_t)(middle - i) * sizeof *to);
  memcpy(to + (middle - i), from + j, (size_t)(end - j) * sizeof *to);
}

/* Sorts n entries, and returns which of the two has them then. */
static entry *sorted(entry *entries, entry *spare, int64_t n) {
  for (int64_t first = 0; first < n; first += RUN)
    for (int64_t i = first + 1; i < omc_min(first + RUN, n); i++)
      insert(entries + first, i - first, entries[i]);
  for (int64_t run = RUN; run < n; run *= 2) {
    for (int64_t i = 0; i < n; i += 2 * run)
      merge(entries + i, omc_min(run, n - i), omc_min(2 * run, n - i), spare + i);
    entry *const swapped = entries;
    entries = spare, spare = swapped;
  }
  return entries;
}

/* ---- a line ---- */

typedef struct topk_job {
  const omc_topk_form *p;
  const storage_t *x;
  storage_t *values; /* NULL: nobody reads them */
  int64_t *places;   /* NULL: nobody reads them */
  char *workspace;
} topk_job;

typedef struct chosen {
  entry *entries, *spare;
  int64_t n;
  entry last; /* of the first k; once there are as many */
} chosen;

static void keep_first(chosen *c, int64_t k) {
  entry *const first = sorted(c->entries, c->spare, c->n);
  c->spare = first == c->entries ? c->spare : c->entries;
  c->entries = first;
  c->n = k;
  c->last = first[k - 1];
}

OMC_INLINE void offer(chosen *c, int64_t k, int64_t room, entry e) {
  if (!before(e, c->last)) return;
  if (k <= FEW) {
    insert(c->entries, k - 1, e);
    c->last = c->entries[k - 1];
  } else {
    c->entries[c->n++] = e;
    if (c->n == room) keep_first(c, k);
  }
}

/* Lanes that cannot be before `bound`; those that compare with nothing may be. */
OMC_INLINE vmask not_before(vacc_t x, vacc_t bound, bool largest) {
  return largest ? x <= bound : x >= bound;
}

/* The first k of a line, of which there is one. */
OMC_INLINE void choose(const omc_topk_form *p, const storage_t *x, bool largest, chosen *c) {
  enum { VECTORS = 4, STEP = VECTORS * OMC_VL };
  const int64_t n = p->n, k = p->k, room = room_for(p);
  int64_t i = 0;
  for (; i < room; i++) {
    const entry e = entry_of(rank_of(ld(x + i), largest), i);
    if (k <= FEW)
      insert(c->entries, i, e);
    else
      c->entries[i] = e;
  }
  c->n = room, c->last = c->entries[k - 1];
  if (k > FEW) keep_first(c, k);
  for (; i + STEP <= n; i += STEP) {
    const vacc_t bound = vset(ld(x + place_of(c->last)));
    vmask beyond = (vmask){0} - 1;
    OMC_UNROLL for (int v = 0; v < VECTORS; v++) beyond &=
        not_before(vld(x + i + v * OMC_VL), bound, largest);
    if (vall(beyond)) continue;
    for (int64_t at = i; at < i + STEP; at += OMC_VL) {
      const vmask out = not_before(vld(x + at), vset(ld(x + place_of(c->last))), largest);
      if (vall(out)) continue;
      for (int l = 0; l < OMC_VL; l++)
        if (!out[l]) offer(c, k, room, entry_of(rank_of(ld(x + at + l), largest), at + l));
    }
  }
  for (; i < n; i++) offer(c, k, room, entry_of(rank_of(ld(x + i), largest), i));
  if (k > FEW && c->n > k) keep_first(c, k);
}

static void write_line(const topk_job *j, const storage_t *x, const entry *first, int64_t to) {
  const omc_topk_form *p = j->p;
  for (int64_t i = 0; i < p->k; i++, to += p->inner) {
    const int64_t place = place_of(first[i]);
    if (j->values) j->values[to] = x[place];
    if (j->places) j->places[to] = place;
  }
}

static void topk_line(const topk_job *j, const storage_t *x, entry *entries, int64_t to) {
  const omc_topk_form *p = j->p;
  chosen c = {.entries = entries, .spare = entries + room_for(p)};
  if (p->largest)
    choose(p, x, true, &c);
  else
    choose(p, x, false, &c);
  write_line(j, x, c.entries, to);
}

/* Lines that lie in rows, or as many of one outer as are gathered together. */
static void topk_lines(omc_range range, void *ctx) {
  const topk_job *j = ctx;
  const omc_topk_form *p = j->p;
  const size_t bytes = thread_bytes(p, sizeof(entry), sizeof(storage_t));
  char *const workspace = j->workspace + (size_t)range.thread * bytes;
  entry *const entries = (entry *)(void *)workspace;
  storage_t *const lines = (storage_t *)(void *)(workspace + entries_bytes(p, sizeof(entry)));
  const int64_t across = omc_ceil_div(p->inner, BESIDE);
  for (int64_t u = range.begin; u < range.end; u++) {
    const int64_t o = u / across, first = u % across * BESIDE;
    const int64_t beside = omc_min(p->inner - first, BESIDE);
    const storage_t *x = j->x + o * p->n * p->inner + first;
    const int64_t to = o * p->k * p->inner + first;
    if (p->inner == 1) {
      topk_line(j, x, entries, to);
      continue;
    }
    for (int64_t i = 0; i < p->n; i++)
      for (int64_t c = 0; c < beside; c++) lines[c * p->n + i] = x[i * p->inner + c];
    for (int64_t c = 0; c < beside; c++) topk_line(j, lines + c * p->n, entries, to + c);
  }
}

OMC_KERNEL(TopK, args) {
  const omc_topk_form *p = args->params;
  topk_job j = {p, args->in[0].data, omc_out_data(args, 0), omc_out_data(args, 1), args->workspace};
  const int64_t unit = p->n * omc_min(p->inner, BESIDE);
  if (p->k > 0)
    omc_parallel_for(p->outer * omc_ceil_div(p->inner, BESIDE), omc_grain(OMC_GRAIN_ELEMENTS, unit),
                     args->threads, topk_lines, &j);
  return OMC_OK;
}

#else

OMC_FORM(params_topk, omc_topk_form_of)

static size_t topk_workspace(const omc_node *node, const void *params, int threads) {
  const omc_dtype dtype = omc_in(node, 0)->type.dtype;
  const size_t entry = omc_acc_size(dtype) == 4 ? 8 : 16;
  return (size_t)threads * thread_bytes(params, entry, omc_dtype_size(dtype));
}

OMC_KERNELS_NUM(TopK)
OMC_CPU_OP(TopK, TopK, OMC_PARAMS(omc_topk_form, params_topk), .workspace = topk_workspace)

#endif
