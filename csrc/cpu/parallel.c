#include "cpu/parallel.h"

#include <omp.h>
#include <pthread.h>
#include <stdbool.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* The OpenMP runtime does not start threads again in a child made by fork. */
static bool forked;
static void note_fork(void) { forked = true; }
__attribute__((constructor)) static void watch_fork(void) { pthread_atfork(NULL, NULL, note_fork); }

int omc_cpu_threads(void) { return forked ? 1 : omp_get_max_threads(); }

/* Whether the calling thread flushes denormals (torch.set_flush_denormal), and doing as it does. */
#if defined(__x86_64__)
typedef unsigned float_control;
#define FLUSH 0x8040u
static float_control get_float_control(void) { return _mm_getcsr(); }
static void set_float_control(float_control to) { _mm_setcsr(to); }
#elif defined(__aarch64__)
typedef unsigned long float_control;
#define FLUSH (1ul << 24)
static float_control get_float_control(void) {
  float_control now;
  __asm__ volatile("mrs %0, fpcr" : "=r"(now));
  return now;
}
static void set_float_control(float_control to) { __asm__ volatile("msr fpcr, %0" : : "r"(to)); }
#else
typedef int float_control;
#define FLUSH 0
static float_control get_float_control(void) { return 0; }
static void set_float_control(float_control to) { (void)to; }
#endif

/* As on the caller, whose control was `caller`. */
static void run_range(int64_t begin, int64_t end, int thread, float_control caller, omc_range_fn fn,
                      void *ctx) {
  const float_control before = get_float_control();
  const float_control wanted = (before & ~(float_control)FLUSH) | (caller & FLUSH);
  if (wanted != before) set_float_control(wanted);
  fn(begin, end, thread, ctx);
  if (wanted != before) set_float_control(before);
}

void omc_parallel_for(int64_t n, int64_t grain, int threads, omc_range_fn fn, void *ctx) {
  if (n <= 0) return;
  const int64_t most = grain > 1 ? (n < grain ? 1 : n / grain) : n;
  int count = most < threads ? (int)most : threads;
  if (count > 1 && (forked || omp_in_parallel())) count = 1;
  if (count <= 1) {
    fn(0, n, 0, ctx);
    return;
  }
  const float_control caller = get_float_control();
#pragma omp parallel num_threads(count)
  {
    const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
    const int64_t each = n / team, more = n % team;
    const int64_t begin = me * each + (me < more ? me : more);
    const int64_t end = begin + each + (me < more ? 1 : 0);
    if (begin < end) run_range(begin, end, (int)me, caller, fn, ctx);
  }
}
