/* A stand-in for NVIDIA's driver: devices of memory that the host may not touch, nor the other
 * device, streams that are threads, modules that are libraries of emulated kernels. It says what
 * its user does wrong, and fails when it is told to. Where the driver would look for itself what
 * device is meant it is strict: all that a call is given is of the context that is current. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "emulated.h"

namespace {

enum result {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  ILLEGAL_STATE = 401,
  NOT_FOUND = 500,
  LAUNCH_FAILED = 719,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_INVALIDATED = 901,
  CAPTURE_ISOLATION = 905,
  CAPTURE_IMPLICIT = 906,
  CAPTURE_WRONG_THREAD = 908
};
const struct {
  int code;
  const char *name, *text;
} results[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed now"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
};

constexpr size_t MEMORY_BYTES = (size_t)1 << 32, ALIGNMENT = 512;          /* of each device */
const int SHARED_BYTES = emulated_number("EMULATED_SHARED_BYTES", 232448); /* of a block */
int the_contexts[EMULATED_DEVICES];
bool retained[EMULATED_DEVICES];

std::mutex mutex; /* of all that follows */
std::condition_variable &changed =
    *new std::condition_variable; /* threads wait for it when the process ends */
emulated_counts counts[EMULATED_DEVICES];
int64_t fail_in = -1;
const char *fail_name;
int fail_with;
bool initialised;
thread_local std::vector<int> contexts; /* the devices that they are of */

/* That whose context is current. */
int device_now() { return contexts.empty() ? 0 : contexts.back(); }

void mistake(const char *format, ...) {
  va_list args;
  va_start(args, format);
  fputs("driver: ", stderr);
  vfprintf(stderr, format, args);
  fputc('\n', stderr);
  va_end(args);
  counts[device_now()].mistakes++;
}

/* ---- memory ---- */

char *memory;                          /* of all devices, one after the other */
unsigned n_accesses[EMULATED_DEVICES]; /* now: there is no access to the pages while this is 0 */
std::mutex opening;
std::map<size_t, size_t> blocks; /* offset -> bytes */

int device_of(const void *at) { return (int)((size_t)((const char *)at - memory) / MEMORY_BYTES); }

void open_memory() {
  if (memory) return;
  memory = (char *)mmap(nullptr, EMULATED_DEVICES * MEMORY_BYTES, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) abort();
}

/* While a kernel runs or a copy is made; the host traps where it reads or writes at other times. */
struct touching {
  const int device;
  explicit touching(int device_) : device(device_) { change(1, PROT_READ | PROT_WRITE); }
  ~touching() { change(-1, PROT_NONE); }
  void change(int by, int protection) const {
    const std::lock_guard<std::mutex> lock(opening);
    const bool turns = n_accesses[device] == (by > 0 ? 0u : 1u);
    n_accesses[device] += (unsigned)by;
    if (turns && mprotect(memory + device * MEMORY_BYTES, MEMORY_BYTES, protection) != 0) abort();
  }
};

/* Within one block that is out, of the device. */
bool is_allocated(const void *at, size_t bytes) {
  const size_t offset = (size_t)((const char *)at - memory);
  if ((const char *)at < memory || device_of(at) != device_now()) return false;
  auto next = blocks.upper_bound(offset);
  if (next == blocks.begin()) return false;
  const auto &[start, size] = *--next;
  return offset + bytes <= start + size;
}

/* ---- every call ---- */

bool fails(const char *name) {
  if (fail_in < 0 || (fail_name && strcmp(name, fail_name) != 0)) return false;
  return fail_in-- == 0;
}

#define ENTER(needs_context)                   \
  std::unique_lock<std::mutex> lock(mutex);    \
  if (fails(__func__)) return fail_with;       \
  if (!initialised) return NOT_INITIALIZED;    \
  if ((needs_context) && contexts.empty()) {   \
    mistake("%s without a context", __func__); \
    return INVALID_CONTEXT;                    \
  }

struct grid {
  unsigned blocks, threads, shared_bytes;
};
struct function {
  std::string name;
  int device;
  bool (*run)(const void *, grid);
  size_t bytes;
  unsigned most_shared_bytes = 48 << 10;
};
std::map<void *, int> modules; /* the devices that they are loaded on */
std::map<std::pair<void *, std::string>, function *> functions;
std::string launched; /* a line for each */
bool logs;

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
typedef unsigned long long device_ptr;

#include "streams.h"

EXPORT int cuInit(unsigned) {
  std::unique_lock<std::mutex> lock(mutex);
  if (fails(__func__)) return fail_with;
  initialised = true;
  open_memory();
  return SUCCESS;
}

EXPORT int cuDriverGetVersion(int *version) {
  std::unique_lock<std::mutex> lock(mutex);
  if (fails(__func__)) return fail_with;
  *version = emulated_number("EMULATED_DRIVER", 13000);
  return SUCCESS;
}

EXPORT int cuGetErrorName(int error, const char **name) {
  for (const auto &r : results)
    if (r.code == error) return *name = r.name, SUCCESS;
  return INVALID_VALUE;
}
EXPORT int cuGetErrorString(int error, const char **text) {
  for (const auto &r : results)
    if (r.code == error) return *text = r.text, SUCCESS;
  return INVALID_VALUE;
}

EXPORT int cuDeviceGet(int *device, int ordinal) {
  ENTER(false)
  if (ordinal < 0 || ordinal >= EMULATED_DEVICES) return INVALID_DEVICE;
  *device = ordinal;
  return SUCCESS;
}
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
  ENTER(false)
  static const std::map<int, int> values = {
      {16, 4}, {38, 1024}, {75, 9}, {76, 0}, {97, SHARED_BYTES}};
  if (device >= EMULATED_DEVICES || !values.count(attribute)) return INVALID_VALUE;
  *value = values.at(attribute);
  return SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
  ENTER(false)
  *context = &the_contexts[device];
  retained[device] = true;
  return SUCCESS;
}
/* These two fail for nothing else than a context that there is not. */
EXPORT int cuCtxPushCurrent_v2(void *context) {
  std::unique_lock<std::mutex> lock(mutex);
  const ptrdiff_t device = (int *)context - the_contexts;
  if (device < 0 || device >= EMULATED_DEVICES) return INVALID_CONTEXT;
  contexts.push_back((int)device);
  return SUCCESS;
}
EXPORT int cuCtxPopCurrent_v2(void **context) {
  std::unique_lock<std::mutex> lock(mutex);
  if (contexts.empty()) {
    mistake("cuCtxPopCurrent without a context");
    return INVALID_CONTEXT;
  }
  *context = &the_contexts[contexts.back()];
  contexts.pop_back();
  return SUCCESS;
}
EXPORT int cuModuleLoadData(void **module, const void *image) {
  ENTER(true)
  if (const int error = forbidden()) return error;
  const char *bytes = (const char *)image;
  uint64_t size;
  if (memcmp(bytes, "EMULATED", 8) != 0) return INVALID_IMAGE;
  memcpy(&size, bytes + 8, sizeof size);
  const int file = memfd_create("module", 0); /* stays open: libraries are known by their paths */
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", file);
  const bool written = file >= 0 && write(file, bytes + 16, size) == (ssize_t)size;
  *module = written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (!*module) mistake("a module that cannot be loaded: %s", dlerror());
  modules[*module] = device_now();
  return *module ? SUCCESS : INVALID_IMAGE;
}
EXPORT int cuModuleGetFunction(void **out, void *module, const char *name) {
  ENTER(true)
  function *&f = functions[{module, name}];
  const auto bytes = (const size_t *)dlsym(module, (std::string(name) + "_bytes").c_str());
  if (!bytes) return NOT_FOUND;
  if (!f)
    f = new function{name, modules.at(module), (bool (*)(const void *, grid))dlsym(module, name),
                     *bytes};
  *out = f;
  return SUCCESS;
}
EXPORT int cuFuncSetAttribute(void *handle, int attribute, int value) {
  ENTER(true)
  if (attribute != 8 || value < 0 || value > SHARED_BYTES) return INVALID_VALUE;
  ((function *)handle)->most_shared_bytes = (unsigned)value;
  return SUCCESS;
}

EXPORT int cuLaunchKernel(void *handle, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z,
                          unsigned shared_bytes, void *on, void **parameters, void **extra) {
  ENTER(true)
  if (grid_x == 0 || grid_x > 0x7fffffffu || grid_y != 1 || grid_z != 1 || block_x == 0 ||
      block_x > 1024 || block_y != 1 || block_z != 1 || extra) {
    mistake("a launch of %u %u %u blocks of %u %u %u threads", grid_x, grid_y, grid_z, block_x,
            block_y, block_z);
    return INVALID_VALUE;
  }
  const function *f = (const function *)handle;
  if (f->device != device_now()) {
    mistake("a kernel of device %d is launched on device %d", f->device, device_now());
    return INVALID_HANDLE;
  }
  if (shared_bytes > f->most_shared_bytes) {
    mistake("a launch with %u bytes of shared memory, %u were asked for", shared_bytes,
            f->most_shared_bytes);
    return INVALID_VALUE;
  }
  const std::vector<char> copy((char *)parameters[0], (char *)parameters[0] + f->bytes);
  counts[device_now()].launches++;
  if (logs) launched += f->name + " " + std::to_string(grid_x) + "\n";
  return give(on, [f, copy, g = grid{grid_x, block_x, shared_bytes}]() -> int {
    if (f->run(copy.data(), g)) return SUCCESS;
    std::unique_lock<std::mutex> locked(mutex);
    mistake("a kernel whose threads wait for one another in vain, or not for their copies");
    return LAUNCH_FAILED;
  });
}

EXPORT int cuMemAlloc_v2(device_ptr *at, size_t bytes) {
  ENTER(true)
  if (const int error = forbidden()) return error;
  if (bytes == 0) return INVALID_VALUE;
  const int device = device_now();
  const size_t end = (device + 1) * MEMORY_BYTES;
  size_t start = end - MEMORY_BYTES;
  for (auto block = blocks.lower_bound(start); block != blocks.lower_bound(end); block++) {
    if (block->first - start >= bytes) break;
    start = (block->first + block->second + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  }
  if (start + bytes > end) return OUT_OF_MEMORY;
  blocks[start] = bytes;
  counts[device].allocated_bytes += bytes;
  const touching now(device);
  memset(memory + start, 0xFF, bytes);
  *at = (device_ptr)(memory + start);
  return SUCCESS;
}
EXPORT int cuMemGetInfo_v2(size_t *rest, size_t *all) {
  ENTER(true)
  *rest = (*all = MEMORY_BYTES) - counts[device_now()].allocated_bytes;
  return SUCCESS;
}
EXPORT int cuMemFree_v2(device_ptr at) {
  ENTER(true)
  if (const int error = forbidden()) return error;
  const auto block = blocks.find((size_t)((char *)at - memory));
  if (block == blocks.end()) {
    mistake("memory freed that is not out: %p", (void *)at);
    return INVALID_VALUE;
  }
  /* As the driver does: what is under way may still use it. */
  const int device = device_of((void *)at);
  wait_for_all(lock, device);
  counts[device].allocated_bytes -= block->second;
  blocks.erase(block);
  return SUCCESS;
}
EXPORT int cuMemHostAlloc(void **at, size_t bytes, unsigned) {
  ENTER(true)
  if (const int error = forbidden()) return error;
  *at = calloc(1, bytes);
  return *at ? SUCCESS : OUT_OF_MEMORY;
}
EXPORT int cuMemHostGetDevicePointer_v2(device_ptr *at, void *host, unsigned) {
  ENTER(true)
  *at = (device_ptr)host;
  return SUCCESS;
}
/* Reads the host's memory as late as may be. */
EXPORT int cuMemcpyHtoDAsync_v2(device_ptr to, const void *from, size_t bytes, void *on) {
  ENTER(true)
  if (const int error = forbidden()) return error;
  if (!is_allocated((void *)to, bytes)) {
    mistake("a copy to %zu bytes at %p, which are not out", bytes, (void *)to);
    return INVALID_VALUE;
  }
  return give(on, [=] { return memcpy((void *)to, from, bytes), SUCCESS; });
}
EXPORT int cuMemcpyDtoDAsync_v2(device_ptr to, device_ptr from, size_t bytes, void *on) {
  ENTER(true)
  if (!is_allocated((void *)to, bytes) || !is_allocated((void *)from, bytes)) {
    mistake("a copy of %zu bytes from %p to %p, which are not out", bytes, (void *)from,
            (void *)to);
    return INVALID_VALUE;
  }
  counts[device_now()].copies++;
  return give(on, [=] { return memmove((void *)to, (void *)from, bytes), SUCCESS; });
}
EXPORT int cuMemsetD8Async(device_ptr at, unsigned char value, size_t bytes, void *on) {
  ENTER(true)
  if (!is_allocated((void *)at, bytes)) {
    mistake("%zu bytes set at %p, which are not out", bytes, (void *)at);
    return INVALID_VALUE;
  }
  return give(on, [=] { return memset((void *)at, value, bytes), SUCCESS; });
}

EXPORT int cuMemsetD32Async(device_ptr at, unsigned value, size_t count, void *on) {
  ENTER(true)
  if (at % sizeof value || !is_allocated((void *)at, count * sizeof value)) {
    mistake("%zu words set at %p, which are not out", count, (void *)at);
    return INVALID_VALUE;
  }
  return give(on, [=]() -> int {
    for (size_t i = 0; i < count; i++) ((unsigned *)at)[i] = value;
    return SUCCESS;
  });
}

/* ---- what tests ask ---- */

EXPORT void *emulated_stream(int device) {
  std::unique_lock<std::mutex> lock(mutex);
  return new_stream(device, false).get();
}
static void set_paused(void *handle, bool paused) {
  std::unique_lock<std::mutex> lock(mutex);
  any_stream(handle)->paused = paused;
  changed.notify_all();
}
EXPORT void emulated_pause(void *stream) { set_paused(stream, true); }
EXPORT void emulated_resume(void *stream) { set_paused(stream, false); }
EXPORT void emulated_wait(void *handle) {
  std::unique_lock<std::mutex> lock(mutex);
  const auto s = any_stream(handle);
  changed.wait(lock, [s] { return is_done(*s); });
}
EXPORT void emulated_write(void *device, const void *host, size_t bytes) {
  const touching now(device_of(device));
  {
    std::unique_lock<std::mutex> lock(mutex);
    bool paused = false;
    for (const auto &s : streams) paused = paused || (s->device == now.device && s->paused);
    /* Memory that is free may still be in use by what is given. */
    if (!paused) wait_for_all(lock, now.device);
  }
  memcpy(device, host, bytes);
}
EXPORT void emulated_read(void *host, const void *device, size_t bytes) {
  const touching now(device_of(device));
  memcpy(host, device, bytes);
}
EXPORT int emulated_fail(int64_t n, const char *name, int error) {
  std::unique_lock<std::mutex> lock(mutex);
  const bool pending = fail_in >= 0;
  fail_in = n, fail_name = name, fail_with = error;
  return pending;
}
EXPORT const char *emulated_launched(int on) {
  std::unique_lock<std::mutex> lock(mutex);
  static std::string said;
  said.swap(launched);
  launched.clear();
  logs = on;
  return said.c_str();
}
EXPORT emulated_counts emulated_counted_on(int device) {
  std::unique_lock<std::mutex> lock(mutex);
  return counts[device];
}
EXPORT emulated_counts emulated_counted(void) {
  emulated_counts all = {};
  for (int device = 0; device < EMULATED_DEVICES; device++) {
    const emulated_counts of_device = emulated_counted_on(device);
    for (size_t i = 0; i < sizeof all / sizeof(uint64_t); i++)
      ((uint64_t *)&all)[i] += ((const uint64_t *)&of_device)[i];
  }
  return all;
}

/* ---- what other stand-ins ask ---- */

EXPORT int emulated_fails(const char *name) {
  std::unique_lock<std::mutex> lock(mutex);
  return fails(name) ? fail_with : 0;
}
EXPORT int emulated_fails_by_name(const char *name) {
  std::unique_lock<std::mutex> lock(mutex);
  return fail_name && fails(name) ? fail_with : 0;
}
EXPORT void emulated_mistake(const char *what) {
  std::unique_lock<std::mutex> lock(mutex);
  mistake("%s", what);
}
EXPORT int emulated_is_out(const void *at, size_t bytes) {
  std::unique_lock<std::mutex> lock(mutex);
  return is_allocated(at, bytes);
}
EXPORT int emulated_has_context(void) { return !contexts.empty(); }
EXPORT int emulated_device(void) { return device_now(); }
EXPORT void emulated_set_device(int device) {
  std::unique_lock<std::mutex> lock(mutex);
  if (contexts.empty()) contexts.push_back(device);
  contexts.back() = device;
  retained[device] = true;
}
EXPORT void *emulated_context(int device) { return &the_contexts[device]; }
EXPORT int emulated_is_retained(int device) {
  std::unique_lock<std::mutex> lock(mutex);
  return retained[device];
}
EXPORT void emulated_forget(int device) {
  std::unique_lock<std::mutex> lock(mutex);
  retained[device] = false;
}
EXPORT int emulated_takes(void *handle) {
  std::unique_lock<std::mutex> lock(mutex);
  const auto s = stream_of(handle);
  return s && !s->captured && !waited_for(*s, handle);
}
EXPORT int emulated_give(void *stream, int (*job)(void *), void *given, void (*drop)(void *)) {
  std::unique_lock<std::mutex> lock(mutex);
  return give(stream, [job, kept = std::shared_ptr<void>(given, drop)] { return job(kept.get()); });
}
