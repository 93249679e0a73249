#include "base/box.h"

int64_t omc_box_numel(const omc_box *b) {
  int64_t n = 1;
  for (int32_t i = 0; i < b->rank; i++) n *= b->dims[i];
  return n;
}

void omc_box_collapse(omc_box *b) {
  int32_t n = 0;
  for (int32_t i = 0; i < b->rank; i++) {
    if (b->dims[i] == 1) continue;
    if (b->dst[i] < 0) {
      b->src_offset += (b->dims[i] - 1) * b->src[i], b->src[i] = -b->src[i];
      b->dst_offset += (b->dims[i] - 1) * b->dst[i], b->dst[i] = -b->dst[i];
    }
    if (n > 0 && b->src[n - 1] == b->src[i] * b->dims[i] &&
        b->dst[n - 1] == b->dst[i] * b->dims[i]) {
      n--;
      b->dims[n] *= b->dims[i];
    } else {
      b->dims[n] = b->dims[i];
    }
    b->src[n] = b->src[i];
    b->dst[n] = b->dst[i];
    n++;
  }
  if (n == 0) b->dims[n] = b->src[n] = b->dst[n] = 1, n++;
  b->rank = n;
}

void omc_box_move_axis(omc_box *b, int32_t from, int32_t to) {
  const int64_t dim = b->dims[from], src = b->src[from], dst = b->dst[from];
  for (int32_t i = from; i < to; i++)
    b->dims[i] = b->dims[i + 1], b->src[i] = b->src[i + 1], b->dst[i] = b->dst[i + 1];
  b->dims[to] = dim, b->src[to] = src, b->dst[to] = dst;
}

int32_t omc_box_transposed_axis(const omc_box *b) {
  const int32_t last = b->rank - 1;
  if (b->dst[last] != 1 || b->src[last] <= 1 || b->dims[last] < 4) return -1;
  for (int32_t i = 0; i < last; i++)
    if (b->src[i] == 1 && b->dims[i] >= 4) return i;
  return -1;
}
