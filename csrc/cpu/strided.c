#include "cpu/strided.h"

#include <string.h>

#include "base/int.h"
#include "cpu/parallel.h"

#define LINE 64  /* bytes of a cache line: a side of a transposed tile */
#define ACROSS 4 /* of them make the other side */

/* ---- copies of rows and tiles, by element size ---- */

#define VECTOR 16 /* bytes, which every machine has */
#define ELEMENT(T, bits)                               \
  typedef uint##bits##_t T __attribute__((may_alias)); \
  typedef uint##bits##_t T##_vector __attribute__((vector_size(VECTOR), may_alias));
ELEMENT(u8, 8)
ELEMENT(u16, 16)
ELEMENT(u32, 32)
ELEMENT(u64, 64)

/* dst[i * ds + k] = src[i + k * ss] for i < rows, k < cols; rows make at most a cache line. */
typedef void (*tile_fn)(void *dst, int64_t ds, const void *src, int64_t ss, int64_t rows,
                        int64_t cols);

/* dst[2 * k] = a[k], dst[2 * k + 1] = b[k] for k < n. */
typedef void (*zip_fn)(void *restrict dst, const void *restrict a, const void *restrict b,
                       int64_t n);

/* `run` takes the steps within rows to be 1, `repeat` that of the source to be 0. What they read of
 * the rows they read once: for all the compiler knows, an element written might change it. */
typedef struct mover {
  omc_rows_fn run, repeat, strided;
  tile_fn tile;
  zip_fn zip;
} mover;

/* Elements of two vectors in turn, of their first halves and of their second. */
#if defined(__clang__)
#define SHUFFLE(T, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(T, a, b, ...) __builtin_shuffle(a, b, (T##_vector){__VA_ARGS__})
#endif
#define LOW_u8 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH_u8 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define LOW_u16 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH_u16 4, 12, 5, 13, 6, 14, 7, 15
#define LOW_u32 0, 4, 1, 5
#define HIGH_u32 2, 6, 3, 7
#define LOW_u64 0, 2
#define HIGH_u64 1, 3

#define MOVER(T)                                                                                  \
  static void run_##T(void *dst, const void *src, const omc_rows *r) {                            \
    for (int64_t i = 0; i < r->rows; i++)                                                         \
      memcpy((T *)dst + i * r->ds, (const T *)src + i * r->ss, (size_t)r->n * sizeof(T));         \
  }                                                                                               \
  static void repeat_##T(void *dst, const void *src, const omc_rows *r) {                         \
    const int64_t n = r->n;                                                                       \
    for (int64_t i = 0; i < r->rows; i++) {                                                       \
      T *const d = (T *)dst + i * r->ds;                                                          \
      const T x = ((const T *)src)[i * r->ss];                                                    \
      for (int64_t k = 0; k < n; k++) d[k] = x;                                                   \
    }                                                                                             \
  }                                                                                               \
  static inline void every_second_##T(T *restrict d, const T *restrict s, int64_t n) {            \
    for (int64_t k = 0; k < n; k++) d[k] = s[2 * k];                                              \
  }                                                                                               \
  static void zip_##T(void *restrict dst, const void *restrict a, const void *restrict b,         \
                      int64_t n) {                                                                \
    T *const d = dst;                                                                             \
    const T *const x = a, *const y = b;                                                           \
    for (int64_t k = 0; k < n; k++) {                                                             \
      d[2 * k] = x[k];                                                                            \
      d[2 * k + 1] = y[k];                                                                        \
    }                                                                                             \
  }                                                                                               \
  static void strided_##T(void *dst, const void *src, const omc_rows *r) {                        \
    const int64_t n = r->n, step = r->d, of_src = r->s;                                           \
    for (int64_t i = 0; i < r->rows; i++) {                                                       \
      T *const d = (T *)dst + i * r->ds;                                                          \
      const T *const s = (const T *)src + i * r->ss;                                              \
      if (step == 1 && of_src == 2)                                                               \
        every_second_##T(d, s, n);                                                                \
      else if (step == 1 && of_src == -1)                                                         \
        for (int64_t k = 0; k < n; k++) d[k] = s[-k];                                             \
      else                                                                                        \
        for (int64_t k = 0; k < n; k++) d[k * step] = s[k * of_src];                              \
    }                                                                                             \
  }                                                                                               \
  /* Transposes a square in registers. Each round makes the highest bit of an element's row the   \
   * lowest of its column, and the other way around. */                                           \
  static inline void square_##T(T *dst, int64_t ds, const T *src, int64_t ss) {                   \
    enum { N = VECTOR / sizeof(T) };                                                              \
    T##_vector row[N], next[N];                                                                   \
    for (int64_t k = 0; k < N; k++) memcpy(&row[k], src + k * ss, VECTOR);                        \
    for (int round = 1; round < N; round *= 2) {                                                  \
      for (int i = 0; i < N / 2; i++) {                                                           \
        next[2 * i] = SHUFFLE(T, row[i], row[i + N / 2], LOW_##T);                                \
        next[2 * i + 1] = SHUFFLE(T, row[i], row[i + N / 2], HIGH_##T);                           \
      }                                                                                           \
      memcpy(row, next, sizeof row);                                                              \
    }                                                                                             \
    for (int64_t i = 0; i < N; i++) memcpy(dst + i * ds, &row[i], VECTOR);                        \
  }                                                                                               \
  /* By way of a buffer, so that no cache line is fetched twice whatever the strides. */          \
  static void tile_##T(void *dst, int64_t ds, const void *src, int64_t ss, int64_t rows,          \
                       int64_t cols) {                                                            \
    enum { N = LINE / sizeof(T), SIDE = VECTOR / sizeof(T) };                                     \
    T buffer[N][N];                                                                               \
    for (int64_t k = 0; k < cols; k += N) {                                                       \
      const int64_t n = cols - k < N ? cols - k : N;                                              \
      const T *s = (const T *)src + k * ss;                                                       \
      T *d = (T *)dst + k;                                                                        \
      if (n == N && rows == N) {                                                                  \
        for (int64_t c = 0; c < N; c += SIDE)                                                     \
          for (int64_t i = 0; i < N; i += SIDE) square_##T(&buffer[i][c], N, s + i + c * ss, ss); \
        for (int64_t i = 0; i < N; i++) memcpy(d + i * ds, buffer[i], sizeof buffer[i]);          \
      } else {                                                                                    \
        for (int64_t c = 0; c < n; c++)                                                           \
          for (int64_t i = 0; i < rows; i++) d[i * ds + c] = s[i + c * ss];                       \
      }                                                                                           \
    }                                                                                             \
  }
MOVER(u8)
MOVER(u16)
MOVER(u32)
MOVER(u64)

#define MOVER_ROW(T) {run_##T, repeat_##T, strided_##T, tile_##T, zip_##T}
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
    c.rows = m->run;
  else
    c.rows = b->dst[last] == 1 && b->src[last] == 0 ? m->repeat : m->strided;
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

/* Moves on along the last of them, at most to its end. */
static void walk_on(walk *w, const omc_box *c, int64_t n) {
  for (int32_t i = w->rank - 1; i >= 0; i--, n = 1) {
    w->src += n * c->src[i];
    w->dst += n * c->dst[i];
    w->at[i] += n;
    if (w->at[i] < c->dims[i]) return;
    w->src -= c->dims[i] * c->src[i];
    w->dst -= c->dims[i] * c->dst[i];
    w->at[i] = 0;
  }
}

/* Elements begin .. end-1: rows along the last axis, as many at once as lie one after the other
 * along the axis before it; the first and the last row may be partial. */
static void copy_rows(omc_range range, void *ctx) {
  const job *j = ctx;
  const omc_box *c = &j->copy->box;
  const int32_t last = c->rank - 1, before = last - 1;
  const int64_t n = c->dims[last], size = (int64_t)j->copy->size;
  omc_rows rows = {.d = c->dst[last], .s = c->src[last]};
  if (before >= 0) rows.ds = c->dst[before], rows.ss = c->src[before];
  walk w = walk_to(c, last, range.begin / n);
  for (int64_t p = range.begin, k = range.begin % n; p < range.end; k = 0) {
    const int64_t left = range.end - p;
    rows.n = omc_min(n - k, left);
    rows.rows = k || left < n || before < 0 ? 1 : omc_min(left / n, c->dims[before] - w.at[before]);
    j->copy->rows(j->dst + (w.dst + k * rows.d) * size, j->src + (w.src + k * rows.s) * size,
                  &rows);
    walk_on(&w, c, rows.rows);
    p += rows.rows * rows.n;
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
  if (copy->rows) {
    omc_parallel_for(n, omc_grain(OMC_GRAIN_BYTES, (int64_t)copy->size), threads, copy_rows, &j);
  } else {
    const int64_t rows = c->dims[c->rank - 2], cols = c->dims[c->rank - 1];
    const int64_t high = LINE / (int64_t)copy->size;
    n = n / rows / cols * omc_ceil_div(rows, high) * omc_ceil_div(cols, ACROSS * high);
    omc_parallel_for(n, omc_grain(OMC_GRAIN_BYTES, LINE * ACROSS * high), threads, copy_tiles, &j);
  }
}

bool omc_strided_zips(const omc_strided *a, const omc_strided *b) {
  const omc_box *x = &a->box, *y = &b->box;
  return x->rank == 1 && y->rank == 1 && x->dims[0] == y->dims[0] && x->src[0] == 1 &&
         y->src[0] == 1 && x->dst[0] == 2 && y->dst[0] == 2 && y->dst_offset == x->dst_offset + 1;
}

typedef struct zip_job {
  zip_fn zip;
  int64_t size; /* bytes of an element */
  const char *a, *b;
  char *dst;
} zip_job;

static void zip_range(omc_range range, void *ctx) {
  const zip_job *j = ctx;
  const int64_t at = range.begin * j->size;
  j->zip(j->dst + 2 * at, j->a + at, j->b + at, range.end - range.begin);
}

void omc_strided_zip(const omc_strided *a, const omc_strided *b, void *dst, const void *src_a,
                     const void *src_b, int threads) {
  const int64_t size = (int64_t)a->size;
  zip_job j = {mover_of(a->size)->zip, size, (const char *)src_a + a->box.src_offset * size,
               (const char *)src_b + b->box.src_offset * size,
               (char *)dst + a->box.dst_offset * size};
  omc_parallel_for(a->box.dims[0], omc_grain(OMC_GRAIN_BYTES, 2 * size), threads, zip_range, &j);
}

void omc_strided_fill(void *dst, int64_t n, size_t size, const void *value, int threads) {
  static const uint64_t zero = 0;
  const omc_box all = {.rank = 1, .dims = {n}, .dst = {1}};
  const omc_strided copy = omc_strided_of(&all, size);
  omc_strided_copy(&copy, dst, value ? value : &zero, threads);
}
