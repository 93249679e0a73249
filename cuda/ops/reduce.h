/* Reductions along lines, by parts where there are few lines, which are joined by another kernel.
 * OMC_VERB is what joins, OMC_READ what elements are stored as if not as results are. With
 * OMC_WIDENED results, rounded, are stored as numbers. */
#ifndef OMC_CUDA_OPS_REDUCE_H
#define OMC_CUDA_OPS_REDUCE_H

#include "cuda/gpu/lines.h"

typedef struct omc_reduce {
  omc_gpu_lines lines;
  const void *x;
  void *y, *partial; /* [parts, lines], used if there are several parts */
  int64_t count;     /* that results are divided by, where that is a mean */
  int64_t mean;
} omc_reduce;

#ifdef OMC_GPU

#ifndef OMC_READ
#define OMC_READ storage_t
#endif
#ifdef OMC_WIDENED
typedef acc_t result_t;
OMC_INLINE result_t result(acc_t y) { return number<acc_t>(element<storage_t>(y)); }
#else
typedef storage_t result_t;
OMC_INLINE result_t result(acc_t y) { return element<storage_t>(y); }
#endif

template <typename E, typename Team>
OMC_INLINE void reduce(const Team &team, const omc_reduce &p) {
  omc_line<E, Team> x(team, p.x);
  const omc_of_lines<acc_t, Team> all =
      omc_fold_lines<OMC_VERB, acc_t>(team, [&](omc_at at) { return x[at]; }, x);
  omc_lead_lines(team, [&](int64_t line, int l) {
    if (p.lines.parts > 1)
      ((acc_t *)p.partial)[team.part * p.lines.kept.n + line] = all.of[l];
    else
      ((result_t *)p.y)[line] =
          result(p.mean ? (vacc_t(all.of[l]) / vacc_t((acc_t)p.count)).x : all.of[l]);
  });
}

OMC_WARP_KERNELS(reduce, omc_reduce, reduce<OMC_READ>)
OMC_LINE_KERNEL(reduce_block, omc_row_team, omc_reduce, reduce<OMC_READ>)
OMC_COLUMN_KERNELS(reduce, omc_reduce, reduce<OMC_READ>)
OMC_GROUPED_LINE_KERNELS(reduce, omc_reduce, reduce<OMC_READ>)
OMC_LINE_KERNEL(join_columns, omc_column_team, omc_reduce, reduce<acc_t>)

#endif

#endif
