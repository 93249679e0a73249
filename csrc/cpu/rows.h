/* Loads and stores of some elements, and loops over one contiguous row: variant part only. */
#ifndef OMC_CPU_ROWS_H
#define OMC_CPU_ROWS_H

#ifdef OMC_VARIANT
#include "cpu/kernel.h"
#include "cpu/shuffle.h"

/* The first n lanes. */
OMC_INLINE vmask vlanes(int64_t n) {
  vmask lane;
  for (int i = 0; i < OMC_VL; i++) lane[i] = i;
  return lane < (vmask){0} + (acc_bits_t)n;
}

/* vld and vst of at most n elements; lanes past them are `fill`. */
OMC_INLINE vacc_t vld_fill(const storage_t *p, int64_t n, acc_t fill) {
  return n >= OMC_VL ? vld(p) : vblend(vlanes(n), vldn(p, n), vset(fill));
}
OMC_INLINE void vst_upto(storage_t *p, vacc_t x, int64_t n) {
  if (n >= OMC_VL)
    vst(p, x);
  else
    vstn(p, x, n);
}

/* The same of an array of acc_t; lanes past them are 0. */
OMC_INLINE vacc_t vldr_upto(const acc_t *p, int64_t n) {
  return n >= OMC_VL ? vldr(p) : vldrn(p, n);
}
OMC_INLINE void vstr_upto(acc_t *p, vacc_t x, int64_t n) {
  if (n >= OMC_VL)
    vstr(p, x);
  else
    vstrn(p, x, n);
}

/* The same of n elements from number `at` on of what is stored in `dtype`: acc_t or, where that is
 * f32, floats of 16 bits. */
OMC_INLINE vacc_t vld_as(omc_dtype dtype, const void *from, int64_t at, int64_t n) {
#if defined(OMC_COMPUTE_F32)
  if (dtype == OMC_BF16) return omc_vfrom_bf16(omc_vldh((const uint16_t *)from + at, n));
  if (dtype == OMC_F16) return omc_vfrom_f16(omc_vldh((const uint16_t *)from + at, n));
#else
  (void)dtype;
#endif
  return vldr_upto((const acc_t *)from + at, n);
}
OMC_INLINE void vst_as(omc_dtype dtype, void *to, int64_t at, vacc_t x, int64_t n) {
#if defined(OMC_COMPUTE_F32)
  if (dtype == OMC_BF16) {
    omc_vsth((uint16_t *)to + at, omc_vto_bf16(x), n);
    return;
  }
  if (dtype == OMC_F16) {
    omc_vsth((uint16_t *)to + at, omc_vto_f16(x), n);
    return;
  }
#else
  (void)dtype;
#endif
  vstr_upto((acc_t *)to + at, x, n);
}

/* n elements as acc_t, and back. */
OMC_INLINE void load_row(const storage_t *from, acc_t *to, int64_t n) {
  int64_t k = 0;
  for (; k + OMC_VL <= n; k += OMC_VL) vstr(to + k, vld(from + k));
  for (; k < n; k++) to[k] = ld(from + k);
}
OMC_INLINE void store_row(const acc_t *from, storage_t *to, int64_t n) {
  int64_t k = 0;
  for (; k + OMC_VL <= n; k += OMC_VL) vst(to + k, vldr(from + k));
  for (; k < n; k++) st(to + k, from[k]);
}

/* A parameter or a statistic is stored as x is, or as what is computed in. */
OMC_INLINE bool stores_acc(const omc_tensor *t) {
  return omc_dtype_size(t->type->dtype) == sizeof(acc_t);
}

/* The n elements of input i as acc_t, by way of *scratch, of which they take what they need; NULL
 * if it is left out. */
OMC_INLINE const acc_t *parameter(const omc_kernel_args *args, uint32_t i, int64_t n,
                                  acc_t **scratch) {
  const void *data = omc_in_data(args, i);
  if (!data || stores_acc(&args->in[i])) return data;
  acc_t *const to = *scratch;
  *scratch += n;
  load_row(data, to, n);
  return to;
}

/* `rows` <= OMC_VL rows of n elements, 1 <= n <= OMC_VL, which follow one another, as columns: lane
 * r of v[k] is element k of row r, and 0 past the rows. And back. */
OMC_INLINE void load_turned(const storage_t *x, int64_t rows, int64_t n, vacc_t *v) {
  for (int64_t r = 0; r < OMC_VL; r++) v[r] = r < rows ? vld_fill(x + r * n, n, 0) : vset(0);
  OMC_TRANSPOSE(v)
}
OMC_INLINE void store_turned(vacc_t *v, int64_t rows, int64_t n, storage_t *y) {
  OMC_TRANSPOSE(v)
  for (int64_t r = 0; r < rows; r++) vst_upto(y + r * n, v[r], n);
}

/* Where sums are kept until they are complete: in `out` itself if that stores what they are
 * computed in, else in `scratch`, and then stored. Memory for it: omc_sums_bytes. */
OMC_INLINE acc_t *sums_of(storage_t *out, acc_t *scratch) {
  return OMC_STORES_ACC ? (acc_t *)(void *)out : scratch;
}
OMC_INLINE void store_sums(const acc_t *sums, storage_t *out, int64_t n) {
  if (!OMC_STORES_ACC) store_row(sums, out, n);
}

/* Elements for which no vector is worth it. */
enum { OMC_SHORT_ROW = 8 };

/* Reduces `n` elements: `term` is a vector made of the elements at `k`, of which `left` remain,
 * names that the caller gives, and must be neutral in lanes past them, as by the fill of vld_fill.
 * Pieces are reduced by themselves, lest a long sum loses bits. The order depends on n and OMC_VL
 * alone. */
enum { OMC_ROW_PIECE = 256 * OMC_VL };
#define OMC_ROW_REDUCE(k, left, n, start, join, finish, term)         \
  __extension__({                                                     \
    const int64_t n_ = (n);                                           \
    vacc_t a_ = vset(start), b_ = a_, c_ = a_, d_ = a_, pieces_ = a_; \
    int64_t k = 0;                                                    \
    for (; k + 4 * OMC_VL <= n_; k += OMC_VL) {                       \
      const int64_t left = OMC_VL;                                    \
      a_ = join(a_, term), k += OMC_VL;                               \
      b_ = join(b_, term), k += OMC_VL;                               \
      c_ = join(c_, term), k += OMC_VL;                               \
      d_ = join(d_, term);                                            \
      if ((k + OMC_VL) % OMC_ROW_PIECE == 0) {                        \
        pieces_ = join(pieces_, join(join(a_, b_), join(c_, d_)));    \
        a_ = b_ = c_ = d_ = vset(start);                              \
      }                                                               \
    }                                                                 \
    for (; k < n_; k += OMC_VL) {                                     \
      const int64_t left = n_ - k;                                    \
      a_ = join(a_, term);                                            \
    }                                                                 \
    const vacc_t rest_ = join(join(a_, b_), join(c_, d_));            \
    finish(n_ < OMC_ROW_PIECE ? rest_ : join(pieces_, rest_));        \
  })
#define OMC_ROW_SUM(k, left, n, term) OMC_ROW_REDUCE(k, left, n, 0, vadd, vsum, term)

/* What max and min start from, and whether a number is NaN. */
#if OMC_IS_FLOAT
#define OMC_LOWEST (-(acc_t)INFINITY)
#define OMC_HIGHEST ((acc_t)INFINITY)
#define OMC_IS_NAN(x) isnan(x)
#else
#define OMC_LOWEST INT64_MIN
#define OMC_HIGHEST INT64_MAX
#define OMC_IS_NAN(x) false
#endif

/* NaN if there is one. */
OMC_INLINE acc_t row_max(const storage_t *x, int64_t n) {
  return OMC_ROW_REDUCE(k, left, n, OMC_LOWEST, vmax, vhmax, vld_fill(x + k, left, OMC_LOWEST));
}
OMC_INLINE acc_t row_min(const storage_t *x, int64_t n) {
  return OMC_ROW_REDUCE(k, left, n, OMC_HIGHEST, vmin, vhmin, vld_fill(x + k, left, OMC_HIGHEST));
}

#if OMC_IS_FLOAT

OMC_INLINE acc_t row_sum(const storage_t *x, int64_t n) {
  return OMC_ROW_SUM(k, left, n, vld_fill(x + k, left, 0));
}

/* Sum of exp(x - shift). */
OMC_INLINE acc_t row_sum_exp(const storage_t *x, int64_t n, acc_t shift) {
  return OMC_ROW_SUM(k, left, n, vexp(vld_fill(x + k, left, -(acc_t)INFINITY) - vset(shift)));
}

#endif
#endif
#endif
