/* Rows and elements picked by index, and their gradients: what was picked from one place is added
 * up in the order of the ids, of which it is known once they are sorted. Read by the host as C11.
 */
#ifndef OMC_CUDA_OPS_GATHER_H
#define OMC_CUDA_OPS_GATHER_H

#include "cuda/gpu/divide.h"
#include "cuda/gpu/letter.h"

enum {
  OMC_GATHER_THREADS = 256,
  OMC_GATHER_AXES = 8,
  OMC_GATHER_TILE = 32 /* neighbours in the order of ids that one thread adds up */
};

/* Ids from 0 to dim - 1, or from -dim: they count from the end then. */
typedef struct omc_gpu_ids {
  omc_sender sender;
  const void *data;
  int64_t dim;
  int32_t wide; /* of 64 bits, else of 32 */
  int32_t negative;
  int32_t outside; /* the letter_kind of others */
  int32_t depth;   /* length of an index into `dims`; 0: ids are rows */
  int64_t dims[OMC_GATHER_AXES];
} omc_gpu_ids;

/* The table is [outer, dim, inner], ids [outer, n] or, the same for all, [n]. */
typedef struct omc_gather_rows {
  omc_gpu_ids ids;
  const char *src;
  char *dst;
  int64_t units;            /* of what is picked */
  omc_gpu_divisor inner, n; /* units of a row, rows of an outer */
  int64_t outer_ids;        /* ids from one outer to the next: 0 or n */
} omc_gather_rows;

/* Ids that lie as what is picked does; strides are the table's, 0 along the axis. */
typedef struct omc_gather_lines {
  omc_gpu_ids ids;
  const void *src;
  void *dst;
  int64_t n;
  int64_t step; /* of the table along the axis */
  int64_t rank;
  omc_gpu_divisor dims[OMC_GATHER_AXES];
  int64_t strides[OMC_GATHER_AXES];
} omc_gather_lines;

/* Where each of n picked rows is from. */
typedef struct omc_gather_keys {
  int64_t *keys;
  int64_t n, nowhere; /* the key of an id that is none */
} omc_gather_keys;
typedef struct omc_row_keys {
  omc_gather_rows rows;
  omc_gather_keys to;
} omc_row_keys;
typedef struct omc_line_keys {
  omc_gather_lines lines;
  omc_gather_keys to;
} omc_line_keys;

/* dy is [repeats, n, inner], the gradient [repeats, rows, inner]. */
typedef struct omc_scatter {
  const int64_t *keys, *positions; /* sorted: row, and place in dy */
  const void *src;
  void *dst, *parts; /* [repeats, tiles, 2, inner], of what is summed in */
  int64_t n, rows;
  omc_gpu_divisor inner, tiles;
  int64_t sums;    /* repeats * tiles * inner */
  int64_t padding; /* row without gradient */
  int64_t by_freq; /* a flag: sums are divided by how many there are */
} omc_scatter;

#ifdef OMC_GPU
#include "cuda/gpu/pack.h"

/* -1 and a letter if it is none. */
OMC_INLINE int64_t omc_checked_id(const omc_gpu_ids &ids, int64_t i, int64_t dim) {
  const int64_t id = ids.wide ? ((const int64_t *)ids.data)[i] : ((const int32_t *)ids.data)[i];
  if (id >= (ids.negative ? -dim : 0) && id < dim) return id < 0 ? id + dim : id;
  omc_write(ids.sender, (omc_letter_kind)ids.outside, id, dim);
  return -1;
}

OMC_INLINE int64_t omc_id(const omc_gpu_ids &ids, int64_t i) {
  if (ids.depth == 0) return omc_checked_id(ids, i, ids.dim);
  int64_t row = 0;
  for (int d = 0; d < ids.depth; d++) {
    const int64_t id = omc_checked_id(ids, i * ids.depth + d, ids.dims[d]);
    if (id < 0) return -1;
    row = row * ids.dims[d] + id;
  }
  return row;
}

/* The row of the table that picked row number `at` is; -1: none. */
OMC_INLINE int64_t omc_row_of(const omc_gather_rows &p, int64_t at) {
  const int64_t i = omc_remainder(&at, p.n), id = omc_id(p.ids, at * p.outer_ids + i);
  return id < 0 ? -1 : at * p.ids.dim + id;
}

/* The element of the table that picked element number `at` is; -1: none. */
OMC_INLINE int64_t omc_element_of(const omc_gather_lines &p, int64_t at) {
  const int64_t id = omc_id(p.ids, at);
  int64_t from = id * p.step;
  for (int d = (int)p.rank - 1; d >= 0; d--) from += omc_remainder(&at, p.dims[d]) * p.strides[d];
  return id < 0 ? -1 : from;
}

#ifdef OMC_STORAGE
#include "cuda/gpu/lane.h"

typedef OMC_STORAGE storage_t;

/* What is put into a place joins what is there; of none it is OMC_JOIN_START. Of equal ones the
 * first, and NaN if one of them is. */
#if defined(OMC_JOIN_PRODUCT)
#define OMC_JOIN_START 1
OMC_INLINE acc_t omc_joined(acc_t a, acc_t b) { return a * b; }
#elif defined(OMC_JOIN_MOST)
#if OMC_IS_FLOAT
#define OMC_JOIN_START (-(acc_t)INFINITY)
#else
#define OMC_JOIN_START INT64_MIN
#endif
OMC_INLINE acc_t omc_joined(acc_t a, acc_t b) { return b > a || b != b ? b : a; }
#elif defined(OMC_JOIN_LEAST)
#if OMC_IS_FLOAT
#define OMC_JOIN_START ((acc_t)INFINITY)
#else
#define OMC_JOIN_START (~INT64_MIN)
#endif
OMC_INLINE acc_t omc_joined(acc_t a, acc_t b) { return b < a || b != b ? b : a; }
#else
#define OMC_JOIN_START 0
OMC_INLINE acc_t omc_joined(acc_t a, acc_t b) { return a + b; }
#endif

/* The sum of what was picked from a row, added to what the gradient is added to. */
OMC_INLINE void omc_add_to_row(const omc_scatter &p, int64_t repeat, int64_t row, int64_t column,
                               acc_t sum, int64_t count) {
  if (row >= p.rows || row == p.padding) return;
  storage_t *const to = (storage_t *)p.dst + (repeat * p.rows + row) * p.inner.by + column;
  if (p.by_freq) sum *= (acc_t)1 / (acc_t)count;
  *to = element<storage_t>(omc_joined(number<acc_t>(*to), sum));
}

/* The part of a run that goes on from the tile before, or that goes on in the next. */
OMC_INLINE acc_t *omc_part(const omc_scatter &p, int64_t repeat, int64_t tile, int which,
                           int64_t column) {
  return (acc_t *)p.parts + ((repeat * p.tiles.by + tile) * 2 + which) * p.inner.by + column;
}

OMC_INLINE bool omc_goes_on(const omc_scatter &p, int64_t i) {
  return i > 0 && i < p.n && p.keys[i - 1] == p.keys[i];
}

/* Runs of one key that begin and end within a tile are complete; of others parts are kept. */
OMC_GLOBAL(scatter_tiles, OMC_GATHER_THREADS, omc_scatter, p) {
  int64_t repeat = (int64_t)blockIdx.x * OMC_GATHER_THREADS + threadIdx.x;
  if (repeat >= p.sums) return;
  const int64_t column = omc_remainder(&repeat, p.inner), tile = omc_remainder(&repeat, p.tiles);
  const int64_t begin = tile * OMC_GATHER_TILE;
  const int64_t end = begin + OMC_GATHER_TILE < p.n ? begin + OMC_GATHER_TILE : p.n;
  const storage_t *const src = (const storage_t *)p.src + repeat * p.n * p.inner.by + column;
  int64_t first = begin;
  acc_t sum = OMC_JOIN_START;
  for (int64_t i = begin; i < end; i++) {
    sum = omc_joined(sum, number<acc_t>(src[p.positions[i] * p.inner.by]));
    if (i + 1 < end && omc_goes_on(p, i + 1)) continue;
    if (first == begin && omc_goes_on(p, begin))
      *omc_part(p, repeat, tile, 0, column) = sum;
    else if (omc_goes_on(p, i + 1))
      *omc_part(p, repeat, tile, 1, column) = sum;
    else
      omc_add_to_row(p, repeat, p.keys[i], column, sum, i + 1 - first);
    first = i + 1;
    sum = OMC_JOIN_START;
  }
}

/* Runs that begin in a tile and go on. */
OMC_GLOBAL(scatter_parts, OMC_GATHER_THREADS, omc_scatter, p) {
  int64_t repeat = (int64_t)blockIdx.x * OMC_GATHER_THREADS + threadIdx.x;
  if (repeat >= p.sums) return;
  const int64_t column = omc_remainder(&repeat, p.inner);
  int64_t tile = omc_remainder(&repeat, p.tiles);
  int64_t first = tile * OMC_GATHER_TILE, end = first + OMC_GATHER_TILE;
  if (!omc_goes_on(p, end)) return;
  const int64_t key = p.keys[end];
  if (omc_goes_on(p, first) && p.keys[first] == key) return;
  acc_t sum = *omc_part(p, repeat, tile, 1, column);
  do {
    sum = omc_joined(sum, *omc_part(p, repeat, ++tile, 0, column));
    end += OMC_GATHER_TILE;
  } while (omc_goes_on(p, end) && p.keys[end] == key);
  while (p.keys[first] != key) first++;
  for (end -= OMC_GATHER_TILE; end < p.n && p.keys[end] == key;) end++;
  omc_add_to_row(p, repeat, key, column, sum, end - first);
}

#else

template <typename T>
OMC_INLINE void omc_gather(const omc_gather_rows &p) {
  const int64_t at = (int64_t)blockIdx.x * OMC_GATHER_THREADS + threadIdx.x;
  if (at >= p.units) return;
  int64_t picked = at;
  const int64_t unit = omc_remainder(&picked, p.inner), row = omc_row_of(p, picked);
  ((T *)p.dst)[at] = row < 0 ? T() : ((const T *)p.src)[row * p.inner.by + unit];
}

template <typename T>
OMC_INLINE void omc_gather(const omc_gather_lines &p) {
  const int64_t at = (int64_t)blockIdx.x * OMC_GATHER_THREADS + threadIdx.x;
  if (at >= p.n) return;
  const int64_t from = omc_element_of(p, at);
  ((T *)p.dst)[at] = from < 0 ? T() : ((const T *)p.src)[from];
}

#define OMC_GATHER(bytes, T)                                                                   \
  OMC_GLOBAL(rows_##bytes, OMC_GATHER_THREADS, omc_gather_rows, rows) { omc_gather<T>(rows); } \
  OMC_GLOBAL(lines_##bytes, OMC_GATHER_THREADS, omc_gather_lines, lines) { omc_gather<T>(lines); }
OMC_GATHER(1, uint8_t)
OMC_GATHER(2, uint16_t)
OMC_GATHER(4, uint32_t)
OMC_GATHER(8, uint64_t)
OMC_GLOBAL(rows_16, OMC_GATHER_THREADS, omc_gather_rows, rows) { omc_gather<omc_bytes16>(rows); }

OMC_INLINE void omc_put_key(const omc_gather_keys &to, int64_t at, int64_t key) {
  to.keys[at] = key < 0 ? to.nowhere : key;
}
OMC_GLOBAL(row_keys, OMC_GATHER_THREADS, omc_row_keys, p) {
  const int64_t at = (int64_t)blockIdx.x * OMC_GATHER_THREADS + threadIdx.x;
  if (at < p.to.n) omc_put_key(p.to, at, omc_row_of(p.rows, at));
}
OMC_GLOBAL(line_keys, OMC_GATHER_THREADS, omc_line_keys, p) {
  const int64_t at = (int64_t)blockIdx.x * OMC_GATHER_THREADS + threadIdx.x;
  if (at < p.to.n) omc_put_key(p.to, at, omc_element_of(p.lines, at));
}

#endif

#endif

#endif
