/* SegmentSum and SegmentSpread, a segment at a time. */
#include <string.h>

#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/forms.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

#include "cpu/rows.h"

typedef struct {
  const omc_segment_form *p;
  const int64_t *offsets;
  int64_t n_offsets;
  const storage_t *src;
  storage_t *dst;
} segment_job;

static omc_status check_offsets(const omc_kernel_args *args, const segment_job *job) {
  const char *node = args->node;
  for (int64_t i = 0; i < job->n_offsets; i++) {
    const int64_t at = job->offsets[i], least = i ? job->offsets[i - 1] : 0;
    if (i == 0 && at != 0)
      OMC_FAIL(EINDEX,
               "offsets[0] has to be 0, i.e., the first sequence in the mini-batch has to start "
               "from position 0. However, got %lld ('%s')",
               (long long)at, node);
    if (at < least || at > job->p->n)
      OMC_FAIL(EINDEX, "offsets[%lld] is %lld, expected %lld to %lld ('%s')", (long long)i,
               (long long)at, (long long)least, (long long)job->p->n, node);
  }
  return OMC_OK;
}

static int64_t end_of(const segment_job *job, int64_t segment) {
  return segment + 1 < job->n_offsets ? job->offsets[segment + 1] : job->p->n;
}

static void sum_segments(omc_range range, void *ctx) {
  const segment_job *job = ctx;
  const int64_t inner = job->p->inner;
  for (int64_t s = range.begin; s < range.end; s++) {
    const int64_t begin = job->offsets[s], end = end_of(job, s);
    storage_t *out = job->dst + s * inner;
    for (int64_t k = 0, left = inner; k < inner; k += OMC_VL, left -= OMC_VL) {
      vacc_t sum = vset(0);
      for (int64_t r = begin; r < end; r++) sum += vld_fill(job->src + r * inner + k, left, 0);
      vst_upto(out + k, sum, left);
    }
  }
}

static void spread_segments(omc_range range, void *ctx) {
  const segment_job *job = ctx;
  const int64_t inner = job->p->inner;
  for (int64_t s = range.begin; s < range.end; s++)
    for (int64_t r = job->offsets[s]; r < end_of(job, s); r++)
      memcpy(job->dst + r * inner, job->src + s * inner, (size_t)inner * sizeof(storage_t));
}

static omc_status run_segments(const omc_kernel_args *args, omc_range_fn fn, segment_job *job) {
  const omc_segment_form *p = args->params;
  *job = (segment_job){.p = p,
                       .offsets = args->in[1].data,
                       .n_offsets = args->in[1].type->shape.dims[0],
                       .src = args->in[0].data,
                       .dst = args->out[0].data};
  OMC_TRY(check_offsets(args, job));
  if (p->segments == 0 || p->inner == 0) return OMC_OK;
  const int64_t rows = 1 + p->n / p->segments;
  omc_parallel_for(p->segments, omc_grain(OMC_GRAIN_ELEMENTS, rows * p->inner), args->threads, fn,
                   job);
  return OMC_OK;
}

OMC_KERNEL(SegmentSum, args) {
  segment_job job;
  return run_segments(args, sum_segments, &job);
}

OMC_KERNEL(SegmentSpread, args) {
  segment_job job;
  OMC_TRY(run_segments(args, spread_segments, &job));
  /* Rows after the last end are in no segment. */
  const omc_segment_form *p = job.p;
  const int64_t covered = p->segments ? end_of(&job, p->segments - 1) : 0;
  const int64_t left = (p->n - covered) * p->inner;
  if (left > 0) memset(job.dst + covered * p->inner, 0, (size_t)left * sizeof(storage_t));
  return OMC_OK;
}

#endif

#ifndef OMC_VARIANT

OMC_FORM(params_segment, omc_segment_form_of)

#define SEGMENT(name) \
  OMC_KERNELS(name)   \
  OMC_CPU_OP(name, name, OMC_PARAMS(omc_segment_form, params_segment))
SEGMENT(SegmentSum)
SEGMENT(SegmentSpread)

#endif
