/* Matrix tiles: when they are used, what their instructions do as emulated by tests/c/tiles.c, that
 * a CPU which has them does the same, and in which order products by them are summed. */
#include "tiles.h"

#include "harness.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/element.h"
#include "base/env.h"
#include "base/int.h"
#include "cpu/gemm.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "cpu/tiles.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <sys/wait.h>
#include <unistd.h>

omc_tiles __real_omc_tiles_get(void);

/* ---- when they are used ---- */

static int asked;
static bool grant(void) { return ++asked > 0; }
static bool refuse(void) { return ++asked < 0; }

TEST(tiles_are_used_where_cpu_and_system_have_them) {
  enum { TILE = 1 << 24, BF16 = 1 << 22, INT8 = 1 << 25, F16 = 1 << 21, CONFIG = 1 << 17 };
  enum { DATA = 1 << 18, SAVED = CONFIG | DATA };
  static const struct {
    omc_tile_bits bits;
    bool permitted;
    omc_tiles want;
    int asked;
  } rows[] = {
      {{TILE | BF16, 0, SAVED}, true, OMC_TILES_BF16, 1},
      {{TILE | BF16 | INT8, F16, SAVED | 7}, true, OMC_TILES_F16, 1},
      {{TILE | BF16, F16, SAVED}, false, OMC_TILES_NONE, 1},
      {{TILE | BF16, F16, CONFIG}, true, OMC_TILES_NONE, 0},
      {{TILE | BF16, F16, DATA}, true, OMC_TILES_NONE, 0},
      {{TILE | BF16, F16, 0}, true, OMC_TILES_NONE, 0},
      {{TILE | INT8, F16, SAVED}, true, OMC_TILES_NONE, 0},
      {{BF16, F16, SAVED}, true, OMC_TILES_NONE, 0},
      {{0, 0, 0}, true, OMC_TILES_NONE, 0},
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    asked = 0;
    CHECK_INT(omc_tiles_of(&rows[i].bits, rows[i].permitted ? grant : refuse), rows[i].want);
    CHECK_INT(asked, rows[i].asked);
  }
}

/* ---- what the instructions do ---- */

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} config;

enum { SIDE = 16, PAIRS = SIDE * SIDE };

/* C, A and B are tiles 0, 1, 2, A and C of `rows` rows. */
static config three_tiles(int rows) {
  return (config){
      .palette = 1, .row_bytes = {64, 64, 64}, .rows = {(uint8_t)rows, (uint8_t)rows, SIDE}};
}

static float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }

static float number(uint32_t pair, int which, omc_dtype dtype) {
  const uint16_t bits = (uint16_t)(pair >> 16 * which);
  return flushed((float)omc_element_float(dtype, &bits, 0));
}

/* As it is documented: the sums of first and of second products, both, and C. */
static float documented(const uint32_t *a, const uint32_t *b, float c, omc_dtype dtype) {
  float sums[2] = {0, 0};
  for (int k = 0; k < SIDE; k++)
    for (int i = 0; i < 2; i++)
      sums[i] = flushed(fmaf(number(a[k], i, dtype), number(b[k * SIDE], i, dtype), sums[i]));
  return flushed(flushed(c) + flushed(sums[0] + sums[1]));
}

static uint64_t state = 1;
static uint32_t random_bits(void) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(state >> 32);
}

/* Pairs of numbers from 2^-7 to 2 in magnitude, and some that are denormal. */
static uint32_t random_pair(omc_dtype dtype) {
  const int fraction = dtype == OMC_BF16 ? 7 : 10;
  const uint32_t infinity = dtype == OMC_BF16 ? 0x7f80 : 0x7c00, one = infinity / 2 & infinity;
  const uint32_t less = random_bits() % 8, exponent = less ? one - ((less - 1) << fraction) : 0;
  return (random_bits() & ~(infinity | infinity << 16)) | exponent | exponent << 16;
}

static void emulated(const config *tiles, const void *a, const void *b, float *c, bool of_f16) {
  omc_tile_loadconfig(tiles);
  omc_tile_loadd(0, c, 64);
  omc_tile_loadd(1, a, 64);
  omc_tile_loadd(2, b, 64);
  omc_tile_add_products(0, 1, 2, of_f16);
  omc_tile_stored(0, c, 64);
  omc_tile_release();
}

static void check_products(omc_dtype dtype, int rows) {
  uint32_t a[PAIRS], b[PAIRS];
  float c[PAIRS], before[PAIRS];
  for (int i = 0; i < PAIRS; i++) {
    a[i] = random_pair(dtype), b[i] = random_pair(dtype);
    before[i] = c[i] = i % 5 ? (float)(int32_t)random_bits() * 0x1p-31f : 0x1p-130f;
  }
  const config tiles = three_tiles(rows);
  emulated(&tiles, a, b, c, dtype == OMC_F16);
  for (int i = 0; i < PAIRS; i++) {
    const bool inside = i < rows * SIDE;
    const float want =
        inside ? documented(a + i / SIDE * SIDE, b + i % SIDE, before[i], dtype) : before[i];
    CHECK_FLOAT(c[i], want);
  }
}

static bool has_vectors(void) {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
}

TEST(tiles_add_products_as_documented) {
  if (!has_vectors()) return;
  for (int round = 0; round < 50; round++) {
    check_products(OMC_BF16, 1 + round % SIDE);
    check_products(OMC_F16, 1 + round % SIDE);
  }
}

/* One pair times one, added to c. */
static float one_product(uint32_t a, uint32_t b, float c, bool of_f16) {
  uint32_t as[PAIRS] = {a}, bs[PAIRS] = {b};
  float cs[PAIRS] = {c};
  const config tiles = three_tiles(1);
  emulated(&tiles, as, bs, cs, of_f16);
  return cs[0];
}

TEST(tiles_count_denormals_of_bf16_as_zero) {
  enum { BF_ONE = 0x3f80, BF_TINY = 0x0040, BF_SMALL = 0x0080 /* 2^-126 */, BF_HALF = 0x3f00 };
  enum { F_ONE = 0x3c00, F_TINY = 0x0001 /* 2^-24 */ };
  if (!has_vectors()) return;
  CHECK_FLOAT(one_product(BF_TINY, BF_ONE, 1, false), 1);
  CHECK_FLOAT(one_product(BF_TINY, BF_ONE, 0, false), 0);
  CHECK_FLOAT(one_product(BF_SMALL, BF_ONE, 0, false), 0x1p-126f);
  CHECK_FLOAT(one_product(BF_SMALL, BF_HALF, 0, false), 0);
  CHECK_FLOAT(one_product(0, 0, 0x1p-130f, false), 0);
  CHECK_FLOAT(one_product(F_TINY, F_ONE, 0, true), 0x1p-24f);
  CHECK_FLOAT(one_product(F_TINY, F_TINY, 0, true), 0x1p-48f);
  CHECK_FLOAT(one_product(0x7f80 /* infinity */, 0x0000, 1, false), (double)NAN);
  CHECK_FLOAT(one_product(0x7f80, BF_ONE, 1, false), (double)INFINITY);
}

/* ---- what would fault ---- */

static void use_unconfigured(config *tiles) {
  omc_tile_loadconfig(tiles);
  omc_tile_zero(3);
}
static void use_released(config *tiles) {
  omc_tile_loadconfig(tiles);
  omc_tile_release();
  omc_tile_zero(0);
}
static void multiply_with_itself(config *tiles) {
  omc_tile_loadconfig(tiles);
  omc_tile_add_products(0, 1, 1, false);
}
static void multiply_other_sizes(config *tiles) {
  tiles->rows[0] = 3;
  omc_tile_loadconfig(tiles);
  omc_tile_add_products(0, 1, 2, false);
}
static void configure(config *tiles) { omc_tile_loadconfig(tiles); }
static void configure_palette(config *tiles) {
  tiles->palette = 2;
  configure(tiles);
}
static void configure_rows(config *tiles) {
  tiles->rows[1] = 17;
  configure(tiles);
}
static void configure_no_rows(config *tiles) {
  tiles->rows[2] = 0;
  configure(tiles);
}
static void configure_ninth(config *tiles) {
  tiles->rows[8] = 1, tiles->row_bytes[8] = 4;
  configure(tiles);
}

/* Whether it ends the process. */
static bool faults(void (*fn)(config *)) {
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    config tiles = three_tiles(5);
    close(STDERR_FILENO);
    fn(&tiles);
    _exit(0);
  }
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFSIGNALED(status);
}

TEST(tiles_emulated_fault_as_instructions_do) {
  CHECK(!faults(configure));
  CHECK(faults(use_unconfigured));
  CHECK(faults(use_released));
  CHECK(faults(multiply_with_itself));
  CHECK(faults(multiply_other_sizes));
  CHECK(faults(configure_palette));
  CHECK(faults(configure_rows));
  CHECK(faults(configure_no_rows));
  CHECK(faults(configure_ninth));
}

/* ---- the instructions themselves ---- */

#if __has_include(<amxbf16intrin.h>) || __has_include(<amxintrin.h>)
__attribute__((target("amx-tile,amx-bf16"))) static void by_instructions(const config *tiles,
                                                                         const void *a,
                                                                         const void *b, float *c) {
  __asm__ volatile("" : : "r"(tiles), "r"(a), "r"(b), "r"(c) : "memory");
  _tile_loadconfig(tiles);
  _tile_loadd(0, c, 64);
  _tile_loadd(1, a, 64);
  _tile_loadd(2, b, 64);
  _tile_dpbf16ps(0, 1, 2);
  _tile_stored(0, c, 64);
  _tile_release();
}

TEST(tiles_of_the_cpu_do_as_emulated) {
  if (__real_omc_tiles_get() == OMC_TILES_NONE) return;
  for (int round = 0; round < 100; round++) {
    uint32_t a[PAIRS], b[PAIRS];
    float c[PAIRS], again[PAIRS];
    for (int i = 0; i < PAIRS; i++) {
      a[i] = random_pair(OMC_BF16), b[i] = random_pair(OMC_BF16);
      again[i] = c[i] = (float)(int32_t)random_bits() * 0x1p-31f;
    }
    const config tiles = three_tiles(1 + round % SIDE);
    emulated(&tiles, a, b, c, false);
    by_instructions(&tiles, a, b, again);
    CHECK(memcmp(c, again, sizeof c) == 0);
  }
}
#endif

/* ---- products ---- */

enum { GROUP = 32 /* elements of K */, M = 37, N = 41 };

/* C by the order that cpu/gemm_kernel.h says: blocks of K, groups of each, each as documented. */
static void sum_in_order(const uint16_t *a, const uint16_t *b, int64_t k, omc_dtype dtype,
                         float *c) {
  enum { BLOCK = 1536 };
  const int64_t groups = omc_ceil_div(k, GROUP), blocks = omc_ceil_div(k, BLOCK);
  for (int64_t i = 0; i < M * N; i++) {
    c[i] = 0;
    for (int64_t block = 0; block < blocks; block++) {
      float sum = 0;
      for (int64_t g = groups * block / blocks; g < groups * (block + 1) / blocks; g++) {
        uint32_t left[SIDE] = {0}, right[PAIRS] = {0};
        for (int64_t x = g * GROUP; x < omc_min((g + 1) * GROUP, k); x++) {
          const int64_t at = x % GROUP / 2, shift = x % 2 * 16;
          left[at] |= (uint32_t)a[i / N * k + x] << shift;
          right[at * SIDE] |= (uint32_t)b[x * N + i % N] << shift;
        }
        sum = documented(left, right, sum, dtype);
      }
      c[i] += sum;
    }
  }
}

static void note_configured(omc_range range, void *ctx) {
  bool *any = ctx;
  if (omc_tile_configured()) any[range.begin] = true;
}

static void check_order(omc_dtype dtype, int64_t k) {
  uint16_t *a = malloc((size_t)(M * k) * 2), *b = malloc((size_t)(k * N) * 2);
  float c[M * N], want[M * N];
  void *workspace = aligned_alloc(64, omc_gemm_workspace(OMC_F32, M, N, k, 4) + 64);
  if (CHECK(a && b && workspace)) {
    for (int64_t i = 0; i < M * k; i++) a[i] = (uint16_t)random_pair(dtype);
    for (int64_t i = 0; i < k * N; i++) b[i] = (uint16_t)random_pair(dtype);
    const omc_gemm_args g = {.m = M,
                             .n = N,
                             .k = k,
                             .a = {a, k, 1, dtype, dtype},
                             .b = {b, N, 1, dtype, dtype},
                             .c = {c, N, 1, OMC_F32, OMC_F32},
                             .alpha = 1};
    sum_in_order(a, b, k, dtype, want);
    for (int threads = 1; threads <= 4; threads++) {
      memset(c, 0xff, sizeof c);
      omc_gemm(&g, threads, workspace);
      if (!CHECK(memcmp(c, want, sizeof c) == 0)) printf("  k %d, %d threads\n", (int)k, threads);
    }
  }
  bool any[4] = {false};
  omc_parallel_for(4, 1, 4, note_configured, any);
  CHECK(!any[0] && !any[1] && !any[2] && !any[3]);
  free(a), free(b), free(workspace);
}

TEST(tiles_sum_products_in_one_order_and_are_released) {
  omc_cpu_set_isa(OMC_N_ISA);
  if (!__builtin_cpu_supports("avx512bf16") || omc_env_get()->isa < OMC_ISA_AMXFP16) return;
  REQUIRE(omc_cpu_isa() == OMC_ISA_AMXFP16);
  static const int64_t ks[] = {1, 2, 31, 32, 33, 63, 95, 1000, 1536, 1537, 1602};
  for (size_t i = 0; i < sizeof ks / sizeof *ks; i++) {
    check_order(OMC_BF16, ks[i]);
    check_order(OMC_F16, ks[i]);
  }
}

#endif
