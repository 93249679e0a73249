/* The micro-kernel of matrix tiles (AMX): a part of gemm_kernel_variant.c.
 *
 * A tile register holds 16 rows of 64 bytes: of C as many sums, of a panel of A a group of 16 units
 * of as many rows, of B one of as many columns. Four hold C, two A and two B. One instruction adds
 * the products of two groups to C: for each element of C the products of first elements of units
 * are summed in order of K by multiply-adds, those of second ones likewise, both sums are added up,
 * and that is added to C. All is of f32, rounded to nearest even whatever the thread's control
 * register says. Denormal numbers of bf16 count as zero, those of f16 as themselves; denormal sums
 * of either become zero. So sums hang on where groups begin, which is the same however M and N
 * are cut.
 *
 * Tiles are configured for a height of panels, by each thread for each block product, and released
 * when it is done: nobody else's configuration is relied on, and no thread is left with tiles that
 * the system has to save. */
#ifndef OMC_CPU_GEMM_TILES_H
#define OMC_CPU_GEMM_TILES_H

#include "cpu/gemm_kernel.h"

#if defined(OMC_VARIANT) && defined(OMC_TILES)

#if defined(OMC_STORAGE_IS_BF16)
#define OMC_TILE_ISA "amx-tile,amx-bf16"
#define OMC_TILE_ADD_PRODUCTS _tile_dpbf16ps
#else
#define OMC_TILE_ISA "amx-tile,amx-fp16"
#define OMC_TILE_ADD_PRODUCTS _tile_dpfp16ps
#endif
#if !defined(OMC_TILE_TARGET)
#define OMC_TILE_TARGET __attribute__((target(OMC_TILE_ISA)))
#endif

/* Compilers do not know that instructions of tiles read memory: what was stored there is. */
#define OMC_TILE_READS(p) __asm__ volatile("" : : "r"(p) : "memory")

/* The registers: of C by rows. */
#define OMC_TILE_C00 0
#define OMC_TILE_C01 1
#define OMC_TILE_C10 2
#define OMC_TILE_C11 3
#define OMC_TILE_A0 4
#define OMC_TILE_A1 5
#define OMC_TILE_B0 6
#define OMC_TILE_B1 7

/* What ldtilecfg reads. */
typedef struct tile_config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} tile_config;

/* Configures tiles for panels of so many rows. */
OMC_TILE_TARGET static void set_height(int64_t rows) {
  const uint8_t upper = (uint8_t)omc_min(rows, OMC_GROUP), lower = (uint8_t)(rows - upper);
  const uint8_t heights[] = {upper, upper, lower, lower, upper, lower, OMC_GROUP, OMC_GROUP};
  tile_config config = {.palette = 1};
  for (int i = 0; i < 8; i++) {
    config.rows[i] = heights[i];
    config.row_bytes[i] = heights[i] ? OMC_GROUP * sizeof(omc_unit) : 0;
  }
  OMC_TILE_READS(&config);
  _tile_loadconfig(&config);
}

OMC_TILE_TARGET static void release(void) { _tile_release(); }

static const omc_unit *pad_group(const tile *t, omc_unit *out) {
  const int64_t whole = t->k - t->k % OMC_GROUP, some = (t->k - whole) * OMC_NR;
  if (!some) return NULL;
  memcpy(out, t->b + whole * OMC_NR, (size_t)some * sizeof *out);
  memset(out + some, 0, (size_t)(OMC_GROUP * OMC_NR - some) * sizeof *out);
  OMC_TILE_READS(out);
  return out;
}

/* Up to 2 x 2 tiles; which there are is a constant where this is inlined. */
OMC_TILE_TARGET OMC_INLINE void tile_product(const bool two_down, const bool two_across, tile *t) {
  const int64_t unit = sizeof(omc_unit), a_step = OMC_GROUP * unit, b_step = OMC_NR * unit;
  const int64_t groups = omc_ceil_div(t->k, OMC_GROUP), whole = t->k / OMC_GROUP;
  const omc_unit *a = t->a;
  ahead soon = t->soon;
  _tile_zero(OMC_TILE_C00);
  if (two_across) _tile_zero(OMC_TILE_C01);
  if (two_down) _tile_zero(OMC_TILE_C10);
  if (two_down && two_across) _tile_zero(OMC_TILE_C11);
  for (int64_t g = 0; g < groups; g++, a += t->rows * OMC_GROUP) {
    const omc_unit *b = g < whole ? t->b + g * OMC_GROUP * OMC_NR : t->b_tail;
    ask_ahead(&soon);
    _tile_loadd(OMC_TILE_B0, b, b_step);
    if (two_across) _tile_loadd(OMC_TILE_B1, b + OMC_VL, b_step);
    _tile_loadd(OMC_TILE_A0, a, a_step);
    if (two_down) _tile_loadd(OMC_TILE_A1, a + OMC_GROUP * OMC_GROUP, a_step);
    OMC_TILE_ADD_PRODUCTS(OMC_TILE_C00, OMC_TILE_A0, OMC_TILE_B0);
    if (two_across) OMC_TILE_ADD_PRODUCTS(OMC_TILE_C01, OMC_TILE_A0, OMC_TILE_B1);
    if (two_down) OMC_TILE_ADD_PRODUCTS(OMC_TILE_C10, OMC_TILE_A1, OMC_TILE_B0);
    if (two_down && two_across) OMC_TILE_ADD_PRODUCTS(OMC_TILE_C11, OMC_TILE_A1, OMC_TILE_B1);
  }
  t->soon = soon;
  acc_t sums[OMC_MR * OMC_NR] __attribute__((aligned(64)));
  acc_t *const lower = sums + OMC_GROUP * OMC_NR;
  _tile_stored(OMC_TILE_C00, sums, b_step);
  if (two_across) _tile_stored(OMC_TILE_C01, sums + OMC_VL, b_step);
  if (two_down) _tile_stored(OMC_TILE_C10, lower, b_step);
  if (two_down && two_across) _tile_stored(OMC_TILE_C11, lower + OMC_VL, b_step);
  const int nv = two_across ? 2 : 1;
  for (int64_t r = 0; r < t->rows; r++) {
    vacc_t acc[1][OMC_NV];
    for (int v = 0; v < nv; v++) acc[0][v] = vldr(sums + r * OMC_NR + v * OMC_VL);
    store_products(1, nv, acc, t, r);
  }
}

OMC_TILE_TARGET static void tile_1_1(tile *t) { tile_product(false, false, t); }
OMC_TILE_TARGET static void tile_1_2(tile *t) { tile_product(false, true, t); }
OMC_TILE_TARGET static void tile_2_1(tile *t) { tile_product(true, false, t); }
OMC_TILE_TARGET static void tile_2_2(tile *t) { tile_product(true, true, t); }

static tile_fn tile_of(int64_t rows, int64_t nv, bool apart) {
  (void)apart;
  static const tile_fn tiles[2][OMC_NV] = {{tile_1_1, tile_1_2}, {tile_2_1, tile_2_2}};
  return tiles[rows > OMC_GROUP][nv - 1];
}

#endif

#endif
