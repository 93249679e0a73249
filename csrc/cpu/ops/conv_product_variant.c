/* Kernels of Conv, ConvTranspose and ConvGradInput: a product whose right side is packed from an
 * image. */
#include <string.h>

#include "cpu/ops/conv.h"
#include "cpu/ops/conv_units.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT && OMC_GEMM_KNOWN

/* ---- the source ---- */

/* Every second of 2 n - 1 elements. */
OMC_INLINE void copy_every_second(const storage_t *from, int64_t next, omc_unit *to, int64_t n) {
  int64_t i = 0;
  for (; i + OMC_VL <= n; i += OMC_VL) {
    const vacc_t first = (vacc_t)stored_units(from + 2 * i, next),
                 last = (vacc_t)stored_units(from + 2 * i + OMC_VL - 1, next);
    vstr((acc_t *)(void *)(to + i), OMC_EVERY_SECOND(first, last));
  }
  for (; i < n; i++) to[i] = unit_of(from + 2 * i, next);
}

void OMC_CONV_NAME(copy_plane)(const conv_source *s, const storage_t *plane, int64_t next,
                               omc_unit *out) {
  const int64_t row = s->phases * s->part;
  memset(out, 0, (size_t)(s->rows * row) * sizeof *out);
  for (int64_t q = 0; q < s->phases; q++) {
    const int64_t x0 = q - s->left; /* element t of the part is column x0 + t * phases */
    const int64_t begin = x0 < 0 ? omc_ceil_div(-x0, s->phases) : 0;
    const int64_t end = omc_min(s->part, x0 < s->w ? omc_ceil_div(s->w - x0, s->phases) : 0);
    for (int64_t r = 0; r < s->rows && begin < end; r++) {
      if (s->row_from[r] < 0) continue;
      const storage_t *from = plane + s->row_from[r] * s->w + x0 + begin * s->phases;
      omc_unit *to = out + r * row + q * s->part + begin;
      if (s->phases == 1)
        copy_run(from, next, to, end - begin);
      else if (s->phases == 2)
        copy_every_second(from, next, to, end - begin);
      else
        for (int64_t t = 0; t < end - begin; t++) to[t] = unit_of(from + t * s->phases, next);
    }
  }
}

int64_t OMC_CONV_NAME(cut_chunks)(const int64_t *at, int64_t n, int64_t most, conv_chunk *out) {
  int64_t count = 0;
  for (int64_t j = 0; j < n; count++) {
    const int64_t start = j++;
    while (j < n && j - start < most && at[j] == at[j - 1] + 1) j++;
    out[count] = (conv_chunk){start, at[start], j - start};
  }
  return count;
}

/* In rising order: what a vector writes past its chunk the next one overwrites. */
void OMC_CONV_NAME(pack_panel)(const conv_element *source, const int64_t *at, int64_t depth,
                               const conv_chunk *chunks, int64_t count, bool exact, omc_unit *out) {
  for (int64_t k = 0; k < depth; k += OMC_DEPTH, out += OMC_NR) {
    const conv_element *first = source + at[k];
    const bool more = OMC_DEPTH == 2 && k + 1 < depth && at[k + 1] != OMC_NOWHERE;
    const int64_t next = more ? at[k + 1] - at[k] : 0;
    for (int64_t i = 0; i < count; i++) {
      const conv_chunk c = chunks[i];
      if (c.n > OMC_VL) {
        pack_two_vectors(first + c.from, next, out + c.to);
        continue;
      }
      const omc_vunit units = units_of(first + c.from, next, exact ? c.n : OMC_VL);
      memcpy(out + c.to, &units, sizeof units);
    }
  }
}

/* Packs a panel from a copy of units at source + at[k]. */
static void pack_units(const omc_unit *source, const int64_t *at, int64_t units,
                       const conv_chunk *chunks, int64_t count, omc_unit *out) {
  for (int64_t k = 0; k < units; k++, out += OMC_NR)
    for (int64_t i = 0; i < count; i++) {
      omc_vunit some;
      memcpy(&some, source + at[k] + chunks[i].from, sizeof some);
      memcpy(out + chunks[i].to, &some, sizeof some);
    }
}

/* ---- the product ---- */

typedef struct {
  const omc_kernel_args *args;
  const conv_product *p;
  const conv_grid *grid;
  const storage_t *tensor; /* the source's own elements */
  omc_unit *copy;          /* of the pass */
  omc_unit *packed;
  acc_t *threads;
  int64_t first, images; /* of the pass */
  int64_t m_parts;
  int64_t packed_rows[DEPTH]; /* where those of a packed panel are */
} product_job;

/* Gives the elements of a plane, which have no second, that of a row further below. */
static void add_rows_below(const conv_source *s, omc_unit *plane) {
#if OMC_DEPTH == 2
  const int64_t row = s->phases * s->part, n = (s->rows - s->below) * row;
  const omc_unit *below = plane + s->below * row;
  for (int64_t i = 0; i < n; i++) plane[i] |= (omc_unit)((uint32_t)below[i] << 16);
#else
  (void)s, (void)plane;
#endif
}

static void copy_planes(omc_range range, void *ctx) {
  const product_job *job = ctx;
  const conv_source *s = &job->p->source;
  const int64_t planes = group_planes(s), area = s->h * s->w;
  for (int64_t i = range.begin; i < range.end; i++) {
    const bool alone = i % planes == planes - 1 && s->below;
    const int64_t channel = (i % planes - alone) * s->per_unit;
    const storage_t *from =
        job->tensor + (job->first * s->channels + i / planes * s->of_group + channel) * area;
    const bool more = s->per_unit == 2 && channel + 1 < s->of_group;
    omc_unit *to = job->copy + i * source_plane(s);
    OMC_CONV_NAME(copy_plane)(s, from, more ? area : 0, to);
    if (s->below && i % planes == planes - 2) add_rows_below(s, to);
  }
}

static int64_t depth_blocks(const conv_grid *grid) {
  return omc_max(omc_ceil_div(grid->depth, DEPTH), 1);
}

/* Block `block` of the depth: its first unit, and how many it has. */
typedef struct {
  int64_t first, units;
} depth_block;

static depth_block depth_block_at(const conv_grid *grid, int64_t block) {
  const int64_t blocks = depth_blocks(grid), first = omc_gemm_cut(grid->depth, blocks, block);
  return (depth_block){first, omc_gemm_cut(grid->depth, blocks, block + 1) - first};
}

/* The units of a row of weights in a block of the depth. */
static void load_weights(const conv_grid *grid, const storage_t *row, depth_block d,
                         omc_unit *out) {
  const int64_t *at = grid->weight_at + d.first, next = grid->weight_next, run = grid->run;
  const int64_t whole = omc_clamp(grid->whole - d.first, 0, d.units);
  const int64_t paired = omc_clamp(grid->whole + grid->stacked - d.first, 0, d.units);
  int64_t k = 0;
  if (OMC_DEPTH == 2 && next == 1 && whole > 0) { /* units as they are stored */
    memcpy(out, row + at[0], (size_t)whole * sizeof *out);
    k = whole;
  }
  for (; run == 1 && k < whole; k++) out[k] = unit_of(row + at[k], next);
  for (int64_t n, left = run - d.first % run; k < whole; k += n, left = run) {
    n = omc_min(left, whole - k);
    if (n == next)
      copy_both(row + at[k], out + k, n);
    else
      copy_run(row + at[k], next, out + k, n);
  }
  for (; k < paired; k++) out[k] = unit_of(row + at[k], grid->row_next);
  for (; k < d.units; k++) out[k] = unit_of(row + at[k], 0);
}

/* The packed weights of the rows from row i of a group on. */
static omc_unit *packed_at(const product_job *job, const conv_grid *grid, int64_t group,
                           int64_t i) {
  const int64_t units = omc_gemm_units(grid->depth);
  return job->packed + grid->packed_at + (group * job->p->m + i) * units;
}

/* h rows of weights as lines of the units of a block: as they are stored, if that is as units lie,
 * else copied to `rows`. */
static omc_matrix weight_lines(const product_job *job, const storage_t *weight, int64_t h,
                               depth_block d, omc_unit *rows) {
  const conv_grid *grid = job->grid;
  const int64_t next = job->p->weight_row;
  if (OMC_DEPTH == 1 && grid->run == grid->depth)
    return omc_matrix_rows(weight + grid->weight_at[d.first], next, OMC_STORAGE);
  for (int64_t r = 0; r < h; r++) load_weights(grid, weight + r * next, d, rows + r * d.units);
  return omc_matrix_rows(rows, d.units, OMC_ACC);
}

/* Weights of m rows of a group from `from` on, and where block `d` of them is packed. */
typedef struct {
  const storage_t *from;
  int64_t m;
  depth_block d;
  omc_unit *to;
} weight_block;

/* Panel q: its rows. */
static omc_range rows_of_panel(const weight_block *w, int64_t q) {
  return (omc_range){.begin = omc_gemm_row(w->m, q), .end = omc_gemm_row(w->m, q + 1)};
}

/* Rows that lie apart. As packing writes past the end of a panel, one that no other follows is
 * packed apart. */
static void pack_rows_apart(const product_job *job, const weight_block *w, omc_unit *scratch) {
  const int64_t panels = omc_gemm_panels(w->m), units = w->d.units;
  omc_unit *const apart = scratch + OMC_MR * DEPTH;
  for (int64_t q = 0; q < panels; q++) {
    const omc_range rows = rows_of_panel(w, q);
    const int64_t h = rows.end - rows.begin;
    const storage_t *from = w->from + rows.begin * job->p->weight_row;
    const omc_matrix lines = weight_lines(job, from, h, w->d, scratch);
    omc_unit *const to = w->to + rows.begin * omc_gemm_units(units);
    const bool followed = q + 1 < panels && units >= SLACK;
    OMC_TURN_UNITS(&lines, h, units, h, (void *)(followed ? to : apart));
    if (!followed) memcpy(to, apart, (size_t)(h * units) * sizeof *to);
  }
}

/* n taps of a channel of h rows that lie side by side, `taps` weights each. */
static void turn_taps(const storage_t *from, int64_t next, int64_t h, int64_t taps,
                      const int64_t *tap_at, int64_t n, omc_unit *scratch, omc_unit *out) {
  if (taps == 1) {
    copy_run(from, next, out, h);
    return;
  }
  if (n < taps) {
    for (int64_t i = 0; i < n; i++)
      for (int64_t r = 0; r < h; r++) out[i * h + r] = unit_of(from + r * taps + tap_at[i], next);
    return;
  }
  omc_unit *const turned = scratch + OMC_MR * MOST_TOGETHER;
  const omc_matrix rows = omc_matrix_rows(scratch, taps, OMC_ACC);
  copy_run(from, next, scratch, h * taps);
  OMC_TURN_UNITS(&rows, h, taps, h, (void *)turned);
  memcpy(out, turned, (size_t)(h * taps) * sizeof *out);
}

/* Rows that lie side by side: channel by channel, so that what lies together is read together. */
static void pack_rows_together(const product_job *job, const weight_block *w, omc_unit *scratch) {
  const conv_grid *grid = job->grid;
  const int64_t taps = job->p->weight_row;
  for (int64_t i = 0, n; i < w->d.units; i += n) {
    const int64_t k = w->d.first + i, tap = k % grid->met;
    const int64_t *tap_at = grid->weight_at + tap;
    const storage_t *from = w->from + grid->weight_at[k] - *tap_at;
    n = omc_min(grid->met - tap, w->d.units - i);
    for (int64_t q = 0; q < omc_gemm_panels(w->m); q++) {
      const omc_range rows = rows_of_panel(w, q);
      const int64_t h = rows.end - rows.begin;
      turn_taps(from + rows.begin * taps, k < grid->whole ? grid->weight_next : 0, h, taps, tap_at,
                n, scratch, w->to + rows.begin * omc_gemm_units(w->d.units) + i * h);
    }
  }
}

/* Packs the weights of one grid by (group, part of m, block of depth). */
static void pack_weights(omc_range range, void *ctx) {
  const product_job *job = ctx;
  const conv_product *p = job->p;
  const conv_grid *grid = job->grid;
  const int64_t blocks = depth_blocks(grid);
  omc_unit *const scratch = (omc_unit *)(void *)(job->threads + range.thread * product_thread(p));
  for (int64_t u = range.begin; u < range.end; u++) {
    const int64_t group = u / blocks / job->m_parts, part = u / blocks % job->m_parts;
    const int64_t i = omc_cut(p->m, job->m_parts, part);
    weight_block w = {.from = (const storage_t *)job->args->in[1].data + group * p->weight_group +
                              i * p->weight_row,
                      .m = omc_cut(p->m, job->m_parts, part + 1) - i,
                      .d = depth_block_at(grid, u % blocks)};
    w.to = packed_at(job, grid, group, i) + w.m * w.d.first;
    (grid->met ? pack_rows_together : pack_rows_apart)(job, &w, scratch);
    for (int64_t q = 0; q < omc_gemm_panels(w.m); q++) {
      const omc_range rows = rows_of_panel(&w, q);
      OMC_GEMM_NAME(group)
      (w.to + rows.begin * omc_gemm_units(w.d.units), rows.end - rows.begin, w.d.units);
    }
  }
}

/* Rows of C to the output, by runs of columns that are `step` apart there. With `twins` those of a
 * second C lie in between; after the last column of a row there may be none. */
typedef struct {
  const acc_t *c;
  int64_t m, n, step, plane;
  bool twins;
  const int64_t *to;    /* n */
  const bool *unpaired; /* n: nothing lies after this column */
  storage_t *out;
} store_job;

static void store_columns(const store_job *s) {
  for (int64_t j = 0; j < s->n;) {
    const int64_t start = j++;
    while (j < s->n && s->to[j] == s->to[j - 1] + s->step) j++;
    const int64_t n = j - start, both = 2 * n - s->unpaired[j - 1];
    const acc_t *run = s->c + start;
    storage_t *row = s->out + s->to[start];
    for (int64_t i = 0; i < s->m; i++, run += COLS, row += s->plane) {
      if (s->twins)
        for (int64_t x = 0; x < n; x += OMC_VL)
          store_in_turn(vldr(run + x), vldr(run + x + ROWS * COLS), both - 2 * x, row + 2 * x);
      else if (s->step == 1)
        store_row(run, row, n);
      else
        for (int64_t x = 0; x < n; x++) st(row + x * s->step, run[x]);
    }
  }
}

/* Where the elements of a block of the depth lie in a source that is packed in place. */
static void locate_depth(const product_job *job, const conv_grid *grid, depth_block d,
                         int64_t *at) {
  const int64_t *first = grid->source_at + d.first, plane = source_plane(&job->p->source);
  for (int64_t k = 0; k < d.units; k++) {
    at[k * OMC_DEPTH] = first[k];
    if (OMC_DEPTH == 2) at[2 * k + 1] = d.first + k < grid->whole ? first[k] + plane : OMC_NOWHERE;
  }
}

/* The n columns of a panel of the right side, cut into chunks, vector by vector. */
typedef struct {
  int64_t n, counts[OMC_NV], count; /* of each vector, and of all */
  const conv_chunk *chunks;
  bool together; /* whole vectors that lie side by side in the output */
} column_panel;

/* Columns first .. first+n-1 of the grid: where they lie in the source and in the output, counted
 * from where a group does. */
typedef struct {
  int64_t first, n;
  int64_t from[COLS], to[COLS];
  bool unpaired[COLS];
  column_panel panels[COLS / OMC_NR];
  conv_chunk chunks[COLS];
} column_block;

static column_panel panel_of(const int64_t *at, int64_t n, conv_chunk *chunks) {
  column_panel panel = {.n = n, .chunks = chunks};
  for (int64_t v = 0, j = 0; j < n; v++, j += OMC_VL) {
    const int64_t count =
        OMC_CONV_NAME(cut_chunks)(at + j, omc_min(OMC_VL, n - j), OMC_VL, chunks + panel.count);
    for (int64_t i = 0; i < count; i++) chunks[panel.count++].to += j;
    panel.counts[v] = count;
  }
  return panel;
}

static void locate_columns(const product_job *job, int64_t first, int64_t n, column_block *block) {
  const conv_product *p = job->p;
  const conv_grid *grid = job->grid;
  const int64_t out_image = p->groups * p->m * p->out_plane;
  const int64_t pixels = grid->rows * grid->cols;
  int64_t image = first / pixels, y = first % pixels / grid->cols, x = first % grid->cols;
  block->first = first, block->n = n;
  for (int64_t j = 0; j < n; j++) {
    block->from[j] = image * source_image(&p->source) + grid->row_at[y] + x;
    block->to[j] = (job->first + image) * out_image + grid->out_at[y] + x * grid->out_col;
    block->unpaired[j] = x >= grid[p->twins - 1].cols;
    if (++x == grid->cols) x = 0, y++;
    if (y == grid->rows) y = 0, image++;
  }
  for (int64_t j = 0; j < n; j += OMC_NR) {
    const int64_t width = omc_min(OMC_NR, n - j);
    column_panel *const panel = &block->panels[j / OMC_NR];
    *panel = panel_of(block->from + j, width, block->chunks + j);
    panel->together = p->twins == 1 && width % OMC_VL == 0 &&
                      block->to[j + width - 1] - block->to[j] == width - 1;
  }
}

/* Most rows for which vectors of a panel are read where they lie: more of them repay packing. */
enum { UNPACKED_ROWS = OMC_GROUP > 1 ? 0 : 10 * OMC_MR };

/* Whether vector v is one chunk, of a whole panel. */
static bool is_chunk(const column_panel *panel, int v) {
  return panel->n == OMC_NR && panel->counts[v] == 1;
}

/* Packs a panel of the copy to `out`, and returns NULL; or, for few rows, only those of its vectors
 * that are no chunk, and returns the places of all. */
static const omc_places *pack_columns(const product_job *job, const omc_unit *copy,
                                      const int64_t *at, int64_t m, int64_t units,
                                      const column_panel *panel, omc_unit *out,
                                      omc_places places[OMC_NV]) {
  const conv_chunk *chunks = panel->chunks;
  if (m > UNPACKED_ROWS || !(is_chunk(panel, 0) || is_chunk(panel, 1))) {
    pack_units(copy, at, units, chunks, panel->count, out);
    return NULL;
  }
  for (int v = 0; v < OMC_NV; chunks += panel->counts[v++]) {
    places[v] = (omc_places){.from = copy + chunks->from, .at = at};
    if (is_chunk(panel, v)) continue;
    pack_units(copy, at, units, chunks, panel->counts[v], out);
    places[v] = (omc_places){.from = out + v * OMC_VL, .at = job->packed_rows};
  }
  return places;
}

/* Rows i .. i+m-1 of a group by a block of columns: what is added and where it goes, a panel of B
 * and, for each twin, ROWS x COLS sums. */
typedef struct {
  const column_block *columns;
  int64_t group, i, m;
  const storage_t *bias; /* of the rows, or NULL; and as it is computed with */
  const acc_t *row_bias;
  storage_t *out;
  omc_unit *b;
  acc_t *c;
} row_block;

/* Adds up a block of a grid's depth in `c`. The last one stores what lies together. */
static void add_products(const product_job *job, const conv_grid *grid, int64_t block,
                         const row_block *r, acc_t *c) {
  const conv_product *p = job->p;
  const column_block *columns = r->columns;
  const depth_block d = depth_block_at(grid, block);
  const bool last = block == depth_blocks(grid) - 1;
  const int64_t source = r->group * p->source_group;
  const omc_unit *weights = packed_at(job, grid, r->group, r->i) + r->m * d.first;
  int64_t each[OMC_DEPTH * DEPTH];
  if (p->source.in_place) locate_depth(job, grid, d, each);
  for (int64_t j = 0; j < columns->n; j += OMC_NR) {
    const column_panel *panel = &columns->panels[j / OMC_NR];
    omc_places places[OMC_NV];
    const omc_places *b_at = NULL;
    if (p->source.in_place)
      OMC_CONV_NAME(pack_panel)((const conv_element *)(const void *)job->tensor + source, each,
                                d.units * OMC_DEPTH, panel->chunks, panel->count, true, r->b);
    else
      b_at = pack_columns(job, job->copy + source, grid->source_at + d.first, r->m, d.units, panel,
                          r->b, places);
    const bool stored = last && panel->together;
    const omc_matrix sums = omc_matrix_rows(c + j, COLS, OMC_ACC);
    const omc_matrix results = omc_matrix_rows(r->out + columns->to[j], p->out_plane, OMC_STORAGE);
    const omc_gemm_block product = {
        .m = r->m,
        .n = omc_ceil_div(omc_min(columns->n - j, OMC_NR), OMC_VL) * OMC_VL,
        .k = d.units,
        .a = weights,
        .b = r->b,
        .b_at = b_at,
        .from = sums,
        .to = stored ? results : sums,
        .alpha = 1,
        .beta = block > 0,
        .row_bias = !r->bias || !last ? NULL
                    : stored          ? (const void *)r->bias
                                      : r->row_bias};
    OMC_GEMM_NAME(multiply)(&product);
  }
}

/* Stores the sums of panels that do not lie together. */
static void store_apart(const product_job *job, const row_block *r) {
  const column_block *columns = r->columns;
  for (int64_t j = 0, end = 0; j < columns->n; j = end + OMC_NR) {
    for (end = j; end < columns->n && !columns->panels[end / OMC_NR].together;) end += OMC_NR;
    const store_job stored = {.c = r->c + j,
                              .m = r->m,
                              .n = omc_min(end, columns->n) - j,
                              .step = job->grid->out_col,
                              .plane = job->p->out_plane,
                              .twins = job->p->twins == 2,
                              .to = columns->to + j,
                              .unpaired = columns->unpaired + j,
                              .out = r->out};
    store_columns(&stored);
  }
}

/* One block: rows of part `part` of a group by a block of columns. */
static void product_block(const product_job *job, int64_t group, int64_t part,
                          const column_block *columns, acc_t *scratch) {
  const conv_product *p = job->p;
  const storage_t *all_bias = omc_in_data(job->args, 2);
  const int64_t i = omc_cut(p->m, job->m_parts, part), row = group * p->m + i;
  acc_t row_bias[ROWS];
  const row_block r = {.columns = columns,
                       .group = group,
                       .i = i,
                       .m = omc_cut(p->m, job->m_parts, part + 1) - i,
                       .bias = all_bias ? all_bias + row : NULL,
                       .row_bias = row_bias,
                       .out = (storage_t *)job->args->out[0].data + row * p->out_plane,
                       .b = (omc_unit *)(void *)scratch,
                       .c = scratch + DEPTH * OMC_NR + 2 * SLACK};
  if (r.bias) load_row(r.bias, row_bias, r.m);
  for (int64_t t = 0; t < p->twins; t++) {
    const conv_grid *grid = job->grid + t;
    for (int64_t block = 0; block < depth_blocks(grid); block++)
      add_products(job, grid, block, &r, r.c + t * ROWS * COLS);
  }
  store_apart(job, &r);
}

enum { BLOCK_VECTORS = COLS / OMC_VL };

/* Units of work are vectors of columns within a part of m, or where there are groups, which share
 * the places of columns, whole blocks of these, groups innermost. Any cut gives the same result. */
static int64_t product_units(const product_job *job) {
  const conv_product *p = job->p;
  const int64_t columns = job->images * job->grid->rows * job->grid->cols;
  return p->groups * job->m_parts * omc_ceil_div(columns, p->groups > 1 ? COLS : OMC_VL);
}

static void product_range(omc_range range, void *ctx) {
  const product_job *job = ctx;
  acc_t *scratch = job->threads + range.thread * product_thread(job->p);
  const int64_t columns = job->images * job->grid->rows * job->grid->cols;
  const int64_t vectors = omc_ceil_div(columns, OMC_VL), parts = job->m_parts;
  const int64_t groups = job->p->groups;
  const bool shared = groups > 1;
  column_block block = {0};
  for (int64_t u = range.begin, count; u < range.end; u += count) {
    const int64_t rows = shared ? u % (groups * parts) : u / vectors;
    const int64_t v = shared ? u / (groups * parts) * BLOCK_VECTORS : u % vectors;
    const int64_t most = omc_min(BLOCK_VECTORS, vectors - v);
    count = shared ? 1 : omc_min(most, range.end - u);
    const int64_t first = v * OMC_VL;
    const int64_t n = omc_min((shared ? most : count) * OMC_VL, columns - first);
    if (block.first != first || block.n != n) locate_columns(job, first, n, &block);
    product_block(job, rows / parts, rows % parts, &block, scratch);
  }
}

OMC_KERNEL(Conv, args) {
  enum { PARTS = 4 /* blocks a thread should get at least, for balance */ };
  const conv_product *p = args->params;
  const int threads = args->threads;
  if (p->images == 0 || p->m == 0) return OMC_OK;
  if (p->by_channels) return OMC_CONV_STORED(channels)(args);
  if (p->direct) return OMC_CONV_STORED(direct)(args);
  if (p->winograd && OMC_CONV_STORED(winograd)(args, p->winograd)) return OMC_OK;
  acc_t *const packed = args->workspace, *const copy = packed + omc_whole_vectors(p->packed);
  product_job job = {.args = args,
                     .p = p,
                     .tensor = args->in[0].data,
                     .packed = (omc_unit *)(void *)packed,
                     .copy = (omc_unit *)(void *)copy,
                     .threads = copy + product_source(p)};
  for (int64_t k = 0; k < DEPTH; k++) job.packed_rows[k] = k * OMC_NR;
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
    if (!p->source.in_place)
      omc_parallel_for(job.images * source_planes(&p->source), 1, threads, copy_planes, &job);
    for (int64_t i = 0; i < p->n_grids; i += p->twins) {
      job.grid = &p->grids[i];
      omc_parallel_for(product_units(&job), 1, threads, product_range, &job);
    }
  }
  return OMC_OK;
}

#endif
