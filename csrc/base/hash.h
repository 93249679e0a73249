/* Hashes for tables in memory: they mean nothing outside of the process. */
#ifndef OMC_BASE_HASH_H
#define OMC_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

/* What `hash` becomes with one more number. */
static inline uint64_t omc_hash_mix(uint64_t hash, uint64_t x) {
  hash = (hash ^ x) * 0x9E3779B97F4A7C15u;
  return hash ^ hash >> 32;
}

/* Of n bytes: FNV-1a, folded so that its low bits depend on all of them. */
static inline uint64_t omc_hash_bytes(const void *bytes, size_t n) {
  uint64_t hash = 14695981039346656037u;
  for (size_t i = 0; i < n; i++) hash = (hash ^ ((const unsigned char *)bytes)[i]) * 1099511628211u;
  return hash ^ hash >> 32;
}

#endif
