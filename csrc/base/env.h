/* Every environment switch of the C core, read once at first use. A value that is empty, or longer
 * than any that has a meaning, counts as not set. */
#ifndef OMC_BASE_ENV_H
#define OMC_BASE_ENV_H

#include <stdbool.h>

typedef struct omc_env {
  const char *dump; /* OMC_DUMP=DIR: the graph after every stage is written there; NULL: off */
  const char *isa;  /* OMC_ISA=base|avx2|avx512: upper bound on the instruction set; NULL: best */
  const char *gemm; /* OMC_GEMM=own|torch: use that GEMM; NULL: measure once per shape */
  bool verify;      /* OMC_VERIFY=1: verify the graph after every stage */
  bool profile;     /* OMC_PROFILE=1: time every step; read back with Plan.profile() */
} omc_env;

/* Thread-safe; the struct lives for the process. */
const omc_env *omc_env_get(void);

#endif
