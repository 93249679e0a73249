/* Convolution and its gradients as products of matrices whose right side is packed straight from
 * an image: no column matrix is ever stored.
 *
 * Conv and the gradient of its input are the same product. A row is an output channel, a column a
 * pixel of the output grid of any image, and the depth runs over (channel, tap); element (k, j)
 * of the right side is source[column_at(j) + source_at[k]] in a copy of the source with its
 * padding written out, columns of one residue modulo the stride side by side. Conv is one grid.
 * The input's gradient is one grid per residue of an input pixel modulo the strides, each with
 * the taps that meet it, so that nothing is added up in memory.
 *
 * In the gradient of the weight a row is an output channel, a column (tap, channel), and the
 * depth runs over pixels of all images; the source is copied with channels innermost. */
#include <string.h>

#include "cpu/gemm_kernel.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/infer.h"
#include "ops/op.h"

/* ROWS x COLS is the most of an output block that a thread holds while its depth is summed. */
enum { ROWS = 512, COLS = 128, SLACK = OMC_GEMM_SLACK };

/* A copy of the planes of a tensor [images, channels, h, w]: `rows` rows from `top` above the
 * plane, each of `phases` parts of `part` elements, part q holding columns q, q + phases, ...
 * counted from `left` before the plane. */
typedef struct {
  int64_t channels, h, w;
  int64_t top, left, rows, phases, part;
  bool in_place; /* the tensor itself will do */
} conv_source;

/* One grid of output pixels. */
typedef struct {
  int64_t depth;
  const int64_t *weight_at; /* depth: from the start of a row of weights */
  const int64_t *source_at; /* depth: from where the column is */
  int64_t rows, cols;       /* of the grid */
  int64_t row_step;         /* of the source, from one row of the grid to the next */
  int64_t out_at, out_row, out_col; /* position and steps of the grid in an output plane */
  int64_t packed_at;        /* of the packed weights */
} conv_grid;

typedef struct {
  omc_dtype dtype;
  int64_t images, pass; /* all, and as many as are copied at a time */
  int64_t groups;
  int64_t m;            /* output channels of a group */
  int64_t weight_row, weight_group, source_group; /* element steps */
  int64_t out_plane;    /* elements */
  conv_source source;
  int64_t n_grids;
  const conv_grid *grids;
  int64_t packed;       /* elements of all packed weights */
} conv_product;

typedef struct {
  omc_dtype dtype;
  int64_t images, pass, groups;
  int64_t m, c;         /* output and input channels of a group */
  int64_t kh, kw, dh, dw, sh, sw;
  int64_t oh, ow;
  conv_source source;   /* phases 1; stored [rows, part, channels] */
  int64_t columns;      /* kh * kw * c, padded */
} conv_weight_grad;

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

static inline int64_t source_plane(const conv_source *s) {
  return s->in_place ? s->h * s->w : s->rows * s->phases * s->part;
}
static inline int64_t source_image(const conv_source *s) { return s->channels * source_plane(s); }

/* Elements of the parts of the workspace; a thread's block of B, then of C or A. */
static inline int64_t product_thread(void) {
  return OMC_GEMM_KC * COLS + 2 * SLACK + ROWS * COLS;
}
static inline int64_t product_source(const conv_product *p) {
  return p->source.in_place ? 0 : p->pass * source_image(&p->source) + SLACK;
}
static inline int64_t grad_thread(const conv_weight_grad *p) {
  return OMC_GEMM_KC * (OMC_GEMM_MAX_NR + min64(p->m, ROWS)) + 4 * SLACK;
}
static inline int64_t grad_source(const conv_weight_grad *p) {
  return p->pass * source_image(&p->source) + SLACK;
}
static inline int64_t align16(int64_t n) { return (n + 15) & ~(int64_t)15; }

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

/* ---- packing from an image ---- */

/* Columns next to each other in a panel and in memory, at most a vector of them. */
typedef struct {
  int64_t to, from, n;
} chunk;

/* Cuts the n columns of a panel, column j lying at at[j], into chunks. */
static int64_t cut_chunks(const int64_t *at, int64_t n, chunk *out) {
  int64_t count = 0;
  for (int64_t j = 0; j < n; count++) {
    const int64_t start = j++;
    while (j < n && j - start < OMC_VL && at[j] == at[j - 1] + 1) j++;
    out[count] = (chunk){start, at[start], j - start};
  }
  return count;
}

/* Whole vectors are moved in rising order: what one writes past its chunk the next overwrites. A
 * source that ends with its last element is read exactly. */
static void pack_panel(const real *source, const int64_t *at, int64_t depth, const chunk *chunks,
                       int64_t count, bool exact, real *out) {
  for (int64_t k = 0; k < depth; k++, out += OMC_NR) {
    const real *from = source + at[k];
    for (int64_t i = 0; i < count; i++) {
      const chunk c = chunks[i];
      const bool part = exact && c.n < OMC_VL;
      vstr(out + c.to, part ? vldn(from + c.from, c.n) : vldr(from + c.from));
    }
  }
}

/* ---- Conv and the gradient of its input ---- */

typedef struct {
  const omc_kernel_args *args;
  const conv_product *p;
  const conv_grid *grid;
  const real *source;   /* of the pass */
  const real *tensor;   /* the source's own elements */
  real *copy, *packed, *threads;
  int64_t first, images; /* of the pass */
  int64_t m_parts;
} product_job;

static void copy_row(const conv_source *s, const real *from, real *to) {
  memset(to, 0, (size_t)(s->phases * s->part) * sizeof(real));
  if (!from) return;
  for (int64_t q = 0; q < s->phases; q++) {
    const int64_t x0 = q - s->left; /* element t of the part is column x0 + t * phases */
    const int64_t begin = x0 < 0 ? omc_ceil_div(-x0, s->phases) : 0;
    const int64_t end = min64(s->part, x0 < s->w ? omc_ceil_div(s->w - x0, s->phases) : 0);
    if (s->phases == 1 && begin < end)
      memcpy(to + begin, from + x0 + begin, (size_t)(end - begin) * sizeof(real));
    else
      for (int64_t t = begin; t < end; t++) to[q * s->part + t] = from[x0 + t * s->phases];
  }
}

static void copy_planes(int64_t begin, int64_t end, int thread, void *ctx) {
  (void)thread;
  const product_job *job = ctx;
  const conv_source *s = &job->p->source;
  const int64_t row = s->phases * s->part;
  for (int64_t i = begin; i < end; i++) {
    const real *from = job->tensor + (job->first * s->channels + i) * s->h * s->w;
    real *to = job->copy + i * s->rows * row;
    for (int64_t r = 0; r < s->rows; r++) {
      const int64_t y = r - s->top;
      copy_row(s, y >= 0 && y < s->h ? from + y * s->w : NULL, to + r * row);
    }
  }
}

static int64_t depth_blocks(int64_t depth) { return depth ? omc_ceil_div(depth, OMC_GEMM_KC) : 1; }

/* Packs the weights of one grid by (group, part of m, block of depth). */
static void pack_weights(int64_t begin, int64_t end, int thread, void *ctx) {
  (void)thread;
  const product_job *job = ctx;
  const conv_product *p = job->p;
  const conv_grid *grid = job->grid;
  const int64_t blocks = depth_blocks(grid->depth);
  for (int64_t u = begin; u < end; u++) {
    const int64_t group = u / blocks / job->m_parts, part = u / blocks % job->m_parts, block = u % blocks;
    const int64_t i = omc_cut(p->m, job->m_parts, part), m = omc_cut(p->m, job->m_parts, part + 1) - i;
    const int64_t k0 = omc_cut(grid->depth, blocks, block), k1 = omc_cut(grid->depth, blocks, block + 1);
    const real *weight = (const real *)job->args->in[1].data + group * p->weight_group + i * p->weight_row;
    real *to = job->packed + grid->packed_at + (group * p->m + i) * grid->depth + m * k0;
    const int64_t panels = omc_gemm_panels(m);
    for (int64_t panel = 0; panel < panels; panel++) {
      const int64_t r0 = omc_cut(m, panels, panel), r1 = omc_cut(m, panels, panel + 1);
      for (int64_t k = k0; k < k1; k++)
        for (int64_t r = r0; r < r1; r++) *to++ = weight[r * p->weight_row + grid->weight_at[k]];
    }
  }
}

/* Where columns j0 .. j0+n-1 of the grid lie in the source and in the output. */
static void locate_columns(const product_job *job, int64_t group, int64_t j0, int64_t n,
                           int64_t *from, int64_t *to) {
  const conv_product *p = job->p;
  const conv_grid *grid = job->grid;
  const int64_t out_image = p->groups * p->m * p->out_plane;
  const int64_t pixels = grid->rows * grid->cols;
  int64_t image = j0 / pixels, y = j0 % pixels / grid->cols, x = j0 % grid->cols;
  for (int64_t j = 0; j < n; j++) {
    from[j] = image * source_image(&p->source) + group * p->source_group + y * grid->row_step + x;
    to[j] = (job->first + image) * out_image + group * p->m * p->out_plane + grid->out_at +
            y * grid->out_row + x * grid->out_col;
    if (++x == grid->cols) x = 0, y++;
    if (y == grid->rows) y = 0, image++;
  }
}

/* Rows of C to the output, by runs of columns that are `step` apart there. */
static void store_columns(const real *c, int64_t m, int64_t n, const int64_t *to, int64_t step,
                          int64_t plane, real *out) {
  for (int64_t j = 0; j < n;) {
    const int64_t start = j++;
    while (j < n && to[j] == to[j - 1] + step) j++;
    const real *run = c + start;
    real *row = out + to[start];
    for (int64_t i = 0; i < m; i++, run += COLS, row += plane) {
      if (step == 1) memcpy(row, run, (size_t)(j - start) * sizeof(real));
      else
        for (int64_t x = 0; x < j - start; x++) row[x * step] = run[x];
    }
  }
}

/* One block: rows of part `part` of a group by n <= COLS columns from j0. */
static void product_block(const product_job *job, int64_t group, int64_t part, int64_t j0,
                          int64_t n, real *scratch) {
  const conv_product *p = job->p;
  const conv_grid *grid = job->grid;
  const int64_t i = omc_cut(p->m, job->m_parts, part), m = omc_cut(p->m, job->m_parts, part + 1) - i;
  const real *bias = job->args->n_in > 2 && job->args->in[2].type ? job->args->in[2].data : NULL;
  real *const b = scratch, *const c = scratch + OMC_GEMM_KC * COLS + 2 * SLACK;
  int64_t from[COLS], to[COLS], counts[COLS / OMC_NR];
  chunk chunks[COLS];
  locate_columns(job, group, j0, n, from, to);
  const int64_t panels = omc_ceil_div(n, OMC_NR), blocks = depth_blocks(grid->depth);
  for (int64_t q = 0; q < panels; q++)
    counts[q] = cut_chunks(from + q * OMC_NR, min64(OMC_NR, n - q * OMC_NR), chunks + q * OMC_NR);
  const real *weights = job->packed + grid->packed_at + (group * p->m + i) * grid->depth;
  for (int64_t block = 0; block < blocks; block++) {
    const int64_t k0 = omc_cut(grid->depth, blocks, block);
    const int64_t depth = omc_cut(grid->depth, blocks, block + 1) - k0;
    for (int64_t q = 0; q < panels; q++)
      pack_panel(job->source, grid->source_at + k0, depth, chunks + q * OMC_NR, counts[q],
                 p->source.in_place, b + q * OMC_NR * depth);
    const omc_gemm_block product = {
        .m = m, .n = omc_ceil_div(n, OMC_VL) * OMC_VL, .k = depth,
        .a = weights + m * k0, .b = b, .c = c, .c_rs = COLS, .alpha = 1, .beta = block > 0,
        .row_bias = bias && block == blocks - 1 ? bias + group * p->m + i : NULL};
    OMC_GEMM_NAME(multiply)(&product);
  }
  store_columns(c, m, n, to, grid->out_col, p->out_plane, (real *)job->args->out[0].data + i * p->out_plane);
}

/* Units are vectors of columns within (group, part of m): any cut gives the same result. */
static void product_range(int64_t begin, int64_t end, int thread, void *ctx) {
  const product_job *job = ctx;
  real *scratch = job->threads + thread * product_thread();
  const int64_t columns = job->images * job->grid->rows * job->grid->cols;
  const int64_t vectors = omc_ceil_div(columns, OMC_VL);
  for (int64_t u = begin; u < end;) {
    const int64_t v = u % vectors, count = min64(COLS / OMC_VL, min64(vectors - v, end - u));
    const int64_t group = u / vectors / job->m_parts, part = u / vectors % job->m_parts;
    product_block(job, group, part, v * OMC_VL, min64(count * OMC_VL, columns - v * OMC_VL), scratch);
    u += count;
  }
}

static omc_status convolve(const omc_kernel_args *args) {
  enum { PARTS = 4 /* blocks a thread should get at least, for balance */ };
  const conv_product *p = args->params;
  const int threads = args->threads;
  if (p->images == 0 || p->m == 0) return OMC_OK;
  product_job job = {.args = args, .p = p, .tensor = args->in[0].data, .packed = args->workspace};
  job.copy = job.packed + align16(p->packed);
  job.threads = job.copy + align16(product_source(p));
  const int64_t passes = omc_ceil_div(p->images, p->pass);
  const int64_t columns = p->pass * p->grids[0].rows * p->grids[0].cols;
  const int64_t blocks = p->groups * omc_ceil_div(columns, COLS);
  const int64_t wanted = omc_ceil_div(PARTS * threads, blocks ? blocks : 1);
  job.m_parts = max64(omc_ceil_div(p->m, ROWS), threads > 1 ? min64(wanted, omc_gemm_panels(p->m)) : 1);
  for (int64_t i = 0; i < p->n_grids; i++) {
    job.grid = &p->grids[i];
    omc_parallel_for(p->groups * job.m_parts * depth_blocks(job.grid->depth), 1, threads, pack_weights, &job);
  }
  for (int64_t pass = 0; pass < passes; pass++) {
    job.first = omc_cut(p->images, passes, pass);
    job.images = omc_cut(p->images, passes, pass + 1) - job.first;
    job.source = job.copy;
    if (p->source.in_place) job.source = job.tensor;
    else omc_parallel_for(job.images * p->source.channels, 1, threads, copy_planes, &job);
    for (int64_t i = 0; i < p->n_grids; i++) {
      job.grid = &p->grids[i];
      const int64_t vectors = omc_ceil_div(job.images * job.grid->rows * job.grid->cols, OMC_VL);
      omc_parallel_for(p->groups * job.m_parts * vectors, 1, threads, product_range, &job);
    }
  }
  return OMC_OK;
}

OMC_KERNEL(Conv) { return convolve(args); }
OMC_KERNEL(ConvGradInput) { return convolve(args); }

/* ---- gradient of the weight ---- */

typedef struct {
  const omc_kernel_args *args;
  const conv_weight_grad *p;
  real *source, *sum, *threads;
  int64_t first, images;
  int64_t row_parts, col_parts; /* of a group's gradient */
} grad_job;

/* Copies rows of the padded source with channels innermost. */
static void copy_channels_last(int64_t begin, int64_t end, int thread, void *ctx) {
  (void)thread;
  const grad_job *job = ctx;
  const conv_source *s = &job->p->source;
  const real *x = job->args->in[1].data;
  for (int64_t u = begin; u < end; u++) {
    const int64_t image = u / s->rows, y = u % s->rows - s->top;
    const real *from = x + ((job->first + image) * s->channels * s->h + y) * s->w;
    real *to = job->source + u * s->part * s->channels;
    const int64_t x0 = y >= 0 && y < s->h ? min64(s->left, s->part) : s->part;
    const int64_t x1 = y >= 0 && y < s->h ? min64(s->left + s->w, s->part) : s->part;
    memset(to, 0, (size_t)(x0 * s->channels) * sizeof(real));
    memset(to + x1 * s->channels, 0, (size_t)((s->part - x1) * s->channels) * sizeof(real));
    if (s->channels >= OMC_VL) {
      OMC_GEMM_NAME(pack_lines)(from + x0 - s->left, s->h * s->w, s->channels, x1 - x0, s->channels,
                                to + x0 * s->channels);
      continue;
    }
    for (int64_t t = x0; t < x1; t++)
      for (int64_t c = 0; c < s->channels; c++)
        to[t * s->channels + c] = from[c * s->h * s->w + t - s->left];
  }
}

/* Packs m rows of dy from row i on over `depth` pixels of all images from pixel k0 on. */
static void pack_pixels(const grad_job *job, int64_t row, int64_t m, int64_t k0, int64_t depth, real *out) {
  const conv_weight_grad *p = job->p;
  const int64_t pixels = p->oh * p->ow, panels = omc_gemm_panels(m);
  for (int64_t panel = 0; panel < panels; panel++) {
    const int64_t i = omc_cut(m, panels, panel), h = omc_cut(m, panels, panel + 1) - i;
    for (int64_t k = 0; k < depth;) {
      const int64_t image = (k0 + k) / pixels, pixel = (k0 + k) % pixels;
      const int64_t n = min64(depth - k, pixels - pixel);
      const real *dy = (const real *)job->args->in[0].data +
                       ((job->first + image) * p->groups * p->m + row + i) * pixels + pixel;
      OMC_GEMM_NAME(pack_lines)(dy, pixels, h, n, h, out + k * h);
      k += n;
    }
    out += h * depth;
  }
}

static void grad_part(const grad_job *job, int64_t group, int64_t row_part, int64_t col_part, real *scratch) {
  const conv_weight_grad *p = job->p;
  const conv_source *s = &p->source;
  const int64_t i = omc_cut(p->m, job->row_parts, row_part), m = omc_cut(p->m, job->row_parts, row_part + 1) - i;
  const int64_t columns = p->kh * p->kw * p->c, all_panels = omc_ceil_div(columns, OMC_NR);
  const int64_t first = omc_cut(all_panels, job->col_parts, col_part), last = omc_cut(all_panels, job->col_parts, col_part + 1);
  const int64_t pixels = p->oh * p->ow, depth = job->images * pixels, blocks = depth_blocks(depth);
  real *const b = scratch, *const a = scratch + OMC_GEMM_KC * OMC_GEMM_MAX_NR + 2 * SLACK;
  real *const sum = job->sum + (group * p->m + i) * p->columns;
  for (int64_t block = 0; block < blocks; block++) {
    const int64_t k0 = omc_cut(depth, blocks, block), n = omc_cut(depth, blocks, block + 1) - k0;
    int64_t pixel_at[OMC_GEMM_KC];
    for (int64_t k = 0; k < n; k++) {
      const int64_t image = (k0 + k) / pixels, y = (k0 + k) % pixels / p->ow, x = (k0 + k) % p->ow;
      pixel_at[k] = ((image * s->rows + y * p->sh) * s->part + x * p->sw) * s->channels;
    }
    pack_pixels(job, group * p->m + i, m, k0, n, a);
    for (int64_t panel = first; panel < last; panel++) {
      int64_t at[OMC_NR];
      chunk chunks[OMC_NR];
      const int64_t j0 = panel * OMC_NR, width = min64(OMC_NR, columns - j0);
      for (int64_t j = 0; j < width; j++) {
        const int64_t tap = (j0 + j) / p->c, c = (j0 + j) % p->c;
        at[j] = (tap / p->kw * p->dh * s->part + tap % p->kw * p->dw) * s->channels + group * p->c + c;
      }
      const int64_t count = cut_chunks(at, width, chunks);
      pack_panel(job->source, pixel_at, n, chunks, count, false, b);
      const omc_gemm_block product = {
          .m = m, .n = omc_ceil_div(width, OMC_VL) * OMC_VL, .k = n, .a = a, .b = b,
          .c = sum + j0, .c_rs = p->columns, .alpha = 1, .beta = job->first > 0 || block > 0};
      OMC_GEMM_NAME(multiply)(&product);
    }
  }
}

static void grad_parts(int64_t begin, int64_t end, int thread, void *ctx) {
  const grad_job *job = ctx;
  real *scratch = job->threads + thread * grad_thread(job->p);
  const int64_t parts = job->row_parts * job->col_parts;
  for (int64_t u = begin; u < end; u++)
    grad_part(job, u / parts, u % parts / job->col_parts, u % job->col_parts, scratch);
}

/* Sums are [.., kh * kw, c], the gradient is [.., c, kh * kw]. */
static void write_gradient(int64_t begin, int64_t end, int thread, void *ctx) {
  (void)thread;
  const grad_job *job = ctx;
  const conv_weight_grad *p = job->p;
  const int64_t taps = p->kh * p->kw;
  for (int64_t o = begin; o < end; o++) {
    const real *from = job->sum + o * p->columns;
    real *to = (real *)job->args->out[0].data + o * p->c * taps;
    for (int64_t c = 0; c < p->c; c++)
      for (int64_t t = 0; t < taps; t++) to[c * taps + t] = from[t * p->c + c];
  }
}

/* Cuts a group's gradient so that all threads have work; columns first, they cost least. */
static void choose_parts(const conv_weight_grad *p, int threads, grad_job *job) {
  const int64_t panels = omc_ceil_div(p->kh * p->kw * p->c, OMC_NR);
  const int64_t wanted = omc_ceil_div(threads, p->groups);
  job->col_parts = max64(min64(wanted, panels), 1);
  job->row_parts = max64(omc_ceil_div(p->m, ROWS),
                         min64(omc_ceil_div(wanted, job->col_parts), omc_gemm_panels(p->m)));
}

OMC_KERNEL(ConvGradWeight) {
  const conv_weight_grad *p = args->params;
  const int64_t outputs = p->groups * p->m;
  grad_job job = {.args = args, .p = p, .sum = args->workspace};
  job.source = job.sum + align16(outputs * p->columns);
  job.threads = job.source + align16(grad_source(p));
  if (p->m == 0 || p->c == 0) return OMC_OK;
  if (p->images == 0) {
    memset(args->out[0].data, 0, (size_t)(outputs * p->c * p->kh * p->kw) * sizeof(real));
    return OMC_OK;
  }
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

#ifdef OMC_RECORDS

/* ---- geometry ---- */

/* A convolution of two space dims; one is taken as a height of 1. */
typedef struct {
  int64_t n, c, h, w;     /* x */
  int64_t o, cg, kh, kw;  /* weight */
  int64_t oh, ow;         /* y */
  int64_t sh, sw, top, left, bottom, right, dh, dw, group;
} conv_form;

/* Attribute `name`, `rank` values a corner (`otherwise` each if absent), as height then width. */
static omc_status read_pairs(const omc_node *node, const char *name, int32_t rank, uint32_t corners,
                             int64_t least, int64_t otherwise, int64_t neutral, int64_t *out) {
  char text[OMC_NODE_TEXT];
  uint32_t n;
  const int64_t *values = omc_attr_ints(node, name, &n);
  if (n != 0 && n != corners * (uint32_t)rank)
    OMC_FAIL(ESHAPE, "%s: %u %s for %d space dims", omc_node_text(node, text, sizeof text), n, name, rank);
  for (uint32_t corner = 0; corner < corners; corner++) {
    out[2 * corner] = neutral;
    for (int32_t d = 0; d < rank; d++) {
      const int64_t value = n ? values[corner * (uint32_t)rank + (uint32_t)d] : otherwise;
      if (value < least)
        OMC_FAIL(ESHAPE, "%s: %s of %lld", omc_node_text(node, text, sizeof text), name, (long long)value);
      out[2 * corner + (uint32_t)(2 - rank + d)] = value;
    }
  }
  return OMC_OK;
}

/* The form of a convolution of x by w with the node's attributes. */
static omc_status read_form(const omc_node *node, const omc_shape *x, const omc_shape *w, conv_form *f) {
  char text[OMC_NODE_TEXT], tx[OMC_TYPE_TEXT], tw[OMC_TYPE_TEXT];
  const int32_t rank = x->rank - 2;
  if (rank != 1 && rank != 2)
    OMC_FAIL(EUNSUPPORTED, "%s: convolution over %d space dims", omc_node_text(node, text, sizeof text), rank);
  if (strcmp(omc_attr_string(node, "auto_pad", "NOTSET"), "NOTSET"))
    OMC_FAIL(EUNSUPPORTED, "%s: auto_pad", omc_node_text(node, text, sizeof text));
  int64_t strides[2], pads[4], dilations[2];
  OMC_TRY(read_pairs(node, "strides", rank, 1, 1, 1, 1, strides));
  OMC_TRY(read_pairs(node, "dilations", rank, 1, 1, 1, 1, dilations));
  OMC_TRY(read_pairs(node, "pads", rank, 2, 0, 0, 0, pads));
  *f = (conv_form){.n = x->dims[0], .c = x->dims[1], .h = rank == 2 ? x->dims[2] : 1, .w = x->dims[rank + 1],
                   .sh = strides[0], .sw = strides[1], .dh = dilations[0], .dw = dilations[1],
                   .top = pads[0], .left = pads[1], .bottom = pads[2], .right = pads[3],
                   .group = omc_attr_int(node, "group", 1)};
  const bool fits = w->rank == x->rank && f->group >= 1 && w->dims[1] * f->group == f->c &&
                    w->dims[0] % f->group == 0;
  if (fits) {
    f->o = w->dims[0], f->cg = w->dims[1], f->kh = rank == 2 ? w->dims[2] : 1, f->kw = w->dims[rank + 1];
    const int64_t spare_h = f->h + f->top + f->bottom - f->dh * (f->kh - 1) - 1;
    const int64_t spare_w = f->w + f->left + f->right - f->dw * (f->kw - 1) - 1;
    f->oh = spare_h / f->sh + 1, f->ow = spare_w / f->sw + 1;
    if (spare_h >= 0 && spare_w >= 0 && f->kh > 0 && f->kw > 0) return OMC_OK;
  }
  OMC_FAIL(ESHAPE, "%s: input %s does not fit weight %s in %lld groups", omc_node_text(node, text, sizeof text),
           omc_shape_text(x, tx, sizeof tx), omc_shape_text(w, tw, sizeof tw), (long long)f->group);
}

static omc_shape output_shape(const conv_form *f, int32_t rank) {
  if (rank == 3) return (omc_shape){3, {f->n, f->o, f->ow}};
  return (omc_shape){4, {f->n, f->o, f->oh, f->ow}};
}

static omc_status conv_infer(omc_node *node) {
  OMC_TRY(omc_need_float(node, 0));
  const omc_type *x = &omc_in(node, 0)->type;
  OMC_TRY(omc_need_dtype(node, 1, x->dtype));
  conv_form f;
  OMC_TRY(read_form(node, &x->shape, &omc_in(node, 1)->type.shape, &f));
  if (omc_in(node, 2)) {
    OMC_TRY(omc_need_dtype(node, 2, x->dtype));
    OMC_TRY(omc_need_rank(node, 2, 1));
    char text[OMC_NODE_TEXT];
    const int64_t n = omc_in(node, 2)->type.shape.dims[0];
    if (n != f.o)
      OMC_FAIL(ESHAPE, "%s: bias has %lld elements for %lld channels", omc_node_text(node, text, sizeof text),
               (long long)n, (long long)f.o);
  }
  const omc_shape out = output_shape(&f, x->shape.rank);
  omc_set_type(node, 0, x->dtype, &out);
  return OMC_OK;
}

/* Both gradients know one shape by their attribute `shape`: x's, or the weight's. */
static omc_status grad_form(const omc_node *node, bool of_input, omc_shape *out, conv_form *f) {
  char text[OMC_NODE_TEXT], tdy[OMC_TYPE_TEXT], ty[OMC_TYPE_TEXT];
  uint32_t n;
  const int64_t *dims = omc_attr_ints(node, "shape", &n);
  if (n > OMC_MAX_RANK)
    OMC_FAIL(ESHAPE, "%s: shape of %u dims", omc_node_text(node, text, sizeof text), n);
  *out = (omc_shape){.rank = (int32_t)n};
  memcpy(out->dims, dims, n * sizeof *dims);
  const omc_shape *dy = &omc_in(node, 0)->type.shape, *other = &omc_in(node, 1)->type.shape;
  OMC_TRY(read_form(node, of_input ? out : other, of_input ? other : out, f));
  const omc_shape y = output_shape(f, out->rank);
  if (omc_shape_equal(dy, &y)) return OMC_OK;
  OMC_FAIL(ESHAPE, "%s: output gradient is %s, not %s", omc_node_text(node, text, sizeof text),
           omc_shape_text(dy, tdy, sizeof tdy), omc_shape_text(&y, ty, sizeof ty));
}

static omc_status infer_grad(omc_node *node, bool of_input) {
  OMC_TRY(omc_need_float(node, 0));
  const omc_dtype dtype = omc_in(node, 0)->type.dtype;
  OMC_TRY(omc_need_dtype(node, 1, dtype));
  conv_form f;
  omc_shape out;
  OMC_TRY(grad_form(node, of_input, &out, &f));
  omc_set_type(node, 0, dtype, &out);
  return OMC_OK;
}

static omc_status grad_input_infer(omc_node *node) { return infer_grad(node, true); }
static omc_status grad_weight_infer(omc_node *node) { return infer_grad(node, false); }

/* ---- parameters ---- */

/* Images copied at a time: some megabytes, and columns enough for many threads. */
static int64_t images_per_pass(const conv_form *f, const conv_source *s, omc_dtype dtype) {
  enum { BYTES = 16 << 20, COLUMNS = 1 << 14 };
  const int64_t bytes = max64(source_image(s) * (int64_t)omc_dtype_size(dtype), 1);
  const int64_t by_columns = omc_ceil_div(COLUMNS, max64(f->oh * f->ow, 1));
  return max64(min64(max64(BYTES / bytes, by_columns), f->n), 1);
}

static omc_status no_memory(const omc_node *node) {
  char text[OMC_NODE_TEXT];
  OMC_FAIL(ENOMEM, "%s: no memory for kernel parameters", omc_node_text(node, text, sizeof text));
}

/* Whole planes are one row where neither side has gaps between rows. */
static void join_rows(conv_grid *grid) {
  if (grid->row_step != grid->cols || grid->out_row != grid->cols * grid->out_col) return;
  grid->cols *= grid->rows;
  grid->rows = 1;
}

static omc_status conv_decode(const omc_node *node, omc_arena *arena, void *params) {
  conv_product *p = params;
  conv_form f;
  OMC_TRY(read_form(node, &omc_in(node, 0)->type.shape, &omc_in(node, 1)->type.shape, &f));
  const int64_t taps = f.kh * f.kw, depth = f.cg * taps;
  conv_source s = {.channels = f.c, .h = f.h, .w = f.w, .top = f.top, .left = f.left,
                   .rows = (f.oh - 1) * f.sh + (f.kh - 1) * f.dh + 1, .phases = f.sw,
                   .part = omc_ceil_div((f.ow - 1) * f.sw + (f.kw - 1) * f.dw + 1, f.sw)};
  s.in_place = !f.top && !f.left && !f.bottom && !f.right && f.sw == 1;
  conv_grid *grid = OMC_NEW(arena, conv_grid);
  int64_t *weight_at = OMC_NEW_ARRAY(arena, int64_t, depth), *source_at = OMC_NEW_ARRAY(arena, int64_t, depth);
  if (!grid || !weight_at || !source_at) return no_memory(node);
  const int64_t row = s.in_place ? f.w : s.phases * s.part, plane = source_plane(&s);
  for (int64_t k = 0; k < depth; k++) {
    const int64_t y = k % taps / f.kw * f.dh, x = k % f.kw * f.dw;
    weight_at[k] = k;
    source_at[k] = k / taps * plane + y * row + x % f.sw * s.part + x / f.sw;
  }
  *grid = (conv_grid){.depth = depth, .weight_at = weight_at, .source_at = source_at,
                      .rows = f.oh, .cols = f.ow, .row_step = f.sh * row, .out_row = f.ow, .out_col = 1};
  join_rows(grid);
  *p = (conv_product){.dtype = omc_in(node, 0)->type.dtype,
                      .images = f.n, .groups = f.group, .m = f.o / f.group,
                      .weight_row = depth, .weight_group = f.o / f.group * depth,
                      .source_group = f.cg * plane, .out_plane = f.oh * f.ow,
                      .source = s, .n_grids = 1, .grids = grid, .packed = f.o * depth};
  p->pass = s.in_place ? max64(f.n, 1) : images_per_pass(&f, &s, p->dtype);
  return OMC_OK;
}

/* Along one dim, for input positions a, a + stride, ...: tap i meets them if its shift, in output
 * positions, is whole. */
static bool tap_shift(int64_t a, int64_t pad, int64_t tap, int64_t dilation, int64_t stride, int64_t *shift) {
  const int64_t x = a + pad - tap * dilation;
  *shift = x / stride;
  return x % stride == 0;
}

/* Range of output positions that input positions 0..n-1 meet along one dim, 0 among them. */
static void shift_range(int64_t n, int64_t pad, int64_t taps, int64_t dilation, int64_t stride,
                        int64_t *before, int64_t *end) {
  *before = 0;
  *end = 1;
  for (int64_t a = 0; a < min64(stride, n); a++)
    for (int64_t i = 0; i < taps; i++) {
      int64_t shift;
      if (!tap_shift(a, pad, i, dilation, stride, &shift)) continue;
      *before = max64(*before, -shift);
      *end = max64(*end, shift + omc_ceil_div(n - a, stride));
    }
}

/* The grid of input pixels (a, b) modulo the strides. */
static omc_status grad_grid(const conv_form *f, const conv_source *s, int64_t a, int64_t b,
                            omc_arena *arena, conv_grid *grid) {
  const int64_t taps = f->kh * f->kw, og = f->o / f->group, plane = source_plane(s);
  const int64_t row = s->in_place ? f->ow : s->part;
  int64_t *weight_at = OMC_NEW_ARRAY(arena, int64_t, og * taps), *source_at = OMC_NEW_ARRAY(arena, int64_t, og * taps);
  if (!weight_at || !source_at) OMC_FAIL(ENOMEM, "no memory for a grid of %lld taps", (long long)taps);
  int64_t depth = 0, y, x;
  for (int64_t o = 0; o < og; o++)
    for (int64_t t = 0; t < taps; t++) {
      if (!tap_shift(a, f->top, t / f->kw, f->dh, f->sh, &y) || !tap_shift(b, f->left, t % f->kw, f->dw, f->sw, &x))
        continue;
      weight_at[depth] = o * f->cg * taps + t;
      source_at[depth++] = o * plane + (y + s->top) * row + x + s->left;
    }
  *grid = (conv_grid){.depth = depth, .weight_at = weight_at, .source_at = source_at,
                      .rows = omc_ceil_div(f->h - a, f->sh), .cols = omc_ceil_div(f->w - b, f->sw),
                      .row_step = row, .out_at = a * f->w + b, .out_row = f->sh * f->w, .out_col = f->sw};
  join_rows(grid);
  return OMC_OK;
}

static omc_status grad_input_decode(const omc_node *node, omc_arena *arena, void *params) {
  conv_product *p = params;
  conv_form f;
  omc_shape shape;
  OMC_TRY(grad_form(node, true, &shape, &f));
  conv_source s = {.channels = f.o, .h = f.oh, .w = f.ow, .phases = 1};
  shift_range(f.h, f.top, f.kh, f.dh, f.sh, &s.top, &s.rows);
  shift_range(f.w, f.left, f.kw, f.dw, f.sw, &s.left, &s.part);
  s.in_place = !s.top && !s.left && s.rows <= f.oh && s.part <= f.ow;
  s.rows += s.top;
  s.part += s.left;
  const int64_t grids_h = min64(f.sh, f.h), grids_w = min64(f.sw, f.w);
  conv_grid *grids = OMC_NEW_ARRAY(arena, conv_grid, max64(grids_h * grids_w, 1));
  if (!grids) return no_memory(node);
  int64_t packed = 0;
  for (int64_t i = 0; i < grids_h * grids_w; i++) {
    OMC_TRY(grad_grid(&f, &s, i / grids_w, i % grids_w, arena, &grids[i]));
    grids[i].packed_at = packed;
    packed += f.c * grids[i].depth;
  }
  const int64_t taps = f.kh * f.kw;
  *p = (conv_product){.dtype = omc_in(node, 0)->type.dtype,
                      .images = f.n, .groups = f.group, .m = f.cg,
                      .weight_row = taps, .weight_group = f.o / f.group * f.cg * taps,
                      .source_group = f.o / f.group * source_plane(&s), .out_plane = f.h * f.w,
                      .source = s, .n_grids = grids_h * grids_w, .grids = grids, .packed = packed};
  p->pass = s.in_place ? max64(f.n, 1) : images_per_pass(&f, &s, p->dtype);
  return OMC_OK;
}

static omc_status grad_weight_decode(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  conv_weight_grad *p = params;
  conv_form f;
  omc_shape shape;
  OMC_TRY(grad_form(node, false, &shape, &f));
  *p = (conv_weight_grad){.dtype = omc_in(node, 0)->type.dtype,
                          .images = f.n, .groups = f.group, .m = f.o / f.group, .c = f.cg,
                          .kh = f.kh, .kw = f.kw, .dh = f.dh, .dw = f.dw, .sh = f.sh, .sw = f.sw,
                          .oh = f.oh, .ow = f.ow,
                          .source = {.channels = f.c, .h = f.h, .w = f.w, .top = f.top, .left = f.left,
                                     .rows = (f.oh - 1) * f.sh + (f.kh - 1) * f.dh + 1, .phases = 1,
                                     .part = (f.ow - 1) * f.sw + (f.kw - 1) * f.dw + 1},
                          .columns = omc_ceil_div(f.kh * f.kw * f.cg, OMC_GEMM_MAX_NR) * OMC_GEMM_MAX_NR};
  p->pass = images_per_pass(&f, &p->source, p->dtype);
  return OMC_OK;
}

static size_t product_workspace(const omc_node *node, const void *params, int threads) {
  (void)node;
  const conv_product *p = params;
  const int64_t elements = align16(p->packed) + align16(product_source(p)) + threads * product_thread();
  return (size_t)elements * omc_dtype_size(p->dtype);
}

static size_t grad_weight_workspace(const omc_node *node, const void *params, int threads) {
  (void)node;
  const conv_weight_grad *p = params;
  const int64_t elements = align16(p->groups * p->m * p->columns) + align16(grad_source(p)) + threads * grad_thread(p);
  return (size_t)elements * omc_dtype_size(p->dtype);
}

/* ---- gradient rule and records ---- */

static omc_value *gradient(omc_grad *g, omc_op_id op, omc_value *other, const omc_shape *shape) {
  static const char *const lists[] = {"strides", "pads", "dilations"};
  omc_attr attr[5] = {omc_ais("shape", shape->dims, (uint32_t)shape->rank),
                      omc_ai("group", omc_attr_int(g->node, "group", 1))};
  uint32_t n_attr = 2, n;
  for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
    const int64_t *values = omc_attr_ints(g->node, lists[i], &n);
    if (n) attr[n_attr++] = omc_ais(lists[i], values, n);
  }
  omc_value *const in[] = {g->dout[0], other};
  return omc_bn(&g->b, op, 2, in, n_attr, attr);
}

static omc_status conv_grad(omc_grad *g) {
  omc_value *x = omc_in(g->node, 0), *w = omc_in(g->node, 1);
  if (g->needs[0]) g->din[0] = gradient(g, OMC_OP_ConvGradInput, w, &x->type.shape);
  if (g->needs[1]) g->din[1] = gradient(g, OMC_OP_ConvGradWeight, x, &w->type.shape);
  if (omc_in(g->node, 2) && g->needs[2]) {
    static const int64_t axes[] = {0, 2, 3};
    g->din[2] = omc_reduce_sum(&g->b, g->dout[0], axes, x->type.shape.rank - 1, false);
  }
  return g->b.status;
}

OMC_KERNELS(Conv)
const omc_op omc_op_Conv = {.name = "Conv", .min_in = 2, .max_in = 3, .n_out = 1,
                            .infer = conv_infer, .grad = conv_grad,
                            .params_size = sizeof(conv_product), .params = conv_decode,
                            .workspace = product_workspace, .cpu = &omc_kernels_Conv};

OMC_KERNELS(ConvGradInput)
const omc_op omc_op_ConvGradInput = {.name = "ConvGradInput", .min_in = 2, .max_in = 2, .n_out = 1,
                                     .infer = grad_input_infer,
                                     .params_size = sizeof(conv_product), .params = grad_input_decode,
                                     .workspace = product_workspace, .cpu = &omc_kernels_ConvGradInput};

OMC_KERNELS(ConvGradWeight)
const omc_op omc_op_ConvGradWeight = {.name = "ConvGradWeight", .min_in = 2, .max_in = 2, .n_out = 1,
                                      .infer = grad_weight_infer,
                                      .params_size = sizeof(conv_weight_grad), .params = grad_weight_decode,
                                      .workspace = grad_weight_workspace, .cpu = &omc_kernels_ConvGradWeight};

#endif
