/* Copies of boxes and fills on a GPU. */
#ifndef OMC_CUDA_COPIES_H
#define OMC_CUDA_COPIES_H

#include "base/box.h"
#include "cuda/gpu/boxes.h"
#include "cuda/launch.h"

typedef struct omc_cuda_copy {
  omc_box box; /* in the form that is run: fewest dims */
  size_t size; /* bytes of an element */
  bool transposes;
  bool runs;      /* rows lie contiguous on both sides */
  uint64_t steps; /* with bits below those of all offsets, in bytes: what rows may be moved by */
  omc_cuda_kernel kernels[OMC_CUDA_UNITS];
} omc_cuda_copy;

typedef struct omc_cuda_fill {
  omc_cuda_kernel kernel;
} omc_cuda_fill;

/* What a plan keeps of a copy. `size` is 1, 2, 4 or 8. */
omc_status omc_cuda_copy_of(omc_cuda_device *device, const omc_box *box, size_t size,
                            omc_cuda_copy *out) OMC_MUST_USE;

/* Copies. Source and destination do not overlap. */
omc_status omc_cuda_copy_run(const omc_cuda_copy *copy, void *dst, const void *src,
                             void *queue) OMC_MUST_USE;

/* The kernels of copies whose boxes are known only when they are run; the one for `likely` is
 * compiled from now on. `size` as above. */
typedef struct omc_cuda_copier {
  size_t size;
  omc_cuda_kernel straight[OMC_CUDA_UNITS], transposing[OMC_CUDA_UNITS];
} omc_cuda_copier;

omc_status omc_cuda_copier_of(omc_cuda_device *device, const omc_box *likely, size_t size,
                              omc_cuda_copier *out) OMC_MUST_USE;
omc_status omc_cuda_copier_run(const omc_cuda_copier *copier, const omc_box *box, void *dst,
                               const void *src, void *queue) OMC_MUST_USE;

/* Several copies as one launch, or one for each unit of which much is moved. */
enum { OMC_CUDA_COPIES = OMC_COPIES };
typedef struct omc_cuda_copies {
  omc_cuda_kernel kernels[OMC_CUDA_UNITS];
} omc_cuda_copies;

typedef struct omc_cuda_copying {
  const omc_cuda_copy *copy;
  void *dst;
  const void *src;
} omc_cuda_copying;

/* Whether launches of several can do it: it has two axes at most, and not to turn them. */
bool omc_cuda_copy_joins(const omc_cuda_copy *copy);

/* For copies like this one. */
omc_status omc_cuda_copies_of(omc_cuda_device *device, const omc_cuda_copy *like,
                              omc_cuda_copies *out) OMC_MUST_USE;

/* Up to OMC_CUDA_COPIES copies that join, of elements of one size. No destination overlaps another
 * or a source. */
omc_status omc_cuda_copies_run(const omc_cuda_copies *copies, const omc_cuda_copying *list,
                               uint32_t n, void *queue) OMC_MUST_USE;

omc_status omc_cuda_fill_of(omc_cuda_device *device, omc_cuda_fill *out) OMC_MUST_USE;

/* Sets n elements of `size` bytes to *value, which is the device's; if it is NULL to the element
 * that begins `pattern`, all of which is set to elements. */
omc_status omc_cuda_fill_run(const omc_cuda_fill *fill, void *dst, int64_t n, size_t size,
                             const void *value, uint64_t pattern, void *queue) OMC_MUST_USE;

#endif
