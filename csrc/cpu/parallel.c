#include "cpu/parallel.h"

#include <pthread.h>
#include <stdbool.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* libgomp, by its own names: compilers other than gcc bring along another OpenMP runtime, which
 * knows nothing of torch's threads. */
int omp_get_max_threads(void);
int omp_get_num_threads(void);
int omp_get_thread_num(void);
int omp_in_parallel(void);
void GOMP_parallel(void (*fn)(void *), void *ctx, unsigned threads, unsigned flags);

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

typedef struct {
  int64_t n;
  omc_range_fn fn;
  void *ctx;
  float_control control; /* the caller's */
} team_job;

/* The part of one thread of a team. */
static void run_part(void *ctx) {
  const team_job *job = ctx;
  const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
  const int64_t each = job->n / team, more = job->n % team;
  const int64_t begin = me * each + (me < more ? me : more);
  const int64_t end = begin + each + (me < more ? 1 : 0);
  if (begin == end) return;
  const float_control before = get_float_control();
  const float_control wanted = (before & ~(float_control)FLUSH) | (job->control & FLUSH);
  if (wanted != before) set_float_control(wanted);
  job->fn((omc_range){begin, end, (int)me}, job->ctx);
  if (wanted != before) set_float_control(before);
}

void omc_parallel_for(int64_t n, int64_t grain, int threads, omc_range_fn fn, void *ctx) {
  if (n <= 0) return;
  const int64_t most = grain > 1 ? (n < grain ? 1 : n / grain) : n;
  const int64_t count = most < threads ? most : threads;
  if (count <= 1 || forked || omp_in_parallel()) {
    fn((omc_range){0, n, 0}, ctx);
    return;
  }
  team_job job = {n, fn, ctx, get_float_control()};
  GOMP_parallel(run_part, &job, (unsigned)count, 0);
}
