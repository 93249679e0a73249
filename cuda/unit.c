#include "cuda/unit.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda/api.h"
#include "cuda/cache.h"

enum { MAX_COMPILERS = 16, N_SLOTS = 1024, DETAIL_BYTES = 2048, ARCHITECTURE_BYTES = 32 };
enum { SHARED_BYTES_UNASKED = 48 << 10 }; /* what a block has without asking */

struct omc_cuda_unit {
  omc_cuda_device *device;
  char *source, *name;
  enum { UNASKED, WAITING, COMPILED, FAILED } state;
  bool passing; /* what it failed for may be gone next time */
  void *image;
  void *module, *function; /* NULL: not loaded yet */
  uint32_t shared_bytes;   /* that launches may have */
  char *failure;
  omc_cuda_unit *next_waiting, *next; /* to be compiled; of the same slot */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* of what follows, and of states */
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static omc_cuda_unit *slots[N_SLOTS];
static omc_cuda_unit *first_waiting, **end_of_waiting = &first_waiting;
static int n_compilers;
static pid_t process; /* that compilers were started in; 0: none were */

/* ---- compiling ---- */

static const char *const options[] = {
    "--std=c++17",
    "--fmad=false" /* as on the CPU, vfma is explicit */,
    "-default-device",
    "-w",
};
enum { N_OPTIONS = sizeof options / sizeof *options };

/* What an image depends on, from the compiler to what is included, to be given to free(); NULL: not
 * known. */
static char *key_of(const omc_cuda_unit *unit) {
  char *key = NULL;
  size_t bytes;
  int major = 0, minor = 0;
  if (omc_cuda_api_get()->nvrtcVersion(&major, &minor) != 0) return NULL;
  FILE *out = open_memstream(&key, &bytes);
  if (!out) return NULL;
  fprintf(out, "NVRTC %d.%d sm_%d\n", major, minor, unit->device->architecture);
  for (int i = 0; i < N_OPTIONS; i++) fprintf(out, "%s\n", options[i]);
  fprintf(out, "%s\n%s", omc_cuda_sources_digest, unit->source);
  if (fclose(out) == 0) return key;
  free(key);
  return NULL;
}

static char *said_by_compiler(void *program, int error) {
  const omc_cuda_api *api = omc_cuda_api_get();
  size_t bytes = 0;
  char *text = calloc(1, DETAIL_BYTES);
  if (!text) return NULL;
  snprintf(text, DETAIL_BYTES, "%s", api->nvrtcGetErrorString(error));
  if (!program || api->nvrtcGetProgramLogSize(program, &bytes) != 0 || bytes < 2) return text;
  char *log = calloc(1, bytes + 1);
  if (log && api->nvrtcGetProgramLog(program, log) == 0) snprintf(text, DETAIL_BYTES, "%s", log);
  free(log);
  return text;
}

/* Of NVRTC's interface: all others are of the machine or of the compiler. */
enum { OUT_OF_MEMORY = 1, BY_THE_CODE = 6 };

static int compile_program(omc_cuda_unit *unit, void **program, void **image, size_t *bytes) {
  const omc_cuda_api *api = omc_cuda_api_get();
  const char *texts[OMC_CUDA_MOST_SOURCES], *names[OMC_CUDA_MOST_SOURCES], *all[N_OPTIONS + 1];
  const int n = omc_cuda_n_sources;
  for (int i = 0; i < n; i++)
    texts[i] = omc_cuda_sources[i].text, names[i] = omc_cuda_sources[i].name;
  char architecture[ARCHITECTURE_BYTES];
  snprintf(architecture, sizeof architecture, "--gpu-architecture=sm_%d",
           unit->device->architecture);
  memcpy(all, options, sizeof options);
  all[N_OPTIONS] = architecture;
  int error = api->nvrtcCreateProgram(program, unit->source, "unit.cu", n, texts, names);
  if (error == 0) error = api->nvrtcCompileProgram(*program, N_OPTIONS + 1, all);
  if (error == 0) error = api->nvrtcGetCUBINSize(*program, bytes);
  if (error != 0) return error;
  *image = malloc(*bytes + 1);
  return *image ? api->nvrtcGetCUBIN(*program, *image) : OUT_OF_MEMORY;
}

static void compile(omc_cuda_unit *unit) {
  char *const key = key_of(unit);
  size_t bytes;
  void *image = key ? omc_cuda_cache_get(key, &bytes) : NULL;
  char *failure = NULL;
  int error = 0;
  if (!image) {
    void *program = NULL;
    error = compile_program(unit, &program, &image, &bytes);
    if (error != 0) {
      failure = said_by_compiler(program, error);
      free(image);
      image = NULL;
    } else if (key) {
      omc_cuda_cache_put(key, image, bytes);
    }
    if (program) omc_cuda_api_get()->nvrtcDestroyProgram(&program);
  }
  free(key);
  pthread_mutex_lock(&mutex);
  unit->image = image;
  unit->failure = failure;
  unit->passing = error != BY_THE_CODE;
  unit->state = image ? COMPILED : FAILED;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&mutex);
}

/* A thread that compiles what waits, and ends when nothing does. */
static void *compile_waiting(void *ctx) {
  (void)ctx;
  pthread_mutex_lock(&mutex);
  while (first_waiting) {
    omc_cuda_unit *const unit = first_waiting;
    first_waiting = unit->next_waiting;
    if (!first_waiting) end_of_waiting = &first_waiting;
    pthread_mutex_unlock(&mutex);
    compile(unit);
    pthread_mutex_lock(&mutex);
  }
  n_compilers--;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&mutex);
  return NULL;
}

/* The compiler must not be taken down under threads that are in it. A forked child has none. */
static void end_compilers(void) {
  if (getpid() != process) return;
  pthread_mutex_lock(&mutex);
  first_waiting = NULL;
  end_of_waiting = &first_waiting;
  while (n_compilers > 0) pthread_cond_wait(&changed, &mutex);
  pthread_mutex_unlock(&mutex);
}

/* With the lock held. */
static void start_compiler(void) {
  const long cores = sysconf(_SC_NPROCESSORS_ONLN);
  pthread_t thread;
  if (process != getpid()) n_compilers = 0;
  if (n_compilers >= MAX_COMPILERS || n_compilers >= cores) return;
  if (process == 0 && atexit(end_compilers) != 0) return;
  process = getpid();
  if (pthread_create(&thread, NULL, compile_waiting, NULL) != 0) return;
  pthread_detach(thread);
  n_compilers++;
}

/* ---- units ---- */

static uint32_t slot_of(const char *source) {
  uint32_t h = 2166136261u;
  for (; *source; source++) h = (h ^ (unsigned char)*source) * 16777619u;
  return h % N_SLOTS;
}

/* All that a unit is compiled from, to be given to free(): see OMC_GLOBAL of gpu/target.h. */
static char *source_of(const char *source, const char *name) {
  char *text = NULL;
  size_t bytes;
  FILE *out = open_memstream(&text, &bytes);
  if (!out) return NULL;
  fprintf(out, "#define OMC_WANTED_%s ,\n%s", name, source);
  if (fclose(out) == 0) return text;
  free(text);
  return NULL;
}

/* Takes the source. */
static omc_cuda_unit *new_unit(omc_cuda_device *device, char *source, const char *name) {
  omc_cuda_unit *unit = calloc(1, sizeof *unit);
  char *const kept = strdup(name);
  if (unit && kept) {
    *unit = (omc_cuda_unit){
        .device = device, .source = source, .name = kept, .shared_bytes = SHARED_BYTES_UNASKED};
    return unit;
  }
  free(kept);
  free(unit);
  free(source);
  return NULL;
}

/* With the lock held. */
static void have_compiled(omc_cuda_unit *unit) {
  unit->state = WAITING;
  unit->next_waiting = NULL;
  *end_of_waiting = unit;
  end_of_waiting = &unit->next_waiting;
  start_compiler();
}

omc_status omc_cuda_unit_of(omc_cuda_device *device, const char *source, const char *name,
                            omc_cuda_unit **out) {
  char *text = source_of(source, name);
  if (!text) OMC_FAIL(ENOMEM, "no memory for device code");
  omc_cuda_unit **const slot = &slots[slot_of(text)], *unit;
  pthread_mutex_lock(&mutex);
  for (unit = *slot; unit; unit = unit->next)
    if (unit->device == device && strcmp(unit->source, text) == 0) break;
  if (unit) {
    free(text);
  } else if ((unit = new_unit(device, text, name))) {
    unit->next = *slot;
    *slot = unit;
  }
  pthread_mutex_unlock(&mutex);
  *out = unit;
  return unit ? OMC_OK : omc_fail(OMC_ENOMEM, "no memory for device code");
}

void omc_cuda_unit_ask(omc_cuda_unit *unit) {
  pthread_mutex_lock(&mutex);
  if (unit->state == UNASKED) have_compiled(unit);
  pthread_mutex_unlock(&mutex);
}

const char *omc_cuda_unit_name(const omc_cuda_unit *unit) { return unit->name; }

/* ---- functions; with the lock held ---- */

enum { MAX_DYNAMIC_SHARED_SIZE = 8 }; /* of the driver's interface */

static void wait_for_compiler(omc_cuda_unit *unit) {
  if (unit->state == UNASKED) have_compiled(unit);
  if (unit->state == WAITING && n_compilers == 0) { /* no thread could be started */
    n_compilers++;
    pthread_mutex_unlock(&mutex);
    compile_waiting(NULL);
    pthread_mutex_lock(&mutex);
  }
  while (unit->state == WAITING) pthread_cond_wait(&changed, &mutex);
}

static omc_status failed(omc_cuda_unit *unit) {
  const omc_status status = omc_fail(OMC_EINTERNAL, "device code does not compile: %s",
                                     unit->failure ? unit->failure : "no memory");
  if (unit->passing) {
    free(unit->failure);
    unit->failure = NULL;
    have_compiled(unit);
  }
  return status;
}

static omc_status load(omc_cuda_unit *unit, uint32_t shared_bytes) {
  if (!unit->module) OMC_CUDA_TRY(cuModuleLoadData, &unit->module, unit->image);
  if (!unit->function) OMC_CUDA_TRY(cuModuleGetFunction, &unit->function, unit->module, unit->name);
  if (shared_bytes > unit->shared_bytes) {
    OMC_CUDA_TRY(cuFuncSetAttribute, unit->function, MAX_DYNAMIC_SHARED_SIZE, (int)shared_bytes);
    unit->shared_bytes = shared_bytes;
  }
  return OMC_OK;
}

static omc_status look_up(omc_cuda_unit *unit, uint32_t shared_bytes, void **out) {
  wait_for_compiler(unit);
  if (unit->state == FAILED) return failed(unit);
  const int mode = omc_cuda_capture_mode(OMC_CUDA_RELAXED);
  const omc_status status = load(unit, shared_bytes);
  omc_cuda_capture_mode(mode);
  *out = unit->function;
  return status;
}

omc_status omc_cuda_function_of(omc_cuda_unit *unit, uint32_t shared_bytes, void **out) {
  pthread_mutex_lock(&mutex);
  const omc_status status = look_up(unit, shared_bytes, out);
  pthread_mutex_unlock(&mutex);
  return status;
}
