#include "cpu/torch_shims.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>

static omc_torch_shims shims;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static const struct {
  const char *name;
  size_t slot;
} symbols[] = {
    {"sgemm_", offsetof(omc_torch_shims, sgemm)},
    {"dgemm_", offsetof(omc_torch_shims, dgemm)},
    {"MKL_Set_Num_Threads_Local", offsetof(omc_torch_shims, set_num_threads_local)},
};

static void look_up(void) {
  void *library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return;
  for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
    void *address = dlsym(library, symbols[i].name);
    memcpy((char *)&shims + symbols[i].slot, &address, sizeof address);
  }
}

const omc_torch_shims *omc_torch_shims_get(void) {
  pthread_once(&once, look_up);
  return &shims;
}
