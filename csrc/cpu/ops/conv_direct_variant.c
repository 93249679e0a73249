/* Convolutions of groups of few channels, summed straight from padded planes: every thread takes
 * whole groups and copies their planes for itself. */
#include <string.h>

#include "cpu/ops/conv.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

typedef struct {
  const omc_kernel_args *args;
  const void *params;
} direct_job;

/* Copies the planes of a group of an image, and zeros what a vector may read past them. */
static void copy_group(const conv_source *s, const storage_t *tensor, int64_t image, int64_t group,
                       int64_t groups, acc_t *out) {
  const int64_t channels = s->channels / groups, plane = source_plane(s);
  const storage_t *from = tensor + (image * s->channels + group * channels) * s->h * s->w;
  for (int64_t c = 0; c < channels; c++)
    OMC_CONV_NAME(copy_plane)(s, from + c * s->h * s->w, 0, out + c * plane);
  memset(out + channels * plane, 0, SLACK * sizeof(acc_t));
}

/* ---- Conv and ConvGradInput ---- */

enum { WIDE = 4 /* vectors summed at once: independent chains hide the latency of FMA */ };

/* `n` elements of a row of the output, at most WIDE vectors, `step` apart. */
static void direct_run(const storage_t *weight, const acc_t *source, const conv_grid *grid,
                       int64_t n, acc_t bias, int64_t step, storage_t *out) {
  vacc_t sum[WIDE];
  const int64_t vectors = omc_ceil_div(n, OMC_VL);
  OMC_UNROLL for (int v = 0; v < WIDE; v++) sum[v] = vset(bias);
  if (vectors == WIDE) {
    for (int64_t k = 0; k < grid->depth; k++) {
      const vacc_t w = vset(ld(weight + grid->weight_at[k]));
      const acc_t *x = source + grid->source_at[k];
      OMC_UNROLL for (int v = 0; v < WIDE; v++) sum[v] = vfma(w, vldr(x + v * OMC_VL), sum[v]);
    }
  } else {
    for (int64_t v = 0; v < vectors; v++) {
      vacc_t one = vset(bias);
      for (int64_t k = 0; k < grid->depth; k++)
        one = vfma(vset(ld(weight + grid->weight_at[k])),
                   vldr(source + grid->source_at[k] + v * OMC_VL), one);
      sum[v] = one;
    }
  }
  acc_t lanes[WIDE * OMC_VL];
  OMC_UNROLL for (int v = 0; v < WIDE; v++) vstr(lanes + v * OMC_VL, sum[v]);
  if (step == 1)
    store_row(lanes, out, n);
  else
    for (int64_t j = 0; j < n; j++) st(out + j * step, lanes[j]);
}

static void direct_grid(const conv_grid *grid, const storage_t *weight, acc_t bias,
                        const acc_t *source, storage_t *plane) {
  for (int64_t y = 0; y < grid->rows; y++)
    for (int64_t x = 0; x < grid->cols; x += WIDE * OMC_VL)
      direct_run(weight, source + grid->row_at[y] + x, grid, omc_min(grid->cols - x, WIDE * OMC_VL),
                 bias, grid->out_col, plane + grid->out_at[y] + x * grid->out_col);
}

static void direct_groups(omc_range range, void *ctx) {
  const direct_job *job = ctx;
  const omc_kernel_args *args = job->args;
  const conv_product *p = job->params;
  const storage_t *bias = omc_in_data(args, 2);
  acc_t *source = (acc_t *)args->workspace + range.thread * direct_thread(&p->source, p->groups);
  for (int64_t u = range.begin; u < range.end; u++) {
    const int64_t group = u % p->groups;
    copy_group(&p->source, args->in[0].data, u / p->groups, group, p->groups, source);
    for (int64_t i = 0; i < p->m; i++) {
      const storage_t *weight =
          (const storage_t *)args->in[1].data + group * p->weight_group + i * p->weight_row;
      storage_t *plane = (storage_t *)args->out[0].data + (u * p->m + i) * p->out_plane;
      for (int64_t g = 0; g < p->n_grids; g++)
        direct_grid(&p->grids[g], weight, bias ? ld(bias + group * p->m + i) : 0, source, plane);
    }
  }
}

omc_status OMC_CONV_NAME(direct)(const omc_kernel_args *args) {
  const conv_product *p = args->params;
  direct_job job = {args, p};
  omc_parallel_for(p->images * p->groups, 1, args->threads, direct_groups, &job);
  return OMC_OK;
}

/* ---- ConvGradWeight ---- */

enum { TAPS = 5 /* summed at once; divides the taps of kernels of 5, and nearly of 3 and 7 */ };

/* Adds to out[0..n-1] the dot products of dy with the source seen from n <= TAPS taps. */
static void direct_taps(const conv_weight_grad *p, const storage_t *dy, const acc_t *source,
                        const int64_t *at, int64_t n, acc_t *out) {
  const int64_t row = p->source.phases * p->source.part;
  const acc_t *from[TAPS];
  vacc_t sum[TAPS];
  OMC_UNROLL for (int t = 0; t < TAPS; t++) {
    from[t] = source + at[t < n ? t : 0];
    sum[t] = vset(0);
  }
  for (int64_t y = 0; y < p->rows; y++) {
    const int64_t y_at = p->row_at[y] * row;
    int64_t x = 0;
    for (; x + OMC_VL <= p->cols; x += OMC_VL) {
      const vacc_t d = vld(dy + y * p->cols + x);
      OMC_UNROLL for (int t = 0; t < TAPS; t++) sum[t] = vfma(d, vldr(from[t] + y_at + x), sum[t]);
    }
    if (x == p->cols) continue;
    const vacc_t d = vldn(dy + y * p->cols + x, p->cols - x);
    OMC_UNROLL for (int t = 0; t < TAPS; t++) sum[t] =
        vfma(d, vldrn(from[t] + y_at + x, p->cols - x), sum[t]);
  }
  for (int64_t t = 0; t < n; t++) out[t] += vsum(sum[t]);
}

static void direct_gradients(omc_range range, void *ctx) {
  const direct_job *job = ctx;
  const omc_kernel_args *args = job->args;
  const conv_weight_grad *p = job->params;
  const conv_source *s = &p->source;
  const int64_t taps = p->taps, row = s->phases * s->part, pixels = p->rows * p->cols;
  acc_t *source = (acc_t *)args->workspace + range.thread * direct_thread(s, p->groups);
  acc_t *sums = (acc_t *)args->workspace + args->threads * direct_thread(s, p->groups) +
                range.thread * direct_gradient(p);
  for (int64_t group = range.begin; group < range.end; group++) {
    storage_t *stored = (storage_t *)args->out[0].data + group * direct_gradient(p);
    acc_t *out = sums_of(stored, sums);
    memset(out, 0, (size_t)direct_gradient(p) * sizeof(acc_t));
    for (int64_t image = 0; image < p->images; image++) {
      copy_group(s, args->in[1].data, image, group, p->groups, source);
      for (int64_t i = 0; i < p->m * p->c; i++) {
        const int64_t o = group * p->m + i / p->c, c = i % p->c;
        const storage_t *dy =
            (const storage_t *)args->in[0].data + (image * p->groups * p->m + o) * pixels;
        for (int64_t t0 = 0; t0 < taps; t0 += TAPS) {
          int64_t at[TAPS];
          const int64_t n = omc_min(TAPS, taps - t0);
          for (int64_t t = t0; t < t0 + n; t++) {
            const int64_t x = t % p->kw * p->dw;
            at[t - t0] = p->tap_at[t / p->kw] * row + x % p->sw * s->part + x / p->sw;
          }
          direct_taps(p, dy, source + c * source_plane(s), at, n, out + i * taps + t0);
        }
      }
    }
    store_sums(out, stored, direct_gradient(p));
  }
}

omc_status OMC_CONV_NAME(direct_weight)(const omc_kernel_args *args) {
  const conv_weight_grad *p = args->params;
  direct_job job = {args, p};
  omc_parallel_for(p->groups, 1, args->threads, direct_gradients, &job);
  return OMC_OK;
}

#endif
