/* Depthwise convolutions of planes that are not large: the lanes of a vector are channels, whose
 * planes are turned for it and back. So no lane is empty, however narrow a plane is, and steps are
 * as good as none. */
#include <string.h>

#include "cpu/ops/conv.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

/* Blocks of OMC_VL channels, and the channels of one. */
static int64_t channel_blocks(int64_t groups) { return omc_ceil_div(groups, OMC_VL); }
static int64_t channels_of(int64_t groups, int64_t block) {
  return omc_min(groups - block * OMC_VL, OMC_VL);
}

/* Pixels p .. p+n-1, at most OMC_VL, of planes of `area` pixels: a vector of channels for each. */
static void turn_pixels(const storage_t *planes, int64_t area, int64_t channels, int64_t p,
                        int64_t n, acc_t *out) {
  const omc_matrix lines = omc_matrix_rows(planes + p, area, OMC_STORAGE);
  OMC_GEMM_NAME(pack_lines)(&lines, channels, n, OMC_VL, (void *)out);
}

static void turn_planes(const storage_t *planes, int64_t area, int64_t channels, acc_t *out) {
  for (int64_t p = 0; p < area; p += OMC_VL)
    turn_pixels(planes, area, channels, p, omc_min(area - p, OMC_VL), out + p * OMC_VL);
}

/* The same to the places of a copy. Its rows are in the order of the planes'. */
static void copy_planes(const conv_source *s, const storage_t *planes, int64_t channels,
                        acc_t *out) {
  const int64_t row = s->phases * s->part, area = s->h * s->w;
  const int64_t end = omc_min(s->w, row - s->left);
  acc_t square[OMC_VL * OMC_VL];
  int64_t turned = -1;
  memset(out, 0, (size_t)(s->rows * row * OMC_VL) * sizeof *out);
  for (int64_t r = 0; r < s->rows; r++) {
    if (s->row_from[r] < 0) continue;
    for (int64_t x = 0; x < end; x++) {
      const int64_t p = s->row_from[r] * s->w + x, column = x + s->left;
      if (p / OMC_VL != turned) {
        turned = p / OMC_VL;
        turn_pixels(planes, area, channels, turned * OMC_VL,
                    omc_min(area - turned * OMC_VL, OMC_VL), square);
      }
      const int64_t place =
          s->phases == 1 ? column : column % s->phases * s->part + column / s->phases;
      vstr(out + (r * row + place) * OMC_VL, vldr(square + p % OMC_VL * OMC_VL));
    }
  }
}

/* Back to planes. */
static void store_planes(const acc_t *sums, int64_t area, int64_t channels, storage_t *planes) {
  acc_t square[OMC_VL * OMC_VL];
  for (int64_t p = 0; p < area; p += OMC_VL) {
    const int64_t n = omc_min(area - p, OMC_VL);
    const omc_matrix pixels = omc_matrix_rows(sums + p * OMC_VL, OMC_VL, OMC_ACC);
    OMC_GEMM_NAME(pack_lines)(&pixels, n, OMC_VL, OMC_VL, (void *)square);
    for (int64_t c = 0; c < channels; c++)
      vst_upto(planes + c * area + p, vldr(square + c * OMC_VL), n);
  }
}

/* ---- Conv and ConvGradInput ---- */

enum { WIDE = 8 /* pixels summed at once: independent chains hide the latency of FMA */ };

typedef struct {
  int64_t n;
  const acc_t *source[WIDE];
  acc_t *sums[WIDE];
} pixel_set;

static void sum_set(const conv_grid *grid, const acc_t *weights, vacc_t bias, pixel_set *set) {
  vacc_t sum[WIDE];
  const acc_t *source[WIDE];
  OMC_UNROLL for (int i = 0; i < WIDE; i++) {
    sum[i] = bias;
    source[i] = set->source[i < set->n ? i : 0];
  }
  for (int64_t k = 0; k < grid->depth; k++) {
    const vacc_t w = vldr(weights + k * OMC_VL);
    const int64_t at = grid->source_at[k] * OMC_VL;
    OMC_UNROLL for (int i = 0; i < WIDE; i++) sum[i] = vfma(w, vldr(source[i] + at), sum[i]);
  }
  OMC_UNROLL for (int i = 0; i < WIDE; i++) if (i < set->n) vstr(set->sums[i], sum[i]);
  set->n = 0;
}

static void sum_grid(const conv_grid *grid, const acc_t *weights, vacc_t bias, const acc_t *source,
                     acc_t *sums) {
  pixel_set set = {0};
  for (int64_t y = 0; y < grid->rows; y++)
    for (int64_t x = 0; x < grid->cols; x++) {
      set.source[set.n] = source + (grid->row_at[y] + x) * OMC_VL;
      set.sums[set.n] = sums + (grid->out_at[y] + x * grid->out_col) * OMC_VL;
      if (++set.n == WIDE) sum_set(grid, weights, bias, &set);
    }
  if (set.n) sum_set(grid, weights, bias, &set);
}

/* The weights of a block's channels, of grid after grid. */
static void load_weights(const conv_product *p, const storage_t *weight, int64_t channels,
                         acc_t *out) {
  for (int64_t g = 0; g < p->n_grids; g++)
    for (int64_t k = 0; k < p->grids[g].depth; k++, out += OMC_VL)
      for (int64_t c = 0; c < OMC_VL; c++)
        out[c] = c < channels ? ld(weight + c * p->weight_group + p->grids[g].weight_at[k]) : 0;
}

/* Units are images of a block of channels. */
static void sum_blocks(omc_range range, void *ctx) {
  const omc_kernel_args *args = ctx;
  const conv_product *p = args->params;
  const conv_source *s = &p->source;
  const int64_t area = s->h * s->w;
  const storage_t *bias = omc_in_data(args, 2);
  acc_t *const source = (acc_t *)args->workspace + range.thread * channels_thread(p);
  acc_t *const sums = source + source_plane(s) * OMC_VL;
  acc_t *const weights = sums + p->out_plane * OMC_VL;
  int64_t loaded = -1;
  vacc_t start = vset(0);
  for (int64_t u = range.begin; u < range.end; u++) {
    const int64_t block = u / p->images, first = block * OMC_VL;
    const int64_t channels = channels_of(p->groups, block);
    const int64_t at = u % p->images * p->groups + first;
    if (block != loaded) {
      load_weights(p, (const storage_t *)args->in[1].data + first * p->weight_group, channels,
                   weights);
      if (bias) start = vld_fill(bias + first, channels, 0);
      loaded = block;
    }
    copy_planes(s, (const storage_t *)args->in[0].data + at * area, channels, source);
    const acc_t *w = weights;
    for (int64_t g = 0; g < p->n_grids; w += p->grids[g++].depth * OMC_VL)
      sum_grid(&p->grids[g], w, start, source, sums);
    store_planes(sums, p->out_plane, channels, (storage_t *)args->out[0].data + at * p->out_plane);
  }
}

omc_status OMC_CONV_NAME(channels)(const omc_kernel_args *args) {
  const conv_product *p = args->params;
  omc_parallel_for(channel_blocks(p->groups) * p->images, 1, args->threads, sum_blocks,
                   (void *)(uintptr_t)args);
  return OMC_OK;
}

/* ---- ConvGradWeight ---- */

enum { TAPS = 9 /* summed at once */ };

/* Adds to sums[0 .. n-1] the products of dy with the source seen from n <= TAPS taps. */
static void add_taps(const conv_weight_grad *p, const acc_t *dy, const acc_t *source,
                     const int64_t *at, int64_t n, acc_t *sums) {
  const int64_t row = p->source.part;
  const acc_t *from[TAPS];
  vacc_t sum[TAPS];
  OMC_UNROLL for (int t = 0; t < TAPS; t++) {
    from[t] = source + at[t < n ? t : 0] * OMC_VL;
    sum[t] = vset(0);
  }
  for (int64_t y = 0; y < p->rows; y++)
    for (int64_t x = 0; x < p->cols; x++, dy += OMC_VL) {
      const vacc_t d = vldr(dy);
      const int64_t pixel = (p->row_at[y] * row + x * p->sw) * OMC_VL;
      OMC_UNROLL for (int t = 0; t < TAPS; t++) sum[t] = vfma(d, vldr(from[t] + pixel), sum[t]);
    }
  OMC_UNROLL for (int t = 0; t < TAPS; t++) if (t < n)
      vstr(sums + t * OMC_VL, vldr(sums + t * OMC_VL) + sum[t]);
}

/* Units are parts of the images for a block of channels. */
static void sum_gradients(omc_range range, void *ctx) {
  const omc_kernel_args *args = ctx;
  const conv_weight_grad *p = args->params;
  const conv_source *s = &p->source;
  const int64_t parts = channel_parts(p), area = s->h * s->w, pixels = p->rows * p->cols;
  acc_t *const all = args->workspace;
  acc_t *const source = all + channel_sums(p) + range.thread * channels_grad_thread(p);
  acc_t *const dy = source + source_plane(s) * OMC_VL;
  for (int64_t u = range.begin; u < range.end; u++) {
    const int64_t block = u / parts, part = u % parts, channels = channels_of(p->groups, block);
    acc_t *const sums = all + u * p->taps * OMC_VL;
    memset(sums, 0, (size_t)(p->taps * OMC_VL) * sizeof *sums);
    for (int64_t image = omc_cut(p->images, parts, part);
         image < omc_cut(p->images, parts, part + 1); image++) {
      const int64_t at = image * p->groups + block * OMC_VL;
      copy_planes(s, (const storage_t *)args->in[1].data + at * area, channels, source);
      turn_planes((const storage_t *)args->in[0].data + at * pixels, pixels, channels, dy);
      for (int64_t t0 = 0; t0 < p->taps; t0 += TAPS) {
        const int64_t n = omc_min(TAPS, p->taps - t0);
        int64_t taps_at[TAPS] = {0};
        for (int64_t t = 0; t < n; t++)
          taps_at[t] = p->tap_at[(t0 + t) / p->kw] * s->part + (t0 + t) % p->kw * p->dw;
        add_taps(p, dy, source, taps_at, n, sums + t0 * OMC_VL);
      }
    }
  }
}

static void add_parts(omc_range range, void *ctx) {
  const omc_kernel_args *args = ctx;
  const conv_weight_grad *p = args->params;
  const int64_t parts = channel_parts(p), step = p->taps * OMC_VL;
  for (int64_t g = range.begin; g < range.end; g++)
    for (int64_t t = 0; t < p->taps; t++) {
      const acc_t *sums =
          (const acc_t *)args->workspace + g / OMC_VL * parts * step + t * OMC_VL + g % OMC_VL;
      acc_t sum = 0;
      for (int64_t part = 0; part < parts; part++) sum += sums[part * step];
      st((storage_t *)args->out[0].data + g * p->taps + t, sum);
    }
}

omc_status OMC_CONV_NAME(channels_weight)(const omc_kernel_args *args) {
  const conv_weight_grad *p = args->params;
  omc_parallel_for(channel_blocks(p->groups) * channel_parts(p), 1, args->threads, sum_gradients,
                   (void *)(uintptr_t)args);
  omc_parallel_for(p->groups, omc_grain(OMC_GRAIN_ELEMENTS, p->taps * channel_parts(p)),
                   args->threads, add_parts, (void *)(uintptr_t)args);
  return OMC_OK;
}

#endif
