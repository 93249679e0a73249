/* What the tests ask of the stand-ins for libcuda, libnvrtc and libtorch_cuda. */
#ifndef OMC_TESTS_EMULATED_H
#define OMC_TESTS_EMULATED_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a variable of the environment says that the stand-ins are to be like. */
static inline int emulated_number(const char *name, int otherwise) {
  const char *text = getenv(name);
  return text ? atoi(text) : otherwise;
}

enum { EMULATED_DEVICES = 2 };

/* Another stream of a device than the default one; lives for the process. */
void *emulated_stream(int device);

/* A paused stream takes what it is given and does nothing of it. The default one is the device's
 * whose context is current, number 0's if there is none. */
void emulated_pause(void *stream);
void emulated_resume(void *stream);
void emulated_wait(void *stream); /* until it is done */

/* Between host and device, at once: whoever calls has waited for what matters. */
void emulated_write(void *device, const void *host, size_t bytes);
void emulated_read(void *host, const void *device, size_t bytes);

/* Call number n from now on (0: the next one) to a function of the driver or cuBLASLt fails with
 * `error`, of NVRTC if `name` is its; all names if `name` is NULL. Negative: none does any more.
 * Whether one that was to fail had yet to come. */
int emulated_fail(int64_t n, const char *name, int error);

typedef struct emulated_counts {
  uint64_t launches, copies, compiled, mistakes; /* of the driver's user; each is told on stderr */
  size_t allocated_bytes;
  uint64_t events, graphs, streams; /* that there are; streams of the driver's user's */
  uint64_t replays;                 /* launches of graphs */
} emulated_counts;
emulated_counts emulated_counted(void); /* of all devices */
emulated_counts emulated_counted_on(int device);

/* The kernels launched since it was last called with `on`, and how many blocks of each, a line for
 * a launch; valid until it is called again. From now on they are noted, or not. */
const char *emulated_launched(int on);

/* Of the stand-in for PyTorch: tensors that are out; the stream that it works in on a device from
 * now on, and does now; and whether what ops give lies with channels innermost. */
int64_t emulated_tensors(void);
void emulated_use(int device, void *stream);
void *emulated_used(int device);
void emulated_channels_last(int on);

/* Of the same: what is called whenever memory is asked for or given back; NULL: nothing. */
void emulated_watch_memory(void (*called)(void));

/* Nobody has worked with a device yet. */
void emulated_forget(int device);

/* Another process, which ends at once. */
void emulated_fork(void);

/* Of the stand-in for PyTorch, for its own parts: the device that is current to it; another is from
 * now on, which gives that which was; that is so again, but is given no context if it has none. */
int emulated_current_device(void);
int emulated_exchange_device(int device);
void emulated_restore_device(int device);

/* Of the same, for its own parts: PyTorch says of a call that the driver has failed it. Gives what
 * the call is to give. */
int emulated_driver_failed(int error);

/* What other stand-ins ask of the driver's: whether a call of theirs is to fail, perhaps only if it
 * is told so by name, with what error of the driver's (0: it is not); that a mistake is told;
 * whether bytes of the device's are within one block that is out; whether there is a context, the
 * device that it is of (0: there is none), that it is another's from now on, a device's, and
 * whether anybody has worked with that; whether a stream does what it is given, and no capture is
 * disturbed by it; and that `job` is done in a stream, each time if that is captured, after which
 * `given` is dropped. */
int emulated_fails(const char *name);
int emulated_fails_by_name(const char *name);
void emulated_mistake(const char *what);
int emulated_is_out(const void *at, size_t bytes);
int emulated_has_context(void);
int emulated_device(void);
void emulated_set_device(int device);
void *emulated_context(int device);
int emulated_is_retained(int device);
int emulated_takes(void *stream);
int emulated_give(void *stream, int (*job)(void *), void *given, void (*drop)(void *));

#ifdef __cplusplus
}
#endif

#endif
