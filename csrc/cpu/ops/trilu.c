/* Trilu, row by row. */
#include <string.h>

#include "base/int.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "graph/graph.h"

#ifndef OMC_VARIANT

typedef struct trilu_params {
  bool upper;
  int64_t k, rows, cols, matrices;
} trilu_params;

typedef struct trilu_job {
  const trilu_params *p;
  const char *src;
  char *dst;
  size_t size;
} trilu_job;

static void trilu_rows(omc_range range, void *ctx) {
  const trilu_job *job = ctx;
  const trilu_params *p = job->p;
  const size_t row_bytes = (size_t)p->cols * job->size;
  for (int64_t r = range.begin; r < range.end; r++) {
    const int64_t diagonal = omc_clamp(p->k, -p->rows, p->cols) + r % p->rows;
    const size_t left =
        (size_t)omc_clamp(p->upper ? diagonal : diagonal + 1, 0, p->cols) * job->size;
    const char *src = job->src + (size_t)r * row_bytes;
    char *dst = job->dst + (size_t)r * row_bytes;
    const size_t keep = p->upper ? left : 0, zero = p->upper ? 0 : left;
    const size_t kept = p->upper ? row_bytes - left : left;
    if (src != dst) memcpy(dst + keep, src + keep, kept);
    memset(dst + zero, 0, row_bytes - kept);
  }
}

OMC_KERNEL_ANY(Trilu, args) {
  const trilu_params *p = args->params;
  const size_t size = omc_dtype_size(args->in[0].type->dtype);
  const trilu_job job = {p, args->in[0].data, args->out[0].data, size};
  if (p->cols > 0)
    omc_parallel_for(p->matrices * p->rows, omc_grain(OMC_GRAIN_BYTES, p->cols * (int64_t)size),
                     args->threads, trilu_rows, (void *)&job);
  return OMC_OK;
}

static omc_status params_trilu(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  const omc_shape *x = &omc_in(node, 0)->type.shape;
  *(trilu_params *)params =
      (trilu_params){.upper = omc_node_int(node, "upper") != 0,
                     .k = omc_in(node, 1) ? omc_const_int(omc_in(node, 1), 0) : 0,
                     .rows = x->dims[x->rank - 2],
                     .cols = x->dims[x->rank - 1],
                     .matrices = omc_shape_span(x, 0, x->rank - 2)};
  return OMC_OK;
}

OMC_CPU_OP(Trilu, Trilu, OMC_PARAMS(trilu_params, params_trilu))

#endif
