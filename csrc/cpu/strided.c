#include "cpu/strided.h"

#include <string.h>

#include "base/int.h"
#include "cpu/parallel.h"

#define LINE 64  /* bytes of a cache line: a side of a transposed tile */
#define ACROSS 4 /* of them make the other side */

/* ---- copies of rows and tiles, by element size ---- */

typedef uint8_t u8 __attribute__((may_alias));
typedef uint16_t u16 __attribute__((may_alias));
typedef uint32_t u32 __attribute__((may_alias));
typedef uint64_t u64 __attribute__((may_alias));

/* n elements, ds and ss elements apart; `run` takes both to be 1, `repeat` takes ss to be 0. */
typedef void (*row_fn)(void *dst, int64_t ds, const void *src, int64_t ss, int64_t n);

/* dst[i * ds + k] = src[i + k * ss] for i < rows, k < cols; rows make at most a cache line. */
typedef void (*tile_fn)(void *dst, int64_t ds, const void *src, int64_t ss, int64_t rows,
                        int64_t cols);

typedef struct mover {
  row_fn run, repeat, strided;
  tile_fn tile;
} mover;

#define MOVER(T)                                                                           \
  static void run_##T(void *dst, int64_t ds, const void *src, int64_t ss, int64_t n) {     \
    (void)ds, (void)ss;                                                                    \
    memcpy(dst, src, (size_t)n * sizeof(T));                                               \
  }                                                                                        \
  static void repeat_##T(void *dst, int64_t ds, const void *src, int64_t ss, int64_t n) {  \
    (void)ds, (void)ss;                                                                    \
    const T x = *(const T *)src;                                                           \
    for (int64_t k = 0; k < n; k++) ((T *)dst)[k] = x;                                     \
  }                                                                                        \
  static void strided_##T(void *dst, int64_t ds, const void *src, int64_t ss, int64_t n) { \
    for (int64_t k = 0; k < n; k++) ((T *)dst)[k * ds] = ((const T *)src)[k * ss];         \
  }                                                                                        \
  /* By way of a buffer, so that no cache line is fetched twice whatever the strides. */   \
  static void tile_##T(void *dst, int64_t ds, const void *src, int64_t ss, int64_t rows,   \
                       int64_t cols) {                                                     \
    enum { N = LINE / sizeof(T) };                                                         \
    T buffer[N][N];                                                                        \
    for (int64_t k = 0; k < cols; k += N) {                                                \
      const int64_t n = cols - k < N ? cols - k : N;                                       \
      const T *s = (const T *)src + k * ss;                                                \
      T *d = (T *)dst + k;                                                                 \
      if (n == N && rows == N) {                                                           \
        for (int64_t c = 0; c < N; c++)                                                    \
          for (int64_t i = 0; i < N; i++) buffer[i][c] = s[i + c * ss];                    \
        for (int64_t i = 0; i < N; i++) memcpy(d + i * ds, buffer[i], sizeof buffer[i]);   \
      } else {                                                                             \
        for (int64_t c = 0; c < n; c++)                                                    \
          for (int64_t i = 0; i < rows; i++) d[i * ds + c] = s[i + c * ss];                \
      }                                                                                    \
    }                                                                                      \
  }
MOVER(u8)
MOVER(u16)
MOVER(u32)
MOVER(u64)

#define MOVER_ROW(T) {run_##T, repeat_##T, strided_##T, tile_##T}
static const mover movers[] = {MOVER_ROW(u8), MOVER_ROW(u16), MOVER_ROW(u32), MOVER_ROW(u64)};

static const mover *mover_of(size_t size) { return &movers[__builtin_ctzll(size)]; }

/* ---- preparing ---- */

omc_strided omc_strided_of(const omc_box *box, size_t size) {
  const mover *m = mover_of(size);
  omc_strided c = {*box, size, NULL};
  omc_box *b = &c.box;
  omc_box_collapse(b);
  const int32_t last = b->rank - 1, axis = omc_box_transposed_axis(b);
  if (axis >= 0)
    omc_box_move_axis(b, axis, last - 1);
  else if (b->dst[last] == 1 && b->src[last] == 1)
    c.row = m->run;
  else
    c.row = b->dst[last] == 1 && b->src[last] == 0 ? m->repeat : m->strided;
  return c;
}

/* ---- running ---- */

typedef struct job {
  const omc_strided *copy;
  const char *src;
  char *dst;
} job;

/* A position in the first `rank` dims of a copy. */
typedef struct walk {
  int32_t rank;
  int64_t at[OMC_BOX_RANK];
  int64_t src, dst; /* elements */
} walk;

static walk walk_to(const omc_box *c, int32_t rank, int64_t position) {
  walk w = {.rank = rank, .src = c->src_offset, .dst = c->dst_offset};
  for (int32_t i = rank - 1; i >= 0; i--) {
    w.at[i] = position % c->dims[i];
    position /= c->dims[i];
    w.src += w.at[i] * c->src[i];
    w.dst += w.at[i] * c->dst[i];
  }
  return w;
}

static void walk_next(walk *w, const omc_box *c) {
  for (int32_t i = w->rank - 1; i >= 0; i--) {
    w->src += c->src[i];
    w->dst += c->dst[i];
    if (++w->at[i] < c->dims[i]) return;
    w->src -= c->dims[i] * c->src[i];
    w->dst -= c->dims[i] * c->dst[i];
    w->at[i] = 0;
  }
}

/* Elements begin .. end-1, row by row; the first and the last row may be partial. */
static void copy_rows(omc_range range, void *ctx) {
  const job *j = ctx;
  const omc_box *c = &j->copy->box;
  const int32_t last = c->rank - 1;
  const int64_t n = c->dims[last], ss = c->src[last], ds = c->dst[last],
                size = (int64_t)j->copy->size;
  walk w = walk_to(c, last, range.begin / n);
  for (int64_t p = range.begin, k = range.begin % n; p < range.end; k = 0) {
    const int64_t left = range.end - p, len = n - k < left ? n - k : left;
    j->copy->row(j->dst + (w.dst + k * ds) * size, ds, j->src + (w.src + k * ss) * size, ss, len);
    walk_next(&w, c);
    p += len;
  }
}

static void copy_tiles(omc_range range, void *ctx) {
  const job *j = ctx;
  const omc_box *c = &j->copy->box;
  const int32_t last = c->rank - 1, row = last - 1;
  const int64_t rows = c->dims[row], cols = c->dims[last], size = (int64_t)j->copy->size;
  const int64_t high = LINE / size, wide = ACROSS * high;
  const int64_t down = omc_ceil_div(rows, high), across = omc_ceil_div(cols, wide);
  const tile_fn tile = mover_of(j->copy->size)->tile;
  for (int64_t t = range.begin; t < range.end; t++) {
    const walk w = walk_to(c, row, t / (down * across));
    const int64_t i = t % down * high, k = t / down % across * wide;
    tile(j->dst + (w.dst + i * c->dst[row] + k) * size, c->dst[row],
         j->src + (w.src + i + k * c->src[last]) * size, c->src[last], omc_min(rows - i, high),
         omc_min(cols - k, wide));
  }
}

void omc_strided_copy(const omc_strided *copy, void *dst, const void *src, int threads) {
  const omc_box *c = &copy->box;
  job j = {copy, src, dst};
  int64_t n = omc_box_numel(c);
  if (n == 0) return;
  if (copy->row) {
    omc_parallel_for(n, omc_grain(OMC_GRAIN_BYTES, (int64_t)copy->size), threads, copy_rows, &j);
  } else {
    const int64_t rows = c->dims[c->rank - 2], cols = c->dims[c->rank - 1];
    const int64_t high = LINE / (int64_t)copy->size;
    n = n / rows / cols * omc_ceil_div(rows, high) * omc_ceil_div(cols, ACROSS * high);
    omc_parallel_for(n, omc_grain(OMC_GRAIN_BYTES, LINE * ACROSS * high), threads, copy_tiles, &j);
  }
}

void omc_strided_fill(void *dst, int64_t n, size_t size, const void *value, int threads) {
  static const uint64_t zero = 0;
  const omc_box all = {.rank = 1, .dims = {n}, .dst = {1}};
  const omc_strided copy = omc_strided_of(&all, size);
  omc_strided_copy(&copy, dst, value ? value : &zero, threads);
}
