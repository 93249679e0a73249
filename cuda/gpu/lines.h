/* A tensor as lines along which something is reduced, and teams of threads that go along them: a
 * warp or a block for a line whose elements are neighbours, else a block for as many lines as a
 * warp has lanes, or for as many packs of them, whose warps share out the elements, as do the lanes
 * that are more than lines side by side. A kernel is written once for all teams. Read by the host
 * as C11.
 *
 * Whoever includes this as device code has defined OMC_STORAGE, what most elements are stored as,
 * and what is computed in, see lane.h. All sums are in an order that depends on shapes alone. */
#ifndef OMC_GPU_LINES_H
#define OMC_GPU_LINES_H

#include "cuda/gpu/divide.h"

enum {
  OMC_GPU_GROUPS = 4,     /* of 8 axes, where kept and reduced ones are in turn */
  OMC_LINE_THREADS = 256, /* of a block at most, of which a multiprocessor has room for two */
  OMC_WALK_THREADS = 128, /* of one whose warps go from line to line */
  OMC_WALK_SUMS = 32      /* that each thread then has registers for */
};

/* Positions 0 to n - 1 of groups of axes, outermost first; there is one at least. Quotients are
 * those of axis.h where n is below 2^31. */
typedef struct omc_gpu_places {
  int64_t n;
  int32_t rank, unused;
  struct {
    int64_t size, stride; /* of elements */
    double inverse;       /* of size */
    uint32_t multiplier, shift;
  } group[OMC_GPU_GROUPS];
} omc_gpu_places;

/* kept.n lines of along.n elements. Part i of a line has the elements from i * step on. Of columns
 * `across` lanes of a warp, a power of 2, have lines of their own. */
typedef struct omc_gpu_lines {
  omc_gpu_places kept, along;
  int64_t step;
  int32_t parts, across;
} omc_gpu_lines;

#ifdef OMC_GPU

#include "cuda/gpu/lane.h"
#include "cuda/gpu/pack.h"

typedef OMC_STORAGE storage_t;

enum { OMC_WARP = 32, OMC_ROW_PACK = 16 / sizeof(storage_t) };

/* i / size: as a product with the inverse it is off by one at most. */
OMC_INLINE int64_t omc_wide_quotient(int64_t i, int64_t size, double inverse) {
  const int64_t near = (int64_t)((double)i * inverse), rest = i - near * size;
  return near - (rest < 0) + (rest >= size);
}

/* Of position i by the size of its innermost group g. */
OMC_INLINE int64_t omc_quotient(const omc_gpu_places &p, int g, int64_t i) {
  const uint32_t narrow = (uint32_t)i;
  return p.n >> OMC_NARROW_BITS == 0
             ? (int64_t)((__umulhi(narrow, p.group[g].multiplier) + narrow) >> p.group[g].shift)
             : omc_wide_quotient(i, p.group[g].size, p.group[g].inverse);
}

OMC_INLINE int64_t omc_offset_at(const omc_gpu_places &p, int64_t i) {
  int64_t offset = 0;
#pragma unroll 1
  for (int g = p.rank - 1; g > 0; g--) {
    const int64_t quotient = omc_quotient(p, g, i);
    offset += (i - quotient * p.group[g].size) * p.group[g].stride;
    i = quotient;
  }
  return offset + i * p.group[0].stride;
}

/* ---- verbs ---- */

/* Two sums at once. */
struct omc_two {
  acc_t a, b;
};

/* What the lane has whose number differs in the bits of `mask`. */
template <typename T>
OMC_INLINE T omc_of_lane(T x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}
OMC_INLINE omc_two omc_of_lane(omc_two x, int mask) {
  return omc_two{omc_of_lane(x.a, mask), omc_of_lane(x.b, mask)};
}

struct omc_sum {
  template <typename T>
  static OMC_METHOD T start() {
    return T{};
  }
  static OMC_METHOD omc_two join(omc_two x, omc_two y) {
    return omc_two{join(x.a, y.a), join(x.b, y.b)};
  }
  static OMC_METHOD double join(double a, double b) { return a + b; }
  static OMC_METHOD float join(float a, float b) { return a + b; }
  static OMC_METHOD int64_t join(int64_t a, int64_t b) {
    return (int64_t)((uint64_t)a + (uint64_t)b);
  }
};
struct omc_product {
  template <typename T>
  static OMC_METHOD T start() {
    return 1;
  }
  static OMC_METHOD acc_t join(acc_t a, acc_t b) { return (vacc_t(a) * vacc_t(b)).x; }
};
#if OMC_IS_FLOAT
#define OMC_LEAST (-(acc_t)INFINITY)
#define OMC_MOST ((acc_t)INFINITY)
#else
#define OMC_LEAST INT64_MIN
#define OMC_MOST (-(INT64_MIN + 1))
#endif
/* NaN in either gives NaN. */
struct omc_most {
  template <typename T>
  static OMC_METHOD T start() {
    return OMC_LEAST;
  }
  static OMC_METHOD acc_t join(acc_t a, acc_t b) { return vmax(a, b).x; }
};
struct omc_least {
  template <typename T>
  static OMC_METHOD T start() {
    return OMC_MOST;
  }
  static OMC_METHOD acc_t join(acc_t a, acc_t b) { return vmin(a, b).x; }
};

#if OMC_IS_FLOAT
/* The largest of some numbers, and the sum of exp(x - top), in one pass. Infinite ones are summed
 * as if they were finite. */
struct omc_peak {
  acc_t top, sum;
};
OMC_INLINE omc_peak omc_of_lane(omc_peak x, int mask) {
  return omc_peak{omc_of_lane(x.top, mask), omc_of_lane(x.sum, mask)};
}
struct omc_peaks {
  template <typename T>
  static OMC_METHOD T start() {
    return T{OMC_LEAST, 0};
  }
  static OMC_METHOD omc_peak join(omc_peak a, omc_peak b) {
    const acc_t fall = a.top == b.top ? (acc_t)1 : OMC_R(exp)(-OMC_R(fabs)(a.top - b.top));
    return omc_peak{vmax(a.top, b.top).x,
                    a.top < b.top ? a.sum * fall + b.sum : a.sum + b.sum * fall};
  }
};
#endif

/* Joins what the same lanes of all warps of a block give, for all of them. */
template <typename Verb, typename T>
OMC_INLINE T omc_join_warps(T x) {
  __shared__ T slots[OMC_LINE_THREADS / OMC_WARP][OMC_WARP];
  const unsigned lane = threadIdx.x % OMC_WARP;
  __syncthreads(); /* what was there before has been read */
  slots[threadIdx.x / OMC_WARP][lane] = x;
  __syncthreads();
  T all = slots[0][lane];
  for (unsigned w = 1; w < blockDim.x / OMC_WARP; w++) all = Verb::join(all, slots[w][lane]);
  return all;
}

/* Of lanes whose numbers are the same modulo `across`. */
template <typename Verb, typename T>
OMC_INLINE T omc_join_lanes(T x, int across = 1) {
#pragma unroll
  for (int mask = OMC_WARP / 2; mask > 0; mask /= 2)
    if (mask >= across) x = Verb::join(x, omc_of_lane(x, mask));
  return x;
}

/* ---- teams: a thread's line and what it does of it ---- */

struct omc_team {
  const omc_gpu_lines &lines;
  int64_t line;        /* of lines.kept.n, the first; past them: none, and nothing along it */
  int64_t first, last; /* elements of the part that the team goes along */
  int part;
  unsigned lane, size; /* in the team */

  OMC_METHOD omc_team(const omc_gpu_lines &of, unsigned together, unsigned nth, unsigned lane_,
                      unsigned size_)
      : lines(of), lane(lane_), size(size_) {
    const unsigned parts = (unsigned)of.parts;
    part = (int)(blockIdx.x % parts);
    line = (int64_t)(blockIdx.x / parts) * together + nth;
    first = part * of.step;
    const int64_t end = of.along.n - first < of.step ? of.along.n : first + of.step;
    last = has_line() ? end : first;
  }
  OMC_METHOD bool has_line() const { return line < lines.kept.n; }
  OMC_METHOD bool leads() const { return lane == 0 && has_line(); }
  OMC_METHOD int64_t offset() const { return has_line() ? omc_offset_at(lines.kept, line) : 0; }
};

/* PACK neighbours are read and written at a time, ALONG of each of LINES lines of a thread: one of
 * the two is 1. A line is SLOTS packs of each thread at most, which stay in registers; with SLOTS 0
 * it is of any length and read again by each pass. A pass asks for AHEAD packs before it waits for
 * the first of them. The elements of lines that are not GROUPED are evenly apart, one after the
 * other where ALONG is not 1. Packs are WHOLE where the last of a line or of a group is too; of
 * columns, they may be read beyond the last line, as rows are of whole packs. */
template <bool whole, int slots>
struct omc_warps_team : omc_team {
  enum {
    PACK = OMC_ROW_PACK,
    LINES = 1,
    ALONG = PACK,
    SLOTS = slots,
    AHEAD = 1,
    GROUPED = 0,
    WHOLE = whole
  };
  OMC_METHOD explicit omc_warps_team(const omc_gpu_lines &of)
      : omc_team(of, blockDim.x / OMC_WARP, threadIdx.x / OMC_WARP, threadIdx.x % OMC_WARP,
                 OMC_WARP) {}
  template <typename Verb, typename T>
  OMC_METHOD T join(T x) const {
    return omc_join_lanes<Verb>(x);
  }
  /* On to the next line of a grid whose warps share them out. */
  OMC_METHOD void walk() { line += (int64_t)gridDim.x * (blockDim.x / OMC_WARP); }
};
enum {
  OMC_WALK_BLOCKS = sizeof(acc_t) == sizeof(double) ? 2 : 3, /* of a multiprocessor */
  OMC_SLOTS = 8,
  OMC_WALK_SLOTS = OMC_WALK_SUMS / OMC_ROW_PACK < OMC_SLOTS ? OMC_WALK_SUMS / OMC_ROW_PACK
                                                            : (int)OMC_SLOTS
};
typedef omc_warps_team<false, OMC_SLOTS> omc_warp_team;
typedef omc_warps_team<true, OMC_SLOTS> omc_whole_warp_team;
typedef omc_warps_team<true, OMC_WALK_SLOTS> omc_walking_team;
template <int pack, bool grouped>
struct omc_block_team : omc_team {
  enum {
    PACK = pack,
    LINES = 1,
    ALONG = pack,
    SLOTS = 0,
    AHEAD = pack == OMC_ROW_PACK ? 4 : 8,
    GROUPED = grouped,
    WHOLE = grouped
  };
  OMC_METHOD explicit omc_block_team(const omc_gpu_lines &of)
      : omc_team(of, 1, 0, threadIdx.x, blockDim.x) {}
  template <typename Verb, typename T>
  OMC_METHOD T join(T x) const {
    return omc_join_warps<Verb>(omc_join_lanes<Verb>(x));
  }
};
typedef omc_block_team<OMC_ROW_PACK, false> omc_row_team;
typedef omc_block_team<OMC_ROW_PACK, true> omc_grouped_team;
typedef omc_block_team<OMC_ROW_PACK / 2, true> omc_halved_team;
typedef omc_block_team<1, true> omc_scattered_team;
template <int lines_, bool grouped>
struct omc_columns_team : omc_team {
  enum {
    PACK = lines_,
    LINES = lines_,
    ALONG = 1,
    SLOTS = 0,
    AHEAD = lines_ == 1 ? 8 : 4,
    GROUPED = grouped,
    WHOLE = 1
  };
  OMC_METHOD explicit omc_columns_team(const omc_gpu_lines &of)
      : omc_team(of, of.across * LINES, threadIdx.x % of.across * LINES, threadIdx.x / of.across,
                 blockDim.x / of.across) {}
  template <typename Verb, typename T>
  OMC_METHOD T join(T x) const {
    return omc_join_warps<Verb>(omc_join_lanes<Verb>(x, lines.across));
  }
};

typedef omc_columns_team<1, false> omc_column_team;
typedef omc_columns_team<1, true> omc_grouped_column_team;
typedef omc_columns_team<OMC_ROW_PACK, false> omc_wide_column_team;

/* The kernels that cuda/teams.h chooses from, of a function of a team and the parameters, whose
 * member `lines` it is of. */
#define OMC_LINE_KERNEL(name, team, type, ...) \
  OMC_GLOBAL_BLOCKS(name, OMC_LINE_THREADS, 2, type, p) { __VA_ARGS__(team(p.lines), p); }
#define OMC_WARP_KERNELS(name, type, ...)                         \
  OMC_LINE_KERNEL(name##_warps, omc_warp_team, type, __VA_ARGS__) \
  OMC_LINE_KERNEL(name##_whole_warps, omc_whole_warp_team, type, __VA_ARGS__)
#define OMC_LINE_KERNELS(name, type, ...)                        \
  OMC_WARP_KERNELS(name, type, __VA_ARGS__)                      \
  OMC_LINE_KERNEL(name##_block, omc_row_team, type, __VA_ARGS__) \
  OMC_LINE_KERNEL(name##_columns, omc_column_team, type, __VA_ARGS__)
#define OMC_GROUPED_LINE_KERNELS(name, type, ...)                                \
  OMC_LINE_KERNEL(name##_grouped_block, omc_grouped_team, type, __VA_ARGS__)     \
  OMC_LINE_KERNEL(name##_halved_block, omc_halved_team, type, __VA_ARGS__)       \
  OMC_LINE_KERNEL(name##_scattered_block, omc_scattered_team, type, __VA_ARGS__) \
  OMC_LINE_KERNEL(name##_grouped_columns, omc_grouped_column_team, type, __VA_ARGS__)
#define OMC_COLUMN_KERNELS(name, type, ...)                           \
  OMC_LINE_KERNEL(name##_columns, omc_column_team, type, __VA_ARGS__) \
  OMC_LINE_KERNEL(name##_wide_columns, omc_wide_column_team, type, __VA_ARGS__)

/* ---- elements along a line ---- */

/* Which of a thread's packs, from element k of a line or of LINES lines on, and which of a pack. */
struct omc_at {
  int64_t k;
  int slot, l;
};

/* Of each of a thread's lines. */
template <typename T, typename Team>
struct omc_of_lines {
  T of[Team::LINES];
  OMC_METHOD T operator[](omc_at at) const { return of[Team::LINES > 1 ? at.l : 0]; }
};

/* f(line, l) of each of a thread's lines, l counting them. */
template <typename T, typename Team, typename F>
OMC_INLINE omc_of_lines<T, Team> omc_each_line(const Team &team, F f) {
  omc_of_lines<T, Team> all = {};
#pragma unroll
  for (int l = 0; l < Team::LINES; l++)
    if (team.line + l < team.lines.kept.n) all.of[l] = f(team.line + l, l);
  return all;
}
/* The team for the first packs of its part alone. */
template <typename Team>
OMC_INLINE Team omc_head(const Team &team) {
  const int64_t end = team.first + (int64_t)team.size * Team::ALONG * Team::AHEAD;
  Team head = team;
  if (end < team.last) head.last = end;
  return head;
}

/* Calls f(line, l) in one thread of those that have a line. */
template <typename Team, typename F>
OMC_INLINE void omc_lead_lines(const Team &team, F f) {
  if (!team.leads()) return;
#pragma unroll
  for (int l = 0; l < Team::LINES; l++)
    if (team.line + l < team.lines.kept.n) f(team.line + l, l);
}

template <typename Team>
OMC_INLINE int64_t omc_along_line(const omc_gpu_places &along, int64_t k) {
  return Team::ALONG == 1 ? k * along.group[0].stride : k;
}
template <typename Team>
OMC_INLINE int omc_lanes_of(const Team &team, int64_t k) {
  const int64_t left = team.last - k;
  return !Team::WHOLE && left < Team::PACK ? (int)left : (int)Team::PACK;
}

/* A team's line of a tensor, by the packs of a thread; with SLOTS 0 those of one pass. */
template <typename E, typename Team, int SLOTS = Team::SLOTS>
struct omc_line {
  enum { ROOM = SLOTS ? SLOTS : (int)Team::AHEAD };
  const E *from; /* NULL: none */
  const omc_gpu_places &along;
  omc_loaded<E, Team::PACK> packs[ROOM];

  OMC_METHOD omc_line(const Team &team, const void *data, int64_t offset,
                      const omc_gpu_places &along_)
      : from((const E *)data), along(along_) {
    if (from) from += offset;
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot++) {
      const int64_t k = (slot * (int64_t)team.size + team.lane) * Team::PACK;
      if (k < team.last) read(omc_along_line<Team>(along, k), slot, omc_lanes_of(team, k));
    }
  }
  OMC_METHOD omc_line(const Team &team, const void *data)
      : omc_line(team, data, team.offset(), team.lines.along) {}

  OMC_METHOD void read(int64_t offset, int slot, int lanes) {
    if (from) omc_load(packs[slot], from + offset, lanes);
  }
  /* Groups are the same for all lines. */
  OMC_METHOD void pass(int64_t k, int64_t grouped, int slot, int lanes) {
    if (SLOTS == 0) read(Team::GROUPED ? grouped : omc_along_line<Team>(along, k), slot, lanes);
  }
  OMC_METHOD acc_t operator[](omc_at at) const {
    return number<acc_t>(packs[at.slot % ROOM][at.l]);
  }
};

/* Calls f(k, slot, lanes) for each of a thread's packs, which the lines then have. */
template <typename Team, typename F, typename... Lines>
OMC_INLINE void omc_each_pack(const Team &team, F f, Lines &...lines) {
  const int64_t step = (int64_t)team.size * Team::ALONG;
  int64_t k = team.first + (int64_t)team.lane * Team::ALONG;
  const auto visit = [&](int slot) {
#pragma unroll
    for (int i = 0; i < Team::AHEAD; i++) {
      const int64_t at = k + i * step;
      if (at >= team.last) continue;
      const int64_t grouped = Team::GROUPED ? omc_offset_at(team.lines.along, at) : 0;
      (lines.pass(at, grouped, i, omc_lanes_of(team, at)), ...);
      (void)grouped;
    }
#pragma unroll
    for (int i = 0; i < Team::AHEAD; i++, k += step)
      if (k < team.last) f(k, slot + i, omc_lanes_of(team, k));
  };
  if (Team::SLOTS) {
#pragma unroll
    for (int slot = 0; slot < Team::SLOTS; slot += Team::AHEAD) visit(slot);
  } else {
#pragma unroll 1
    while (k < team.last) visit(0);
  }
}

/* What term(at) gives for all elements of the team's part, joined, for each of its lines. */
template <typename Verb, typename T, typename Team, typename Term, typename... Lines>
OMC_INLINE omc_of_lines<T, Team> omc_fold_lines(const Team &team, Term term, Lines &...lines) {
  T all[Team::PACK];
#pragma unroll
  for (int l = 0; l < Team::PACK; l++) all[l] = Verb::template start<T>();
  omc_each_pack(
      team,
      [&](int64_t k, int slot, int lanes) {
#pragma unroll
        for (int l = 0; l < Team::PACK; l++)
          if (l < lanes) all[l] = Verb::join(all[l], (T)term(omc_at{k, slot, l}));
      },
      lines...);
#pragma unroll
  for (int half = Team::ALONG / 2; half > 0; half /= 2)
#pragma unroll
    for (int l = 0; l < half; l++) all[l] = Verb::join(all[l], all[l + half]);
  omc_of_lines<T, Team> joined;
#pragma unroll
  for (int l = 0; l < Team::LINES; l++) joined.of[l] = team.template join<Verb>(all[l]);
  return joined;
}

/* The same of a team whose threads have a line each. */
template <typename Verb, typename T, typename Team, typename Term, typename... Lines>
OMC_INLINE T omc_fold(const Team &team, Term term, Lines &...lines) {
  static_assert(Team::LINES == 1, "one line");
  return omc_fold_lines<Verb, T>(team, term, lines...).of[0];
}

/* Writes term(at) to all elements of the team's part. Lines may lie where they are written. */
template <typename E, typename Team, typename Term, typename... Lines>
OMC_INLINE void omc_write_line(const Team &team, void *data, Term term, Lines &...lines) {
  static_assert(!Team::GROUPED, "elements are evenly apart");
  E *const to = (E *)data + team.offset();
  omc_each_pack(
      team,
      [&](int64_t k, int slot, int lanes) {
        E out[Team::PACK];
#pragma unroll
        for (int l = 0; l < Team::PACK; l++)
          if (l < lanes) out[l] = element<E>((acc_t)term(omc_at{k, slot, l}));
        omc_store(to + omc_along_line<Team>(team.lines.along, k), out, lanes);
      },
      lines...);
}

#endif

#endif
