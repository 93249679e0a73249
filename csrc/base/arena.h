/* Bump arena: many small objects, freed together. Not safe for use by two threads at once. */
#ifndef OMC_BASE_ARENA_H
#define OMC_BASE_ARENA_H

#include <stdint.h>

#include "base/alloc.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct omc_arena_block omc_arena_block;

typedef struct omc_arena {
  const omc_allocator *allocator;
  omc_arena_block *blocks; /* newest first */
  size_t used;             /* bytes handed out, all blocks */
} omc_arena;

/* `allocator` must outlive the arena. Allocates nothing. */
OMC_API void omc_arena_init(omc_arena *arena, const omc_allocator *allocator);

/* Frees every block; the arena may be used again. */
OMC_API void omc_arena_deinit(omc_arena *arena);

/* `count * size` zeroed bytes, aligned to 16; NULL on overflow or when there is no memory. */
void *omc_arena_alloc(omc_arena *arena, size_t count, size_t size);

/* The same for the elements of a tensor, aligned to 64. */
void *omc_arena_elements(omc_arena *arena, size_t count, size_t size);

/* Copies `n` bytes of `text` and a terminating zero; NULL when there is no memory. */
char *omc_arena_text(omc_arena *arena, const char *text, size_t n);

/* Room for `need` elements: `list` where *cap is as many, else, with *cap as it is then, a copy of
 * its first n elements with room for twice as many as before at least. NULL when there is no
 * memory, *cap and `list` then unchanged. */
void *omc_arena_grow(omc_arena *arena, void *list, uint32_t n, uint32_t *cap, uint32_t need,
                     size_t size);

/* Whether `ptr` points into memory of the arena. */
bool omc_arena_holds(const omc_arena *arena, const void *ptr);

/* Typed forms: OMC_NEW(arena, omc_node) and OMC_NEW_ARRAY(arena, int64_t, n). */
#define OMC_NEW(arena, type) ((type *)omc_arena_alloc((arena), 1, sizeof(type)))
#define OMC_NEW_ARRAY(arena, type, n) ((type *)omc_arena_alloc((arena), (size_t)(n), sizeof(type)))

#ifdef __cplusplus
}
#endif

#endif
