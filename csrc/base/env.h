/* Every environment variable of the C core, read once. What is not set, or empty, has its default;
 * a value without a meaning is refused, and so is a variable of the prefix OMC_ that is none of
 * these: a switch that is misspelt must not pass for one that is on. */
#ifndef OMC_BASE_ENV_H
#define OMC_BASE_ENV_H

#include <stdbool.h>

#include "base/isa.h"
#include "base/status.h"

typedef enum { OMC_GEMM_OWN, OMC_GEMM_TORCH } omc_gemm_choice;

#define OMC_ENV_PATH 3900 /* bytes; leaves room for the name of a file under PATH_MAX */

typedef struct omc_env {
  char dump[OMC_ENV_PATH]; /* OMC_DUMP=DIR: the graph after every stage goes there; "": off */
  int isa;     /* OMC_ISA, a name of OMC_ISAS: upper bound, an omc_isa; default OMC_N_ISA: none */
  int gemm;    /* OMC_GEMM=own|torch: whose matrix product, an omc_gemm_choice; default own */
  int verify;  /* OMC_VERIFY=0|1: verify the graph after every stage */
  int profile; /* OMC_PROFILE=0|1: time every step; read back with Plan.profile() */
  int sync; /* OMC_SYNC=0|1: wait for the device after every step, whose failures are told there */
  int graphs; /* OMC_GRAPHS=0|1: a GPU repeats what it was given as a graph of CUDA's; default 1 */
} omc_env;

/* Reads the variables among `variables` ("NAME=VALUE", ends with NULL) over the defaults.
 * OMC_EINVALID: one is unknown, has no such value, or names no directory that can be written. */
omc_status omc_env_read(char *const *variables, omc_env *out) OMC_MUST_USE;

/* Reads this process's environment, unless that has succeeded before. Any thread. Errors: those of
 * omc_env_read; it may then be called again. */
omc_status omc_env_load(void) OMC_MUST_USE;

/* What omc_env_load has read, before it the defaults; lives for the process. */
const omc_env *omc_env_get(void);

#endif
