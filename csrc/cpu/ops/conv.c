/* Parameters and workspaces of Conv and its gradients. See conv.h for how they are computed. */
#include <string.h>

#include "cpu/ops/conv.h"

#ifndef OMC_VARIANT

static omc_dtype stored(const omc_node *node) { return omc_in(node, 0)->type.dtype; }

/* Whether panels hold pairs of what is stored. */
static bool in_pairs(const omc_node *node) {
  const omc_isa isa = omc_cpu_isa();
  return (stored(node) == OMC_BF16 && isa >= OMC_ISA_AVX512BF16) ||
         (stored(node) == OMC_F16 && isa >= OMC_ISA_AMXFP16);
}

/* Whether panels are packed from elements as they are stored. */
static bool packs_stored(const omc_node *node) {
  return omc_dtype_acc(stored(node)) == stored(node) || in_pairs(node);
}

/* Images copied at a time: what a cache holds, and columns enough for many threads. */
static int64_t images_per_pass(const omc_node *node, const omc_conv_form *f, const conv_source *s) {
  enum { BYTES = 1 << 20, COLUMNS = 1 << 12 };
  const int64_t bytes = omc_max(source_image(s) * (int64_t)omc_acc_size(stored(node)), 1);
  const int64_t by_columns = omc_ceil_div(COLUMNS, omc_max(f->out[0] * f->out[1] * f->out[2], 1));
  return omc_max(omc_min(omc_max(BYTES / bytes, by_columns), f->n), 1);
}

/* Channels of a unit of depth, and of the copy. */
static int64_t channels_per_unit(const omc_node *node, bool direct) {
  return in_pairs(node) && !direct ? 2 : 1;
}

/* Groups of so few rows leave nothing to pack the right side for. */
static bool sums_directly(int64_t groups, int64_t m) { return groups > 1 && m < 4; }

/* Of a depthwise kernel vectors hold channels where the planes of so many fit into a cache. */
static bool sums_by_channels(const omc_node *node, int64_t groups, int64_t m, int64_t channels,
                             int64_t pixels) {
  enum { MOST_BYTES = 1 << 20 };
  const int64_t bytes = OMC_MAX_VL * (int64_t)omc_acc_size(stored(node));
  return groups >= OMC_MAX_VL && m == 1 && channels == 1 && pixels <= MOST_BYTES / bytes;
}

/* Makes the tables of a node's kernel. `status` is the first failure, after which they are NULL. */
typedef struct {
  const omc_node *node;
  omc_arena *arena;
  omc_status status;
} table_maker;

enum { MOST_OF_A_TABLE = 1 << 24 };

/* Numbers of a table. How many hangs on sizes that a tensor may have though nobody has memory for
 * as many. */
static int64_t *new_table(table_maker *make, int64_t n) {
  if (make->status != OMC_OK) return NULL;
  if (n > MOST_OF_A_TABLE) {
    make->status = omc_node_fail(make->node, OMC_EUNSUPPORTED,
                                 "%lld rows or taps are too many for a table", (long long)n);
    return NULL;
  }
  int64_t *table = OMC_NEW_ARRAY(make->arena, int64_t, n);
  if (!table) make->status = omc_no_memory(make->node);
  return table;
}

/* Where row (i, j) of n[0] x n[1] is that has step[0] slices and step[1] rows between it and the
 * next, a slice being `pitch` rows and a row `row` elements. */
static int64_t *place_rows(table_maker *make, const int64_t *n, const int64_t *step, int64_t pitch,
                           int64_t row, int64_t first) {
  int64_t *at = new_table(make, omc_max(n[0] * n[1], 1));
  for (int64_t r = 0; at && r < n[0] * n[1]; r++)
    at[r] = first + (r / n[1] * step[0] * pitch + r % n[1] * step[1]) * row;
  return at;
}

/* The rows of a copy of planes with dims `in`: span[a] along each axis but the last, from before[a]
 * ahead of the plane on. */
static omc_status choose_rows(table_maker *make, const int64_t *in, const int64_t *before,
                              const int64_t *span, conv_source *s) {
  int64_t *from = new_table(make, omc_max(span[0] * span[1], 1));
  if (!from) return make->status;
  s->h = in[0] * in[1], s->w = in[2];
  s->rows = span[0] * span[1];
  s->row_from = from;
  for (int64_t r = 0; r < s->rows; r++) {
    const int64_t z = r / span[1] - before[0], y = r % span[1] - before[1];
    from[r] = z >= 0 && z < in[0] && y >= 0 && y < in[1] ? z * in[1] + y : -1;
  }
  return OMC_OK;
}

/* How much of x a window's taps meet along each axis, all windows together. */
static void window_spans(const omc_conv_form *f, int64_t *span) {
  for (int a = 0; a < OMC_CONV_AXES; a++)
    span[a] = (f->out[a] - 1) * f->stride[a] + (f->kernel[a] - 1) * f->dilation[a] + 1;
}

static int64_t n_taps(const omc_conv_form *f) { return f->kernel[0] * f->kernel[1] * f->kernel[2]; }

static const int64_t one_by_one[] = {1, 1};

/* Whole planes are one row where neither side has gaps between rows. */
static void join_rows(conv_grid *grid) {
  for (int64_t r = 1; r < grid->rows; r++)
    if (grid->row_at[r] - grid->row_at[0] != r * grid->cols ||
        grid->out_at[r] - grid->out_at[0] != r * grid->cols * grid->out_col)
      return;
  grid->cols *= grid->rows;
  grid->rows = 1;
}

/* Whether the form is one of 3 x 3 with steps of 1 that repays its transforms, of so many tiles. */
static bool repays_winograd(const omc_node *node, const omc_conv_form *f, int64_t tiles) {
  enum { LEAST_CHANNELS = 32, LEAST_TILES = 128 };
  bool fits =
      !in_pairs(node) && f->in[0] == 1 && f->out[0] == 1 && f->kernel[0] == 1 && f->before[0] == 0;
  for (int a = 1; a < OMC_CONV_AXES; a++)
    fits &= f->kernel[a] == 3 && f->stride[a] == 1 && f->dilation[a] == 1 && f->before[a] <= 2;
  return fits && f->group == 1 && omc_min(f->c, f->o) >= LEAST_CHANNELS && tiles >= LEAST_TILES;
}

/* Sets *out where Winograd's transform repays. */
static omc_status plan_winograd(table_maker *make, const omc_conv_form *f, bool of_input,
                                const conv_winograd **out) {
  const omc_node *node = make->node;
  const int64_t *to = of_input ? f->in : f->out;
  const int64_t tiles_h = omc_ceil_div(to[1], 2), tiles_w = omc_ceil_div(to[2], 2);
  *out = NULL;
  if (!repays_winograd(node, f, f->n * tiles_h * tiles_w)) return OMC_OK;
  conv_winograd *p = OMC_NEW(make->arena, conv_winograd);
  if (!p) return omc_no_memory(node);
  const int64_t top = of_input ? 2 - f->before[1] : f->before[1];
  *p = (conv_winograd){.images = f->n,
                       .c = of_input ? f->o : f->c,
                       .m = of_input ? f->c : f->o,
                       .oh = to[1],
                       .ow = to[2],
                       .weight_row = of_input ? 9 : f->c * 9,
                       .weight_col = of_input ? f->c * 9 : 9,
                       .flip = of_input,
                       .source = {.channels = of_input ? f->o : f->c,
                                  .of_group = of_input ? f->o : f->c,
                                  .per_unit = 1,
                                  .left = of_input ? 2 - f->before[2] : f->before[2],
                                  .phases = 2,
                                  .part = tiles_w + 1}};
  OMC_TRY(choose_rows(make, of_input ? f->out : f->in, (int64_t[]){0, top},
                      (int64_t[]){1, 2 * tiles_h + 2}, &p->source));
  p->pass = images_per_pass(node, f, &p->source);
  *out = p;
  return OMC_OK;
}

/* The tap of unit `k` of a channel without a second: of two rows each for the first `stacked`, then
 * of the row that is left, or of each. */
static int64_t last_tap(const omc_conv_form *f, int64_t k, int64_t stacked) {
  const int64_t kh = f->kernel[1], kw = f->kernel[2], pairs = stacked ? kh / 2 : 0;
  if (k < stacked) return (k / kw / pairs * kh + k / kw % pairs * 2) * kw + k % kw;
  const int64_t left = kh - 2 * pairs, row = (k - stacked) / kw;
  return (row / left * kh + 2 * pairs + row % left) * kw + (k - stacked) % kw;
}

/* The copy of x, or x itself. A last channel without a second is copied with the row below. */
static omc_status choose_source(table_maker *make, const omc_conv_form *f, bool direct,
                                conv_source *s) {
  const int64_t sw = f->stride[2], per_unit = channels_per_unit(make->node, direct);
  int64_t span[OMC_CONV_AXES];
  bool unpadded = true;
  window_spans(f, span);
  for (int a = 0; a < OMC_CONV_AXES; a++) unpadded &= !f->before[a] && !f->after[a];
  *s = (conv_source){.channels = f->c,
                     .of_group = f->cg,
                     .per_unit = per_unit,
                     .left = f->before[2],
                     .phases = sw,
                     .part = omc_ceil_div(span[2], sw)};
  s->in_place = packs_stored(make->node) && !direct && unpadded && sw == 1;
  if (f->cg % per_unit && !s->in_place && f->kernel[1] > 1) s->below = f->dilation[1];
  return choose_rows(make, f->in, f->before, span, s);
}

/* Its one grid: taps of all units of two channels, then those of a last one. */
static omc_status one_grid(table_maker *make, const omc_conv_form *f, const conv_source *s,
                           conv_grid *grid) {
  const int64_t taps = n_taps(f), kw = f->kernel[2], sw = f->stride[2], per_unit = s->per_unit;
  const int64_t whole = f->cg / per_unit * taps, one = f->cg % per_unit;
  const int64_t stacked = s->below ? one * f->kernel[0] * (f->kernel[1] / 2) * kw : 0;
  const int64_t depth = whole + one * taps - stacked;
  const int64_t row = s->in_place ? s->w : s->phases * s->part, plane = source_plane(s);
  const int64_t step = s->in_place ? per_unit * plane : plane;
  int64_t span[OMC_CONV_AXES];
  window_spans(f, span);
  const int64_t pitch = s->in_place ? f->in[1] : span[1];
  int64_t *weight_at = new_table(make, depth), *source_at = new_table(make, depth);
  const int64_t *tap_at = place_rows(make, f->kernel, f->dilation, pitch, row, 0);
  *grid = (conv_grid){.depth = depth,
                      .whole = whole,
                      .stacked = stacked,
                      .weight_at = weight_at,
                      .weight_next = taps,
                      .row_next = kw,
                      .run = per_unit == 1 ? depth : taps,
                      .source_at = source_at,
                      .rows = f->out[0] * f->out[1],
                      .cols = f->out[2],
                      .row_at = place_rows(make, f->out, f->stride, pitch, row, 0),
                      .out_at = place_rows(make, f->out, one_by_one, f->out[1], f->out[2], 0),
                      .out_col = 1};
  if (make->status != OMC_OK) return make->status;
  for (int64_t k = 0; k < depth; k++) {
    const int64_t tap = k < whole ? k % taps : last_tap(f, k - whole, stacked);
    const int64_t x = tap % kw * f->dilation[2], channel = (k < whole ? k : whole) / taps;
    weight_at[k] = channel * per_unit * taps + tap;
    source_at[k] = (channel + (k >= whole + stacked && s->below)) * step + tap_at[tap / kw] +
                   x % sw * s->part + x / sw;
  }
  join_rows(grid);
  return OMC_OK;
}

static omc_status params_conv(const omc_node *node, omc_arena *arena, void *params) {
  table_maker make = {node, arena, OMC_OK};
  conv_product *p = params;
  omc_conv_form f;
  OMC_TRY(omc_conv_form_of(node, &f));
  const bool direct = sums_directly(f.group, f.o / f.group);
  conv_source s;
  OMC_TRY(choose_source(&make, &f, direct, &s));
  conv_grid *grid = OMC_NEW(arena, conv_grid);
  if (!grid) return omc_no_memory(node);
  OMC_TRY(one_grid(&make, &f, &s, grid));
  const int64_t out_plane = f.out[0] * f.out[1] * f.out[2], weight_row = f.cg * n_taps(&f);
  *p = (conv_product){.direct = direct,
                      .by_channels = sums_by_channels(node, f.group, f.o / f.group, f.cg,
                                                      source_plane(&s) + out_plane),
                      .images = f.n,
                      .groups = f.group,
                      .m = f.o / f.group,
                      .weight_row = weight_row,
                      .weight_group = f.o / f.group * weight_row,
                      .source_group = group_planes(&s) * source_plane(&s),
                      .out_plane = out_plane,
                      .source = s,
                      .n_grids = 1,
                      .twins = 1,
                      .grids = grid,
                      .packed = f.o * omc_gemm_most_units(grid->depth)};
  p->pass = s.in_place ? omc_max(f.n, 1) : images_per_pass(node, &f, &s);
  return plan_winograd(&make, &f, false, &p->winograd);
}

/* Along one dim, for input positions a, a + stride, ...: tap i meets them if its shift, in output
 * positions, is whole. */
static bool tap_shift(int64_t a, int64_t pad, int64_t tap, int64_t dilation, int64_t stride,
                      int64_t *shift) {
  const int64_t x = a + pad - tap * dilation;
  *shift = x / stride;
  return x % stride == 0;
}

/* Range of output positions that input positions 0..n-1 meet along one dim, 0 among them. */
static void shift_range(int64_t n, int64_t pad, int64_t taps, int64_t dilation, int64_t stride,
                        int64_t *before, int64_t *end) {
  *before = 0;
  *end = 1;
  for (int64_t a = 0; a < omc_min(stride, n); a++)
    for (int64_t i = 0; i < taps; i++) {
      int64_t shift;
      if (!tap_shift(a, pad, i, dilation, stride, &shift)) continue;
      *before = omc_max(*before, -shift);
      *end = omc_max(*end, shift + omc_ceil_div(n - a, stride));
    }
}

/* The taps along one dim that meet input positions a, a + stride, ...: every `step`th. */
typedef struct {
  int64_t first, step, n;
} met_taps;

static met_taps taps_met(int64_t a, int64_t pad, int64_t taps, int64_t dilation, int64_t stride) {
  met_taps met = {.step = 1};
  for (int64_t i = 0, shift; i < taps; i++) {
    if (!tap_shift(a, pad, i, dilation, stride, &shift)) continue;
    if (met.n == 1) {
      met.step = i - met.first;
      met.n = (taps - 1 - met.first) / met.step + 1;
      break;
    }
    met.first = i, met.n = 1;
  }
  return met;
}

/* The grid of input pixels `at` modulo the strides. The copied source begins before[a] ahead of the
 * gradient and has `pitch` rows a slice. */
static omc_status grad_grid(table_maker *make, const omc_conv_form *f, const conv_source *s,
                            const int64_t *at, const int64_t *before, int64_t pitch,
                            conv_grid *grid) {
  const int64_t taps = n_taps(f), og = f->o / f->group, units = omc_ceil_div(og, s->per_unit);
  const int64_t plane = source_plane(s), step = s->in_place ? s->per_unit * plane : plane;
  const int64_t row = s->in_place ? s->w : s->part, kh = f->kernel[1], kw = f->kernel[2];
  int64_t n[OMC_CONV_AXES], of_channel = 1;
  met_taps met[OMC_CONV_AXES];
  for (int a = 0; a < OMC_CONV_AXES; a++) {
    n[a] = omc_ceil_div(f->in[a] - at[a], f->stride[a]);
    met[a] = taps_met(at[a], f->before[a], f->kernel[a], f->dilation[a], f->stride[a]);
    of_channel *= met[a].n;
  }
  int64_t *weight_at = new_table(make, units * of_channel);
  int64_t *source_at = new_table(make, units * of_channel);
  const int64_t first = (at[0] * f->in[1] + at[1]) * f->in[2] + at[2];
  *grid = (conv_grid){.weight_at = weight_at,
                      .weight_next = f->cg * taps,
                      .source_at = source_at,
                      .rows = n[0] * n[1],
                      .cols = n[2],
                      .row_at = place_rows(make, n, one_by_one, pitch, row, 0),
                      .out_at = place_rows(make, n, f->stride, f->in[1], f->in[2], first),
                      .out_col = f->stride[2]};
  if (make->status != OMC_OK) return make->status;
  for (int64_t u = 0; u < units; u++) {
    if (u == og / s->per_unit) grid->whole = grid->depth;
    for (int64_t t = 0; t < of_channel; t++) {
      const int64_t of_axis[] = {t / met[2].n / met[1].n, t / met[2].n % met[1].n, t % met[2].n};
      int64_t tap[OMC_CONV_AXES], shift[OMC_CONV_AXES];
      for (int a = 0; a < OMC_CONV_AXES; a++) {
        tap[a] = met[a].first + of_axis[a] * met[a].step;
        (void)tap_shift(at[a], f->before[a], tap[a], f->dilation[a], f->stride[a], &shift[a]);
      }
      weight_at[grid->depth] =
          u * s->per_unit * f->cg * taps + (tap[0] * kh + tap[1]) * kw + tap[2];
      source_at[grid->depth++] = u * step +
                                 ((shift[0] + before[0]) * pitch + shift[1] + before[1]) * row +
                                 shift[2] + s->left;
    }
  }
  if (og % s->per_unit == 0) grid->whole = grid->depth;
  grid->run = grid->depth == units * taps ? taps : 1;
  if (units && taps <= MOST_TOGETHER) grid->met = grid->depth / units;
  join_rows(grid);
  return OMC_OK;
}

/* The gradient of a convolution's input. */
static omc_status decode_gradient(const omc_node *node, const omc_conv_form *f, omc_arena *arena,
                                  conv_product *p) {
  table_maker make = {node, arena, OMC_OK};
  int64_t before[OMC_CONV_AXES], span[OMC_CONV_AXES], grids_by[OMC_CONV_AXES];
  const bool direct = sums_directly(f->group, f->cg);
  bool inside = true;
  for (int a = 0; a < OMC_CONV_AXES; a++) {
    int64_t end;
    shift_range(f->in[a], f->before[a], f->kernel[a], f->dilation[a], f->stride[a], &before[a],
                &end);
    inside &= !before[a] && end <= f->out[a];
    span[a] = before[a] + end;
    grids_by[a] = omc_min(f->stride[a], f->in[a]);
  }
  /* The last column of a twin may be one that is not there. */
  const int64_t twins = f->stride[2] == 2 && f->in[2] > 1 && !direct ? 2 : 1;
  conv_source s = {.channels = f->o,
                   .of_group = f->o / f->group,
                   .per_unit = channels_per_unit(node, direct),
                   .left = before[2],
                   .phases = 1,
                   .part = span[2],
                   .in_place = packs_stored(node) && !direct && inside && f->in[2] % twins == 0};
  OMC_TRY(choose_rows(&make, f->out, before, span, &s));
  const int64_t n_grids = grids_by[0] * grids_by[1] * grids_by[2];
  const int64_t most_grids =
      MOST_OF_A_TABLE * (int64_t)sizeof(int64_t) / (int64_t)sizeof(conv_grid);
  const int64_t weights = f->o / f->group * n_taps(f);
  if (n_grids > most_grids || weights > MOST_OF_A_TABLE)
    OMC_NODE_FAIL(node, EUNSUPPORTED, "%lld grids of %lld weights are too many", (long long)n_grids,
                  (long long)weights);
  conv_grid *grids = OMC_NEW_ARRAY(arena, conv_grid, omc_max(n_grids, 1));
  if (!grids) return omc_no_memory(node);
  int64_t packed = 0;
  for (int64_t i = 0; i < n_grids; i++) {
    const int64_t at[] = {i / grids_by[2] / grids_by[1], i / grids_by[2] % grids_by[1],
                          i % grids_by[2]};
    OMC_TRY(grad_grid(&make, f, &s, at, before, s.in_place ? f->out[1] : span[1], &grids[i]));
    grids[i].packed_at = packed;
    packed += f->c * omc_gemm_most_units(grids[i].depth);
  }
  const int64_t taps = n_taps(f), out_plane = f->in[0] * f->in[1] * f->in[2];
  *p = (conv_product){.direct = direct,
                      .by_channels = sums_by_channels(node, f->group, f->cg, f->o / f->group,
                                                      source_plane(&s) + out_plane),
                      .images = f->n,
                      .groups = f->group,
                      .m = f->cg,
                      .weight_row = taps,
                      .weight_group = f->o / f->group * f->cg * taps,
                      .source_group = group_planes(&s) * source_plane(&s),
                      .out_plane = out_plane,
                      .source = s,
                      .n_grids = n_grids,
                      .twins = twins,
                      .grids = grids,
                      .packed = packed};
  p->pass = s.in_place ? omc_max(f->n, 1) : images_per_pass(node, f, &s);
  return plan_winograd(&make, f, true, &p->winograd);
}

static omc_status params_grad_input(const omc_node *node, omc_arena *arena, void *params) {
  omc_conv_form f;
  omc_shape shape;
  OMC_TRY(omc_conv_grad_form_of(node, true, &shape, &f));
  return decode_gradient(node, &f, arena, params);
}

static omc_status params_transpose(const omc_node *node, omc_arena *arena, void *params) {
  omc_conv_form f;
  omc_shape shape;
  OMC_TRY(omc_conv_transpose_form_of(node, &shape, &f));
  return decode_gradient(node, &f, arena, params);
}

/* Sets *out where Winograd's transform repays for the gradient of a weight. */
static omc_status plan_winograd_weight(table_maker *make, const omc_conv_form *f,
                                       const conv_winograd_weight **out) {
  const omc_node *node = make->node;
  const int64_t tiles_h = omc_ceil_div(f->out[1], 2), tiles_w = omc_ceil_div(f->out[2], 2);
  *out = NULL;
  if (!repays_winograd(node, f, f->n * tiles_h * tiles_w)) return OMC_OK;
  conv_winograd_weight *p = OMC_NEW(make->arena, conv_winograd_weight);
  if (!p) return omc_no_memory(node);
  *p = (conv_winograd_weight){
      .tiles_h = tiles_h,
      .tiles_w = tiles_w,
      .source = {.channels = f->c,
                 .of_group = f->c,
                 .per_unit = 1,
                 .left = f->before[2],
                 .phases = 1,
                 .part = 2 * tiles_w + 2},
      .gradient = {
          .channels = f->o, .of_group = f->o, .per_unit = 1, .phases = 1, .part = 2 * tiles_w}};
  OMC_TRY(choose_rows(make, f->in, f->before, (int64_t[]){1, 2 * tiles_h + 2}, &p->source));
  OMC_TRY(choose_rows(make, f->out, (int64_t[]){0, 0}, (int64_t[]){1, 2 * tiles_h}, &p->gradient));
  p->pass = images_per_pass(node, f, &p->source);
  *out = p;
  return OMC_OK;
}

static omc_status params_grad_weight(const omc_node *node, omc_arena *arena, void *params) {
  table_maker make = {node, arena, OMC_OK};
  conv_weight_grad *p = params;
  omc_conv_form f;
  omc_shape shape;
  OMC_TRY(omc_conv_grad_form_of(node, false, &shape, &f));
  const bool direct = sums_directly(f.group, omc_max(f.o / f.group, f.cg));
  int64_t span[OMC_CONV_AXES];
  window_spans(&f, span);
  const bool by_channels =
      sums_by_channels(node, f.group, f.o / f.group, f.cg,
                       span[0] * span[1] * span[2] + f.out[0] * f.out[1] * f.out[2]);
  const int64_t phases = direct && !by_channels ? f.stride[2] : 1;
  *p = (conv_weight_grad){
      .direct = direct,
      .by_channels = by_channels,
      .images = f.n,
      .groups = f.group,
      .m = f.o / f.group,
      .c = f.cg,
      .taps = n_taps(&f),
      .kw = f.kernel[2],
      .dw = f.dilation[2],
      .sw = f.stride[2],
      .rows = f.out[0] * f.out[1],
      .cols = f.out[2],
      .row_at = place_rows(&make, f.out, f.stride, span[1], 1, 0),
      .tap_at = place_rows(&make, f.kernel, f.dilation, span[1], 1, 0),
      .source = {.channels = f.c,
                 .of_group = f.c,
                 .per_unit = 1,
                 .left = f.before[2],
                 .phases = phases,
                 .part = omc_ceil_div(span[2], phases)},
      .columns = omc_ceil_div(n_taps(&f) * f.cg, OMC_GEMM_MAX_NR) * OMC_GEMM_MAX_NR};
  if (make.status != OMC_OK) return make.status;
  OMC_TRY(choose_rows(&make, f.in, f.before, span, &p->source));
  p->pass = images_per_pass(node, &f, &p->source);
  return plan_winograd_weight(&make, &f, &p->winograd);
}

static size_t product_workspace(const omc_node *node, const void *params, int threads) {
  const conv_product *p = params;
  const conv_winograd *w = p->winograd;
  const int64_t transformed =
      !w ? 0
         : omc_whole_vectors(16 * w->m * w->c) +
               omc_whole_vectors(w->pass * source_image(&w->source) + SLACK) +
               threads * winograd_thread(w);
  const int64_t elements =
      p->by_channels ? threads * channels_thread(p)
      : p->direct ? threads * (direct_thread(&p->source, p->groups) + direct_weights(p))
                  : omc_whole_vectors(p->packed) + product_source(p) + threads * product_thread(p);
  return (size_t)omc_max(elements, transformed) * omc_acc_size(stored(node));
}

static size_t grad_weight_workspace(const omc_node *node, const void *params, int threads) {
  const conv_weight_grad *p = params;
  const size_t size = omc_acc_size(stored(node));
  if (p->by_channels) return (size_t)(channel_sums(p) + threads * channels_grad_thread(p)) * size;
  if (p->direct)
    return (size_t)(threads * direct_thread(&p->source, p->groups)) * size +
           omc_sums_bytes(stored(node), threads * direct_gradient(p));
  const conv_winograd_weight *w = p->winograd;
  const int64_t sums = omc_whole_vectors(p->groups * p->m * p->columns);
  const int64_t plain = grad_source(p) + threads * grad_thread(p);
  const int64_t transformed = !w ? 0
                                 : winograd_products(p) + winograd_copy(p, &w->source) +
                                       winograd_copy(p, &w->gradient) +
                                       threads * winograd_weight_thread(p);
  return (size_t)(sums + omc_max(plain, transformed)) * size;
}

OMC_KERNELS_PAIRS(Conv)
OMC_KERNELS_PAIRS(ConvGradWeight)

#define CONV(name, params) \
  OMC_CPU_OP(name, Conv, OMC_PARAMS(conv_product, params), .workspace = product_workspace)
CONV(Conv, params_conv)
CONV(ConvTranspose, params_transpose)
CONV(ConvGradInput, params_grad_input)
OMC_CPU_OP(ConvGradWeight, ConvGradWeight, OMC_PARAMS(conv_weight_grad, params_grad_weight),
           .workspace = grad_weight_workspace)

#endif
