#include "cuda/copies.h"

#include "base/int.h"

_Static_assert(OMC_BOX_AXES == OMC_BOX_RANK, "a kernel has room for all axes");
_Static_assert(sizeof(omc_gpu_copies) <= 4096, "what a kernel can be given");

enum {
  WIDEST = 16,
  WORTH_A_LAUNCH = 1 << 20 /* bytes: fewer are moved by narrow units in less time than one takes */
};

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

static omc_cuda_copy form_of(const omc_box *box, size_t size) {
  omc_cuda_copy form = {.box = *box, .size = size};
  omc_box *b = &form.box;
  omc_box_collapse(b);
  const int32_t last = b->rank - 1, axis = omc_box_transposed_axis(b);
  form.transposes = axis >= 0;
  form.runs = b->src[last] == 1 && b->dst[last] == 1;
  form.steps = steps_of(b, size);
  if (axis >= 0) omc_box_move_axis(b, axis, last - 1);
  return form;
}

omc_status omc_cuda_copy_of(omc_cuda_device *device, const omc_box *box, size_t size,
                            omc_cuda_copy *out) {
  *out = form_of(box, size);
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

static omc_status run(const omc_cuda_copy *copy, const omc_cuda_kernel *kernels, void *dst,
                      const void *src, void *queue) {
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
  const omc_cuda_kernel *kernel = &kernels[__builtin_ctzll(unit)];
  return omc_cuda_launch((omc_cuda_kernel *)(uintptr_t)kernel, grid, &p, queue);
}

omc_status omc_cuda_copy_run(const omc_cuda_copy *copy, void *dst, const void *src, void *queue) {
  return run(copy, copy->kernels, dst, src, queue);
}

omc_status omc_cuda_copier_of(omc_cuda_device *device, const omc_box *likely, size_t size,
                              omc_cuda_copier *out) {
  const omc_cuda_copy form = form_of(likely, size);
  const size_t unit = unit_of(&form, 0);
  out->size = size;
  OMC_TRY(omc_cuda_kernels_in(device, source, names[ONE], unit, out->straight));
  return omc_cuda_kernels_in(device, source, names[ONE_TRANSPOSED], form.transposes ? unit : 0,
                             out->transposing);
}

omc_status omc_cuda_copier_run(const omc_cuda_copier *copier, const omc_box *box, void *dst,
                               const void *src, void *queue) {
  const omc_cuda_copy form = form_of(box, copier->size);
  return run(&form, form.transposes ? copier->transposing : copier->straight, dst, src, queue);
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

/* By what each part is moved, 0 where it has nothing: the widest unit that its place allows, or a
 * narrower one of others where parts of its own have too few bytes to be worth a launch. */
static void choose_units(const omc_cuda_copying *list, uint32_t n, size_t *units) {
  int64_t bytes[OMC_CUDA_UNITS] = {0};
  size_t narrowest = WIDEST;
  for (uint32_t i = 0; i < n; i++) {
    const omc_cuda_copy *copy = list[i].copy;
    const int64_t all = omc_box_numel(&copy->box) * (int64_t)copy->size;
    units[i] = all ? unit_of(copy, (uintptr_t)list[i].dst | (uintptr_t)list[i].src) : 0;
    if (all == 0) continue;
    bytes[__builtin_ctzll(units[i])] += all;
    narrowest = units[i] < narrowest ? units[i] : narrowest;
  }
  for (size_t unit = WIDEST; unit > narrowest; unit /= 2) {
    const int of = __builtin_ctzll(unit);
    if (bytes[of] >= WORTH_A_LAUNCH) continue;
    bytes[of - 1] += bytes[of];
    for (uint32_t i = 0; i < n; i++)
      if (units[i] == unit) units[i] = unit / 2;
  }
}

/* Those of the parts that are moved by one unit. */
static omc_status run_as_one(const omc_cuda_copies *copies, const omc_cuda_copying *list,
                             const size_t *units, uint32_t n, size_t unit, void *queue) {
  const int64_t of_block = OMC_BOXES_THREADS * OMC_UNITS_OF_THREAD(unit);
  omc_gpu_copies p = {0};
  omc_cuda_grid grid = {0, OMC_BOXES_THREADS, 0};
  for (uint32_t i = 0; i < n; i++) {
    if (units[i] != unit) continue;
    p.planes[p.n] = plane_of(&list[i], unit);
    p.first[p.n] = (uint32_t)grid.blocks;
    grid.blocks += omc_ceil_div(p.planes[p.n++].n, of_block);
  }
  const omc_cuda_kernel *kernel = &copies->kernels[__builtin_ctzll(unit)];
  return omc_cuda_launch((omc_cuda_kernel *)(uintptr_t)kernel, grid, &p, queue);
}

omc_status omc_cuda_copies_run(const omc_cuda_copies *copies, const omc_cuda_copying *list,
                               uint32_t n, void *queue) {
  size_t units[OMC_CUDA_COPIES];
  choose_units(list, n, units);
  for (size_t unit = WIDEST; unit > 0; unit /= 2)
    OMC_TRY(run_as_one(copies, list, units, n, unit, queue));
  return OMC_OK;
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
