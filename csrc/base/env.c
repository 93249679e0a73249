#include "base/env.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/lock.h"

#define PREFIX "OMC_"
#define MAX_WORDS OMC_N_ISA

typedef struct variable {
  const char *name;
  size_t field;                 /* of omc_env: an int if there are words, else a path */
  const char *words[MAX_WORDS]; /* the value's position among them is what is stored */
} variable;

static const variable variables[] = {
    {"OMC_DUMP", offsetof(omc_env, dump), {NULL}},
    {"OMC_ISA", offsetof(omc_env, isa), {OMC_ISA_NAMES}},
    {"OMC_GEMM", offsetof(omc_env, gemm), {"own", "torch"}},
    {"OMC_VERIFY", offsetof(omc_env, verify), {"0", "1"}},
    {"OMC_PROFILE", offsetof(omc_env, profile), {"0", "1"}},
    {"OMC_SYNC", offsetof(omc_env, sync), {"0", "1"}},
    {"OMC_GRAPHS", offsetof(omc_env, graphs), {"0", "1"}},
};
enum { N_VARIABLES = sizeof variables / sizeof *variables, LIST_BYTES = 128 };

#define DEFAULTS {.isa = OMC_N_ISA, .graphs = 1}

static void append(char *list, const char *word) {
  const size_t used = strlen(list);
  snprintf(list + used, LIST_BYTES - used, used ? ", %s" : "%s", word);
}

static omc_status no_such_variable(const char *entry) {
  char known[LIST_BYTES] = "";
  for (int i = 0; i < N_VARIABLES; i++) append(known, variables[i].name);
  OMC_FAIL(EINVALID, "environment variable %.100s is unknown, there are %s", entry, known);
}

static omc_status read_word(const variable *v, const char *value, int *out) {
  char words[LIST_BYTES] = "";
  for (int i = 0; i < MAX_WORDS && v->words[i]; i++) {
    if (strcmp(value, v->words[i]) == 0) {
      *out = i;
      return OMC_OK;
    }
    append(words, v->words[i]);
  }
  OMC_FAIL(EINVALID, "environment variable %s is '%.100s', expected one of %s", v->name, value,
           words);
}

static omc_status read_directory(const variable *v, const char *value, char *out) {
  const size_t n = strlen(value);
  if (n >= OMC_ENV_PATH)
    OMC_FAIL(EINVALID,
             "environment variable %s has %zu bytes, at most %d are possible: '%.100s...'", v->name,
             n, OMC_ENV_PATH - 1, value);
  struct stat about;
  if (stat(value, &about) != 0 || !S_ISDIR(about.st_mode) || access(value, W_OK | X_OK) != 0)
    OMC_FAIL(EINVALID, "environment variable %s is '%.200s', not a directory that can be written",
             v->name, value);
  memcpy(out, value, n + 1);
  return OMC_OK;
}

static omc_status read_variable(const char *entry, omc_env *env) {
  const size_t n = strcspn(entry, "=");
  const char *value = entry + n + (entry[n] == '=');
  for (int i = 0; i < N_VARIABLES; i++) {
    const variable *v = &variables[i];
    if (strlen(v->name) != n || memcmp(v->name, entry, n) != 0) continue;
    char *field = (char *)env + v->field;
    if (!*value) return OMC_OK;
    return v->words[0] ? read_word(v, value, (int *)(void *)field)
                       : read_directory(v, value, field);
  }
  return no_such_variable(entry);
}

omc_status omc_env_read(char *const *entries, omc_env *out) {
  *out = (omc_env)DEFAULTS;
  for (; *entries; entries++)
    if (strncmp(*entries, PREFIX, strlen(PREFIX)) == 0) OMC_TRY(read_variable(*entries, out));
  return OMC_OK;
}

static omc_env env = DEFAULTS;
OMC_PROCESS_LOCK(loading)

omc_status omc_env_load(void) {
  static bool loaded;
  loading_acquire();
  omc_status status = OMC_OK;
  if (!loaded) {
    omc_env read;
    status = omc_env_read(environ, &read);
    loaded = status == OMC_OK;
    if (loaded) env = read;
  }
  loading_release();
  return status;
}

const omc_env *omc_env_get(void) { return &env; }
