/* GEMM against sums of exact products in double, on every instruction set: each dtype and mixture
 * of them, sizes around those of tiles and blocks, operands however they lie. */
#include "harness.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/element.h"
#include "base/int.h"
#include "cpu/gemm.h"
#include "cpu/kernel.h"

/* What the operands and C are stored in. */
typedef struct {
  const char *name;
  omc_dtype a, a_as, b, b_as, c;
} mixture;

static const mixture mixtures[] = {
    {"f32", OMC_F32, OMC_F32, OMC_F32, OMC_F32, OMC_F32},
    {"f64", OMC_F64, OMC_F64, OMC_F64, OMC_F64, OMC_F64},
    {"bf16", OMC_BF16, OMC_BF16, OMC_BF16, OMC_BF16, OMC_BF16},
    {"f16", OMC_F16, OMC_F16, OMC_F16, OMC_F16, OMC_F16},
    {"bf16 to f32", OMC_BF16, OMC_F32, OMC_BF16, OMC_F32, OMC_F32},
    {"f32 and bf16", OMC_F32, OMC_F32, OMC_BF16, OMC_F32, OMC_BF16},
    {"f32 as bf16, bf16", OMC_F32, OMC_BF16, OMC_BF16, OMC_F32, OMC_BF16},
    {"bf16, f32 as bf16", OMC_BF16, OMC_F32, OMC_F32, OMC_BF16, OMC_F32},
    {"f32 as bf16", OMC_F32, OMC_BF16, OMC_F32, OMC_BF16, OMC_BF16},
    {"f16, f32 as f16", OMC_F16, OMC_F32, OMC_F32, OMC_F16, OMC_F16},
    {"f32 to f16", OMC_F32, OMC_F32, OMC_F32, OMC_F32, OMC_F16},
};
enum { N_MIXTURES = sizeof mixtures / sizeof *mixtures };

typedef enum { BY_ROWS, BY_COLUMNS, STRIDED, N_LAYOUTS } layout;

typedef struct {
  int64_t m, n, k;
  layout a, b;
  double alpha, beta;
  bool bias, row_bias;
} problem;

static uint64_t state;
static double uniform(void) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (double)(state >> 40) * 0x1p-23 - 1;
}
/* -4, -3, .. 4: sums of products and their halves are exact in every type that is computed in. */
static double small(void) { return (double)(int)(uniform() * 4.99); }

enum { FENCE = 3 /* elements between the rows of C */ };

/* Not a byte more than the matrix has, and after it `fence` elements. */
static size_t matrix_bytes(const omc_matrix *x, int64_t rows, int64_t cols, int64_t fence) {
  const bool any = rows > 0 && cols > 0;
  const int64_t last = any ? (rows - 1) * x->rs + (cols - 1) * x->cs : 0;
  return (size_t)(last + 1 + fence) * omc_dtype_size(x->dtype);
}

static omc_matrix make_matrix(int64_t rows, int64_t cols, omc_dtype dtype, omc_dtype as, layout l,
                              int64_t fence, double (*next)(void)) {
  omc_matrix x = {.dtype = dtype, .read_as = as};
  x.rs = l == BY_ROWS ? cols + FENCE : l == BY_COLUMNS ? 1 : 2 * cols + 1;
  x.cs = l == BY_ROWS ? 1 : l == BY_COLUMNS ? rows + 1 : 2;
  x.data = calloc(1, matrix_bytes(&x, rows, cols, fence));
  for (int64_t i = 0; x.data && i < rows; i++)
    for (int64_t j = 0; j < cols; j++)
      omc_element_set_float(dtype, x.data, i * x.rs + j * x.cs, next());
  return x;
}

/* The number that is multiplied. */
static double read_element(const omc_matrix *x, int64_t i, int64_t j) {
  double value = omc_element_float(x->dtype, x->data, i * x->rs + j * x->cs);
  if (x->dtype == OMC_F32 && (x->read_as == OMC_BF16 || x->read_as == OMC_F16)) {
    uint16_t rounded;
    omc_element_set_float(x->read_as, &rounded, 0, value);
    value = omc_element_float(x->read_as, &rounded, 0);
  }
  return value;
}

static double rounded_to(omc_dtype dtype, double x) {
  uint64_t bits;
  omc_element_set_float(dtype, &bits, 0, x);
  return omc_element_float(dtype, &bits, 0);
}

static double step_of(omc_dtype d) {
  return d == OMC_F64 ? DBL_EPSILON : d == OMC_F32 ? FLT_EPSILON : d == OMC_F16 ? 0x1p-10 : 0x1p-7;
}

typedef struct {
  omc_gemm_args g;
  void *before; /* C's memory */
  size_t c_bytes;
} case_data;

static case_data make_case(const problem *p, const mixture *x, double (*next)(void)) {
  case_data d = {.g = {.m = p->m, .n = p->n, .k = p->k, .alpha = p->alpha, .beta = p->beta}};
  d.g.a = make_matrix(p->m, p->k, x->a, x->a_as, p->a, 0, next);
  d.g.b = make_matrix(p->k, p->n, x->b, x->b_as, p->b, 0, next);
  d.g.c = make_matrix(p->m, p->n, x->c, OMC_F32, BY_ROWS, FENCE, next);
  if (p->bias) d.g.bias = make_matrix(1, p->n, x->c, OMC_F32, BY_ROWS, 0, next).data;
  if (p->row_bias) d.g.row_bias = make_matrix(1, p->m, x->c, OMC_F32, BY_ROWS, 0, next).data;
  d.c_bytes = matrix_bytes(&d.g.c, p->m, p->n, FENCE);
  d.before = malloc(d.c_bytes);
  if (d.before && d.g.c.data) memcpy(d.before, d.g.c.data, d.c_bytes);
  return d;
}

static void free_case(case_data *d) {
  free(d->g.a.data), free(d->g.b.data), free(d->g.c.data), free(d->before);
  free((void *)(uintptr_t)d->g.bias), free((void *)(uintptr_t)d->g.row_bias);
}

/* Memory of exactly as many bytes as the product asks for. */
static void multiply(const omc_gemm_args *g, int threads) {
  const omc_dtype narrowest = g->c.dtype;
  void *workspace = aligned_alloc(64, omc_gemm_workspace(narrowest, g->m, g->n, g->k, threads));
  if (CHECK(workspace)) omc_gemm(g, threads, workspace);
  free(workspace);
}

/* The result in exact arithmetic, and the sum of the magnitudes of what is added. */
static double reference(const case_data *d, int64_t i, int64_t j, double *magnitude) {
  const omc_gemm_args *g = &d->g;
  double sum = 0, size = 0;
  for (int64_t x = 0; x < g->k; x++) {
    const double product = read_element(&g->a, i, x) * read_element(&g->b, x, j);
    sum += product, size += fabs(product);
  }
  const double c = g->beta != 0 ? omc_element_float(g->c.dtype, d->before, i * g->c.rs + j) : 0;
  const double bias = g->bias ? omc_element_float(g->c.dtype, g->bias, j) : 0;
  const double row_bias = g->row_bias ? omc_element_float(g->c.dtype, g->row_bias, i) : 0;
  *magnitude = fabs(g->alpha) * size + fabs(g->beta * c) + fabs(bias) + fabs(row_bias);
  return g->alpha * sum + g->beta * c + bias + row_bias;
}

/* Whether every element is right: to the bit if `exact`, else within the bound of a sum in the type
 * computed in, rounded once; and whether nothing else was written. */
static bool is_right(const case_data *d, bool exact) {
  const omc_gemm_args *g = &d->g;
  const omc_dtype dtype = g->c.dtype;
  const size_t size = omc_dtype_size(dtype);
  for (int64_t i = 0; i < g->m; i++) {
    for (int64_t j = 0; j < g->n; j++) {
      double magnitude;
      const double want = reference(d, i, j, &magnitude);
      const double got = omc_element_float(dtype, g->c.data, i * g->c.rs + j);
      const double sum_error = (double)(g->k + 4) * step_of(omc_dtype_acc(dtype)) * magnitude;
      const double error = sum_error + step_of(dtype) * (fabs(want) + sum_error) + 0x1p-24;
      if (exact ? got != rounded_to(dtype, want) : !(fabs(got - want) <= error)) return false;
    }
    const size_t end = (size_t)(i * g->c.rs + g->n) * size;
    if (memcmp((char *)g->c.data + end, (char *)d->before + end, FENCE * size) != 0) return false;
  }
  return true;
}

static void check(const problem *p, const mixture *x, bool exact) {
  case_data d = make_case(p, x, exact ? small : uniform);
  if (CHECK(d.g.a.data && d.g.b.data && d.g.c.data && d.before)) {
    multiply(&d.g, 1);
    if (!CHECK(is_right(&d, exact)))
      printf("  %s: m %d n %d k %d, layouts %d %d, alpha %g beta %g, bias %d %d, %s, isa %d\n",
             x->name, (int)p->m, (int)p->n, (int)p->k, (int)p->a, (int)p->b, p->alpha, p->beta,
             p->bias, p->row_bias, exact ? "exact" : "within rounding", (int)omc_cpu_isa());
  }
  free_case(&d);
}

/* Runs `body` with kernels bounded by each instruction set that there is. */
#define ON_EVERY_ISA(body)                           \
  do {                                               \
    omc_cpu_set_isa(OMC_N_ISA);                      \
    const omc_isa most_ = omc_cpu_isa();             \
    for (int isa_ = 0; isa_ <= (int)most_; isa_++) { \
      omc_cpu_set_isa((omc_isa)isa_);                \
      body                                           \
    }                                                \
    omc_cpu_set_isa(OMC_N_ISA);                      \
  } while (0)

static void check_sizes(void) {
  static const int64_t ms[] = {1, 3, 14, 15, 16, 17, 43}, ns[] = {1, 7, 16, 17, 31, 32, 75},
                       ks[] = {0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 65, 129};
  int round = 0;
  for (size_t m = 0; m < sizeof ms / sizeof *ms; m++)
    for (size_t n = 0; n < sizeof ns / sizeof *ns; n++)
      for (size_t k = 0; k < sizeof ks / sizeof *ks; k++, round++) {
        const problem p = {ms[m],
                           ns[n],
                           ks[k],
                           (layout)(round % N_LAYOUTS),
                           (layout)(round / N_LAYOUTS % N_LAYOUTS),
                           round % 2 ? 1 : 0.5,
                           (round % 5 - 1) * 0.5,
                           round % 4 > 1,
                           round % 3 == 0};
        check(&p, &mixtures[round % N_MIXTURES], true);
        check(&p, &mixtures[(round + 2) % N_MIXTURES], false);
      }
}
TEST(gemm_of_any_size) { ON_EVERY_ISA(check_sizes();); }

/* Several blocks of K, of M and of N. */
static void check_blocks(void) {
  static const problem problems[] = {
      {5, 40, 2049, BY_ROWS, BY_COLUMNS, 1, 0, true, false},
      {29, 33, 1537, BY_COLUMNS, BY_ROWS, 1, 1, false, true},
      {400, 9, 770, BY_ROWS, BY_ROWS, 0.5, -0.5, true, true},
      {2, 1100, 779, BY_COLUMNS, BY_COLUMNS, 1, 2, true, false},
      {1, 1, 3073, STRIDED, STRIDED, 1, 0, false, false},
  };
  for (size_t i = 0; i < sizeof problems / sizeof *problems; i++)
    for (int x = 0; x < N_MIXTURES; x++) check(&problems[i], &mixtures[x], x % 2 == 0);
}
TEST(gemm_of_many_blocks) { ON_EVERY_ISA(check_blocks();); }

/* More rows than are summed up apart at a time. */
static void check_tall(void) {
  const problem p = {1500, 1024, 1550, BY_ROWS, BY_ROWS, 1, 1, true, true};
  case_data d = make_case(&p, &mixtures[2], small);
  REQUIRE(d.g.a.data && d.g.b.data && d.g.c.data && d.before);
  multiply(&d.g, 1);
  bool right = true;
  for (int64_t i = 0; i < p.m; i += 7)
    for (int64_t j = i % 13; j < p.n; j += 101) {
      double magnitude;
      const double want = reference(&d, i, j, &magnitude);
      right &=
          omc_element_float(OMC_BF16, d.g.c.data, i * d.g.c.rs + j) == rounded_to(OMC_BF16, want);
    }
  CHECK(right);
  free_case(&d);
}
TEST(gemm_of_many_rows) { ON_EVERY_ISA(check_tall();); }

/* Threads cut C into rectangles; of rows from `first` on alone a product is cut otherwise still. */
static void check_cut(const problem *p, const mixture *x, int64_t first, int64_t rows) {
  case_data d = make_case(p, x, uniform);
  REQUIRE(d.g.a.data && d.g.b.data && d.g.c.data && d.before);
  multiply(&d.g, 1);
  memcpy(d.before, d.g.c.data, d.c_bytes);
  for (int threads = 2; threads <= 5; threads++) {
    multiply(&d.g, threads);
    CHECK(memcmp(d.before, d.g.c.data, d.c_bytes) == 0);
  }
  omc_gemm_args part = d.g;
  const size_t size = omc_dtype_size(d.g.c.dtype), from = (size_t)first;
  part.m = rows;
  part.a.data = (char *)d.g.a.data + from * (size_t)d.g.a.rs * omc_dtype_size(d.g.a.dtype);
  part.c.data = (char *)d.g.c.data + from * (size_t)d.g.c.rs * size;
  part.row_bias = (const char *)d.g.row_bias + from * size;
  multiply(&part, 1);
  CHECK(memcmp(d.before, d.g.c.data, d.c_bytes) == 0);
  free_case(&d);
}

/* Products of few rows, or columns, sum along K in another order than those of many. */
static void check_cuts(void) {
  static const problem many = {61, 150, 1061, BY_ROWS, BY_COLUMNS, 1, 0, true, true},
                       few_rows = {13, 150, 1061, BY_ROWS, BY_COLUMNS, 1, 0, true, true},
                       few_columns = {61, 13, 1061, BY_ROWS, BY_COLUMNS, 1, 0, true, true};
  for (int x = 0; x < N_MIXTURES; x++) {
    check_cut(&many, &mixtures[x], 37, 18);
    check_cut(&few_rows, &mixtures[x], 7, 1);
    check_cut(&few_columns, &mixtures[x], 37, 1);
    check_cut(&few_columns, &mixtures[x], 30, 18);
  }
}
TEST(gemm_does_not_depend_on_how_it_is_cut) { ON_EVERY_ISA(check_cuts();); }

/* A product by the part of B from a row and a column on, of which B was packed, or was not. */
static void check_part(const problem *p, const mixture *x, int64_t row, int64_t rows, int64_t col,
                       int64_t cols) {
  case_data d = make_case(p, x, uniform);
  const omc_dtype dtype = d.g.c.dtype;
  void *panels = aligned_alloc(64, omc_gemm_packed_bytes(dtype, p->n, p->k));
  void *workspace = aligned_alloc(64, omc_gemm_workspace(dtype, p->m, cols, rows, 1));
  void *want = malloc(d.c_bytes);
  REQUIRE(d.g.a.data && d.g.b.data && d.g.c.data && d.before && panels && workspace && want);
  omc_gemm_pack(&d.g, panels);
  omc_gemm_args part = d.g;
  part.k = rows, part.n = cols;
  part.b.data =
      (char *)d.g.b.data + (row * d.g.b.rs + col * d.g.b.cs) * (int64_t)omc_dtype_size(d.g.b.dtype);
  omc_gemm_serial_part(&part, workspace);
  memcpy(want, d.g.c.data, d.c_bytes);
  memcpy(d.g.c.data, d.before, d.c_bytes);
  part.b.data = NULL;
  part.b_packed = (omc_packed){panels, p->k, row, col};
  omc_gemm_serial_part(&part, workspace);
  CHECK(memcmp(want, d.g.c.data, d.c_bytes) == 0);
  free(panels), free(workspace), free(want);
  free_case(&d);
}

static void check_parts(void) {
  for (int x = 0; x < N_MIXTURES; x++)
    for (layout l = BY_ROWS; l < N_LAYOUTS; l++) {
      const problem small_one = {9, 75, 71, BY_ROWS, l, 1, 0.5, true, true};
      const problem large = {200, 1100, 1601, BY_ROWS, l, -0.5, 0, false, false};
      check_part(&small_one, &mixtures[x], 0, 71, 0, 75);
      check_part(&small_one, &mixtures[x], 32, 39, 64, 11);
      check_part(&small_one, &mixtures[x], 0, 64, 32, 17);
      check_part(&large, &mixtures[x], 64, 1537, 32, 1060);
    }
}
TEST(gemm_by_parts_of_what_is_packed) { ON_EVERY_ISA(check_parts();); }

/* A part of a product has room where the whole has. */
TEST(gemm_workspace_does_not_shrink) {
  static const int64_t rows[] = {1, 100, 61681, 70000}, depths[] = {1, 768, 769, 5000};
  static const omc_dtype dtypes[] = {OMC_F32, OMC_F64, OMC_BF16, OMC_F16};
  for (size_t t = 0; t < sizeof dtypes / sizeof *dtypes; t++)
    for (size_t i = 0; i < 4; i++)
      for (size_t k = 0; k < 4; k++) {
        size_t before = 0;
        for (int64_t n = 1; n < 1200; n++) {
          const size_t now = omc_gemm_workspace(dtypes[t], rows[i], n, depths[k], 1);
          CHECK(before <= now);
          before = now;
        }
      }
}

/* NaN and infinity stay in their row and column, and sums that are too large become infinite. */
static void check_specials(void) {
  const problem p = {17, 33, 35, BY_ROWS, BY_COLUMNS, 1, 0, false, false};
  for (int x = 0; x < N_MIXTURES; x++) {
    const mixture *mix = &mixtures[x];
    case_data d = make_case(&p, mix, small);
    REQUIRE(d.g.a.data && d.g.b.data && d.g.c.data && d.before);
    const double huge = mix->c == OMC_F64                        ? 0x1p1000
                        : mix->a == OMC_F16 || mix->b == OMC_F16 ? 0x1p15
                                                                 : 0x1p120;
    for (int64_t k = 0; k < p.k; k++) {
      omc_element_set_float(mix->a, d.g.a.data, 7 * d.g.a.rs + k, 0);
      omc_element_set_float(mix->a, d.g.a.data, 9 * d.g.a.rs + k, -huge);
      omc_element_set_float(mix->b, d.g.b.data, k + 5 * d.g.b.cs, huge);
    }
    omc_element_set_float(mix->a, d.g.a.data, 3 * d.g.a.rs + 34, NAN);
    omc_element_set_float(mix->b, d.g.b.data, 11 + 20 * d.g.b.cs, -INFINITY);
    omc_element_set_float(mix->a, d.g.a.data, 1 * d.g.a.rs + 11, 2);
    multiply(&d.g, 1);
    const bool finite = d.g.c.dtype == OMC_F32 && huge == 0x1p15;
    for (int64_t j = 0; j < p.n; j++) {
      CHECK(isnan(omc_element_float(mix->c, d.g.c.data, 3 * d.g.c.rs + j)));
      const double zero = omc_element_float(mix->c, d.g.c.data, 7 * d.g.c.rs + j);
      CHECK(j == 20 ? isnan(zero) : zero == 0);
    }
    CHECK_FLOAT(omc_element_float(mix->c, d.g.c.data, 1 * d.g.c.rs + 20), -INFINITY);
    if (!finite) CHECK_FLOAT(omc_element_float(mix->c, d.g.c.data, 9 * d.g.c.rs + 5), -INFINITY);
    CHECK(isfinite(omc_element_float(mix->c, d.g.c.data, 0)));
    free_case(&d);
  }
}
TEST(gemm_of_numbers_that_are_none) { ON_EVERY_ISA(check_specials();); }
