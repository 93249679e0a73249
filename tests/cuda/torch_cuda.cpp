/* A stand-in for the memory of PyTorch for CUDA, which is of the device whose context is current:
 * what is freed is handed out again at once, the lowest address of a size first. */
#include <stddef.h>
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <set>

#include "emulated.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" int cuMemAlloc_v2(unsigned long long *at, size_t bytes);
extern "C" int cuThreadExchangeStreamCaptureMode(int *mode);

namespace {
/* Memory may be asked for while streams are captured. */
int fresh_memory(unsigned long long *at, size_t bytes) {
  int mode = 2 /* relaxed */;
  cuThreadExchangeStreamCaptureMode(&mode);
  const int error = cuMemAlloc_v2(at, bytes);
  cuThreadExchangeStreamCaptureMode(&mode);
  return error;
}

std::mutex mutex;
std::map<void *, size_t> out;
std::set<std::pair<size_t, void *>> kept;
void (*watcher)();
}  // namespace

EXPORT void emulated_watch_memory(void (*called)(void)) { watcher = called; }

EXPORT void emulated_fork(void) {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);
}

EXPORT int aoti_torch_cuda_caching_allocator_raw_alloc(uint64_t bytes, void **at) {
  if (watcher) watcher();
  const std::lock_guard<std::mutex> lock(mutex);
  const size_t size = (bytes + 511) / 512 * 512;
  if (!emulated_has_context()) emulated_mistake("memory is asked for without a context");
  *at = nullptr;
  if (size == 0) return 0;
  const auto found = kept.lower_bound({size, nullptr});
  unsigned long long fresh = 0;
  if (found != kept.end() && found->first == size) {
    fresh = (unsigned long long)found->second;
    kept.erase(found);
  } else {
    if (const int error = fresh_memory(&fresh, size)) return emulated_driver_failed(error);
  }
  out[ *at = (void *)fresh] = size;
  return 0;
}

EXPORT int aoti_torch_cuda_caching_allocator_raw_delete(void *at) {
  if (watcher) watcher();
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = out.find(at);
  if (!at || found == out.end()) return at ? 1 : 0;
  kept.insert({found->second, at});
  out.erase(found);
  return 0;
}
