/* A stand-in for cuBLASLt: it says what is wrong with descriptors, pointers and memory that it is
 * given, and computes on the host what they describe, in their stream. Where the library is silent
 * it is strict: what a plan was found for must be what it is used for. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <map>
#include <string>

#define OMC_EMULATED
#include "cuda/gpu/numbers.h"
#include "emulated.h"

namespace {

enum status {
  SUCCESS = 0,
  NOT_INITIALIZED = 1,
  ALLOC_FAILED = 3,
  INVALID_VALUE = 7,
  EXECUTION_FAILED = 13,
  NOT_SUPPORTED = 15
};
const std::map<int, std::pair<const char *, const char *>> statuses = {
    {SUCCESS, {"CUBLAS_STATUS_SUCCESS", "success"}},
    {NOT_INITIALIZED, {"CUBLAS_STATUS_NOT_INITIALIZED", "the library was not initialized"}},
    {ALLOC_FAILED, {"CUBLAS_STATUS_ALLOC_FAILED", "the resource allocation failed"}},
    {INVALID_VALUE,
     {"CUBLAS_STATUS_INVALID_VALUE", "an unsupported value or parameter was passed"}},
    {EXECUTION_FAILED, {"CUBLAS_STATUS_EXECUTION_FAILED", "the function failed to launch"}},
    {NOT_SUPPORTED, {"CUBLAS_STATUS_NOT_SUPPORTED", "the functionality is not supported"}},
};

enum { F32 = 0, F64 = 1, F16 = 2, BF16 = 14 };
enum { COMPUTE_F32 = 68, COMPUTE_F64 = 70, COMPUTE_TF32 = 77 };
enum { EPILOGUE_DEFAULT = 1, EPILOGUE_BIAS = 4 };
enum { OP = 0x0B0B, LAYOUT = 0x1A10, WISH = 0x3157, PLAN = 0x91A4 };
constexpr size_t WORKSPACE_BYTES = 4096, WORKSPACE_ALIGNMENT = 256, LEAST_BYTES = 256;

struct op {
  int magic, compute, scale;
  int32_t transposed[2];
  uint32_t epilogue;
  const void *bias;
};
struct layout {
  int magic, type;
  uint64_t rows, columns;
  int64_t leading;
  int32_t batch;
  int64_t stride;
};
struct wish {
  int magic;
  uint64_t workspace_bytes;
  uint32_t reductions, aligned[4];
};
struct plan {
  uint64_t magic, of, workspace_bytes, aligned[5];
};
struct found {
  plan algo;
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};
static_assert(sizeof(found) == 96, "as in cublasLt.h");

int the_handles[EMULATED_DEVICES];

int mistake(const std::string &what) {
  emulated_mistake(("cuBLASLt: " + what).c_str());
  return INVALID_VALUE;
}

#define ENTER                                                             \
  if (const int error = emulated_fails(__func__)) /* one of the driver */ \
    return error == 2 ? ALLOC_FAILED : EXECUTION_FAILED;

#define REQUIRE(condition)                                                               \
  do                                                                                     \
    if (!(condition)) return mistake(std::string(__func__) + " needs that " #condition); \
  while (0)

size_t size_of(int type) { return type == F64 ? 8 : type == F32 ? 4 : 2; }

double element_at(const void *data, int type, int64_t i) {
  if (type == F64) return ((const double *)data)[i];
  if (type == F32) return ((const float *)data)[i];
  return type == F16 ? to_float(((const f16 *)data)[i]) : to_float(((const bf16 *)data)[i]);
}
void set_element(void *data, int type, int64_t i, double x) {
  if (type == F64)
    ((double *)data)[i] = x;
  else if (type == F32)
    ((float *)data)[i] = (float)x;
  else if (type == F16)
    ((f16 *)data)[i] = to_f16((float)x);
  else
    ((bf16 *)data)[i] = to_bf16((float)x);
}

/* 10 bits after the point, the nearest. */
double in_tf32(double x) {
  const uint32_t u = omc_float_bits((float)x);
  return x != x ? x : omc_bits_float((u + 0xfffu + (u >> 13 & 1u)) & ~0x1fffu);
}

struct problem {
  op o;
  layout a, b, d;
};

template <typename T>
bool attribute(T *field, const void *value, size_t bytes) {
  if (bytes != sizeof *field) return false;
  memcpy(field, value, bytes);
  return true;
}

/* All but addresses, Fowler, Noll and Vo's 1a. */
uint64_t name_of(const problem &p) {
  uint64_t h = 0xcbf29ce484222325u;
  const auto add = [&h](uint64_t x) { h = (h ^ x) * 0x100000001b3u; };
  for (int x : {p.o.compute, p.o.scale, p.o.transposed[0], p.o.transposed[1], (int)p.o.epilogue})
    add((uint64_t)x);
  for (const layout *l : {&p.a, &p.b, &p.d})
    for (uint64_t x : {(uint64_t)l->type, l->rows, l->columns, (uint64_t)l->leading,
                       (uint64_t)l->batch, (uint64_t)l->stride})
      add(x);
  return h;
}

uint64_t depth(const problem &p) { return p.o.transposed[0] ? p.a.rows : p.a.columns; }

/* From the first to the last element. */
size_t bytes_of(const layout &l) {
  const uint64_t last =
      (uint64_t)(l.batch - 1) * (uint64_t)l.stride + (l.columns - 1) * (uint64_t)l.leading + l.rows;
  return last * size_of(l.type);
}

int check(const problem &p) {
  REQUIRE(p.o.magic == OP);
  for (const layout *l : {&p.a, &p.b, &p.d}) {
    REQUIRE(l->magic == LAYOUT);
    REQUIRE(l->rows > 0 && l->columns > 0 && l->leading >= (int64_t)l->rows);
    REQUIRE(l->batch > 0 && l->batch == p.d.batch);
  }
  const bool ta = p.o.transposed[0], tb = p.o.transposed[1];
  REQUIRE((ta ? p.a.columns : p.a.rows) == p.d.rows);
  REQUIRE((tb ? p.b.rows : p.b.columns) == p.d.columns);
  REQUIRE((tb ? p.b.columns : p.b.rows) == depth(p));
  REQUIRE(p.a.type == p.b.type);
  REQUIRE(p.d.batch == 1 || p.d.stride >= p.d.leading * (int64_t)p.d.columns);
  const bool wide = p.a.type == F64;
  REQUIRE(p.d.type == p.a.type || (!wide && p.d.type == F32));
  REQUIRE(p.o.scale == (wide ? F64 : F32));
  REQUIRE(wide ? p.o.compute == COMPUTE_F64
               : p.o.compute == COMPUTE_F32 || (p.o.compute == COMPUTE_TF32 && p.a.type == F32));
  REQUIRE(p.o.epilogue == EPILOGUE_DEFAULT || (p.o.epilogue == EPILOGUE_BIAS && p.o.bias));
  return SUCCESS;
}

struct job {
  problem p;
  double alpha, beta;
  const void *a, *b;
  void *d, *workspace;
  size_t workspace_bytes;
};

double sum_at(const job &j, int64_t batch, uint64_t row, uint64_t column) {
  const problem &p = j.p;
  const int64_t a_row = p.o.transposed[0] ? p.a.leading : 1,
                a_k = p.o.transposed[0] ? 1 : p.a.leading;
  const int64_t b_k = p.o.transposed[1] ? p.b.leading : 1,
                b_col = p.o.transposed[1] ? 1 : p.b.leading;
  const int64_t a0 = batch * p.a.stride + (int64_t)row * a_row;
  const int64_t b0 = batch * p.b.stride + (int64_t)column * b_col;
  double sum = 0;
  for (int64_t k = 0; k < (int64_t)depth(p); k++) {
    double x = element_at(j.a, p.a.type, a0 + k * a_k), y = element_at(j.b, p.b.type, b0 + k * b_k);
    if (p.o.compute == COMPUTE_TF32) x = in_tf32(x), y = in_tf32(y);
    sum += x * y;
  }
  return sum;
}

int multiply(void *given) {
  const job &j = *(const job *)given;
  const layout &d = j.p.d;
  if (j.workspace_bytes) memset(j.workspace, 0xFF, j.workspace_bytes);
  for (int64_t batch = 0; batch < d.batch; batch++)
    for (uint64_t column = 0; column < d.columns; column++)
      for (uint64_t row = 0; row < d.rows; row++) {
        const int64_t at = batch * d.stride + (int64_t)column * d.leading + (int64_t)row;
        double x = j.alpha * sum_at(j, batch, row, column);
        if (j.beta != 0) x += j.beta * element_at(j.d, d.type, at);
        if (j.p.o.epilogue == EPILOGUE_BIAS) x += element_at(j.p.o.bias, d.type, (int64_t)row);
        set_element(j.d, d.type, at, x);
      }
  return 0;
}

void drop(void *given) { delete (job *)given; }

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char *cublasLtGetStatusName(int status) {
  return statuses.count(status) ? statuses.at(status).first : "unknown";
}
EXPORT const char *cublasLtGetStatusString(int status) {
  return statuses.count(status) ? statuses.at(status).second : "unknown";
}

EXPORT size_t cublasLtGetVersion(void) {
  return (size_t)emulated_number("EMULATED_CUBLASLT", 130000);
}
EXPORT int cublasLtCreate(void **handle) {
  ENTER
  if (!emulated_has_context()) return NOT_INITIALIZED;
  *handle = &the_handles[emulated_device()];
  return SUCCESS;
}

EXPORT int cublasLtMatmulDescInit_internal(op *out, size_t bytes, int compute, int scale) {
  ENTER
  REQUIRE(bytes >= LEAST_BYTES);
  *out = op{OP, compute, scale, {0, 0}, EPILOGUE_DEFAULT, nullptr};
  return SUCCESS;
}
EXPORT int cublasLtMatmulDescSetAttribute(op *o, int what, const void *value, size_t bytes) {
  ENTER
  REQUIRE(o->magic == OP);
  const bool done = what == 3   ? attribute(&o->transposed[0], value, bytes)
                    : what == 4 ? attribute(&o->transposed[1], value, bytes)
                    : what == 7 ? attribute(&o->epilogue, value, bytes)
                    : what == 8 ? attribute(&o->bias, value, bytes)
                                : false;
  REQUIRE(done);
  return SUCCESS;
}

EXPORT int cublasLtMatrixLayoutInit_internal(layout *out, size_t bytes, int type, uint64_t rows,
                                             uint64_t columns, int64_t leading) {
  ENTER
  REQUIRE(bytes >= LEAST_BYTES);
  REQUIRE(type == F32 || type == F64 || type == F16 || type == BF16);
  *out = layout{LAYOUT, type, rows, columns, leading, 1, 0};
  return SUCCESS;
}
EXPORT int cublasLtMatrixLayoutSetAttribute(layout *l, int what, const void *value, size_t bytes) {
  ENTER
  REQUIRE(l->magic == LAYOUT);
  const bool done = what == 5   ? attribute(&l->batch, value, bytes)
                    : what == 6 ? attribute(&l->stride, value, bytes)
                                : false;
  REQUIRE(done);
  return SUCCESS;
}

EXPORT int cublasLtMatmulPreferenceInit_internal(wish *out, size_t bytes) {
  ENTER
  REQUIRE(bytes >= LEAST_BYTES);
  *out = wish{WISH, 0, 7, {256, 256, 256, 256}};
  return SUCCESS;
}
EXPORT int cublasLtMatmulPreferenceSetAttribute(wish *w, int what, const void *value,
                                                size_t bytes) {
  ENTER
  REQUIRE(w->magic == WISH);
  const bool done = what == 1               ? attribute(&w->workspace_bytes, value, bytes)
                    : what == 3             ? attribute(&w->reductions, value, bytes)
                    : what >= 5 && what < 9 ? attribute(&w->aligned[what - 5], value, bytes)
                                            : false;
  REQUIRE(done);
  return SUCCESS;
}

EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, const op *o, const layout *a,
                                          const layout *b, const layout *c, const layout *d,
                                          const wish *w, int wanted, found *out, int *n) {
  ENTER
  const problem p = {*o, *a, *b, *d};
  REQUIRE(handle == &the_handles[emulated_device()] && c == d && w->magic == WISH && wanted == 1);
  REQUIRE(emulated_has_context());
  if (const int status = check(p)) return status;
  if (p.o.epilogue == EPILOGUE_BIAS && (p.a.type == F64 || (uintptr_t)p.o.bias % 16))
    return NOT_SUPPORTED;
  const uint64_t workspace_bytes =
      w->workspace_bytes < WORKSPACE_BYTES ? w->workspace_bytes : WORKSPACE_BYTES;
  const uint64_t bias = (uintptr_t)p.o.bias & -(uintptr_t)p.o.bias;
  *out = found{{PLAN,
                name_of(p),
                workspace_bytes,
                {w->aligned[0], w->aligned[1], w->aligned[2], w->aligned[3], bias ? bias : 1}},
               workspace_bytes,
               SUCCESS,
               1,
               {}};
  if (out->algo.aligned[4] > 16) out->algo.aligned[4] = 16;
  *n = 1;
  return SUCCESS;
}

EXPORT int cublasLtMatmul(void *handle, const op *o, const void *alpha, const void *a,
                          const layout *a_layout, const void *b, const layout *b_layout,
                          const void *beta, const void *c, const layout *c_layout, void *d,
                          const layout *d_layout, const plan *algo, void *workspace,
                          size_t workspace_bytes, void *stream) {
  ENTER
  const problem p = {*o, *a_layout, *b_layout, *d_layout};
  REQUIRE(handle == &the_handles[emulated_device()] && c == d && c_layout == d_layout);
  REQUIRE(emulated_has_context());
  if (const int status = check(p)) return status;
  REQUIRE(algo->magic == PLAN && algo->of == name_of(p));
  const void *const pointers[] = {a, b, c, d, p.o.bias};
  for (int i = 0; i < 5; i++) REQUIRE((uintptr_t)pointers[i] % algo->aligned[i] == 0);
  REQUIRE(workspace_bytes >= algo->workspace_bytes);
  REQUIRE(algo->workspace_bytes == 0 || ((uintptr_t)workspace % WORKSPACE_ALIGNMENT == 0 &&
                                         emulated_is_out(workspace, algo->workspace_bytes)));
  REQUIRE(emulated_is_out(a, bytes_of(p.a)) && emulated_is_out(b, bytes_of(p.b)));
  REQUIRE(emulated_is_out(d, bytes_of(p.d)));
  REQUIRE(p.o.epilogue != EPILOGUE_BIAS || emulated_is_out(p.o.bias, p.d.rows * size_of(p.d.type)));
  const bool wide = p.o.scale == F64;
  job *j = new job{p,
                   element_at(alpha, wide ? F64 : F32, 0),
                   element_at(beta, wide ? F64 : F32, 0),
                   a,
                   b,
                   d,
                   workspace,
                   algo->workspace_bytes};
  return emulated_give(stream, multiply, j, drop) == 0 ? SUCCESS : EXECUTION_FAILED;
}
