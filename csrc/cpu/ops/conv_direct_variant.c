/* Convolutions of groups of few channels, summed straight from padded planes: every thread takes
 * whole groups and copies their planes for itself. */
#include <string.h>

#include "cpu/ops/conv.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

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

enum { WIDE = 6 /* vectors summed at once: independent chains hide the latency of FMA */ };

/* Vectors of a grid that are summed at once, of any rows: where each begins in the source and in
 * the output, and how many of its elements there are. */
typedef struct {
  int64_t n;
  const acc_t *source[WIDE];
  storage_t *out[WIDE];
  int64_t count[WIDE];
} direct_set;

static void sum_set(const acc_t *weights, acc_t bias, const conv_grid *grid, direct_set *set) {
  vacc_t sum[WIDE];
  const acc_t *source[WIDE];
  OMC_UNROLL for (int v = 0; v < WIDE; v++) {
    sum[v] = vset(bias);
    source[v] = set->source[v < set->n ? v : 0];
  }
  for (int64_t k = 0; k < grid->depth; k++) {
    const vacc_t w = vset(weights[k]);
    OMC_UNROLL for (int v = 0; v < WIDE; v++) sum[v] =
        vfma(w, vldr(source[v] + grid->source_at[k]), sum[v]);
  }
  acc_t lanes[WIDE * OMC_VL];
  OMC_UNROLL for (int v = 0; v < WIDE; v++) vstr(lanes + v * OMC_VL, sum[v]);
  for (int64_t v = 0; v < set->n; v++) {
    const acc_t *from = lanes + v * OMC_VL;
    if (grid->out_col == 1)
      vst_upto(set->out[v], vldr(from), set->count[v]);
    else
      for (int64_t j = 0; j < set->count[v]; j++) st(set->out[v] + j * grid->out_col, from[j]);
  }
  set->n = 0;
}

static void direct_grid(const conv_grid *grid, const acc_t *weights, acc_t bias,
                        const acc_t *source, storage_t *plane) {
  direct_set set = {0};
  for (int64_t y = 0; y < grid->rows; y++)
    for (int64_t x = 0; x < grid->cols; x += OMC_VL) {
      set.source[set.n] = source + grid->row_at[y] + x;
      set.out[set.n] = plane + grid->out_at[y] + x * grid->out_col;
      set.count[set.n] = omc_min(grid->cols - x, OMC_VL);
      if (++set.n == WIDE) sum_set(weights, bias, grid, &set);
    }
  if (set.n) sum_set(weights, bias, grid, &set);
}

static void direct_groups(omc_range range, void *ctx) {
  const omc_kernel_args *args = ctx;
  const conv_product *p = args->params;
  const storage_t *bias = omc_in_data(args, 2);
  const int64_t copied = direct_thread(&p->source, p->groups);
  acc_t *source = (acc_t *)args->workspace + range.thread * (copied + direct_weights(p));
  acc_t *const weights = source + copied;
  for (int64_t u = range.begin; u < range.end; u++) {
    const int64_t group = u % p->groups;
    copy_group(&p->source, args->in[0].data, u / p->groups, group, p->groups, source);
    for (int64_t i = 0; i < p->m; i++) {
      const storage_t *weight =
          (const storage_t *)args->in[1].data + group * p->weight_group + i * p->weight_row;
      storage_t *plane = (storage_t *)args->out[0].data + (u * p->m + i) * p->out_plane;
      const acc_t one_bias = bias ? ld(bias + group * p->m + i) : 0;
      for (int64_t g = 0; g < p->n_grids; g++) {
        const conv_grid *grid = &p->grids[g];
        for (int64_t k = 0; k < grid->depth; k++) weights[k] = ld(weight + grid->weight_at[k]);
        direct_grid(grid, weights, one_bias, source, plane);
      }
    }
  }
}

omc_status OMC_CONV_NAME(direct)(const omc_kernel_args *args) {
  const conv_product *p = args->params;
  omc_parallel_for(p->images * p->groups, 1, args->threads, direct_groups, (void *)(uintptr_t)args);
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
  const omc_kernel_args *args = ctx;
  const conv_weight_grad *p = args->params;
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
  omc_parallel_for(p->groups, 1, args->threads, direct_gradients, (void *)(uintptr_t)args);
  return OMC_OK;
}

#endif
