/* Steps of optimizers over lists of tensors, a part of a tensor to a block. Whoever compiles this
 * has defined OMC_STORAGE and what it is computed in. Read by the host as C11. */
#ifndef OMC_GPU_UPDATES_H
#define OMC_GPU_UPDATES_H

#include "cuda/gpu/target.h"
#include "optim/group.h"

enum {
  OMC_UPDATE_THREADS = 256,
  OMC_UPDATE_PART = 16 * OMC_UPDATE_THREADS,
  OMC_UPDATE_TENSORS = 44 /* of a launch */
};

typedef struct omc_gpu_tensor {
  int64_t n;
  void *param, *grad, *master, *state[3];
  float *step;
  uint32_t index;            /* in the list of all */
  uint16_t first_step, wide; /* flags: states have no values; are of what is computed in */
} omc_gpu_tensor;

typedef struct omc_gpu_updates {
  omc_optim_numbers numbers;           /* of all tensors of the launch */
  const float *grad_scale, *found_inf; /* NULL: 1 and 0 */
  double max_norm;
  const double *norm; /* of all gradients; NULL: they are not clipped */
  double *sums;       /* two of each part */
  double *lengths;    /* of LAMB's steps, by index */
  uint64_t seed;
  uint32_t n;
  uint32_t first[OMC_UPDATE_TENSORS + 1]; /* part of each tensor */
  omc_gpu_tensor tensors[OMC_UPDATE_TENSORS];
} omc_gpu_updates;

/* Of the sums of all parts, to one number. */
typedef struct omc_gpu_norm {
  const double *sums;
  double *norm;
  int64_t parts;
  int64_t most; /* a flag: the largest, else the root of the sum */
  const float *grad_scale;
} omc_gpu_norm;

#ifdef OMC_GPU
#include "cuda/gpu/lane.h"
#include "cuda/gpu/pack.h"
#include "cuda/gpu/parts.h"
#include "cuda/gpu/philox.h"
#include "optim/rules.h"

typedef OMC_STORAGE storage_t;

/* ---- numbers that the device alone knows ---- */

/* Whether nothing is to be changed. */
OMC_INLINE bool omc_is_left_out(const omc_gpu_updates &p) {
  return p.found_inf && *p.found_inf != 0;
}

OMC_INLINE float omc_scale_at(const float *scale) { return scale ? *scale : 1; }

OMC_INLINE omc_optim_numbers omc_numbers_of(const omc_gpu_updates &p) {
  omc_optim_numbers numbers = p.numbers;
  if (numbers.lr_at) numbers.lr = *numbers.lr_at;
  return numbers;
}

/* Neighbours that a thread takes at a time. */
enum { OMC_UPDATE_LANES = sizeof(acc_t) > 4 ? 2 : 4 };
typedef acc_t omc_lanes[OMC_UPDATE_LANES];

/* ---- elements ---- */

/* Some neighbours of a tensor. */
struct omc_run {
  const omc_gpu_tensor *t;
  int64_t at;
  int n;
};

template <typename E>
OMC_INLINE void omc_get(const omc_run &run, const void *array, omc_lanes &x) {
  omc_loaded<E, OMC_UPDATE_LANES> e = {};
  omc_load(e, (const E *)array + run.at, run.n);
#pragma unroll
  for (int l = 0; l < OMC_UPDATE_LANES; l++) x[l] = number<acc_t>(e[l]);
}

template <typename E>
OMC_INLINE void omc_put(const omc_run &run, void *array, const omc_lanes &x) {
  E e[OMC_UPDATE_LANES];
#pragma unroll
  for (int l = 0; l < OMC_UPDATE_LANES; l++) e[l] = element<E>(x[l]);
  omc_store((E *)array + run.at, e, run.n);
}

OMC_INLINE void omc_get_state(const omc_run &run, int k, omc_lanes &x) {
  if (run.t->wide)
    omc_get<acc_t>(run, run.t->state[k], x);
  else
    omc_get<storage_t>(run, run.t->state[k], x);
}

OMC_INLINE void omc_put_state(const omc_run &run, int k, const omc_lanes &x) {
  if (run.t->wide)
    omc_put<acc_t>(run, run.t->state[k], x);
  else
    omc_put<storage_t>(run, run.t->state[k], x);
}

OMC_INLINE void omc_get_param(const omc_run &run, omc_lanes &p) {
  omc_lanes master;
  omc_get<storage_t>(run, run.t->param, p);
  if (!run.t->master) return;
  omc_get<acc_t>(run, run.t->master, master);
#pragma unroll
  for (int l = 0; l < OMC_UPDATE_LANES; l++)
    if (number<acc_t>(element<storage_t>(master[l])) == p[l]) p[l] = master[l];
}

/* x rounded to one of its two neighbours, to the farther with the probability of its share of the
 * distance between them, by 16 random bits; past the largest finite one there is none. Infinities
 * and NaN are left alone. */
template <typename E>
struct omc_rounding {
  static constexpr bool at_random = false;
  OMC_INLINE acc_t of(acc_t x, uint32_t) { return x; }
};
template <>
struct omc_rounding<bf16> {
  static constexpr bool at_random = true;
  OMC_INLINE float of(float x, uint32_t drawn) {
    const uint32_t bits = omc_float_bits(x), part = 0xffffu;
    const float down = omc_bits_float(bits & ~part), y = omc_bits_float((bits + drawn) & ~part);
    return !(fabsf(x) < INFINITY) ? x : fabsf(y) < INFINITY ? y : down;
  }
};
template <>
struct omc_rounding<f16> {
  static constexpr bool at_random = true;
  /* Below the least normal half steps are 2^-24; above, the last 13 bits of a float. */
  OMC_INLINE float of(float x, uint32_t drawn) {
    const uint32_t bits = omc_float_bits(x), part = 0x1fffu;
    const float down = omc_bits_float(bits & ~part);
    const float up = omc_bits_float((bits + (drawn >> 3)) & ~part);
    const float share = (float)(drawn >> 3) * 0x1p-13f;
    const float least = copysignf(floorf(fabsf(x) * 0x1p24f + share) * 0x1p-24f, x);
    return !(fabsf(x) < INFINITY) ? x
           : fabsf(x) < 0x1p-14f  ? least
           : fabsf(up) < 65536.0f ? up
                                  : down;
  }
};

OMC_INLINE void omc_put_param(const omc_gpu_updates &p, const omc_run &run, omc_lanes &x) {
  typedef omc_rounding<storage_t> rounding;
  if (run.t->master) omc_put<acc_t>(run, run.t->master, x);
  if (rounding::at_random && p.numbers.stochastic_rounding != 0 && !run.t->master) {
    uint32_t words[4]; /* of 8 elements */
    omc_philox(p.seed, run.t->index, (uint64_t)run.at / 8, words);
#pragma unroll
    for (int l = 0; l < OMC_UPDATE_LANES; l++) {
      const uint32_t word = run.at % 8 == 0 ? words[l / 2] : words[2 + l / 2];
      x[l] = rounding::of(x[l], word >> 16 * (l % 2) & 0xffffu);
    }
  }
  omc_put<storage_t>(run, run.t->param, x);
}

/* ---- gradients ---- */

struct omc_gradients {
  const float *scale; /* read again for each run, rather than kept in a register */
  acc_t clip;
  bool negative;
};

OMC_INLINE omc_gradients omc_gradients_of(const omc_gpu_updates &p) {
  const double clip = p.norm ? omc_clip_coefficient(*p.norm, p.max_norm) : 1;
  return omc_gradients{p.grad_scale, (acc_t)clip, p.numbers.maximize != 0};
}

/* A gradient that was scaled is written back as it is without. */
OMC_INLINE void omc_get_grad(const omc_gradients &form, const omc_run &run, omc_lanes &g) {
  omc_get<storage_t>(run, run.t->grad, g);
  const acc_t scale = (acc_t)omc_scale_at(form.scale);
  if (scale != 1) {
#pragma unroll
    for (int l = 0; l < OMC_UPDATE_LANES; l++) g[l] = g[l] / scale;
    omc_put<storage_t>(run, run.t->grad, g);
  }
#pragma unroll
  for (int l = 0; l < OMC_UPDATE_LANES; l++) {
    if (form.clip != 1) g[l] = g[l] * form.clip;
    if (form.negative) g[l] = -g[l];
  }
}

/* ---- parts ---- */

/* The tensor that a block works on, and its part of it. */
OMC_INLINE const omc_gpu_tensor &omc_tensor_of(const omc_gpu_updates &p, int64_t *part) {
  return p.tensors[omc_entry_of_block(p.first, p.n, part)];
}

/* fn(run) for what a thread takes of the block's part. */
template <typename F>
OMC_INLINE void omc_each_run(const omc_gpu_tensor &t, int64_t part, F fn) {
  const int64_t begin = part * OMC_UPDATE_PART;
  const int64_t end = begin + OMC_UPDATE_PART < t.n ? begin + OMC_UPDATE_PART : t.n;
  for (int64_t at = begin + (int64_t)threadIdx.x * OMC_UPDATE_LANES; at < end;
       at += OMC_UPDATE_THREADS * OMC_UPDATE_LANES)
    fn(omc_run{&t, at, end - at < OMC_UPDATE_LANES ? (int)(end - at) : OMC_UPDATE_LANES});
}

/* The sum of x over a block, or the largest, NaN if one is; the first thread has it. */
template <bool MOST>
OMC_INLINE double omc_join(double x) {
  __shared__ double all[OMC_UPDATE_THREADS];
  const unsigned t = threadIdx.x;
  for (unsigned half = OMC_UPDATE_THREADS / 2; half > 0; half /= 2) {
    all[t] = x;
    __syncthreads();
    if (t < half) {
      const double other = all[t + half];
      x = !MOST ? x + other : other > x || other != other ? other : x;
    }
    __syncthreads();
  }
  return x;
}

/* What a block's tensor is updated with, worked out by one thread. */
OMC_INLINE omc_adam omc_adam_of_block(const omc_gpu_updates &p, const omc_gpu_tensor &t) {
  __shared__ double numbers[sizeof(omc_adam) / sizeof(double)];
  if (threadIdx.x == 0) {
    const omc_optim_numbers of_group = omc_numbers_of(p);
    const omc_adam adam = omc_adam_at(&of_group, (double)*t.step);
    numbers[0] = adam.beta1, numbers[1] = adam.beta2, numbers[2] = adam.eps, numbers[3] = adam.l2;
    numbers[4] = adam.shrink_before, numbers[5] = adam.shrink_after;
    numbers[6] = adam.step_size, numbers[7] = adam.root;
  }
  __syncthreads();
  return omc_adam{numbers[0], numbers[1], numbers[2], numbers[3],
                  numbers[4], numbers[5], numbers[6], numbers[7]};
}

#define OMC_UPDATE(name) OMC_GLOBAL_WIDE(name, OMC_UPDATE_THREADS, omc_gpu_updates, p)
#define OMC_EACH_LANE(l) _Pragma("unroll") for (int l = 0; l < OMC_UPDATE_LANES; l++)

/* ---- kernels ---- */

/* One block: the steps of the tensors are counted, of one that several share as often. */
OMC_UPDATE(count_steps) {
  if (omc_is_left_out(p)) return;
  if (threadIdx.x < p.n && p.tensors[threadIdx.x].step)
    atomicAdd(p.tensors[threadIdx.x].step, 1.0f);
}

OMC_UPDATE(sum_squares) {
  int64_t part;
  const omc_gpu_tensor &t = omc_tensor_of(p, &part);
  double sum = 0;
  omc_each_run(t, part, [&](omc_run run) {
    omc_lanes g;
    omc_get<storage_t>(run, t.grad, g);
    OMC_EACH_LANE(l) sum += (double)g[l] * (double)g[l];
  });
  sum = omc_join<false>(sum);
  if (threadIdx.x == 0) p.sums[2 * blockIdx.x] = sum;
}

OMC_UPDATE(find_largest) {
  int64_t part;
  const omc_gpu_tensor &t = omc_tensor_of(p, &part);
  vacc_t most = (acc_t)0;
  omc_each_run(t, part, [&](omc_run run) {
    omc_lanes g;
    omc_get<storage_t>(run, t.grad, g);
    OMC_EACH_LANE(l) most = vmax(most, vabs(g[l]));
  });
  const double joined = omc_join<true>((double)most.x);
  if (threadIdx.x == 0) p.sums[2 * blockIdx.x] = joined;
}

OMC_GLOBAL(join_norm, OMC_UPDATE_THREADS, omc_gpu_norm, p) {
  double sum = 0, most = 0;
  for (int64_t i = threadIdx.x; i < p.parts; i += OMC_UPDATE_THREADS) {
    const double x = p.sums[2 * i];
    sum += x;
    if (x > most || x != x) most = x;
  }
  const double joined = p.most ? omc_join<true>(most) : sqrt(omc_join<false>(sum));
  if (threadIdx.x == 0) *p.norm = joined / (double)omc_scale_at(p.grad_scale);
}

OMC_UPDATE(scale_grads) {
  const omc_gradients form = omc_gradients_of(p);
  int64_t part;
  const omc_gpu_tensor &t = omc_tensor_of(p, &part);
  if (form.clip == 1) return;
  omc_each_run(t, part, [&](omc_run run) {
    omc_lanes g;
    omc_get<storage_t>(run, t.grad, g);
    OMC_EACH_LANE(l) g[l] = g[l] * form.clip;
    omc_put<storage_t>(run, t.grad, g);
  });
}

OMC_UPDATE(adam) {
  if (omc_is_left_out(p)) return;
  const omc_gradients form = omc_gradients_of(p);
  int64_t part;
  const omc_gpu_tensor &t = omc_tensor_of(p, &part);
  const omc_adam c = omc_adam_of_block(p, t);
  const omc_adam_rule rule = omc_adam_rule_of(&p.numbers, &c);
  omc_each_run(t, part, [&](omc_run run) {
    omc_lanes x, g, m, v, most = {};
    omc_get_param(run, x);
    omc_get_grad(form, run, g);
    omc_get_state(run, 0, m);
    omc_get_state(run, 1, v);
    if (rule.amsgrad) omc_get_state(run, 2, most);
    OMC_EACH_LANE(l) {
      vacc_t m_l = m[l], v_l = v[l], most_l = most[l];
      x[l] = omc_adam_apply(&rule, x[l], g[l], &m_l, &v_l, &most_l).x;
      m[l] = m_l.x, v[l] = v_l.x, most[l] = most_l.x;
    }
    omc_put_state(run, 0, m);
    omc_put_state(run, 1, v);
    if (rule.amsgrad) omc_put_state(run, 2, most);
    omc_put_param(p, run, x);
  });
}

OMC_UPDATE(sgd) {
  if (omc_is_left_out(p)) return;
  const omc_gradients form = omc_gradients_of(p);
  int64_t part;
  const omc_gpu_tensor &t = omc_tensor_of(p, &part);
  const omc_optim_numbers numbers = omc_numbers_of(p);
  const omc_sgd_rule rule = omc_sgd_rule_of(&numbers, t.first_step != 0);
  omc_each_run(t, part, [&](omc_run run) {
    omc_lanes x, g, buffer = {};
    omc_get_param(run, x);
    omc_get_grad(form, run, g);
    if (rule.has_momentum && !rule.first) omc_get_state(run, 0, buffer);
    OMC_EACH_LANE(l) {
      vacc_t buffer_l = buffer[l];
      x[l] = omc_sgd_apply(&rule, x[l], g[l], &buffer_l).x;
      buffer[l] = buffer_l.x;
    }
    if (rule.has_momentum) omc_put_state(run, 0, buffer);
    omc_put_param(p, run, x);
  });
}

OMC_UPDATE(lamb_moments) {
  if (omc_is_left_out(p)) return;
  const omc_gradients form = omc_gradients_of(p);
  int64_t part;
  const omc_gpu_tensor &t = omc_tensor_of(p, &part);
  const omc_adam c = omc_adam_of_block(p, t);
  const omc_optim_numbers numbers = omc_numbers_of(p);
  const omc_lamb_rule rule = omc_lamb_rule_of(&numbers, &c);
  double of_p = 0, of_step = 0;
  omc_each_run(t, part, [&](omc_run run) {
    omc_lanes x, g, m, v;
    omc_get_param(run, x);
    omc_get_grad(form, run, g);
    omc_get_state(run, 0, m);
    omc_get_state(run, 1, v);
    OMC_EACH_LANE(l) {
      vacc_t m_l = m[l], v_l = v[l];
      omc_lamb_moments(&rule, x[l], g[l], &m_l, &v_l);
      const double step = (double)omc_lamb_step(&rule, x[l], m_l, v_l).x;
      m[l] = m_l.x, v[l] = v_l.x;
      if (l < run.n) of_p += (double)x[l] * (double)x[l], of_step += step * step;
    }
    omc_put_state(run, 0, m);
    omc_put_state(run, 1, v);
  });
  of_p = omc_join<false>(of_p), of_step = omc_join<false>(of_step);
  if (threadIdx.x == 0) p.sums[2 * blockIdx.x] = of_p, p.sums[2 * blockIdx.x + 1] = of_step;
}

/* A block for each tensor: the length of its step, once all of it is known. */
OMC_UPDATE(lamb_lengths) {
  if (omc_is_left_out(p)) return;
  double of_p = 0, of_step = 0;
  for (uint32_t i = p.first[blockIdx.x] + threadIdx.x; i < p.first[blockIdx.x + 1];
       i += OMC_UPDATE_THREADS)
    of_p += p.sums[2 * i], of_step += p.sums[2 * i + 1];
  of_p = omc_join<false>(of_p), of_step = omc_join<false>(of_step);
  if (threadIdx.x == 0) {
    const omc_optim_numbers numbers = omc_numbers_of(p);
    p.lengths[p.tensors[blockIdx.x].index] = omc_lamb_length(&numbers, of_p, of_step);
  }
}

OMC_UPDATE(lamb_apply) {
  if (omc_is_left_out(p)) return;
  int64_t part;
  const omc_gpu_tensor &t = omc_tensor_of(p, &part);
  const omc_adam c = omc_adam_of_block(p, t);
  const omc_optim_numbers numbers = omc_numbers_of(p);
  const omc_lamb_rule rule = omc_lamb_rule_of(&numbers, &c);
  const vacc_t length = (acc_t)p.lengths[t.index];
  omc_each_run(t, part, [&](omc_run run) {
    omc_lanes x, m, v;
    omc_get_param(run, x);
    omc_get_state(run, 0, m);
    omc_get_state(run, 1, v);
    OMC_EACH_LANE(l) x[l] = (vacc_t(x[l]) - length * omc_lamb_step(&rule, x[l], m[l], v[l])).x;
    omc_put_param(p, run, x);
  });
}

#endif

#endif
