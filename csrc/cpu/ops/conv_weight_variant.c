/* Kernel of ConvGradWeight: a product over the pixels of all images. */
#include <string.h>

#include "cpu/ops/conv.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT && OMC_GEMM_KNOWN

typedef struct {
  const omc_kernel_args *args;
  const conv_weight_grad *p;
  conv_element *source;
  acc_t *sum, *threads;
  int64_t sum_row; /* elements from a row of sums to the next */
  int64_t first, images;
  int64_t row_parts, col_parts; /* of a group's gradient */
} grad_job;

/* Elements t .. t+n-1 of `channels` lines of the source, channels innermost. */
#if OMC_DEPTH == 2
static void turn(const omc_matrix *lines, int64_t channels, int64_t n, conv_element *to) {
  enum { SIDE = OMC_VL * OMC_DEPTH };
  for (int64_t c = 0; c < channels; c += OMC_VL)
    for (int64_t t = 0; t < n; t += SIDE) {
      const int64_t some = omc_min(channels - c, OMC_VL), most = omc_min(n - t, SIDE);
      const omc_matrix square = omc_matrix_part(lines, c, t);
      omc_unit units[OMC_VL * OMC_VL + SLACK];
      OMC_GEMM_NAME(pack_lines)(&square, some, most, OMC_VL, units);
      for (int64_t k = 0; k < most; k++) {
        omc_acc_bits pairs;
        memcpy(&pairs, units + k / 2 * OMC_VL, sizeof pairs);
        const omc_acc_bits bits = k % 2 ? pairs >> 16 : pairs;
        omc_vsth(to + (t + k) * channels + c, (omc_half_bits)_mm512_cvtepi32_epi16((__m512i)bits),
                 some);
      }
    }
}
#else
static void turn(const omc_matrix *lines, int64_t channels, int64_t n, conv_element *to) {
  if (channels >= OMC_VL) {
    OMC_GEMM_NAME(pack_lines)(lines, channels, n, channels, to);
    return;
  }
  for (int64_t t = 0; t < n; t++)
    for (int64_t c = 0; c < channels; c++)
      to[t * channels + c] = ld((const storage_t *)lines->data + c * lines->rs + t);
}
#endif

typedef struct {
  const conv_source *source;
  const storage_t *from; /* of the first image */
  conv_element *to;
} copy_job;

static void copy_rows(omc_range range, void *ctx) {
  const copy_job *job = ctx;
  const conv_source *s = job->source;
  for (int64_t u = range.begin; u < range.end; u++) {
    const int64_t image = u / s->rows, y = s->row_from[u % s->rows];
    const storage_t *from = job->from + (image * s->channels * s->h + y) * s->w;
    conv_element *to = job->to + u * s->part * s->channels;
    const int64_t x0 = y >= 0 ? omc_min(s->left, s->part) : s->part;
    const int64_t x1 = y >= 0 ? omc_min(s->left + s->w, s->part) : s->part;
    memset(to, 0, (size_t)(x0 * s->channels) * sizeof *to);
    memset(to + x1 * s->channels, 0, (size_t)((s->part - x1) * s->channels) * sizeof *to);
    const omc_matrix lines = omc_matrix_rows(from + x0 - s->left, s->h * s->w, OMC_STORAGE);
    if (x1 > x0) turn(&lines, s->channels, x1 - x0, to + x0 * s->channels);
  }
}

static void copy_images(const conv_source *s, const storage_t *tensor, int64_t first,
                        int64_t images, int threads, omc_range_fn rows, conv_element *out) {
  copy_job job = {s, tensor + first * s->channels * s->h * s->w, out};
  omc_parallel_for(images * s->rows, 1, threads, rows, &job);
}

void OMC_CONV_NAME(copy_channels_last)(const conv_source *s, const storage_t *tensor, int64_t first,
                                       int64_t images, int threads, conv_element *out) {
  copy_images(s, tensor, first, images, threads, copy_rows, out);
}

/* ---- a copy that tiles read ---- */

/* Whether whole vectors of a panel, of channels of one tap, can be read where the copy has them: of
 * pairs, where none has pixels of two rows, so that two copies have them all. */
static bool reads_copy(const conv_weight_grad *p) {
  enum { MOST_CHANNELS = 256 /* pixels further apart share too few sets of the first cache */ };
  const bool pairs = p->sw == 1 && p->cols % 2 == 0 && p->source.part % 2 == 0;
  return OMC_GROUP == 1 && p->source.channels <= MOST_CHANNELS && p->c % OMC_VL == 0 &&
         (OMC_DEPTH == 1 || pairs);
}

/* The element, or the unit, of a row of the copy that begins with its column x. */
static int64_t place_of_column(const conv_source *s, int64_t x) {
  return (OMC_DEPTH == 1 ? x : x % 2 * (s->part / 2) + x / 2) * s->channels;
}

#if OMC_DEPTH == 2
/* A row of the copy: units of columns 0 and 1, 2 and 3, .., then of 1 and 2, 3 and 4, ..; the n
 * elements of the lines are columns x0, .., all others are zeros. */
static void copy_pairs(const conv_source *s, const omc_matrix *lines, int64_t x0, int64_t n,
                       omc_unit *to) {
  const int64_t channels = s->channels, half = s->part / 2;
  for (int64_t shift = 0; shift < 2; shift++, to += half * channels) {
    const int64_t first = omc_max(x0 - shift, 0), skipped = first - (x0 - shift);
    const int64_t alone = first % 2, begin = (first + alone) / 2; /* first whole unit of lines */
    const int64_t some = omc_max(n - skipped - alone, 0), end = begin + omc_ceil_div(some, 2);
    memset(to, 0, (size_t)(begin * channels) * sizeof *to);
    memset(to + end * channels, 0, (size_t)((half - end) * channels) * sizeof *to);
    const storage_t *from = (const storage_t *)lines->data + skipped;
    for (int64_t c = 0; alone && n > skipped && c < channels; c++)
      to[(begin - 1) * channels + c] = (omc_unit)((uint32_t)from[c * lines->rs].bits << 16);
    const omc_matrix rest = omc_matrix_part(lines, 0, skipped + alone);
    if (some > 0) OMC_GEMM_NAME(pack_lines)(&rest, channels, some, channels, to + begin * channels);
  }
}

static void copy_rows_of_pairs(omc_range range, void *ctx) {
  const copy_job *job = ctx;
  const conv_source *s = job->source;
  for (int64_t u = range.begin; u < range.end; u++) {
    const int64_t y = s->row_from[u % s->rows], left = omc_min(s->left, s->part);
    const storage_t *from = job->from + (u / s->rows * s->channels * s->h + omc_max(y, 0)) * s->w;
    const omc_matrix lines = omc_matrix_rows(from, s->h * s->w, OMC_STORAGE);
    const int64_t n = y < 0 ? 0 : omc_min(s->left + s->w, s->part) - left;
    copy_pairs(s, &lines, left, n, (omc_unit *)(void *)job->to + u * s->part * s->channels);
  }
}
#endif

/* What copies rows for a product. */
static omc_range_fn copier_of(const conv_weight_grad *p) {
#if OMC_DEPTH == 2
  return reads_copy(p) ? copy_rows_of_pairs : copy_rows;
#else
  return (void)p, copy_rows;
#endif
}

/* ---- the product ---- */

/* Units of depth of an image: no unit has pixels of two. */
static int64_t image_units(const conv_weight_grad *p) {
  return omc_ceil_div(p->rows * p->cols, OMC_DEPTH);
}

/* Packs m rows of dy from row i on over `units` of all images from unit u0 on. */
static void pack_pixels(const grad_job *job, int64_t row, int64_t m, int64_t u0, int64_t units,
                        omc_unit *out) {
  const conv_weight_grad *p = job->p;
  const int64_t pixels = p->rows * p->cols, all = image_units(p), panels = omc_gemm_panels(m);
  for (int64_t panel = 0; panel < panels; panel++) {
    const int64_t i = omc_gemm_row(m, panel), h = omc_gemm_row(m, panel + 1) - i;
    for (int64_t u = 0; u < units;) {
      const int64_t image = (u0 + u) / all, first = (u0 + u) % all;
      const int64_t n = omc_min(units - u, all - first), pixel = first * OMC_DEPTH;
      const storage_t *dy = (const storage_t *)job->args->in[0].data +
                            ((job->first + image) * p->groups * p->m + row + i) * pixels + pixel;
      const omc_matrix lines = omc_matrix_rows(dy, pixels, OMC_STORAGE);
      OMC_GEMM_NAME(pack_lines)(&lines, h, omc_min(n * OMC_DEPTH, pixels - pixel), h, out + u * h);
      u += n;
    }
    OMC_GEMM_NAME(group)(out, h, units);
    out += h * omc_gemm_units(units);
  }
}

/* Where the pixels of `units` from unit u0 on lie in the source. */
static void locate_pixels(const conv_weight_grad *p, int64_t u0, int64_t units, int64_t *at) {
  const conv_source *s = &p->source;
  const int64_t all = image_units(p), end = all * OMC_DEPTH;
  int64_t image = u0 / all, pixel = u0 % all * OMC_DEPTH;
  int64_t y = pixel / p->cols, x = pixel % p->cols;
  for (int64_t k = 0; k < units * OMC_DEPTH; k++) {
    at[k] = y < p->rows ? ((image * s->rows + p->row_at[y]) * s->part + x * p->sw) * s->channels
                        : OMC_NOWHERE;
    if (++x == p->cols) x = 0, y++;
    if (++pixel == end) pixel = x = y = 0, image++;
  }
}

/* And those of units, where tiles read them. */
static void locate_units(const conv_weight_grad *p, int64_t u0, int64_t units, int64_t *at) {
  const conv_source *s = &p->source;
  const int64_t all = image_units(p);
  int64_t image = u0 / all, pixel = u0 % all * OMC_DEPTH;
  int64_t y = pixel / p->cols, x = pixel % p->cols;
  for (int64_t u = 0; u < units; u++) {
    at[u] =
        (image * s->rows + p->row_at[y]) * s->part * s->channels + place_of_column(s, x * p->sw);
    if ((x += OMC_DEPTH) >= p->cols) x = 0, y++;
    if (y == p->rows) y = 0, image++;
  }
}

/* Packs `width` columns from j0 on over `units` whose pixels lie at `pixel_at`. */
static void pack_columns(const grad_job *job, int64_t group, int64_t j0, int64_t width,
                         const int64_t *pixel_at, int64_t units, omc_unit *out) {
  const conv_weight_grad *p = job->p;
  const conv_source *s = &p->source;
  int64_t at[OMC_NR];
  conv_chunk chunks[OMC_NR];
  for (int64_t j = 0; j < width; j++) {
    const int64_t tap = (j0 + j) / p->c, c = (j0 + j) % p->c;
    at[j] =
        (p->tap_at[tap / p->kw] * s->part + tap % p->kw * p->dw) * s->channels + group * p->c + c;
  }
  const int64_t count = OMC_CONV_NAME(cut_chunks)(at, width, 2 * OMC_VL, chunks);
  OMC_CONV_NAME(pack_panel)(job->source, pixel_at, units * OMC_DEPTH, chunks, count, false, out);
}

/* Where the vectors of the panel from column j0 on lie in the copy; past the last column once more
 * the vector before it, whose sums nobody reads. */
static void place_panel(const grad_job *job, int64_t group, int64_t j0, const int64_t *unit_at,
                        omc_places places[OMC_NV]) {
  const conv_weight_grad *p = job->p;
  const conv_source *s = &p->source;
  for (int64_t v = 0; v < OMC_NV; v++) {
    const int64_t j = omc_min(j0 + v * OMC_VL, p->taps * p->c - OMC_VL), tap = j / p->c;
    const int64_t row = p->tap_at[tap / p->kw] * s->part * s->channels;
    const int64_t column = place_of_column(s, tap % p->kw * p->dw);
    const omc_unit *copy = (const omc_unit *)(const void *)job->source;
    places[v] = (omc_places){.from = copy + row + column + group * p->c + j % p->c, .at = unit_at};
  }
}

static void grad_part(const grad_job *job, int64_t group, int64_t row_part, int64_t col_part,
                      acc_t *scratch) {
  const conv_weight_grad *p = job->p;
  const int64_t i = omc_cut(p->m, job->row_parts, row_part),
                m = omc_cut(p->m, job->row_parts, row_part + 1) - i;
  const int64_t columns = p->taps * p->c, all_panels = omc_ceil_div(columns, OMC_NR);
  const int64_t first = omc_cut(all_panels, job->col_parts, col_part),
                last = omc_cut(all_panels, job->col_parts, col_part + 1);
  const int64_t units = job->images * image_units(p), blocks = omc_ceil_div(units, DEPTH);
  omc_unit *const b = (omc_unit *)(void *)scratch;
  omc_unit *const a = b + DEPTH * OMC_GEMM_MAX_NR + 2 * SLACK;
  acc_t *const sum = job->sum + (group * p->m + i) * job->sum_row;
  const bool in_place = reads_copy(p);
  for (int64_t block = 0; block < blocks; block++) {
    const int64_t u0 = omc_gemm_cut(units, blocks, block),
                  n = omc_gemm_cut(units, blocks, block + 1) - u0;
    int64_t pixel_at[OMC_DEPTH * DEPTH];
    (in_place ? locate_units : locate_pixels)(p, u0, n, pixel_at);
    pack_pixels(job, group * p->m + i, m, u0, n, a);
    for (int64_t panel = first; panel < last; panel++) {
      omc_places places[OMC_NV];
      const int64_t j0 = panel * OMC_NR, width = omc_min(OMC_NR, columns - j0);
      if (in_place)
        place_panel(job, group, j0, pixel_at, places);
      else
        pack_columns(job, group, j0, width, pixel_at, n, b);
      const omc_matrix sums = omc_matrix_rows(sum + j0, job->sum_row, OMC_ACC);
      const omc_gemm_block product = {.m = m,
                                      .n = in_place ? OMC_NR : omc_ceil_div(width, OMC_VL) * OMC_VL,
                                      .k = n,
                                      .a = a,
                                      .b = b,
                                      .b_at = in_place ? places : NULL,
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

/* Sums that are the gradient as they lie. */
static bool sums_in_place(const conv_weight_grad *p) {
  return OMC_STORES_ACC && p->taps == 1 && p->c % OMC_NR == 0;
}

/* Sums are [.., taps, c], the gradient is [.., c, taps]: turned by as many channels as there is
 * room for, or one by one. */
static void write_gradient(omc_range range, void *ctx) {
  const grad_job *job = ctx;
  const conv_weight_grad *p = job->p;
  const int64_t taps = p->taps, side = DEPTH * OMC_GEMM_MAX_NR / taps;
  acc_t *const turned = job->threads + range.thread * grad_thread(p);
  for (int64_t o = range.begin; o < range.end; o++) {
    acc_t *from = job->sum + o * job->sum_row;
    storage_t *to = (storage_t *)job->args->out[0].data + o * p->c * taps;
    if (taps == 1) {
      store_row(from, to, p->c);
      continue;
    }
    for (int64_t c = 0; side > 0 && c < p->c; c += side) {
      const int64_t n = omc_min(side, p->c - c);
      const omc_matrix lines = omc_matrix_rows(from + c, p->c, OMC_ACC);
      OMC_TURN_UNITS(&lines, taps, n, taps, (void *)turned);
      store_row(turned, to + c * taps, n * taps);
    }
    for (int64_t c = 0; side == 0 && c < p->c; c++)
      for (int64_t t = 0; t < taps; t++) st(to + c * taps + t, from[t * p->c + c]);
  }
}

/* Cuts a group's gradient so that all threads have work; first what is not packed by each anew, as
 * rows are for each part of the columns. */
static void choose_parts(const conv_weight_grad *p, int threads, grad_job *job) {
  const int64_t most_rows = omc_gemm_panels(p->m);
  const int64_t most_columns = omc_ceil_div(p->taps * p->c, OMC_NR);
  const int64_t wanted = omc_ceil_div(threads, p->groups);
  const int64_t rows = reads_copy(p) ? omc_min(wanted, most_rows) : 1;
  job->col_parts = omc_clamp(omc_ceil_div(wanted, rows), 1, omc_max(most_columns, 1));
  job->row_parts =
      omc_max(omc_ceil_div(p->m, ROWS), omc_min(omc_ceil_div(wanted, job->col_parts), most_rows));
}

OMC_KERNEL(ConvGradWeight, args) {
  const conv_weight_grad *p = args->params;
  const int64_t outputs = p->groups * p->m;
  grad_job job = {.args = args, .p = p, .sum = args->workspace, .sum_row = p->columns};
  acc_t *const source = job.sum + omc_whole_vectors(outputs * p->columns);
  job.source = (conv_element *)(void *)source;
  job.threads = source + grad_source(p);
  if (p->m == 0 || p->c == 0) return OMC_OK;
  if (p->images == 0) {
    memset(args->out[0].data, 0, (size_t)(outputs * p->c * p->taps) * sizeof(storage_t));
    return OMC_OK;
  }
  if (p->by_channels) return OMC_CONV_STORED(channels_weight)(args);
  if (p->direct) return OMC_CONV_STORED(direct_weight)(args);
  if (p->winograd && OMC_CONV_STORED(winograd_weight)(args, p)) {
    omc_parallel_for(outputs, 16, args->threads, write_gradient, &job);
    return OMC_OK;
  }
  if (sums_in_place(p)) {
    job.sum = args->out[0].data;
    job.sum_row = p->c;
  }
  choose_parts(p, args->threads, &job);
  const int64_t passes = omc_ceil_div(p->images, p->pass);
  for (int64_t pass = 0; pass < passes; pass++) {
    job.first = omc_cut(p->images, passes, pass);
    job.images = omc_cut(p->images, passes, pass + 1) - job.first;
    copy_images(&p->source, args->in[1].data, job.first, job.images, args->threads, copier_of(p),
                job.source);
    omc_parallel_for(p->groups * job.row_parts * job.col_parts, 1, args->threads, grad_parts, &job);
  }
  if (!sums_in_place(p)) omc_parallel_for(outputs, 16, args->threads, write_gradient, &job);
  return OMC_OK;
}

#endif
