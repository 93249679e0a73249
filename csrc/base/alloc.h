/* The allocator value that every owner of memory is given, and overflow-checked sizes. */
#ifndef OMC_BASE_ALLOC_H
#define OMC_BASE_ALLOC_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* `alloc` returns memory aligned for any C type, or NULL when there is none. `free` is given the
 * size asked for and accepts NULL. Both may be called from any thread. */
typedef struct omc_allocator {
  void *(*alloc)(void *ctx, size_t bytes);
  void (*free)(void *ctx, void *ptr, size_t bytes);
  void *ctx;
} omc_allocator;

/* The C library's malloc and free. */
OMC_API const omc_allocator *omc_default_allocator(void);

/* Allocates `count * size` bytes; NULL on overflow or when there is no memory. */
void *omc_alloc(const omc_allocator *a, size_t count, size_t size);

/* As omc_alloc, the bytes set to zero. */
void *omc_alloc_zero(const omc_allocator *a, size_t count, size_t size);

/* Frees what omc_alloc returned for the same count and size; NULL is accepted. */
void omc_free(const omc_allocator *a, void *ptr, size_t count, size_t size);

/* *out = a * b (a + b); false on overflow, *out then unchanged. */
bool omc_mul_size(size_t a, size_t b, size_t *out);
bool omc_add_size(size_t a, size_t b, size_t *out);

/* Smallest multiple of `to` (a power of two) that is not below `n`; n + to must fit in size_t. */
static inline size_t omc_round_up(size_t n, size_t to) { return (n + to - 1) & ~(to - 1); }

#ifdef __cplusplus
}
#endif

#endif
