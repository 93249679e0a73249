/* Element types, their names in the text form and their codes in ONNX and DLPack. */
#ifndef OMC_BASE_DTYPE_H
#define OMC_BASE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
#define OMC_DTYPE(name, text, onnx, dl_code, bits, kind) OMC_##name,
#include "base/dtype.def"
#undef OMC_DTYPE
  OMC_N_DTYPE
} omc_dtype;

typedef enum { OMC_KIND_FLOAT, OMC_KIND_INT, OMC_KIND_BOOL } omc_dtype_kind;

typedef struct omc_dtype_info {
  const char *text; /* "f32" */
  int32_t onnx;     /* TensorProto.DataType */
  uint8_t dl_code;  /* DLDataTypeCode */
  uint8_t bits;
  uint8_t size; /* bytes */
  omc_dtype_kind kind;
} omc_dtype_info;

/* `dtype` must be below OMC_N_DTYPE. */
const omc_dtype_info *omc_dtype_get(omc_dtype dtype);

static inline size_t omc_dtype_size(omc_dtype dtype) { return omc_dtype_get(dtype)->size; }
static inline bool omc_dtype_is_float(omc_dtype d) {
  return omc_dtype_get(d)->kind == OMC_KIND_FLOAT;
}

/* What numbers of a dtype are computed in, and statistics of them kept for backward. */
static inline omc_dtype omc_dtype_acc(omc_dtype d) {
  return !omc_dtype_is_float(d) ? OMC_I64 : d == OMC_F64 ? OMC_F64 : OMC_F32;
}

/* These find a dtype by its text (n bytes), ONNX code or DLPack code and bits; false: no such. */
bool omc_dtype_from_text(const char *text, size_t n, omc_dtype *out);
bool omc_dtype_from_onnx(int64_t code, omc_dtype *out);
bool omc_dtype_from_dlpack(uint8_t code, uint8_t bits, omc_dtype *out);

#ifdef __cplusplus
}
#endif

#endif
