/* Files of named tensors, in the format safetensors (version 0.7 of its library): 8 bytes with the
 * length of a header, little-endian, a header in JSON, and the elements. */
#ifndef OMC_TRAIN_SAFETENSORS_H
#define OMC_TRAIN_SAFETENSORS_H

#include "base/arena.h"
#include "base/shape.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct omc_named_tensor {
  const char *name; /* UTF-8 */
  omc_type type;
  const void *data; /* dense, row-major; of a file that was read aligned to 64 bytes */
  size_t bytes;
} omc_named_tensor;

/* An entry of the header's "__metadata__". */
typedef struct omc_named_text {
  const char *name, *text; /* UTF-8 */
} omc_named_text;

typedef struct omc_safetensors {
  const omc_named_tensor *tensors;
  const omc_named_text *texts;
  uint32_t n_tensors, n_texts;
} omc_safetensors;

/* Reads a file, or what one holds, into memory of the arena, which *out borrows. OMC_EINVALID: it
 * cannot be read; OMC_EPARSE names the byte and what was expected there; OMC_EUNSUPPORTED: a dtype
 * or rank that there is not here. Any bytes may be given. */
OMC_API omc_status omc_safetensors_read(const char *path, omc_arena *arena,
                                        omc_safetensors *out) OMC_MUST_USE;
OMC_API omc_status omc_safetensors_parse(const void *bytes, size_t n, omc_arena *arena,
                                         omc_safetensors *out) OMC_MUST_USE;

/* Writes a file, in the order given, by way of another beside it: what was at `path` stays as it is
 * until all is on the disk. OMC_EINVALID says what could not be written. */
OMC_API omc_status omc_safetensors_write(const char *path,
                                         const omc_safetensors *file) OMC_MUST_USE;

/* NULL: there is none of that name. */
OMC_API const char *omc_safetensors_text(const omc_safetensors *file, const char *name);

#ifdef __cplusplus
}
#endif

#endif
