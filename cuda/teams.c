#include "cuda/teams.h"

#include "base/int.h"
#include "cuda/gpu/axis.h"

enum {
  PACK_BYTES = 16,
  WARP = 32,
  WARP_PACKS = 8,    /* of a thread, that omc_warps_team has room for */
  PACKS = 4,         /* of a thread of a block, before it has more threads */
  SHORT = 8,         /* elements of lines of which a thread goes along several at a time */
  COLUMN_WARPS = 8,  /* at most, that share the elements of a line */
  NEIGHBOURS = 8,    /* lanes of a warp with lines side by side: whole sectors of memory */
  PACKED = 2,        /* the same of lanes with packs of lines */
  FEW_PACKS = 16,    /* of a thread, that are read sooner than parts are joined */
  BUSY_BLOCKS = 512, /* as many keep a large GPU busy */
  WALK_BLOCKS = 384, /* three for each multiprocessor of a large GPU */
  PART_PACKS = 8,    /* of a thread in a part, at least */
  PART_UNIT = 64     /* parts begin at multiples of so many elements */
};

_Static_assert(COLUMN_WARPS *WARP <= OMC_LINE_THREADS && OMC_LINE_THREADS % WARP == 0,
               "kernels are compiled for all blocks");

omc_gpu_places omc_cuda_places(int64_t size, int64_t stride) {
  omc_gpu_places places = {.n = 1};
  omc_cuda_add_group(&places, size, stride);
  return places;
}

void omc_cuda_add_group(omc_gpu_places *p, int64_t size, int64_t stride) {
  const int64_t narrow = (int64_t)1 << 31;
  const omc_gpu_axis axis = omc_gpu_axis_of(size > 0 && size < narrow ? size : 1, 0);
  p->group[p->rank].size = size;
  p->group[p->rank].stride = stride;
  p->group[p->rank].inverse = 1 / (double)omc_max(size, 1);
  p->group[p->rank].multiplier = axis.multiplier;
  p->group[p->rank++].shift = axis.shift;
  p->n *= size;
}

static void cut_in_parts(omc_gpu_lines *lines, int64_t blocks, int64_t least) {
  const int64_t n = lines->along.n;
  const int64_t parts = omc_min(BUSY_BLOCKS / (blocks + 1), n / least);
  lines->step = parts > 1 ? omc_ceil_div(omc_ceil_div(n, parts), PART_UNIT) * PART_UNIT : n;
  lines->parts = n > 0 ? (int32_t)omc_ceil_div(n, lines->step) : 1;
}

/* Lanes of a warp that have `pack` lines each: more of them where that leaves enough blocks. */
static int32_t lanes_across(int64_t n, int64_t pack) {
  int32_t lanes = 1;
  while (lanes < WARP && lanes * pack < n &&
         (lanes < NEIGHBOURS || 2 * lanes * pack * BUSY_BLOCKS <= n))
    lanes *= 2;
  return lanes;
}

static omc_cuda_team share_out_columns(omc_gpu_lines *lines, int32_t across, int64_t pack,
                                       bool by_parts, const char *name) {
  const int64_t sharing = WARP / across; /* lanes of a warp */
  int64_t warps = 1;
  while (warps < COLUMN_WARPS && warps * sharing * SHORT < lines->along.n) warps *= 2;
  const int64_t blocks = omc_ceil_div(lines->kept.n, across * pack);
  lines->across = across;
  cut_in_parts(lines, by_parts ? blocks : BUSY_BLOCKS, warps * sharing * PART_PACKS);
  return (omc_cuda_team){name, {blocks * lines->parts, (uint32_t)(warps * WARP), 0}};
}

/* Parts take another launch, which short packs of lines do without, each of more warps. */
static omc_cuda_team columns_of(omc_gpu_lines *lines, int64_t pack, bool by_parts,
                                const char *name) {
  const int32_t across = lanes_across(lines->kept.n, pack);
  const omc_cuda_team team = share_out_columns(lines, across, pack, by_parts, name);
  const bool short_packs =
      pack > 1 && across > PACKED && lines->along.n <= COLUMN_WARPS * (WARP / PACKED) * FEW_PACKS;
  return lines->parts > 1 && short_packs ? share_out_columns(lines, PACKED, pack, false, name)
                                         : team;
}

static omc_cuda_team narrow_columns_of(omc_gpu_lines *lines, bool by_parts) {
  return columns_of(lines, 1, by_parts, lines->along.rank > 1 ? "_grouped_columns" : "_columns");
}

omc_cuda_team omc_cuda_columns_of(omc_gpu_lines *lines) { return narrow_columns_of(lines, false); }

/* Whether lines are neighbours, by whole packs that are aligned if the first is. */
static bool are_packed(const omc_gpu_lines *lines, int64_t pack) {
  const omc_gpu_places *kept = &lines->kept, *along = &lines->along;
  const int32_t inner = kept->rank - 1;
  bool packed = kept->group[inner].stride == 1 && along->rank == 1;
  packed = packed && along->group[0].stride % pack == 0;
  for (int32_t g = 0; g < inner; g++) packed = packed && kept->group[g].stride % pack == 0;
  return packed && (inner == 0 || kept->group[inner].size % pack == 0);
}

omc_cuda_team omc_cuda_columns_by_parts(omc_gpu_lines *lines, size_t bytes) {
  const int64_t pack = PACK_BYTES / (int64_t)bytes;
  return are_packed(lines, pack) ? columns_of(lines, pack, true, "_wide_columns")
                                 : narrow_columns_of(lines, true);
}

omc_cuda_team omc_cuda_block_of(omc_gpu_lines *lines, size_t bytes, bool by_parts) {
  const int64_t pack = PACK_BYTES / (int64_t)bytes, n = lines->along.n;
  const int32_t inner = lines->along.rank - 1;
  int64_t threads = 2 * WARP;
  while (threads < OMC_LINE_THREADS && threads * pack * PACKS < n) threads *= 2;
  cut_in_parts(lines, by_parts ? lines->kept.n : BUSY_BLOCKS, threads * pack * PART_PACKS);
  const int64_t size = lines->along.group[inner].size;
  return (omc_cuda_team){inner == 0                           ? "_block"
                         : size % pack == 0                   ? "_grouped_block"
                         : pack > 2 && size % (pack / 2) == 0 ? "_halved_block"
                                                              : "_scattered_block",
                         {lines->kept.n * lines->parts, (uint32_t)threads, 0}};
}

omc_cuda_team omc_cuda_team_of(omc_gpu_lines *lines, size_t bytes, bool by_parts) {
  const omc_gpu_places *along = &lines->along;
  const int64_t pack = PACK_BYTES / (int64_t)bytes, room = pack * WARP_PACKS * WARP;
  const int32_t inner = along->rank - 1;
  if (along->group[inner].stride != 1 || along->n <= SHORT)
    return by_parts ? omc_cuda_columns_by_parts(lines, bytes) : omc_cuda_columns_of(lines);
  if (inner > 0 || along->n > room) return omc_cuda_block_of(lines, bytes, by_parts);
  cut_in_parts(lines, BUSY_BLOCKS, 1);
  const int64_t warps = OMC_LINE_THREADS / WARP;
  return (omc_cuda_team){along->n % pack == 0 ? "_whole_warps" : "_warps",
                         {omc_ceil_div(lines->kept.n, warps), OMC_LINE_THREADS, 0}};
}

omc_cuda_team omc_cuda_walk_of(omc_gpu_lines *lines, size_t bytes) {
  const int64_t pack = PACK_BYTES / (int64_t)bytes, n = lines->along.n;
  const int64_t room = WARP * omc_min(pack * WARP_PACKS, OMC_WALK_SUMS);
  if (n <= SHORT || n > room || n % pack != 0) return (omc_cuda_team){0};
  cut_in_parts(lines, BUSY_BLOCKS, 1);
  const int64_t blocks = omc_ceil_div(lines->kept.n, OMC_WALK_THREADS / WARP);
  return (omc_cuda_team){"_walk", {omc_max(omc_min(blocks, WALK_BLOCKS), 1), OMC_WALK_THREADS, 0}};
}
