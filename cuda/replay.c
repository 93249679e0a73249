#include "cuda/replay.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/env.h"
#include "base/lock.h"
#include "cuda/api.h"
#include "cuda/memory.h"

enum { MOST_KEPT = 8, MOST_TRIES = 3 };

/* Of the driver's interface. */
enum { NON_BLOCKING = 1, OF_THIS_THREAD = 1, NOT_CAPTURING = 0 };

/* What is launched in the place of work. */
typedef struct replica {
  struct replica *next; /* in a list of those to be ended */
  void *graph;
  void *seed, *queue; /* on the device, and where it is read; NULL: there is none */
} replica;

/* Work as it was given once. */
typedef struct recording {
  enum { NONE, MET, IN_MAKING, MADE, REFUSED } state;
  int tried; /* in vain */
  void *queue;
  bool tf32;
  void **tensors;
  uint64_t used;    /* when last */
  replica *replica; /* MADE */
} recording;

typedef struct notes_of {
  omc_cuda_device *device;
  struct notes_of *next, **link; /* in `all` */
  pthread_mutex_t mutex;         /* of what follows */
  uint64_t now;                  /* counts what was given */
  recording kept[MOST_KEPT];
} notes_of;

/* No lock is held where PyTorch is asked for memory or given it back: it takes its own there, and
 * may wait for Python's, whose holder may drop a plan or fork. */
OMC_PROCESS_LOCK(listing) /* taken before that of notes */
static notes_of *all;

static bool tf32_of(const omc_cuda_device *d) {
  return __atomic_load_n(&d->tf32, __ATOMIC_RELAXED);
}

/* ---- replicas ---- */

static void end(omc_cuda_device *d, replica *list) {
  const int mode = omc_cuda_capture_mode(OMC_CUDA_RELAXED);
  for (replica *next; list; list = next) {
    next = list->next;
    if (list->graph) omc_cuda_api_get()->cuGraphExecDestroy(list->graph); /* once it is done */
    omc_cuda_free(d, list->seed, sizeof(uint64_t), list->queue);
    free(list);
  }
  omc_cuda_capture_mode(mode);
}

/* To be ended once no lock is held. */
static void put_aside(recording *r, replica **list) {
  if (!r->replica) return;
  r->replica->next = *list;
  *list = r->replica;
  r->replica = NULL;
}

/* ---- notes ---- */

static notes_of *new_notes(omc_cuda_device *d) {
  notes_of *n = calloc(1, sizeof *n);
  if (!n || pthread_mutex_init(&n->mutex, NULL) != 0) {
    free(n);
    return NULL;
  }
  n->device = d;
  n->next = all, n->link = &all;
  if (all) all->link = &n->next;
  return all = n;
}

/* Those of an origin of work, made by whoever gives it first; NULL: no memory. */
static notes_of *notes_at(omc_cuda_device *d, void **notes) {
  notes_of *n = __atomic_load_n((notes_of **)notes, __ATOMIC_ACQUIRE);
  if (n) return n;
  listing_acquire();
  n = *notes;
  if (!n) __atomic_store_n((notes_of **)notes, n = new_notes(d), __ATOMIC_RELEASE);
  listing_release();
  return n;
}

static bool is_of(const recording *r, const omc_recurring *work, void *queue, bool tf32) {
  return r->state != NONE && r->queue == queue && r->tf32 == tf32 &&
         memcmp(r->tensors, work->tensors, work->n_tensors * sizeof *r->tensors) == 0;
}

/* The recording of such work; one that is met for the first time takes the place of that which was
 * used least recently. NULL: no memory, or all are in the making. */
static recording *recording_of(notes_of *n, const omc_recurring *work, void *queue,
                               replica **aside) {
  const bool tf32 = tf32_of(n->device);
  recording *r = NULL;
  for (int i = 0; i < MOST_KEPT; i++) {
    recording *k = &n->kept[i];
    if (is_of(k, work, queue, tf32)) return k;
    if (k->state != IN_MAKING && (!r || k->used < r->used)) r = k;
  }
  if (!r) return NULL;
  const size_t bytes = work->n_tensors * sizeof *r->tensors;
  if (!r->tensors && !(r->tensors = malloc(bytes))) return NULL;
  put_aside(r, aside);
  memcpy(r->tensors, work->tensors, bytes);
  r->queue = queue, r->tf32 = tf32, r->state = NONE, r->tried = 0;
  return r;
}

/* ---- graphs ---- */

static omc_status instantiate(void *graph, void **out) {
  OMC_CUDA_TRY(cuGraphInstantiateWithFlags, out, graph, 0);
  return OMC_OK;
}

/* Ends what it begins, also of work that fails. */
static omc_status capture(const omc_recurring *work, const uint64_t *seed, void *stream,
                          void **out) {
  OMC_CUDA_TRY(cuStreamBeginCapture_v2, stream, OF_THIS_THREAD);
  const omc_status given = work->give(work->arg, seed, stream);
  const int error = omc_cuda_api_get()->cuStreamEndCapture(stream, out);
  return given == OMC_OK ? omc_cuda_check(error, "cuStreamEndCapture") : given;
}

static omc_status capture_apart(const omc_recurring *work, const uint64_t *seed, void **out) {
  void *stream;
  OMC_CUDA_TRY(cuStreamCreate, &stream, NON_BLOCKING);
  omc_cuda_capture_lock();
  const omc_status status = capture(work, seed, stream, out);
  omc_cuda_capture_unlock();
  omc_cuda_api_get()->cuStreamDestroy_v2(stream);
  return status;
}

static omc_status record(omc_cuda_device *d, const omc_recurring *work, bool tf32, replica *out) {
  if (work->random) OMC_TRY(omc_cuda_alloc(d, sizeof(uint64_t), out->queue, &out->seed));
  void *graph = NULL;
  omc_status status = capture_apart(work, out->seed, &graph);
  if (status == OMC_OK) status = instantiate(graph, &out->graph);
  if (graph) omc_cuda_api_get()->cuGraphDestroy(graph);
  OMC_TRY(status);
  if (tf32_of(d) != tf32) OMC_FAIL(ESTATE, "another thread has changed the precision");
  return OMC_OK;
}

/* NULL: it could not be made, for now or for good. */
static replica *make(omc_cuda_device *d, const omc_recurring *work, void *queue, bool tf32) {
  replica *made = calloc(1, sizeof *made);
  if (!made) return NULL;
  made->queue = queue;
  const int mode = omc_cuda_capture_mode(OMC_CUDA_RELAXED);
  const omc_status status = record(d, work, tf32, made);
  omc_cuda_capture_mode(mode);
  if (status == OMC_OK) return made;
  end(d, made);
  return NULL;
}

static omc_status set_seed(const replica *r, uint64_t seed) {
  const omc_cuda_ptr at = (omc_cuda_ptr)(uintptr_t)r->seed;
  OMC_CUDA_TRY(cuMemsetD32Async, at, (unsigned)seed, 1, r->queue);
  OMC_CUDA_TRY(cuMemsetD32Async, at + sizeof(uint32_t), (unsigned)(seed >> 32), 1, r->queue);
  return OMC_OK;
}

static omc_status launch(const replica *r, const omc_recurring *work) {
  if (r->seed) OMC_TRY(set_seed(r, work->seed));
  OMC_CUDA_TRY(cuGraphLaunch, r->graph, r->queue);
  return OMC_OK;
}

/* ---- with the lock of notes ---- */

/* Whether a replica is to be made of it now. */
static bool meet(recording *r) {
  const bool again = r->state == MET;
  if (again) r->state = IN_MAKING;
  if (r->state == NONE) r->state = MET;
  return again;
}

/* What is lost because another thread waits for the whole device is tried again, as often as pays.
 */
static void settle(recording *r, replica *made) {
  r->replica = made;
  r->state = made ? MADE : ++r->tried < MOST_TRIES ? MET : REFUSED;
}

/* Whether the work was given as a graph. One that fails has given nothing, and is not tried again.
 */
static bool is_replayed(recording *r, const omc_recurring *work, replica **aside) {
  if (r->state != MADE) return false;
  if (launch(r->replica, work) == OMC_OK) return true;
  put_aside(r, aside);
  r->state = REFUSED;
  return false;
}

static bool replay(omc_cuda_device *d, notes_of *n, const omc_recurring *work, void *queue) {
  replica *aside = NULL;
  pthread_mutex_lock(&n->mutex);
  recording *r = recording_of(n, work, queue, &aside);
  if (r) r->used = ++n->now;
  if (r && meet(r)) {
    pthread_mutex_unlock(&n->mutex);
    replica *made = make(d, work, queue, r->tf32);
    pthread_mutex_lock(&n->mutex);
    settle(r, made);
  }
  const bool replayed = r && is_replayed(r, work, &aside);
  pthread_mutex_unlock(&n->mutex);
  end(d, aside);
  return replayed;
}

/* ---- the provider's ---- */

omc_status omc_cuda_is_captured(void *queue, const char *repeats, bool *out) {
  int status = NOT_CAPTURING;
  const int error = omc_cuda_api_get()->cuStreamIsCapturing(queue, &status);
  *out = error != 0 || status != NOT_CAPTURING;
  if (error == 0 && *out && repeats)
    OMC_FAIL(EUNSUPPORTED, "a CUDA graph that is being captured would %s at each launch", repeats);
  return OMC_OK;
}

static omc_status try_replay(omc_cuda_device *d, const omc_recurring *work, void *queue,
                             void **notes, bool *replayed) {
  bool captured;
  const char *repeats = work->random ? "draw the same random numbers" : NULL;
  OMC_TRY(omc_cuda_is_captured(queue, repeats, &captured));
  if (captured || !work->recurs || !omc_env_get()->graphs) return OMC_OK;
  notes_of *n = notes_at(d, notes);
  if (!n) return OMC_OK;
  *replayed = replay(d, n, work, queue);
  return OMC_OK;
}

omc_status omc_cuda_give(void *ctx, const omc_recurring *work, void *queue, void **notes,
                         bool *replayed) {
  *replayed = false;
  omc_cuda_use(ctx, queue);
  OMC_TRY(omc_cuda_enter(ctx));
  const omc_status status = try_replay(ctx, work, queue, notes, replayed);
  omc_cuda_leave(ctx);
  OMC_TRY(status);
  return *replayed ? OMC_OK : work->give(work->arg, NULL, queue);
}

void omc_cuda_forget(void *ctx, void *notes) {
  notes_of *n = notes;
  replica *aside = NULL;
  listing_acquire();
  *n->link = n->next;
  if (n->next) n->next->link = n->link;
  listing_release();
  for (int i = 0; i < MOST_KEPT; i++) {
    put_aside(&n->kept[i], &aside);
    free(n->kept[i].tensors);
  }
  const omc_status entered = omc_cuda_enter(ctx);
  end(ctx, aside);
  if (entered == OMC_OK) omc_cuda_leave(ctx);
  pthread_mutex_destroy(&n->mutex);
  free(n);
}

bool omc_cuda_end_graphs(omc_cuda_device *device) {
  replica *aside = NULL;
  if (omc_cuda_enter(device) != OMC_OK) return false;
  listing_acquire();
  for (notes_of *n = all; n; n = n->next) {
    if (n->device != device) continue;
    pthread_mutex_lock(&n->mutex);
    for (recording *r = n->kept; r < n->kept + MOST_KEPT; r++) {
      put_aside(r, &aside);
      if (r->state == MADE) r->state = MET;
    }
    pthread_mutex_unlock(&n->mutex);
  }
  listing_release();
  const bool any = aside || omc_cuda_keeps(device);
  end(device, aside);
  const bool done = any && omc_cuda_finish(device) == OMC_OK;
  omc_cuda_leave(device);
  return done;
}
