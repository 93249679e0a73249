/* Launches along lines (cuda/gpu/lines.h): which team of threads is for which lines. */
#ifndef OMC_CUDA_TEAMS_H
#define OMC_CUDA_TEAMS_H

#include "cuda/gpu/lines.h"
#include "cuda/launch.h"

/* Positions of one group, evenly apart, and one more inside of those that there are. */
omc_gpu_places omc_cuda_places(int64_t size, int64_t stride);
void omc_cuda_add_group(omc_gpu_places *places, int64_t size, int64_t stride);

/* How lines are shared out. */
typedef struct omc_cuda_team {
  const char *name; /* the end of the kernel's: "_warps" */
  omc_cuda_grid grid;
} omc_cuda_team;

/* Chooses the team for lines whose places are set, of elements of `bytes` bytes, and sets their
 * parts: one, or where there are few lines and `by_parts`, as many as keep a GPU busy. The lines of
 * a kernel without GROUPED teams are of one group, and one that is cut by parts has wide columns.
 */
omc_cuda_team omc_cuda_team_of(omc_gpu_lines *lines, size_t bytes, bool by_parts);

/* The same of one kind: columns go along any lines, those by parts are wide where lines are
 * neighbours, and a block goes along neighbours. */
omc_cuda_team omc_cuda_columns_of(omc_gpu_lines *lines);
omc_cuda_team omc_cuda_columns_by_parts(omc_gpu_lines *lines, size_t bytes);
omc_cuda_team omc_cuda_block_of(omc_gpu_lines *lines, size_t bytes, bool by_parts);

/* Few blocks, whose warps go from line to line and have room for a sum of each element of one; no
 * name where lines are too long or too short for that, or not of whole packs. */
omc_cuda_team omc_cuda_walk_of(omc_gpu_lines *lines, size_t bytes);

#endif
