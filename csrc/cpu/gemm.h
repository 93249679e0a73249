/* General matrix product with fused epilogue: C = alpha * A B + beta * C, then + bias.
 *
 * Operands are described by element strides, so a transposed matrix is only another pair of
 * strides. The implementation is our own (packed panels, register-tiled micro-kernels per
 * instruction set; products of few rows or columns by lines, if operands are contiguous along K);
 * its results do not depend on the number of threads, nor on the addresses of operands.
 * OMC_GEMM=torch asks for the BLAS that torch carries, of which that cannot be said. */
#ifndef OMC_CPU_GEMM_H
#define OMC_CPU_GEMM_H

#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"

typedef struct omc_matrix {
  void *data;
  int64_t rs, cs; /* strides in elements from row to row and from column to column */
  omc_dtype dtype;
  omc_dtype
      read_as; /* of an operand: OMC_BF16, OMC_F16: numbers of f32 are rounded to it as they are
                  packed, as if they had been cast; any other: they are taken as they are */
} omc_matrix;

/* One whose rows, or whose columns, are contiguous and so many elements apart. */
static inline omc_matrix omc_matrix_rows(const void *data, int64_t apart, omc_dtype dtype) {
  return (omc_matrix){.data = (void *)(uintptr_t)data, .rs = apart, .cs = 1, .dtype = dtype};
}
static inline omc_matrix omc_matrix_columns(const void *data, int64_t apart, omc_dtype dtype) {
  return (omc_matrix){.data = (void *)(uintptr_t)data, .rs = 1, .cs = apart, .dtype = dtype};
}

/* The matrix from (row, col) on. */
static inline omc_matrix omc_matrix_part(const omc_matrix *x, int64_t row, int64_t col) {
  omc_matrix part = *x;
  part.data = (char *)x->data + (row * x->rs + col * x->cs) * (int64_t)omc_dtype_size(x->dtype);
  return part;
}

/* Columns of B, and rows of it, at whose multiples a part of what is packed may begin. */
enum { OMC_GEMM_PART = 32 };

/* What B of a product is a part of, packed; NULL: it is not. Its rows may end where those of
 * another part may begin, or where those of the whole do. */
typedef struct omc_packed {
  const void *panels;
  int64_t rows;     /* of the whole */
  int64_t row, col; /* where the part begins */
} omc_packed;

typedef struct omc_gemm_args {
  int64_t m, n, k;      /* C is m x n */
  omc_matrix a, b, c;   /* c.cs must be 1 */
  double alpha, beta;   /* beta 0: C is not read */
  const void *bias;     /* n elements of C's dtype added to every row, or NULL */
  const void *row_bias; /* m elements of C's dtype, one added to each row, or NULL */
  omc_packed b_packed;  /* is read for B, in omc_gemm_serial_part alone */
} omc_gemm_args;

/* Scratch bytes for problems up to m x n x k on that many threads whose operands are of that dtype
 * or of the one that it is computed in, and C of either. */
size_t omc_gemm_workspace(omc_dtype dtype, int64_t m, int64_t n, int64_t k, int threads);

/* Floats, each of its own dtype, all computed in the same one (f32 for 16 bits), in which every
 * element of C is summed up and then rounded once. Does not fail.
 *
 * Where both operands are numbers of bf16, or of f16, stored or read as such, and the machine has
 * instructions for it that pay (cpu/isa.c), products are summed in pairs by them: each product is
 * exact, sums are of f32, as in PyTorch on such a machine. Those of bf16, vdpbf16ps and tdpbf16ps
 * alike, take denormal numbers for zero, and give zero in place of a denormal sum; tdpfp16ps takes
 * them as they are, and its sums, of multiples of 2^-48, are never denormal. By tiles (AMX)
 * products are summed in another order than by vectors, see cpu/gemm_tiles.h. */
void omc_gemm(const omc_gemm_args *g, int threads, void *workspace);

/* On the calling thread alone, for use inside a parallel region. */
void omc_gemm_serial(const omc_gemm_args *g, void *workspace);

/* The same for what is part of something larger: sums have one order however few rows or columns
 * there are, which may hang on data. */
void omc_gemm_serial_part(const omc_gemm_args *g, void *workspace);

/* Packs B, k x n, for any products by parts of it of what has A's and C's dtypes; as long as the
 * instruction set stays the same. `out` has room for omc_gemm_packed_bytes of C's dtype. */
void omc_gemm_pack(const omc_gemm_args *g, void *out);
size_t omc_gemm_packed_bytes(omc_dtype dtype, int64_t n, int64_t k);

#endif
