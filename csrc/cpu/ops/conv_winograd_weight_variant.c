/* ConvGradWeight of 3 x 3 kernels by the transpose of Winograd's F(2 x 2, 3 x 3), see
 * conv_winograd_variant.c: of tiles of 2 x 2 gradients y and the 4 x 4 inputs d they meet, the
 * kernel's gradient is G' [sum over tiles of (A y A') . (B' d B)] G. The sums are 16 matrix
 * products over the tiles of all images. Both tensors are copied with channels innermost, so that
 * vectors hold channels, of one tile, as the products want them.
 *
 * A unit of work is one of the four rows of the 16 products, and a part of the output channels. */
#include <string.h>

#include "cpu/ops/conv.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

typedef struct {
  const omc_kernel_args *args;
  const conv_weight_grad *p;
  acc_t *products, *source, *gradient, *threads;
  int64_t first, images; /* of the pass */
  int64_t m_parts;
  bool *finite;
} winograd_job;

/* Where tiles j0 .. j0+n-1 begin in a copy: steps of two rows and columns. */
static void locate_tiles(const conv_winograd_weight *w, const conv_source *s, int64_t j0, int64_t n,
                         int64_t *at) {
  for (int64_t k = 0; k < n; k++) {
    const int64_t x = (j0 + k) % w->tiles_w, line = (j0 + k) / w->tiles_w;
    const int64_t y = line % w->tiles_h, image = line / w->tiles_h;
    at[k] = ((image * s->rows + 2 * y) * s->part + 2 * x) * s->channels;
  }
}

/* Row `row` of A y A' for n tiles from j0 on, of channels i .. i+m-1: panels of A for each of four
 * products. What a vector has past its rows is written over by the next one. */
static void spread_gradient(const winograd_job *job, int row, int64_t j0, int64_t n, int64_t i,
                            int64_t m, acc_t *out) {
  static const acc_t upper[] = {1, 1, 1, 0}, lower[] = {0, 1, -1, -1};
  const conv_winograd_weight *w = job->p->winograd;
  const conv_source *s = &w->gradient;
  const int64_t step = m * n + SLACK, right = s->channels, below = s->part * s->channels;
  const vacc_t a = vset(upper[row]), b = vset(lower[row]);
  int64_t at[BLOCK_TILES];
  locate_tiles(w, s, j0, n, at);
  for (int64_t panel = 0; panel < omc_gemm_panels(m); panel++) {
    const int64_t r = omc_gemm_row(m, panel), h = omc_gemm_row(m, panel + 1) - r;
    for (int64_t k = 0; k < n; k++)
      for (int64_t v = 0; v < h; v += OMC_VL) {
        const acc_t *y = job->gradient + at[k] + i + r + v;
        const vacc_t first = vfma(a, vldr(y), b * vldr(y + below)),
                     second = vfma(a, vldr(y + right), b * vldr(y + right + below));
        acc_t *to = out + r * n + k * h + v;
        vstr(to, first);
        vstr(to + step, first + second);
        vstr(to + 2 * step, first - second);
        vstr(to + 3 * step, -second);
      }
  }
}

/* Row `row` of B' d B for n tiles from j0 on: four matrices of n x columns. */
static void spread_source(const winograd_job *job, int row, int64_t j0, int64_t n, acc_t *out) {
  static const int first[] = {0, 1, 2, 1}, second[] = {2, 2, 1, 3};
  static const acc_t sign[] = {-1, 1, -1, -1};
  const conv_winograd_weight *w = job->p->winograd;
  const conv_source *s = &w->source;
  const int64_t columns = winograd_columns(job->p), step = n * columns;
  const vacc_t b = vset(sign[row]);
  int64_t at[BLOCK_TILES];
  locate_tiles(w, s, j0, n, at);
  for (int64_t k = 0; k < n; k++, out += columns) {
    const acc_t *d = job->source + at[k];
    const acc_t *p = d + first[row] * s->part * s->channels,
                *q = d + second[row] * s->part * s->channels;
    for (int64_t c = 0; c < s->channels; c += OMC_VL) {
      vacc_t x[4];
      OMC_UNROLL for (int i = 0; i < 4; i++) x[i] =
          vfma(b, vldr(q + i * s->channels + c), vldr(p + i * s->channels + c));
      vstr(out + c, x[0] - x[2]);
      vstr(out + c + step, x[1] + x[2]);
      vstr(out + c + 2 * step, x[2] - x[1]);
      vstr(out + c + 3 * step, x[1] - x[3]);
    }
    for (int64_t c = omc_ceil_div(s->channels, OMC_VL) * OMC_VL; c < columns; c++)
      for (int x = 0; x < 4; x++) out[c + x * step] = 0;
  }
}

static void multiply_rows(omc_range range, void *ctx) {
  const winograd_job *job = ctx;
  const conv_weight_grad *p = job->p;
  const conv_winograd_weight *w = p->winograd;
  const int64_t columns = winograd_columns(p), tiles = job->images * w->tiles_h * w->tiles_w;
  const int64_t blocks = omc_ceil_div(tiles, BLOCK_TILES);
  acc_t *const a = job->threads + range.thread * winograd_weight_thread(p);
  acc_t *const b = a + 4 * (BLOCK_TILES * p->m + SLACK);
  for (int64_t u = range.begin; u < range.end; u++) {
    const int row = (int)(u / job->m_parts);
    const int64_t part = u % job->m_parts, i = omc_cut(p->m, job->m_parts, part),
                  m = omc_cut(p->m, job->m_parts, part + 1) - i;
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t j0 = omc_cut(tiles, blocks, block), n = omc_cut(tiles, blocks, block + 1) - j0;
      spread_gradient(job, row, j0, n, i, m, a);
      spread_source(job, row, j0, n, b);
      for (int x = 0; x < 4; x++) {
        acc_t *const to = job->products + ((4 * row + x) * p->m + i) * columns;
        const omc_gemm_block product = {.m = m,
                                        .n = columns,
                                        .k = n,
                                        .a = a + x * (m * n + SLACK),
                                        .b_rows = b + x * n * columns,
                                        .b_rs = columns,
                                        .from = omc_matrix_rows(to, columns, OMC_ACC),
                                        .to = omc_matrix_rows(to, columns, OMC_ACC),
                                        .alpha = 1,
                                        .beta = job->first > 0 || block > 0};
        OMC_GEMM_NAME(multiply)(&product);
      }
    }
  }
}

/* G' times four vectors. */
#define GATHER4(a, b, c, d, out, step)                   \
  do {                                                   \
    const vacc_t half_ = vset((acc_t)0.5) * ((b) + (c)); \
    (out)[0] = (a) + half_;                              \
    (out)[step] = vset((acc_t)0.5) * ((b) - (c));        \
    (out)[2 * (step)] = half_ + (d);                     \
  } while (0)

/* Rows of the gradient, [taps, channels]. */
static void gather_taps(omc_range range, void *ctx) {
  const winograd_job *job = ctx;
  const conv_weight_grad *p = job->p;
  const int64_t columns = winograd_columns(p), step = p->m * columns;
  vmask finite = ~(vmask){0};
  for (int64_t o = range.begin; o < range.end; o++) {
    acc_t *const out = (acc_t *)job->args->workspace + o * p->columns;
    for (int64_t c = 0; c < p->c; c += OMC_VL) {
      const acc_t *from = job->products + o * columns + c;
      const int64_t some = omc_min(p->c - c, OMC_VL);
      vacc_t half[12], taps[9];
      OMC_UNROLL for (int x = 0; x < 4; x++)
          GATHER4(vldr(from + x * step), vldr(from + (4 + x) * step), vldr(from + (8 + x) * step),
                  vldr(from + (12 + x) * step), half + x, 4);
      OMC_UNROLL for (int y = 0; y < 3; y++)
          GATHER4(half[4 * y], half[4 * y + 1], half[4 * y + 2], half[4 * y + 3], taps + 3 * y, 1);
      OMC_UNROLL for (int t = 0; t < 9; t++) {
        finite &= ~vlanes(some) | ~vnan(taps[t] - taps[t]);
        vstr_upto(out + t * p->c + c, taps[t], some);
      }
    }
  }
  if (!vall(finite)) __atomic_store_n(job->finite, false, __ATOMIC_RELAXED);
}

bool OMC_CONV_NAME(winograd_weight)(const omc_kernel_args *args, const conv_weight_grad *p) {
  const conv_winograd_weight *w = p->winograd;
  const int threads = args->threads;
  bool finite = true;
  winograd_job job = {.args = args, .p = p, .finite = &finite};
  job.products = (acc_t *)args->workspace + omc_whole_vectors(p->m * p->columns);
  job.source = job.products + winograd_products(p);
  job.gradient = job.source + winograd_copy(p, &w->source);
  job.threads = job.gradient + winograd_copy(p, &w->gradient);
  job.m_parts = 4 % threads == 0 ? 1 : omc_min(threads, omc_gemm_panels(p->m));
  const int64_t passes = omc_ceil_div(p->images, w->pass);
  for (int64_t pass = 0; pass < passes; pass++) {
    job.first = omc_cut(p->images, passes, pass);
    job.images = omc_cut(p->images, passes, pass + 1) - job.first;
    OMC_CONV_NAME(copy_channels_last)
    (&w->source, args->in[1].data, job.first, job.images, threads, job.source);
    OMC_CONV_NAME(copy_channels_last)
    (&w->gradient, args->in[0].data, job.first, job.images, threads, job.gradient);
    omc_parallel_for(4 * job.m_parts, 1, threads, multiply_rows, &job);
  }
  omc_parallel_for(p->m, 1, threads, gather_taps, &job);
  return finite;
}

#endif
