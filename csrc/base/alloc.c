#include "base/alloc.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static void *c_alloc(void *ctx, size_t bytes) {
  (void)ctx;
  return malloc(bytes);
}

static void c_free(void *ctx, void *ptr, size_t bytes) {
  (void)ctx;
  (void)bytes;
  free(ptr);
}

const omc_allocator *omc_default_allocator(void) {
  static const omc_allocator allocator = {c_alloc, c_free, NULL};
  return &allocator;
}

bool omc_mul_size(size_t a, size_t b, size_t *out) {
  if (b && a > SIZE_MAX / b) return false;
  *out = a * b;
  return true;
}

bool omc_add_size(size_t a, size_t b, size_t *out) {
  if (a > SIZE_MAX - b) return false;
  *out = a + b;
  return true;
}

/* Nothing is asked for as one byte, so that NULL always means failure. */
void *omc_alloc(const omc_allocator *a, size_t count, size_t size) {
  size_t bytes;
  if (!omc_mul_size(count, size, &bytes)) return NULL;
  return a->alloc(a->ctx, bytes ? bytes : 1);
}

void *omc_alloc_zero(const omc_allocator *a, size_t count, size_t size) {
  void *ptr = omc_alloc(a, count, size);
  if (ptr) memset(ptr, 0, count * size);
  return ptr;
}

void omc_free(const omc_allocator *a, void *ptr, size_t count, size_t size) {
  const size_t bytes = count * size;
  if (ptr) a->free(a->ctx, ptr, bytes ? bytes : 1);
}
