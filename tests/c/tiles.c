#include "tiles.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/tiles.h"

omc_tiles __wrap_omc_tiles_get(void);
omc_tiles __wrap_omc_tiles_get(void) { return OMC_TILES_F16; }

enum { TILES = 8, ROWS = 16, ROW_BYTES = 64, CONFIG_BYTES = 64 };

typedef struct {
  int rows, row_bytes; /* 0: not configured */
  uint8_t data[ROWS][ROW_BYTES];
} tile;

static _Thread_local tile tiles[TILES];
static _Thread_local bool configured;

static void need(bool ok, const char *what) {
  if (ok) return;
  fprintf(stderr, "tiles: %s\n", what);
  abort();
}

static tile *get(int i) {
  need(configured, "used without a configuration");
  need(i >= 0 && i < TILES && tiles[i].rows > 0, "used one that is not configured");
  return &tiles[i];
}

void omc_tile_loadconfig(const void *config) {
  uint8_t bytes[CONFIG_BYTES];
  memcpy(bytes, config, sizeof bytes);
  need(bytes[0] == 1, "palette is not 1");
  for (int i = 1; i < 16; i++) need(bytes[i] == 0, "a row to start from, or reserved bytes");
  memset(tiles, 0, sizeof tiles);
  for (int i = 0; i < 16; i++) {
    uint16_t row_bytes;
    memcpy(&row_bytes, bytes + 16 + 2 * i, sizeof row_bytes);
    const uint8_t rows = bytes[48 + i];
    need(i < TILES || (!rows && !row_bytes), "reserved bytes of the configuration");
    need(rows <= ROWS && row_bytes <= ROW_BYTES, "too many rows or bytes of a row");
    need(!rows == !row_bytes, "rows without bytes, or bytes without rows");
    if (i < TILES) tiles[i].rows = rows, tiles[i].row_bytes = row_bytes;
  }
  configured = true;
}

void omc_tile_release(void) {
  memset(tiles, 0, sizeof tiles);
  configured = false;
}

bool omc_tile_configured(void) { return configured; }

void omc_tile_zero(int i) {
  tile *t = get(i);
  memset(t->data, 0, sizeof t->data);
}

void omc_tile_loadd(int i, const void *from, ptrdiff_t stride) {
  tile *t = get(i);
  memset(t->data, 0, sizeof t->data);
  for (int r = 0; r < t->rows; r++)
    memcpy(t->data[r], (const char *)from + r * stride, (size_t)t->row_bytes);
}

void omc_tile_stored(int i, void *to, ptrdiff_t stride) {
  const tile *t = get(i);
  for (int r = 0; r < t->rows; r++)
    memcpy((char *)to + r * stride, t->data[r], (size_t)t->row_bytes);
}

#define TARGET __attribute__((target("avx512f,avx512bw")))

/* The numbers in the low halves of pairs. */
TARGET static __m512 low_halves(__m512i pairs, bool of_f16) {
  return of_f16 ? _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs))
                : _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
}

/* Sums of the first and of the second products of pairs in the order of K, then both, then C. */
TARGET __attribute__((noinline)) static void add_products(tile *c, const tile *a, const tile *b,
                                                          bool of_f16) {
  const __mmask16 columns = (__mmask16)((1u << (c->row_bytes / 4)) - 1u);
  for (int m = 0; m < a->rows; m++) {
    __m512 first = _mm512_setzero_ps(), second = first;
    for (int k = 0; k < b->rows; k++) {
      int32_t pair;
      memcpy(&pair, a->data[m] + 4 * k, sizeof pair);
      const __m512i x = _mm512_set1_epi32(pair), y = _mm512_loadu_si512(b->data[k]);
      first = _mm512_fmadd_ps(low_halves(x, of_f16), low_halves(y, of_f16), first);
      second = _mm512_fmadd_ps(low_halves(_mm512_srli_epi32(x, 16), of_f16),
                               low_halves(_mm512_srli_epi32(y, 16), of_f16), second);
    }
    const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(c->data[m]), _mm512_add_ps(first, second));
    _mm512_mask_storeu_ps(c->data[m], columns, sum);
  }
}

void omc_tile_add_products(int to, int left, int right, bool of_f16) {
  enum { FLUSH = 0x8040, NEAREST = 0x1f80 /* no exceptions */ };
  tile *c = get(to), *a = get(left), *b = get(right);
  need(to != left && to != right && left != right, "the same one twice");
  need(c->rows == a->rows && c->row_bytes == b->row_bytes && a->row_bytes == 4 * b->rows,
       "sizes that do not fit");
  const unsigned before = _mm_getcsr();
  _mm_setcsr(NEAREST | FLUSH);
  add_products(c, a, b, of_f16);
  _mm_setcsr(before);
}

#endif
