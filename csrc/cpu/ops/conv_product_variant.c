/* Kernels of Conv, ConvTranspose and ConvGradInput: a product whose right side is packed from an
 * image. */
#include <string.h>

#include "cpu/ops/conv.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

/* ---- the source ---- */

/* A row of zeros if `from` is NULL. */
static void copy_row(const conv_source *s, const storage_t *from, acc_t *to) {
  memset(to, 0, (size_t)(s->phases * s->part) * sizeof(acc_t));
  if (!from) return;
  for (int64_t q = 0; q < s->phases; q++) {
    const int64_t x0 = q - s->left; /* element t of the part is column x0 + t * phases */
    const int64_t begin = x0 < 0 ? omc_ceil_div(-x0, s->phases) : 0;
    const int64_t end = omc_min(s->part, x0 < s->w ? omc_ceil_div(s->w - x0, s->phases) : 0);
    if (s->phases == 1 && begin < end)
      load_row(from + x0 + begin, to + begin, end - begin);
    else if (s->phases == 2) /* a constant step, for the compiler to vectorise */
      for (int64_t t = begin; t < end; t++) to[q * s->part + t] = ld(from + x0 + t * 2);
    else
      for (int64_t t = begin; t < end; t++) to[q * s->part + t] = ld(from + x0 + t * s->phases);
  }
}

void OMC_CONV_NAME(copy_plane)(const conv_source *s, const storage_t *plane, acc_t *out) {
  for (int64_t r = 0; r < s->rows; r++) {
    const int64_t y = s->row_from[r];
    copy_row(s, y >= 0 ? plane + y * s->w : NULL, out + r * s->phases * s->part);
  }
}

int64_t OMC_CONV_NAME(cut_chunks)(const int64_t *at, int64_t n, conv_chunk *out) {
  int64_t count = 0;
  for (int64_t j = 0; j < n; count++) {
    const int64_t start = j++;
    while (j < n && j - start < OMC_VL && at[j] == at[j - 1] + 1) j++;
    out[count] = (conv_chunk){start, at[start], j - start};
  }
  return count;
}

/* In rising order: what a vector writes past its chunk the next one overwrites. */
void OMC_CONV_NAME(pack_panel)(const acc_t *source, const int64_t *at, int64_t depth,
                               const conv_chunk *chunks, int64_t count, bool exact, acc_t *out) {
  for (int64_t k = 0; k < depth; k++, out += OMC_NR) {
    const acc_t *from = source + at[k];
    for (int64_t i = 0; i < count; i++) {
      const conv_chunk c = chunks[i];
      const bool part = exact && c.n < OMC_VL;
      vstr(out + c.to, part ? vldrn(from + c.from, c.n) : vldr(from + c.from));
    }
  }
}

/* ---- the product ---- */

typedef struct {
  const omc_kernel_args *args;
  const conv_product *p;
  const conv_grid *grid;
  const acc_t *source;     /* of the pass */
  const storage_t *tensor; /* the source's own elements */
  acc_t *copy, *packed, *threads;
  int64_t first, images; /* of the pass */
  int64_t m_parts;
} product_job;

static void copy_planes(omc_range range, void *ctx) {
  const product_job *job = ctx;
  const conv_source *s = &job->p->source;
  for (int64_t i = range.begin; i < range.end; i++)
    OMC_CONV_NAME(copy_plane)(s, job->tensor + (job->first * s->channels + i) * s->h * s->w,
                              job->copy + i * source_plane(s));
}

static int64_t depth_blocks(int64_t depth) { return depth ? omc_ceil_div(depth, OMC_GEMM_KC) : 1; }

/* Packs the weights of one grid by (group, part of m, block of depth). */
static void pack_weights(omc_range range, void *ctx) {
  const product_job *job = ctx;
  const conv_product *p = job->p;
  const conv_grid *grid = job->grid;
  const int64_t blocks = depth_blocks(grid->depth);
  for (int64_t u = range.begin; u < range.end; u++) {
    const int64_t group = u / blocks / job->m_parts, part = u / blocks % job->m_parts,
                  block = u % blocks;
    const int64_t i = omc_cut(p->m, job->m_parts, part),
                  m = omc_cut(p->m, job->m_parts, part + 1) - i;
    const int64_t k0 = omc_cut(grid->depth, blocks, block),
                  k1 = omc_cut(grid->depth, blocks, block + 1);
    const storage_t *weight =
        (const storage_t *)job->args->in[1].data + group * p->weight_group + i * p->weight_row;
    acc_t *to = job->packed + grid->packed_at + (group * p->m + i) * grid->depth + m * k0;
    const int64_t panels = omc_gemm_panels(m);
    for (int64_t panel = 0; panel < panels; panel++) {
      const int64_t r0 = omc_cut(m, panels, panel), r1 = omc_cut(m, panels, panel + 1);
      for (int64_t k = k0; k < k1; k++)
        for (int64_t r = r0; r < r1; r++)
          *to++ = ld(weight + r * p->weight_row + grid->weight_at[k]);
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
    from[j] = image * source_image(&p->source) + group * p->source_group + grid->row_at[y] + x;
    to[j] = (job->first + image) * out_image + group * p->m * p->out_plane + grid->out_at[y] +
            x * grid->out_col;
    if (++x == grid->cols) x = 0, y++;
    if (y == grid->rows) y = 0, image++;
  }
}

/* Rows of C to the output, by runs of columns that are `step` apart there. */
static void store_columns(const acc_t *c, int64_t m, int64_t n, const int64_t *to, int64_t step,
                          int64_t plane, storage_t *out) {
  for (int64_t j = 0; j < n;) {
    const int64_t start = j++;
    while (j < n && to[j] == to[j - 1] + step) j++;
    const acc_t *run = c + start;
    storage_t *row = out + to[start];
    for (int64_t i = 0; i < m; i++, run += COLS, row += plane) {
      if (step == 1)
        store_row(run, row, j - start);
      else
        for (int64_t x = 0; x < j - start; x++) st(row + x * step, run[x]);
    }
  }
}

/* One block: rows of part `part` of a group by n <= COLS columns from j0. */
static void product_block(const product_job *job, int64_t group, int64_t part, int64_t j0,
                          int64_t n, acc_t *scratch) {
  const conv_product *p = job->p;
  const conv_grid *grid = job->grid;
  const int64_t i = omc_cut(p->m, job->m_parts, part),
                m = omc_cut(p->m, job->m_parts, part + 1) - i;
  const storage_t *bias = omc_in_data(job->args, 2);
  acc_t *const b = scratch, *const c = scratch + OMC_GEMM_KC * COLS + 2 * SLACK;
  acc_t row_bias[ROWS];
  int64_t from[COLS], to[COLS], counts[COLS / OMC_NR];
  conv_chunk chunks[COLS];
  locate_columns(job, group, j0, n, from, to);
  if (bias) load_row(bias + group * p->m + i, row_bias, m);
  const int64_t panels = omc_ceil_div(n, OMC_NR), blocks = depth_blocks(grid->depth);
  for (int64_t q = 0; q < panels; q++)
    counts[q] = OMC_CONV_NAME(cut_chunks)(from + q * OMC_NR, omc_min(OMC_NR, n - q * OMC_NR),
                                          chunks + q * OMC_NR);
  const acc_t *weights = job->packed + grid->packed_at + (group * p->m + i) * grid->depth;
  for (int64_t block = 0; block < blocks; block++) {
    const int64_t k0 = omc_cut(grid->depth, blocks, block);
    const int64_t depth = omc_cut(grid->depth, blocks, block + 1) - k0;
    for (int64_t q = 0; q < panels; q++)
      OMC_CONV_NAME(pack_panel)(job->source, grid->source_at + k0, depth, chunks + q * OMC_NR,
                                counts[q], p->source.in_place, b + q * OMC_NR * depth);
    const omc_matrix sums = omc_gemm_sums(c, COLS);
    const omc_gemm_block product = {.m = m,
                                    .n = omc_ceil_div(n, OMC_VL) * OMC_VL,
                                    .k = depth,
                                    .a = weights + m * k0,
                                    .b = b,
                                    .from = sums,
                                    .to = sums,
                                    .alpha = 1,
                                    .beta = block > 0,
                                    .row_bias = bias && block == blocks - 1 ? row_bias : NULL};
    OMC_GEMM_NAME(multiply)(&product);
  }
  store_columns(c, m, n, to, grid->out_col, p->out_plane,
                (storage_t *)job->args->out[0].data + i * p->out_plane);
}

/* Units are vectors of columns within (group, part of m): any cut gives the same result. */
static void product_range(omc_range range, void *ctx) {
  const product_job *job = ctx;
  acc_t *scratch = job->threads + range.thread * product_thread();
  const int64_t columns = job->images * job->grid->rows * job->grid->cols;
  const int64_t vectors = omc_ceil_div(columns, OMC_VL);
  for (int64_t u = range.begin; u < range.end;) {
    const int64_t v = u % vectors,
                  count = omc_min(COLS / OMC_VL, omc_min(vectors - v, range.end - u));
    const int64_t group = u / vectors / job->m_parts, part = u / vectors % job->m_parts;
    product_block(job, group, part, v * OMC_VL, omc_min(count * OMC_VL, columns - v * OMC_VL),
                  scratch);
    u += count;
  }
}

OMC_KERNEL(Conv, args) {
  enum { PARTS = 4 /* blocks a thread should get at least, for balance */ };
  const conv_product *p = args->params;
  const int threads = args->threads;
  if (p->images == 0 || p->m == 0) return OMC_OK;
  if (p->direct) return OMC_CONV_NAME(direct)(args);
  if (p->winograd) return OMC_CONV_NAME(winograd)(args, p->winograd);
  product_job job = {.args = args, .p = p, .tensor = args->in[0].data, .packed = args->workspace};
  job.copy = job.packed + omc_whole_vectors(p->packed);
  job.threads = job.copy + product_source(p);
  const int64_t passes = omc_ceil_div(p->images, p->pass);
  const int64_t columns = p->pass * p->grids[0].rows * p->grids[0].cols;
  const int64_t blocks = p->groups * omc_ceil_div(columns, COLS);
  const int64_t wanted = omc_ceil_div(PARTS * threads, blocks ? blocks : 1);
  job.m_parts =
      omc_max(omc_ceil_div(p->m, ROWS), threads > 1 ? omc_min(wanted, omc_gemm_panels(p->m)) : 1);
  for (int64_t i = 0; i < p->n_grids; i++) {
    job.grid = &p->grids[i];
    omc_parallel_for(p->groups * job.m_parts * depth_blocks(job.grid->depth), 1, threads,
                     pack_weights, &job);
  }
  for (int64_t pass = 0; pass < passes; pass++) {
    job.first = omc_cut(p->images, passes, pass);
    job.images = omc_cut(p->images, passes, pass + 1) - job.first;
    job.source = job.copy;
    if (p->source.in_place)
      job.source = (const acc_t *)(const void *)job.tensor;
    else
      omc_parallel_for(job.images * p->source.channels, 1, threads, copy_planes, &job);
    for (int64_t i = 0; i < p->n_grids; i++) {
      job.grid = &p->grids[i];
      const int64_t vectors = omc_ceil_div(job.images * job.grid->rows * job.grid->cols, OMC_VL);
      omc_parallel_for(p->groups * job.m_parts * vectors, 1, threads, product_range, &job);
    }
  }
  return OMC_OK;
}

#endif
