#include "device.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ops/op.h"

enum { ALIGNMENT = 256, N_QUEUES = 4, MAX_BLOCKS = 1 << 14, POISON = 0xFF };
#define BYTES ((size_t)1 << 32)

typedef struct block {
  size_t offset, bytes;
} block;

/* Something to do. */
typedef struct job {
  struct job *next;
  omc_status (*run)(struct job *job);
  bool always; /* even after a failure */
  omc_kernel kernel;
  omc_kernel_args args;
  void *to, *from; /* in the device's addresses */
  size_t bytes;
  struct mark *mark;
  omc_tensor tensors[]; /* of args */
} job;

typedef struct queue {
  pthread_t thread;
  job *first, **end;
  bool working, paused;
  omc_status failure; /* told by the next sync */
  char detail[512];
} queue;

/* A place in a queue that others wait for. */
typedef struct mark {
  bool reached;
  int references;
} mark;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t all = PTHREAD_MUTEX_INITIALIZER; /* of what follows */
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct {
  char *outside, *inside; /* the addresses that are handed out, and where kernels see them */
  block blocks[MAX_BLOCKS];
  uint32_t n_blocks, n_queues;
  size_t used, peak;
  queue queues[N_QUEUES];
  device_counts counts;
} device;

static void lock(void) { pthread_mutex_lock(&all); }
static void unlock(void) { pthread_mutex_unlock(&all); }
static void wait(void) { pthread_cond_wait(&changed, &all); }
static void wake(void) { pthread_cond_broadcast(&changed); }

static bool is_inside(const void *p, size_t bytes) {
  const uintptr_t at = (uintptr_t)p, start = (uintptr_t)device.outside;
  return at >= start && at - start <= BYTES && bytes <= BYTES - (at - start);
}

static void *seen_by_kernels(const void *p) {
  return p ? device.inside + ((const char *)p - device.outside) : NULL;
}

/* ---- queues ---- */

static void do_job(queue *q, job *j) {
  const omc_status status = q->failure == OMC_OK || j->always ? j->run(j) : OMC_OK;
  free(j);
  if (status == OMC_OK) return;
  q->failure = status;
  snprintf(q->detail, sizeof q->detail, "%s", omc_status_detail());
}

static void *work(void *ctx) {
  queue *q = ctx;
  lock();
  for (;;) {
    while (!q->first || q->paused) wait();
    job *j = q->first;
    q->first = j->next;
    if (!q->first) q->end = &q->first;
    q->working = true;
    unlock();
    do_job(q, j);
    lock();
    q->working = false;
    wake();
  }
  return NULL;
}

static void *start_queue(void) {
  queue *q = &device.queues[device.n_queues];
  q->end = &q->first;
  if (pthread_create(&q->thread, NULL, work, q) != 0) return NULL;
  device.n_queues++;
  return q;
}

static void start(void) {
  const int file = memfd_create("device", 0);
  if (file < 0 || ftruncate(file, (off_t)BYTES) != 0) abort();
  device.outside = mmap(NULL, BYTES, PROT_NONE, MAP_SHARED, file, 0);
  device.inside = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (device.outside == MAP_FAILED || device.inside == MAP_FAILED || !start_queue()) abort();
  close(file);
}

static queue *queue_of(void *given) { return given ? given : &device.queues[0]; }

void *device_queue(void) {
  device_provider();
  lock();
  void *q = device.n_queues < N_QUEUES ? start_queue() : NULL;
  unlock();
  return q;
}

static void set_paused(void *given, bool paused) {
  device_provider();
  lock();
  queue_of(given)->paused = paused;
  wake();
  unlock();
}
void device_pause(void *given) { set_paused(given, true); }
void device_resume(void *given) { set_paused(given, false); }

static job *new_job(omc_status (*run)(job *), size_t n_tensors) {
  job *j = calloc(1, sizeof *j + n_tensors * sizeof j->tensors[0]);
  if (j) j->run = run;
  return j;
}

static omc_status give(void *given, job *j) {
  if (!j) OMC_FAIL(ENOMEM, "no memory for a job");
  queue *q = queue_of(given);
  lock();
  *q->end = j;
  q->end = &j->next;
  wake();
  unlock();
  return OMC_OK;
}

static omc_status device_sync(void *ctx, void *given) {
  (void)ctx;
  queue *q = queue_of(given);
  char detail[sizeof q->detail];
  lock();
  while (q->first || q->working) wait();
  const omc_status status = q->failure;
  memcpy(detail, q->detail, sizeof detail);
  q->failure = OMC_OK;
  unlock();
  return status == OMC_OK ? OMC_OK : omc_fail(status, "%s", detail);
}

/* Failures are left to whoever waits for the queue. */
static omc_status device_sync_all(void *ctx) {
  (void)ctx;
  lock();
  for (uint32_t i = 0; i < device.n_queues; i++)
    while (device.queues[i].first || device.queues[i].working) wait();
  unlock();
  return OMC_OK;
}

static void drop_mark(mark *m) {
  if (--m->references == 0) free(m);
}

static omc_status reach(job *j) {
  lock();
  j->mark->reached = true;
  drop_mark(j->mark);
  wake();
  unlock();
  return OMC_OK;
}

static omc_status wait_for(job *j) {
  lock();
  while (!j->mark->reached) wait();
  drop_mark(j->mark);
  unlock();
  return OMC_OK;
}

static omc_status device_order(void *ctx, void *given, void *other) {
  (void)ctx;
  if (queue_of(given) == queue_of(other)) return OMC_OK;
  mark *m = calloc(1, sizeof *m);
  job *at = new_job(reach, 0), *until = new_job(wait_for, 0);
  if (!m || !at || !until) {
    free(m), free(at), free(until);
    OMC_FAIL(ENOMEM, "no memory for a mark");
  }
  m->references = 2;
  at->mark = until->mark = m;
  at->always = until->always = true;
  OMC_TRY(give(other, at));
  return give(given, until);
}

/* ---- memory ---- */

/* First fit; fresh memory holds nothing that could pass for a result. */
static omc_status device_alloc(void *ctx, size_t bytes, void *given, void **out) {
  (void)ctx, (void)given;
  const size_t whole = omc_round_up(bytes ? bytes : 1, ALIGNMENT);
  size_t at = 0;
  uint32_t i = 0;
  lock();
  while (i < device.n_blocks && device.blocks[i].offset - at < whole) {
    at = device.blocks[i].offset + device.blocks[i].bytes;
    i++;
  }
  const bool fits = device.n_blocks < MAX_BLOCKS && whole <= BYTES - at;
  if (fits) {
    memmove(&device.blocks[i + 1], &device.blocks[i], (device.n_blocks - i) * sizeof(block));
    device.blocks[i] = (block){at, whole};
    device.n_blocks++;
    device.used += whole;
    if (device.used > device.peak) device.peak = device.used;
    memset(device.inside + at, POISON, whole);
  }
  unlock();
  if (!fits) OMC_FAIL(ENOMEM, "no %zu bytes on the device", bytes);
  *out = device.outside + at;
  return OMC_OK;
}

static void release(const void *p) {
  const size_t at = (size_t)((const char *)p - device.outside);
  lock();
  uint32_t i = 0;
  while (i < device.n_blocks && device.blocks[i].offset != at) i++;
  if (i == device.n_blocks) abort(); /* freed twice */
  memset(device.inside + at, POISON, device.blocks[i].bytes);
  device.used -= device.blocks[i].bytes;
  device.n_blocks--;
  memmove(&device.blocks[i], &device.blocks[i + 1], (device.n_blocks - i) * sizeof(block));
  unlock();
}

static omc_status run_free(job *j) {
  release(j->to);
  return OMC_OK;
}

static void device_free(void *ctx, void *ptr, size_t bytes, void *given) {
  (void)ctx, (void)bytes;
  job *j = new_job(run_free, 0);
  if (!j) abort();
  j->to = ptr;
  j->always = true;
  if (give(given, j) != OMC_OK) abort();
}

static omc_memory_stats device_memory(void *ctx) {
  (void)ctx;
  lock();
  const omc_memory_stats stats = {device.used, device.peak, 0};
  unlock();
  return stats;
}

static void device_trim(void *ctx) { (void)ctx; }

void device_write(void *to, const void *host, size_t bytes) {
  lock();
  device.counts.from_and_to_host++;
  if (bytes) memcpy(seen_by_kernels(to), host, bytes);
  unlock();
}

void device_read(void *host, const void *from, size_t bytes) {
  lock();
  device.counts.from_and_to_host++;
  if (bytes) memcpy(host, seen_by_kernels(from), bytes);
  unlock();
}

static omc_status device_upload(void *ctx, const void *host, size_t bytes, const void **out) {
  void *to;
  OMC_TRY(device_alloc(ctx, bytes, NULL, &to));
  lock();
  device.counts.uploads++;
  memcpy(seen_by_kernels(to), host, bytes);
  unlock();
  *out = to;
  return OMC_OK;
}

static void device_unload(void *ctx, const void *uploaded, size_t bytes) {
  (void)ctx, (void)bytes;
  release(uploaded);
}

static omc_status run_copy(job *j) {
  memmove(seen_by_kernels(j->to), seen_by_kernels(j->from), j->bytes);
  return OMC_OK;
}

static omc_status device_copy(void *ctx, void *dst, const void *src, size_t bytes, void *given) {
  (void)ctx;
  if (!is_inside(dst, bytes) || !is_inside(src, bytes))
    OMC_FAIL(EINTERNAL, "a copy within the device leaves it");
  job *j = new_job(run_copy, 0);
  if (j) j->to = dst, j->from = (void *)(uintptr_t)src, j->bytes = bytes;
  lock();
  device.counts.copies_within++;
  unlock();
  return give(given, j);
}

static omc_status run_zero(job *j) {
  memset(seen_by_kernels(j->to), 0, j->bytes);
  return OMC_OK;
}

static omc_status device_zero(void *ctx, void *dst, size_t bytes, void *given) {
  (void)ctx;
  if (!is_inside(dst, bytes)) OMC_FAIL(EINTERNAL, "zeros outside of the device");
  job *j = new_job(run_zero, 0);
  if (j) j->to = dst, j->bytes = bytes;
  return give(given, j);
}

/* ---- nodes ---- */

/* A CPU kernel behind a queue. */
typedef struct device_params {
  omc_call call;
} device_params;

static omc_status run_kernel(job *j) { return j->kernel(&j->args); }

static bool take_tensors(const omc_tensor *from, uint32_t n, omc_tensor *to) {
  for (uint32_t i = 0; i < n; i++) {
    size_t bytes = 0;
    to[i] = from[i];
    if (!from[i].type) continue;
    if (omc_type_bytes(from[i].type, &bytes) != OMC_OK) return false;
    if (bytes && !is_inside(from[i].data, bytes)) return false;
    to[i].data = bytes ? seen_by_kernels(from[i].data) : NULL;
  }
  return true;
}

/* Callbacks are the caller's: they run in its thread, in their turn, and know the device. */
static omc_status call_back(const omc_kernel_args *args) {
  const device_params *p = args->params;
  omc_kernel_args own = *args;
  own.params = p->call.params;
  OMC_TRY(device_sync(NULL, args->queue));
  return p->call.kernel(&own);
}

static omc_status launch(const omc_kernel_args *args) {
  const device_params *p = args->params;
  job *j = new_job(run_kernel, (size_t)args->n_in + args->n_out);
  if (!j) OMC_FAIL(ENOMEM, "no memory for a job");
  omc_tensor *in = j->tensors, *out = in + args->n_in;
  const bool inside = take_tensors(args->in, args->n_in, in) &&
                      take_tensors(args->out, args->n_out, out) &&
                      (!args->workspace || is_inside(args->workspace, p->call.workspace_bytes));
  j->kernel = p->call.kernel;
  j->args = *args;
  j->args.in = in, j->args.out = out;
  j->args.params = p->call.params;
  j->args.workspace = seen_by_kernels(args->workspace);
  if (!inside) {
    free(j);
    OMC_FAIL(EINTERNAL, "'%s' is given memory of the host's", args->node ? args->node : "");
  }
  lock();
  device.counts.kernels++;
  unlock();
  return give(args->queue, j);
}

static omc_status device_prepare(void *ctx, const omc_node *node, int threads, omc_arena *arena,
                                 omc_call *out) {
  const omc_provider *host = omc_provider_host();
  (void)ctx;
  device_params *p = OMC_NEW(arena, device_params);
  if (!p) OMC_NODE_FAIL(node, ENOMEM, "no memory for kernel parameters");
  OMC_TRY(host->prepare(host->ctx, node, threads, arena, &p->call));
  const bool calls = omc_op_get(node->op)->flags & OMC_OP_CALLBACK;
  *out = (omc_call){.kernel = calls ? call_back : launch,
                    .params = p,
                    .workspace_bytes = p->call.workspace_bytes};
  return OMC_OK;
}

static omc_status device_step(void *ctx, const struct omc_optim_step *step, void *given) {
  (void)ctx, (void)step, (void)given;
  OMC_FAIL(EUNSUPPORTED, "the device has no optimizers");
}

/* ---- the machine ---- */

static int device_threads(void *ctx) {
  (void)ctx;
  return 2;
}

static double device_clock(void *ctx, void *given) {
  const omc_provider *host = omc_provider_host();
  queue *q = queue_of(given);
  (void)ctx;
  lock();
  while (q->first || q->working) wait();
  unlock();
  return host->clock(host->ctx, NULL);
}

device_counts device_counted(void) {
  lock();
  const device_counts counts = device.counts;
  unlock();
  return counts;
}

static omc_provider provider;

static void fill_table(void) {
  const omc_provider *host = omc_provider_host();
  start();
  provider = (omc_provider){.name = "device",
                            .device = {12, 0}, /* DLPack's extension device */
                            .alignment = ALIGNMENT,
                            .prepare = device_prepare,
                            .fusible = host->fusible,
                            .gathers_casts = true,
                            .alloc = device_alloc,
                            .free = device_free,
                            .memory = device_memory,
                            .trim = device_trim,
                            .upload = device_upload,
                            .unload = device_unload,
                            .copy = device_copy,
                            .zero = device_zero,
                            .step = device_step,
                            .threads = device_threads,
                            .sync = device_sync,
                            .sync_all = device_sync_all,
                            .order = device_order,
                            .clock = device_clock,
                            .variant = host->variant,
                            .set_variant = host->set_variant};
}

const omc_provider *device_provider(void) {
  if (pthread_once(&once, fill_table) != 0) abort();
  return &provider;
}
