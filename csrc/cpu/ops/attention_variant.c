/* Kernels of Attention and AttentionGrad.
 *
 * Nothing of T x S elements is stored: for a block of query rows the scores are one product, the
 * softmax is taken row by row, and y is a second product. Backward makes the probabilities again
 * from lse, and the dropout mask again from its counters. A row that attends to nothing gives 0;
 * its lse is kept as +inf, so that backward gets exp(score - lse) = 0 for it. */
#include "cpu/kernel.h"

#if defined(OMC_VARIANT) && OMC_IS_FLOAT

#include "cpu/ops/attention_mask.h"
#include "cpu/parallel.h"
#include "cpu/rng.h"
#include "cpu/rows.h"
#include "cpu/shuffle.h"
#include "ops/random.h"

typedef struct {
  const omc_attention_form *p;
  const storage_t *q, *k, *v, *dy;
  hidden_keys hidden;
  storage_t *out, *dq, *dk, *dv;
  bool backward;
  int64_t parts; /* gradient */
  acc_t *sums;   /* gradient: of n_sums */
  acc_t *lse;    /* forward: may be NULL */
  uint64_t seed;
  uint32_t drop_below; /* a probability is dropped if its random word is below this */
  acc_t keep_scale;    /* 1 / (1 - p); 0 for p = 1 */
  attention_scratch scratch;
  char *workspace;
} attention_job;

/* A block of query rows of one head and what it sees. */
typedef struct {
  int64_t head;        /* in [B * H] */
  int64_t first, rows; /* query rows first .. first + rows - 1 */
  int64_t cols;        /* keys that any of them sees, columns of its tables */
  int64_t n_runs;      /* of these keys */
  key_run *runs;
  int64_t query; /* first row in [B * H * T] */
  int64_t q, y;  /* first element of its rows */
} query_block;

static query_block block_at(const omc_attention_form *p, int64_t head, int64_t index) {
  const int64_t first = index * OMC_QUERY_BLOCK,
                rows = omc_min(OMC_QUERY_BLOCK, p->queries - first);
  return (query_block){.head = head,
                       .first = first,
                       .rows = rows,
                       .cols = p->causal ? omc_min(p->keys, first + rows) : p->keys,
                       .query = head * p->queries + first,
                       .q = head_at(&p->q, p->heads, head) + first * p->q.token,
                       .y = head_at(&p->y, p->heads, head) + first * p->y.token};
}

/* Leaves out of a block's keys what the mask hides. */
static void leave_out(const attention_job *job, const hidden_keys *hidden, query_block *b,
                      char *scratch) {
  b->runs = (key_run *)(void *)(scratch + job->scratch.runs);
  b->n_runs = runs_of(hidden, b->head, b->first, b->rows, b->cols, job->q + b->q,
                      job->dy ? job->dy + b->y : NULL, b->runs, &b->cols);
}

static attention_job make_job(const omc_kernel_args *args, const omc_attention_form *p,
                              int tables) {
  return (attention_job){.p = p,
                         .seed = args->seed,
                         .drop_below = omc_drop_threshold(p->p),
                         .keep_scale = p->p < 1 ? (acc_t)(1 / (1 - p->p)) : 0,
                         .scratch = scratch_of(p, tables),
                         .workspace = args->workspace};
}

/* The right side of products, packed for all of them or, if panels is NULL, for each anew. */
typedef struct {
  omc_matrix stored;
  omc_packed packed;
} right_side;

/* c[m,n] = alpha * a[m,k] b[k,n] + beta * c; operands by address and strides. */
static void product(void *workspace, int64_t m, int64_t n, int64_t k, omc_matrix a, right_side b,
                    omc_matrix c, double alpha, double beta) {
  const omc_gemm_args g = {.m = m,
                           .n = n,
                           .k = k,
                           .a = a,
                           .b = b.stored,
                           .c = c,
                           .alpha = alpha,
                           .beta = beta,
                           .b_packed = b.packed};
  if (m > 0 && n > 0) omc_gemm_serial_part(&g, workspace);
}
/* What scores become as operands, each row at the beginning of its scores: beside numbers of bf16
 * rounded to it, as PyTorch does. */
#if defined(OMC_STORAGE_IS_F16)
#define WEIGHT OMC_ACC
typedef acc_t weight_t;
OMC_INLINE void store_weights(weight_t *w, vacc_t x) { vstr(w, x); }
#else
#define WEIGHT OMC_STORAGE
typedef storage_t weight_t;
OMC_INLINE void store_weights(weight_t *w, vacc_t x) { vst(w, x); }
#endif
static omc_matrix weights(acc_t *table, int64_t column, int64_t length) {
  return omc_matrix_rows((weight_t *)(void *)table + column,
                         length * (int64_t)(sizeof(acc_t) / sizeof(weight_t)), WEIGHT);
}

/* The right sides of a head of keys; a head of one block has no use for packing them. */
typedef struct {
  int64_t kv;        /* in [B * Hkv]; -1: none yet */
  right_side scores; /* dim x keys: of scores */
  right_side values; /* keys x value_dim: of y; transposed: of gradients of probabilities */
  right_side keys;   /* gradient: keys x dim, of dq */
} head_sides;

static right_side side_of(omc_matrix stored, omc_dtype left, int64_t k, int64_t n, char *panels) {
  const omc_gemm_args g = {
      .n = n, .k = k, .a = {.dtype = left}, .b = stored, .c = {.dtype = OMC_ACC}};
  if (panels) omc_gemm_pack(&g, panels);
  return (right_side){stored, {.panels = panels, .rows = k}};
}

static void go_to_head(const attention_job *job, int64_t kv, head_sides *sides, char *scratch) {
  const omc_attention_form *p = job->p;
  const storage_t *k = job->k + head_at(&p->k, p->kv_heads, kv);
  const storage_t *v = job->v + head_at(&p->v, p->kv_heads, kv);
  char *panels[N_PACKED];
  if (sides->kv == kv) return;
  for (int i = 0; i < N_PACKED; i++)
    panels[i] = p->heads / p->kv_heads * n_blocks(p) > 1 ? scratch + job->scratch.packed[i] : NULL;
  sides->kv = kv;
  sides->scores = side_of(omc_matrix_columns(k, p->k.token, OMC_STORAGE), OMC_STORAGE, p->dim,
                          p->keys, panels[PACKED_SCORES]);
  if (!job->backward) {
    sides->values = side_of(omc_matrix_rows(v, p->v.token, OMC_STORAGE), WEIGHT, p->keys,
                            p->value_dim, panels[PACKED_VALUES]);
    return;
  }
  sides->values = side_of(omc_matrix_columns(v, p->v.token, OMC_STORAGE), OMC_STORAGE, p->value_dim,
                          p->keys, panels[PACKED_VALUES]);
  sides->keys = side_of(omc_matrix_rows(k, p->k.token, OMC_STORAGE), WEIGHT, p->keys, p->dim,
                        panels[PACKED_KEYS]);
}

/* What of it is a run's: its keys are columns, or rows, of which panels can be read by parts. */
static right_side columns_of(right_side x, const key_run *run) {
  x.stored.data = (storage_t *)x.stored.data + run->first * x.stored.cs;
  x.packed.col = run->first;
  return x;
}
static right_side rows_of(right_side x, const key_run *run) {
  const int64_t end = run->first + run->n;
  x.stored.data = (storage_t *)x.stored.data + run->first * x.stored.rs;
  x.packed.row = run->first;
  if (end % OMC_GEMM_PART && end < x.packed.rows) x.packed.panels = NULL;
  return x;
}

typedef uint8_t mask_bytes __attribute__((vector_size(OMC_VL)));

/* What is hidden gets -inf added, as in PyTorch: NaN and inf show through. */
static void mask_row_bool(acc_t *s, const uint8_t *mask, int64_t step, int64_t n) {
  int64_t k = 0;
  if (step == 1)
    for (; k + OMC_VL <= n; k += OMC_VL) {
      mask_bytes m;
      memcpy(&m, mask + k, sizeof m);
      const vmask keep = __builtin_convertvector(m, vmask) != 0;
      vstr(s + k, vldr(s + k) + vblend(keep, vset(0), vset(OMC_LOWEST)));
    }
  for (; k < n; k++)
    if (!mask[k * step]) s[k] += OMC_LOWEST;
}

static void mask_row_add(acc_t *s, const storage_t *mask, int64_t step, int64_t n) {
  int64_t k = 0;
  if (step == 1)
    for (; k + OMC_VL <= n; k += OMC_VL) vstr(s + k, vldr(s + k) + vld(mask + k));
  for (; k < n; k++) s[k] += ld(mask + k * step);
}

/* Masks query i's scores of n keys from `key` on. */
static void mask_row(const attention_job *job, int64_t head, int64_t i, int64_t key, acc_t *s,
                     int64_t n) {
  const omc_attention_form *p = job->p;
  const int64_t *stride = p->mask_strides;
  const int64_t at =
      head / p->heads * stride[0] + head % p->heads * stride[1] + i * stride[2] + key * stride[3];
  if (!job->hidden.mask) return;
  if (p->mask_is_bool)
    mask_row_bool(s, (const uint8_t *)job->hidden.mask + at, stride[3], n);
  else
    mask_row_add(s, (const storage_t *)job->hidden.mask + at, stride[3], n);
}

/* Scores of a block, masked; columns that a row does not see, up to a whole vector, are -inf. */
static void make_scores(const attention_job *job, const query_block *b, const head_sides *sides,
                        acc_t *scores, void *workspace) {
  const omc_attention_form *p = job->p;
  const int64_t length = row_length(p), whole = (b->cols + OMC_VL - 1) / OMC_VL * OMC_VL;
  for (const key_run *run = b->runs; run < b->runs + b->n_runs; run++) {
    acc_t *table = scores + run->at;
    product(workspace, b->rows, run->n, p->dim,
            omc_matrix_rows(job->q + b->q, p->q.token, OMC_STORAGE), columns_of(sides->scores, run),
            omc_matrix_rows(table, length, OMC_ACC), p->scale, 0);
    for (int64_t r = 0; r < b->rows; r++) {
      const int64_t i = b->first + r;
      const int64_t seen = p->causal ? omc_clamp(i + 1 - run->first, 0, run->n) : run->n;
      mask_row(job, b->head, i, run->first, table + r * length, seen);
      for (int64_t k = seen; k < run->n; k++) table[r * length + k] = OMC_LOWEST;
    }
  }
  for (int64_t r = 0; r < b->rows; r++)
    for (int64_t k = b->cols; k < whole; k++) scores[r * length + k] = OMC_LOWEST;
}

/* Random words of the probabilities of a block's row r. */
static const uint32_t *drop_words(const attention_job *job, const query_block *b, int64_t r,
                                  char *scratch) {
  uint32_t *words = (uint32_t *)(void *)(scratch + job->scratch.words);
  const int64_t first = (b->query + r) * job->p->keys;
  for (const key_run *run = b->runs; run < b->runs + b->n_runs; run++)
    omc_philox_draws(job->seed, job->p->subsequence, (uint64_t)(first + run->first), run->n,
                     words + run->at);
  return words;
}

typedef uint32_t word_vec __attribute__((vector_size(OMC_VL * sizeof(uint32_t))));

/* Which of the next probabilities are kept. */
OMC_INLINE vmask kept(const attention_job *job, const uint32_t *words) {
  word_vec w;
  memcpy(&w, words, sizeof w);
  return __builtin_convertvector(w >= job->drop_below - (word_vec){0}, vmask);
}

/* Turns row r's scores into exp(score - max), as weights; returns what y's row is to be multiplied
 * by. */
static acc_t softmax_row(const attention_job *job, const query_block *b, int64_t r, acc_t *s,
                         char *scratch) {
  const int64_t whole = (b->cols + OMC_VL - 1) / OMC_VL * OMC_VL, query = b->query + r;
  weight_t *const w = (weight_t *)(void *)s;
  const acc_t max =
      OMC_ROW_REDUCE(k, left, whole, OMC_LOWEST, vmax, vhmax, ((void)left, vldr(s + k)));
  vacc_t sum = vset(0);
  if (max == OMC_LOWEST) {
    memset(s, 0, (size_t)whole * sizeof *s);
    if (job->lse) job->lse[query] = (acc_t)INFINITY;
    return 0;
  }
  const uint32_t *words = job->p->p > 0 ? drop_words(job, b, r, scratch) : NULL;
  for (int64_t k = 0; k < whole; k += OMC_VL) {
    const vacc_t e = vexp(vldr(s + k) - vset(max));
    store_weights(w + k, words ? vblend(kept(job, words + k), e, vset(0)) : e);
    sum += e;
  }
  const acc_t total = vsum(sum);
  if (job->lse) job->lse[query] = max + (acc_t)log((double)total);
  return job->keep_scale / total;
}

/* Of heads in [B * H], the one to take as the i-th: a head of each sample in turn, for those of one
 * may cost more than those of another. */
static int64_t nth_head(const omc_attention_form *p, int64_t heads, int64_t i) {
  return i % p->batch * heads + i / p->batch;
}

/* y = the weights of a block by the n columns of what its keys are rows of. */
static void combine(const query_block *b, acc_t *table, int64_t length, right_side keys, int64_t n,
                    omc_matrix sums, double alpha, void *workspace) {
  for (const key_run *run = b->runs; run < b->runs + b->n_runs; run++)
    product(workspace, b->rows, n, run->n, weights(table, run->at, length), rows_of(keys, run),
            sums, alpha, run > b->runs);
}

/* Items are blocks of query rows. Those of a head are taken from both ends, for a causal block
 * costs the more the later it is. */
static void forward_blocks(omc_range range, void *ctx) {
  const attention_job *job = ctx;
  const omc_attention_form *p = job->p;
  char *scratch = job->workspace + (size_t)range.thread * job->scratch.total;
  acc_t *scores = (acc_t *)(void *)(scratch + job->scratch.table[0]);
  acc_t *factor = (acc_t *)(void *)(scratch + job->scratch.rows);
  const int64_t blocks = n_blocks(p), length = row_length(p), group = p->heads / p->kv_heads;
  head_sides sides = {.kv = -1};
  for (int64_t item = range.begin; item < range.end; item++) {
    const int64_t i = item % blocks;
    query_block b =
        block_at(p, nth_head(p, p->heads, item / blocks), i % 2 ? blocks - 1 - i / 2 : i / 2);
    storage_t *y = job->out + b.y;
    leave_out(job, &job->hidden, &b, scratch);
    go_to_head(job, b.head / group, &sides, scratch);
    make_scores(job, &b, &sides, scores, scratch + job->scratch.gemm);
    for (int64_t r = 0; r < b.rows; r++)
      factor[r] = softmax_row(job, &b, r, scores + r * length, scratch);
    const int64_t step = OMC_STORES_ACC ? p->y.token : p->value_dim;
    acc_t *sums = sums_of(y, (acc_t *)(void *)(scratch + job->scratch.sums));
    combine(&b, scores, length, sides.values, p->value_dim, omc_matrix_rows(sums, step, OMC_ACC), 1,
            scratch + job->scratch.gemm);
    for (int64_t r = 0; r < b.rows; r++)
      for (int64_t k = 0, n = p->value_dim; k < n; k += OMC_VL)
        vst_upto(y + r * p->y.token + k, vldr_upto(sums + r * step + k, n - k) * vset(factor[r]),
                 n - k);
  }
}

OMC_KERNEL(Attention, args) {
  const omc_attention_form *p = args->params;
  attention_job job = make_job(args, p, 1);
  job.q = omc_in_data(args, 0);
  job.k = p->packed ? job.q + p->k_start : omc_in_data(args, 1);
  job.v = p->packed ? job.q + p->v_start : omc_in_data(args, 2);
  job.out = omc_out_data(args, 0), job.lse = omc_out_data(args, 1);
  acc_t *shared = (acc_t *)(void *)(job.workspace + job.scratch.total * (size_t)args->threads);
  job.hidden = look_for_hidden(p, omc_in_data(args, 3), job.k, job.v, shared, args->threads);
  omc_parallel_for(p->batch * p->heads * n_blocks(p), 1, args->threads, forward_blocks, &job);
  return OMC_OK;
}

/* Turns row r's scores into the probabilities that made y, and its gradients of probabilities
 * into gradients of scores, P * (dP - sum of P * dP), both as weights. What lse has rounded away is
 * divided out again; a row that attends to one key has probability 1 there, and no gradient at all.
 */
static void softmax_grad_row(const attention_job *job, const query_block *b, int64_t r, acc_t *s,
                             acc_t *ds, char *scratch) {
  const int64_t query = b->query + r, whole = (b->cols + OMC_VL - 1) / OMC_VL * OMC_VL;
  const vacc_t scale = vset(job->keep_scale), lse = vset(job->lse[query]);
  const uint32_t *words = job->p->p > 0 ? drop_words(job, b, r, scratch) : NULL;
  for (int64_t k = b->cols; k < whole; k++) ds[k] = 0;
  vacc_t sums = vset(0), products = vset(0);
  for (int64_t k = 0; k < whole; k += OMC_VL) {
    const vacc_t e = vexp(vldr(s + k) - lse);
    vacc_t d = vldr(ds + k);
    if (words) {
      d *= vblend(kept(job, words + k), scale, vset(0));
      vstr(ds + k, d);
    }
    vstr(s + k, e);
    sums += e;
    products = vfma(e, d, products);
  }
  const acc_t sum = vsum(sums), share = sum == 0 ? 0 : 1 / sum;
  const vacc_t shares = vset(share), delta = vset(vsum(products) * share);
  for (int64_t k = 0; k < whole; k += OMC_VL) {
    vacc_t prob = vldr(s + k) * shares;
    store_weights((weight_t *)(void *)ds + k, prob * (vldr(ds + k) - delta));
    if (words) prob *= vblend(kept(job, words + k), scale, vset(0));
    store_weights((weight_t *)(void *)s + k, prob);
  }
}

/* Adds n columns of a block's rows, transposed, by its weights to sums of n rows, a column for each
 * key. */
static void spread(const query_block *b, acc_t *table, int64_t length, omc_matrix columns,
                   int64_t n, acc_t *sums, double alpha, void *workspace) {
  for (const key_run *run = b->runs; run < b->runs + b->n_runs; run++)
    product(workspace, n, run->n, b->rows, columns,
            (right_side){.stored = weights(table, run->at, length)},
            omc_matrix_rows(sums + run->first, length, OMC_ACC), alpha, 1);
}

/* Adds one block of query rows to dk and dv and writes its rows of dq. */
static void backward_block(const attention_job *job, const query_block *b, const head_sides *sides,
                           acc_t *sums, char *scratch) {
  const omc_attention_form *p = job->p;
  const int64_t length = row_length(p), dim = p->dim, value_dim = p->value_dim;
  const int64_t step = OMC_STORES_ACC ? p->q.token : dim;
  acc_t *probs = (acc_t *)(void *)(scratch + job->scratch.table[0]);
  acc_t *grads = (acc_t *)(void *)(scratch + job->scratch.table[1]);
  storage_t *dq = job->dq + b->q;
  acc_t *dq_sums = sums_of(dq, (acc_t *)(void *)(scratch + job->scratch.sums));
  void *workspace = scratch + job->scratch.gemm;
  const storage_t *const q = job->q + b->q;
  const storage_t *const dy = job->dy + b->y;
  make_scores(job, b, sides, probs, workspace);
  for (const key_run *run = b->runs; run < b->runs + b->n_runs; run++)
    product(workspace, b->rows, run->n, value_dim, omc_matrix_rows(dy, p->y.token, OMC_STORAGE),
            columns_of(sides->values, run), omc_matrix_rows(grads + run->at, length, OMC_ACC), 1,
            0);
  for (int64_t r = 0; r < b->rows; r++)
    softmax_grad_row(job, b, r, probs + r * length, grads + r * length, scratch);
  spread(b, probs, length, omc_matrix_columns(dy, p->y.token, OMC_STORAGE), value_dim,
         sums + dim * length, 1, workspace);
  combine(b, grads, length, sides->keys, dim, omc_matrix_rows(dq_sums, step, OMC_ACC), p->scale,
          workspace);
  for (int64_t r = 0; r < b->rows; r++) store_sums(dq_sums + r * step, dq + r * p->q.token, dim);
  spread(b, grads, length, omc_matrix_columns(q, p->q.token, OMC_STORAGE), dim, sums, p->scale,
         workspace);
}

/* Whether some row of probabilities is NaN, which those of the keys that it does not see are too.
 */
static bool has_nan(const attention_job *job, const query_block *b) {
  bool found = false;
  for (int64_t r = 0; r < b->rows; r++) found |= isnan(job->lse[b->query + r]) != 0;
  return found;
}

/* Stores rows first .. end - 1 of an output, n elements each, `token` apart: columns of sums of n
 * rows, added up over all parts. */
static void store_columns(const attention_job *job, const acc_t *sums, int64_t first, int64_t end,
                          int64_t n, storage_t *out, int64_t token) {
  const int64_t length = row_length(job->p), step = part_length(job->p);
  for (int64_t j = first; j < end; j += OMC_VL)
    for (int64_t i = 0; i < n; i += OMC_VL) {
      vacc_t x[OMC_VL];
      for (int64_t r = 0; r < OMC_VL; r++) {
        const acc_t *row = sums + omc_min(i + r, n - 1) * length + j;
        x[r] = vldr(row);
        for (int64_t part = 1; part < job->parts; part++) x[r] += vldr(row + part * step);
      }
      OMC_TRANSPOSE(x);
      for (int64_t c = 0; c < omc_min(end - j, OMC_VL); c++)
        vst_upto(out + (j + c) * token + i, x[c], n - i);
    }
}

/* Those of keys first .. end - 1 of a head, whose sums of the first part these are. */
static void store_keys(const attention_job *job, int64_t kv, const acc_t *sums, int64_t first,
                       int64_t end) {
  const omc_attention_form *p = job->p;
  store_columns(job, sums, first, end, p->dim, job->dk + head_at(&p->k, p->kv_heads, kv),
                p->k.token);
  store_columns(job, sums + p->dim * row_length(p), first, end, p->value_dim,
                job->dv + head_at(&p->v, p->kv_heads, kv), p->v.token);
}

/* Items are parts of heads of keys: every so many-th block of the query heads that share it. */
static void backward_parts(omc_range range, void *ctx) {
  const attention_job *job = ctx;
  const omc_attention_form *p = job->p;
  char *scratch = job->workspace + (size_t)range.thread * job->scratch.total;
  const int64_t group = p->heads / p->kv_heads, blocks = n_blocks(p);
  const hidden_keys all_keys = {.p = p};
  head_sides sides = {.kv = -1};
  for (int64_t item = range.begin; item < range.end; item++) {
    const int64_t kv = nth_head(p, p->kv_heads, item / job->parts), part = item % job->parts;
    const int64_t place = job->parts > 1 ? kv * job->parts + part : range.thread;
    acc_t *sums = job->sums + place * part_length(p);
    memset(sums, 0, (size_t)part_length(p) * sizeof *sums);
    go_to_head(job, kv, &sides, scratch);
    for (int64_t i = part; i < group * blocks; i += job->parts) {
      query_block b = block_at(p, kv * group + i / blocks, i % blocks);
      const bool nan = has_nan(job, &b);
      if (nan) b.cols = p->keys;
      leave_out(job, nan ? &all_keys : &job->hidden, &b, scratch);
      backward_block(job, &b, &sides, sums, scratch);
    }
    if (job->parts == 1) store_keys(job, kv, sums, 0, p->keys);
  }
}

/* Items are blocks of keys of heads. */
static void add_parts(omc_range range, void *ctx) {
  const attention_job *job = ctx;
  const omc_attention_form *p = job->p;
  const int64_t blocks = omc_ceil_div(p->keys, OMC_KEY_BLOCK);
  for (int64_t item = range.begin; item < range.end; item++) {
    const int64_t kv = item / blocks, first = item % blocks * OMC_KEY_BLOCK;
    store_keys(job, kv, job->sums + kv * job->parts * part_length(p), first,
               omc_min(first + OMC_KEY_BLOCK, p->keys));
  }
}

/* Inputs: dy, q, k, v, lse, mask?. */
OMC_KERNEL(AttentionGrad, args) {
  const attention_grad_params *params = args->params;
  const omc_attention_form *p = &params->form;
  attention_job job = make_job(args, p, 2);
  job.backward = true;
  job.parts = params->parts;
  job.dy = omc_in_data(args, 0);
  job.q = omc_in_data(args, 1);
  job.k = p->packed ? job.q + p->k_start : omc_in_data(args, 2);
  job.v = p->packed ? job.q + p->v_start : omc_in_data(args, 3);
  job.lse = args->in[4].data;
  job.dq = omc_out_data(args, 0);
  job.dk = p->packed ? job.dq + p->k_start : omc_out_data(args, 1);
  job.dv = p->packed ? job.dq + p->v_start : omc_out_data(args, 2);
  acc_t *shared = (acc_t *)(void *)(job.workspace + job.scratch.total * (size_t)args->threads);
  job.hidden = look_for_hidden(p, omc_in_data(args, 5), job.k, job.v, shared, args->threads);
  job.sums = shared + hidden_length(p, job.hidden.mask != NULL);
  omc_parallel_for(p->batch * p->kv_heads * job.parts, 1, args->threads, backward_parts, &job);
  if (job.parts > 1)
    omc_parallel_for(p->batch * p->kv_heads * omc_ceil_div(p->keys, OMC_KEY_BLOCK), 1,
                     args->threads, add_parts, &job);
  return OMC_OK;
}

#endif
