/* Pooling: a thread for each element of a forward, and of a gradient for each pack of neighbours,
 * which is gathered from the windows that they are in, in the order of these. Where channels come
 * last, a thread has a pack of those of a place. OMC_INDEX is what elements are counted in, OMC_TAP
 * what numbers of taps are stored as. */
#ifndef OMC_CUDA_OPS_POOL_H
#define OMC_CUDA_OPS_POOL_H

#include "cuda/gpu/divide.h"
#include "cuda/gpu/letter.h"
#include "cuda/gpu/lines.h"

enum { OMC_POOL_THREADS = 256 }; /* of a block */

/* As omc_pool_form of csrc/ops/forms.h. */
typedef struct omc_pool_axis {
  int64_t in, out, kernel, stride, dilation, before, after;
  omc_gpu_divisor by_in, by_out, by_stride, by_dilation, by_kernel;
} omc_pool_axis;

typedef struct omc_pool {
  omc_sender sender;
  int64_t n;             /* threads */
  omc_gpu_divisor of[3]; /* them in a plane, by axis */
  omc_pool_axis axis[3];
  int64_t channels;      /* that come last, else 1 */
  omc_gpu_divisor packs; /* of them, at a place */
  int64_t divisor;
  int32_t adaptive, with_pad;
  const void *from;
  void *to;
  int64_t *indices; /* of maxima, in their plane; NULL: not wanted, as the next */
  void *taps;       /* which of its window a maximum is */
} omc_pool;

/* A gradient of averages of whole planes. */
typedef struct omc_spread {
  int64_t n; /* elements */
  omc_gpu_divisor plane, channels;
  int64_t count; /* that an average is of */
  const void *from;
  void *to;
} omc_spread;

#ifdef OMC_GPU

typedef OMC_INDEX index_t;
typedef OMC_TAP tap_t;

/* Elements and windows of a row that a thread asks for before it waits for the first: those of
 * windows of 3, and of a pack where windows are 2 apart. */
enum { TAPS_AHEAD = 3, WINDOWS_AHEAD = OMC_ROW_PACK / 2 + 1 };

OMC_INLINE index_t least(index_t a, index_t b) { return a < b ? a : b; }

/* Of an n that is not negative. */
OMC_INLINE index_t quotient(index_t n, const omc_gpu_divisor &d) {
  return sizeof(index_t) == 4 ? (index_t)omc_quotient((uint32_t)n, d.multiplier, d.shift)
                              : (index_t)omc_quotient((int64_t)n, d);
}
OMC_INLINE index_t quotient_up(index_t n, const omc_gpu_divisor &d) {
  return quotient(n + (index_t)d.by - 1, d);
}

OMC_INLINE index_t pool_thread() {
  return (index_t)blockIdx.x * (index_t)blockDim.x + (index_t)threadIdx.x;
}

struct pool_place {
  index_t plane, at[3];

  OMC_METHOD pool_place(const omc_pool &p, index_t i) {
#pragma unroll
    for (int a = 2; a >= 0; a--) {
      const index_t rest = quotient(i, p.of[a]);
      at[a] = i - rest * (index_t)p.of[a].by;
      i = rest;
    }
    plane = i;
  }
};

OMC_INLINE index_t in_of(const omc_pool &p, int axis) { return (index_t)p.axis[axis].in; }
OMC_INLINE index_t out_of(const omc_pool &p, int axis) { return (index_t)p.axis[axis].out; }
OMC_INLINE index_t in_plane(const omc_pool &p) { return in_of(p, 0) * in_of(p, 1) * in_of(p, 2); }
OMC_INLINE index_t out_plane(const omc_pool &p) {
  return out_of(p, 0) * out_of(p, 1) * out_of(p, 2);
}

/* Elements [start, end) of an axis, or windows that elements may be in. */
struct pool_range {
  index_t start, end;
  OMC_METHOD bool has(index_t i) const { return i >= start && i < end; }
};

OMC_INLINE pool_range within(index_t start, index_t end, index_t n) {
  return pool_range{start < 0 ? 0 : start, least(end, n)};
}

/* Window k of an axis, and what its average is divided by. */
OMC_INLINE pool_range window_of(const omc_pool &p, int axis, index_t k, index_t *size) {
  const omc_pool_axis &a = p.axis[axis];
  const index_t in = (index_t)a.in;
  index_t start, end;
  if (p.adaptive) {
    start = quotient(k * in, a.by_out), end = quotient_up((k + 1) * in, a.by_out);
  } else {
    start = k * (index_t)a.stride - (index_t)a.before;
    end = least(start + (index_t)a.kernel, in + (index_t)a.after);
  }
  const pool_range inside = within(start, end, in);
  const index_t length = p.with_pad ? end - start : inside.end - inside.start;
  *size = length > 1 ? length : 1;
  return inside;
}

/* Windows that elements from one to another of an axis are in: none are missing. */
OMC_INLINE pool_range windows_with(const omc_pool &p, int axis, index_t first_one,
                                   index_t last_one) {
  const omc_pool_axis &a = p.axis[axis];
  const index_t out = (index_t)a.out;
  if (p.adaptive)
    return within(quotient(first_one * out, a.by_in), quotient_up((last_one + 1) * out, a.by_in),
                  out);
  const index_t before = (index_t)a.before;
  const index_t first = first_one + before - ((index_t)a.kernel - 1) * (index_t)a.dilation;
  return within(first <= 0 ? 0 : quotient_up(first, a.by_stride),
                quotient(last_one + before, a.by_stride) + 1, out);
}

/* ---- what a thread has at each place ---- */

template <int N>
struct pool_lanes {
  index_t first, apart; /* from one place to the next */
  int lanes;

  typedef omc_loaded<storage_t, N> loaded;
  OMC_METHOD index_t offset(index_t place) const { return place * apart + first; }
  OMC_METHOD loaded read(const omc_pool &p, index_t place) const {
    loaded e;
    omc_load(e, (const storage_t *)p.from + offset(place), lanes);
    return e;
  }
  OMC_METHOD void write(const omc_pool &p, index_t place, const acc_t (&of)[N]) const {
    storage_t out[N];
#pragma unroll
    for (int l = 0; l < N; l++) out[l] = element<storage_t>(of[l]);
    omc_store((storage_t *)p.to + offset(place), out, lanes);
  }
};

typedef pool_lanes<1> pool_element;
typedef pool_lanes<OMC_ROW_PACK> pool_channels;

OMC_INLINE pool_channels channels_of(const omc_pool &p, index_t pack) {
  const index_t first = pack * OMC_ROW_PACK, n = (index_t)p.channels;
  return pool_channels{first, n, (int)least(OMC_ROW_PACK, n - first)};
}

/* Calls f(place, lanes) for what a thread is for. */
template <typename F>
OMC_INLINE void for_element(const omc_pool &p, F f) {
  const index_t i = pool_thread();
  if (i < (index_t)p.n) f(i, pool_element{0, 1, 1});
}
template <typename F>
OMC_INLINE void for_channels(const omc_pool &p, F f) {
  const index_t i = pool_thread(), place = quotient(i, p.packs);
  if (i < (index_t)p.n) f(place, channels_of(p, i - place * (index_t)p.packs.by));
}

/* ---- maxima ---- */

/* The taps of a window that are inside along an axis. */
struct pool_taps {
  index_t start, first, end, apart;

  OMC_METHOD pool_taps(const omc_pool_axis &a, index_t k)
      : start(k * (index_t)a.stride - (index_t)a.before), apart((index_t)a.dilation) {
    const index_t in = (index_t)a.in;
    first = start < 0 ? quotient_up(-start, a.by_dilation) : 0;
    end = least(start < in ? quotient_up(in - start, a.by_dilation) : 0, (index_t)a.kernel);
  }
  OMC_METHOD index_t operator[](index_t tap) const { return start + tap * apart; }
};

/* Where tap number `tap` of a window is in its plane, if it is one. */
OMC_INLINE index_t place_of_tap(const omc_pool &p, const index_t (&window)[3], index_t tap) {
  const index_t row = quotient(tap, p.axis[2].by_kernel),
                layer = quotient(row, p.axis[1].by_kernel);
  const index_t taps[] = {layer, row - layer * (index_t)p.axis[1].kernel,
                          tap - row * (index_t)p.axis[2].kernel};
  index_t place = 0;
#pragma unroll
  for (int a = 0; a < 3; a++)
    place = place * in_of(p, a) + window[a] * (index_t)p.axis[a].stride -
            (index_t)p.axis[a].before + taps[a] * (index_t)p.axis[a].dilation;
  return place;
}

OMC_INLINE int64_t taps_of(const omc_pool &p) {
  return p.axis[0].kernel * p.axis[1].kernel * p.axis[2].kernel;
}

/* As in PyTorch, NaN is larger than all, and of several the last is taken; an empty window is -inf
 * at what would be its first tap. */
template <int N>
OMC_INLINE void max_of_window(const omc_pool &p, index_t window, const pool_lanes<N> &of) {
  const pool_place place(p, window);
  const index_t plane = place.plane * in_plane(p);
  const pool_taps z(p.axis[0], place.at[0]), y(p.axis[1], place.at[1]), w(p.axis[2], place.at[2]);
  const auto row = [&](index_t i, index_t j) { return (z[i] * in_of(p, 1) + y[j]) * in_of(p, 2); };
  const auto tap = [&](index_t i, index_t j) {
    return (i * (index_t)p.axis[1].kernel + j) * (index_t)p.axis[2].kernel;
  };
  const index_t none = tap(z.first, y.first) + w.first;
  acc_t most[N];
  index_t found[N];
#pragma unroll
  for (int l = 0; l < N; l++) most[l] = -(acc_t)INFINITY, found[l] = none;
  for (index_t i = z.first; i < z.end; i++)
    for (index_t j = y.first; j < y.end; j++) {
      const index_t here = row(i, j), first = tap(i, j);
#pragma unroll 1
      for (index_t k = w.first; k < w.end; k += TAPS_AHEAD) {
        typename pool_lanes<N>::loaded e[TAPS_AHEAD];
#pragma unroll
        for (int t = 0; t < TAPS_AHEAD; t++)
          e[t] = of.read(p, plane + here + w[least(k + t, w.end - 1)]);
#pragma unroll
        for (int t = 0; t < TAPS_AHEAD; t++)
#pragma unroll
          for (int l = 0; l < N; l++) {
            const acc_t v = number<acc_t>(e[t][l]);
            if (k + t < w.end && (v > most[l] || v != v)) most[l] = v, found[l] = first + k + t;
          }
      }
    }
  of.write(p, window, most);
  if (p.taps) {
    tap_t taps[N];
#pragma unroll
    for (int l = 0; l < N; l++) taps[l] = (tap_t)found[l];
    omc_store((tap_t *)p.taps + of.offset(window), taps, of.lanes);
  }
  if (p.indices) {
    int64_t indices[N];
#pragma unroll
    for (int l = 0; l < N; l++) indices[l] = place_of_tap(p, place.at, found[l]);
    omc_store(p.indices + of.offset(window), indices, of.lanes);
  }
}

OMC_GLOBAL_WIDE(MaxPool, OMC_POOL_THREADS, omc_pool, p) {
  for_element(p, [&](index_t i, const pool_element &of) { max_of_window(p, i, of); });
}
OMC_GLOBAL_WIDE(MaxPool_last, OMC_POOL_THREADS, omc_pool, p) {
  for_channels(p, [&](index_t i, const pool_channels &of) { max_of_window(p, i, of); });
}

/* ---- averages ---- */

template <int N>
OMC_INLINE void average_of_window(const omc_pool &p, index_t window, const pool_lanes<N> &of) {
  const pool_place place(p, window);
  const index_t plane = place.plane * in_plane(p);
  index_t size[3];
  pool_range w[3];
  for (int a = 0; a < 3; a++) w[a] = window_of(p, a, place.at[a], &size[a]);
  acc_t sum[N] = {};
  for (index_t z = w[0].start; z < w[0].end; z++)
    for (index_t y = w[1].start; y < w[1].end; y++)
      for (index_t k = w[2].start; k < w[2].end; k++) {
        const auto e = of.read(p, plane + (z * in_of(p, 1) + y) * in_of(p, 2) + k);
#pragma unroll
        for (int l = 0; l < N; l++) sum[l] += number<acc_t>(e[l]);
      }
  const acc_t by = (acc_t)(p.divisor ? p.divisor : size[0] * size[1] * size[2]);
#pragma unroll
  for (int l = 0; l < N; l++) sum[l] /= by;
  of.write(p, window, sum);
}

OMC_GLOBAL_WIDE(AveragePool, OMC_POOL_THREADS, omc_pool, p) {
  for_element(p, [&](index_t i, const pool_element &of) { average_of_window(p, i, of); });
}
OMC_GLOBAL_WIDE(AveragePool_last, OMC_POOL_THREADS, omc_pool, p) {
  for_channels(p, [&](index_t i, const pool_channels &of) { average_of_window(p, i, of); });
}

/* ---- gradients ---- */

/* A pack of neighbours in a row of what was pooled. */
struct pool_pack {
  index_t plane, z, y, first;
  int lanes;

  OMC_METHOD pool_pack(const omc_pool &p, index_t i) {
    const pool_place place(p, i);
    plane = place.plane, z = place.at[0], y = place.at[1];
    first = place.at[2] * OMC_ROW_PACK;
    lanes = (int)least(OMC_ROW_PACK, in_of(p, 2) - first);
  }
  OMC_METHOD index_t in_its_plane(const omc_pool &p) const {
    return (z * in_of(p, 1) + y) * in_of(p, 2) + first;
  }
};

/* What a window gives to some elements of a pack. */
struct pool_share {
  acc_t value;
  pool_range to;
};

/* Tells of what is no tap of a window. */
OMC_INLINE bool is_tap(const omc_pool &p, int64_t tap) {
  const bool is = (uint64_t)tap < (uint64_t)taps_of(p);
  if (!is) omc_write(p.sender, OMC_LETTER_INDEX, tap, taps_of(p));
  return is;
}

struct share_of_maximum {
  const omc_pool &p;
  const pool_pack &pack;
  struct given {
    tap_t tap;
    storage_t dy;
  };
  OMC_METHOD given read(index_t window) const {
    return given{((const tap_t *)p.taps)[window], ((const storage_t *)p.from)[window]};
  }
  OMC_METHOD pool_share of(const given &g, index_t z, index_t y, index_t k) const {
    if (!is_tap(p, g.tap)) return pool_share{0, {0, 0}};
    const index_t window[] = {z, y, k};
    const index_t to = place_of_tap(p, window, g.tap) - pack.in_its_plane(p);
    return pool_share{number<acc_t>(g.dy), {to, to + 1}};
  }
};

struct share_of_average {
  const omc_pool &p;
  const pool_pack &pack;
  typedef storage_t given;
  OMC_METHOD given read(index_t window) const { return ((const storage_t *)p.from)[window]; }
  OMC_METHOD pool_share of(given dy, index_t z, index_t y, index_t k) const {
    index_t size[3];
    const bool is_in =
        window_of(p, 0, z, &size[0]).has(pack.z) && window_of(p, 1, y, &size[1]).has(pack.y);
    const pool_range w = window_of(p, 2, k, &size[2]);
    const acc_t by = (acc_t)(p.divisor ? p.divisor : size[0] * size[1] * size[2]);
    return pool_share{number<acc_t>(dy) / by,
                      {w.start - pack.first, is_in ? w.end - pack.first : 0}};
  }
};

template <typename Share>
OMC_INLINE void gather(const omc_pool &p) {
  const index_t i = pool_thread();
  if (i >= (index_t)p.n) return;
  const pool_pack pack(p, i);
  const Share share{p, pack};
  const pool_range along_z = windows_with(p, 0, pack.z, pack.z);
  const pool_range along_y = windows_with(p, 1, pack.y, pack.y);
  const pool_range along = windows_with(p, 2, pack.first, pack.first + pack.lanes - 1);
  acc_t sum[OMC_ROW_PACK] = {};
  for (index_t z = along_z.start; z < along_z.end; z++)
    for (index_t y = along_y.start; y < along_y.end; y++)
#pragma unroll 1
      for (index_t k = along.start; k < along.end; k += WINDOWS_AHEAD) {
        const index_t row = ((pack.plane * out_of(p, 0) + z) * out_of(p, 1) + y) * out_of(p, 2);
        typename Share::given given[WINDOWS_AHEAD];
#pragma unroll
        for (int j = 0; j < WINDOWS_AHEAD; j++)
          given[j] = share.read(row + least(k + j, along.end - 1));
#pragma unroll
        for (int j = 0; j < WINDOWS_AHEAD; j++) {
          if (k + j >= along.end) break;
          const pool_share s = share.of(given[j], z, y, k + j);
#pragma unroll
          for (int l = 0; l < OMC_ROW_PACK; l++)
            if (s.to.has(l)) sum[l] += s.value;
        }
      }
  storage_t out[OMC_ROW_PACK];
#pragma unroll
  for (int l = 0; l < OMC_ROW_PACK; l++) out[l] = element<storage_t>(sum[l]);
  omc_store((storage_t *)p.to + pack.plane * in_plane(p) + pack.in_its_plane(p), out, pack.lanes);
}

OMC_GLOBAL_WIDE(MaxPoolGrad, OMC_POOL_THREADS, omc_pool, p) { gather<share_of_maximum>(p); }
OMC_GLOBAL_WIDE(AveragePoolGrad, OMC_POOL_THREADS, omc_pool, p) { gather<share_of_average>(p); }

/* ---- gradients with channels last ---- */

typedef acc_t pool_sums[OMC_ROW_PACK];

/* Adds what a window, `at` of all, gives to a place. */
struct add_maximum {
  OMC_METHOD void operator()(const omc_pool &p, const pool_channels &of, const pool_place &place,
                             const index_t (&window)[3], index_t at, pool_sums &sum) const {
    index_t wanted = 0;
    for (int a = 0; a < 3; a++) {
      const omc_pool_axis &axis = p.axis[a];
      const index_t start = window[a] * (index_t)axis.stride - (index_t)axis.before;
      const index_t tap = quotient(place.at[a] - start, axis.by_dilation);
      if (start + tap * (index_t)axis.dilation != place.at[a]) return;
      wanted = wanted * (index_t)axis.kernel + tap;
    }
    const auto dy = of.read(p, at);
    omc_loaded<tap_t, OMC_ROW_PACK> taps;
    omc_load(taps, (const tap_t *)p.taps + of.offset(at), of.lanes);
#pragma unroll
    for (int l = 0; l < OMC_ROW_PACK; l++) {
      if (l >= of.lanes) break;
      if (is_tap(p, taps[l]) && taps[l] == wanted) sum[l] += number<acc_t>(dy[l]);
    }
  }
};

struct add_average {
  OMC_METHOD void operator()(const omc_pool &p, const pool_channels &of, const pool_place &place,
                             const index_t (&window)[3], index_t at, pool_sums &sum) const {
    index_t size[3];
    bool is_in = true;
    for (int a = 0; a < 3; a++)
      is_in = window_of(p, a, window[a], &size[a]).has(place.at[a]) && is_in;
    if (!is_in) return;
    const acc_t by = (acc_t)(p.divisor ? p.divisor : size[0] * size[1] * size[2]);
    const auto dy = of.read(p, at);
#pragma unroll
    for (int l = 0; l < OMC_ROW_PACK; l++) sum[l] += number<acc_t>(dy[l]) / by;
  }
};

template <typename Add>
OMC_INLINE void gather_at(const omc_pool &p, index_t i, const pool_channels &of) {
  const pool_place place(p, i);
  pool_range along[3];
  pool_sums sum = {};
  for (int a = 0; a < 3; a++) along[a] = windows_with(p, a, place.at[a], place.at[a]);
  for (index_t z = along[0].start; z < along[0].end; z++)
    for (index_t y = along[1].start; y < along[1].end; y++)
      for (index_t k = along[2].start; k < along[2].end; k++) {
        const index_t window[] = {z, y, k};
        const index_t row = (place.plane * out_of(p, 0) + z) * out_of(p, 1) + y;
        Add()(p, of, place, window, row * out_of(p, 2) + k, sum);
      }
  of.write(p, i, sum);
}

OMC_GLOBAL_WIDE(MaxPoolGrad_last, OMC_POOL_THREADS, omc_pool, p) {
  for_channels(p, [&](index_t i, const pool_channels &of) { gather_at<add_maximum>(p, i, of); });
}
OMC_GLOBAL_WIDE(AveragePoolGrad_last, OMC_POOL_THREADS, omc_pool, p) {
  for_channels(p, [&](index_t i, const pool_channels &of) { gather_at<add_average>(p, i, of); });
}

/* ---- gradients of averages of whole planes ---- */

OMC_GLOBAL(spread, OMC_POOL_THREADS, omc_spread, p) {
  const index_t first = pool_thread() * OMC_ROW_PACK;
  if (first >= (index_t)p.n) return;
  const int lanes = (int)least(OMC_ROW_PACK, (index_t)p.n - first);
  const index_t size = (index_t)p.plane.by;
  index_t plane = quotient(first, p.plane), left = size - (first - plane * size);
  const auto share = [&] {
    return element<storage_t>(number<acc_t>(((const storage_t *)p.from)[plane]) / (acc_t)p.count);
  };
  storage_t of_plane = share(), out[OMC_ROW_PACK];
#pragma unroll
  for (int l = 0; l < OMC_ROW_PACK; l++) {
    if (left == 0 && l < lanes) plane++, left = size, of_plane = share();
    out[l] = of_plane, left--;
  }
  omc_store((storage_t *)p.to + first, out, lanes);
}

OMC_GLOBAL(spread_last, OMC_POOL_THREADS, omc_spread, p) {
  const index_t first = pool_thread() * OMC_ROW_PACK;
  if (first >= (index_t)p.n) return;
  const int lanes = (int)least(OMC_ROW_PACK, (index_t)p.n - first);
  storage_t out[OMC_ROW_PACK];
#pragma unroll
  for (int l = 0; l < OMC_ROW_PACK; l++) {
    const index_t i = first + (l < lanes ? l : 0), n = (index_t)p.channels.by;
    const index_t from = quotient(i, p.plane) * n + i - quotient(i, p.channels) * n;
    const acc_t share = number<acc_t>(((const storage_t *)p.from)[from]) / (acc_t)p.count;
    out[l] = element<storage_t>(share);
  }
  omc_store((storage_t *)p.to + first, out, lanes);
}

#endif

#endif
