/* Attention and its gradient in tiles; nothing of T x S elements is stored but, of 16 bits, which
 * are on tensor cores, which of some heads dropout keeps. */
#include "cuda/ops/attention.h"

#include <stdio.h>

#include "base/alloc.h"
#include "base/int.h"
#include "cuda/launch.h"
#include "cuda/ops/attention_mma.h"
#include "ops/forms.h"
#include "ops/random.h"

enum {
  MOST_BYTES = 512, /* of a head's row, whose sums registers hold */
  BUSY_BLOCKS = 4,  /* for each multiprocessor, as many keep it busy */
  MOST_CACHES = 8   /* as many times what the cache holds dropout's bits may take */
};

/* What is done to scores: OMC_MASK is 0 or not, and OMC_DROPS. */
typedef struct changes {
  bool masked;
  enum { DROPS_NOTHING, DROPS_AS_DRAWN, DROPS_AS_DRAWN_AHEAD } drops;
} changes;

/* One of the kernels, and what a launch of it takes. */
enum { KEPT, FORWARD, ROWS_OF_GRAD, DQ, DKV, DELTA, N_KERNELS };

typedef struct launch {
  omc_cuda_kernel kernel;
  omc_cuda_grid grid; /* blocks of all heads of the op */
  int32_t tiles;      /* of a head */
} launch;

typedef struct params {
  launch launches[N_KERNELS];
  omc_attention given;    /* but for addresses and the seed */
  int64_t rows;           /* of scores */
  int64_t heads, at_once; /* of queries, of all samples; of a launch */
  int64_t kept_bytes;     /* of these */
  size_t acc_bytes;
  bool has_result;   /* DELTA takes the place of ROWS_OF_GRAD */
  bool packed;       /* q, k and v are one tensor, */
  int64_t starts[3]; /* each so many bytes behind its start */
} params;

/* How a kernel takes heads of f->dim and f->value_dim elements: rows of its own operands in a
 * block, blocks along a head's elements, and bytes of shared memory. */
typedef struct extent {
  int64_t rows, parts, bytes;
} extent;

/* A way to compute, and the file that has it. */
typedef struct way {
  const char *file;
  uint32_t threads;
  extent (*extent_of)(const omc_attention_form *f, changes of, int kernel);
} way;

static extent extent_of_tiles(const omc_attention_form *f, changes of, int kernel) {
  (void)of;
  const int64_t more = kernel == FORWARD ? 0 : f->value_dim * OMC_TILE_PITCH;
  const int64_t room =
      OMC_ATTENTION_ROOM(omc_max(f->dim, f->value_dim)) + OMC_TILE * OMC_TILE_PITCH;
  return (extent){
      OMC_TILE, 1,
      (room + f->dim * OMC_TILE_PITCH + more) * (int64_t)omc_dtype_size(omc_dtype_acc(f->dtype))};
}

static extent extent_of_bands(const omc_attention_form *f, changes of, int kernel) {
  const bool plain = !of.masked && of.drops != DROPS_AS_DRAWN;
  const int64_t deepest = omc_max(f->dim, f->value_dim), parts = OMC_DKV_PARTS(deepest);
  const int64_t bands[N_KERNELS] = {[FORWARD] = OMC_FORWARD_BANDS(deepest, plain),
                                    [ROWS_OF_GRAD] = OMC_DQ_BANDS(deepest, plain),
                                    [DQ] = OMC_DQ_BANDS(deepest, plain),
                                    [DKV] = OMC_DKV_BANDS};
  const int64_t pitch = OMC_BAND_PITCH(f->dim, parts),
                value_pitch = OMC_BAND_PITCH(f->value_dim, parts);
  const int64_t rows = OMC_BAND_ROWS(bands[kernel]), columns = OMC_BAND_STAGES * OMC_BAND_COLUMNS;
  const int64_t own = kernel == FORWARD ? pitch : pitch + value_pitch;
  const int64_t words =
      kernel == DKV ? columns * OMC_BAND_WORDS(of.drops == DROPS_AS_DRAWN_AHEAD) : 0;
  return (extent){
      rows, kernel == DKV ? parts : 1,
      (rows * own + columns * (pitch + value_pitch)) * (int64_t)omc_dtype_size(f->dtype) +
          words * (int64_t)sizeof(float)};
}

static const way tiles_by_threads = {"attention", OMC_ATTENTION_THREADS, extent_of_tiles};
static const way bands_by_warps = {"attention_mma", OMC_BAND_THREADS, extent_of_bands};

static omc_attention_strides strides_of(const omc_head_strides *s) {
  return (omc_attention_strides){s->sample, s->head, s->token};
}

static omc_attention given_of(const omc_attention_form *f) {
  omc_attention a = {.q_at = strides_of(&f->q),
                     .k_at = strides_of(&f->k),
                     .v_at = strides_of(&f->v),
                     .y_at = strides_of(&f->y),
                     .heads = (int32_t)f->heads,
                     .kv_heads = (int32_t)f->kv_heads,
                     .queries = (int32_t)f->queries,
                     .keys = (int32_t)f->keys,
                     .scale = f->scale,
                     .keep_scale = f->p < 1 ? 1 / (1 - f->p) : 0,
                     .drop_below = omc_drop_threshold(f->p),
                     .subsequence = f->subsequence};
  for (int i = 0; i < 4; i++) a.mask_at[i] = f->mask_strides[i];
  return a;
}

static omc_status kernel_of(omc_cuda_device *device, const omc_attention_form *f, const char *file,
                            changes of, int kernel, omc_cuda_kernel *out) {
  static const char *const names[N_KERNELS] = {"attention_kept", "attention",
                                               "attention_rows", "attention_dq",
                                               "attention_dkv",  "attention_delta"};
  char defines[160];
  snprintf(defines, sizeof defines,
           "#define OMC_DIM %d\n#define OMC_VALUE_DIM %d\n#define OMC_MASK %d\n"
           "#define OMC_CAUSAL %d\n#define OMC_DROPS %d\n",
           (int)f->dim, (int)f->value_dim,
           !of.masked        ? 0
           : f->mask_is_bool ? 1
                             : 2,
           f->causal, (int)of.drops);
  return omc_cuda_kernel_of(device, file, f->dtype, defines, names[kernel], "", out);
}

/* Whether what dropout keeps may be drawn ahead, for whole groups of heads that share keys: as many
 * as the cache has room for in a half, or as keep the GPU busy, if that is not too much. Rounds are
 * even, as the last of uneven ones would leave most of the GPU idle. */
static bool decode_kept(const omc_cuda_device *device, const omc_attention_form *f, params *p) {
  const int64_t group = omc_max(f->heads / f->kv_heads, 1);
  const int64_t words = omc_ceil_div(f->queries, OMC_KEPT_TILE) *
                        omc_ceil_div(f->keys, OMC_KEPT_TILE) * OMC_KEPT_TILE;
  const int64_t bytes = words * (int64_t)sizeof(uint32_t), cache = device->cache_bytes;
  const int64_t blocks = group * omc_max(omc_ceil_div(f->queries, OMC_BAND_ROWS(1)), 1);
  const int64_t busy = omc_ceil_div(BUSY_BLOCKS * device->multiprocessors, blocks);
  const int64_t of_group = omc_max(group * bytes, 1);
  const int64_t groups =
      omc_min(omc_max(cache / 2 / of_group, busy), MOST_CACHES * cache / of_group);
  if (groups == 0) return false;
  const int64_t all = p->heads / group, rounds = omc_max(omc_ceil_div(all, groups), 1);
  p->at_once = omc_ceil_div(all, rounds) * group;
  p->kept_bytes = p->at_once * bytes;
  p->launches[KEPT].grid =
      (omc_cuda_grid){omc_ceil_div(p->heads * words, OMC_KEPT_THREADS), OMC_KEPT_THREADS, 0};
  return true;
}

static omc_status params_attention(omc_cuda_device *device, const omc_node *node, omc_arena *arena,
                                   void *params_) {
  (void)arena;
  params *p = params_;
  omc_attention_form f;
  OMC_TRY(omc_attention_form_of(node, &f));
  if (omc_max(f.queries, f.keys) > INT32_MAX / 2 || f.heads > INT32_MAX)
    OMC_NODE_FAIL(node, EUNSUPPORTED, "cuda has no kernel for %lld queries and %lld keys",
                  (long long)f.queries, (long long)f.keys);
  p->given = given_of(&f);
  p->packed = f.packed;
  p->starts[1] = f.k_start * (int64_t)omc_dtype_size(f.dtype);
  p->starts[2] = f.v_start * (int64_t)omc_dtype_size(f.dtype);
  p->heads = p->at_once = f.batch * f.heads;
  p->rows = p->heads * f.queries;
  p->acc_bytes = omc_dtype_size(omc_dtype_acc(f.dtype));
  const way *w = omc_dtype_size(f.dtype) == 2 ? &bands_by_warps : &tiles_by_threads;
  const int64_t bytes = omc_max(f.dim, f.value_dim) * (int64_t)omc_dtype_size(f.dtype);
  if (omc_min(f.dim, f.value_dim) < 1 || bytes > MOST_BYTES)
    OMC_NODE_FAIL(node, EUNSUPPORTED, "cuda has no kernel for heads of %lld and %lld elements",
                  (long long)f.dim, (long long)f.value_dim);
  const bool forward = node->op == OMC_OP_Attention;
  changes of = {.masked = omc_in(node, forward ? 3 : 5) != NULL,
                .drops = f.p > 0 ? DROPS_AS_DRAWN : DROPS_NOTHING};
  if (f.p > 0 && w == &bands_by_warps && decode_kept(device, &f, p)) {
    of.drops = DROPS_AS_DRAWN_AHEAD;
    OMC_TRY(kernel_of(device, &f, w->file, of, KEPT, &p->launches[KEPT].kernel));
  }
  p->has_result = !forward && omc_in(node, 6) && w == &bands_by_warps;
  const int first = forward ? FORWARD : p->has_result ? DQ : ROWS_OF_GRAD;
  for (int i = first; i < (forward ? ROWS_OF_GRAD : DELTA); i++) {
    const extent e = w->extent_of(&f, of, i);
    if (e.bytes > (int64_t)device->shared_bytes)
      OMC_NODE_FAIL(node, EUNSUPPORTED,
                    "cuda has no kernel for heads that take %lld bytes of a block",
                    (long long)e.bytes);
    const int64_t tiles = omc_ceil_div(i == DKV ? f.keys : f.queries, e.rows);
    const int64_t heads = f.batch * (i == DKV ? f.kv_heads : f.heads);
    launch *l = &p->launches[i];
    *l = (launch){.grid = {heads * tiles * e.parts, w->threads, (uint32_t)e.bytes},
                  .tiles = (int32_t)tiles};
    OMC_TRY(kernel_of(device, &f, w->file, of, i, &l->kernel));
  }
  if (!p->has_result) return OMC_OK;
  launch *l = &p->launches[DELTA];
  *l = (launch){
      .grid = {omc_ceil_div(p->rows * OMC_DELTA_LANES, OMC_DELTA_THREADS), OMC_DELTA_THREADS, 0},
      .tiles = (int32_t)p->heads};
  return kernel_of(device, &f, w->file, of, DELTA, &l->kernel);
}

static void *data_of(const omc_tensor *tensors, uint32_t n, uint32_t i) {
  return i < n && tensors[i].type ? tensors[i].data : NULL;
}

/* q, k or v of three tensors, or of the one that has all three. */
static void *part_of(const params *p, const omc_tensor *tensors, int i) {
  return p->packed ? (char *)tensors->data + p->starts[i] : tensors[i].data;
}

/* For n of the heads, from `first` on. */
static omc_status launched(params *p, int which, omc_attention *given, int64_t first, int64_t n,
                           void *queue) {
  launch *l = &p->launches[which];
  omc_cuda_grid grid = l->grid;
  if (n == 0) return OMC_OK;
  grid.blocks = omc_ceil_div(grid.blocks * n, p->heads);
  given->first = (int32_t)first;
  given->tiles = which == KEPT ? (int32_t)n : l->tiles;
  return omc_cuda_launch(&l->kernel, grid, given, queue);
}

/* Kernels from one to another, for as many heads as have bits at a time. */
static omc_status launched_by_heads(params *p, int from, int to, omc_attention *given,
                                    void *queue) {
  for (int64_t first = 0; first < p->heads; first += p->at_once) {
    const int64_t n = omc_min(p->at_once, p->heads - first);
    if (p->kept_bytes > 0) OMC_TRY(launched(p, KEPT, given, first, n, queue));
    for (int which = from; which <= to; which++)
      OMC_TRY(launched(p, which, given, first, n, queue));
  }
  return OMC_OK;
}

static size_t workspace(const void *params_) {
  return (size_t)((const params *)params_)->kept_bytes;
}

static omc_status run_attention(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_attention a = p->given;
  a.q = part_of(p, args->in, 0), a.k = part_of(p, args->in, 1), a.v = part_of(p, args->in, 2);
  a.mask = data_of(args->in, args->n_in, 3);
  a.y = args->out[0].data, a.lse = data_of(args->out, args->n_out, 1);
  a.seed = omc_cuda_seed(args);
  a.kept = args->workspace;
  return launched_by_heads(p, FORWARD, FORWARD, &a, args->queue);
}

/* Of each row its share and delta, after dropout's bits. */
static size_t grad_workspace(const void *params_) {
  const params *p = params_;
  return workspace(p) + 2 * (size_t)p->rows * p->acc_bytes;
}

static omc_status run_attention_grad(const omc_kernel_args *args) {
  params *p = (params *)(uintptr_t)args->params;
  omc_attention a = p->given;
  a.dy = args->in[0].data, a.lse = args->in[4].data;
  const omc_tensor *in = args->in + 1;
  a.q = part_of(p, in, 0), a.k = part_of(p, in, 1), a.v = part_of(p, in, 2);
  a.mask = data_of(args->in, args->n_in, 5);
  a.dq = part_of(p, args->out, 0), a.dk = part_of(p, args->out, 1);
  a.dv = part_of(p, args->out, 2);
  a.kept = args->workspace;
  a.share = (char *)args->workspace + p->kept_bytes;
  a.delta = (char *)a.share + (size_t)p->rows * p->acc_bytes;
  a.seed = omc_cuda_seed(args);
  a.y = data_of(args->in, args->n_in, 6);
  if (p->has_result) OMC_TRY(launched(p, DELTA, &a, 0, p->heads, args->queue));
  return launched_by_heads(p, p->has_result ? DQ : ROWS_OF_GRAD, DKV, &a, args->queue);
}

const omc_cuda_op omc_cuda_Attention = {.run = run_attention,
                                        .params_size = sizeof(params),
                                        .params = params_attention,
                                        .workspace = workspace};
const omc_cuda_op omc_cuda_AttentionGrad = {.run = run_attention_grad,
                                            .params_size = sizeof(params),
                                            .params = params_attention,
                                            .workspace = grad_workspace};
