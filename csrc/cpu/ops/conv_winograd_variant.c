/* Conv and ConvGradInput of 3 x 3 kernels by Winograd's F(2 x 2, 3 x 3): a tile of 2 x 2 outputs is
 * A' [(G g G') . (B' d B)] A for a kernel g and the 4 x 4 inputs d. Summed over channels, the 16
 * elementwise products are 16 matrix products: 16 multiplications where the definition has 36. The
 * sums mix what the definition keeps apart, so that one infinite input makes NaN of its tile: what
 * is not finite is told, and computed by the definition. */
#include <string.h>

#include "cpu/ops/conv.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

/* Consecutive tiles of one row of tiles, at most a vector. */
typedef struct {
  int64_t n, to;             /* tiles, and the column of the first in its block */
  int64_t source_at, out_at; /* of the first, from the first channel */
  int64_t cols;              /* of the output */
  bool lower;                /* the tiles' lower row is within the output */
} tile_run;

typedef struct {
  const omc_kernel_args *args;
  const conv_winograd *p;
  acc_t *kernels, *source, *threads;
  bool *finite;
  int64_t first, images; /* of the pass */
} winograd_job;

static int64_t depth_blocks(const conv_winograd *p) { return omc_ceil_div(p->c, DEPTH); }

/* G times three elements. */
#define SPREAD3(a, b, c, out, step)                  \
  do {                                               \
    const acc_t outer_ = (a) + (c);                  \
    (out)[0] = (a);                                  \
    (out)[step] = (acc_t)0.5 * (outer_ + (b));       \
    (out)[2 * (step)] = (acc_t)0.5 * (outer_ - (b)); \
    (out)[3 * (step)] = (c);                         \
  } while (0)

/* Kernels of `rows` rows from `weight` on, into [4, 4, OMC_MR]. */
static void transform_kernels(const conv_winograd *p, const storage_t *weight, int64_t rows,
                              acc_t out[16][OMC_MR]) {
  acc_t taps[9][OMC_MR] = {{0}}, half[12][OMC_MR];
  for (int64_t r = 0; r < rows; r++)
    for (int t = 0; t < 9; t++) taps[p->flip ? 8 - t : t][r] = ld(weight + r * p->weight_row + t);
  for (int x = 0; x < 3; x++)
    for (int r = 0; r < OMC_MR; r++)
      SPREAD3(taps[x][r], taps[3 + x][r], taps[6 + x][r], &half[x][r], 3 * OMC_MR);
  for (int y = 0; y < 4; y++)
    for (int r = 0; r < OMC_MR; r++)
      SPREAD3(half[3 * y][r], half[3 * y + 1][r], half[3 * y + 2][r], &out[4 * y][r], OMC_MR);
}

/* Items are (panel of rows, channel). Packs 16 matrices of m x c by blocks of depth. */
static void pack_kernels(omc_range range, void *ctx) {
  const winograd_job *job = ctx;
  const conv_winograd *p = job->p;
  const int64_t blocks = depth_blocks(p);
  for (int64_t u = range.begin; u < range.end; u++) {
    const int64_t i = omc_gemm_row(p->m, u / p->c), rows = omc_gemm_row(p->m, u / p->c + 1) - i,
                  k = u % p->c;
    int64_t block = 0;
    while (omc_cut(p->c, blocks, block + 1) <= k) block++;
    const int64_t k0 = omc_cut(p->c, blocks, block), depth = omc_cut(p->c, blocks, block + 1) - k0;
    acc_t *to = job->kernels + p->m * k0 + i * depth + (k - k0) * rows;
    acc_t spread[16][OMC_MR];
    transform_kernels(
        p, (const storage_t *)job->args->in[1].data + i * p->weight_row + k * p->weight_col, rows,
        spread);
    for (int e = 0; e < 16; e++)
      memcpy(to + e * p->m * p->c, spread[e], (size_t)rows * sizeof(acc_t));
  }
}

static void copy_planes(omc_range range, void *ctx) {
  const winograd_job *job = ctx;
  const conv_source *s = &job->p->source;
  const storage_t *x = job->args->in[0].data;
  for (int64_t i = range.begin; i < range.end; i++)
    OMC_CONV_NAME(copy_plane)(s, x + (job->first * s->channels + i) * s->h * s->w, 0,
                              job->source + i * source_plane(s));
}

/* Cuts tiles j0 .. j0+n-1 of the pass into runs; returns how many. */
static int64_t cut_runs(const winograd_job *job, int64_t j0, int64_t n, tile_run *out) {
  const conv_winograd *p = job->p;
  const int64_t row = 2 * p->source.part, tiles_h = omc_ceil_div(p->oh, 2),
                tiles_w = omc_ceil_div(p->ow, 2);
  int64_t count = 0;
  for (int64_t j = 0; j < n; count++) {
    const int64_t x = (j0 + j) % tiles_w, line = (j0 + j) / tiles_w;
    const int64_t y = line % tiles_h, image = line / tiles_h;
    const int64_t tiles = omc_min(omc_min(tiles_w - x, n - j), OMC_VL);
    out[count] = (tile_run){.n = tiles,
                            .to = j,
                            .source_at = image * source_image(&p->source) + 2 * y * row + x,
                            .out_at = ((job->first + image) * p->m * p->oh + 2 * y) * p->ow + 2 * x,
                            .cols = omc_min(2 * tiles, p->ow - 2 * x),
                            .lower = 2 * y + 1 < p->oh};
    j += tiles;
  }
  return count;
}

/* B' times four elements. */
#define SPREAD4(a, b, c, d, out, step) \
  do {                                 \
    (out)[0] = (a) - (c);              \
    (out)[step] = (b) + (c);           \
    (out)[2 * (step)] = (c) - (b);     \
    (out)[3 * (step)] = (b) - (d);     \
  } while (0)

/* Vectors of tiles of one channel; whole vectors are written. */
OMC_INLINE void transform_source(const acc_t *source, int64_t part, int64_t step, acc_t *out) {
  vacc_t half[16], spread[16];
  OMC_UNROLL for (int y = 0; y < 4; y++) {
    const acc_t *even = source + 2 * y * part, *odd = even + part;
    SPREAD4(vldr(even), vldr(odd), vldr(even + 1), vldr(odd + 1), half + 4 * y, 1);
  }
  OMC_UNROLL for (int x = 0; x < 4; x++)
      SPREAD4(half[x], half[4 + x], half[8 + x], half[12 + x], spread + x, 4);
  OMC_UNROLL for (int e = 0; e < 16; e++) vstr(out + e * step, spread[e]);
}

/* A' on both sides of the products of one channel; the lanes of tiles whose outputs are finite. */
OMC_INLINE vmask transform_products(const acc_t *products, int64_t step, acc_t bias,
                                    const tile_run *run, int64_t ow, storage_t *out) {
  vacc_t half[8], y[4];
  OMC_UNROLL for (int x = 0; x < 4; x++) {
    const acc_t *p = products + x * step;
    const vacc_t a = vldr(p), b = vldr(p + 4 * step), c = vldr(p + 8 * step),
                 d = vldr(p + 12 * step);
    half[x] = a + (b + c);
    half[4 + x] = (b - c) - d;
  }
  OMC_UNROLL for (int i = 0; i < 2; i++) {
    const vacc_t *h = half + 4 * i;
    y[2 * i] = h[0] + (h[1] + h[2]) + vset(bias);
    y[2 * i + 1] = (h[1] - h[2]) - h[3] + vset(bias);
  }
  store_in_turn(y[0], y[1], run->cols, out);
  if (run->lower) store_in_turn(y[2], y[3], run->cols, out + ow);
  const vacc_t all = (y[0] + y[1]) + (y[2] + y[3]);
  return ~vnan(all - all);
}

static void tile_block(const winograd_job *job, int64_t j0, int64_t n, acc_t *scratch) {
  const conv_winograd *p = job->p;
  const storage_t *bias = omc_in_data(job->args, 2);
  const int64_t pitch = winograd_pitch(), plane = source_plane(&p->source);
  const int64_t in_step = p->c * pitch, out_step = p->m * pitch, blocks = depth_blocks(p);
  acc_t *const spread = scratch, *const products = spread + 16 * in_step;
  tile_run runs[TILES];
  const int64_t count = cut_runs(job, j0, n, runs);
  for (int64_t c = 0; c < p->c; c++)
    for (int64_t i = 0; i < count; i++)
      transform_source(job->source + runs[i].source_at + c * plane, p->source.part, in_step,
                       spread + c * pitch + runs[i].to);
  for (int64_t e = 0; e < 16; e++)
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t k0 = omc_cut(p->c, blocks, block);
      const omc_matrix sums = omc_matrix_rows(products + e * out_step, pitch, OMC_ACC);
      const omc_gemm_block product = {.m = p->m,
                                      .n = omc_ceil_div(n, OMC_NR) * OMC_NR,
                                      .k = omc_cut(p->c, blocks, block + 1) - k0,
                                      .a = job->kernels + (e * p->c + k0) * p->m,
                                      .b_rows = spread + e * in_step + k0 * pitch,
                                      .b_rs = pitch,
                                      .from = sums,
                                      .to = sums,
                                      .alpha = 1,
                                      .beta = block > 0};
      OMC_GEMM_NAME(multiply)(&product);
    }
  vmask finite = ~(vmask){0};
  for (int64_t m = 0; m < p->m; m++)
    for (int64_t i = 0; i < count; i++)
      finite &= ~vlanes(runs[i].n) | transform_products(products + m * pitch + runs[i].to, out_step,
                                                        bias ? ld(bias + m) : 0, &runs[i], p->ow,
                                                        (storage_t *)job->args->out[0].data +
                                                            m * p->oh * p->ow + runs[i].out_at);
  if (!vall(finite)) __atomic_store_n(job->finite, false, __ATOMIC_RELAXED);
}

/* Units are OMC_NR tiles, none dependent on another: any cut gives the same result. */
static void tile_range(omc_range range, void *ctx) {
  const winograd_job *job = ctx;
  const conv_winograd *p = job->p;
  acc_t *scratch = job->threads + range.thread * winograd_thread(p);
  const int64_t tiles = job->images * winograd_tiles(p), last = omc_min(range.end * OMC_NR, tiles);
  for (int64_t j = range.begin * OMC_NR; j < last; j += TILES)
    tile_block(job, j, omc_min(TILES, last - j), scratch);
}

bool OMC_CONV_NAME(winograd)(const omc_kernel_args *args, const conv_winograd *p) {
  bool finite = true;
  winograd_job job = {.args = args, .p = p, .kernels = args->workspace, .finite = &finite};
  job.source = job.kernels + omc_whole_vectors(16 * p->m * p->c);
  job.threads = job.source + omc_whole_vectors(p->pass * source_image(&p->source) + SLACK);
  omc_parallel_for(omc_gemm_panels(p->m) * p->c, 1, args->threads, pack_kernels, &job);
  const int64_t passes = omc_ceil_div(p->images, p->pass);
  for (int64_t pass = 0; pass < passes; pass++) {
    job.first = omc_cut(p->images, passes, pass);
    job.images = omc_cut(p->images, passes, pass + 1) - job.first;
    omc_parallel_for(job.images * p->c, 1, args->threads, copy_planes, &job);
    omc_parallel_for(omc_ceil_div(job.images * winograd_tiles(p), OMC_NR), 1, args->threads,
                     tile_range, &job);
  }
  return finite;
}

#endif
