#include "optim/optim.h"

#include <math.h>
#include <string.h>

#include "base/extent.h"

double *omc_optim_number(omc_optim_numbers *numbers, const char *name, size_t n) {
  static const struct {
    const char *name;
    size_t at;
  } known[] = {
#define OMC_NUMBER(name) {#name, offsetof(omc_optim_numbers, name)},
#include "optim/numbers.def"
#undef OMC_NUMBER
  };
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (strlen(known[i].name) == n && memcmp(known[i].name, name, n) == 0)
      return (double *)(void *)((char *)numbers + known[i].at);
  return NULL;
}

const char *omc_optim_state(omc_optim_rule rule, const omc_optim_numbers *numbers, int i) {
  enum { ALWAYS, AMSGRAD, MOMENTUM }; /* when there is such a state */
  static const struct {
    const char *name;
    int when;
  } states[OMC_N_RULE][OMC_OPTIM_STATES] = {
      [OMC_RULE_ADAM] = {{"exp_avg", ALWAYS}, {"exp_avg_sq", ALWAYS}, {"max_exp_avg_sq", AMSGRAD}},
      [OMC_RULE_SGD] = {{"momentum_buffer", MOMENTUM}},
      [OMC_RULE_LAMB] = {{"exp_avg", ALWAYS}, {"exp_avg_sq", ALWAYS}},
  };
  if (i >= OMC_OPTIM_STATES) return NULL;
  const int when = states[rule][i].when;
  if ((when == AMSGRAD && numbers->amsgrad == 0) || (when == MOMENTUM && numbers->momentum == 0))
    return NULL;
  return states[rule][i].name;
}

static int n_states(omc_optim_rule rule, const omc_optim_numbers *numbers) {
  int n = 0;
  while (omc_optim_state(rule, numbers, n)) n++;
  return n;
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

omc_status omc_optim_overlap(const omc_optim_step *step, omc_arena *arena, bool *out) {
  omc_extent *extents = OMC_NEW_ARRAY(arena, omc_extent, (size_t)step->n + 1);
  if (!extents) OMC_FAIL(ENOMEM, "for a step of %u tensors", step->n);
  size_t n = 0;
  for (uint32_t i = 0; i < step->n; i++) {
    const omc_optim_tensor *t = &step->tensors[i];
    const size_t bytes = (size_t)t->n * omc_dtype_size(t->dtype);
    if (bytes) extents[n++] = omc_extent_of(t->param ? t->param : t->grad, bytes, i);
  }
  *out = omc_extents_sort(extents, n) != NULL;
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
