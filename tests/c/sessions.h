/* A small model that is trained through sessions, on the host or on the device of the tests: shared
 * by the tests of what sessions compute and of what they hold. */
#ifndef OMC_TESTS_SESSIONS_H
#define OMC_TESTS_SESSIONS_H

#include "harness.h"
#include "run/session.h"

/* y = sin(x @ w + b) and x, with the gradients of w and b. */
extern const char *const model;

#define ROWS 5
typedef struct tensors {
  float x[ROWS * 3], w[12], b[4], y[ROWS * 4], x_again[ROWS * 3], dy[ROWS * 4], dw[12], db[4];
} tensors;

/* What sessions are opened on; NULL: the host. */
extern const omc_provider *elsewhere;
const omc_provider *here(void);

/* Around a test on that device: afterwards all is done there, and nothing is held. */
void go_elsewhere(void);
void come_back(void);

/* A test of which every word holds on another device too. */
#define TEST_ANYWHERE(name)     \
  static void name(void);       \
  TEST(name##_here) { name(); } \
  TEST(name##_elsewhere) {      \
    go_elsewhere();             \
    name();                     \
    come_back();                \
  }                             \
  static void name(void)

omc_session *open_on(const char *text, const omc_allocator *allocator, uint32_t max_plans);
omc_session *open_session(const char *text, uint32_t max_plans);

/* The plan of the model for that many rows of x. */
omc_status plan_rows(omc_session *s, int64_t rows, bool joint, bool retain_graph, omc_plan **out);

/* Numbers for the model, its results NaN; runs it with them, wherever the plan is; whether the
 * results are those. */
void fill(tensors *t, float shift);
omc_status forward(omc_plan *plan, tensors *t, omc_run **run);
omc_status backward(omc_run *run, tensors *t);
bool outputs_right(const tensors *t);
bool gradients_right(const tensors *t);

/* The first backward of a run, in the default queue. */
omc_status backward_of(omc_run *run, void *const *in, void *const *out, void *const *grad_out,
                       void *const *grad_in);

bool close_to(double a, double b);

#endif
