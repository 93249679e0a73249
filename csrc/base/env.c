#include "base/env.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static omc_env env;
static char dump[4096], isa[16], gemm[16]; /* copies: os.environ may free what getenv returns */

static const char *read_text(const char *name, char *copy, size_t size) {
  const char *value = getenv(name);
  if (!value || !*value || strlen(value) >= size) return NULL;
  return strcpy(copy, value);
}

static bool read_flag(const char *name) {
  const char *value = getenv(name);
  return value && *value && strcmp(value, "0") != 0;
}

static void read_all(void) {
  env.dump = read_text("OMC_DUMP", dump, sizeof dump);
  env.isa = read_text("OMC_ISA", isa, sizeof isa);
  env.gemm = read_text("OMC_GEMM", gemm, sizeof gemm);
  env.verify = read_flag("OMC_VERIFY");
  env.profile = read_flag("OMC_PROFILE");
}

const omc_env *omc_env_get(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, read_all);
  return &env;
}
