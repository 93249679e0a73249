/* Device code: a unit is one kernel of a source, compiled for a GPU on first use and loaded there.
 */
#ifndef OMC_CUDA_UNIT_H
#define OMC_CUDA_UNIT_H

#include "cuda/device.h"

typedef struct omc_cuda_unit omc_cuda_unit;

/* The files that units include: of cuda/gpu, cuda/ops and the rows of csrc/ops. Made by setup.py.
 */
typedef struct omc_cuda_source {
  const char *name, *text;
} omc_cuda_source;
enum { OMC_CUDA_MOST_SOURCES = 64 };
extern const omc_cuda_source omc_cuda_sources[];
extern const int omc_cuda_n_sources;
extern const char omc_cuda_sources_digest[]; /* SHA-256 of names and texts, in hexadecimal */

/* The kernel `name` of a source on a device. Units live for the process. Any thread; source and
 * name are copied. */
omc_status omc_cuda_unit_of(omc_cuda_device *device, const char *source, const char *name,
                            omc_cuda_unit **out) OMC_MUST_USE;

/* Another thread compiles it from now on; without that it is compiled when a launch wants it. */
void omc_cuda_unit_ask(omc_cuda_unit *unit);

const char *omc_cuda_unit_name(const omc_cuda_unit *unit);

/* For launches with up to so many bytes of shared memory, after waiting for its compiler:
 * OMC_EINTERNAL with what that says. What failed for want of something else than better code is
 * compiled once more. With the device's context entered. */
omc_status omc_cuda_function_of(omc_cuda_unit *unit, uint32_t shared_bytes,
                                void **out) OMC_MUST_USE;

#endif
