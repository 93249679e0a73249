/* Which providers there are. */
#include "provider.h"

#include <stdlib.h>
#include <string.h>

#define OMC_PROVIDER(name) omc_status omc_##name##_provider(int32_t, const omc_provider **);
#include "providers.def"
#undef OMC_PROVIDER

static const struct {
  const char *name;
  omc_status (*get)(int32_t ordinal, const omc_provider **out);
} providers[] = {
#define OMC_PROVIDER(name) {#name, omc_##name##_provider},
#include "providers.def"
#undef OMC_PROVIDER
};

/* The host's is always there. */
const omc_provider *omc_provider_host(void) {
  const omc_provider *host = NULL;
  return providers[0].get(0, &host) == OMC_OK ? host : NULL;
}

omc_status omc_provider_told(const omc_provider *p) {
  const omc_status status = p->told ? p->told(p->ctx) : OMC_OK;
  if (status != OMC_OK) OMC_FAIL(EDEVICE, "work given before: %s", omc_status_detail());
  return OMC_OK;
}

/* The number after the colon, 0 if there is none; -1: no such number. */
static int32_t ordinal_of(const char *text) {
  char *end;
  if (*text == '\0') return 0;
  const long n = strtol(text + 1, &end, 10);
  return end != text + 1 && *end == '\0' && n >= 0 && n <= INT32_MAX ? (int32_t)n : -1;
}

omc_status omc_provider_find(const char *name, const omc_provider **out) {
  const size_t n = strcspn(name, ":");
  const int32_t ordinal = ordinal_of(name + n);
  for (size_t i = 0; ordinal >= 0 && i < sizeof providers / sizeof *providers; i++)
    if (strlen(providers[i].name) == n && memcmp(providers[i].name, name, n) == 0)
      return providers[i].get(ordinal, out);
  OMC_FAIL(EINVALID, "no provider is named '%.100s'", name);
}
