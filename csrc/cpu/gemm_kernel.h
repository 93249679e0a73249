/* The serial part of GEMM, compiled per variant: packing, micro-kernels and the block product.
 *
 * Panels are made of units: a number of what is computed in, to which 16-bit operands are converted
 * as they are packed; or, in the variants of pairs, two numbers of 16 bits that follow each other
 * along K, of which one instruction adds up both products in f32. A unit has OMC_DEPTH elements of
 * K; the last one is padded with zeros, and every block of K begins at a whole one, whatever is
 * cut.
 *
 * Packed layouts. A block of m rows is cut into omc_gemm_panels(m) panels of nearly equal height
 * h; panel after panel, k columns of h units each: no padding, whatever m is. A block of n
 * columns is cut into panels of OMC_NR columns; panel after panel, k rows of OMC_NR units
 * each, the last panel filled up with zeros, or with its last column again. Every element of C sums
 * its products in order of k by one chain of multiply-adds per K block, so results do not depend on
 * how the work is cut.
 *
 * For matrix tiles (OMC_TILES, see cpu/gemm_tiles.h) units come in groups of OMC_GROUP, with which
 * every block of K begins. Panels of A are of OMC_MR rows but the last, and hold group after group,
 * each h rows of OMC_GROUP units; the last group is padded with zeros. */
#ifndef OMC_CPU_GEMM_KERNEL_H
#define OMC_CPU_GEMM_KERNEL_H

#include "base/alloc.h"
#include "base/int.h"
#include "cpu/gemm.h"
#include "cpu/kernel.h"
#include "cpu/shuffle.h"

/* Blocks of M and K keep packed A within L2, of N and K packed B within a core's share of L3; of K
 * in units. */
#define OMC_GEMM_MC 182
#define OMC_GEMM_KC 768
#define OMC_GEMM_NC 1024
#define OMC_GEMM_FEW 16         /* rows or columns: see cpu/gemm_lines_variant.c */
#define OMC_GEMM_LONG 64        /* elements of K from which on it pays to sum across lanes */
#define OMC_GEMM_SUMS (1 << 20) /* elements of C that are summed up apart */
#define OMC_GEMM_MAX_NR (2 * OMC_MAX_VL) /* of any variant */
#define OMC_GEMM_SLACK OMC_MAX_VL        /* units that packing may write past the last */

/* Part i of n cut into `parts` nearly equal parts starts here. */
static inline int64_t omc_cut(int64_t n, int64_t parts, int64_t i) { return n * i / parts; }

/* Units that k of them take in a row of packed A, in any variant. */
static inline int64_t omc_gemm_most_units(int64_t k) { return omc_whole_vectors(k); }

/* Units of a packed block of an m x k matrix A. */
static inline int64_t omc_gemm_packed_a(int64_t m, int64_t k) {
  const int64_t mb = omc_min(m, OMC_GEMM_MC), kb = omc_min(omc_gemm_most_units(k), OMC_GEMM_KC);
  return omc_whole_vectors(mb * kb + OMC_GEMM_SLACK);
}

/* Units of a k x n matrix B that is packed as a whole, and of a packed block of it. */
static inline int64_t omc_gemm_whole_b(int64_t n, int64_t k) {
  return omc_ceil_div(n, OMC_GEMM_MAX_NR) * OMC_GEMM_MAX_NR * k;
}
static inline int64_t omc_gemm_packed_b(int64_t n, int64_t k) {
  return omc_gemm_whole_b(omc_min(n, OMC_GEMM_NC), omc_min(k, OMC_GEMM_KC));
}

/* Units of the few lines of a product. */
static inline int64_t omc_gemm_few_lines(int64_t k) { return OMC_GEMM_FEW * omc_whole_vectors(k); }

/* Should C be stored narrower than it is computed in: rows of it that are summed up apart while
 * there are more blocks of K, and how many sums these are at most, of a part of C too. */
typedef struct omc_gemm_apart {
  int64_t rows, sums;
} omc_gemm_apart;

static inline omc_gemm_apart omc_gemm_apart_of(int64_t m, int64_t n, int64_t k) {
  const int64_t nb = omc_min(n, OMC_GEMM_NC), rows = omc_min(m, OMC_GEMM_SUMS / omc_max(nb, 1));
  const int64_t most = omc_min(m * nb, OMC_GEMM_SUMS);
  return (omc_gemm_apart){.rows = rows, .sums = k > OMC_GEMM_KC ? omc_whole_vectors(most) : 0};
}

/* What a variant multiplies with: any shapes, few rows or columns that lie along K, and packing B.
 */
typedef struct omc_gemm_fns {
  void (*serial)(const omc_gemm_args *g, void *workspace);
  void (*few_rows)(const omc_gemm_args *g, void *workspace);
  void (*few_cols)(const omc_gemm_args *g, void *workspace);
  void (*pack)(const omc_gemm_args *g, void *out);
} omc_gemm_fns;

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

#define OMC_NV 2 /* vectors across a tile of C */
#define OMC_NR (OMC_NV * OMC_VL)

/* Rows of a tile: as many as leave registers for a row of B and one element of A, or those of two
 * matrix tiles. */
#if defined(OMC_TILES)
#define OMC_MR 32
#elif OMC_VL * OMC_NV == 32
#define OMC_MR 14
#define OMC_GEMM_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14)
#elif OMC_VL * OMC_NV == 16
#define OMC_MR 6
#define OMC_GEMM_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6)
#else
#define OMC_MR 4
#define OMC_GEMM_ROWS(X) X(1) X(2) X(3) X(4)
#endif

/* Most rows of a block: whole panels. */
#define OMC_MC (OMC_GEMM_MC / OMC_MR * OMC_MR)

#if defined(OMC_TILES)
#define OMC_GROUP OMC_VL
#else
#define OMC_GROUP 1
#endif

static inline int64_t omc_gemm_panels(int64_t m) { return omc_ceil_div(m, OMC_MR); }

/* The first of m rows that panel p has; that of the panel after the last: m. */
static inline int64_t omc_gemm_row(int64_t m, int64_t p) {
  return OMC_GROUP > 1 ? omc_min(p * OMC_MR, m) : omc_cut(m, omc_gemm_panels(m), p);
}

/* Units that k of them take in a row of packed A. */
static inline int64_t omc_gemm_units(int64_t k) { return omc_ceil_div(k, OMC_GROUP) * OMC_GROUP; }

/* Block i of k units cut into nearly equal blocks, of whole groups, starts here. */
static inline int64_t omc_gemm_cut(int64_t k, int64_t blocks, int64_t i) {
  return omc_min(omc_cut(omc_ceil_div(k, OMC_GROUP), blocks, i) * OMC_GROUP, k);
}

/* Whether the compiler knows the variant's instructions. */
#if defined(OMC_TILES) && defined(OMC_STORAGE_IS_F16)
#define OMC_GEMM_KNOWN OMC_HAS_TILES_F16
#elif defined(OMC_TILES)
#define OMC_GEMM_KNOWN OMC_HAS_TILES
#else
#define OMC_GEMM_KNOWN 1
#endif

/* The variant's own names; those of the type computed in serve whatever is stored. */
#if defined(OMC_KIND_IS_PAIRS)
#define OMC_GEMM_COMPILED OMC_GEMM_KNOWN
#define OMC_GEMM_NAME(name) OMC_PASTE3(omc_gemm_, name, OMC_VARIANT)
#define OMC_DEPTH 2
typedef acc_bits_t omc_unit;
typedef vmask omc_vunit;
#else
#define OMC_GEMM_COMPILED OMC_STORES_ACC
#define OMC_GEMM_NAME(name) OMC_PASTE3(omc_gemm_, name, OMC_COMPUTE_VARIANT)
#define OMC_DEPTH 1
typedef acc_t omc_unit;
typedef vacc_t omc_vunit;
#endif

/* Row k of a vector across a panel of B is at from + at[k]. Not for matrix tiles. */
typedef struct omc_places {
  const omc_unit *from;
  const int64_t *at;
} omc_places;

/* One K block, of k units: what is stored to `to` is alpha * A B + beta * from + bias. Both
 * operands are packed, or B is in place, or apart, or packed here, each panel before it is used,
 * while the next one is fetched. `from` and `to` are m x n and may be the same. */
typedef struct omc_gemm_block {
  int64_t m, n, k;
  const omc_unit *a;      /* packed */
  const omc_unit *b;      /* packed, */
  int64_t b_units;        /* in panels of so many units along K; 0: of k */
  omc_unit *b_packs;      /* room for the panels of B that are packed here, else NULL */
  int64_t b_pack_step;    /* units from one such panel to the next; 0: each takes the last one's */
  omc_matrix b_stored;    /* what they are packed of */
  int64_t b_stored_k;     /* its elements along K */
  const omc_unit *b_rows; /* whole panels are read here instead if not NULL: row-major B */
  int64_t b_rs;           /* its row stride */
  const omc_places *b_at; /* the one panel is read there instead if not NULL: OMC_NV of them */
  omc_matrix from, to;    /* cs 1 */
  acc_t alpha, beta;      /* beta 0: `from` is not read */
  const void *bias;       /* n of the dtype of `to`, or NULL */
  const void *row_bias;   /* m of it, or NULL */
} omc_gemm_block;

void OMC_GEMM_NAME(multiply)(const omc_gemm_block *block);

/* The unit of elements x, .. of line i goes to out[x / OMC_DEPTH * width + i], for `lines` rows of
 * `src` of k elements each. Up to OMC_VL lines whole vectors are written, in rising order: past
 * line and past the end. */
void OMC_GEMM_NAME(pack_lines)(const omc_matrix *src, int64_t lines, int64_t k, int64_t width,
                               omc_unit *out);

/* Makes the k columns of h units each of a panel of A its groups, in place. */
#if defined(OMC_TILES)
void OMC_GEMM_NAME(group)(omc_unit *panel, int64_t h, int64_t k);
#else
static inline void OMC_GEMM_NAME(group)(omc_unit *panel, int64_t h, int64_t k) {
  (void)panel, (void)h, (void)k;
}
#endif

/* Blocks of m x k of A and of k x n of B. */
void OMC_GEMM_NAME(pack_a)(const omc_matrix *a, int64_t m, int64_t k, omc_unit *out);
void OMC_GEMM_NAME(pack_b)(const omc_matrix *b, int64_t k, int64_t n, omc_unit *out);

/* Products of few rows or columns, see cpu/gemm_lines_variant.c. */
void OMC_GEMM_NAME(few_rows)(const omc_gemm_args *g, void *workspace);
void OMC_GEMM_NAME(few_cols)(const omc_gemm_args *g, void *workspace);

#endif

#endif
