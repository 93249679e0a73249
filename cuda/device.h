/* One GPU as the provider sees it: its context, what it is, and the letter box of its kernels. */
#ifndef OMC_CUDA_DEVICE_H
#define OMC_CUDA_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "cuda/gpu/letter.h"

/* GPUs that are known at most, by their numbers. */
enum { OMC_CUDA_DEVICES = 64 };

typedef struct omc_cuda_device {
  int ordinal;
  void *context;    /* the primary one, which PyTorch works in too */
  int architecture; /* 90: sm_90 */
  int multiprocessors;
  size_t shared_bytes;           /* that a block may ask for at most */
  int cache_bytes;               /* of what all multiprocessors share */
  void *cublaslt;                /* its handle */
  bool tf32;                     /* products of float32 may round operands; atomic */
  void *box;                     /* memory of the host's that kernels see, for a letter */
  volatile omc_letter *letter;   /* the same; NULL: the device is not open yet */
  omc_letter *letter_of_kernels; /* its address there */
} omc_cuda_device;

/* The GPU of that number, opened when it is first asked for; lives for the process. Any thread.
 * OMC_EUNSUPPORTED: no driver, no such GPU, one older than sm_80, or libraries that do not go
 * together or with it. */
omc_status omc_cuda_device_get(int ordinal, omc_cuda_device **out) OMC_MUST_USE;

/* Sets in which mode this thread asks the driver for what might reach into a capture, and returns
 * the one before. Relaxed, it is let through, and the capture goes on, while another thread, or one
 * that it is not given to, captures a stream. With a device's context entered. */
enum { OMC_CUDA_RELAXED = 2 };
int omc_cuda_capture_mode(int mode);

/* What the driver is asked for between these is asked of the device's context. */
omc_status omc_cuda_enter(const omc_cuda_device *device) OMC_MUST_USE;
void omc_cuda_leave(const omc_cuda_device *device);

/* Waits for all streams of the context that is entered. None may be captured meanwhile: who
 * captures one does so under the lock. */
omc_status omc_cuda_wait(void) OMC_MUST_USE;
void omc_cuda_capture_lock(void);
void omc_cuda_capture_unlock(void);

/* The failure that a kernel has written, which is read once; OMC_OK if there is none. Waits for
 * nothing: what is given to the device may yet write one. */
omc_status omc_cuda_read_letter(omc_cuda_device *device) OMC_MUST_USE;

#endif
