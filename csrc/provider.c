/* Which providers there are. */
#include "provider.h"

#include <string.h>

#define OMC_PROVIDER(name) const omc_provider *omc_##name##_provider(void);
#include "providers.def"
#undef OMC_PROVIDER

static const omc_provider *(*const providers[])(void) = {
#define OMC_PROVIDER(name) omc_##name##_provider,
#include "providers.def"
#undef OMC_PROVIDER
};

const omc_provider *omc_provider_host(void) { return providers[0](); }

const omc_provider *omc_provider_find(const char *name) {
  for (size_t i = 0; i < sizeof providers / sizeof *providers; i++)
    if (strcmp(providers[i]()->name, name) == 0) return providers[i]();
  return NULL;
}
