/* Pooling, a thread for each element that is written: gradients are gathered from the windows that
 * an element is in, in their order. */
#ifndef OMC_CUDA_OPS_POOL_H
#define OMC_CUDA_OPS_POOL_H

#include "cuda/gpu/letter.h"
#include "cuda/gpu/lines.h"

/* As omc_pool_form of csrc/ops/forms.h. */
typedef struct omc_pool {
  omc_gpu_places places; /* of what is written: planes and the three axes */
  omc_sender sender;
  int64_t in[3], out[3], kernel[3], stride[3], dilation[3], before[3], after[3];
  int64_t divisor, planes;
  int32_t adaptive, with_pad;
  const void *from;
  void *to;
  int64_t *indices; /* of maxima, in their plane; NULL: not wanted */
} omc_pool;

#ifdef OMC_GPU

struct pool_place {
  int64_t plane, at[3];

  OMC_METHOD pool_place(const omc_gpu_places &places, int64_t i) {
#pragma unroll
    for (int g = 3; g > 0; g--) {
      const int64_t quotient = omc_quotient(places, g, i);
      at[g - 1] = i - quotient * places.group[g].size;
      i = quotient;
    }
    plane = i;
  }
};

OMC_INLINE int64_t plane_size(const int64_t (&dims)[3]) { return dims[0] * dims[1] * dims[2]; }
OMC_INLINE int64_t up(int64_t a, int64_t by) { return (a + by - 1) / by; }

/* Elements [start, end) of an axis, or windows that an element may be in. */
struct pool_range {
  int64_t start, end;
};

OMC_INLINE pool_range within(int64_t start, int64_t end, int64_t n) {
  return pool_range{start < 0 ? 0 : start, end > n ? n : end};
}

/* Window k of an axis, and what its average is divided by. */
OMC_INLINE pool_range window_of(const omc_pool &p, int axis, int64_t k, int64_t *size) {
  const int64_t in = p.in[axis], out = p.out[axis];
  int64_t start = k * p.stride[axis] - p.before[axis], end = start + p.kernel[axis];
  if (p.adaptive)
    start = k * in / out, end = up((k + 1) * in, out);
  else if (end > in + p.after[axis])
    end = in + p.after[axis];
  const pool_range inside = within(start, end, in);
  const int64_t length = p.with_pad ? end - start : inside.end - inside.start;
  *size = length > 1 ? length : 1;
  return inside;
}

/* Windows that element i of an axis is in: none are missing. */
OMC_INLINE pool_range windows_with(const omc_pool &p, int axis, int64_t i) {
  const int64_t in = p.in[axis], out = p.out[axis];
  if (p.adaptive) return within(i * out / in, up((i + 1) * out, in), out);
  const int64_t last = i + p.before[axis];
  const int64_t first = last - (p.kernel[axis] - 1) * p.dilation[axis];
  return within(first <= 0 ? 0 : up(first, p.stride[axis]), last / p.stride[axis] + 1, out);
}

/* As in PyTorch, NaN is larger than all, and of several the last is taken; an empty window is -inf
 * at what would be its first place. */
OMC_INLINE void max_of_window(const omc_pool &p, const pool_place &place, acc_t *most,
                              int64_t *at) {
  const storage_t *const x = (const storage_t *)p.from + place.plane * plane_size(p.in);
  int64_t start[3], first[3], end[3];
  for (int a = 0; a < 3; a++) {
    start[a] = place.at[a] * p.stride[a] - p.before[a];
    first[a] = start[a] < 0 ? up(-start[a], p.dilation[a]) : 0;
    const int64_t taps = start[a] < p.in[a] ? up(p.in[a] - start[a], p.dilation[a]) : 0;
    end[a] = taps < p.kernel[a] ? taps : p.kernel[a];
  }
  const auto index = [&](int64_t z, int64_t y, int64_t x_) {
    return ((start[0] + z * p.dilation[0]) * p.in[1] + start[1] + y * p.dilation[1]) * p.in[2] +
           start[2] + x_ * p.dilation[2];
  };
  *most = -(acc_t)INFINITY, *at = index(first[0], first[1], first[2]);
  for (int64_t z = first[0]; z < end[0]; z++)
    for (int64_t y = first[1]; y < end[1]; y++)
      for (int64_t k = first[2]; k < end[2]; k++) {
        const int64_t here = index(z, y, k);
        const acc_t v = number<acc_t>(x[here]);
        if (v > *most || v != v) *most = v, *at = here;
      }
}

OMC_INLINE int64_t pool_thread() { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }

OMC_GLOBAL_WIDE(MaxPool, OMC_LINE_THREADS, omc_pool, p) {
  const int64_t i = pool_thread();
  if (i >= p.places.n) return;
  acc_t most;
  int64_t at;
  max_of_window(p, pool_place(p.places, i), &most, &at);
  ((storage_t *)p.to)[i] = element<storage_t>(most);
  if (p.indices) p.indices[i] = at;
}

OMC_INLINE acc_t average_of_window(const omc_pool &p, const pool_place &place) {
  const storage_t *const x = (const storage_t *)p.from + place.plane * plane_size(p.in);
  int64_t size[3];
  pool_range w[3];
  for (int a = 0; a < 3; a++) w[a] = window_of(p, a, place.at[a], &size[a]);
  acc_t sum = 0;
  for (int64_t z = w[0].start; z < w[0].end; z++)
    for (int64_t y = w[1].start; y < w[1].end; y++)
      for (int64_t k = w[2].start; k < w[2].end; k++)
        sum += number<acc_t>(x[(z * p.in[1] + y) * p.in[2] + k]);
  return sum / (acc_t)(p.divisor ? p.divisor : plane_size(size));
}

OMC_GLOBAL_WIDE(AveragePool, OMC_LINE_THREADS, omc_pool, p) {
  const int64_t i = pool_thread();
  if (i >= p.places.n) return;
  ((storage_t *)p.to)[i] = element<storage_t>(average_of_window(p, pool_place(p.places, i)));
}

/* Adds up share(output) over the windows that the element at `place` may be in. */
template <typename Share>
OMC_INLINE acc_t gathered(const omc_pool &p, const pool_place &place, Share share) {
  pool_range w[3];
  for (int a = 0; a < 3; a++) w[a] = windows_with(p, a, place.at[a]);
  acc_t sum = 0;
  for (int64_t z = w[0].start; z < w[0].end; z++)
    for (int64_t y = w[1].start; y < w[1].end; y++)
      for (int64_t k = w[2].start; k < w[2].end; k++) sum += share(z, y, k);
  return sum;
}

/* The indices are those that MaxPool gave; there may be more of them than of elements. */
OMC_GLOBAL_WIDE(MaxPoolGrad, OMC_LINE_THREADS, omc_pool, p) {
  const int64_t i = pool_thread(), in = plane_size(p.in), out = plane_size(p.out);
  if (i < p.planes * out && (p.indices[i] < 0 || p.indices[i] >= in))
    omc_write(p.sender, OMC_LETTER_INDEX, p.indices[i], in);
  if (i >= p.places.n) return;
  const pool_place place(p.places, i);
  const int64_t own = i - place.plane * in;
  const storage_t *const dy = (const storage_t *)p.from + place.plane * out;
  const int64_t *const indices = p.indices + place.plane * out;
  ((storage_t *)p.to)[i] =
      element<storage_t>(gathered(p, place, [&](int64_t z, int64_t y, int64_t k) {
        const int64_t at = (z * p.out[1] + y) * p.out[2] + k;
        return indices[at] == own ? number<acc_t>(dy[at]) : (acc_t)0;
      }));
}

OMC_GLOBAL_WIDE(AveragePoolGrad, OMC_LINE_THREADS, omc_pool, p) {
  const int64_t i = pool_thread();
  if (i >= p.places.n) return;
  const pool_place place(p.places, i);
  const storage_t *const dy = (const storage_t *)p.from + place.plane * plane_size(p.out);
  ((storage_t *)p.to)[i] =
      element<storage_t>(gathered(p, place, [&](int64_t z, int64_t y, int64_t k) {
        const int64_t window[3] = {z, y, k};
        int64_t size[3];
        bool is_in = true;
        for (int a = 0; a < 3; a++) {
          const pool_range w = window_of(p, a, window[a], &size[a]);
          is_in = is_in && place.at[a] >= w.start && place.at[a] < w.end;
        }
        const acc_t d = number<acc_t>(dy[(z * p.out[1] + y) * p.out[2] + k]);
        return is_in ? d / (acc_t)(p.divisor ? p.divisor : plane_size(size)) : (acc_t)0;
      }));
}

#endif

#endif
