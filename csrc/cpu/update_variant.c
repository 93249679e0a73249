#include "cpu/update.h"

#include "base/int.h"
#include "cpu/rng.h"
#include "cpu/rows.h"

#if OMC_IS_FLOAT

#include "optim/rules.h"

/* ---- elements ---- */

/* Up to a vector of elements from `i` on. */
typedef struct {
  const omc_optim_tensor *t;
  int64_t i, n;
} place;

OMC_INLINE vacc_t get(place at, const void *array, bool wide) {
  return wide ? vldr_upto((const acc_t *)array + at.i, at.n)
              : vld_fill((const storage_t *)array + at.i, at.n, 0);
}

OMC_INLINE void put(place at, void *array, vacc_t x, bool wide) {
  if (wide)
    vstr_upto((acc_t *)array + at.i, x, at.n);
  else
    vst_upto((storage_t *)array + at.i, x, at.n);
}

OMC_INLINE vacc_t get_state(place at, int k) {
  return get(at, at.t->state[k], at.t->state_dtype != OMC_STORAGE);
}

OMC_INLINE void put_state(place at, int k, vacc_t x) {
  put(at, at.t->state[k], x, at.t->state_dtype != OMC_STORAGE);
}

/* As it is once it has been stored and loaded. */
OMC_INLINE vacc_t stored(vacc_t x) {
  storage_t lanes[OMC_VL];
  vst(lanes, x);
  return vld(lanes);
}

OMC_INLINE vacc_t get_param(place at) {
  const vacc_t p = get(at, at.t->param, false);
  if (!at.t->master) return p;
  const vacc_t master = get(at, at.t->master, true);
  return vblend(stored(master) == p, master, p);
}

/* ---- rounding at random ---- */

#if OMC_STORES_ACC
typedef struct {
  char unused;
} draws;
OMC_INLINE void draw(const omc_update_part *part, int64_t i, draws *d) {
  (void)part, (void)i, (void)d;
}
OMC_INLINE bool rounds_at_random(const omc_optim_tensor *t) {
  (void)t;
  return false;
}
OMC_INLINE vacc_t at_random(vacc_t x, const draws *d, int64_t i) {
  (void)d, (void)i;
  return x;
}
#else

/* Elements whose 16 random bits each are drawn together. */
enum { DRAWN = 512 };
typedef struct {
  uint32_t words[DRAWN / 2];
} draws;

OMC_INLINE bool rounds_at_random(const omc_optim_tensor *t) {
  return t->numbers->stochastic_rounding != 0 && !t->master;
}

OMC_INLINE void draw(const omc_update_part *part, int64_t i, draws *d) {
  if (rounds_at_random(&part->step->tensors[part->index]) && i % DRAWN == 0)
    omc_philox_words(part->step->seed, part->index, (uint64_t)i / 2, DRAWN / 2, d->words);
}

/* x rounded to one of its two neighbours, to the farther with the probability of its share of the
 * distance between them; past the largest finite one there is none. Infinities and NaN are left
 * alone. */
OMC_INLINE vacc_t at_random(vacc_t x, const draws *d, int64_t i) {
  omc_half_bits drawn;
  memcpy(&drawn, (const uint16_t *)d->words + i % DRAWN, sizeof drawn);
  const omc_acc_bits bits = (omc_acc_bits)x, r = __builtin_convertvector(drawn, omc_acc_bits);
  const vmask finite = vabs(x) < vset(INFINITY);
#if defined(OMC_STORAGE_IS_BF16)
  const vacc_t down = (vacc_t)(bits & 0xffff0000u), y = (vacc_t)((bits + r) & 0xffff0000u);
  return vblend(finite, vblend(vabs(y) < vset(INFINITY), y, down), x);
#else
  /* Below the least normal half steps are 2^-24; above, the last 13 bits of a float. */
  const vacc_t down = (vacc_t)(bits & ~0x1fffu), up = (vacc_t)((bits + (r >> 3)) & ~0x1fffu);
  const vacc_t normal = vblend(vabs(up) < vset(65536), up, down);
  const vacc_t share = __builtin_convertvector((vmask)(r >> 3), vacc_t) * vset(0x1p-13f);
  const vacc_t least = vsign(vfloor(vabs(x) * vset(0x1p24f) + share) * vset(0x1p-24f), x);
  return vblend(finite, vblend(vabs(x) < vset(0x1p-14f), least, normal), x);
#endif
}
#endif

OMC_INLINE void put_param(place at, vacc_t p, const draws *d) {
  if (at.t->master) put(at, at.t->master, p, true);
  if (rounds_at_random(at.t)) p = at_random(p, d, at.i);
  put(at, at.t->param, p, false);
}

/* ---- gradients ---- */

typedef struct {
  acc_t scale, clip;
  bool negative;
} gradient_form;

OMC_INLINE gradient_form form_of(const omc_update_part *part) {
  const omc_optim_numbers *numbers = part->step->tensors[part->index].numbers;
  return (gradient_form){(acc_t)part->scale, (acc_t)part->clip, numbers && numbers->maximize != 0};
}

/* A gradient that was scaled is written back as it is without. */
OMC_INLINE vacc_t get_grad(place at, gradient_form form) {
  vacc_t g = get(at, at.t->grad, false);
  if (form.scale != 1) {
    g = g / vset(form.scale);
    put(at, at.t->grad, g, false);
  }
  if (form.clip != 1) g = g * vset(form.clip);
  return form.negative ? -g : g;
}

/* Each vector of a part: `at` is where, a name that the caller gives. */
#define EACH(part, at)                                                   \
  for (place at = {&(part)->step->tensors[(part)->index], (part)->begin, \
                   omc_min(OMC_VL, (part)->end - (part)->begin)};        \
       at.i < (part)->end; at.i += OMC_VL, at.n = omc_min(OMC_VL, (part)->end - at.i))

/* ---- rules ---- */

static omc_adam adam_of(const omc_update_part *part) {
  const omc_optim_tensor *t = &part->step->tensors[part->index];
  return omc_adam_at(t->numbers, (double)*t->step);
}

static const omc_optim_numbers *numbers_of(const omc_update_part *part) {
  return part->step->tensors[part->index].numbers;
}

static void adam(omc_update_part *part) {
  const omc_adam c = adam_of(part);
  const omc_adam_rule rule = omc_adam_rule_of(numbers_of(part), &c);
  const gradient_form form = form_of(part);
  draws random;
  EACH(part, at) {
    draw(part, at.i, &random);
    const vacc_t p = get_param(at), g = get_grad(at, form);
    vacc_t m = get_state(at, 0), v = get_state(at, 1), most = vset(0);
    if (rule.amsgrad) most = get_state(at, 2);
    const vacc_t moved = omc_adam_apply(&rule, p, g, &m, &v, &most);
    put_state(at, 0, m);
    put_state(at, 1, v);
    if (rule.amsgrad) put_state(at, 2, most);
    put_param(at, moved, &random);
  }
}

static void sgd(omc_update_part *part) {
  const omc_optim_tensor *t = &part->step->tensors[part->index];
  const omc_sgd_rule rule = omc_sgd_rule_of(t->numbers, t->first);
  const gradient_form form = form_of(part);
  draws random;
  EACH(part, at) {
    draw(part, at.i, &random);
    const vacc_t p = get_param(at), g = get_grad(at, form);
    vacc_t buffer = vset(0);
    if (rule.has_momentum && !rule.first) buffer = get_state(at, 0);
    const vacc_t moved = omc_sgd_apply(&rule, p, g, &buffer);
    if (rule.has_momentum) put_state(at, 0, buffer);
    put_param(at, moved, &random);
  }
}

/* ---- sums ---- */

/* Squares of floats are added up in f64: they neither overflow nor vanish, and any order of
 * vectors will do. */
#if defined(OMC_COMPUTE_F64)
typedef vacc_t squares;
OMC_INLINE void add_squares(squares *sum, vacc_t x) { *sum += x * x; }
#else
typedef double half_wide __attribute__((vector_size(OMC_VL * 4)));
typedef float half_lanes __attribute__((vector_size(OMC_VL * 2)));
typedef struct {
  half_wide of[2];
} squares;
OMC_INLINE void add_squares(squares *sum, vacc_t x) {
  half_lanes part[2];
  memcpy(part, &x, sizeof part);
  for (int h = 0; h < 2; h++) {
    const half_wide wide = __builtin_convertvector(part[h], half_wide);
    sum->of[h] += wide * wide;
  }
}
#endif

OMC_INLINE double total(const squares *sum) {
  double lanes[sizeof *sum / sizeof(double)], all = 0;
  memcpy(lanes, sum, sizeof lanes);
  for (size_t l = 0; l < sizeof lanes / sizeof *lanes; l++) all += lanes[l];
  return all;
}

static void sum_squares(omc_update_part *part) {
  squares sum;
  memset(&sum, 0, sizeof sum);
  EACH(part, at) add_squares(&sum, get(at, at.t->grad, false));
  part->out[0] = total(&sum);
}

static void largest(omc_update_part *part) {
  vacc_t most = vset(0);
  EACH(part, at) most = vmax(most, vabs(get(at, at.t->grad, false)));
  part->out[0] = (double)vhmax(most);
}

static void scale(omc_update_part *part) {
  const vacc_t by = vset((acc_t)part->clip);
  EACH(part, at) put(at, at.t->grad, get(at, at.t->grad, false) * by, false);
}

/* ---- LAMB ---- */

static void lamb_moments(omc_update_part *part) {
  const omc_adam c = adam_of(part);
  const omc_lamb_rule rule = omc_lamb_rule_of(numbers_of(part), &c);
  const gradient_form form = form_of(part);
  squares of_p, of_step;
  memset(&of_p, 0, sizeof of_p);
  memset(&of_step, 0, sizeof of_step);
  EACH(part, at) {
    const vacc_t p = get_param(at);
    vacc_t m = get_state(at, 0), v = get_state(at, 1);
    omc_lamb_moments(&rule, p, get_grad(at, form), &m, &v);
    put_state(at, 0, m);
    put_state(at, 1, v);
    add_squares(&of_p, p);
    const vacc_t step = omc_lamb_step(&rule, p, m, v);
    add_squares(&of_step, at.n < OMC_VL ? vblend(vlanes(at.n), step, vset(0)) : step);
  }
  part->out[0] = total(&of_p);
  part->out[1] = total(&of_step);
}

static void lamb_apply(omc_update_part *part) {
  const omc_adam c = adam_of(part);
  const omc_lamb_rule rule = omc_lamb_rule_of(numbers_of(part), &c);
  const vacc_t length = vset((acc_t)part->length);
  draws random;
  EACH(part, at) {
    draw(part, at.i, &random);
    const vacc_t p = get_param(at);
    const vacc_t step = omc_lamb_step(&rule, p, get_state(at, 0), get_state(at, 1));
    put_param(at, p - length * step, &random);
  }
}

extern const omc_updates OMC_PASTE3(omc_, updates, OMC_VARIANT);
const omc_updates OMC_PASTE3(omc_, updates,
                             OMC_VARIANT) = {.fn = {
                                                 [OMC_UPDATE_ADAM] = adam,
                                                 [OMC_UPDATE_SGD] = sgd,
                                                 [OMC_UPDATE_LAMB_MOMENTS] = lamb_moments,
                                                 [OMC_UPDATE_LAMB_APPLY] = lamb_apply,
                                                 [OMC_UPDATE_SCALE] = scale,
                                                 [OMC_UPDATE_SQUARES] = sum_squares,
                                                 [OMC_UPDATE_LARGEST] = largest,
                                             }};

#endif
