#include "harness.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu/memory_pool.h"
#include "cpu/ops/block.h"
#include "cpu/parallel.h"
#include "ops/builder.h"

/* ---- threads ---- */

static void count_items(omc_range range, void *ctx) {
  int *counts = ctx;
  for (int64_t i = range.begin; i < range.end; i++) counts[i]++;
}

TEST(parallel_for_works_on_every_item_once) {
  static const int64_t sizes[] = {0, 1, 2, 7, 64, 1000};
  for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
    for (int threads = 1; threads <= 5; threads++)
      for (int64_t grain = 0; grain <= 10; grain += 5) {
        int counts[1001] = {0};
        omc_parallel_for(sizes[s], grain, threads, count_items, counts);
        for (int64_t i = 0; i < 1001; i++) REQUIRE(counts[i] == (i < sizes[s]));
      }
}

static void halve(omc_range range, void *ctx) {
  volatile float *x = ctx;
  for (int64_t i = range.begin; i < range.end; i++) x[i] *= 0.5f;
}

TEST(every_thread_keeps_denormals) {
  volatile float x[4];
  for (int i = 0; i < 4; i++) x[i] = 0x1p-126f;
  omc_parallel_for(4, 1, 4, halve, (void *)(uintptr_t)x);
  for (int i = 0; i < 4; i++) CHECK_FLOAT(x[i], 0x1p-127);
}

#if defined(__x86_64__)
TEST(every_thread_flushes_denormals_if_the_caller_does) {
  volatile float x[4];
  const unsigned before = _mm_getcsr();
  for (int i = 0; i < 4; i++) x[i] = 0x1p-126f;
  _mm_setcsr(before | 0x8040u);
  omc_parallel_for(4, 1, 4, halve, (void *)(uintptr_t)x);
  CHECK_INT(_mm_getcsr() & 0x8040u, 0x8040u);
  _mm_setcsr(before);
  for (int i = 0; i < 4; i++) CHECK_FLOAT(x[i], 0);
  for (int i = 0; i < 4; i++) x[i] = 0x1p-126f;
  omc_parallel_for(4, 1, 4, halve, (void *)(uintptr_t)x);
  for (int i = 0; i < 4; i++) CHECK_FLOAT(x[i], 0x1p-127);
}
#endif

typedef struct {
  int jobs;
  bool pause;   /* long enough for the team to fall asleep */
  int twice[2]; /* of item 0, in a job and in a job of a job */
  int counts[1000];
} held_work;

static void count_within(omc_range range, void *ctx) {
  held_work *w = ctx;
  if (range.begin == 0) omc_parallel_for(2, 1, 2, count_items, w->twice);
  count_items(range, w->counts);
}

static void give_jobs(void *ctx) {
  held_work *w = ctx;
  for (int j = 0; j < w->jobs; j++) {
    if (w->pause) usleep(2000);
    omc_parallel_for(j % 7 ? 1000 : 3, 1, 1 + j % 6, count_within, w);
  }
}

TEST(a_held_team_does_every_job_whole) {
  for (int threads = 1; threads <= 5; threads++) {
    uint32_t jobs = 0;
    for (int time = 0; time < 4; time++) {
      held_work w = {.jobs = time == 3 ? 7 : 700, .pause = time == 3};
      omc_parallel_hold(threads, &jobs, give_jobs, &w);
      for (int i = 0; i < 3; i++) REQUIRE(w.counts[i] == w.jobs);
      for (int i = 3; i < 1000; i++) REQUIRE(w.counts[i] == w.jobs / 7 * 6);
      REQUIRE(w.twice[0] == w.jobs && w.twice[1] == w.jobs);
    }
  }
}

static void hold_within(void *ctx) {
  uint32_t jobs = 2;
  omc_parallel_hold(4, &jobs, give_jobs, ctx);
}

TEST(a_team_is_held_within_another_without_a_second) {
  uint32_t jobs = 2;
  held_work w = {.jobs = 70};
  omc_parallel_hold(4, &jobs, hold_within, &w);
  CHECK_INT(w.counts[0], 70);
}

TEST(a_team_is_not_woken_for_one_job) {
  uint32_t jobs = 0;
  held_work w = {.jobs = 1};
  omc_parallel_hold(4, &jobs, give_jobs, &w);
  CHECK(jobs < 2);
  w.jobs = 14;
  omc_parallel_hold(4, &jobs, give_jobs, &w);
  CHECK(jobs >= 2);
}

/* A thread that is kept off its core, by a handler that it is in. */
static atomic_bool is_kept, may_go;

static void keep(int signal) {
  (void)signal;
  atomic_store(&is_kept, true);
  for (int i = 0; i < 20000 && !atomic_load(&may_go); i++)
    usleep(100); /* who waits for it goes on */
  atomic_store(&is_kept, false);
}

static void note_thread(omc_range range, void *ctx) {
  if (range.thread == 0) usleep(1000); /* the other part is begun meanwhile */
  ((pthread_t *)ctx)[range.thread] = pthread_self();
}

static void give_jobs_beside_one_kept(void *ctx) {
  pthread_t of[2];
  int *counts = ctx;
  do omc_parallel_for(2, 1, 2, note_thread, of);
  while (pthread_equal(of[0], of[1]));
  pthread_kill(of[1], SIGUSR1);
  while (!atomic_load(&is_kept)) usleep(100);
  for (int j = 0; j < 50; j++) omc_parallel_for(100, 1, 2, count_items, counts);
  CHECK(atomic_load(&is_kept));
  atomic_store(&may_go, true);
  while (atomic_load(&is_kept)) usleep(100);
  for (int j = 0; j < 50; j++) omc_parallel_for(100, 1, 2, count_items, counts);
}

TEST(a_held_team_does_not_wait_for_a_thread_that_has_not_begun) {
  struct sigaction before, act = {.sa_handler = keep};
  uint32_t jobs = 2;
  int counts[100] = {0};
  atomic_store(&may_go, false);
  sigaction(SIGUSR1, &act, &before);
  omc_parallel_hold(2, &jobs, give_jobs_beside_one_kept, counts);
  sigaction(SIGUSR1, &before, NULL);
  for (int i = 0; i < 100; i++) REQUIRE(counts[i] == 100);
}

#if defined(__x86_64__)
static void halve_flushed(void *ctx) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040u);
  omc_parallel_for(4, 1, 4, halve, ctx);
  _mm_setcsr(before);
}

TEST(a_held_team_flushes_denormals_if_the_caller_does) {
  volatile float x[4];
  uint32_t jobs = 2;
  for (int i = 0; i < 4; i++) x[i] = 0x1p-126f;
  omc_parallel_hold(4, &jobs, halve_flushed, (void *)(uintptr_t)x);
  for (int i = 0; i < 4; i++) CHECK_FLOAT(x[i], 0);
}
#endif

/* ---- pool ---- */

TEST(pool_hands_freed_blocks_out_again) {
  static const size_t sizes[] = {0, 1, 64, 511, 4096, 100000, 2097152, 3000001, 20000000};
  for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
    void *first, *second;
    REQUIRE_OK(omc_pool_alloc(sizes[s], &first));
    CHECK_INT((uintptr_t)first % OMC_POOL_ALIGNMENT, 0);
    memset(first, 1, sizes[s]);
    omc_pool_free(first, sizes[s]);
    REQUIRE_OK(omc_pool_alloc(sizes[s], &second));
    CHECK(first == second);
    omc_pool_free(second, sizes[s]);
  }
  omc_pool_free(NULL, 10);
}

TEST(pool_counts_and_bounds_what_it_keeps) {
  omc_pool_trim();
  const omc_memory_stats before = omc_pool_get_stats();
  CHECK_INT(before.cached_bytes, 0);
  const size_t bytes = (size_t)48 << 20;
  void *blocks[10];
  for (int i = 0; i < 10; i++)
    REQUIRE_OK(omc_pool_alloc(bytes + (size_t)i * (bytes / 8), &blocks[i]));
  const omc_memory_stats full = omc_pool_get_stats();
  CHECK(full.used_bytes >= before.used_bytes + 10 * bytes);
  for (int round = 0; round < 2; round++) {
    for (int i = 0; i < 10; i++) omc_pool_free(blocks[i], bytes + (size_t)i * (bytes / 8));
    const omc_memory_stats kept = omc_pool_get_stats();
    CHECK_INT(kept.used_bytes, before.used_bytes);
    CHECK(kept.cached_bytes <= kept.peak_bytes);
    for (int i = 0; i < 10; i++)
      REQUIRE_OK(omc_pool_alloc(bytes + (size_t)i * (bytes / 8), &blocks[i]));
  }
  for (int i = 0; i < 10; i++) omc_pool_free(blocks[i], bytes + (size_t)i * (bytes / 8));
  omc_pool_trim();
  CHECK_INT(omc_pool_get_stats().cached_bytes, 0);
}

TEST(pool_refuses_what_no_machine_has) {
  void *block;
  CHECK_STATUS(omc_pool_alloc(SIZE_MAX / 2, &block), ENOMEM);
  CHECK_STATUS(omc_pool_alloc((size_t)1 << 56, &block), ENOMEM);
  CHECK_CONTAINS(omc_status_detail(), "you tried to allocate 72057594037927936 bytes");
}

TEST(pool_keeps_no_more_for_having_refused) {
  void *block;
  const omc_memory_stats before = omc_pool_get_stats();
  CHECK_STATUS(omc_pool_alloc((size_t)1 << 56, &block), ENOMEM);
  const omc_memory_stats after = omc_pool_get_stats();
  CHECK_INT(after.used_bytes, before.used_bytes);
  CHECK_INT(after.peak_bytes, before.peak_bytes);
}

/* ---- programs ---- */

enum { N_IN = 4, N_OUT = 3, LONGEST = 6, MOST = 1600 };

/* A random program over N_IN inputs of n elements of a dtype, to which it casts now and then; the
 * last of them is a row if `row`. */
static bool random_program(omc_graph *g, omc_dtype dtype, int64_t n, bool row, omc_node **out) {
  static const char *const names[] = {"Add", "Mul", "Max", "Sub", "Cast"};
  omc_value *in[N_IN], *results[N_OUT];
  const omc_type type = {dtype, {2, {2, n / 2}}}, row_type = {dtype, {1, {n / 2}}};
  for (int i = 0; i < N_IN; i++) {
    const bool last = i == N_IN - 1;
    if (!CHECK_OK(omc_graph_add_input(g, NULL, last && row ? &row_type : &type, false, &in[i])))
      return false;
  }
  const char *ops[LONGEST];
  int64_t args[3 * LONGEST], outs[N_OUT], dtypes[N_OUT];
  double imm[OMC_EW_IMM * LONGEST] = {0};
  for (int k = 0; k < LONGEST; k++) {
    const int op = rand() % 5;
    ops[k] = names[op];
    for (int a = 0; a < 2; a++) args[3 * k + a] = rand() % (N_IN + k);
    if (op == 4) args[3 * k + 1] = -1, imm[OMC_EW_IMM * k] = dtype;
    args[3 * k + 2] = -1;
  }
  for (int i = 0; i < N_OUT; i++) outs[i] = N_IN + rand() % LONGEST;
  for (int i = 0; i < N_OUT; i++) dtypes[i] = omc_dtype_get(dtype)->onnx;
  const omc_attr attrs[] = {{"ops", OMC_ATTR_STRINGS, LONGEST, {.ss = ops}},
                            {"imm", OMC_ATTR_FLOATS, OMC_EW_IMM * LONGEST, {.fs = imm}},
                            omc_attr_ints("args", args, 3 * LONGEST),
                            omc_attr_ints("outs", outs, N_OUT),
                            omc_attr_ints("dtypes", dtypes, N_OUT),
                            omc_attr_string("class", "f32")};
  omc_builder b = {g, NULL, OMC_FORWARD, NULL, OMC_OK};
  omc_build(&b, OMC_OP_FusedElementwise, N_IN, in, 0, 6, attrs, N_OUT, results);
  *out = g->last;
  return CHECK_OK(b.status);
}

/* Runs the node with output i in the memory of input shares[i]; -1: memory of its own. */
static bool run_sharing(const omc_node *node, const omc_call *call, const float *inputs,
                        const int *shares, float (*results)[MOST]) {
  static float in_data[N_IN][MOST], out_data[N_OUT][MOST];
  static _Alignas(64) char workspace[1 << 20];
  omc_tensor in[N_IN], out[N_OUT];
  if (!CHECK(call->workspace_bytes <= sizeof workspace)) return false;
  memcpy(in_data, inputs, sizeof in_data);
  for (uint32_t i = 0; i < N_IN; i++) in[i] = (omc_tensor){in_data[i], &node->in[i].value->type};
  for (uint32_t i = 0; i < N_OUT; i++)
    out[i] = (omc_tensor){shares[i] < 0 ? out_data[i] : in_data[shares[i]], &node->out[i]->type};
  const omc_kernel_args args = {.in = in,
                                .out = out,
                                .n_in = N_IN,
                                .n_out = N_OUT,
                                .params = call->params,
                                .workspace = workspace,
                                .threads = 2};
  if (!CHECK_OK(call->kernel(&args))) return false;
  for (uint32_t i = 0; i < N_OUT; i++) memcpy(results[i], out[i].data, sizeof results[i]);
  return true;
}

static void check_sharing(omc_dtype dtype, int64_t n, bool row) {
  omc_test_memory memory;
  omc_graph *g;
  omc_node *node = NULL;
  omc_call call;
  static float inputs[N_IN][MOST], alone[N_OUT][MOST], shared[N_OUT][MOST];
  omc_test_memory_init(&memory);
  REQUIRE_OK(omc_graph_create(&memory.allocator, &g));
  REQUIRE(random_program(g, dtype, n, row, &node));
  REQUIRE_OK(omc_provider_host()->prepare(NULL, node, 2, &g->arena, &call));
  for (int i = 0; i < N_IN; i++)
    for (int k = 0; k < MOST; k++) inputs[i][k] = (float)(rand() % 16) * 1.0078125f;
  static const int none[N_OUT] = {-1, -1, -1};
  REQUIRE(run_sharing(node, &call, inputs[0], none, alone));
  for (int choice = 0; choice < 20; choice++) {
    int shares[N_OUT];
    for (int i = 0; i < N_OUT; i++) {
      shares[i] = rand() % (N_IN - row + 1) - 1;
      for (int j = 0; j < i; j++)
        if (shares[j] == shares[i]) shares[i] = -1;
    }
    REQUIRE(run_sharing(node, &call, inputs[0], shares, shared));
    for (int i = 0; i < N_OUT; i++)
      REQUIRE(memcmp(alone[i], shared[i], (size_t)n * omc_dtype_size(dtype)) == 0);
  }
  omc_graph_destroy(g);
  CHECK_INT(memory.live_bytes, 0);
}

TEST(programs_may_write_over_their_inputs) {
  srand(1);
  for (int64_t n = 2; n <= MOST; n += n < 40 ? 2 : 506)
    for (int row = 0; row < 2; row++)
      for (int program = 0; program < 16; program++)
        check_sharing(program % 2 ? OMC_F32 : OMC_BF16, n, row);
}
