#include "cuda/optimize.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>

#include "base/int.h"
#include "cuda/api.h"
#include "cuda/gpu/updates.h"
#include "cuda/launch.h"

enum { MAX_PARAMETER_BYTES = 4096, SOURCE_BYTES = 128 };
_Static_assert(sizeof(omc_gpu_updates) <= MAX_PARAMETER_BYTES, "a launch has room for its tensors");

typedef enum { BY_PART, BY_TENSOR, ONE } blocks_of;

#define KERNELS(K)           \
  K(count_steps, ONE)        \
  K(sum_squares, BY_PART)    \
  K(find_largest, BY_PART)   \
  K(join_norm, ONE)          \
  K(scale_grads, BY_PART)    \
  K(adam, BY_PART)           \
  K(sgd, BY_PART)            \
  K(lamb_moments, BY_PART)   \
  K(lamb_lengths, BY_TENSOR) \
  K(lamb_apply, BY_PART)

typedef enum {
  NO_KERNEL,
#define KERNEL_ID_(name, blocks) KERNEL_##name,
  KERNELS(KERNEL_ID_) N_KERNELS
} kernel_id;

static const struct {
  const char *name;
  blocks_of blocks;
} kernels[N_KERNELS] = {
#define KERNEL_ROW_(name, blocks) [KERNEL_##name] = {#name, blocks},
    KERNELS(KERNEL_ROW_)};

/* What is launched for each rule, in this order, up to the first that is none. */
enum { MOST_LAUNCHED = 4 };
static const kernel_id rules[OMC_N_RULE][MOST_LAUNCHED + 1] = {
    [OMC_RULE_ADAM] = {KERNEL_count_steps, KERNEL_adam},
    [OMC_RULE_SGD] = {KERNEL_sgd},
    [OMC_RULE_LAMB] = {KERNEL_count_steps, KERNEL_lamb_moments, KERNEL_lamb_lengths,
                       KERNEL_lamb_apply},
    [OMC_RULE_SCALE] = {KERNEL_scale_grads},
};

typedef struct stepping {
  omc_cuda_device *device;
  const omc_optim_step *step;
  void *queue;
  uint32_t most;                 /* tensors of a launch */
  int64_t parts;                 /* of all tensors */
  double *norm, *lengths, *sums; /* of the device */
} stepping;

/* ---- what is launched ---- */

/* They live for the process. */
static omc_status kernel_of(omc_cuda_device *device, omc_dtype dtype, kernel_id id,
                            omc_cuda_kernel **out) {
  static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  static omc_cuda_kernel known[OMC_CUDA_DEVICES][OMC_N_DTYPE][N_KERNELS];
  omc_cuda_kernel *k = *out = &known[device->ordinal][dtype][id];
  omc_status status = OMC_OK;
  pthread_mutex_lock(&mutex);
  if (!k->unit) {
    char source[SOURCE_BYTES];
    snprintf(source, sizeof source,
             "#define OMC_COMPUTE_%s\n#define OMC_STORAGE %s\n#include \"cuda/gpu/updates.h\"\n",
             omc_cuda_class(omc_dtype_acc(dtype)), omc_cuda_storage(dtype));
    status = omc_cuda_kernel_in(device, source, kernels[id].name, k);
  }
  pthread_mutex_unlock(&mutex);
  return status;
}

static int64_t parts_of(const omc_optim_tensor *t) { return omc_ceil_div(t->n, OMC_UPDATE_PART); }

/* Tensors from `begin` on that are alike in what a launch has one of. */
static uint32_t end_of_launch(const stepping *s, uint32_t begin) {
  const omc_optim_tensor *first = &s->step->tensors[begin];
  uint32_t end = begin + 1;
  while (end < s->step->n && end - begin < s->most && first[end - begin].dtype == first->dtype &&
         first[end - begin].numbers == first->numbers)
    end++;
  return end;
}

static omc_gpu_tensor tensor_of(const omc_optim_tensor *t, uint32_t index) {
  return (omc_gpu_tensor){.n = t->n,
                          .param = t->param,
                          .grad = t->grad,
                          .master = t->master,
                          .state = {t->state[0], t->state[1], t->state[2]},
                          .step = t->step,
                          .index = index,
                          .first_step = t->first,
                          .wide = t->state_dtype != t->dtype};
}

/* `sums` is where those of its parts are. */
static omc_status launch(const stepping *s, kernel_id id, uint32_t begin, uint32_t end,
                         double *sums) {
  const omc_optim_step *step = s->step;
  const omc_optim_tensor *first = &step->tensors[begin];
  omc_gpu_updates u = {.grad_scale = step->grad_scale,
                       .found_inf = step->found_inf,
                       .max_norm = step->max_norm,
                       .norm = step->clips ? s->norm : NULL,
                       .sums = sums,
                       .lengths = s->lengths,
                       .seed = step->seed,
                       .n = end - begin};
  if (first->numbers) u.numbers = *first->numbers;
  for (uint32_t i = 0; i < u.n; i++) {
    u.tensors[i] = tensor_of(&first[i], begin + i);
    u.first[i + 1] = u.first[i] + (uint32_t)parts_of(&first[i]);
  }
  const int64_t blocks[] = {[BY_PART] = u.first[u.n], [BY_TENSOR] = u.n, [ONE] = 1};
  omc_cuda_kernel *kernel;
  OMC_TRY(kernel_of(s->device, first->dtype, id, &kernel));
  const omc_cuda_grid grid = {blocks[kernels[id].blocks], OMC_UPDATE_THREADS, 0};
  return omc_cuda_launch(kernel, grid, &u, s->queue);
}

static omc_status launch_all(const stepping *s, kernel_id id) {
  double *sums = s->sums;
  for (uint32_t begin = 0, end; begin < s->step->n; begin = end) {
    end = end_of_launch(s, begin);
    OMC_TRY(launch(s, id, begin, end, sums));
    for (uint32_t i = begin; i < end; i++) sums += 2 * parts_of(&s->step->tensors[i]);
  }
  return OMC_OK;
}

/* ---- the step ---- */

static omc_status find_norm(const stepping *s) {
  const bool most = isinf(s->step->norm_type);
  const omc_gpu_norm p = {s->sums, s->norm, s->parts, most, s->step->grad_scale};
  const omc_cuda_grid grid = {1, OMC_UPDATE_THREADS, 0};
  omc_cuda_kernel *kernel;
  OMC_TRY(launch_all(s, most ? KERNEL_find_largest : KERNEL_sum_squares));
  OMC_TRY(kernel_of(s->device, OMC_F32, KERNEL_join_norm, &kernel));
  return omc_cuda_launch(kernel, grid, &p, s->queue);
}

static int64_t all_parts(const omc_optim_step *step) {
  int64_t parts = 0;
  for (uint32_t i = 0; i < step->n; i++) parts += parts_of(&step->tensors[i]);
  return parts;
}

/* The norm, lengths, and two sums of each part. */
size_t omc_cuda_step_bytes(const omc_optim_step *step) {
  return (size_t)(1 + step->n + 2 * all_parts(step)) * sizeof(double);
}

omc_status omc_cuda_take_step(omc_cuda_device *device, const omc_optim_step *step, void *room,
                              void *queue) {
  stepping s = {.device = device, .step = step, .queue = queue, .parts = all_parts(step)};
  s.lengths = (double *)room + 1, s.sums = s.lengths + step->n;
  s.norm = step->norm ? step->norm : room;
  omc_arena arena;
  bool overlap;
  omc_arena_init(&arena, omc_default_allocator());
  const omc_status status = omc_optim_overlap(step, &arena, &overlap);
  omc_arena_deinit(&arena);
  OMC_TRY(status);
  s.most = overlap ? 1 : OMC_UPDATE_TENSORS;
  if (step->clips || step->norm) OMC_TRY(find_norm(&s));
  for (const kernel_id *id = rules[step->rule]; *id != NO_KERNEL; id++)
    OMC_TRY(launch_all(&s, *id));
  return OMC_OK;
}
