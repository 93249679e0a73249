/* The constants of a session's plans: each is held once, and uploaded once. */
#ifndef OMC_RUN_CONSTANTS_H
#define OMC_RUN_CONSTANTS_H

#include "provider.h"

typedef struct omc_constant omc_constant;

enum { OMC_CONSTANT_BUCKETS = 128 };

typedef struct omc_constants {
  const omc_allocator *allocator;
  const omc_provider *provider;
  omc_constant *by_elements[OMC_CONSTANT_BUCKETS]; /* copies, which plans refer to */
  omc_constant *by_place[OMC_CONSTANT_BUCKETS];    /* these, and what is somebody else's */
  size_t bytes;                                    /* of the copies */
} omc_constants;

/* Both must outlive *c. Allocates nothing. */
void omc_constants_init(omc_constants *c, const omc_allocator *allocator,
                        const omc_provider *provider);

/* Frees what is left: nobody may refer to it. */
void omc_constants_deinit(omc_constants *c);

/* What one plan refers to. */
typedef struct omc_constants_taken {
  omc_constants *from;
  omc_constant **items;
  uint32_t n, cap;
} omc_constants_taken;

/* Elements equal to these, to the bit, in memory that stays until `taken` is dropped: those that
 * another plan has taken, or a copy. Aligned as elements are. Any thread, as all that follows. */
omc_status omc_constants_take(omc_constants_taken *taken, const void *elements, size_t bytes,
                              const void **out) OMC_MUST_USE;

/* Lets go of all; what nobody else has taken is freed, and must not be read any more. */
void omc_constants_drop(omc_constants_taken *taken);

/* The same elements where kernels read them: what was taken, or memory of somebody else's that is
 * not freed before *c is. */
omc_status omc_constants_upload(omc_constants *c, const void *elements, size_t bytes,
                                void **out) OMC_MUST_USE;

/* Bytes of the copies that are held now, what plans have in common counted once. */
size_t omc_constants_bytes(omc_constants *c);

#endif
