/* Parameters and workspaces of Conv and its gradients. See conv.h for how they are computed. */
#include <string.h>

#include "cpu/ops/conv.h"

#ifndef OMC_VARIANT

/* Images copied at a time: some megabytes, and columns enough for many threads. */
static int64_t images_per_pass(const omc_conv_form *f, const conv_source *s, omc_dtype dtype) {
  enum { BYTES = 16 << 20, COLUMNS = 1 << 14 };
  const int64_t bytes = omc_max(source_image(s) * (int64_t)omc_dtype_size(dtype), 1);
  const int64_t by_columns = omc_ceil_div(COLUMNS, omc_max(f->oh * f->ow, 1));
  return omc_max(omc_min(omc_max(BYTES / bytes, by_columns), f->n), 1);
}

/* Groups of so few rows leave nothing to pack the right side for. */
static bool sums_directly(int64_t groups, int64_t m) { return groups > 1 && m < 4; }

static omc_status no_memory(const omc_node *node) {
  OMC_NODE_FAIL(node, ENOMEM, "no memory for kernel parameters");
}

/* Whole planes are one row where neither side has gaps between rows. */
static void join_rows(conv_grid *grid) {
  if (grid->row_step != grid->cols || grid->out_row != grid->cols * grid->out_col) return;
  grid->cols *= grid->rows;
  grid->rows = 1;
}

/* Sets *out where the form is one of 3 x 3 with steps of 1 that repays its transforms. */
static omc_status plan_winograd(const omc_node *node, const omc_conv_form *f, bool of_input,
                                omc_arena *arena, const conv_winograd **out) {
  enum { LEAST_CHANNELS = 32, LEAST_TILES = 128 };
  const bool fits = f->kh == 3 && f->kw == 3 && f->sh == 1 && f->sw == 1 && f->dh == 1 &&
                    f->dw == 1 && f->group == 1 && f->top <= 2 && f->left <= 2;
  const int64_t h = of_input ? f->h : f->oh, w = of_input ? f->w : f->ow;
  const int64_t tiles_h = omc_ceil_div(h, 2), tiles_w = omc_ceil_div(w, 2);
  *out = NULL;
  if (!fits || omc_min(f->c, f->o) < LEAST_CHANNELS || f->n * tiles_h * tiles_w < LEAST_TILES)
    return OMC_OK;
  conv_winograd *p = OMC_NEW(arena, conv_winograd);
  if (!p) return no_memory(node);
  *p = (conv_winograd){.images = f->n,
                       .c = of_input ? f->o : f->c,
                       .m = of_input ? f->c : f->o,
                       .oh = h,
                       .ow = w,
                       .weight_row = of_input ? 9 : f->c * 9,
                       .weight_col = of_input ? f->c * 9 : 9,
                       .flip = of_input,
                       .source = {.channels = of_input ? f->o : f->c,
                                  .h = of_input ? f->oh : f->h,
                                  .w = of_input ? f->ow : f->w,
                                  .top = of_input ? 2 - f->top : f->top,
                                  .left = of_input ? 2 - f->left : f->left,
                                  .rows = 2 * tiles_h + 2,
                                  .phases = 2,
                                  .part = tiles_w + 1}};
  p->pass = images_per_pass(f, &p->source, omc_in(node, 0)->type.dtype);
  *out = p;
  return OMC_OK;
}

static omc_status conv_decode(const omc_node *node, omc_arena *arena, void *params) {
  conv_product *p = params;
  omc_conv_form f;
  OMC_TRY(omc_conv_form_of(node, &f));
  const int64_t taps = f.kh * f.kw, depth = f.cg * taps;
  conv_source s = {.channels = f.c,
                   .h = f.h,
                   .w = f.w,
                   .top = f.top,
                   .left = f.left,
                   .rows = (f.oh - 1) * f.sh + (f.kh - 1) * f.dh + 1,
                   .phases = f.sw,
                   .part = omc_ceil_div((f.ow - 1) * f.sw + (f.kw - 1) * f.dw + 1, f.sw)};
  const bool direct = sums_directly(f.group, f.o / f.group);
  s.in_place = !direct && !f.top && !f.left && !f.bottom && !f.right && f.sw == 1;
  conv_grid *grid = OMC_NEW(arena, conv_grid);
  int64_t *weight_at = OMC_NEW_ARRAY(arena, int64_t, depth),
          *source_at = OMC_NEW_ARRAY(arena, int64_t, depth);
  if (!grid || !weight_at || !source_at) return no_memory(node);
  const int64_t row = s.in_place ? f.w : s.phases * s.part, plane = source_plane(&s);
  for (int64_t k = 0; k < depth; k++) {
    const int64_t y = k % taps / f.kw * f.dh, x = k % f.kw * f.dw;
    weight_at[k] = k;
    source_at[k] = k / taps * plane + y * row + x % f.sw * s.part + x / f.sw;
  }
  *grid = (conv_grid){.depth = depth,
                      .weight_at = weight_at,
                      .source_at = source_at,
                      .rows = f.oh,
                      .cols = f.ow,
                      .row_step = f.sh * row,
                      .out_row = f.ow,
                      .out_col = 1};
  join_rows(grid);
  *p = (conv_product){.dtype = omc_in(node, 0)->type.dtype,
                      .direct = direct,
                      .images = f.n,
                      .groups = f.group,
                      .m = f.o / f.group,
                      .weight_row = depth,
                      .weight_group = f.o / f.group * depth,
                      .source_group = f.cg * plane,
                      .out_plane = f.oh * f.ow,
                      .source = s,
                      .n_grids = 1,
                      .grids = grid,
                      .packed = f.o * depth};
  p->pass = s.in_place ? omc_max(f.n, 1) : images_per_pass(&f, &s, p->dtype);
  return plan_winograd(node, &f, false, arena, &p->winograd);
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

/* The grid of input pixels (a, b) modulo the strides. */
static omc_status grad_grid(const omc_conv_form *f, const conv_source *s, int64_t a, int64_t b,
                            omc_arena *arena, conv_grid *grid) {
  const int64_t taps = f->kh * f->kw, og = f->o / f->group, plane = source_plane(s);
  const int64_t row = s->in_place ? f->ow : s->part;
  int64_t *weight_at = OMC_NEW_ARRAY(arena, int64_t, og *taps),
          *source_at = OMC_NEW_ARRAY(arena, int64_t, og *taps);
  if (!weight_at || !source_at)
    OMC_FAIL(ENOMEM, "no memory for a grid of %lld taps", (long long)taps);
  int64_t depth = 0, y, x;
  for (int64_t o = 0; o < og; o++)
    for (int64_t t = 0; t < taps; t++) {
      if (!tap_shift(a, f->top, t / f->kw, f->dh, f->sh, &y) ||
          !tap_shift(b, f->left, t % f->kw, f->dw, f->sw, &x))
        continue;
      weight_at[depth] = o * f->cg * taps + t;
      source_at[depth++] = o * plane + (y + s->top) * row + x + s->left;
    }
  *grid = (conv_grid){.depth = depth,
                      .weight_at = weight_at,
                      .source_at = source_at,
                      .rows = omc_ceil_div(f->h - a, f->sh),
                      .cols = omc_ceil_div(f->w - b, f->sw),
                      .row_step = row,
                      .out_at = a * f->w + b,
                      .out_row = f->sh * f->w,
                      .out_col = f->sw};
  join_rows(grid);
  return OMC_OK;
}

static omc_status grad_input_decode(const omc_node *node, omc_arena *arena, void *params) {
  conv_product *p = params;
  omc_conv_form f;
  omc_shape shape;
  OMC_TRY(omc_conv_grad_form_of(node, true, &shape, &f));
  conv_source s = {.channels = f.o, .h = f.oh, .w = f.ow, .phases = 1};
  shift_range(f.h, f.top, f.kh, f.dh, f.sh, &s.top, &s.rows);
  shift_range(f.w, f.left, f.kw, f.dw, f.sw, &s.left, &s.part);
  const bool direct = sums_directly(f.group, f.cg);
  s.in_place = !direct && !s.top && !s.left && s.rows <= f.oh && s.part <= f.ow;
  s.rows += s.top;
  s.part += s.left;
  const int64_t grids_h = omc_min(f.sh, f.h), grids_w = omc_min(f.sw, f.w);
  conv_grid *grids = OMC_NEW_ARRAY(arena, conv_grid, omc_max(grids_h * grids_w, 1));
  if (!grids) return no_memory(node);
  int64_t packed = 0;
  for (int64_t i = 0; i < grids_h * grids_w; i++) {
    OMC_TRY(grad_grid(&f, &s, i / grids_w, i % grids_w, arena, &grids[i]));
    grids[i].packed_at = packed;
    packed += f.c * grids[i].depth;
  }
  const int64_t taps = f.kh * f.kw;
  *p = (conv_product){.dtype = omc_in(node, 0)->type.dtype,
                      .direct = direct,
                      .images = f.n,
                      .groups = f.group,
                      .m = f.cg,
                      .weight_row = taps,
                      .weight_group = f.o / f.group * f.cg * taps,
                      .source_group = f.o / f.group * source_plane(&s),
                      .out_plane = f.h * f.w,
                      .source = s,
                      .n_grids = grids_h * grids_w,
                      .grids = grids,
                      .packed = packed};
  p->pass = s.in_place ? omc_max(f.n, 1) : images_per_pass(&f, &s, p->dtype);
  return plan_winograd(node, &f, true, arena, &p->winograd);
}

static omc_status grad_weight_decode(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  conv_weight_grad *p = params;
  omc_conv_form f;
  omc_shape shape;
  OMC_TRY(omc_conv_grad_form_of(node, false, &shape, &f));
  const bool direct = sums_directly(f.group, omc_max(f.o / f.group, f.cg));
  const int64_t phases = direct ? f.sw : 1, width = (f.ow - 1) * f.sw + (f.kw - 1) * f.dw + 1;
  *p = (conv_weight_grad){
      .dtype = omc_in(node, 0)->type.dtype,
      .direct = direct,
      .images = f.n,
      .groups = f.group,
      .m = f.o / f.group,
      .c = f.cg,
      .kh = f.kh,
      .kw = f.kw,
      .dh = f.dh,
      .dw = f.dw,
      .sh = f.sh,
      .sw = f.sw,
      .oh = f.oh,
      .ow = f.ow,
      .source = {.channels = f.c,
                 .h = f.h,
                 .w = f.w,
                 .top = f.top,
                 .left = f.left,
                 .rows = (f.oh - 1) * f.sh + (f.kh - 1) * f.dh + 1,
                 .phases = phases,
                 .part = omc_ceil_div(width, phases)},
      .columns = omc_ceil_div(f.kh * f.kw * f.cg, OMC_GEMM_MAX_NR) * OMC_GEMM_MAX_NR};
  p->pass = images_per_pass(&f, &p->source, p->dtype);
  return OMC_OK;
}

static size_t product_workspace(const omc_node *node, const void *params, int threads) {
  (void)node;
  const conv_product *p = params;
  const conv_winograd *w = p->winograd;
  const int64_t elements =
      p->direct ? threads * direct_thread(&p->source, p->groups)
      : w       ? align16(16 * w->m * w->c) + align16(w->pass * source_image(&w->source) + SLACK) +
                      threads * winograd_thread(w)
                : align16(p->packed) + product_source(p) + threads * product_thread();
  return (size_t)elements * omc_dtype_size(p->dtype);
}

static size_t grad_weight_workspace(const omc_node *node, const void *params, int threads) {
  (void)node;
  const conv_weight_grad *p = params;
  const int64_t elements = p->direct ? threads * direct_thread(&p->source, p->groups)
                                     : align16(p->groups * p->m * p->columns) + grad_source(p) +
                                           threads * grad_thread(p);
  return (size_t)elements * omc_dtype_size(p->dtype);
}

#define CONV(name, params_t, decode, workspace_) \
  OMC_KERNELS(name)                              \
  OMC_CPU_OP(name, name, OMC_PARAMS(params_t, decode), .workspace = workspace_)
CONV(Conv, conv_product, conv_decode, product_workspace)
CONV(ConvGradInput, conv_product, grad_input_decode, product_workspace)
CONV(ConvGradWeight, conv_weight_grad, grad_weight_decode, grad_weight_workspace)

#endif
