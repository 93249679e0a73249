/* The rules of optim.h for an element, in the verbs of a vector (cpu/vec.h) or of a lane of a GPU:
 * whoever includes this has them. Numbers are as wide as what is computed in. */
#ifndef OMC_OPTIM_RULES_H
#define OMC_OPTIM_RULES_H

#include "optim/group.h"

#ifdef OMC_INLINE /* there are verbs */

/* From m towards g, in the form that is exact at the nearer end. */
OMC_INLINE vacc_t omc_lerp(vacc_t m, vacc_t g, acc_t weight) {
  return weight < (acc_t)0.5 ? vfma(vset(weight), g - m, m) : vfma(vset(weight - 1), g - m, g);
}

/* beta v + (1 - beta) g g */
OMC_INLINE vacc_t omc_mean_square(vacc_t v, vacc_t g, acc_t beta, acc_t rest) {
  return vfma(vset(rest) * g, g, vset(beta) * v);
}

/* ---- Adam ---- */

typedef struct omc_adam_rule {
  acc_t towards, beta2, rest, eps, l2, keep, lose, step_size, root;
  bool amsgrad, has_l2, shrinks_before, shrinks_after;
} omc_adam_rule;

OMC_INLINE omc_adam_rule omc_adam_rule_of(const omc_optim_numbers *numbers, const omc_adam *c) {
  omc_adam_rule r;
  r.towards = (acc_t)(1 - c->beta1), r.beta2 = (acc_t)c->beta2, r.rest = (acc_t)(1 - c->beta2);
  r.eps = (acc_t)c->eps, r.l2 = (acc_t)c->l2;
  r.keep = (acc_t)(1 - c->shrink_before), r.lose = (acc_t)-c->shrink_after;
  r.step_size = (acc_t)c->step_size, r.root = (acc_t)c->root;
  r.amsgrad = numbers->amsgrad != 0, r.has_l2 = c->l2 != 0;
  r.shrinks_before = c->shrink_before != 0, r.shrinks_after = c->shrink_after != 0;
  return r;
}

/* The new p; *most is read and written with amsgrad alone. */
OMC_INLINE vacc_t omc_adam_apply(const omc_adam_rule *r, vacc_t p, vacc_t g, vacc_t *m, vacc_t *v,
                                 vacc_t *most) {
  if (r->has_l2) g = vfma(p, vset(r->l2), g);
  if (r->shrinks_before) p = p * vset(r->keep);
  *m = omc_lerp(*m, g, r->towards);
  *v = omc_mean_square(*v, g, r->beta2, r->rest);
  vacc_t square = *v;
  if (r->amsgrad) square = *most = vmax(*most, square);
  p = p - vset(r->step_size) * *m / (vsqrt(square) / vset(r->root) + vset(r->eps));
  if (r->shrinks_after) p = p + p * vset(r->lose);
  return p;
}

/* ---- SGD ---- */

typedef struct omc_sgd_rule {
  acc_t lr, decay, momentum, fresh;
  bool decays, has_momentum, nesterov, first;
} omc_sgd_rule;

/* `first`: there is no momentum yet. */
OMC_INLINE omc_sgd_rule omc_sgd_rule_of(const omc_optim_numbers *numbers, bool first) {
  omc_sgd_rule r;
  r.lr = (acc_t)-numbers->lr, r.decay = (acc_t)numbers->weight_decay;
  r.momentum = (acc_t)numbers->momentum, r.fresh = (acc_t)(1 - numbers->dampening);
  r.decays = numbers->weight_decay != 0, r.has_momentum = numbers->momentum != 0;
  r.nesterov = numbers->nesterov != 0, r.first = first;
  return r;
}

/* The new p; *buffer is read and written with momentum alone, and written alone if it is first. */
OMC_INLINE vacc_t omc_sgd_apply(const omc_sgd_rule *r, vacc_t p, vacc_t g, vacc_t *buffer) {
  if (r->decays) g = vfma(p, vset(r->decay), g);
  if (r->has_momentum) {
    vacc_t b = g;
    if (!r->first) b = vfma(g, vset(r->fresh), *buffer * vset(r->momentum));
    *buffer = b;
    if (r->nesterov) b = vfma(b, vset(r->momentum), g);
    g = b;
  }
  return vfma(g, vset(r->lr), p);
}

/* ---- LAMB ---- */

typedef struct omc_lamb_rule {
  acc_t beta1, fresh, beta2, rest, l2, first, root, eps, decay;
  bool has_l2;
} omc_lamb_rule;

OMC_INLINE omc_lamb_rule omc_lamb_rule_of(const omc_optim_numbers *numbers, const omc_adam *c) {
  omc_lamb_rule r;
  r.beta1 = (acc_t)c->beta1;
  r.fresh = numbers->grad_averaging != 0 ? (acc_t)(1 - c->beta1) : 1;
  r.beta2 = (acc_t)c->beta2, r.rest = (acc_t)(1 - c->beta2);
  r.l2 = (acc_t)c->l2, r.has_l2 = c->l2 != 0;
  r.first = (acc_t)(numbers->lr == 0 ? 1 : c->step_size / numbers->lr);
  r.root = (acc_t)c->root, r.eps = (acc_t)c->eps;
  r.decay = (acc_t)(r.has_l2 ? 0 : numbers->weight_decay);
  return r;
}

OMC_INLINE void omc_lamb_moments(const omc_lamb_rule *r, vacc_t p, vacc_t g, vacc_t *m, vacc_t *v) {
  if (r->has_l2) g = vfma(p, vset(r->l2), g);
  *m = vset(r->beta1) * *m + vset(r->fresh) * g;
  *v = omc_mean_square(*v, g, r->beta2, r->rest);
}

/* The step of p, before it has its length; computed twice rather than kept. */
OMC_INLINE vacc_t omc_lamb_step(const omc_lamb_rule *r, vacc_t p, vacc_t m, vacc_t v) {
  return vset(r->first) * m / (vsqrt(v) / vset(r->root) + vset(r->eps)) + vset(r->decay) * p;
}

#endif

#endif
