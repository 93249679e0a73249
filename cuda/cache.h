/* Compiled device code on disk, so that a process does not compile what an earlier one has. */
#ifndef OMC_CUDA_CACHE_H
#define OMC_CUDA_CACHE_H

#include <stdbool.h>
#include <stddef.h>

/* What was kept under this key, `*bytes` of it, to be given to free(); NULL if there is nothing, or
 * nothing that can be trusted: a file that others may write to, or whose key, length or sum is not
 * what it should be. */
void *omc_cuda_cache_get(const char *key, size_t *bytes);

/* Keeps it, or not: a disk that is full is no failure. */
void omc_cuda_cache_put(const char *key, const void *image, size_t bytes);

#endif
