#include "optim/optim.h"

#include <math.h>
#include <string.h>

omc_adam omc_adam_at(const omc_optim_numbers *numbers, double step) {
  const bool corrected = numbers->bias_correction != 0;
  const double first = corrected ? 1 - pow(numbers->beta1, step) : 1;
  const double second = corrected ? sqrt(1 - pow(numbers->beta2, step)) : 1;
  const double shrink = numbers->lr * numbers->weight_decay;
  omc_adam adam = {.beta1 = numbers->beta1,
                   .beta2 = numbers->beta2,
                   .eps = numbers->eps,
                   .step_size = numbers->lr / first,
                   .root = second};
  switch ((omc_optim_decay)numbers->decay) {
    case OMC_DECAY_L2:
      adam.l2 = numbers->weight_decay;
      break;
    case OMC_DECAY_BEFORE:
      adam.shrink_before = shrink;
      break;
    default: /* here eps is added to the root before it is corrected */
      adam.shrink_after = shrink;
      adam.step_size *= second;
      adam.root = 1;
  }
  return adam;
}

double omc_clip_coefficient(double norm, double max_norm) {
  const double coefficient = max_norm / (norm + 1e-6);
  return coefficient > 1 ? 1 : coefficient;
}

/* How many states a rule has with these numbers. */
static int n_states(omc_optim_rule rule, const omc_optim_numbers *numbers) {
  switch (rule) {
    case OMC_RULE_ADAM:
      return numbers->amsgrad != 0 ? 3 : 2;
    case OMC_RULE_SGD:
      return numbers->momentum != 0 ? 1 : 0;
    case OMC_RULE_LAMB:
      return 2;
    default:
      return 0;
  }
}

static omc_status check_tensor(const omc_optim_step *step, uint32_t i) {
  const omc_optim_tensor *t = &step->tensors[i];
  const bool counts = step->rule == OMC_RULE_ADAM || step->rule == OMC_RULE_LAMB;
  if (counts && !t->step) OMC_FAIL(EINVALID, "tensor %u has no step", i);
  if (t->n == 0) return OMC_OK;
  if (!t->grad) OMC_FAIL(EINVALID, "tensor %u has no grad", i);
  if (!t->param && step->rule != OMC_RULE_SCALE) OMC_FAIL(EINVALID, "tensor %u has no param", i);
  const int states = n_states(step->rule, t->numbers);
  for (int k = 0; k < states; k++)
    if (!t->state[k]) OMC_FAIL(EINVALID, "tensor %u has %d states, not %d", i, k, states);
  return OMC_OK;
}

omc_status omc_optim_check(const omc_optim_step *step) {
  if (step->norm_type != 2 && !isinf(step->norm_type))
    OMC_FAIL(EINVALID, "a norm of type %g, not 2 or infinity", step->norm_type);
  for (uint32_t i = 0; i < step->n; i++) OMC_TRY(check_tensor(step, i));
  return OMC_OK;
}

bool omc_optim_rule_find(const char *name, omc_optim_rule *out) {
  static const char *const names[OMC_N_RULE] = {
#define OMC_RULE(rule, text) text,
#include "optim/rules.def"
#undef OMC_RULE
  };
  for (int rule = 0; rule < OMC_N_RULE; rule++) {
    *out = (omc_optim_rule)rule;
    if (strcmp(names[rule], name) == 0) return true;
  }
  return false;
}
