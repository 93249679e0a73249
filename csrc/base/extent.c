#include "base/extent.h"

#include <stdlib.h>

static int by_begin(const void *a, const void *b) {
  const uintptr_t x = ((const omc_extent *)a)->begin, y = ((const omc_extent *)b)->begin;
  return (x > y) - (x < y);
}

const omc_extent *omc_extents_sort(omc_extent *extents, size_t n) {
  if (n > 1) qsort(extents, n, sizeof *extents, by_begin);
  for (size_t i = 1; i < n; i++)
    if (extents[i].begin < extents[i - 1].end) return &extents[i];
  return NULL;
}

const omc_extent *omc_extents_meet(const omc_extent *extents, size_t n, const omc_extent *other) {
  size_t first = 0, end = n; /* of those that end behind where the other begins, the first one */
  while (first < end) {
    const size_t middle = first + (end - first) / 2;
    if (extents[middle].end > other->begin)
      end = middle;
    else
      first = middle + 1;
  }
  return first < n && extents[first].begin < other->end ? &extents[first] : NULL;
}
