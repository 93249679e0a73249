/* What holds for any bytes given to the parser: shared by test_text.c and the fuzzer. */
#ifndef OMC_TESTS_ROUNDTRIP_H
#define OMC_TESTS_ROUNDTRIP_H

#include "graph/text.h"

/* Parses; if that succeeds, the graph is valid, printing it gives text that parses and prints the
 * same, and so does a clone. Returns NULL, or what does not hold. Running out of memory anywhere
 * is no breach. Constants given as `@` find zeros of at most 4096 bytes. */
const char *omc_roundtrip(const omc_allocator *allocator, const char *text, size_t n);

/* Finds `ctx` (const size_t *) bytes of zeros for any name. */
omc_status omc_find_zeros(void *ctx, const char *name, const void **data, size_t *bytes);

#endif
