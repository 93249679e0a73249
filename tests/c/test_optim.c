#include <math.h>
#include <string.h>

#include "device.h"
#include "harness.h"
#include "optim/optim.h"
#include "provider.h"

enum { N = 5 };

typedef struct adam_case {
  float param[N], grad[N], mean[N], square[N], step;
  omc_optim_numbers numbers;
  omc_optim_tensor tensor;
  omc_optim_step whole;
} adam_case;

static void fill(adam_case *c) {
  memset(c, 0, sizeof *c);
  for (int i = 0; i < N; i++) c->param[i] = 1, c->grad[i] = (float)(i - 2);
  c->numbers = (omc_optim_numbers){.lr = 0.1,
                                   .beta1 = 0.5,
                                   .beta2 = 0.5,
                                   .weight_decay = 0.5,
                                   .decay = OMC_DECAY_BEFORE,
                                   .bias_correction = 1};
  c->tensor = (omc_optim_tensor){.n = N,
                                 .dtype = OMC_F32,
                                 .state_dtype = OMC_F32,
                                 .param = c->param,
                                 .grad = c->grad,
                                 .state = {c->mean, c->square},
                                 .step = &c->step,
                                 .numbers = &c->numbers};
  c->whole = (omc_optim_step){.rule = OMC_RULE_ADAM, .tensors = &c->tensor, .n = 1, .norm_type = 2};
}

static omc_status take(const omc_optim_step *step) {
  const omc_provider *host = omc_provider_host();
  OMC_TRY(omc_optim_check(step));
  return host->step(host->ctx, step, NULL);
}

TEST(a_first_step_of_adam_is_as_long_as_the_learning_rate) {
  adam_case c;
  fill(&c);
  c.grad[2] = 4;
  REQUIRE_OK(take(&c.whole));
  for (int i = 0; i < N; i++) CHECK(fabsf(c.param[i] - (0.95f - (i < 2 ? -0.1f : 0.1f))) < 1e-6f);
  CHECK_FLOAT(c.mean[2], 2);
  CHECK_FLOAT(c.square[2], 8);
  CHECK_FLOAT(c.step, 1);
}

TEST(a_step_tells_the_norm_and_clips_by_it) {
  adam_case c;
  double norm = 0;
  fill(&c);
  c.whole.rule = OMC_RULE_SCALE;
  c.whole.norm = &norm;
  REQUIRE_OK(take(&c.whole));
  CHECK_FLOAT(norm, sqrt(10));
  CHECK_FLOAT(c.grad[0], -2);
  c.whole.clips = true;
  c.whole.max_norm = sqrt(10) / 2;
  REQUIRE_OK(take(&c.whole));
  CHECK(fabsf(c.grad[0] + 1) < 1e-6f);
  CHECK_FLOAT(c.param[0], 1);
  c.whole.norm_type = INFINITY;
  c.whole.clips = false;
  c.grad[1] = NAN;
  REQUIRE_OK(take(&c.whole));
  CHECK(isnan(norm));
}

TEST(a_step_of_no_tensors_does_nothing) {
  const omc_optim_step none = {.rule = OMC_RULE_LAMB, .norm_type = 2};
  CHECK_OK(take(&none));
}

TEST(a_tensor_that_lacks_what_its_rule_reads_is_named) {
  adam_case c;
  fill(&c);
  c.tensor.state[1] = NULL;
  CHECK_STATUS(take(&c.whole), EINVALID);
  CHECK_CONTAINS(omc_status_detail(), "tensor 0 has 1 states, not 2");
  fill(&c);
  c.tensor.step = NULL;
  CHECK_STATUS(take(&c.whole), EINVALID);
  CHECK_CONTAINS(omc_status_detail(), "tensor 0 has no step");
  fill(&c);
  c.tensor.param = NULL;
  CHECK_STATUS(take(&c.whole), EINVALID);
  CHECK_CONTAINS(omc_status_detail(), "tensor 0 has no param");
  fill(&c);
  c.whole.norm_type = 3;
  CHECK_STATUS(take(&c.whole), EINVALID);
  CHECK_CONTAINS(omc_status_detail(), "a norm of type 3, not 2 or infinity");
}

TEST(a_device_may_have_no_optimizers) {
  adam_case c;
  fill(&c);
  const omc_provider *device = device_provider();
  CHECK_STATUS(device->step(device->ctx, &c.whole, NULL), EUNSUPPORTED);
  CHECK_FLOAT(c.param[0], 1);
}

TEST(what_a_rule_keeps_and_reads_has_names) {
  omc_optim_numbers numbers = {.lr = 1};
  static const struct {
    omc_optim_rule rule;
    int n, n_with; /* states: without and with amsgrad and momentum */
    const char *last;
  } rows[] = {{OMC_RULE_ADAM, 2, 3, "max_exp_avg_sq"},
              {OMC_RULE_SGD, 0, 1, "momentum_buffer"},
              {OMC_RULE_LAMB, 2, 2, "exp_avg_sq"},
              {OMC_RULE_SCALE, 0, 0, NULL}};
  for (int with = 0; with < 2; with++) {
    numbers.amsgrad = numbers.momentum = with;
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
      const int n = with ? rows[r].n_with : rows[r].n;
      CHECK(omc_optim_state(rows[r].rule, &numbers, n) == NULL);
      if (n) CHECK(omc_optim_state(rows[r].rule, &numbers, n - 1) != NULL);
      if (n && with) CHECK_TEXT(omc_optim_state(rows[r].rule, &numbers, n - 1), rows[r].last);
    }
  }
  CHECK(omc_optim_number(&numbers, "lr", 2) == &numbers.lr);
  CHECK(omc_optim_number(&numbers, "beta12", 5) == &numbers.beta1);
  CHECK(omc_optim_number(&numbers, "l", 1) == NULL &&
        omc_optim_number(&numbers, "lr_at", 5) == NULL);
}
