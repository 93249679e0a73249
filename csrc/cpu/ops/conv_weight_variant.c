/* Kernel of ConvGradWeight: a product over the pixels of all images. */
#include <string.h>

#include "cpu/ops/conv.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

typedef struct {
  const omc_kernel_args *args;
  const conv_weight_grad *p;
  acc_t *source, *sum, *threads;
  int64_t first, images;
  int64_t row_parts, col_parts; /* of a group's gradient */
} grad_job;

static omc_matrix lines_at(const storage_t *x, int64_t stride) {
  return (omc_matrix){.data = (void *)(uintptr_t)x, .rs = stride, .cs = 1, .dtype = OMC_STORAGE};
}

/* Copies rows of the padded source with channels innermost. */
static void copy_channels_last(omc_range range, void *ctx) {
  const grad_job *job = ctx;
  const conv_source *s = &job->p->source;
  const storage_t *x = job->args->in[1].data;
  for (int64_t u = range.begin; u < range.end; u++) {
    const int64_t image = u / s->rows, y = s->row_from[u % s->rows];
    const storage_t *from = x + ((job->first + image) * s->channels * s->h + y) * s->w;
    acc_t *to = job->source + u * s->part * s->channels;
    const int64_t x0 = y >= 0 ? omc_min(s->left, s->part) : s->part;
    const int64_t x1 = y >= 0 ? omc_min(s->left + s->w, s->part) : s->part;
    memset(to, 0, (size_t)(x0 * s->channels) * sizeof(acc_t));
    memset(to + x1 * s->channels, 0, (size_t)((s->part - x1) * s->channels) * sizeof(acc_t));
    if (s->channels >= OMC_VL) {
      const omc_matrix lines = lines_at(from + x0 - s->left, s->h * s->w);
      OMC_GEMM_NAME(pack_lines)(&lines, s->channels, x1 - x0, s->channels, to + x0 * s->channels);
      continue;
    }
    for (int64_t t = x0; t < x1; t++)
      for (int64_t c = 0; c < s->channels; c++)
        to[t * s->channels + c] = ld(from + c * s->h * s->w + t - s->left);
  }
}

/* Packs m rows of dy from row i on over `depth` pixels of all images from pixel k0 on. */
static void pack_pixels(const grad_job *job, int64_t row, int64_t m, int64_t k0, int64_t depth,
                        acc_t *out) {
  const conv_weight_grad *p = job->p;
  const int64_t pixels = p->rows * p->cols, panels = omc_gemm_panels(m);
  for (int64_t panel = 0; panel < panels; panel++) {
    const int64_t i = omc_cut(m, panels, panel), h = omc_cut(m, panels, panel + 1) - i;
    for (int64_t k = 0; k < depth;) {
      const int64_t image = (k0 + k) / pixels, pixel = (k0 + k) % pixels;
      const int64_t n = omc_min(depth - k, pixels - pixel);
      const storage_t *dy = (const storage_t *)job->args->in[0].data +
                            ((job->first + image) * p->groups * p->m + row + i) * pixels + pixel;
      const omc_matrix lines = lines_at(dy, pixels);
      OMC_GEMM_NAME(pack_lines)(&lines, h, n, h, out + k * h);
      k += n;
    }
    out += h * depth;
  }
}

static void grad_part(const grad_job *job, int64_t group, int64_t row_part, int64_t col_part,
                      acc_t *scratch) {
  const conv_weight_grad *p = job->p;
  const conv_source *s = &p->source;
  const int64_t i = omc_cut(p->m, job->row_parts, row_part),
                m = omc_cut(p->m, job->row_parts, row_part + 1) - i;
  const int64_t columns = p->taps * p->c, all_panels = omc_ceil_div(columns, OMC_NR);
  const int64_t first = omc_cut(all_panels, job->col_parts, col_part),
                last = omc_cut(all_panels, job->col_parts, col_part + 1);
  const int64_t pixels = p->rows * p->cols, depth = job->images * pixels,
                blocks = omc_ceil_div(depth, OMC_GEMM_KC);
  acc_t *const b = scratch, *const a = scratch + OMC_GEMM_KC * OMC_GEMM_MAX_NR + 2 * SLACK;
  acc_t *const sum = job->sum + (group * p->m + i) * p->columns;
  for (int64_t block = 0; block < blocks; block++) {
    const int64_t k0 = omc_cut(depth, blocks, block), n = omc_cut(depth, blocks, block + 1) - k0;
    int64_t pixel_at[OMC_GEMM_KC];
    for (int64_t k = 0; k < n; k++) {
      const int64_t image = (k0 + k) / pixels, y = (k0 + k) % pixels / p->cols,
                    x = (k0 + k) % p->cols;
      pixel_at[k] = ((image * s->rows + p->row_at[y]) * s->part + x * p->sw) * s->channels;
    }
    pack_pixels(job, group * p->m + i, m, k0, n, a);
    for (int64_t panel = first; panel < last; panel++) {
      int64_t at[OMC_NR];
      conv_chunk chunks[OMC_NR];
      const int64_t j0 = panel * OMC_NR, width = omc_min(OMC_NR, columns - j0);
      for (int64_t j = 0; j < width; j++) {
        const int64_t tap = (j0 + j) / p->c, c = (j0 + j) % p->c;
        at[j] = (p->tap_at[tap / p->kw] * s->part + tap % p->kw * p->dw) * s->channels +
                group * p->c + c;
      }
      const int64_t count = OMC_CONV_NAME(cut_chunks)(at, width, chunks);
      OMC_CONV_NAME(pack_panel)(job->source, pixel_at, n, chunks, count, false, b);
      const omc_matrix sums = omc_gemm_sums(sum + j0, p->columns);
      const omc_gemm_block product = {.m = m,
                                      .n = omc_ceil_div(width, OMC_VL) * OMC_VL,
                                      .k = n,
                                      .a = a,
                                      .b = b,
                                      .from = sums,
                                      .to = sums,
                                      .alpha = 1,
                                      .beta = job->first > 0 || block > 0};
      OMC_GEMM_NAME(multiply)(&product);
    }
  }
}

static void grad_parts(omc_range range, void *ctx) {
  const grad_job *job = ctx;
  acc_t *scratch = job->threads + range.thread * grad_thread(job->p);
  const int64_t parts = job->row_parts * job->col_parts;
  for (int64_t u = range.begin; u < range.end; u++)
    grad_part(job, u / parts, u % parts / job->col_parts, u % job->col_parts, scratch);
}

/* Sums are [.., taps, c], the gradient is [.., c, taps]. */
static void write_gradient(omc_range range, void *ctx) {
  const grad_job *job = ctx;
  const conv_weight_grad *p = job->p;
  const int64_t taps = p->taps;
  for (int64_t o = range.begin; o < range.end; o++) {
    const acc_t *from = job->sum + o * p->columns;
    storage_t *to = (storage_t *)job->args->out[0].data + o * p->c * taps;
    for (int64_t c = 0; c < p->c; c++)
      for (int64_t t = 0; t < taps; t++) st(to + c * taps + t, from[t * p->c + c]);
  }
}

/* Cuts a group's gradient so that all threads have work; columns first, they cost least. */
static void choose_parts(const conv_weight_grad *p, int threads, grad_job *job) {
  const int64_t panels = omc_ceil_div(p->taps * p->c, OMC_NR);
  const int64_t wanted = omc_ceil_div(threads, p->groups);
  job->col_parts = omc_max(omc_min(wanted, panels), 1);
  job->row_parts = omc_max(omc_ceil_div(p->m, ROWS),
                           omc_min(omc_ceil_div(wanted, job->col_parts), omc_gemm_panels(p->m)));
}

OMC_KERNEL(ConvGradWeight, args) {
  const conv_weight_grad *p = args->params;
  const int64_t outputs = p->groups * p->m;
  grad_job job = {.args = args, .p = p, .sum = args->workspace};
  job.source = job.sum + omc_whole_vectors(outputs * p->columns);
  job.threads = job.source + grad_source(p);
  if (p->m == 0 || p->c == 0) return OMC_OK;
  if (p->images == 0) {
    memset(args->out[0].data, 0, (size_t)(outputs * p->c * p->taps) * sizeof(storage_t));
    return OMC_OK;
  }
  if (p->direct) return OMC_CONV_NAME(direct_weight)(args);
  choose_parts(p, args->threads, &job);
  const int64_t passes = omc_ceil_div(p->images, p->pass);
  for (int64_t pass = 0; pass < passes; pass++) {
    job.first = omc_cut(p->images, passes, pass);
    job.images = omc_cut(p->images, passes, pass + 1) - job.first;
    omc_parallel_for(job.images * p->source.rows, 1, args->threads, copy_channels_last, &job);
    omc_parallel_for(p->groups * job.row_parts * job.col_parts, 1, args->threads, grad_parts, &job);
  }
  omc_parallel_for(outputs, 16, args->threads, write_gradient, &job);
  return OMC_OK;
}

#endif
