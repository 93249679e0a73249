/* Kernels of the cells of recurrent layers, see recurrent.h for how they go about it. */
#include "cpu/ops/recurrent.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT && OMC_GEMM_KNOWN

/* ---- states, and gradients of such: stored as gates are, or as what is computed in ---- */

typedef struct {
  char *data; /* NULL: there are none */
  bool wide;
} states;

/* Those from element `at` of a tensor on. */
static states states_of(const omc_steps_form *p, const void *data, int64_t at) {
  const int64_t size = (int64_t)omc_dtype_size(p->state);
  return (states){data ? (char *)(uintptr_t)data + at * size : NULL, p->state == OMC_ACC};
}
static states computed(const acc_t *data) { return (states){(char *)(uintptr_t)data, true}; }

/* The first n of a vector's lanes; zeros if there are none. */
OMC_INLINE vacc_t vld_states(states s, int64_t at, int64_t n) {
  if (!s.data) return vset(0);
  return OMC_STORES_ACC || s.wide ? vldr_upto((const acc_t *)(const void *)s.data + at, n)
                                  : vld_fill((const storage_t *)(const void *)s.data + at, n, 0);
}
OMC_INLINE void vst_states(states s, int64_t at, vacc_t x, int64_t n) {
  if (OMC_STORES_ACC || s.wide)
    vstr_upto((acc_t *)(void *)s.data + at, x, n);
  else
    vst_upto((storage_t *)(void *)s.data + at, x, n);
}

static void copy_states(states from, states to, int64_t n) {
  for (int64_t k = 0; k < n; k += OMC_VL) vst_states(to, k, vld_states(from, k, n - k), n - k);
}

/* ---- a step ---- */

typedef struct steps_job steps_job;

/* What a cell makes of a row of the batch and its sums, for units k .. k+n-1. */
typedef void (*cell_fn)(const steps_job *job, int64_t row, int64_t k, int64_t n);

/* Tensors of all steps are given from the present step on. */
struct steps_job {
  const omc_steps_form *p;
  steps_layout layout;
  cell_fn cell;
  omc_matrix left;  /* [batch, depth] of the step; no data: sums are what they are */
  omc_matrix right; /* [depth, products * hidden] */
  int64_t depth, products;
  acc_t beta;  /* of what the sums were before */
  acc_t *bias; /* NULL: none */
  omc_unit *packed, *packed_rows;
  acc_t *sums;
  states h, c; /* before the step */

  const storage_t *x; /* forward */
  states y;
  acc_t *c_after, *hidden; /* hidden: NULL, as gates: not kept */
  storage_t *gates;

  const storage_t *saved; /* gradient: gates */
  const acc_t *kept;
  states dy, now; /* now: h after the step */
  storage_t *dx, *dp;
  acc_t *dc;
};

static int64_t n_blocks(const steps_job *job) { return omc_ceil_div(job->p->hidden, OMC_NR); }
static int64_t n_parts(const steps_job *job) { return omc_ceil_div(job->p->batch, OMC_STEP_ROWS); }
static int64_t depth_units(const steps_job *job) { return omc_ceil_div(job->depth, OMC_DEPTH); }

/* Panel i: that of product i % products for a block of units. */
static omc_unit *panel_at(const steps_job *job, int64_t i) {
  return job->packed + i * depth_units(job) * OMC_NR;
}

static void pack_panels(omc_range range, void *ctx) {
  const steps_job *job = ctx;
  const int64_t hidden = job->p->hidden;
  for (int64_t i = range.begin; i < range.end; i++) {
    const int64_t k = i / job->products * OMC_NR, product = i % job->products;
    const omc_matrix panel = omc_matrix_part(&job->right, 0, product * hidden + k);
    OMC_GEMM_NAME(pack_b)(&panel, job->depth, omc_min(hidden - k, OMC_NR), panel_at(job, i));
  }
}

/* The sums of rows i .. i+m-1, which are packed, for a block of units. */
static void add_products(const steps_job *job, const omc_unit *rows, int64_t i, int64_t m,
                         int64_t block) {
  const int64_t pitch = job->layout.pitch, k = block * OMC_NR;
  const int64_t n = omc_min(job->p->hidden - k, OMC_NR);
  for (int64_t q = 0; q < job->products; q++) {
    const omc_matrix sums = omc_matrix_rows(job->sums + (i * job->products + q) * pitch + k,
                                            job->products * pitch, OMC_ACC);
    const omc_gemm_block product = {.m = m,
                                    .n = omc_ceil_div(n, OMC_VL) * OMC_VL,
                                    .k = depth_units(job),
                                    .a = rows,
                                    .b = panel_at(job, block * job->products + q),
                                    .from = sums,
                                    .to = sums,
                                    .alpha = 1,
                                    .beta = job->beta,
                                    .bias = job->bias ? job->bias + q * job->p->hidden + k : NULL};
    OMC_GEMM_NAME(multiply)(&product);
  }
}

/* Items are blocks of units for parts of the batch. */
static void run_items(omc_range range, void *ctx) {
  const steps_job *job = ctx;
  const int64_t blocks = n_blocks(job), parts = n_parts(job);
  omc_unit *const rows = job->packed_rows + range.thread * job->layout.rows;
  for (int64_t u = range.begin; u < range.end; u++) {
    const int64_t part = u / blocks, block = u % blocks, k = block * OMC_NR;
    const int64_t i = omc_cut(job->p->batch, parts, part),
                  m = omc_cut(job->p->batch, parts, part + 1) - i;
    if (job->left.data) {
      if (u == range.begin || block == 0) {
        const omc_matrix left = omc_matrix_part(&job->left, i, 0);
        OMC_GEMM_NAME(pack_a)(&left, m, job->depth, rows);
      }
      add_products(job, rows, i, m, block);
    }
    for (int64_t r = i; r < i + m; r++) job->cell(job, r, k, omc_min(job->p->hidden - k, OMC_NR));
  }
}

static void take_step(steps_job *job, int threads) {
  const int64_t rows = omc_min(job->p->batch, OMC_STEP_ROWS);
  const int64_t grain = omc_grain(OMC_GRAIN_PRODUCTS, rows * OMC_NR * job->depth * job->products);
  omc_parallel_for(n_blocks(job) * n_parts(job), grain, threads, run_items, job);
}

/* Step s of the layer is this one of the tensors. */
static int64_t place(const omc_steps_form *p, int64_t s) {
  return p->reverse ? p->steps - 1 - s : s;
}

/* A matrix of rows of the batch. */
static omc_matrix rows_of(const void *data, int64_t width, omc_dtype dtype) {
  omc_matrix x = omc_matrix_rows(data, width, dtype);
  x.read_as = OMC_STORAGE;
  return x;
}

/* A job with its scratch memory, and the weights packed. */
static steps_job start(const omc_kernel_args *args, const storage_t *r, bool backward) {
  const omc_steps_form *p = args->params;
  const int64_t width = p->gates * p->hidden;
  steps_job job = {.p = p, .layout = steps_layout_of(p, backward)};
  job.depth = backward ? width : p->hidden;
  job.products = backward ? 1 : p->gates;
  job.right = backward ? omc_matrix_rows(r, p->hidden, OMC_STORAGE)
                       : omc_matrix_columns(r, p->hidden, OMC_STORAGE);
  acc_t *at = args->workspace;
  job.packed = (omc_unit *)(void *)at, at += job.layout.packed;
  job.bias = at, at += job.layout.bias;
  job.sums = at, at += job.layout.sums;
  job.c_after = job.dc = at, at += job.layout.carried;
  job.packed_rows = (omc_unit *)(void *)at;
  omc_parallel_for(n_blocks(&job) * job.products, omc_grain(OMC_GRAIN_BYTES, job.depth * OMC_NR),
                   args->threads, pack_panels, &job);
  return job;
}

/* Runs a cell over a block, a vector at a time. */
#define DEFINE_CELL(name)                                                                \
  static void name##_cell(const steps_job *job, int64_t row, int64_t first, int64_t n) { \
    for (int64_t k = 0; k < n; k += OMC_VL) name(job, row, first + k, n - k);            \
  }

/* ---- forward ---- */

/* Where unit k of gate g of a row is. */
OMC_INLINE int64_t gate_at(const steps_job *job, int64_t row, int64_t g, int64_t k) {
  return (row * job->p->gates + g) * job->p->hidden + k;
}

OMC_INLINE vacc_t sum_of(const steps_job *job, int64_t row, int64_t g, int64_t k) {
  return vldr(job->sums + (row * job->products + g) * job->layout.pitch + k);
}
OMC_INLINE vacc_t given(const steps_job *job, int64_t row, int64_t g, int64_t k, int64_t n) {
  return vld_fill(job->x + gate_at(job, row, g, k), n, 0);
}
OMC_INLINE vacc_t gate(const steps_job *job, int64_t row, int64_t g, int64_t k, int64_t n) {
  return given(job, row, g, k, n) + sum_of(job, row, g, k);
}
OMC_INLINE void keep(const steps_job *job, int64_t row, int64_t g, int64_t k, vacc_t x, int64_t n) {
  if (job->gates) vst_upto(job->gates + gate_at(job, row, g, k), x, n);
}

OMC_INLINE void lstm(const steps_job *job, int64_t row, int64_t k, int64_t n) {
  const int64_t at = row * job->p->hidden + k;
  const vacc_t i = vsigmoid(gate(job, row, 0, k, n)), f = vsigmoid(gate(job, row, 1, k, n));
  const vacc_t g = vtanh(gate(job, row, 2, k, n)), o = vsigmoid(gate(job, row, 3, k, n));
  const vacc_t c = f * vld_states(job->c, at, n) + i * g;
  keep(job, row, 0, k, i, n), keep(job, row, 1, k, f, n);
  keep(job, row, 2, k, g, n), keep(job, row, 3, k, o, n);
  vstr_upto(job->c_after + at, c, n);
  vst_states(job->y, at, o * vtanh(c), n);
}
DEFINE_CELL(lstm)

OMC_INLINE void gru(const steps_job *job, int64_t row, int64_t k, int64_t n) {
  const int64_t at = row * job->p->hidden + k;
  const vacc_t r = vsigmoid(gate(job, row, 0, k, n)), z = vsigmoid(gate(job, row, 1, k, n));
  const vacc_t hidden = sum_of(job, row, 2, k);
  const vacc_t fresh = vtanh(given(job, row, 2, k, n) + r * hidden);
  keep(job, row, 0, k, r, n), keep(job, row, 1, k, z, n), keep(job, row, 2, k, fresh, n);
  if (job->hidden) vstr_upto(job->hidden + at, hidden, n);
  vst_states(job->y, at, (vld_states(job->h, at, n) - fresh) * z + fresh, n);
}
DEFINE_CELL(gru)

OMC_INLINE void rnn_tanh(const steps_job *job, int64_t row, int64_t k, int64_t n) {
  vst_states(job->y, row * job->p->hidden + k, vtanh(gate(job, row, 0, k, n)), n);
}
DEFINE_CELL(rnn_tanh)

OMC_INLINE void rnn_relu(const steps_job *job, int64_t row, int64_t k, int64_t n) {
  vst_states(job->y, row * job->p->hidden + k, vmax(gate(job, row, 0, k, n), vset(0)), n);
}
DEFINE_CELL(rnn_relu)

static omc_status forward(const omc_kernel_args *args, cell_fn cell) {
  const omc_steps_form *p = args->params;
  const int64_t state = p->batch * p->hidden;
  if (state == 0) return OMC_OK;
  const void *const y = args->out[0].data, *const bias = omc_in_data(args, 2);
  storage_t *const gates = omc_out_data(args, p->states + 1);
  acc_t *const kept = omc_out_data(args, p->states + 2);
  steps_job job = start(args, args->in[1].data, false);
  acc_t *const carried = job.c_after;
  job.cell = cell;
  if (bias)
    load_row(bias, job.bias, p->gates * p->hidden);
  else
    job.bias = NULL;
  job.h = states_of(p, args->in[3].data, 0);
  job.c = states_of(p, omc_in_data(args, 4), 0);
  for (int64_t s = 0; s < p->steps; s++) {
    const int64_t at = place(p, s) * state;
    job.left = rows_of(job.h.data, p->hidden, p->state);
    job.x = (const storage_t *)args->in[0].data + at * p->gates;
    job.y = states_of(p, y, at);
    job.gates = gates ? gates + at * p->gates : NULL;
    job.hidden = kept ? kept + at : NULL;
    job.c_after = kept ? kept + at : carried;
    take_step(&job, args->threads);
    job.h = job.y;
    job.c = computed(job.c_after);
  }
  const states last[] = {job.h, job.c};
  for (uint32_t k = 1; k <= p->states; k++)
    if (omc_out_data(args, k)) copy_states(last[k - 1], states_of(p, args->out[k].data, 0), state);
  return OMC_OK;
}

OMC_KERNEL(LstmCells, args) { return forward(args, lstm_cell); }
OMC_KERNEL(GruCells, args) { return forward(args, gru_cell); }
OMC_KERNEL(RnnCells, args) {
  const omc_steps_form *p = args->params;
  return forward(args, p->relu ? rnn_relu_cell : rnn_tanh_cell);
}

/* ---- gradient ---- */

/* The gradient of h after a step, in the sums. */
OMC_INLINE vacc_t gradient(const steps_job *job, int64_t row, int64_t k, int64_t n) {
  return sum_of(job, row, 0, k) + vld_states(job->dy, row * job->p->hidden + k, n);
}
OMC_INLINE vacc_t saved(const steps_job *job, int64_t row, int64_t g, int64_t k, int64_t n) {
  return vld_fill(job->saved + gate_at(job, row, g, k), n, 0);
}
OMC_INLINE void give(const steps_job *job, storage_t *to, int64_t row, int64_t g, int64_t k,
                     vacc_t x, int64_t n) {
  vst_upto(to + gate_at(job, row, g, k), x, n);
}

/* Slopes of functions, times what they give. */
OMC_INLINE vacc_t of_sigmoid(vacc_t dy, vacc_t y) { return dy * (vset(1) - y) * y; }
OMC_INLINE vacc_t of_tanh(vacc_t dy, vacc_t y) { return dy * (vset(1) - y * y); }

OMC_INLINE void lstm_grad(const steps_job *job, int64_t row, int64_t k, int64_t n) {
  const int64_t at = row * job->p->hidden + k;
  acc_t *const carried = job->dc + row * job->layout.pitch + k;
  const vacc_t dh = gradient(job, row, k, n), squashed = vtanh(vldr_upto(job->kept + at, n));
  const vacc_t i = saved(job, row, 0, k, n), f = saved(job, row, 1, k, n);
  const vacc_t g = saved(job, row, 2, k, n), o = saved(job, row, 3, k, n);
  const vacc_t dc = vldr(carried) + of_tanh(dh * o, squashed);
  give(job, job->dx, row, 0, k, of_sigmoid(dc * g, i), n);
  give(job, job->dx, row, 1, k, of_sigmoid(dc * vld_states(job->c, at, n), f), n);
  give(job, job->dx, row, 2, k, of_tanh(dc * i, g), n);
  give(job, job->dx, row, 3, k, of_sigmoid(dh * squashed, o), n);
  vstr(carried, dc * f);
}
DEFINE_CELL(lstm_grad)

OMC_INLINE void gru_grad(const steps_job *job, int64_t row, int64_t k, int64_t n) {
  const int64_t at = row * job->p->hidden + k;
  const vacc_t dh = gradient(job, row, k, n);
  const vacc_t r = saved(job, row, 0, k, n), z = saved(job, row, 1, k, n);
  const vacc_t fresh = saved(job, row, 2, k, n);
  const vacc_t dn = of_tanh(dh - dh * z, fresh);
  const vacc_t dz = of_sigmoid(dh * (vld_states(job->h, at, n) - fresh), z);
  const vacc_t dr = of_sigmoid(dn * vldr_upto(job->kept + at, n), r);
  give(job, job->dx, row, 0, k, dr, n), give(job, job->dp, row, 0, k, dr, n);
  give(job, job->dx, row, 1, k, dz, n), give(job, job->dp, row, 1, k, dz, n);
  give(job, job->dx, row, 2, k, dn, n), give(job, job->dp, row, 2, k, dn * r, n);
  vstr(job->sums + row * job->layout.pitch + k, dh * z);
}
DEFINE_CELL(gru_grad)

OMC_INLINE void rnn_tanh_grad(const steps_job *job, int64_t row, int64_t k, int64_t n) {
  const vacc_t y = vld_states(job->now, row * job->p->hidden + k, n);
  give(job, job->dx, row, 0, k, of_tanh(gradient(job, row, k, n), y), n);
}
DEFINE_CELL(rnn_tanh_grad)

OMC_INLINE void rnn_relu_grad(const steps_job *job, int64_t row, int64_t k, int64_t n) {
  const vacc_t y = vld_states(job->now, row * job->p->hidden + k, n);
  give(job, job->dx, row, 0, k, vblend(y <= vset(0), vset(0), gradient(job, row, k, n)), n);
}
DEFINE_CELL(rnn_relu_grad)

static void no_cell(const steps_job *job, int64_t row, int64_t k, int64_t n) {
  (void)job, (void)row, (void)k, (void)n;
}

/* Rows of sums from a gradient of states, zeros if there is none, or to one that is asked for. */
static void load_states(const steps_job *job, const void *from, acc_t *sums) {
  const states given_states = states_of(job->p, from, 0);
  const int64_t n = job->p->hidden;
  for (int64_t row = 0; row < job->p->batch; row++)
    for (int64_t k = 0; k < n; k += OMC_VL)
      vstr(sums + row * job->layout.pitch + k, vld_states(given_states, row * n + k, n - k));
}
static void store_states(const steps_job *job, const acc_t *sums, void *to) {
  const states wanted = states_of(job->p, to, 0);
  const int64_t n = job->p->hidden;
  for (int64_t row = 0; to && row < job->p->batch; row++)
    for (int64_t k = 0; k < n; k += OMC_VL)
      vst_states(wanted, row * n + k, vldr(sums + row * job->layout.pitch + k), n - k);
}

/* Inputs: r, h, y, dy?, dh?, gates, kept, c, dc?. */
static omc_status backward(const omc_kernel_args *args, cell_fn cell) {
  const omc_steps_form *p = args->params;
  const int64_t state = p->batch * p->hidden, width = p->gates * p->hidden;
  if (state == 0) return OMC_OK;
  const storage_t *const gates = omc_in_data(args, 5);
  const acc_t *const kept = omc_in_data(args, 6);
  const void *const y = args->in[2].data, *const dy = omc_in_data(args, 3);
  const bool has_dp = p->states == 1 && args->n_out == 3;
  storage_t *const dx = args->out[0].data, *const dp = has_dp ? args->out[2].data : dx;
  steps_job job = start(args, args->in[0].data, true);
  job.cell = cell;
  job.beta = has_dp; /* what a Gru passes on of h itself is there already */
  job.bias = NULL;
  load_states(&job, omc_in_data(args, 4), job.sums);
  load_states(&job, omc_in_data(args, 8), job.dc);
  for (int64_t s = p->steps - 1; s >= 0; s--) {
    const int64_t at = place(p, s) * state, before = s > 0 ? place(p, s - 1) * state : 0;
    job.h = s > 0 ? states_of(p, y, before) : states_of(p, args->in[1].data, 0);
    job.c = s > 0 && kept ? computed(kept + before) : states_of(p, omc_in_data(args, 7), 0);
    job.now = states_of(p, y, at);
    job.dy = states_of(p, dy, at);
    job.saved = gates ? gates + at * p->gates : NULL;
    job.kept = kept ? kept + at : NULL;
    job.dx = dx + at * p->gates;
    job.dp = dp + at * p->gates;
    take_step(&job, args->threads);
    job.left = rows_of(job.dp, width, OMC_STORAGE);
  }
  if (omc_out_data(args, 1)) {
    job.cell = no_cell;
    take_step(&job, args->threads);
    store_states(&job, job.sums, args->out[1].data);
  }
  if (p->states == 2) store_states(&job, job.dc, omc_out_data(args, 2));
  return OMC_OK;
}

OMC_KERNEL(LstmCellsGrad, args) { return backward(args, lstm_grad_cell); }
OMC_KERNEL(GruCellsGrad, args) { return backward(args, gru_grad_cell); }
OMC_KERNEL(RnnCellsGrad, args) {
  const omc_steps_form *p = args->params;
  return backward(args, p->relu ? rnn_relu_grad_cell : rnn_tanh_grad_cell);
}

#endif
