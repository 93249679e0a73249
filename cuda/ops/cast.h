/* Casts of many tensors by one launch: OMC_FROM is the dtype read, OMC_TO the one written, OMC_ACC
 * between them. Read by the host as C11. */
#ifndef OMC_CUDA_OPS_CAST_H
#define OMC_CUDA_OPS_CAST_H

#include "cuda/gpu/target.h"

enum {
  OMC_CAST_THREADS = 256,
  OMC_CAST_PACK = 4,  /* neighbours that a thread takes at a time */
  OMC_CAST_PACKS = 4, /* that it asks for before it waits */
  OMC_CAST_PART = OMC_CAST_THREADS * OMC_CAST_PACK * OMC_CAST_PACKS, /* elements of a block */
  OMC_CASTS = 128                                                    /* tensors of a launch */
};

typedef struct omc_gpu_cast {
  const void *x;
  void *y;
  int64_t n;
} omc_gpu_cast;

typedef struct omc_gpu_casts {
  uint32_t n;
  uint32_t first[OMC_CASTS + 1]; /* block of each */
  omc_gpu_cast each[OMC_CASTS];
} omc_gpu_casts;

#ifdef OMC_GPU
#include "cuda/gpu/numbers.h"
#include "cuda/gpu/pack.h"
#include "cuda/gpu/parts.h"

OMC_GLOBAL(cast_each, OMC_CAST_THREADS, omc_gpu_casts, p) {
  int64_t block;
  const omc_gpu_cast t = p.each[omc_entry_of_block(p.first, p.n, &block)];
  const int64_t first = block * OMC_CAST_PART + (int64_t)threadIdx.x * OMC_CAST_PACK;
  omc_loaded<OMC_FROM, OMC_CAST_PACK> from[OMC_CAST_PACKS];
  int lanes[OMC_CAST_PACKS];
#pragma unroll
  for (int k = 0; k < OMC_CAST_PACKS; k++) {
    const int64_t at = first + k * OMC_CAST_THREADS * OMC_CAST_PACK, rest = t.n - at;
    lanes[k] = rest <= 0 ? 0 : rest < OMC_CAST_PACK ? (int)rest : OMC_CAST_PACK;
    omc_load(from[k], (const OMC_FROM *)t.x + at, lanes[k]);
  }
#pragma unroll
  for (int k = 0; k < OMC_CAST_PACKS; k++) {
    OMC_TO to[OMC_CAST_PACK];
#pragma unroll
    for (int l = 0; l < OMC_CAST_PACK; l++)
      if (l < lanes[k]) to[l] = element<OMC_TO>(number<OMC_ACC>(from[k][l]));
    omc_store((OMC_TO *)t.y + first + k * OMC_CAST_THREADS * OMC_CAST_PACK, to, lanes[k]);
  }
}
#endif

#endif
