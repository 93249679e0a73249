/* Part of driver.cpp: streams, events, captures and graphs. A stream is a thread that does what it
 * is given; one that is captured does nothing, and what it is given becomes a graph. Nothing fails
 * to be destroyed.
 */

namespace {

typedef std::function<int()> job;

enum capture_mode { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };
struct capture {
  int mode, device;
  std::thread::id owner = std::this_thread::get_id();
  bool valid = true;
  std::vector<job> jobs;
};
struct stream {
  int device;
  bool blocking; /* one that waits for the default stream and is waited for by it */
  std::deque<job> jobs;
  bool working = false, paused = false, closing = false;
  int failure = SUCCESS;
  std::shared_ptr<capture> captured;
};
struct event {
  int device;
  uint64_t recorded = 0, reached = 0;
  std::shared_ptr<capture> in; /* recorded while that went on */
};
struct graph {
  int device;
  std::vector<job> jobs;
  uint64_t launched = 0, done = 0; /* of one that can be launched */
};
std::set<std::shared_ptr<stream>> streams;
std::set<std::shared_ptr<event>> events;
std::set<std::shared_ptr<graph>> graphs, executables;
std::set<std::shared_ptr<capture>> captures;
thread_local int mode_of_thread = GLOBAL;

template <typename T>
std::shared_ptr<T> known(const std::set<std::shared_ptr<T>> &all, void *handle, const char *what) {
  for (const auto &one : all)
    if (one.get() == handle) return one;
  mistake("%s that there is not: %p", what, handle);
  return nullptr;
}

/* ---- work ---- */

bool is_done(const stream &s) { return s.jobs.empty() && !s.working; }

void work(std::shared_ptr<stream> s) {
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    changed.wait(lock, [&] { return s->jobs.empty() ? s->closing : !s->paused; });
    if (s->jobs.empty()) return;
    job next = std::move(s->jobs.front());
    s->jobs.pop_front();
    s->working = true;
    lock.unlock();
    int failure;
    {
      const touching now(s->device);
      failure = next();
    }
    next = nullptr;
    lock.lock();
    if (failure != SUCCESS) s->failure = failure;
    s->working = false;
    changed.notify_all();
  }
}

std::shared_ptr<stream> new_stream(int device, bool blocking) {
  const auto s = std::make_shared<stream>();
  s->device = device;
  s->blocking = blocking;
  streams.insert(s);
  std::thread(work, s).detach();
  return s;
}

/* The default one is the device's that is current. */
std::shared_ptr<stream> any_stream(void *handle) {
  static std::shared_ptr<stream> defaults[EMULATED_DEVICES];
  if (handle) return known(streams, handle, "a stream");
  std::shared_ptr<stream> &s = defaults[device_now()];
  return s ? s : s = new_stream(device_now(), true);
}

bool is_here(int device, const char *what) {
  if (device != device_now())
    mistake("%s of device %d is used where device %d is current", what, device, device_now());
  return device == device_now();
}

std::shared_ptr<stream> stream_of(void *handle) {
  const auto s = any_stream(handle);
  return s && is_here(s->device, "a stream") ? s : nullptr;
}

/* ---- captures ---- */

int spoil(capture &c, int error) {
  c.valid = false;
  return error;
}

/* Calls that might reach into a capture are not allowed while one goes on that sees this thread. */
int forbidden() {
  for (const auto &c : captures)
    if (mode_of_thread != RELAXED &&
        (c->mode == GLOBAL || (c->mode == THREAD_LOCAL && c->owner == std::this_thread::get_id())))
      return spoil(*c, CAPTURE_UNSUPPORTED);
  return SUCCESS;
}

/* Nor is it to wait for all streams, some of which run nothing. */
int waiting_for_all() {
  for (const auto &c : captures)
    if (c->device == device_now()) return spoil(*c, CAPTURE_UNSUPPORTED);
  return SUCCESS;
}

void wait_for_all(std::unique_lock<std::mutex> &lock, int device) {
  const auto now = streams;
  for (const auto &s : now)
    if (s->device == device) changed.wait(lock, [&] { return is_done(*s); });
}

/* What the default stream of its device is given would wait for this one. */
std::shared_ptr<stream> waited_for(const stream &s, void *handle) {
  for (const auto &other : streams)
    if (!handle && other->device == s.device && other->captured && other->blocking) return other;
  return nullptr;
}
int implicit(const stream &s, void *handle) {
  const auto other = s.captured ? nullptr : waited_for(s, handle);
  return other ? spoil(*other->captured, CAPTURE_IMPLICIT) : SUCCESS;
}

int give(void *handle, job next) {
  const auto s = stream_of(handle);
  if (!s) return INVALID_HANDLE;
  if (const int error = implicit(*s, handle)) return error;
  if (s->captured && !s->captured->valid) return CAPTURE_INVALIDATED;
  if (s->captured)
    s->captured->jobs.push_back(std::move(next));
  else
    s->jobs.push_back(std::move(next));
  changed.notify_all();
  return SUCCESS;
}

void end_capture(const std::shared_ptr<capture> &c) {
  for (const auto &s : streams)
    if (s->captured == c) s->captured = nullptr;
  captures.erase(c);
}

}  // namespace

/* ---- streams ---- */

EXPORT int cuStreamCreate(void **out, unsigned flags) {
  ENTER(true)
  if (const int error = forbidden()) return error;
  *out = new_stream(device_now(), flags != 1).get();
  counts[device_now()].streams++;
  return SUCCESS;
}
EXPORT int cuStreamDestroy_v2(void *handle) {
  std::unique_lock<std::mutex> lock(mutex);
  const auto s = known(streams, handle, "a stream");
  if (!s) return INVALID_HANDLE;
  if (s->captured) {
    mistake("a stream is destroyed while it is captured");
    s->captured->valid = false;
  }
  s->closing = true;
  streams.erase(s);
  counts[s->device].streams--;
  changed.notify_all();
  return SUCCESS;
}
EXPORT int cuStreamSynchronize(void *handle) {
  ENTER(true)
  const auto s = stream_of(handle);
  if (!s) return INVALID_HANDLE;
  if (s->captured) return spoil(*s->captured, CAPTURE_UNSUPPORTED);
  if (const int error = forbidden()) return error;
  if (const int error = implicit(*s, handle)) return error;
  changed.wait(lock, [&] { return is_done(*s); });
  const int failure = s->failure;
  s->failure = SUCCESS;
  return failure;
}
EXPORT int cuCtxSynchronize(void) {
  ENTER(true)
  if (const int error = waiting_for_all()) return error;
  wait_for_all(lock, device_now());
  return SUCCESS;
}

/* ---- events ---- */

EXPORT int cuEventCreate(void **out, unsigned) {
  ENTER(true)
  const auto e = std::make_shared<event>();
  e->device = device_now();
  events.insert(e);
  counts[e->device].events++;
  *out = e.get();
  return SUCCESS;
}
EXPORT int cuEventRecord(void *handle, void *on) {
  ENTER(true)
  const auto e = known(events, handle, "an event");
  const auto s = stream_of(on);
  if (!e || !s || !is_here(e->device, "an event")) return INVALID_HANDLE;
  e->in = s->captured;
  if (e->in) return e->in->valid ? SUCCESS : CAPTURE_INVALIDATED;
  const uint64_t n = ++e->recorded;
  return give(on, [e, n]() -> int {
    std::unique_lock<std::mutex> locked(mutex);
    e->reached = n;
    changed.notify_all();
    return SUCCESS;
  });
}
/* A stream that waits for one that is captured is captured with it, in one order with all of it. */
EXPORT int cuStreamWaitEvent(void *on, void *handle, unsigned) {
  ENTER(true)
  const auto e = known(events, handle, "an event");
  const auto s = stream_of(on);
  if (!e || !s) return INVALID_HANDLE;
  if (s->captured && e->in != s->captured && (e->in || e->recorded))
    return spoil(*s->captured, CAPTURE_ISOLATION);
  if (e->in) {
    s->captured = e->in;
    return SUCCESS;
  }
  return give(on, [e, n = e->recorded]() -> int {
    std::unique_lock<std::mutex> locked(mutex);
    changed.wait(locked, [&] { return e->reached >= n; });
    return SUCCESS;
  });
}
EXPORT int cuEventDestroy_v2(void *handle) {
  std::unique_lock<std::mutex> lock(mutex);
  const auto e = known(events, handle, "an event");
  if (!e) return INVALID_HANDLE;
  events.erase(e);
  counts[e->device].events--;
  return SUCCESS;
}

/* ---- captures and graphs ---- */

EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) {
  std::swap(*mode, mode_of_thread);
  return SUCCESS;
}
EXPORT int cuStreamBeginCapture_v2(void *on, int mode) {
  ENTER(true)
  const auto s = stream_of(on);
  if (!s) return INVALID_HANDLE;
  if (!on) return CAPTURE_UNSUPPORTED;
  if (s->captured) return ILLEGAL_STATE;
  s->captured = std::make_shared<capture>();
  s->captured->mode = mode;
  s->captured->device = s->device;
  captures.insert(s->captured);
  return SUCCESS;
}
EXPORT int cuStreamIsCapturing(void *on, int *status) {
  ENTER(true)
  const auto s = stream_of(on);
  if (!s) return INVALID_HANDLE;
  if (const int error = implicit(*s, on)) return error;
  *status = !s->captured ? 0 : s->captured->valid ? 1 : 2;
  return SUCCESS;
}
/* One that is told to fail ends the capture all the same. */
EXPORT int cuStreamEndCapture(void *on, void **out) {
  std::unique_lock<std::mutex> lock(mutex);
  const auto s = stream_of(on);
  *out = nullptr;
  if (!s || !s->captured) return s ? ILLEGAL_STATE : INVALID_HANDLE;
  const auto c = s->captured;
  if (c->mode != RELAXED && c->owner != std::this_thread::get_id()) return CAPTURE_WRONG_THREAD;
  end_capture(c);
  if (fails(__func__)) return fail_with;
  if (!c->valid) return CAPTURE_INVALIDATED;
  const auto g = std::make_shared<graph>();
  g->device = c->device;
  g->jobs = std::move(c->jobs);
  graphs.insert(g);
  counts[g->device].graphs++;
  *out = g.get();
  return SUCCESS;
}
EXPORT int cuGraphInstantiateWithFlags(void **out, void *handle, unsigned long long) {
  ENTER(true)
  if (const int error = forbidden()) return error;
  const auto g = known(graphs, handle, "a graph");
  if (!g || !is_here(g->device, "a graph")) return INVALID_HANDLE;
  const auto x = std::make_shared<graph>(*g);
  executables.insert(x);
  counts[x->device].graphs++;
  *out = x.get();
  return SUCCESS;
}
/* Launches of one graph follow one another, whatever streams they are given to. */
EXPORT int cuGraphLaunch(void *handle, void *on) {
  ENTER(true)
  const auto x = known(executables, handle, "a graph to be launched");
  if (!x || !is_here(x->device, "a graph to be launched")) return INVALID_HANDLE;
  const uint64_t n = x->launched + 1;
  const int error = give(on, [x, n]() -> int {
    {
      std::unique_lock<std::mutex> locked(mutex);
      changed.wait(locked, [&] { return x->done + 1 >= n; });
    }
    int failure = SUCCESS;
    for (const job &next : x->jobs)
      if (failure == SUCCESS) failure = next();
    std::unique_lock<std::mutex> locked(mutex);
    x->done = n;
    changed.notify_all();
    return failure;
  });
  if (error == SUCCESS) x->launched = n, counts[x->device].replays++;
  return error;
}
EXPORT int cuGraphDestroy(void *handle) {
  std::unique_lock<std::mutex> lock(mutex);
  const auto g = known(graphs, handle, "a graph");
  if (!g) return INVALID_HANDLE;
  graphs.erase(g);
  counts[g->device].graphs--;
  return SUCCESS;
}
EXPORT int cuGraphExecDestroy(void *handle) {
  std::unique_lock<std::mutex> lock(mutex);
  if (const int error = forbidden()) return error;
  const auto x = known(executables, handle, "a graph to be launched");
  if (!x) return INVALID_HANDLE;
  executables.erase(x);
  counts[x->device].graphs--;
  return SUCCESS;
}
