#include "run/constants.h"

#include <string.h>

#include "base/hash.h"
#include "base/lock.h"

#define ALIGNMENT ((size_t)64)

struct omc_constant {
  omc_constant *equal, *near; /* next in the lists of the two tables */
  uint64_t hash;              /* of the elements */
  const void *elements;
  const void *uploaded; /* NULL: not yet */
  void *memory;         /* NULL: the elements are somebody else's */
  size_t bytes;
  uint32_t references;
};

/* Of all tables. Not held where the provider is asked for memory or given it back: others' code
 * runs there, which may wait for Python, whose holder may drop a plan. */
OMC_PROCESS_LOCK(pool)

void omc_constants_init(omc_constants *c, const omc_allocator *allocator,
                        const omc_provider *provider) {
  *c = (omc_constants){.allocator = allocator, .provider = provider};
}

static omc_constant **same_place(omc_constants *c, const void *elements) {
  return &c->by_place[((uintptr_t)elements / ALIGNMENT) % OMC_CONSTANT_BUCKETS];
}

/* Enters it in the tables; `memory` NULL: its elements are borrowed. */
static omc_status add(omc_constants *c, const void *elements, void *memory, size_t bytes,
                      uint64_t hash, omc_constant **out) {
  omc_constant *k = omc_alloc_zero(c->allocator, 1, sizeof *k);
  if (!k) OMC_FAIL(ENOMEM, "no memory for the constants of a plan");
  omc_constant **near = same_place(c, elements);
  k->elements = elements, k->memory = memory, k->bytes = bytes, k->hash = hash;
  k->near = *near;
  *near = k;
  if (memory) {
    omc_constant **equal = &c->by_elements[hash % OMC_CONSTANT_BUCKETS];
    k->equal = *equal;
    *equal = k;
    c->bytes += bytes;
  }
  *out = k;
  return OMC_OK;
}

static omc_status copy_in(omc_constants *c, const void *elements, size_t bytes, uint64_t hash,
                          omc_constant **out) {
  char *memory = omc_alloc(c->allocator, 1, bytes + ALIGNMENT);
  if (!memory) OMC_FAIL(ENOMEM, "no memory for a constant of %zu bytes", bytes);
  void *to = memory + (ALIGNMENT - (uintptr_t)memory % ALIGNMENT);
  memcpy(to, elements, bytes);
  const omc_status status = add(c, to, memory, bytes, hash, out);
  if (status != OMC_OK) omc_free(c->allocator, memory, 1, bytes + ALIGNMENT);
  return status;
}

static void destroy(omc_constants *c, omc_constant *k) {
  const omc_provider *p = c->provider;
  if (k->uploaded) p->unload(p->ctx, k->uploaded, k->bytes);
  if (k->memory) omc_free(c->allocator, k->memory, 1, k->bytes + ALIGNMENT);
  omc_free(c->allocator, k, 1, sizeof *k);
}

void omc_constants_deinit(omc_constants *c) {
  for (uint32_t b = 0; b < OMC_CONSTANT_BUCKETS; b++)
    for (omc_constant *k = c->by_place[b], *next; k; k = next) {
      next = k->near;
      destroy(c, k);
    }
}

static omc_status reserve(omc_constants_taken *taken) {
  if (taken->n < taken->cap) return OMC_OK;
  const omc_allocator *a = taken->from->allocator;
  const uint32_t room = taken->cap ? 2 * taken->cap : 16;
  omc_constant **grown = omc_alloc(a, room, sizeof(omc_constant *));
  if (!grown) OMC_FAIL(ENOMEM, "no memory for the constants of a plan");
  if (taken->n) memcpy(grown, taken->items, taken->n * sizeof(omc_constant *));
  omc_free(a, taken->items, taken->cap, sizeof(omc_constant *));
  taken->items = grown;
  taken->cap = room;
  return OMC_OK;
}

static omc_status find_or_copy(omc_constants *c, const void *elements, size_t bytes,
                               omc_constant **out) {
  const uint64_t hash = omc_hash_bytes(elements, bytes);
  omc_constant *k = c->by_elements[hash % OMC_CONSTANT_BUCKETS];
  while (k && (k->hash != hash || k->bytes != bytes || memcmp(k->elements, elements, bytes) != 0))
    k = k->equal;
  *out = k;
  return k ? OMC_OK : copy_in(c, elements, bytes, hash, out);
}

omc_status omc_constants_take(omc_constants_taken *taken, const void *elements, size_t bytes,
                              const void **out) {
  omc_constant *k = NULL;
  OMC_TRY(reserve(taken));
  pool_acquire();
  const omc_status status = find_or_copy(taken->from, elements, bytes, &k);
  if (status == OMC_OK) {
    k->references++;
    taken->items[taken->n++] = k;
    *out = k->elements;
  }
  pool_release();
  return status;
}

/* Takes it out of the tables. */
static void forget(omc_constants *c, omc_constant *k) {
  omc_constant **near = same_place(c, k->elements);
  while (*near != k) near = &(*near)->near;
  *near = k->near;
  omc_constant **equal = &c->by_elements[k->hash % OMC_CONSTANT_BUCKETS];
  while (*equal != k) equal = &(*equal)->equal;
  *equal = k->equal;
  c->bytes -= k->bytes;
}

void omc_constants_drop(omc_constants_taken *taken) {
  uint32_t n_unused = 0;
  pool_acquire();
  for (uint32_t i = 0; i < taken->n; i++) {
    omc_constant *k = taken->items[i];
    if (--k->references > 0) continue;
    forget(taken->from, k);
    taken->items[n_unused++] = k;
  }
  pool_release();
  for (uint32_t i = 0; i < n_unused; i++) destroy(taken->from, taken->items[i]);
  omc_free(taken->from->allocator, taken->items, taken->cap, sizeof(omc_constant *));
  *taken = (omc_constants_taken){.from = taken->from};
}

static omc_status find_or_borrow(omc_constants *c, const void *elements, size_t bytes,
                                 omc_constant **out) {
  omc_constant *k = *same_place(c, elements);
  while (k && (k->elements != elements || k->bytes != bytes)) k = k->near;
  *out = k;
  return k ? OMC_OK : add(c, elements, NULL, bytes, 0, out);
}

/* What is there of it on the device; `fresh`, NULL or an upload of it, is that if there is nothing
 * yet, and unloaded if there is. */
static const void *settle(omc_constants *c, omc_constant *k, const void *fresh) {
  const omc_provider *p = c->provider;
  pool_acquire();
  const bool first = !k->uploaded;
  if (first) k->uploaded = fresh;
  const void *uploaded = k->uploaded;
  pool_release();
  if (fresh && !first) p->unload(p->ctx, fresh, k->bytes);
  return uploaded;
}

omc_status omc_constants_upload(omc_constants *c, const void *elements, size_t bytes, void **out) {
  const omc_provider *p = c->provider;
  omc_constant *k;
  pool_acquire();
  const omc_status status = find_or_borrow(c, elements, bytes, &k);
  pool_release();
  OMC_TRY(status);
  const void *uploaded = settle(c, k, NULL);
  if (!uploaded) {
    OMC_TRY(p->upload(p->ctx, elements, bytes, &uploaded));
    uploaded = settle(c, k, uploaded);
  }
  *out = (void *)(uintptr_t)uploaded;
  return OMC_OK;
}

size_t omc_constants_bytes(omc_constants *c) {
  pool_acquire();
  const size_t bytes = c->bytes;
  pool_release();
  return bytes;
}
