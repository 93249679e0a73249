#include "cuda/sort.h"

#include "base/int.h"
#include "cuda/gpu/digits.h"

enum { COUNT, SCAN, PLACE };

omc_status omc_cuda_sort_of(omc_cuda_device *device, omc_cuda_sort *out) {
  static const char *const names[OMC_CUDA_SORT_KERNELS] = {"sort_count", "sort_scan", "sort_place"};
  for (int k = 0; k < OMC_CUDA_SORT_KERNELS; k++)
    OMC_TRY(
        omc_cuda_kernel_in(device, "#include \"cuda/gpu/digits.h\"\n", names[k], &out->kernels[k]));
  return OMC_OK;
}

/* Keys and values, in two places each, then counts. */
size_t omc_cuda_sort_bytes(int64_t n) {
  const int64_t counts = OMC_SORT_DIGITS * omc_ceil_div(n, OMC_SORT_TILE);
  return (size_t)(4 * n + counts) * sizeof(int64_t);
}

static omc_status sort_by_digit(const omc_cuda_sort *sort, const omc_gpu_sort *p, void *queue) {
  const omc_cuda_grid tiles = {p->tiles, OMC_SORT_TILE, 0}, one = {1, OMC_SORT_SCANNERS, 0};
  omc_cuda_kernel *kernels = (omc_cuda_kernel *)(uintptr_t)sort->kernels;
  OMC_TRY(omc_cuda_launch(&kernels[COUNT], tiles, p, queue));
  OMC_TRY(omc_cuda_launch(&kernels[SCAN], one, p, queue));
  return omc_cuda_launch(&kernels[PLACE], tiles, p, queue);
}

omc_status omc_cuda_sort_run(const omc_cuda_sort *sort, void *room, int64_t n, int64_t most,
                             void *queue, const int64_t **keys, const int64_t **positions) {
  int64_t *from_keys = room, *to_keys = from_keys + n;
  int64_t *from_values = NULL, *to_values = to_keys + n, *other_values = to_values + n;
  omc_gpu_sort p = {
      .counts = other_values + n, .n = n, .tiles = omc_ceil_div(n, OMC_SORT_TILE), .shift = 0};
  do {
    p.keys = from_keys, p.values = from_values;
    p.sorted_keys = to_keys, p.sorted_values = to_values;
    OMC_TRY(sort_by_digit(sort, &p, queue));
    int64_t *const sorted_keys = to_keys, *const sorted_values = to_values;
    to_keys = from_keys, from_keys = sorted_keys;
    to_values = other_values, other_values = from_values = sorted_values;
    p.shift += OMC_SORT_BITS;
  } while (p.shift < 63 && most >> p.shift != 0);
  *keys = from_keys;
  *positions = from_values;
  return OMC_OK;
}
