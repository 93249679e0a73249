/* Resample, a line of the result at a time: one along the axis where that is the last, else one
 * across it. */
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/forms.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

#include "cpu/rows.h"

typedef struct {
  const omc_resample_form *p;
  const storage_t *x;
  storage_t *y;
  const int64_t *places;
  const storage_t *weights;
} resample_job;

static void along(omc_range range, void *ctx) {
  const resample_job *job = ctx;
  const omc_resample_form *p = job->p;
  for (int64_t line = range.begin; line < range.end; line++) {
    const storage_t *x = job->x + line * p->from;
    storage_t *y = job->y + line * p->to;
    for (int64_t i = 0; i < p->to; i++) {
      acc_t sum = 0;
      for (int64_t k = i * p->most; k < (i + 1) * p->most; k++) {
        const int64_t at = job->places[k];
        if (at >= 0 && at < p->from) sum += ld(job->weights + k) * ld(x + at);
      }
      st(y + i, sum);
    }
  }
}

static void across(omc_range range, void *ctx) {
  const resample_job *job = ctx;
  const omc_resample_form *p = job->p;
  for (int64_t line = range.begin; line < range.end; line++) {
    const int64_t i = line % p->to;
    const storage_t *x = job->x + line / p->to * p->from * p->inner;
    storage_t *y = job->y + line * p->inner;
    for (int64_t c = 0, left = p->inner; c < p->inner; c += OMC_VL, left -= OMC_VL) {
      vacc_t sum = vset(0);
      for (int64_t k = i * p->most; k < (i + 1) * p->most; k++) {
        const int64_t at = job->places[k];
        if (at >= 0 && at < p->from)
          sum += vset(ld(job->weights + k)) * vld_fill(x + at * p->inner + c, left, 0);
      }
      vst_upto(y + c, sum, left);
    }
  }
}

OMC_KERNEL(Resample, args) {
  const omc_resample_form *p = args->params;
  resample_job job = {p, args->in[0].data, args->out[0].data, args->in[1].data, args->in[2].data};
  const bool last = p->inner == 1;
  const int64_t lines = p->outer * (last ? 1 : p->to), each = last ? p->to : p->inner;
  omc_parallel_for(lines, omc_grain(OMC_GRAIN_ELEMENTS, each * p->most), args->threads,
                   last ? along : across, &job);
  return OMC_OK;
}

#endif

#ifndef OMC_VARIANT

OMC_FORM(params_resample, omc_resample_form_of)

OMC_KERNELS(Resample)
OMC_CPU_OP(Resample, Resample, OMC_PARAMS(omc_resample_form, params_resample))

#endif
