/* Stretches of memory, to find out which of them share some. */
#ifndef OMC_BASE_EXTENT_H
#define OMC_BASE_EXTENT_H

#include <stddef.h>
#include <stdint.h>

/* Bytes from `begin` to before `end`, at least one, and what the caller knows them by. */
typedef struct omc_extent {
  uintptr_t begin, end;
  uint32_t owner;
} omc_extent;

/* `bytes` of memory; above 0. */
static inline omc_extent omc_extent_of(const void *memory, size_t bytes, uint32_t owner) {
  return (omc_extent){(uintptr_t)memory, (uintptr_t)memory + bytes, owner};
}

/* Sorts n extents by where they begin. NULL if no two share memory; else the second of two
 * neighbours that do. */
const omc_extent *omc_extents_sort(omc_extent *extents, size_t n);

/* Of extents that are sorted and share no memory one that shares some with `other`; NULL: none. */
const omc_extent *omc_extents_meet(const omc_extent *extents, size_t n, const omc_extent *other);

#endif
