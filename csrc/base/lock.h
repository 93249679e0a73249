/* Locks of the whole process. */
#ifndef OMC_BASE_LOCK_H
#define OMC_BASE_LOCK_H

#include <pthread.h>

/* A static lock `name`, held by nobody when the process is copied by fork: the thread that holds
 * it would be missing in the child. Its holder must not wait for a thread that may fork. */
#define OMC_PROCESS_LOCK(name)                                       \
  static pthread_mutex_t name = PTHREAD_MUTEX_INITIALIZER;           \
  static void name##_acquire(void) { pthread_mutex_lock(&name); }    \
  static void name##_release(void) { pthread_mutex_unlock(&name); }  \
  __attribute__((constructor)) static void name##_watch_fork(void) { \
    pthread_atfork(name##_acquire, name##_release, name##_release);  \
  }

#endif
