/* A stand-in for the memory of PyTorch for CUDA: what is freed is handed out again at once. */
#include <stddef.h>
#include <stdint.h>

#include <map>
#include <mutex>

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" int cuMemAlloc_v2(unsigned long long *at, size_t bytes);
extern "C" int cuDevicePrimaryCtxRetain(void **context, int device);
extern "C" int cuCtxPushCurrent_v2(void *context);
extern "C" int cuCtxPopCurrent_v2(void **context);

namespace {
std::mutex mutex;
std::map<void *, size_t> out;
std::multimap<size_t, void *> kept;
}  // namespace

EXPORT int aoti_torch_cuda_caching_allocator_raw_alloc(uint64_t bytes, void **at) {
  const std::lock_guard<std::mutex> lock(mutex);
  const size_t size = (bytes + 511) / 512 * 512;
  *at = nullptr;
  if (size == 0) return 0;
  const auto found = kept.find(size);
  unsigned long long fresh = 0;
  if (found != kept.end()) {
    fresh = (unsigned long long)found->second;
    kept.erase(found);
  } else {
    void *context = nullptr;
    int error = cuDevicePrimaryCtxRetain(&context, 0);
    if (error == 0) error = cuCtxPushCurrent_v2(context);
    if (error != 0) return 1;
    error = cuMemAlloc_v2(&fresh, size);
    cuCtxPopCurrent_v2(&context);
    if (error != 0) return 1;
  }
  out[ *at = (void *)fresh] = size;
  return 0;
}

EXPORT int aoti_torch_cuda_caching_allocator_raw_delete(void *at) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = out.find(at);
  if (!at || found == out.end()) return at ? 1 : 0;
  kept.emplace(found->second, at);
  out.erase(found);
  return 0;
}
