#include "cpu/memory_pool.h"

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/alloc.h"
#include "base/lock.h"

#define HUGE_PAGE ((size_t)2 << 20)
#define SMALL_PAGE ((size_t)4096)
#define LEAST_KEPT ((size_t)16 << 20)

/* Sizes are rounded up to one of 64 classes per power of two (by 1.6 % at most), so that a block's
 * size follows from what was asked for and a kept block fits exactly. */
#define CLASSES_LOG2 6
#define LEAST_LOG2 9
#define N_CLASSES ((64 - LEAST_LOG2) << CLASSES_LOG2)

/* Written into a kept block, which is linked into its class and, oldest first, into all. */
typedef struct kept {
  struct kept *class_prev, *class_next;
  struct kept *older, *newer;
  size_t bytes;
} kept;

OMC_PROCESS_LOCK(pool_lock)

static struct {
  kept *classes[N_CLASSES]; /* the newest first */
  kept *oldest, *newest;
  omc_memory_stats stats;
} pool;

/* The class of a size and, in *bytes, the size of its blocks. */
static size_t size_class(size_t *bytes) {
  size_t n = *bytes < ((size_t)1 << LEAST_LOG2) ? (size_t)1 << LEAST_LOG2 : *bytes;
  const int top = 63 - __builtin_clzll((unsigned long long)n);
  const size_t step = (size_t)1 << (top - CLASSES_LOG2);
  n = omc_round_up(n, step);
  *bytes = n;
  const int log2 = 63 - __builtin_clzll((unsigned long long)n);
  const size_t part = (n >> (log2 - CLASSES_LOG2)) - ((size_t)1 << CLASSES_LOG2);
  return ((size_t)(log2 - LEAST_LOG2) << CLASSES_LOG2) + part;
}

/* Large blocks start on a huge page; the ends of the mapping that are not needed go back. */
static void *map_large(size_t bytes) {
  const size_t mapped = omc_round_up(bytes, SMALL_PAGE) + HUGE_PAGE;
  char *start = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return NULL;
  const size_t head = omc_round_up((size_t)(uintptr_t)start, HUGE_PAGE) - (size_t)(uintptr_t)start;
  char *block = start + head, *end = block + omc_round_up(bytes, SMALL_PAGE);
  if (head) munmap(start, head);
  if (end < start + mapped) munmap(end, (size_t)(start + mapped - end));
  madvise(block, bytes, MADV_HUGEPAGE);
  return block;
}

static void *system_alloc(size_t bytes) {
  if (bytes >= HUGE_PAGE) return map_large(bytes);
  void *block;
  return posix_memalign(&block, OMC_POOL_ALIGNMENT, bytes) == 0 ? block : NULL;
}

static void system_free(void *block, size_t bytes) {
  if (bytes >= HUGE_PAGE)
    munmap(block, omc_round_up(bytes, SMALL_PAGE));
  else
    free(block);
}

static void link_kept(kept *k, size_t class) {
  k->class_prev = NULL;
  k->class_next = pool.classes[class];
  if (k->class_next) k->class_next->class_prev = k;
  pool.classes[class] = k;
  k->older = pool.newest;
  k->newer = NULL;
  if (pool.newest)
    pool.newest->newer = k;
  else
    pool.oldest = k;
  pool.newest = k;
  pool.stats.cached_bytes += k->bytes;
}

static void unlink_kept(kept *k, size_t class) {
  if (k->class_prev)
    k->class_prev->class_next = k->class_next;
  else
    pool.classes[class] = k->class_next;
  if (k->class_next) k->class_next->class_prev = k->class_prev;
  if (k->older)
    k->older->newer = k->newer;
  else
    pool.oldest = k->newer;
  if (k->newer)
    k->newer->older = k->older;
  else
    pool.newest = k->older;
  pool.stats.cached_bytes -= k->bytes;
}

/* Takes blocks out of the pool, oldest first, until at most `most` bytes are kept; returns them
 * linked by `newer`. */
static kept *take_oldest(size_t most) {
  kept *taken = NULL;
  while (pool.stats.cached_bytes > most) {
    kept *k = pool.oldest;
    size_t bytes = k->bytes;
    unlink_kept(k, size_class(&bytes));
    k->newer = taken;
    taken = k;
  }
  return taken;
}

static void give_back(kept *taken) {
  while (taken) {
    kept *next = taken->newer;
    system_free(taken, taken->bytes);
    taken = next;
  }
}

static void count_used(size_t bytes) {
  pool.stats.used_bytes += bytes;
  if (pool.stats.used_bytes > pool.stats.peak_bytes) pool.stats.peak_bytes = pool.stats.used_bytes;
}

static omc_status no_memory(size_t bytes) {
  OMC_FAIL(ENOMEM, "you tried to allocate %zu bytes. Error code 12 (Cannot allocate memory)",
           bytes);
}

omc_status omc_pool_alloc(size_t bytes, void **out) {
  if (bytes > PTRDIFF_MAX / 2) return no_memory(bytes);
  size_t size = bytes;
  const size_t class = size_class(&size);
  pool_lock_acquire();
  kept *k = pool.classes[class];
  if (k) {
    unlink_kept(k, class);
    count_used(size);
  }
  pool_lock_release();
  if (k) {
    *out = k;
    return OMC_OK;
  }
  void *block = system_alloc(size);
  if (!block) {
    omc_pool_trim();
    block = system_alloc(size);
  }
  if (!block) return no_memory(bytes);
  /* Not before there is memory: the peak says how much the pool keeps. */
  pool_lock_acquire();
  count_used(size);
  pool_lock_release();
  *out = block;
  return OMC_OK;
}

void omc_pool_free(void *ptr, size_t bytes) {
  if (!ptr) return;
  kept *k = ptr;
  const size_t class = size_class(&bytes);
  k->bytes = bytes;
  pool_lock_acquire();
  pool.stats.used_bytes -= bytes;
  link_kept(k, class);
  kept *taken =
      take_oldest(pool.stats.peak_bytes > LEAST_KEPT ? pool.stats.peak_bytes : LEAST_KEPT);
  pool_lock_release();
  give_back(taken);
}

void omc_pool_trim(void) {
  pool_lock_acquire();
  kept *taken = take_oldest(0);
  pool_lock_release();
  give_back(taken);
}

omc_memory_stats omc_pool_get_stats(void) {
  pool_lock_acquire();
  const omc_memory_stats stats = pool.stats;
  pool_lock_release();
  return stats;
}
