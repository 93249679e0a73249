/* The serial part of GEMM, compiled per variant: packing, micro-kernels and the block product.
 *
 * Packed layouts. A block of m rows is cut into omc_gemm_panels(m) panels of nearly equal height
 * h; panel after panel, k columns of h elements each: no padding, whatever m is. A block of n
 * columns is cut into panels of OMC_NR columns; panel after panel, k rows of OMC_NR elements
 * each, the last panel padded with zeros. Every element of C sums its products in order of k by
 * one FMA chain per K block, so results do not depend on how the work is cut. */
#ifndef OMC_CPU_GEMM_KERNEL_H
#define OMC_CPU_GEMM_KERNEL_H

#include "base/alloc.h"
#include "base/int.h"
#include "cpu/gemm.h"
#include "cpu/kernel.h"

/* Blocks of M and K keep packed A within L2, of N and K packed B within a core's share of L3. */
#define OMC_GEMM_MC 336
#define OMC_GEMM_KC 384
#define OMC_GEMM_NC 1024
#define OMC_GEMM_SUMS 672                /* rows of C that are summed up apart, if it is narrower */
#define OMC_GEMM_MAX_NR (2 * OMC_MAX_VL) /* of any variant */
#define OMC_GEMM_SLACK OMC_MAX_VL        /* elements that packing may write past the last */

/* Part i of n cut into `parts` nearly equal parts starts here. */
static inline int64_t omc_cut(int64_t n, int64_t parts, int64_t i) { return n * i / parts; }

/* Elements of a packed block of an m x k matrix A. */
static inline int64_t omc_gemm_packed_a(int64_t m, int64_t k) {
  const int64_t mb = m < OMC_GEMM_MC ? m : OMC_GEMM_MC, kb = k < OMC_GEMM_KC ? k : OMC_GEMM_KC;
  return omc_whole_vectors(mb * kb + OMC_GEMM_SLACK);
}

/* Elements of a packed block of a k x n matrix B. */
static inline int64_t omc_gemm_packed_b(int64_t n, int64_t k) {
  const int64_t nb = omc_min(n, OMC_GEMM_NC), kb = omc_min(k, OMC_GEMM_KC);
  return omc_ceil_div(nb, OMC_GEMM_MAX_NR) * OMC_GEMM_MAX_NR * kb;
}

/* Elements of what is converted, should operands be stored narrower than they are computed in:
 * blocks of A and B, sums of C, and both biases. */
typedef struct omc_gemm_wide {
  int64_t a, b, sums, bias, row_bias;
} omc_gemm_wide;

static inline omc_gemm_wide omc_gemm_wide_of(int64_t m, int64_t n, int64_t k) {
  const int64_t nb = omc_min(n, OMC_GEMM_NC), kb = omc_min(k, OMC_GEMM_KC);
  const int64_t mb = omc_min(m, OMC_GEMM_SUMS);
  return (omc_gemm_wide){.a = omc_whole_vectors(omc_min(m, OMC_GEMM_MC) * kb),
                         .b = omc_whole_vectors(kb * nb),
                         .sums = omc_whole_vectors(mb * nb),
                         .bias = omc_whole_vectors(nb),
                         .row_bias = omc_whole_vectors(mb)};
}

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

#if defined(__clang__)
#define OMC_UNROLL _Pragma("unroll")
#else
#define OMC_UNROLL _Pragma("GCC unroll 16")
#endif

/* The first (second) halves of a and b, lane by lane in turn. */
#if defined(__clang__)
#define OMC_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define OMC_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vmask){__VA_ARGS__})
#endif
#if OMC_VL == 16
#define OMC_ZIP_LOW(a, b) OMC_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define OMC_ZIP_HIGH(a, b) \
  OMC_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif OMC_VL == 8
#define OMC_ZIP_LOW(a, b) OMC_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define OMC_ZIP_HIGH(a, b) OMC_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#elif OMC_VL == 4
#define OMC_ZIP_LOW(a, b) OMC_SHUFFLE(a, b, 0, 4, 1, 5)
#define OMC_ZIP_HIGH(a, b) OMC_SHUFFLE(a, b, 2, 6, 3, 7)
#else
#define OMC_ZIP_LOW(a, b) OMC_SHUFFLE(a, b, 0, 2)
#define OMC_ZIP_HIGH(a, b) OMC_SHUFFLE(a, b, 1, 3)
#endif

#define OMC_NV 2 /* vectors across a tile of C */
#define OMC_NR (OMC_NV * OMC_VL)

/* Rows of a tile: as many as leave registers for a row of B and one element of A. */
#if OMC_VL * OMC_NV == 32
#define OMC_MR 14
#define OMC_GEMM_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14)
#elif OMC_VL * OMC_NV == 16
#define OMC_MR 6
#define OMC_GEMM_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6)
#else
#define OMC_MR 4
#define OMC_GEMM_ROWS(X) X(1) X(2) X(3) X(4)
#endif

static inline int64_t omc_gemm_panels(int64_t m) { return omc_ceil_div(m, OMC_MR); }

/* One K block of C = alpha * A B + beta * C + bias with both operands packed, or B in place. */
typedef struct omc_gemm_block {
  int64_t m, n, k;
  const acc_t *a;      /* packed */
  const acc_t *b;      /* packed */
  const acc_t *b_rows; /* whole panels are read here instead if not NULL: row-major B */
  int64_t b_rs;        /* its row stride */
  acc_t *c;
  int64_t c_rs;
  acc_t alpha, beta;     /* beta 0: C is not read */
  const acc_t *bias;     /* n or NULL */
  const acc_t *row_bias; /* m or NULL */
} omc_gemm_block;

/* Those of the type computed in serve whatever is stored. */
#define OMC_GEMM_NAME(name) OMC_PASTE3(omc_gemm_, name, OMC_COMPUTE_VARIANT)

void OMC_GEMM_NAME(multiply)(const omc_gemm_block *block);

/* out[x * width + i] = src[i * stride + x] for `lines` lines i of k elements each. Up to OMC_VL
 * lines whole vectors are written, in rising order: past line and past the end. */
void OMC_GEMM_NAME(pack_lines)(const acc_t *src, int64_t stride, int64_t lines, int64_t k,
                               int64_t width, acc_t *out);

#endif

#endif
