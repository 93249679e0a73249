/* Attention(q[B,H,T,D], k[B,Hkv,S,D], v[B,Hkv,S,Dv], mask?) -> y[B,H,T,Dv], lse[B,H,T], and its
 * gradient. Attribute head_axes says of q, k, v and y in turn where their heads are: at axis 1, or
 * at axis 2 behind the tokens, as a projection writes them. Gradients are laid out as what they
 * are of.
 *
 * Nothing of T x S elements is stored: for a block of query rows the scores are one product, the
 * softmax is taken row by row, and y is a second product. Backward makes the probabilities again
 * from lse, and the dropout mask again from its counters. A row that attends to nothing gives 0;
 * its lse is kept as +inf, so that backward gets exp(score - lse) = 0 for it. */
#include "base/alloc.h"
#include "cpu/gemm.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "cpu/rng.h"
#include "ops/infer.h"
#include "ops/op.h"

typedef struct {
  int64_t sample, head, token; /* elements from one to the next */
} head_strides;

typedef struct {
  int64_t batch, heads, kv_heads, queries, keys, dim, value_dim; /* B, H, Hkv, T, S, D, Dv */
  head_strides q, k, v, y;                                       /* also of their gradients */
  omc_shape y_shape;
  omc_dtype dtype;
  double scale, p;
  uint32_t stream;         /* of dropout */
  bool causal;             /* key j is seen by query i only if j <= i */
  bool mask_is_bool;       /* true: attend; else added to the scores */
  int64_t mask_strides[4]; /* elements, of the mask seen as [B,H,T,S] */
} attention_params;

/* Query rows that share one product, and the length of a row of their scores: room for whole
 * vectors of any variant. */
#define BLOCK 64

static inline int64_t row_length(const attention_params *p) { return (p->keys + 15) / 16 * 16; }
/* The first element of head h of B * heads. */
static inline int64_t head_at(const head_strides *s, int64_t heads, int64_t h) {
  return h / heads * s->sample + h % heads * s->head;
}
static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

/* One thread's scratch memory, offsets in bytes: `tables` of BLOCK x row_length reals, random
 * words of a row, a real per query row, and the products' own. */
typedef struct {
  size_t table[2], words, rows, gemm, total;
} attention_scratch;

static inline attention_scratch scratch_of(const attention_params *p, int tables) {
  const size_t size = omc_dtype_size(p->dtype), length = (size_t)row_length(p);
  const size_t table = omc_round_up(BLOCK * length * size, 64);
  const size_t scores = omc_gemm_workspace(p->dtype, BLOCK, p->keys, p->dim, 1);
  const size_t values = omc_gemm_workspace(p->dtype, BLOCK, p->keys, p->value_dim, 1);
  const size_t out = omc_gemm_workspace(p->dtype, BLOCK, p->value_dim, p->keys, 1);
  const size_t dq = omc_gemm_workspace(p->dtype, BLOCK, p->dim, p->keys, 1);
  const size_t dk = omc_gemm_workspace(p->dtype, p->keys, p->dim, BLOCK, 1);
  const size_t dv = omc_gemm_workspace(p->dtype, p->keys, p->value_dim, BLOCK, 1);
  const size_t forward[] = {scores, out}, backward[] = {scores, values, dq, dk, dv};
  size_t gemm = 0;
  const size_t *all = tables == 1 ? forward : backward;
  for (int i = 0; i < (tables == 1 ? 2 : 5); i++) gemm = all[i] > gemm ? all[i] : gemm;

  attention_scratch s = {.table = {0, table}};
  s.words = table * (size_t)tables;
  s.rows = s.words + (p->p > 0 ? omc_round_up(length * sizeof(uint32_t), 64) : 0);
  s.gemm = s.rows + BLOCK * sizeof(double);
  s.total = omc_round_up(s.gemm + gemm, 64);
  return s;
}

#if defined(OMC_VARIANT) && !defined(OMC_CLASS_IS_I64)

#include "cpu/rows.h"

#define NEG_INF (-(real)INFINITY)

typedef struct {
  const attention_params *p;
  const elem *q, *k, *v, *y, *dy;
  const void *mask; /* NULL: none */
  elem *out, *dq, *dk, *dv;
  real *lse; /* forward: may be NULL */
  uint64_t seed;
  uint32_t drop_below; /* a probability is dropped if its random word is below this */
  real keep_scale;     /* 1 / (1 - p); 0 for p = 1 */
  attention_scratch scratch;
  char *workspace;
} attention_job;

/* A block of query rows of one head and what it sees. */
typedef struct {
  int64_t head;          /* in [B * H] */
  int64_t first, rows;   /* query rows first .. first + rows - 1 */
  int64_t cols;          /* keys that any of them sees */
  int64_t query;         /* first row in [B * H * T] */
  int64_t q, k, v, y;    /* first element of its rows and of its keys and values */
} query_block;

static query_block block_at(const attention_params *p, int64_t head, int64_t index) {
  const int64_t first = index * BLOCK, rows = min64(BLOCK, p->queries - first);
  const int64_t group = p->heads / p->kv_heads, kv_head = head / group;
  return (query_block){.head = head,
                       .first = first,
                       .rows = rows,
                       .cols = p->causal ? min64(p->keys, first + rows) : p->keys,
                       .query = head * p->queries + first,
                       .q = head_at(&p->q, p->heads, head) + first * p->q.token,
                       .k = head_at(&p->k, p->kv_heads, kv_head),
                       .v = head_at(&p->v, p->kv_heads, kv_head),
                       .y = head_at(&p->y, p->heads, head) + first * p->y.token};
}

static attention_job make_job(const omc_kernel_args *args, int tables) {
  const attention_params *p = args->params;
  return (attention_job){.p = p,
                         .seed = args->seed,
                         .drop_below = omc_drop_threshold(p->p),
                         .keep_scale = p->p < 1 ? (real)(1 / (1 - p->p)) : 0,
                         .scratch = scratch_of(p, tables),
                         .workspace = args->workspace};
}

/* c[m,n] = alpha * a[m,k] b[k,n] + beta * c; operands by address and strides. */
static void product(const attention_job *job, void *workspace, int64_t m, int64_t n, int64_t k,
                    omc_matrix a, omc_matrix b, omc_matrix c, double alpha, double beta) {
  const omc_gemm_args g = {
      .m = m, .n = n, .k = k, .a = a, .b = b, .c = c, .alpha = alpha, .beta = beta};
  if (m > 0 && n > 0) omc_gemm_serial(job->p->dtype, &g, workspace);
}
static omc_matrix by_rows(const elem *x, int64_t stride) {
  return (omc_matrix){(void *)(uintptr_t)x, stride, 1};
}
static omc_matrix transposed(const elem *x, int64_t stride) {
  return (omc_matrix){(void *)(uintptr_t)x, 1, stride};
}

typedef uint8_t mask_bytes __attribute__((vector_size(OMC_VL)));

static void mask_row_bool(real *s, const uint8_t *mask, int64_t step, int64_t n) {
  int64_t k = 0;
  if (step == 1)
    for (; k + OMC_VL <= n; k += OMC_VL) {
      mask_bytes m;
      memcpy(&m, mask + k, sizeof m);
      const vmask keep = __builtin_convertvector(m, vmask) != 0;
      vstr(s + k, vblend(keep, vldr(s + k), vset(NEG_INF)));
    }
  for (; k < n; k++)
    if (!mask[k * step]) s[k] = NEG_INF;
}

static void mask_row_add(real *s, const elem *mask, int64_t step, int64_t n) {
  for (int64_t k = 0; k < n; k++) s[k] += ld(mask + k * step);
}

/* Scores of a block, masked; columns that a row does not see, up to a whole vector, are -inf. */
static void make_scores(const attention_job *job, const query_block *b, real *scores,
                        void *workspace) {
  const attention_params *p = job->p;
  const int64_t length = row_length(p), whole = (b->cols + OMC_VL - 1) / OMC_VL * OMC_VL;
  product(job, workspace, b->rows, b->cols, p->dim, by_rows(job->q + b->q, p->q.token),
          transposed(job->k + b->k, p->k.token),
          (omc_matrix){scores, length, 1}, p->scale, 0);
  for (int64_t r = 0; r < b->rows; r++) {
    real *s = scores + r * length;
    const int64_t i = b->first + r, seen = p->causal ? min64(p->keys, i + 1) : p->keys;
    if (job->mask) {
      const int64_t *stride = p->mask_strides;
      const int64_t at =
          b->head / p->heads * stride[0] + b->head % p->heads * stride[1] + i * stride[2];
      if (p->mask_is_bool)
        mask_row_bool(s, (const uint8_t *)job->mask + at, stride[3], seen);
      else
        mask_row_add(s, (const elem *)job->mask + at, stride[3], seen);
    }
    for (int64_t k = seen; k < whole; k++) s[k] = NEG_INF;
  }
}

/* Random words of the probabilities of query row `query`, of the first n keys. */
static const uint32_t *drop_words(const attention_job *job, int64_t query, int64_t n,
                                  char *scratch) {
  uint32_t *words = (uint32_t *)(void *)(scratch + job->scratch.words);
  omc_philox_words(job->seed, job->p->stream, (uint64_t)(query * job->p->keys), n, words);
  return words;
}

/* Turns row r's scores into exp(score - max); returns what y's row is to be multiplied by. */
static real softmax_row(const attention_job *job, const query_block *b, int64_t r, real *s,
                        char *scratch) {
  const int64_t whole = (b->cols + OMC_VL - 1) / OMC_VL * OMC_VL, query = b->query + r;
  vreal top = vset(NEG_INF), sum = vset(0);
  for (int64_t k = 0; k < whole; k += OMC_VL) top = vmax(top, vldr(s + k));
  const real max = vhmax(top);
  if (max == NEG_INF) {
    memset(s, 0, (size_t)whole * sizeof *s);
    if (job->lse) job->lse[query] = (real)INFINITY;
    return 0;
  }
  for (int64_t k = 0; k < whole; k += OMC_VL) {
    const vreal e = vexp(vldr(s + k) - vset(max));
    vstr(s + k, e);
    sum += e;
  }
  const real total = vsum(sum);
  if (job->lse) job->lse[query] = max + (real)log((double)total);
  if (job->p->p <= 0) return 1 / total;
  const uint32_t *words = drop_words(job, query, b->cols, scratch);
  for (int64_t k = 0; k < b->cols; k++) s[k] = words[k] < job->drop_below ? 0 : s[k];
  return job->keep_scale / total;
}

/* Items are blocks of query rows. Those of a head are taken from both ends, for a causal block
 * costs the more the later it is. */
static void forward_blocks(int64_t begin, int64_t end, int thread, void *ctx) {
  const attention_job *job = ctx;
  const attention_params *p = job->p;
  char *scratch = job->workspace + (size_t)thread * job->scratch.total;
  real *scores = (real *)(void *)(scratch + job->scratch.table[0]);
  real *factor = (real *)(void *)(scratch + job->scratch.rows);
  const int64_t blocks = (p->queries + BLOCK - 1) / BLOCK, length = row_length(p);
  for (int64_t item = begin; item < end; item++) {
    const int64_t i = item % blocks;
    const query_block b = block_at(p, item / blocks, i % 2 ? blocks - 1 - i / 2 : i / 2);
    elem *y = job->out + b.y;
    make_scores(job, &b, scores, scratch + job->scratch.gemm);
    for (int64_t r = 0; r < b.rows; r++)
      factor[r] = softmax_row(job, &b, r, scores + r * length, scratch);
    product(job, scratch + job->scratch.gemm, b.rows, p->value_dim, b.cols,
            (omc_matrix){scores, length, 1},
            by_rows(job->v + b.v, p->v.token),
            by_rows(y, p->y.token), 1, 0);
    for (int64_t r = 0; r < b.rows; r++)
      for (int64_t k = 0; k < p->value_dim; k++)
        st(y + r * p->y.token + k, ld(y + r * p->y.token + k) * factor[r]);
  }
}

OMC_KERNEL(Attention) {
  const attention_params *p = args->params;
  attention_job job = make_job(args, 1);
  job.q = omc_in_data(args, 0), job.k = omc_in_data(args, 1), job.v = omc_in_data(args, 2);
  job.mask = omc_in_data(args, 3);
  job.out = omc_out_data(args, 0), job.lse = omc_out_data(args, 1);
  omc_parallel_for(p->batch * p->heads * ((p->queries + BLOCK - 1) / BLOCK), 1, args->threads,
                   forward_blocks, &job);
  return OMC_OK;
}

/* Turns row r's scores into the probabilities that made y, and its gradients of probabilities
 * into gradients of scores, P * (dP - delta) with delta = sum of dy * y. */
static void softmax_grad_row(const attention_job *job, const query_block *b, int64_t r, real *s,
                             real *ds, char *scratch) {
  const int64_t dim = job->p->value_dim, query = b->query + r;
  const int64_t at = b->y + r * job->p->y.token;
  const elem *y = job->y + at, *dy = job->dy + at;
  const vreal delta = vset(OMC_ROW_SUM(dim, vld_fill(y + k, left, 0) * vld_fill(dy + k, left, 0)));
  const vreal lse = vset(job->lse[query]);
  const int64_t whole = (b->cols + OMC_VL - 1) / OMC_VL * OMC_VL;
  if (job->p->p <= 0) {
    for (int64_t k = 0; k < whole; k += OMC_VL) {
      const vreal prob = vexp(vldr(s + k) - lse);
      vstr(s + k, prob);
      vstr(ds + k, prob * (vldr(ds + k) - delta));
    }
    return;
  }
  const uint32_t *words = drop_words(job, query, b->cols, scratch);
  for (int64_t k = 0; k < whole; k += OMC_VL) vstr(s + k, vexp(vldr(s + k) - lse));
  for (int64_t k = 0; k < b->cols; k++) {
    const real keep = words[k] < job->drop_below ? 0 : job->keep_scale;
    ds[k] = s[k] * (ds[k] * keep - delta[0]);
    s[k] *= keep;
  }
}

/* Adds one block of query rows to dk and dv and writes its rows of dq. */
static void backward_block(const attention_job *job, const query_block *b, char *scratch) {
  const attention_params *p = job->p;
  const int64_t length = row_length(p), dim = p->dim, value_dim = p->value_dim;
  real *probs = (real *)(void *)(scratch + job->scratch.table[0]);
  real *grads = (real *)(void *)(scratch + job->scratch.table[1]);
  void *workspace = scratch + job->scratch.gemm;
  const omc_matrix q = by_rows(job->q + b->q, p->q.token),
                   dq = by_rows(job->dq + b->q, p->q.token),
                   k = by_rows(job->k + b->k, p->k.token),
                   dk = by_rows(job->dk + b->k, p->k.token),
                   v_t = transposed(job->v + b->v, p->v.token),
                   dv = by_rows(job->dv + b->v, p->v.token),
                   dy = by_rows(job->dy + b->y, p->y.token);
  make_scores(job, b, probs, workspace);
  product(job, workspace, b->rows, b->cols, value_dim, dy, v_t, (omc_matrix){grads, length, 1}, 1,
          0);
  for (int64_t r = 0; r < b->rows; r++)
    softmax_grad_row(job, b, r, probs + r * length, grads + r * length, scratch);
  product(job, workspace, b->cols, value_dim, b->rows, transposed(probs, length), dy, dv, 1, 1);
  product(job, workspace, b->rows, dim, b->cols, by_rows(grads, length), k, dq, p->scale, 0);
  product(job, workspace, b->cols, dim, b->rows, transposed(grads, length), q, dk, p->scale, 1);
}

/* Items are heads of keys and values: dk and dv gather the query heads of their group in order. */
static void backward_heads(int64_t begin, int64_t end, int thread, void *ctx) {
  const attention_job *job = ctx;
  const attention_params *p = job->p;
  char *scratch = job->workspace + (size_t)thread * job->scratch.total;
  const int64_t group = p->heads / p->kv_heads, blocks = (p->queries + BLOCK - 1) / BLOCK;
  for (int64_t kv = begin; kv < end; kv++) {
    elem *dk = job->dk + head_at(&p->k, p->kv_heads, kv);
    elem *dv = job->dv + head_at(&p->v, p->kv_heads, kv);
    for (int64_t j = 0; j < p->keys; j++) {
      memset(dk + j * p->k.token, 0, (size_t)p->dim * sizeof(elem));
      memset(dv + j * p->v.token, 0, (size_t)p->value_dim * sizeof(elem));
    }
    for (int64_t h = kv * group; h < (kv + 1) * group; h++)
      for (int64_t i = 0; i < blocks; i++) {
        const query_block b = block_at(p, h, i);
        backward_block(job, &b, scratch);
      }
  }
}

/* Inputs: dy, q, k, v, y, lse, mask?. */
OMC_KERNEL(AttentionGrad) {
  const attention_params *p = args->params;
  attention_job job = make_job(args, 2);
  job.dy = omc_in_data(args, 0);
  job.q = omc_in_data(args, 1), job.k = omc_in_data(args, 2), job.v = omc_in_data(args, 3);
  job.y = omc_in_data(args, 4), job.lse = args->in[5].data, job.mask = omc_in_data(args, 6);
  job.dq = omc_out_data(args, 0), job.dk = omc_out_data(args, 1), job.dv = omc_out_data(args, 2);
  omc_parallel_for(p->batch * p->kv_heads, 1, args->threads, backward_heads, &job);
  return OMC_OK;
}

#endif

#ifdef OMC_RECORDS

#include <math.h>

enum { Q, K, V, Y, N_LAYOUTS };

/* The axes of heads of q, k, v and y; false: not four of 1 and 2. */
static bool read_head_axes(const omc_node *node, int64_t axes[N_LAYOUTS]) {
  uint32_t n;
  const int64_t *given = omc_attr_ints(node, "head_axes", &n);
  if (n != 0 && n != N_LAYOUTS) return false;
  for (int i = 0; i < N_LAYOUTS; i++) {
    axes[i] = n ? given[i] : 1;
    if (axes[i] != 1 && axes[i] != 2) return false;
  }
  return true;
}

/* Axes 1 and 2 of a shape in the order heads, tokens, whichever order they are in. */
static omc_shape by_heads(const omc_shape *shape, int64_t head_axis) {
  omc_shape s = *shape;
  s.dims[1] = shape->dims[head_axis];
  s.dims[2] = shape->dims[3 - head_axis];
  return s;
}

static head_strides strides_of(const omc_shape *shape, int64_t head_axis) {
  const int64_t inner = shape->dims[2] * shape->dims[3], last = shape->dims[3];
  return (head_strides){.sample = shape->dims[1] * inner,
                        .head = head_axis == 1 ? inner : last,
                        .token = head_axis == 1 ? last : inner};
}

static double default_scale(const omc_value *q) { return 1 / sqrt((double)q->type.shape.dims[3]); }

static omc_status misfit(const omc_node *node, const char *what, const omc_value *v) {
  char text[OMC_NODE_TEXT], type[OMC_TYPE_TEXT], q[OMC_TYPE_TEXT];
  const uint32_t first = node->op == OMC_OP_AttentionGrad ? 1 : 0;
  OMC_FAIL(ESHAPE, "%s: %s %s does not fit queries %s", omc_node_text(node, text, sizeof text),
           what, omc_type_text(&v->type, type, sizeof type),
           omc_type_text(&omc_in(node, first)->type, q, sizeof q));
}

/* Reads attributes and shapes. q, k, v are the inputs from `first` on, the mask input `mask`. */
static omc_status check(const omc_node *node, uint32_t first, uint32_t mask, attention_params *p) {
  char text[OMC_NODE_TEXT];
  OMC_TRY(omc_need_float(node, first));
  const omc_value *q = omc_in(node, first), *k = omc_in(node, first + 1),
                  *v = omc_in(node, first + 2), *m = omc_in(node, mask);
  for (uint32_t i = first; i < first + 3; i++) {
    OMC_TRY(omc_need_rank(node, i, 4));
    OMC_TRY(omc_need_dtype(node, i, q->type.dtype));
  }
  int64_t axes[N_LAYOUTS];
  if (!read_head_axes(node, axes))
    OMC_FAIL(EINVALID, "%s: head_axes are not four of 1 and 2",
             omc_node_text(node, text, sizeof text));
  const omc_shape q_shape = by_heads(&q->type.shape, axes[Q]),
                  k_shape = by_heads(&k->type.shape, axes[K]),
                  v_shape = by_heads(&v->type.shape, axes[V]);
  const int64_t *qd = q_shape.dims, *kd = k_shape.dims, *vd = v_shape.dims;
  if (kd[0] != qd[0] || kd[3] != qd[3] || kd[1] < 1 || qd[1] % kd[1] != 0)
    return misfit(node, "keys", k);
  if (vd[0] != kd[0] || vd[1] != kd[1] || vd[2] != kd[2]) return misfit(node, "values", v);
  *p = (attention_params){.batch = qd[0],
                          .heads = qd[1],
                          .kv_heads = kd[1],
                          .queries = qd[2],
                          .keys = kd[2],
                          .dim = qd[3],
                          .value_dim = vd[3],
                          .q = strides_of(&q->type.shape, axes[Q]),
                          .k = strides_of(&k->type.shape, axes[K]),
                          .v = strides_of(&v->type.shape, axes[V]),
                          .dtype = q->type.dtype,
                          .scale = omc_attr_float(node, "scale", default_scale(q)),
                          .p = omc_attr_float(node, "p", 0),
                          .stream = (uint32_t)omc_attr_int(node, "stream", 0),
                          .causal = omc_attr_int(node, "is_causal", 0) != 0};
  if (!(p->p >= 0 && p->p <= 1))
    OMC_FAIL(EINVALID, "%s: p = %g is not within 0..1", omc_node_text(node, text, sizeof text),
             p->p);
  p->y_shape = by_heads(&(omc_shape){4, {p->batch, p->heads, p->queries, p->value_dim}}, axes[Y]);
  p->y = strides_of(&p->y_shape, axes[Y]);
  if (!m) return OMC_OK;
  const omc_shape full = {4, {p->batch, p->heads, p->queries, p->keys}};
  omc_shape both;
  if (m->type.dtype != OMC_BOOL && m->type.dtype != p->dtype) return misfit(node, "mask", m);
  OMC_TRY(
      omc_shape_broadcast(&m->type.shape, &full, omc_node_text(node, text, sizeof text), &both));
  if (!omc_shape_equal(&both, &full)) return misfit(node, "mask", m);
  p->mask_is_bool = m->type.dtype == OMC_BOOL;
  omc_broadcast_strides(&m->type.shape, &full, p->mask_strides);
  return OMC_OK;
}

static omc_status forward_infer(omc_node *node) {
  attention_params p;
  OMC_TRY(check(node, 0, 3, &p));
  const omc_shape lse = {3, {p.batch, p.heads, p.queries}};
  omc_set_type(node, 0, p.dtype, &p.y_shape);
  omc_set_type(node, 1, omc_dtype_real(p.dtype), &lse);
  return OMC_OK;
}

static omc_status backward_infer(omc_node *node) {
  attention_params p;
  OMC_TRY(check(node, 1, 6, &p));
  const omc_type y = {p.dtype, p.y_shape};
  const omc_type lse = {omc_dtype_real(p.dtype), {3, {p.batch, p.heads, p.queries}}};
  if (!omc_type_equal(&omc_in(node, 0)->type, &y)) return misfit(node, "dy", omc_in(node, 0));
  if (!omc_type_equal(&omc_in(node, 4)->type, &y)) return misfit(node, "y", omc_in(node, 4));
  if (!omc_type_equal(&omc_in(node, 5)->type, &lse)) return misfit(node, "lse", omc_in(node, 5));
  for (uint32_t i = 0; i < 3; i++) omc_set_type(node, i, p.dtype, &omc_in(node, i + 1)->type.shape);
  return OMC_OK;
}

static omc_status forward_params(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  return check(node, 0, 3, params);
}
static omc_status backward_params(const omc_node *node, omc_arena *arena, void *params) {
  (void)arena;
  return check(node, 1, 6, params);
}

static size_t forward_workspace(const omc_node *node, const void *params, int threads) {
  (void)node;
  return scratch_of(params, 1).total * (size_t)threads;
}
static size_t backward_workspace(const omc_node *node, const void *params, int threads) {
  (void)node;
  return scratch_of(params, 2).total * (size_t)threads;
}

/* x with its heads at axis 1. */
static omc_value *heads_first(omc_builder *b, omc_value *x, int64_t head_axis) {
  const int64_t swapped[] = {0, 2, 1, 3};
  return x && head_axis == 2 ? omc_transpose(b, x, swapped) : x;
}

/* k or v with its heads repeated for the query heads of their group. */
static omc_value *each_query_head(omc_builder *b, omc_value *x, int64_t heads) {
  if (!x || x->type.shape.dims[1] == heads) return x;
  const int64_t *d = x->type.shape.dims;
  const omc_shape one = {5, {d[0], d[1], 1, d[2], d[3]}};
  const omc_shape each = {5, {d[0], d[1], heads / d[1], d[2], d[3]}};
  const omc_shape all = {4, {d[0], heads, d[2], d[3]}};
  return omc_reshape(b, omc_expand(b, omc_reshape(b, x, &one), &each), &all);
}

static omc_value *product_t(omc_builder *b, omc_value *x, omc_value *y, double alpha) {
  omc_value *in[] = {x, y};
  const omc_attr attr[] = {omc_ai("transB", 1), omc_af("alpha", alpha)};
  return omc_bn(b, OMC_OP_FusedMatMul, 2, in, 2, attr);
}

/* The gradient of an added mask is that of the scores, P * (dP - delta). Few models train one, so
 * it is made of plain ops and does hold T x S elements. */
static omc_value *mask_gradient(const omc_grad *g, omc_builder *b) {
  const omc_node *node = g->node;
  int64_t axes[N_LAYOUTS] = {0};
  read_head_axes(node, axes);
  omc_value *q = heads_first(b, omc_in(node, 0), axes[Q]);
  omc_value *k = heads_first(b, omc_in(node, 1), axes[K]);
  omc_value *v = heads_first(b, omc_in(node, 2), axes[V]);
  omc_value *y = heads_first(b, omc_out(node, 0), axes[Y]);
  omc_value *dy = heads_first(b, g->dout[0], axes[Y]), *lse = omc_out(node, 1);
  if (b->status != OMC_OK) return NULL;
  const int64_t heads = q->type.shape.dims[1], last[] = {-1};
  const double scale = omc_attr_float(node, "scale", default_scale(q));
  omc_shape column = lse->type.shape;
  column.dims[column.rank++] = 1;

  omc_value *scores = product_t(b, q, each_query_head(b, k, heads), scale);
  scores = omc_b2(b, OMC_OP_Add, scores, omc_in(node, 3));
  scores = omc_b2(b, OMC_OP_Sub, scores, omc_reshape(b, lse, &column));
  omc_value *probs = omc_b1(b, OMC_OP_Exp, scores);
  const omc_attr lower = omc_ai("upper", 0);
  if (omc_attr_int(node, "is_causal", 0)) probs = omc_bn(b, OMC_OP_Trilu, 1, &probs, 1, &lower);

  omc_value *dprobs = product_t(b, dy, each_query_head(b, v, heads), 1);
  const double p = omc_attr_float(node, "p", 0);
  const omc_attr dropout[] = {omc_af("p", p), omc_ai("stream", omc_attr_int(node, "stream", 0))};
  if (p > 0) dprobs = omc_bn(b, OMC_OP_Dropout, 1, &dprobs, 2, dropout);
  omc_value *delta = omc_reduce_sum(b, omc_b2(b, OMC_OP_Mul, dy, y), last, 1, true);
  return omc_b2(b, OMC_OP_Mul, probs, omc_b2(b, OMC_OP_Sub, dprobs, delta));
}

static omc_status forward_grad(omc_grad *g) {
  const omc_node *node = g->node;
  OMC_TRY(omc_need_saved(g, 2));
  if (!g->dout[0]) return OMC_OK;
  omc_value *in[] = {g->dout[0],       omc_in(node, 0),  omc_in(node, 1), omc_in(node, 2),
                     omc_out(node, 0), omc_out(node, 1), omc_in(node, 3)};
  omc_build(&g->b, OMC_OP_AttentionGrad, in[6] ? 7 : 6, in, 0, node->n_attr, node->attr, 3, g->din);
  if (in[6] && g->needs[3]) g->din[3] = mask_gradient(g, &g->b);
  return g->b.status;
}

OMC_KERNELS(Attention)
const omc_op omc_op_Attention = {.name = "Attention",
                                 .min_in = 3,
                                 .max_in = 4,
                                 .n_out = 2,
                                 .flags = OMC_OP_RANDOM,
                                 .infer = forward_infer,
                                 .grad = forward_grad,
                                 .params_size = sizeof(attention_params),
                                 .params = forward_params,
                                 .workspace = forward_workspace,
                                 .cpu = &omc_kernels_Attention};

OMC_KERNELS(AttentionGrad)
const omc_op omc_op_AttentionGrad = {.name = "AttentionGrad",
                                     .min_in = 6,
                                     .max_in = 7,
                                     .n_out = 3,
                                     .flags = OMC_OP_RANDOM,
                                     .infer = backward_infer,
                                     .params_size = sizeof(attention_params),
                                     .params = backward_params,
                                     .workspace = backward_workspace,
                                     .cpu = &omc_kernels_AttentionGrad};

#endif
