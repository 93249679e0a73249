/* How a kernel says that it could not do what it was asked for: the first letter is kept, until the
 * host reads it. Read by the host as C11. */
#ifndef OMC_GPU_LETTER_H
#define OMC_GPU_LETTER_H

#include "cuda/gpu/target.h"

typedef enum {
  OMC_LETTER_NONE,
  OMC_LETTER_DIVISION,
  OMC_LETTER_INDEX,
  OMC_LETTER_BOUNDS, /* the same, where PyTorch has another exception for it */
  OMC_LETTER_DOMAIN
} omc_letter_kind;

typedef struct omc_letter {
  uint32_t kind; /* an omc_letter_kind; what follows is there when it is read */
  uint32_t taken;
  uint64_t node;        /* the host's address of the node's name */
  int64_t value, bound; /* an index, and what it has to be below */
} omc_letter;

/* A kernel's own: where to write to, and for whom. */
typedef struct omc_sender {
  omc_letter *letter;
  uint64_t node;
} omc_sender;

#ifdef OMC_GPU
OMC_INLINE void omc_write(const omc_sender &from, omc_letter_kind kind, int64_t value,
                          int64_t bound) {
  if (atomicCAS_system(&from.letter->taken, 0u, 1u) != 0) return;
  from.letter->node = from.node;
  from.letter->value = value;
  from.letter->bound = bound;
  __threadfence_system();
  *(volatile uint32_t *)&from.letter->kind = kind;
}
#endif

#endif
