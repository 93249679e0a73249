#include "base/arena.h"

#include <string.h>

#define ALIGNMENT 16
#define ELEMENTS_ALIGNMENT 64
#define LEAST_BLOCK ((size_t)16 << 10)
#define LARGEST_STEP ((size_t)1 << 20)

struct omc_arena_block {
  omc_arena_block *next;
  size_t bytes; /* this header included */
  size_t used;
};

void omc_arena_init(omc_arena *arena, const omc_allocator *allocator) {
  *arena = (omc_arena){allocator, NULL, 0};
}

void omc_arena_deinit(omc_arena *arena) {
  for (omc_arena_block *block = arena->blocks; block;) {
    omc_arena_block *next = block->next;
    omc_free(arena->allocator, block, 1, block->bytes);
    block = next;
  }
  omc_arena_init(arena, arena->allocator);
}

/* Bytes to skip so that what follows `used` bytes of the block is aligned. */
static size_t padding(const omc_arena_block *block, size_t align) {
  const size_t used = (size_t)((uintptr_t)block + block->used);
  return omc_round_up(used, align) - used;
}

static omc_arena_block *add_block(omc_arena *arena, size_t bytes) {
  size_t least;
  if (!omc_add_size(bytes, sizeof(omc_arena_block) + ELEMENTS_ALIGNMENT, &least)) return NULL;
  size_t size = arena->used / 4; /* plans are kept: most of what is not used is a fifth of them */
  if (size < LEAST_BLOCK) size = LEAST_BLOCK;
  if (size > LARGEST_STEP) size = LARGEST_STEP;
  if (size < least) size = least;
  omc_arena_block *block = omc_alloc(arena->allocator, 1, size);
  if (!block) return NULL;
  *block = (omc_arena_block){arena->blocks, size, sizeof *block};
  arena->blocks = block;
  return block;
}

static void *take(omc_arena *arena, size_t bytes, size_t align) {
  omc_arena_block *block = arena->blocks;
  if (!block || block->bytes - block->used < padding(block, align) ||
      block->bytes - block->used - padding(block, align) < bytes) {
    block = add_block(arena, bytes);
    if (!block) return NULL;
  }
  char *ptr = (char *)block + block->used + padding(block, align);
  block->used = (size_t)(ptr - (char *)block) + bytes;
  arena->used += bytes;
  return ptr;
}

static void *zeroed(omc_arena *arena, size_t count, size_t size, size_t align) {
  size_t bytes;
  if (!omc_mul_size(count, size, &bytes)) return NULL;
  void *ptr = take(arena, bytes, align);
  if (ptr) memset(ptr, 0, bytes);
  return ptr;
}

void *omc_arena_alloc(omc_arena *arena, size_t count, size_t size) {
  return zeroed(arena, count, size, ALIGNMENT);
}

void *omc_arena_elements(omc_arena *arena, size_t count, size_t size) {
  return zeroed(arena, count, size, ELEMENTS_ALIGNMENT);
}

void *omc_arena_grow(omc_arena *arena, void *list, uint32_t n, uint32_t *cap, uint32_t need,
                     size_t size) {
  if (need <= *cap) return list;
  const uint32_t twice = *cap ? 2 * *cap : 8, room = need > twice ? need : twice;
  void *grown = omc_arena_alloc(arena, room, size);
  if (!grown) return NULL;
  if (n) memcpy(grown, list, n * size);
  *cap = room;
  return grown;
}

bool omc_arena_holds(const omc_arena *arena, const void *ptr) {
  for (const omc_arena_block *block = arena->blocks; block; block = block->next)
    if ((uintptr_t)ptr - (uintptr_t)block < block->bytes) return true;
  return false;
}

char *omc_arena_text(omc_arena *arena, const char *text, size_t n) {
  size_t bytes;
  if (!omc_add_size(n, 1, &bytes)) return NULL;
  char *copy = take(arena, bytes, 1);
  if (!copy) return NULL;
  memcpy(copy, text, n);
  copy[n] = '\0';
  return copy;
}
