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

/* Denormals are taken as and become zero on this thread from here on; returns what to restore. */
#if defined(__x86_64__)
static unsigned flush_denormals(void) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040u);
  return before;
}
static void restore_denormals(unsigned before) { _mm_setcsr(before); }
#elif defined(__aarch64__)
static unsigned long flush_denormals(void) {
  unsigned long before;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before));
  __asm__ volatile("msr fpcr, %0" : : "r"(before | 1ul << 24));
  return before;
}
static void restore_denormals(unsigned long before) {
  __asm__ volatile("msr fpcr, %0" : : "r"(before));
}
#else
static int flush_denormals(void) { return 0; }
static void restore_denormals(int before) { (void)before; }
#endif

static void run_range(int64_t begin, int64_t end, int thread, omc_range_fn fn, void *ctx) {
  const __auto_type before = flush_denormals();
  fn(begin, end, thread, ctx);
  restore_denormals(before);
}

void omc_parallel_for(int64_t n, int64_t grain, int threads, omc_range_fn fn, void *ctx) {
  if (n <= 0) return;
  const int64_t most = grain > 1 ? (n < grain ? 1 : n / grain) : n;
  int count = most < threads ? (int)most : threads;
  if (count > 1 && (forked || omp_in_parallel())) count = 1;
  if (count <= 1) {
    run_range(0, n, 0, fn, ctx);
    return;
  }
#pragma omp parallel num_threads(count)
  {
    const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
    const int64_t each = n / team, more = n % team;
    const int64_t begin = me * each + (me < more ? me : more);
    const int64_t end = begin + each + (me < more ? 1 : 0);
    if (begin < end) run_range(begin, end, (int)me, fn, ctx);
  }
}
