/* Products of matrices by a warp, of 16-bit elements with sums of float32, as tensor cores make
 * them from sm_80 on, and copies to shared memory that go on meanwhile. All lanes of a warp call a
 * verb together. Emulated, and on AMD's GPUs, lanes read what the others have (omc_peers).
 *
 * Matrices lie across the lanes as PTX has the fragments of mma.m16n8k16. With r = lane / 4 and
 * c = lane % 4 * 2, a lane has of
 *
 *   A, 16 rows of 16:     word w: row r + w % 2 * 8, elements c + w / 2 * 8 and the next
 *   B, 8 columns of 16:   word w: column r, elements c + w * 8 and the next
 *   sums, 16 rows of 8:   sum i: row r + i / 2 * 8, column c + i % 2
 *
 * the first element of a word being its lower half. So the sums of two products, of columns side by
 * side, are an A when they are rounded. */
#ifndef OMC_GPU_MMA_H
#define OMC_GPU_MMA_H

#include "cuda/gpu/numbers.h"

OMC_INLINE int omc_lane() { return (int)threadIdx.x % 32; }
OMC_INLINE int omc_lane_row() { return omc_lane() / 4; }
OMC_INLINE int omc_lane_column() { return omc_lane() % 4 * 2; }

/* omc_load_matrices<ACROSS>: four matrices of 8 rows of 8 elements in shared memory, of which lane
 * l says where row l % 8 of the matrix l / 8 is. A lane gets of each matrix elements c and c + 1 of
 * row r; ACROSS, element r of rows c and c + 1.
 *
 * omc_multiply<E>: sums += A B.
 *
 * omc_pair<E>: two numbers as a word.
 *
 * omc_copy_later<BYTES>: BYTES (4 or 16), aligned to as many, to shared memory; zeros, if nothing
 * is there. They are to be found there once the lane has waited for them and then for the block. */
#if defined(OMC_EMULATED) || defined(__HIP__)

template <bool ACROSS>
OMC_INLINE void omc_load_matrices(uint32_t (&to)[4], const void *row) {
  const omc_peers<const uint16_t *> rows(static_cast<const uint16_t *>(row));
  const int r = omc_lane_row(), c = omc_lane_column();
#pragma unroll
  for (int m = 0; m < 4; m++)
    to[m] = ACROSS ? rows[m * 8 + c][r] | (uint32_t)rows[m * 8 + c + 1][r] << 16
                   : rows[m * 8 + r][c] | (uint32_t)rows[m * 8 + r][c + 1] << 16;
}

template <typename E>
OMC_INLINE float omc_half_of(uint32_t word, int i) {
  return to_float(E{(uint16_t)(word >> i * 16)});
}

struct omc_operands {
  uint32_t a[4], b[2];
};

template <typename E>
OMC_INLINE void omc_multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const omc_peers<omc_operands> of(omc_operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int r = omc_lane_row(), c = omc_lane_column();
#pragma unroll 1
  for (int pair = 0; pair < 8; pair++) { /* of elements, beside one another in a word */
    const int at = pair % 4, w = pair / 4;
    const omc_operands rows = of[r * 4 + at];
    const uint32_t columns[2] = {of[c * 4 + at].b[w], of[(c + 1) * 4 + at].b[w]};
#pragma unroll
    for (int i = 0; i < 8; i++)
      sums[i / 2] = fmaf(omc_half_of<E>(rows.a[w * 2 + i / 4], i % 2),
                         omc_half_of<E>(columns[i / 2 % 2], i % 2), sums[i / 2]);
  }
}

template <typename E>
OMC_INLINE uint32_t omc_pair(float first, float second) {
  return element<E>(first).bits | (uint32_t)element<E>(second).bits << 16;
}

#else

OMC_INLINE uint32_t omc_shared_address(const void *at) {
  return (uint32_t)__cvta_generic_to_shared(at);
}

template <bool ACROSS>
OMC_INLINE void omc_load_matrices(uint32_t (&to)[4], const void *row) {
  if (ACROSS)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(omc_shared_address(row))
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(omc_shared_address(row))
                 : "memory");
}

template <typename E>
struct omc_tensor_core;
#define OMC_TENSOR_CORE(E, type)                                                                   \
  template <>                                                                                      \
  struct omc_tensor_core<E> {                                                                      \
    OMC_INLINE void multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { \
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                          \
                   ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"          \
                   : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                    \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                \
    }                                                                                              \
    OMC_INLINE uint32_t pair(float first, float second) {                                          \
      uint32_t word;                                                                               \
      asm("cvt.rn." type "x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));             \
      return word;                                                                                 \
    }                                                                                              \
  };
OMC_TENSOR_CORE(bf16, "bf16")
OMC_TENSOR_CORE(f16, "f16")
#undef OMC_TENSOR_CORE

template <typename E>
OMC_INLINE void omc_multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  omc_tensor_core<E>::multiply(sums, a, b0, b1);
}
template <typename E>
OMC_INLINE uint32_t omc_pair(float first, float second) {
  return omc_tensor_core<E>::pair(first, second);
}

template <int BYTES>
OMC_INLINE void omc_copy_later(void *to, const void *from, bool there) {
  if (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(omc_shared_address(to)),
                 "l"(from), "r"(there ? 16 : 0)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(omc_shared_address(to)),
                 "l"(from), "r"(there ? 4 : 0)
                 : "memory");
}
OMC_INLINE void omc_wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

#endif

/* An A: 16 rows from `at` on, `pitch` elements apart. */
template <typename E>
OMC_INLINE void omc_load_a(uint32_t (&to)[4], const E *at, int pitch) {
  const int lane = omc_lane();
  omc_load_matrices<false>(to, at + lane % 16 * pitch + lane / 16 * 8);
}

/* Two Bs, words 0 and 1 and words 2 and 3, of columns 0 to 7 and 8 to 15: a column is a row in
 * memory. ACROSS, rows in memory are rows of B. */
template <bool ACROSS, typename E>
OMC_INLINE void omc_load_b(uint32_t (&to)[4], const E *at, int pitch) {
  const int lane = omc_lane(), outer = lane / 16 * 8, inner = lane / 8 % 2 * 8;
  omc_load_matrices<ACROSS>(to, ACROSS ? at + (inner + lane % 8) * pitch + outer
                                       : at + (outer + lane % 8) * pitch + inner);
}

#endif
