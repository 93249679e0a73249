/* Rows of pooled planes, whatever is made of their windows. */
#ifndef OMC_CPU_OPS_POOL_H
#define OMC_CPU_OPS_POOL_H

#include "base/int.h"
#include "ops/forms.h"

/* Elements of all axes. */
static inline int64_t product_of(const int64_t *dims) { return dims[0] * dims[1] * dims[2]; }

/* A row of outputs: row `y` of layer `z` of a plane. */
typedef struct out_row {
  int64_t plane, z, y;
} out_row;

static inline out_row out_row_of(const int64_t *out, int64_t r) {
  return (out_row){r / out[1] / out[0], r / out[1] % out[0], r % out[1]};
}

static inline void next_row(const int64_t *out, out_row *row) {
  if (++row->y < out[1]) return;
  row->y = 0;
  if (++row->z < out[0]) return;
  row->z = 0;
  row->plane++;
}

#endif
