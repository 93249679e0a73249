/* What the names of a GPU mean on the host, for device code compiled as C++. The blocks of a grid
 * are run one after another, the threads of a block as coroutines that change where they wait for
 * one another: at a barrier, or with their warp, which is in lockstep there. Where some wait for
 * what others never come to, or end before their copies, the launch fails.
 *
 * To ThreadSanitizer, if it is at hand, each thread of a block is one, and so is what copies for
 * it. They are in no other order than on a GPU, by barriers, __syncwarp and waiting for copies: it
 * tells of shared memory that is read or written before it may be. EMULATED_LACKS=/lines.h:137 says
 * where threads are to be told of nothing, by a barrier or a wait for copies. */
#ifndef OMC_TESTS_EMULATOR_H
#define OMC_TESTS_EMULATOR_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <atomic>
#include <vector>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
void AnnotateIgnoreWritesBegin(const char *file, int line);
void AnnotateIgnoreWritesEnd(const char *file, int line);
void __tsan_read_range(const void *at, unsigned long bytes);
void __tsan_write_range(void *at, unsigned long bytes);
}
#include <string>
#define TSAN(...) __VA_ARGS__
#else
#define TSAN(...)
#endif

#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline, unused))
#define __shared__ static thread_local

struct emulated_dim {
  unsigned x, y, z;
};
struct emulated_grid {
  unsigned blocks, threads, shared_bytes;
};

/* Each unit has its own, as each is a library. */
namespace emulated {

enum { WARP = 32, STACK_BYTES = 1 << 16, SLOT_BYTES = 32 };
enum state { READY, AT_BARRIER, AT_WARP, DONE };

/* A copy that has been asked for and not been waited for. */
struct copy {
  void *to;
  const void *from;
  unsigned bytes;
};

struct slot {
  unsigned char bytes[SLOT_BYTES];
};

struct thread {
  ucontext_t context;
  state at;
  unsigned given; /* to its warp, times */
  std::vector<copy> copies;
  unsigned waits[DONE]; /* in order, times */
  char places[2];       /* of the first of a warp */
  TSAN(void *self = nullptr, *copier = nullptr;)
};

struct block {
  std::vector<thread> threads;
  std::vector<char> stacks, shared;
  std::vector<slot> slots[2]; /* what lanes give to their warp, every other time */
  ucontext_t scheduler;
  unsigned current;
  void (*body)(const void *parameters);
  const void *parameters;
  bool failed;
  char places[2];
  TSAN(void *self; char end; std::string lacks;)
};

inline thread_local block *here;

/* What is no memory of a GPU's. */
struct unseen {
  unseen() { TSAN(AnnotateIgnoreReadsBegin("", 0); AnnotateIgnoreWritesBegin("", 0);) }
  ~unseen() { TSAN(AnnotateIgnoreWritesEnd("", 0); AnnotateIgnoreReadsEnd("", 0);) }
};

#define SWITCH_TO(one) TSAN(__tsan_switch_to_fiber((one).self, __tsan_switch_to_fiber_no_sync);)

inline void set(thread &t, state at) {
  const unseen all;
  t.at = at;
}
inline void fail() {
  const unseen all;
  here->failed = true;
}

/* Waits until all of the warp, or of the block, have come as far or have ended. */
inline void wait(state where) {
  thread &t = here->threads[here->current];
  set(t, where);
  SWITCH_TO(*here)
  swapcontext(&t.context, &here->scheduler);
}

/* And sees what they have done before. Of two places one is for every other time: some are at the
 * next wait when others have not left this one. */
inline void wait_in_order(state where, char (&places)[2]) {
  char &place = places[here->threads[here->current].waits[where]++ % 2];
  (void)place;
  TSAN(__tsan_release(&place);)
  wait(where);
  TSAN(__tsan_acquire(&place);)
}

inline bool release(unsigned begin, unsigned end, state where) {
  bool any = false;
  for (unsigned i = begin; i < end; i++) {
    if (here->threads[i].at != where && here->threads[i].at != DONE) return false;
    any |= here->threads[i].at == where;
  }
  for (unsigned i = begin; any && i < end; i++)
    if (here->threads[i].at == where) here->threads[i].at = READY;
  return any;
}

}  // namespace emulated

static thread_local emulated_dim threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

inline void enter() {
  TSAN(__tsan_acquire(&here->body);)
  here->body(here->parameters);
  if (!here->threads[here->current].copies.empty()) fail();
  TSAN(__tsan_release(&here->end);)
  wait(DONE);
}

inline void start(block &b, unsigned i) {
  thread &t = b.threads[i];
  getcontext(&t.context);
  t.context.uc_stack.ss_sp = &b.stacks[(size_t)i * STACK_BYTES];
  t.context.uc_stack.ss_size = STACK_BYTES;
  t.context.uc_link = nullptr;
  makecontext(&t.context, enter, 0);
  t.at = READY, t.given = 0, t.waits[AT_BARRIER] = t.waits[AT_WARP] = 0;
  t.copies.clear();
}

/* Threads take turns from the last to the first, or else from the first to the last. */
inline bool run_threads(block &b, bool backwards) {
  const unsigned n = (unsigned)b.threads.size();
  for (;;) {
    bool moved = false, all_done = true;
    for (unsigned k = 0; k < n; k++) {
      const unsigned i = backwards ? n - 1 - k : k;
      if (b.threads[i].at == READY) {
        b.current = i;
        threadIdx = {i, 0, 0};
        SWITCH_TO(b.threads[i])
        swapcontext(&b.scheduler, &b.threads[i].context);
        moved = true;
      }
      all_done &= b.threads[i].at == DONE;
    }
    if (all_done) return !b.failed;
    for (unsigned w = 0; w < n; w += WARP)
      moved |= release(w, w + WARP < n ? w + WARP : n, AT_WARP);
    moved |= release(0, n, AT_BARRIER);
    if (!moved) return false;
  }
}

inline bool run_block(block &b, bool backwards) {
  b.failed = false;
  for (unsigned i = 0; i < b.threads.size(); i++) start(b, i);
  TSAN(__tsan_release(&b.body);)
  const bool done = run_threads(b, backwards);
  TSAN(__tsan_acquire(&b.end);)
  return done;
}

/* They are the same for one block after another. */
inline void make_threads(block &b, unsigned n) {
  b.threads.resize(n);
  TSAN(for (thread &t : b.threads) t.self = __tsan_create_fiber(0);)
}
inline void end_threads(block &b) {
  (void)b;
  TSAN(for (thread &t : b.threads) {
    __tsan_destroy_fiber(t.self);
    if (t.copier) __tsan_destroy_fiber(t.copier);
  })
}

/* One launch of a library after another goes the other way: results must not depend on it. */
inline bool run_grid(void (*body)(const void *), const void *parameters, emulated_grid grid) {
  const unseen all;
  block b;
  TSAN(b.self = __tsan_get_current_fiber(); const char *const lacks = getenv("EMULATED_LACKS");
       b.lacks = lacks ? lacks : "";)
  make_threads(b, grid.threads);
  b.stacks.resize((size_t)grid.threads * STACK_BYTES);
  for (auto &slots : b.slots) slots.resize(grid.threads);
  b.shared.resize(grid.shared_bytes + 32);
  b.body = body, b.parameters = parameters;
  here = &b;
  blockDim = {grid.threads, 1, 1}, gridDim = {grid.blocks, 1, 1};
  static std::atomic<unsigned> launches;
  const bool backwards = launches++ % 2 == 0;
  bool done = true;
  for (unsigned k = 0; done && k < grid.blocks; k++) {
    blockIdx = {backwards ? grid.blocks - 1 - k : k, 0, 0};
    memset(b.shared.data(), 0xFF, b.shared.size());
    done = run_block(b, backwards);
  }
  end_threads(b);
  if (done) here = nullptr;
  return done;
}

/* What all lanes of a warp give at one time; to be read before the lane gives anything more. */
template <typename T>
class lanes {
 public:
  explicit lanes(const T &mine) {
    static_assert(sizeof(T) <= SLOT_BYTES, "what a lane gives has no more room");
    thread &t = here->threads[here->current];
    std::vector<slot> &slots = here->slots[t.given++ % 2];
    const unseen all;
    memcpy(slots[here->current].bytes, &mine, sizeof mine);
    wait(AT_WARP);
    const unsigned first = here->current / WARP * WARP;
    from = &slots[first], n = (unsigned)slots.size() - first;
  }
  bool has(unsigned lane) const { return lane < n; }
  T operator[](unsigned lane) const {
    const unseen all;
    T value;
    memcpy(&value, from[lane].bytes, sizeof value);
    return value;
  }

 private:
  const slot *from;
  unsigned n;
};

template <typename T>
T exchange(T value, unsigned from) {
  const lanes<T> all(value);
  return all.has(from) ? all[from] : value;
}

inline unsigned lane() { return here->current % WARP; }

/* It may come at once, to ThreadSanitizer, or as late as can be: what does not wait for it does not
 * see it. */
inline void ask_for(const copy &c) {
  thread &t = here->threads[here->current];
  t.copies.push_back(c);
#ifdef __SANITIZE_THREAD__
  if (!t.copier) t.copier = __tsan_create_fiber(0);
  __tsan_switch_to_fiber(t.copier, 0); /* after what the thread has done */
  if (c.from) __tsan_read_range(c.from, c.bytes);
  __tsan_write_range(c.to, c.bytes);
  __tsan_release(&t.copies);
  SWITCH_TO(t)
#endif
}
inline void finish_copies(bool in_order) {
  (void)in_order;
  const unseen all;
  thread &t = here->threads[here->current];
  for (const copy &c : t.copies) c.from ? memcpy(c.to, c.from, c.bytes) : memset(c.to, 0, c.bytes);
  t.copies.clear();
  TSAN(if (in_order) __tsan_acquire(&t.copies);)
}

}  // namespace emulated

/* The library has `name`, which runs a grid, and the size of its parameters. */
#define OMC_KERNEL(name, most_threads, type, p)                                                   \
  static void name##_body(const type &p);                                                         \
  static void name##_thread(const void *parameters) { name##_body(*(const type *)parameters); }   \
  extern "C" const size_t name##_bytes = sizeof(type);                                            \
  extern "C" bool name(const void *parameters, emulated_grid grid) {                              \
    return grid.threads <= (most_threads) && emulated::run_grid(name##_thread, parameters, grid); \
  }                                                                                               \
  static void name##_body(const type &p)
#define OMC_BLOCKS_KERNEL(name, threads, blocks, type, p) OMC_KERNEL(name, threads, type, p)
#define OMC_SHARED_BYTES(name) \
  unsigned char *const name =  \
      (unsigned char *)(((uintptr_t)emulated::here->shared.data() + 31) / 32 * 32)

/* Where a function is called, which may be where threads are to be told of nothing. */
struct emulated_place {
  const char *file;
  int line;
  emulated_place(const char *file_ = __builtin_FILE(), int line_ = __builtin_LINE())
      : file(file_), line(line_) {}
  bool lacks() const {
#ifdef __SANITIZE_THREAD__
    const emulated::unseen all;
    const std::string &lacks = emulated::here->lacks;
    return !lacks.empty() && lacks == strrchr(file, '/') + (":" + std::to_string(line));
#else
    return false;
#endif
  }
};

inline void __syncthreads(emulated_place at = {}) {
  if (at.lacks())
    emulated::wait(emulated::AT_BARRIER);
  else
    emulated::wait_in_order(emulated::AT_BARRIER, emulated::here->places);
}
inline void __syncwarp(unsigned = ~0u) {
  const unsigned warp = emulated::here->current / emulated::WARP;
  emulated::wait_in_order(emulated::AT_WARP, emulated::here->threads[warp * emulated::WARP].places);
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
#define omc_peers emulated::lanes
template <int BYTES>
void omc_copy_later(void *to, const void *from, bool there) {
  if ((uintptr_t)to % BYTES || (there && (uintptr_t)from % BYTES)) abort();
  emulated::ask_for({to, there ? from : nullptr, BYTES});
}
inline void omc_wait_for_copies(emulated_place at = {}) { emulated::finish_copies(!at.lacks()); }
template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return emulated::exchange(x, emulated::lane() ^ (unsigned)mask);
}
template <typename T>
T __shfl_sync(unsigned, T x, int from) {
  return emulated::exchange(x, (unsigned)from % emulated::WARP);
}
template <typename T>
T __shfl_down_sync(unsigned, T x, unsigned by) {
  const unsigned from = emulated::lane() + by;
  return emulated::exchange(x, from < emulated::WARP ? from : emulated::lane());
}
template <typename T>
T __shfl_up_sync(unsigned, T x, unsigned by) {
  const unsigned lane = emulated::lane();
  return emulated::exchange(x, lane >= by ? lane - by : lane);
}

template <typename T>
T atomicAdd(T *at, T x) {
  T old, fresh;
  __atomic_load(at, &old, __ATOMIC_SEQ_CST);
  do fresh = old + x;
  while (!__atomic_compare_exchange(at, &old, &fresh, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
  return old;
}
template <typename T>
T atomicCAS(T *at, T expected, T x) {
  __atomic_compare_exchange(at, &expected, &x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
template <typename T>
T atomicCAS_system(T *at, T expected, T x) {
  return atomicCAS(at, expected, x);
}

inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
template <typename To, typename From>
To emulated_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits for bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
inline float __uint_as_float(unsigned u) { return emulated_bits<float>(u); }
inline long long __double_as_longlong(double x) { return emulated_bits<long long>(x); }
inline double __longlong_as_double(long long u) { return emulated_bits<double>(u); }

#endif
