#include "cuda/copies.h"

#include "base/int.h"

_Static_assert(OMC_BOX_AXES == OMC_BOX_RANK, "a kernel has room for all axes");
_Static_assert(sizeof(omc_gpu_copies) <= 4096, "what a kernel can be given");

enum { WIDEST = 16 };

static const char source[] = "#include \"cuda/gpu/boxes.h\"\n";

enum { ONE, ONE_TRANSPOSED, SEVERAL };
static const char *const names[][OMC_CUDA_UNITS] = {
    [ONE] = {"copy_1", "copy_2", "copy_4", "copy_8", "copy_16"},
    [ONE_TRANSPOSED] = {"transpose_1", "transpose_2", "transpose_4", "transpose_8"},
    [SEVERAL] = {"copies_1", "copies_2", "copies_4", "copies_8", "copies_16"}};

/* The bits of all byte offsets along a box. */
static uint64_t steps_of(const omc_box *b, size_t size) {
  const int32_t last = b->rank - 1;
  int64_t bits = b->dims[last] | b->src_offset | b->dst_offset;
  for (int32_t i = 0; i < last; i++) bits |= b->src[i] | b->dst[i];
  return (uint64_t)bits * size | WIDEST;
}

/* The bytes that are moved at a time, between addresses with these bits. */
static size_t unit_of(const omc_cuda_copy *copy, uintptr_t addresses) {
  const uint64_t steps = copy->steps | addresses;
  return copy->runs ? (size_t)(steps & (~steps + 1)) : copy->size;
}

omc_status omc_cuda_copy_of(omc_cuda_device *device, const omc_box *box, size_t size,
                            omc_cuda_copy *out) {
  *out = (omc_cuda_copy){.box = *box, .size = size};
  omc_box *b = &out->box;
  omc_box_collapse(b);
  const int32_t last = b->rank - 1, axis = omc_box_transposed_axis(b);
  out->transposes = axis >= 0;
  out->runs = b->src[last] == 1 && b->dst[last] == 1;
  out->steps = steps_of(b, size);
  if (axis >= 0) omc_box_move_axis(b, axis, last - 1);
  const char *const *of = names[out->transposes ? ONE_TRANSPOSED : ONE];
  return omc_cuda_kernels_in(device, source, of, unit_of(out, 0), out->kernels);
}

static omc_gpu_copy parameters_of(const omc_cuda_copy *copy, size_t unit) {
  const omc_box *b = &copy->box;
  const int64_t size = (int64_t)copy->size, last = b->rank - 1;
  omc_gpu_copy p = {.rank = b->rank, .n = omc_box_numel(b) * size / (int64_t)unit};
  for (int32_t i = 0; i < b->rank; i++)
    p.axes[i] =
        (omc_gpu_box_axis){omc_gpu_divisor_of(b->dims[i]), b->src[i] * size, b->dst[i] * size};
  if (copy->runs)
    p.axes[last] = (omc_gpu_box_axis){omc_gpu_divisor_of(b->dims[last] * size / (int64_t)unit),
                                      (int64_t)unit, (int64_t)unit};
  return p;
}

omc_status omc_cuda_copy_run(const omc_cuda_copy *copy, void *dst, const void *src, void *queue) {
  const omc_box *b = &copy->box;
  const int64_t size = (int64_t)copy->size, numel = omc_box_numel(b);
  if (numel == 0) return OMC_OK;
  const size_t unit = unit_of(copy, (uintptr_t)dst | (uintptr_t)src);
  omc_gpu_copy p = parameters_of(copy, unit);
  p.dst = (char *)dst + b->dst_offset * size;
  p.src = (const char *)src + b->src_offset * size;
  const int64_t of_block = OMC_BOXES_THREADS * OMC_UNITS_OF_THREAD(unit);
  omc_cuda_grid grid = {omc_ceil_div(p.n, of_block), OMC_BOXES_THREADS, 0};
  if (copy->transposes) {
    const int64_t side = OMC_TILE_SIDE(size), rows = b->dims[b->rank - 2];
    const int64_t cols = b->dims[b->rank - 1], down = omc_ceil_div(rows, side);
    p.down = omc_gpu_divisor_of(down);
    p.across = omc_gpu_divisor_of(omc_ceil_div(cols, side));
    grid.blocks = numel / rows / cols * down * p.across.by;
  }
  const omc_cuda_kernel *kernel = &copy->kernels[__builtin_ctzll(unit)];
  return omc_cuda_launch((omc_cuda_kernel *)(uintptr_t)kernel, grid, &p, queue);
}

bool omc_cuda_copy_joins(const omc_cuda_copy *copy) {
  return copy->box.rank <= 2 && !copy->transposes;
}

omc_status omc_cuda_copies_of(omc_cuda_device *device, const omc_cuda_copy *like,
                              omc_cuda_copies *out) {
  return omc_cuda_kernels_in(device, source, names[SEVERAL], unit_of(like, 0), out->kernels);
}

static omc_gpu_plane plane_of(const omc_cuda_copying *c, size_t unit) {
  const omc_gpu_copy p = parameters_of(c->copy, unit);
  const omc_box *b = &c->copy->box;
  const int64_t size = (int64_t)c->copy->size;
  const omc_gpu_box_axis *col = &p.axes[p.rank - 1], *row = p.rank > 1 ? &p.axes[0] : NULL;
  return (omc_gpu_plane){.dst = (char *)c->dst + b->dst_offset * size,
                         .src = (const char *)c->src + b->src_offset * size,
                         .n = p.n,
                         .cols = col->size,
                         .col_src = col->src,
                         .col_dst = col->dst,
                         .row_src = row ? row->src : 0,
                         .row_dst = row ? row->dst : 0};
}

omc_status omc_cuda_copies_run(const omc_cuda_copies *copies, const omc_cuda_copying *list,
                               uint32_t n, void *queue) {
  size_t unit = WIDEST;
  for (uint32_t i = 0; i < n; i++) {
    const size_t u = unit_of(list[i].copy, (uintptr_t)list[i].dst | (uintptr_t)list[i].src);
    if (u < unit) unit = u;
  }
  const int64_t of_block = OMC_BOXES_THREADS * OMC_UNITS_OF_THREAD(unit);
  omc_gpu_copies p = {.n = n};
  omc_cuda_grid grid = {0, OMC_BOXES_THREADS, 0};
  for (uint32_t i = 0; i < n; i++) {
    p.planes[i] = plane_of(&list[i], unit);
    p.first[i] = (uint32_t)grid.blocks;
    grid.blocks += omc_ceil_div(p.planes[i].n, of_block);
  }
  const omc_cuda_kernel *kernel = &copies->kernels[__builtin_ctzll(unit)];
  return omc_cuda_launch((omc_cuda_kernel *)(uintptr_t)kernel, grid, &p, queue);
}

omc_status omc_cuda_fill_of(omc_cuda_device *device, omc_cuda_fill *out) {
  return omc_cuda_kernel_in(device, source, "fill", &out->kernel);
}

omc_status omc_cuda_fill_run(const omc_cuda_fill *fill, void *dst, int64_t n, size_t size,
                             const void *value, uint64_t pattern, void *queue) {
  const omc_gpu_fill p = {dst, n * (int64_t)size, value, (int64_t)size, pattern};
  const int64_t of_block = (int64_t)OMC_BOXES_THREADS * OMC_FILL_BYTES;
  const omc_cuda_grid grid = {omc_ceil_div(p.bytes, of_block), OMC_BOXES_THREADS, 0};
  return omc_cuda_launch((omc_cuda_kernel *)(uintptr_t)&fill->kernel, grid, &p, queue);
}
