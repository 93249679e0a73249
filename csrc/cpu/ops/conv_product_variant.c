/* Kernels of Conv, ConvTranspose and ConvGradInput: a product whose right side is packed from an
 * image. */
#include <string.h>

#include "cpu/ops/conv.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

/* ---- the source ---- */

#if OMC_DEPTH == 2
OMC_INLINE conv_element copied(const storage_t *p) { return *p; }
OMC_INLINE void copy_run(const storage_t *from, conv_element *to, int64_t n) {
  memcpy(to, from, (size_t)n * sizeof *to);
}
#else
OMC_INLINE conv_element copied(const storage_t *p) { return ld(p); }
OMC_INLINE void copy_run(const storage_t *from, conv_element *to, int64_t n) {
  load_row(from, to, n);
}
#endif

/* A row of zeros if `from` is NULL. */
static void copy_row(const conv_source *s, const storage_t *from, conv_element *to) {
  memset(to, 0, (size_t)(s->phases * s->part) * sizeof *to);
  if (!from) return;
  for (int64_t q = 0; q < s->phases; q++) {
    const int64_t x0 = q - s->left; /* element t of the part is column x0 + t * phases */
    const int64_t begin = x0 < 0 ? omc_ceil_div(-x0, s->phases) : 0;
    const int64_t end = omc_min(s->part, x0 < s->w ? omc_ceil_div(s->w - x0, s->phases) : 0);
    if (s->phases == 1 && begin < end)
      copy_run(from + x0 + begin, to + begin, end - begin);
    else if (s->phases == 2) /* a constant step, for the compiler to vectorise */
      for (int64_t t = begin; t < end; t++) to[q * s->part + t] = copied(from + x0 + t * 2);
    else
      for (int64_t t = begin; t < end; t++) to[q * s->part + t] = copied(from + x0 + t * s->phases);
  }
}

void OMC_CONV_NAME(copy_plane)(const conv_source *s, const storage_t *plane, conv_element *out) {
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

/* The unit of a vector of columns at elements k and, if there is a second, k + 1 of depth. */
#if OMC_DEPTH == 2
OMC_INLINE omc_vunit units_at(const conv_element *first, const conv_element *second, int64_t n) {
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)omc_vldh(first, n));
  if (!second) return (omc_vunit)low;
  const __m512i high = _mm512_cvtepu16_epi32((__m256i)omc_vldh(second, n));
  return (omc_vunit)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}
#else
OMC_INLINE omc_vunit units_at(const conv_element *first, const conv_element *second, int64_t n) {
  (void)second;
  return vldr_upto(first, n);
}
#endif

/* In rising order: what a vector writes past its chunk the next one overwrites. */
void OMC_CONV_NAME(pack_panel)(const conv_element *source, const int64_t *at, int64_t depth,
                               const conv_chunk *chunks, int64_t count, bool exact, omc_unit *out) {
  for (int64_t k = 0; k < depth; k += OMC_DEPTH, out += OMC_NR) {
    const conv_element *first = source + at[k];
    const bool more = OMC_DEPTH == 2 && k + 1 < depth && at[k + 1] != OMC_NOWHERE;
    const conv_element *second = more ? source + at[k + 1] : NULL;
    for (int64_t i = 0; i < count; i++) {
      const conv_chunk c = chunks[i];
      const omc_vunit units =
          units_at(first + c.from, second ? second + c.from : NULL, exact ? c.n : OMC_VL);
      memcpy(out + c.to, &units, sizeof units);
    }
  }
}

/* ---- the product ---- */

typedef struct {
  const omc_kernel_args *args;
  const conv_product *p;
  const conv_grid *grid;
  const conv_element *source; /* of the pass */
  const storage_t *tensor;    /* the source's own elements */
  conv_element *copy;
  omc_unit *packed;
  acc_t *threads;
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

static int64_t depth_units(const conv_grid *grid) { return omc_ceil_div(grid->depth, OMC_DEPTH); }
static int64_t depth_blocks(const conv_grid *grid) {
  return omc_max(omc_ceil_div(depth_units(grid), OMC_GEMM_KC), 1);
}

/* Block `block` of the depth: its first element, how many it has, and the first unit. */
typedef struct {
  int64_t k, depth, unit, units;
} depth_block;

static depth_block depth_block_at(const conv_grid *grid, int64_t block) {
  const int64_t all = depth_units(grid), blocks = depth_blocks(grid);
  const int64_t u0 = omc_cut(all, blocks, block), u1 = omc_cut(all, blocks, block + 1);
  const int64_t k0 = u0 * OMC_DEPTH;
  return (depth_block){k0, omc_min(u1 * OMC_DEPTH, grid->depth) - k0, u0, u1 - u0};
}

/* The unit of the weights that follow at[0] .. in a row, of which there are `left`. */
OMC_INLINE omc_unit weight_unit(const storage_t *row, const int64_t *at, int64_t left) {
#if OMC_DEPTH == 2
  const uint32_t second = left > 1 ? row[at[1]].bits : 0;
  return (omc_unit)(row[at[0]].bits | second << 16);
#else
  (void)left;
  return ld(row + at[0]);
#endif
}

/* The packed weights of the rows from row i of a group on. */
static omc_unit *packed_at(const product_job *job, int64_t group, int64_t i) {
  return job->packed + job->grid->packed_at + (group * job->p->m + i) * depth_units(job->grid);
}

/* Packs the weights of one grid by (group, part of m, block of depth). */
static void pack_weights(omc_range range, void *ctx) {
  const product_job *job = ctx;
  const conv_product *p = job->p;
  const conv_grid *grid = job->grid;
  const int64_t blocks = depth_blocks(grid);
  for (int64_t u = range.begin; u < range.end; u++) {
    const int64_t group = u / blocks / job->m_parts, part = u / blocks % job->m_parts;
    const depth_block d = depth_block_at(grid, u % blocks);
    const int64_t i = omc_cut(p->m, job->m_parts, part),
                  m = omc_cut(p->m, job->m_parts, part + 1) - i;
    const storage_t *weight =
        (const storage_t *)job->args->in[1].data + group * p->weight_group + i * p->weight_row;
    omc_unit *to = packed_at(job, group, i) + m * d.unit;
    const int64_t panels = omc_gemm_panels(m);
    for (int64_t panel = 0; panel < panels; panel++) {
      const int64_t r0 = omc_cut(m, panels, panel), r1 = omc_cut(m, panels, panel + 1);
      for (int64_t k = 0; k < d.depth; k += OMC_DEPTH)
        for (int64_t r = r0; r < r1; r++)
          *to++ = weight_unit(weight + r * p->weight_row, grid->weight_at + d.k + k, d.depth - k);
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
  omc_unit *const b = (omc_unit *)(void *)scratch;
  acc_t *const c = scratch + OMC_GEMM_KC * COLS + 2 * SLACK;
  acc_t row_bias[ROWS];
  int64_t from[COLS], to[COLS], counts[COLS / OMC_NR];
  conv_chunk chunks[COLS];
  locate_columns(job, group, j0, n, from, to);
  if (bias) load_row(bias + group * p->m + i, row_bias, m);
  const int64_t panels = omc_ceil_div(n, OMC_NR), blocks = depth_blocks(grid);
  for (int64_t q = 0; q < panels; q++)
    counts[q] = OMC_CONV_NAME(cut_chunks)(from + q * OMC_NR, omc_min(OMC_NR, n - q * OMC_NR),
                                          chunks + q * OMC_NR);
  const omc_unit *weights = packed_at(job, group, i);
  const omc_matrix sums = omc_gemm_sums(c, COLS);
  for (int64_t block = 0; block < blocks; block++) {
    const depth_block d = depth_block_at(grid, block);
    for (int64_t q = 0; q < panels; q++)
      OMC_CONV_NAME(pack_panel)(job->source, grid->source_at + d.k, d.depth, chunks + q * OMC_NR,
                                counts[q], p->source.in_place, b + q * OMC_NR * d.units);
    const omc_gemm_block product = {.m = m,
                                    .n = omc_ceil_div(n, OMC_VL) * OMC_VL,
                                    .k = d.units,
                                    .a = weights + m * d.unit,
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
  if (p->direct) return OMC_CONV_STORED(direct)(args);
  if (p->winograd) return OMC_CONV_STORED(winograd)(args, p->winograd);
  acc_t *const packed = args->workspace, *const copy = packed + omc_whole_vectors(p->packed);
  product_job job = {.args = args,
                     .p = p,
                     .tensor = args->in[0].data,
                     .packed = (omc_unit *)(void *)packed,
                     .copy = (conv_element *)(void *)copy,
                     .threads = copy + product_source(p)};
  const int64_t passes = omc_ceil_div(p->images, p->pass);
  const int64_t columns = p->pass * p->grids[0].rows * p->grids[0].cols;
  const int64_t blocks = p->groups * omc_ceil_div(columns, COLS);
  const int64_t wanted = omc_ceil_div(PARTS * threads, blocks ? blocks : 1);
  job.m_parts =
      omc_max(omc_ceil_div(p->m, ROWS), threads > 1 ? omc_min(wanted, omc_gemm_panels(p->m)) : 1);
  for (int64_t i = 0; i < p->n_grids; i++) {
    job.grid = &p->grids[i];
    omc_parallel_for(p->groups * job.m_parts * depth_blocks(job.grid), 1, threads, pack_weights,
                     &job);
  }
  for (int64_t pass = 0; pass < passes; pass++) {
    job.first = omc_cut(p->images, passes, pass);
    job.images = omc_cut(p->images, passes, pass + 1) - job.first;
    job.source = job.copy;
    if (p->source.in_place)
      job.source = (const conv_element *)(const void *)job.tensor;
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
