/* Rows of logits that are computed where they are needed, compiled per type computed in. */
#ifndef OMC_CPU_OPS_LOSS_H
#define OMC_CPU_OPS_LOSS_H

#include "cpu/kernel.h"
#include "ops/forms.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

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

/* CrossEntropy of the rows. Does not fail. */
void OMC_LOSS_NAME(rows)(const omc_loss_rows *rows, int threads);

#endif

#endif
