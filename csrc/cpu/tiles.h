/* Whether this process may use matrix tiles (AMX): the CPU, the system and the compiler decide. */
#ifndef OMC_CPU_TILES_H
#define OMC_CPU_TILES_H

#include <stdbool.h>
#include <stdint.h>

/* Of what products are made: of nothing, of bf16, of bf16 and f16. */
typedef enum { OMC_TILES_NONE, OMC_TILES_BF16, OMC_TILES_F16 } omc_tiles;

/* What the CPU says of them: CPUID's leaves (7, 0) and (7, 1), and the register XCR0, 0 where there
 * is none, whose bits say what the system saves of a thread. */
typedef struct omc_tile_bits {
  uint32_t leaf_7_edx, leaf_7_1_eax;
  uint64_t xcr0;
} omc_tile_bits;

/* What follows of these, `permitted` being asked last, and only where all else is there. */
omc_tiles omc_tiles_of(const omc_tile_bits *bits, bool (*permitted)(void));

/* For this process. Asks Linux for permission, which counts for all of its threads; where that is
 * refused there are none. Any thread. */
omc_tiles omc_tiles_get(void);

#endif
