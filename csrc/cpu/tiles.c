#include "cpu/tiles.h"

#include "cpu/variants.def"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Of CPUID and XCR0. */
#define HAS_BF16 (1u << 22)
#define HAS_TILES (1u << 24)
#define HAS_F16 (1u << 21)
#define SAVES_TILES (UINT64_C(3) << 17) /* their configuration and their data */

omc_tiles omc_tiles_of(const omc_tile_bits *bits, bool (*permitted)(void)) {
  const uint32_t wanted = HAS_BF16 | HAS_TILES;
  if (!OMC_HAS_TILES || (bits->leaf_7_edx & wanted) != wanted ||
      (bits->xcr0 & SAVES_TILES) != SAVES_TILES || !permitted())
    return OMC_TILES_NONE;
  return OMC_HAS_TILES_F16 && bits->leaf_7_1_eax & HAS_F16 ? OMC_TILES_F16 : OMC_TILES_BF16;
}

#if defined(__x86_64__) && defined(__linux__)

static omc_tile_bits bits_of_machine(void) {
  omc_tile_bits bits = {0};
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return bits;
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  bits.xcr0 = (uint64_t)high << 32 | low;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    bits.leaf_7_edx = d;
    if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) bits.leaf_7_1_eax = a;
  }
  return bits;
}

/* Linux gives the memory that tiles are saved in to processes that have asked for it. */
static bool ask_linux(void) {
  enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

omc_tiles omc_tiles_get(void) {
  const omc_tile_bits bits = bits_of_machine();
  return omc_tiles_of(&bits, ask_linux);
}

#else

omc_tiles omc_tiles_get(void) { return OMC_TILES_NONE; }

#endif
