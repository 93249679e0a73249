/* Targets of losses, and rows of logits that are computed where they are needed. */
#ifndef OMC_CPU_OPS_LOSS_H
#define OMC_CPU_OPS_LOSS_H

#include "cpu/kernel.h"
#include "ops/forms.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

/* Fails unless the target of row i is one of the classes. */
static inline omc_status omc_check_target(const omc_kernel_args *args, const omc_loss_form *p,
                                          int64_t i, int64_t target) {
  if (target >= 0 && target < p->classes) return OMC_OK;
  OMC_FAIL(EINDEX, "Target %lld is out of bounds. ('%s': position %lld, %lld classes)",
           (long long)target, args->node, (long long)i, (long long)p->classes);
}

/* form.outer rows of form.classes logits each, form.inner is 1. */
typedef struct omc_loss_rows {
  omc_loss_form form;
  acc_t *logits;               /* become the gradients of the reduced loss, if `gradient`, */
  void *narrow;                /* or this takes those, in bf16, if it is not NULL */
  const int64_t *target;       /* of each row: within the classes, or ignore_index */
  const acc_t *weight;         /* of each class, or NULL: all 1 */
  double total;                /* what "mean" divides by */
  acc_t *loss, *top, *log_sum; /* of each row, written */
  bool gradient;
} omc_loss_rows;

#define OMC_LOSS_NAME(name) OMC_PASTE3(omc_loss_, name, OMC_COMPUTE_VARIANT)

/* CrossEntropy of the rows, compiled per type computed in. Does not fail. */
void OMC_LOSS_NAME(rows)(const omc_loss_rows *rows, int threads);

#endif

#endif
