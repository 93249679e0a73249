/* Matrix tiles without a CPU that has them. Included before anything else wherever the C tests are
 * compiled, it makes the instructions that cpu/gemm_tiles.h is written in calls of tests/c/tiles.c,
 * and setup.py makes omc_tiles_get say that there are tiles. */
#ifndef OMC_TESTS_TILES_H
#define OMC_TESTS_TILES_H

#if defined(__x86_64__)

#include <stdbool.h>
#include <stddef.h>

#define OMC_HAS_TILES 1
#define OMC_HAS_TILES_F16 1

#if defined(OMC_TILES)
#include <immintrin.h>
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpfp16ps
#define OMC_TILE_TARGET
#define _tile_loadconfig omc_tile_loadconfig
#define _tile_release omc_tile_release
#define _tile_zero omc_tile_zero
#define _tile_loadd omc_tile_loadd
#define _tile_stored omc_tile_stored
#define _tile_dpbf16ps(c, a, b) omc_tile_add_products(c, a, b, false)
#define _tile_dpfp16ps(c, a, b) omc_tile_add_products(c, a, b, true)
#endif

/* As the instructions of these names; where they would fault the process ends with a message. Each
 * thread has its own tiles. */
void omc_tile_loadconfig(const void *config);
void omc_tile_release(void);
void omc_tile_zero(int tile);
void omc_tile_loadd(int tile, const void *from, ptrdiff_t stride);
void omc_tile_stored(int tile, void *to, ptrdiff_t stride);
void omc_tile_add_products(int c, int a, int b, bool of_f16);

/* Whether this thread has configured tiles. */
bool omc_tile_configured(void);

#endif

#endif
