#include "cpu/parallel.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <unistd.h>

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

/* ---- a job, cut among a team ---- */

typedef struct {
  int64_t n;
  omc_range_fn fn;
  void *ctx;
  float_control control; /* the caller's */
} team_job;

static void run_part(const team_job *job, int64_t team, int64_t me) {
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

static void run_own_part(void *ctx) { run_part(ctx, omp_get_num_threads(), omp_get_thread_num()); }

/* ---- a held team: threads of one parallel region of libgomp, who wait in their own way ---- */

/* What somebody waits to see changed: on the core at first, as it takes longer to wake a thread
 * than most jobs last, then asleep, as the core may be wanted by another process. */
typedef struct {
  _Alignas(64) _Atomic uint32_t value;
  _Atomic uint32_t asleep; /* threads */
} signal_word;

static void pause_core(void) {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

static uint32_t wait_while(signal_word *word, uint32_t value) {
  enum { PAUSES = 2000 }; /* 30 to 100 us */
  uint32_t now;
  for (int i = 0; i < PAUSES; i++) {
    if ((now = atomic_load_explicit(&word->value, memory_order_acquire)) != value) return now;
    pause_core();
  }
  atomic_fetch_add(&word->asleep, 1);
  while ((now = atomic_load(&word->value)) == value)
    syscall(SYS_futex, &word->value, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
  atomic_fetch_sub(&word->asleep, 1);
  return now;
}

static void wake(signal_word *word) {
  if (atomic_load(&word->asleep))
    syscall(SYS_futex, &word->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* A job is posted as its number since the team is held, which may come around after a million, and
 * below that the threads it is cut for: the others do not look at it, and nobody waits for them. */
enum { MEMBERS_BITS = 12, MAX_MEMBERS = (1 << MEMBERS_BITS) - 1 };

typedef struct {
  signal_word posted; /* no members: the team is let go */
  signal_word left;   /* parts that are not done, but for the holder's own */
  const team_job *job;
  int members, size; /* parts of the job, threads */
  void (*fn)(void *ctx);
  void *ctx;
  atomic_bool taken[MAX_MEMBERS]; /* all but the parts that nobody has begun */
} team;

static _Thread_local team *held; /* by this thread, and free for a job */
static _Thread_local uint32_t jobs_given;

/* Runs part p of the job at hand, whichever that is by now, if nobody has begun it. A thread that
 * another process keeps off its core finds that the holder has. */
static void run_unless_taken(team *t, int64_t p) {
  if (atomic_load(&t->taken[p]) || atomic_exchange(&t->taken[p], true)) return;
  run_part(t->job, t->members, p);
  if (atomic_fetch_sub(&t->left.value, 1) == 1) wake(&t->left);
}

static void serve(team *t, int64_t me) {
  for (uint32_t seen = 0;;) {
    seen = wait_while(&t->posted, seen);
    const int64_t members = seen & MAX_MEMBERS;
    if (members == 0) return;
    if (me < members) run_unless_taken(t, me);
  }
}

static void post(team *t, uint32_t members) {
  const uint32_t last = atomic_load_explicit(&t->posted.value, memory_order_relaxed);
  atomic_store(&t->posted.value, (((last >> MEMBERS_BITS) + 1) << MEMBERS_BITS) | members);
  wake(&t->posted);
}

static void run_held(team *t, const team_job *job, int members) {
  held = NULL;
  t->job = job;
  t->members = members;
  atomic_store_explicit(&t->left.value, (uint32_t)members - 1, memory_order_relaxed);
  for (int p = 1; p < members; p++) atomic_store(&t->taken[p], false);
  post(t, (uint32_t)members);
  run_part(job, members, 0);
  for (int p = 1; p < members; p++) run_unless_taken(t, p);
  for (uint32_t left; (left = atomic_load_explicit(&t->left.value, memory_order_acquire));)
    wait_while(&t->left, left);
  held = t;
}

static void join(void *ctx) {
  team *t = ctx;
  const int me = omp_get_thread_num();
  if (me > 0) {
    serve(t, me);
    return;
  }
  t->size = omp_get_num_threads();
  for (int p = 0; p < t->size; p++) atomic_init(&t->taken[p], true);
  held = t;
  t->fn(t->ctx);
  held = NULL;
  post(t, 0);
}

void omc_parallel_hold(int threads, uint32_t *jobs, void (*fn)(void *ctx), void *ctx) {
  const uint32_t before = jobs_given;
  if (threads < 2 || __atomic_load_n(jobs, __ATOMIC_RELAXED) < 2 || held || forked ||
      omp_in_parallel()) {
    fn(ctx);
  } else {
    team t = {.fn = fn, .ctx = ctx};
    GOMP_parallel(join, &t, (unsigned)(threads < MAX_MEMBERS ? threads : MAX_MEMBERS), 0);
  }
  __atomic_store_n(jobs, jobs_given - before, __ATOMIC_RELAXED);
}

void omc_parallel_for(int64_t n, int64_t grain, int threads, omc_range_fn fn, void *ctx) {
  if (n <= 0) return;
  const int64_t most = grain > 1 ? (n < grain ? 1 : n / grain) : n;
  const int64_t count = most < threads ? most : threads;
  if (count <= 1 || forked || (!held && omp_in_parallel())) {
    fn((omc_range){0, n, 0}, ctx);
    return;
  }
  team_job job = {n, fn, ctx, get_float_control()};
  jobs_given++;
  if (held)
    run_held(held, &job, (int)(count < held->size ? count : held->size));
  else
    GOMP_parallel(run_own_part, &job, (unsigned)count, 0);
}
