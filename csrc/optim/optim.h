/* One step of an optimizer over a list of tensors: what a provider is asked for. */
#ifndef OMC_OPTIM_OPTIM_H
#define OMC_OPTIM_OPTIM_H

#include "base/arena.h"
#include "base/dtype.h"
#include "base/status.h"
#include "optim/group.h"

/* What is done to a tensor, of which p is the parameter, g its gradient:
 *   ADAM   numbers lr, beta1, beta2, eps, weight_decay, decay, bias_correction, amsgrad, maximize;
 *          states exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq: see omc_adam
 *   SGD    numbers lr, momentum, dampening, nesterov, weight_decay, maximize; state
 *          momentum_buffer, where there is momentum
 *   LAMB   numbers lr, beta1, beta2, eps, weight_decay, decay, bias_correction, grad_averaging,
 *          use_nvlamb, ratio_min, ratio_max, maximize; states exp_avg and exp_avg_sq: Adam's step,
 *          times lr and, where both lengths are above 0 and there is weight decay or use_nvlamb,
 *          |p| / |step|, but no less than ratio_min and no more than ratio_max
 *   SCALE  no numbers, no states: g is multiplied by the clip coefficient, p is not looked at */
typedef enum {
#define OMC_RULE(name, text) OMC_RULE_##name,
#include "optim/rules.def"
#undef OMC_RULE
  OMC_N_RULE
} omc_optim_rule;

enum { OMC_OPTIM_STATES = 3 };

/* A tensor: arrays of n elements in one order, on the provider's device. Where memory of a tensor
 * is another's too, the later one in the list sees what the earlier one has become. */
typedef struct omc_optim_tensor {
  int64_t n;
  omc_dtype dtype;       /* of param and grad: a float */
  omc_dtype state_dtype; /* of its states: dtype, or what dtype is computed in */
  void *param, *grad;
  void *master; /* param in what it is computed in, kept beside it; NULL: none. Where
                   param is no longer what master rounds to, param counts */
  void *state[OMC_OPTIM_STATES];
  float *step; /* one number on the device: steps done, counted up by this one; NULL for
                  rules that do not read it */
  bool first;  /* its states have no values yet: for SGD */
  const omc_optim_numbers *numbers; /* of its group */
} omc_optim_tensor;

typedef struct omc_optim_step {
  omc_optim_rule rule;
  const omc_optim_tensor *tensors;
  uint32_t n;
  const float *grad_scale; /* on the device: gradients are divided by it, and written so if it is
                              not 1; NULL: 1 */
  const float *found_inf;  /* on the device: where it is not 0, no tensor and no step of one is
                              changed; NULL: 0 */
  bool clips; /* gradients are used times max_norm / (norm + 1e-6) where that is below 1 */
  double max_norm;
  double norm_type; /* of the norm of all gradients together: 2 or infinity */
  double *norm;     /* on the device: where that norm is written; NULL: nowhere */
  uint64_t seed;    /* 0: nothing is random; of groups whose number stochastic_rounding is not 0:
                       16-bit params without a master are rounded up or down at random, by Philox of
                       (seed, index of the tensor, element) */
} omc_optim_step;

/* Whether every tensor has what the rule reads and writes; OMC_EINVALID names one that has not. */
omc_status omc_optim_check(const omc_optim_step *step) OMC_MUST_USE;

/* Whether tensors share memory: they are updated one after the other then, in their order. What is
 * needed meanwhile is of the arena. */
omc_status omc_optim_overlap(const omc_optim_step *step, omc_arena *arena, bool *out) OMC_MUST_USE;

/* The rule of that name; false: there is none. */
bool omc_optim_rule_find(const char *name, omc_optim_rule *out);

/* The number of that name (n bytes) among those of a group; NULL: no rule has one. */
double *omc_optim_number(omc_optim_numbers *numbers, const char *name, size_t n);

/* The name that PyTorch has for state i, from 0 on, of a tensor in a group with these numbers;
 * NULL: the rule keeps no more. */
const char *omc_optim_state(omc_optim_rule rule, const omc_optim_numbers *numbers, int i);

#endif
