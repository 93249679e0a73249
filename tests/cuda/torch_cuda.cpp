/* A stand-in for the memory of PyTorch for CUDA, which is of the device that is current to PyTorch:
 * what is freed is handed out again at once in the stream that was in use when it was made, the
 * lowest address of a size first. A block has zones around it, and what is freed has other bytes
 * from there on in that stream: who writes past an end is told, who reads too late sees it. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include "emulated.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" int cuMemAlloc_v2(unsigned long long *at, size_t bytes);
extern "C" int cuCtxPushCurrent_v2(void *context);
extern "C" int cuCtxPopCurrent_v2(void **context);
extern "C" int cuThreadExchangeStreamCaptureMode(int *mode);

/* ---- the device that is current, as in PyTorch's c10/cuda/CUDAFunctions.cpp ---- */

namespace {
/* One that has no context yet is remembered here alone, whatever context is current then. */
thread_local int remembered = -1;
}  // namespace

int emulated_current_device() { return remembered < 0 ? emulated_device() : remembered; }
int emulated_exchange_device(int device) {
  const int before = emulated_current_device();
  if (before != device || remembered >= 0) emulated_set_device(device);
  remembered = -1;
  return before;
}
void emulated_restore_device(int device) {
  if (emulated_is_retained(device))
    emulated_exchange_device(device);
  else
    remembered = device;
}

/* ---- memory ---- */

namespace {
/* Memory may be asked for while the stream that it is for is captured, not while another is. */
int fresh_memory(unsigned long long *at, size_t bytes, void *stream) {
  int mode = 2 /* relaxed */;
  const bool relaxed = !emulated_takes(stream);
  if (relaxed) cuThreadExchangeStreamCaptureMode(&mode);
  const int error = cuMemAlloc_v2(at, bytes);
  if (relaxed) cuThreadExchangeStreamCaptureMode(&mode);
  return error;
}

/* What the driver is asked for meanwhile is asked of a device. */
struct within {
  explicit within(int device) { cuCtxPushCurrent_v2(emulated_context(device)); }
  ~within() {
    void *context;
    cuCtxPopCurrent_v2(&context);
  }
};

constexpr size_t ZONE_BYTES = 512;
enum { ZONE = 0xA5, FREED = 0xCB };

/* A block that is out: `bytes` of `size`, with zones before and behind, for a stream. */
struct block {
  int device;
  char *at;
  size_t bytes, size;
  void *stream;
  bool zoned;
};

std::mutex mutex;
std::map<void *, block> out;
std::set<std::tuple<int, void *, size_t, char *>> kept; /* of a device and a stream */
void *streams_in_use[EMULATED_DEVICES];
void (*watcher)();

void drop(void *given) { delete (block *)given; }

/* In the order of its stream; what is captured is done at each launch, and left alone. */
bool later(int (*job)(void *), const block &b) {
  return emulated_takes(b.stream) && emulated_give(b.stream, job, new block(b), drop) == 0;
}

int mark(void *given) {
  const block &b = *(block *)given;
  memset(b.at - ZONE_BYTES, ZONE, ZONE_BYTES);
  memset(b.at + b.bytes, ZONE, b.size - b.bytes + ZONE_BYTES);
  return 0;
}

bool is_zone(const char *begin, const char *end) {
  return std::all_of(begin, end, [](char c) { return (unsigned char)c == ZONE; });
}

int look(void *given) {
  const block &b = *(block *)given;
  if (!is_zone(b.at - ZONE_BYTES, b.at) || !is_zone(b.at + b.bytes, b.at + b.size + ZONE_BYTES))
    emulated_mistake("a block is written to before its begin or behind its end");
  return 0;
}

int spoil(void *given) {
  const block &b = *(block *)given;
  memset(b.at, FREED, b.size);
  return 0;
}

/* The lowest of those that are free, or a new one. */
int find(block *b) {
  const auto found = kept.lower_bound({b->device, b->stream, b->size, nullptr});
  if (found != kept.end()) {
    const auto &[device, stream, size, at] = *found;
    if (device == b->device && stream == b->stream && size == b->size) {
      b->at = at;
      kept.erase(found);
      return 0;
    }
  }
  unsigned long long fresh = 0;
  const int error = fresh_memory(&fresh, b->size + 2 * ZONE_BYTES, b->stream);
  b->at = (char *)fresh + ZONE_BYTES;
  return error;
}
}  // namespace

EXPORT void emulated_use(int device, void *stream) { streams_in_use[device] = stream; }
void *emulated_used(int device) { return streams_in_use[device]; }

EXPORT void emulated_watch_memory(void (*called)(void)) { watcher = called; }

EXPORT void emulated_fork(void) {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);
}

EXPORT int aoti_torch_cuda_caching_allocator_raw_alloc(uint64_t bytes, void **at) {
  if (watcher) watcher();
  const std::lock_guard<std::mutex> lock(mutex);
  if (!emulated_has_context()) emulated_mistake("memory is asked for without a context");
  *at = nullptr;
  if (bytes == 0) return 0;
  const int device = emulated_current_device();
  const within now(device);
  block b = {device, nullptr, bytes, (bytes + 511) / 512 * 512, streams_in_use[device], false};
  if (const int error = find(&b)) return emulated_driver_failed(error);
  b.zoned = later(mark, b);
  out[ *at = b.at] = b;
  return 0;
}

EXPORT int aoti_torch_cuda_caching_allocator_raw_delete(void *at) {
  if (watcher) watcher();
  const std::lock_guard<std::mutex> lock(mutex);
  if (!at) return 0;
  const auto found = out.find(at);
  if (found == out.end()) {
    emulated_mistake("memory is given back that is not out");
    return 1;
  }
  const block b = found->second;
  const within now(b.device);
  if (b.zoned) later(look, b);
  later(spoil, b);
  kept.insert({b.device, b.stream, b.size, b.at});
  out.erase(found);
  return 0;
}
