/* The numbers of a param group, and what they come to at a step. Valid device code too. */
#ifndef OMC_OPTIM_GROUP_H
#define OMC_OPTIM_GROUP_H

#ifdef OMC_GPU
#define OMC_OPTIM_INLINE OMC_INLINE
#else
#include <math.h>
#include <stdbool.h>
#define OMC_OPTIM_INLINE static inline
#endif

/* Where weight decay comes in; the modes of FusedAdam. */
typedef enum {
  OMC_DECAY_L2,     /* added to the gradient, times p: Adam */
  OMC_DECAY_AFTER,  /* p is shrunk once the step is taken: AdamW of transformers */
  OMC_DECAY_BEFORE, /* p is shrunk before: AdamW of torch; of LAMB, added to the step, times p */
  OMC_N_DECAY
} omc_optim_decay;

typedef struct omc_optim_numbers {
#define OMC_NUMBER(name) double name;
#include "optim/numbers.def"
#undef OMC_NUMBER
  const double *lr_at; /* in memory of a device other than the host: takes the place of lr */
} omc_optim_numbers;

/* Adam in the numbers of one tensor at one step, in f64 as PyTorch has them:
 *   g += l2 p;  p *= 1 - shrink_before;  m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2
 *   p -= step_size m / (sqrt(v) / root + eps);  p -= shrink_after p
 * With amsgrad the root is taken of the largest v so far. */
typedef struct omc_adam {
  double beta1, beta2, eps, l2, shrink_before, shrink_after, step_size, root;
} omc_adam;

/* For the step number `step`, counted from 1. */
OMC_OPTIM_INLINE omc_adam omc_adam_at(const omc_optim_numbers *numbers, double step) {
  const bool corrected = numbers->bias_correction != 0;
  const double first = corrected ? 1 - pow(numbers->beta1, step) : 1;
  const double second = corrected ? sqrt(1 - pow(numbers->beta2, step)) : 1;
  const double shrink = numbers->lr * numbers->weight_decay;
  omc_adam adam = {numbers->beta1,      numbers->beta2, numbers->eps, 0, 0, 0,
                   numbers->lr / first, second};
  if (numbers->decay == OMC_DECAY_L2) {
    adam.l2 = numbers->weight_decay;
  } else if (numbers->decay == OMC_DECAY_BEFORE) {
    adam.shrink_before = shrink;
  } else { /* here eps is added to the root before it is corrected */
    adam.shrink_after = shrink;
    adam.step_size *= second;
    adam.root = 1;
  }
  return adam;
}

/* What gradients are multiplied by for their norm not to be above max_norm; NaN for a norm that is
 * NaN. */
OMC_OPTIM_INLINE double omc_clip_coefficient(double norm, double max_norm) {
  const double coefficient = max_norm / (norm + 1e-6);
  return coefficient > 1 ? 1 : coefficient;
}

/* By what LAMB's step is multiplied, of the squares of p and of the step added up. */
OMC_OPTIM_INLINE double omc_lamb_length(const omc_optim_numbers *numbers, double p, double step) {
  const bool adapts = numbers->weight_decay != 0 || numbers->use_nvlamb != 0;
  if (!(adapts && p > 0 && step > 0)) return numbers->lr;
  const double ratio = sqrt(p) / sqrt(step);
  const double least = ratio < numbers->ratio_min ? numbers->ratio_min : ratio;
  return numbers->lr * (least > numbers->ratio_max ? numbers->ratio_max : least);
}

#endif
