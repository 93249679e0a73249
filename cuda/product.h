/* Products of matrices by cuBLASLt, planned once and run many times, and copies of what goes into
 * them. */
#ifndef OMC_CUDA_PRODUCT_H
#define OMC_CUDA_PRODUCT_H

#include "cuda/api.h"
#include "cuda/launch.h"

/* Of workspace, bytes. */
enum { OMC_PRODUCT_ALIGNMENT = 256 };

/* Copies of elements from one dtype to another; see cuda/gpu/repeat.h. */
omc_status omc_cuda_repeat_of(omc_cuda_device *device, omc_dtype from, omc_dtype to,
                              omc_cuda_kernel *out) OMC_MUST_USE;

/* y[i] = x[i % n], for i below count. */
omc_status omc_cuda_repeat(omc_cuda_kernel *kernel, void *y, const void *x, int64_t count,
                           int64_t n, void *queue) OMC_MUST_USE;

/* What cuBLASLt has last said of operands that lie at multiples of some bytes: `of` is the rest
 * that it was asked by, 0: it was not. */
typedef struct omc_cuda_answer {
  uint32_t of;
  omc_cublaslt_plan plan;
} omc_cuda_answer;
enum { OMC_CUDA_ALIGNMENTS = 5 }; /* 1, 2, 4, 8 and 16 bytes */

/* `batch` products of [m, k] by [k, n], operands of one dtype. Elements from one row in memory to
 * the next, no fewer than a row has, and from one matrix of the batch to the next are set by the
 * caller, as all up to `alpha`. */
typedef struct omc_cuda_product {
  omc_cuda_device *device;
  omc_dtype dtype, result; /* result: of D and the bias; sums of 16 bits are of float32 */
  int64_t m, n, k;
  bool trans_a, trans_b; /* in memory A is [k, m], B [n, k] */
  int64_t a_row, b_row, d_row;
  int32_t batch; /* 0: none, and no strides; else D's matrices lie one after another */
  int64_t a_stride, b_stride;
  double alpha;
  bool biased;
  bool bias_within;           /* a bias is added by cuBLASLt, else D is filled with it before */
  omc_cublaslt_plan plans[2]; /* exact and by TF32, for operands that are aligned */
  omc_cuda_answer others[OMC_CUDA_ALIGNMENTS][2]; /* without and with a bias within */
  size_t workspace_bytes;
  omc_cuda_kernel fill;
} omc_cuda_product;

/* Addresses of one product's operands. `bias` [d_row] of a biased one; `adds`, of one without:
 * to what D holds. */
typedef struct omc_cuda_operands {
  const void *a, *b, *bias;
  void *d;
  bool adds;
} omc_cuda_operands;

/* Plans a product whose sizes are set. OMC_EUNSUPPORTED names the node: cuBLASLt has nothing. With
 * the device's context entered. */
omc_status omc_cuda_product_plan(omc_cuda_product *product, const omc_node *node) OMC_MUST_USE;

/* D = alpha A B, and the bias or what was there. A sum of nothing is 0. `workspace` has as many
 * bytes as the plan says; `node` is a name for messages. float32 is rounded to TF32 where PyTorch
 * says so now. */
omc_status omc_cuda_product_run(omc_cuda_product *product, const omc_cuda_operands *operands,
                                void *workspace, const char *node, void *queue) OMC_MUST_USE;

#endif
