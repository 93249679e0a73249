/* What conv.c decodes for the kernels of the convolutions.
 *
 * Conv and the gradient of its input are the same product (conv_product_variant.c). A row is an
 * output channel, a column a pixel of the output grid of any image, and the depth runs over
 * (channel, tap); element (k, j) of the right side is source[column_at(j) + source_at[k]] in a
 * copy of the source with its padding written out, columns of one residue modulo the stride side
 * by side. Of the space dims all but the last are rows, which tables find. Conv is one grid. The
 * input's gradient is one grid per residue of an input pixel modulo the strides, each with the taps
 * that meet it, so that nothing is added up in memory; of two grids that alternate along rows both
 * are computed for the same columns, and stored lane by lane in turn. Where products of 16 bits are
 * summed in pairs, the two are of neighbouring channels: the copy holds units of both, so that it
 * is packed as numbers are.
 *
 * In the gradient of the weight (conv_weight_variant.c) a row is an output channel, a column
 * (tap, channel), and the depth runs over pixels of all images; the source is copied with
 * channels innermost, of pairs twice, so that each two neighbours are a unit of one of the copies.
 *
 * The right side is packed straight from the copy, or for few rows read there as far as whole
 * vectors of a panel lie together: no column matrix is ever stored. Groups of few
 * channels have nothing to pack for and are summed directly, by vectors of pixels
 * (conv_direct_variant.c) or, of depthwise kernels on planes that are not large, of channels
 * (conv_channels_variant.c). Kernels of 3 x 3 with steps of 1 go by way of Winograd's transform
 * where they are large enough to repay it (conv_winograd_variant.c for both products,
 * conv_winograd_weight_variant.c). Where products of 16 bits are summed in pairs they do not: what
 * the transform saves of multiplications, a factor of 2.25, the pairs save nearly as well, without
 * transforms and what these round. */
#ifndef OMC_CPU_OPS_CONV_H
#define OMC_CPU_OPS_CONV_H

#include "base/int.h"
#include "cpu/gemm_kernel.h"
#include "cpu/kernel.h"
#include "cpu/rows.h"
#include "ops/forms.h"

/* ROWS x COLS is the most of an output block that a thread holds while its depth is summed, DEPTH
 * units at a time. */
enum { ROWS = 512, COLS = 128, DEPTH = 512, SLACK = OMC_GEMM_SLACK };

/* Taps of a kernel up to which rows of weights that lie side by side are packed together. */
enum { MOST_TOGETHER = DEPTH / 2 };

/* A copy of the planes of a tensor [images, channels, h, w], whose space dims but the last are one:
 * `rows` rows, each of `phases` parts of `part` elements, part q holding columns q, q + phases, ...
 * counted from `left` before the plane. An element holds `per_unit` channels of a group, 1 or 2. A
 * last channel without a second may be copied twice: first each row with the one `below` it by so
 * many, then by itself. */
typedef struct {
  int64_t channels, of_group, per_unit, h, w;
  int64_t below; /* 0: not so */
  int64_t rows, left, phases, part;
  const int64_t *row_from; /* rows: which of the h this is, or -1: zeros */
  bool in_place;           /* the tensor itself will do, as it stores what is computed in */
} conv_source;

/* One grid of output pixels. Its depth is counted in units of `per_unit` channels. */
typedef struct {
  int64_t depth;                 /* units */
  int64_t whole, stacked;        /* so many, the first, are of two channels; the next of two rows */
  const int64_t *weight_at;      /* depth: from the start of a row of weights */
  int64_t weight_next, row_next; /* from there to the weight of the second channel, or row */
  int64_t run;                   /* weights of so many whole units at a time lie side by side */
  int64_t met;                   /* so many units of each channel, whose rows lie side by side;
                                    0: rows lie apart */
  const int64_t *source_at;      /* depth: from where the column is */
  int64_t rows, cols;            /* of the grid */
  const int64_t *row_at, *out_at; /* rows: of a row in a plane of the source, of the output */
  int64_t out_col;                /* from one column to the next in the output */
  int64_t packed_at;              /* of the packed weights */
} conv_grid;

/* A convolution of 3 x 3 with steps of 1 by conv_winograd_variant.c. The source is copied with
 * phases 2: even columns, then odd ones. */
typedef struct {
  int64_t images, pass;
  int64_t c, m; /* channels of the source and of the output */
  int64_t oh, ow;
  int64_t weight_row, weight_col; /* element steps from one m, and from one c, to the next */
  bool flip;                      /* taps are taken in reverse order */
  conv_source source;
} conv_winograd;

typedef struct {
  bool direct, by_channels;      /* the second only with the first */
  const conv_winograd *winograd; /* NULL: not so; else tried first */
  int64_t images, pass;          /* all, and as many as are copied at a time */
  int64_t groups;
  int64_t m;                                      /* output channels of a group */
  int64_t weight_row, weight_group, source_group; /* element steps */
  int64_t out_plane;                              /* elements */
  conv_source source;
  int64_t n_grids, twins; /* so many neighbours at a time alternate along rows: 1 or 2 */
  const conv_grid *grids;
  int64_t packed; /* elements of all packed weights */
} conv_product;

/* The gradient of its weight by conv_winograd_weight_variant.c. Both tensors are copied with
 * channels innermost. */
typedef struct {
  int64_t pass, tiles_h, tiles_w; /* images copied at a time, and tiles of an image */
  conv_source source, gradient;
} conv_winograd_weight;

typedef struct {
  bool direct, by_channels;
  const conv_winograd_weight *winograd; /* NULL: not so; else tried first */
  int64_t images, pass, groups;
  int64_t m, c; /* output and input channels of a group */
  int64_t taps, kw, dw, sw;
  int64_t rows, cols;             /* of an output plane */
  const int64_t *row_at, *tap_at; /* rows, taps / kw: rows of the source */
  conv_source source; /* direct, by pixels: as for Conv; else phases 1, and where nothing is direct
                         stored [rows, part, channels], or as units, of columns 0 and 1, 2 and 3,
                         .., and of 1 and 2, 3 and 4, ..: [rows, 2, part / 2, channels] */
  int64_t columns;    /* taps * c, padded */
} conv_weight_grad;

static inline int64_t source_plane(const conv_source *s) {
  return s->in_place ? s->h * s->w : s->rows * s->phases * s->part;
}
static inline int64_t group_planes(const conv_source *s) {
  return omc_ceil_div(s->of_group, s->in_place ? 1 : s->per_unit) + (s->below > 0);
}
static inline int64_t source_planes(const conv_source *s) {
  return s->of_group ? s->channels / s->of_group * group_planes(s) : 0;
}
static inline int64_t source_image(const conv_source *s) {
  return source_planes(s) * source_plane(s);
}

/* Parts of a workspace, in elements of what is computed in. Direct: a group's copied planes for
 * each thread. */
static inline int64_t direct_thread(const conv_source *s, int64_t groups) {
  return omc_whole_vectors(source_image(s) / groups + SLACK);
}

/* And the weights of a grid. */
static inline int64_t direct_weights(const conv_product *p) {
  int64_t most = 0;
  for (int64_t i = 0; i < p->n_grids; i++) most = omc_max(most, p->grids[i].depth);
  return omc_whole_vectors(most);
}

/* And the gradient of a group's weights. */
static inline int64_t direct_gradient(const conv_weight_grad *p) { return p->m * p->c * p->taps; }

/* By channels: for each thread the copied planes of a block of them, the output's, and the weights
 * of all grids. */
static inline int64_t channels_thread(const conv_product *p) {
  int64_t depth = 0;
  for (int64_t i = 0; i < p->n_grids; i++) depth += p->grids[i].depth;
  return (source_plane(&p->source) + p->out_plane + depth) * OMC_MAX_VL;
}

/* Gradients of weights: sums for parts of the images, as many whatever the number of threads is,
 * and for each thread the planes of a block, of the source and of the output. */
static inline int64_t channel_parts(const conv_weight_grad *p) { return omc_min(p->images, 8); }
static inline int64_t channel_sums(const conv_weight_grad *p) {
  return omc_whole_vectors(p->groups) * channel_parts(p) * p->taps;
}
static inline int64_t channels_grad_thread(const conv_weight_grad *p) {
  return (source_plane(&p->source) + p->rows * p->cols) * OMC_MAX_VL;
}

/* Else the packed weights, the copy of a pass, and for each thread a panel of B and blocks of C. */
static inline int64_t product_thread(const conv_product *p) {
  return DEPTH * OMC_GEMM_MAX_NR + p->twins * ROWS * COLS + 3 * SLACK;
}
static inline int64_t product_source(const conv_product *p) {
  return p->source.in_place ? 0 : omc_whole_vectors(p->pass * source_image(&p->source) + SLACK);
}

/* Or the gradient with taps outermost, the copy of a pass, and for each thread blocks of B, A. */
static inline int64_t grad_thread(const conv_weight_grad *p) {
  return DEPTH * (OMC_GEMM_MAX_NR + omc_min(p->m, ROWS)) + 4 * SLACK;
}
static inline int64_t grad_source(const conv_weight_grad *p) {
  return omc_whole_vectors(p->pass * source_image(&p->source) + SLACK);
}

/* Or the transformed kernels, the copy of a pass, and for each thread transforms of TILES tiles. */
enum { TILES = 64 };
static inline int64_t winograd_tiles(const conv_winograd *p) {
  return omc_ceil_div(p->oh, 2) * omc_ceil_div(p->ow, 2);
}
static inline int64_t winograd_pitch(void) { return TILES + SLACK; }
static inline int64_t winograd_thread(const conv_winograd *p) {
  return 16 * (p->c + p->m) * winograd_pitch();
}

/* For its weight: sums, products, the copies of a pass, and for each thread both sides of four
 * products over BLOCK_TILES tiles. */
enum { BLOCK_TILES = 128 };
static inline int64_t winograd_columns(const conv_weight_grad *p) {
  return omc_ceil_div(p->c, OMC_GEMM_MAX_NR) * OMC_GEMM_MAX_NR;
}
static inline int64_t winograd_products(const conv_weight_grad *p) {
  return 16 * p->m * winograd_columns(p);
}
static inline int64_t winograd_copy(const conv_weight_grad *p, const conv_source *s) {
  return omc_whole_vectors(p->winograd->pass * source_image(s) + SLACK);
}
static inline int64_t winograd_weight_thread(const conv_weight_grad *p) {
  return 4 * (BLOCK_TILES * (p->m + winograd_columns(p)) + SLACK);
}

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

#define OMC_CONV_NAME(name) OMC_PASTE3(omc_conv_, name, OMC_VARIANT)

/* For kernels that are the same whatever panels hold. */
#if defined(OMC_KIND_IS_PAIRS)
#if defined(OMC_STORAGE_IS_BF16)
#define OMC_CONV_STORED(name) OMC_PASTE3(omc_conv_, name, bf16_avx512)
#else
#define OMC_CONV_STORED(name) OMC_PASTE3(omc_conv_, name, f16_avx512)
#endif
#else
#define OMC_CONV_STORED OMC_CONV_NAME
#endif

/* Turns lines of units as they are. */
#if OMC_DEPTH == 2
void omc_gemm_pack_lines_f32_avx512(const omc_matrix *src, int64_t lines, int64_t k, int64_t width,
                                    acc_t *out);
#define OMC_TURN_UNITS omc_gemm_pack_lines_f32_avx512
#else
#define OMC_TURN_UNITS OMC_GEMM_NAME(pack_lines)
#endif

/* An element that is packed with others: a number that is computed with or, for panels of pairs, as
 * it is stored. */
#if defined(OMC_KIND_IS_PAIRS)
typedef storage_t conv_element;
#else
typedef acc_t conv_element;
#endif

/* Writes the copy of one plane, or of two that share their units, the second `next` elements after
 * the first; 0: there is none. */
void OMC_CONV_NAME(copy_plane)(const conv_source *s, const storage_t *plane, int64_t next,
                               omc_unit *out);

/* Copies images, channels innermost. */
void OMC_CONV_NAME(copy_channels_last)(const conv_source *s, const storage_t *tensor, int64_t first,
                                       int64_t images, int threads, conv_element *out);

/* Stores n elements, in turn those of a and of b. */
OMC_INLINE void store_in_turn(vacc_t a, vacc_t b, int64_t n, storage_t *out) {
  const vacc_t low = OMC_ZIP_LOW(a, b), high = OMC_ZIP_HIGH(a, b);
  vst_upto(out, low, n);
  if (n > OMC_VL) vst_upto(out + OMC_VL, high, n - OMC_VL);
}

/* Conv of groups of few channels, by vectors of pixels and of channels. */
omc_status OMC_CONV_STORED(direct)(const omc_kernel_args *args);
omc_status OMC_CONV_STORED(channels)(const omc_kernel_args *args);

/* And ConvGradWeight. */
omc_status OMC_CONV_STORED(direct_weight)(const omc_kernel_args *args);
omc_status OMC_CONV_STORED(channels_weight)(const omc_kernel_args *args);

/* By Winograd's transform. Whether all that it computed is finite; else the definition may have
 * another result. */
bool OMC_CONV_STORED(winograd)(const omc_kernel_args *args, const conv_winograd *p) OMC_MUST_USE;
bool OMC_CONV_STORED(winograd_weight)(const omc_kernel_args *args,
                                      const conv_weight_grad *p) OMC_MUST_USE;

/* Columns next to each other in a panel and in memory, at most two vectors of them. */
typedef struct {
  int64_t to, from, n;
} conv_chunk;

/* Cuts the n columns of a panel, column j lying at at[j], into chunks of `most` columns or fewer;
 * returns how many. */
int64_t OMC_CONV_NAME(cut_chunks)(const int64_t *at, int64_t n, int64_t most, conv_chunk *out);

#define OMC_NOWHERE INT64_MIN

/* Packs element k of depth of a panel from the chunks at source + at[k], for `depth` of them; the
 * last of a unit may be OMC_NOWHERE, which is zeros. Vectors are moved whole, past the end of a
 * chunk, of the panel and of the source; `exact`: not of the source, of chunks that are of a vector
 * at most. */
void OMC_CONV_NAME(pack_panel)(const conv_element *source, const int64_t *at, int64_t depth,
                               const conv_chunk *chunks, int64_t count, bool exact, omc_unit *out);

#endif

#endif
