#include "harness.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/element.h"
#include "base/env.h"
#include "base/extent.h"
#include "base/op_id.h"
#include "base/shape.h"

static omc_type parse(const char *text) {
  omc_type type = {OMC_F32, {-1, {0}}};
  size_t used = 0;
  CHECK_OK(omc_type_parse(text, strlen(text), &type, &used));
  return type;
}

static omc_shape shape(const char *dims) {
  char text[64] = "f32";
  return parse(strcat(text, dims)).shape;
}

TEST(status_detail_may_be_its_own_argument) {
  CHECK_STATUS(omc_fail(OMC_ESHAPE, "%d is not %d", 3, 4), ESHAPE);
  CHECK_STATUS(omc_fail(OMC_EPARSE, "line 1: %s", omc_status_detail()), EPARSE);
  CHECK_TEXT(omc_status_detail(), "line 1: 3 is not 4");
  CHECK_TEXT(omc_status_text(OMC_ESHAPE), "shapes do not fit");
}

TEST(alloc_checks_overflow) {
  const omc_allocator *a = omc_default_allocator();
  size_t n = 7;
  CHECK(omc_alloc(a, SIZE_MAX / 2, 3) == NULL);
  CHECK(!omc_mul_size(SIZE_MAX, 2, &n) && n == 7);
  CHECK(!omc_add_size(SIZE_MAX, 1, &n) && n == 7);
  CHECK(omc_mul_size(SIZE_MAX, 0, &n) && n == 0);
  CHECK_INT(omc_round_up(65, 64), 128);
  CHECK_INT(omc_round_up(64, 64), 64);
  void *none = omc_alloc(a, 0, 8);
  CHECK(none != NULL);
  omc_free(a, none, 0, 8);
}

TEST(arena_is_zeroed_aligned_and_freed) {
  omc_test_memory memory;
  omc_test_memory_init(&memory);
  omc_arena arena;
  omc_arena_init(&arena, &memory.allocator);
  CHECK_INT(memory.calls, 0);
  for (size_t n = 0; n < 3000; n += 7) {
    const char *text = omc_arena_text(&arena, "abc", 3);
    REQUIRE(text && !strcmp(text, "abc"));
    char *elements = omc_arena_elements(&arena, n, 1), *bytes = omc_arena_alloc(&arena, n, 1);
    REQUIRE(elements && bytes);
    CHECK_INT((uintptr_t)elements % 64, 0);
    CHECK_INT((uintptr_t)bytes % 16, 0);
    CHECK(omc_arena_holds(&arena, text) && !omc_arena_holds(&arena, &arena));
    for (size_t i = 0; i < n; i++) REQUIRE(bytes[i] == 0);
    memset(bytes, 0xff, n);
  }
  char *large = omc_arena_alloc(&arena, 3, (size_t)1 << 20);
  REQUIRE(large);
  memset(large, 1, (size_t)3 << 20);
  CHECK(omc_arena_alloc(&arena, SIZE_MAX, 2) == NULL);
  CHECK(omc_arena_alloc(&arena, SIZE_MAX, 1) == NULL);
  omc_arena_deinit(&arena);
  CHECK_INT(memory.live_blocks, 0);
  CHECK_INT(memory.live_bytes, 0);
}

TEST(dtype_is_found_by_text_and_codes) {
  for (int d = 0; d < OMC_N_DTYPE; d++) {
    const omc_dtype_info *info = omc_dtype_get((omc_dtype)d);
    omc_dtype found = OMC_N_DTYPE;
    CHECK(omc_dtype_from_text(info->text, strlen(info->text), &found) && found == (omc_dtype)d);
    CHECK(omc_dtype_from_onnx(info->onnx, &found) && found == (omc_dtype)d);
    CHECK(omc_dtype_from_dlpack(info->dl_code, info->bits, &found) && found == (omc_dtype)d);
    CHECK_INT(info->size * 8, info->bits);
  }
  omc_dtype none;
  CHECK(!omc_dtype_from_text("f3", 2, &none));
  CHECK(!omc_dtype_from_onnx(0, &none));
  CHECK(!omc_dtype_from_dlpack(2, 8, &none));
}

TEST(half_formats_round_to_nearest_even_and_back) {
  static const struct {
    omc_dtype dtype;
    double x, rounded;
  } rows[] = {{OMC_F16, 1.0, 1.0},
              {OMC_F16, 65504, 65504},
              {OMC_F16, 65519, 65504},
              {OMC_F16, 65520, INFINITY},
              {OMC_F16, 2049, 2048},
              {OMC_F16, 2051, 2052},
              {OMC_F16, 0x1p-24, 0x1p-24},
              {OMC_F16, 0x1p-25, 0},
              {OMC_F16, 0x1.8p-25, 0x1p-24},
              {OMC_F16, -0x1.ff8p-15, -0x1.ff8p-15},
              {OMC_F16, 0x1.ffcp-15, 0x1p-14},
              {OMC_F16, -0.0, -0.0},
              {OMC_F16, NAN, NAN},
              {OMC_F16, -INFINITY, -INFINITY},
              {OMC_BF16, 1.00390625, 1.0},
              {OMC_BF16, 1.01171875, 1.015625},
              {OMC_BF16, 1e39, INFINITY},
              {OMC_BF16, 0x1p-133, 0x1p-133},
              {OMC_BF16, -3.140625, -3.140625},
              {OMC_F32, 0.1, 0.1f},
              {OMC_F64, 0.1, 0.1}};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    uint64_t data = 0;
    omc_element_set_float(rows[i].dtype, &data, 0, rows[i].x);
    CHECK_FLOAT(omc_element_float(rows[i].dtype, &data, 0), rows[i].rounded);
  }
}

TEST(every_half_survives_a_round_trip) {
  const omc_dtype dtypes[] = {OMC_F16, OMC_BF16};
  for (int k = 0; k < 2; k++)
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
      const uint16_t from = (uint16_t)bits;
      uint16_t to = 0;
      const double x = omc_element_float(dtypes[k], &from, 0);
      omc_element_set_float(dtypes[k], &to, 0, x);
      REQUIRE(isnan(x) ? isnan(omc_element_float(dtypes[k], &to, 0)) : from == to);
    }
}

TEST(elements_convert_between_kinds) {
  int64_t wide[2] = {0};
  omc_element_set_float(OMC_I64, wide, 1, 1e30);
  CHECK_INT(omc_element_int(OMC_I64, wide, 1), INT64_MAX);
  omc_element_set_float(OMC_I64, wide, 1, NAN);
  CHECK_INT(wide[1], 0);
  omc_element_set_float(OMC_BOOL, wide, 0, 0.5);
  CHECK_INT(omc_element_int(OMC_BOOL, wide, 0), 1);
  omc_element_set_int(OMC_I8, wide, 3, -5);
  CHECK_FLOAT(omc_element_float(OMC_I8, wide, 3), -5.0);
  omc_element_set_int(OMC_F32, wide, 0, 3);
  CHECK_INT(omc_element_int(OMC_F32, wide, 0), 3);
}

TEST(op_names_are_found) {
  for (int op = 0; op < OMC_N_OPS; op++) {
    omc_op_id found = OMC_N_OPS;
    const char *name = omc_op_name((omc_op_id)op);
    CHECK(omc_op_from_name(name, strlen(name), &found) && found == (omc_op_id)op);
  }
  omc_op_id none;
  CHECK(!omc_op_from_name("Softma", 6, &none));
  CHECK(omc_op_is_onnx(OMC_OP_Softmax) && !omc_op_is_onnx(OMC_OP_SoftmaxGrad));
}

TEST(shapes_count_and_stride) {
  int64_t strides[OMC_MAX_RANK];
  const omc_shape s = shape("[2,3,4]"), scalar = shape("[]"), empty = shape("[2,0,4]");
  CHECK_INT(omc_shape_numel(&s), 24);
  CHECK_INT(omc_shape_numel(&scalar), 1);
  CHECK_INT(omc_shape_numel(&empty), 0);
  CHECK_INT(omc_shape_span(&s, 1, 3), 12);
  omc_shape_strides(&s, strides);
  CHECK(strides[0] == 12 && strides[1] == 4 && strides[2] == 1);
  const omc_shape row = shape("[3,1]");
  omc_broadcast_strides(&row, &s, strides);
  CHECK(strides[0] == 0 && strides[1] == 1 && strides[2] == 0);
}

TEST(shapes_broadcast) {
  static const struct {
    const char *a, *b, *out;
  } rows[] = {{"[2,3]", "[3]", "[2,3]"}, {"[2,1]", "[1,3]", "[2,3]"}, {"[]", "[4]", "[4]"},
              {"[0]", "[1]", "[0]"},     {"[2]", "[3]", NULL},        {"[0]", "[2]", NULL}};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const omc_shape a = shape(rows[i].a), b = shape(rows[i].b);
    omc_shape out = {0};
    const omc_status status = omc_shape_broadcast(&a, &b, "Add", &out);
    if (!rows[i].out) {
      CHECK_STATUS(status, ESHAPE);
      CHECK_CONTAINS(omc_status_detail(), rows[i].a);
      CHECK_CONTAINS(omc_status_detail(), rows[i].b);
      continue;
    }
    char text[OMC_TYPE_TEXT];
    CHECK_OK(status);
    CHECK_TEXT(omc_shape_text(&out, text, sizeof text), rows[i].out);
  }
}

TEST(axis_wraps_and_is_bounded) {
  int32_t axis = 9;
  CHECK_OK(omc_axis(-1, 3, "Softmax", &axis));
  CHECK_INT(axis, 2);
  CHECK_STATUS(omc_axis(3, 3, "Softmax", &axis), ESHAPE);
  CHECK_STATUS(omc_axis(-4, 3, "Softmax", &axis), ESHAPE);
  CHECK_STATUS(omc_axis(INT64_MIN, 0, "Softmax", &axis), ESHAPE);
  CHECK_CONTAINS(omc_status_detail(), "Softmax");
}

TEST(type_bytes_catches_overflow) {
  size_t bytes = 1;
  const omc_type fits = parse("f32[2,3]"),
                 empty = parse("f64[9223372036854775807,9223372036854775807,0]");
  const omc_type large = parse("i64[4294967296,4294967296]"), open = parse("f32[?]");
  CHECK_OK(omc_type_bytes(&fits, &bytes));
  CHECK_INT(bytes, 24);
  CHECK_OK(omc_type_bytes(&empty, &bytes));
  CHECK_INT(bytes, 0);
  CHECK_STATUS(omc_type_bytes(&large, &bytes), ESHAPE);
  CHECK_STATUS(omc_type_bytes(&open, &bytes), ESHAPE);
}

TEST(type_text_round_trips) {
  static const char *const rows[] = {"f32[]", "i64[0]", "bf16[2,?,4]", "bool[1,2,3,4,5,6,7,8]",
                                     "u8[9223372036854775807]"};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    char text[OMC_TYPE_TEXT];
    const omc_type type = parse(rows[i]);
    CHECK_TEXT(omc_type_text(&type, text, sizeof text), rows[i]);
    for (size_t n = 1; n < sizeof text; n++) CHECK(strlen(omc_type_text(&type, text, n)) < n);
  }
}

TEST(malformed_types_are_refused) {
  static const char *const rows[] = {"",        "f32",
                                     "f33[2]",  "f32[",
                                     "f32[2",   "f32[2,",
                                     "f32[2,]", "f32[,]",
                                     "f32[-1]", "f32[1,2,3,4,5,6,7,8,9]",
                                     "f32[x]",  "f32[9223372036854775808]",
                                     "[2]",     "f32 [2]"};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    omc_type type;
    size_t used;
    if (!CHECK_STATUS(omc_type_parse(rows[i], strlen(rows[i]), &type, &used), EPARSE))
      CHECK_TEXT(rows[i], "refused");
  }
}

static omc_status read_env(const char *entry, omc_env *out) {
  char copy[8192], *entries[] = {copy, NULL};
  snprintf(copy, sizeof copy, "%s", entry);
  return omc_env_read(entries, out);
}

TEST(environment_variables_have_a_default) {
  static const char *const rows[] = {"HOME=/", "OMC_DUMP=",   "OMC_ISA=",     "OMC_GEMM=",
                                     "OMC=1",  "OMC_VERIFY=", "OMC_PROFILE=", "OMC_GRAPHS="};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    omc_env env;
    if (!CHECK_OK(read_env(rows[i], &env))) continue;
    CHECK_TEXT(env.dump, "");
    CHECK_INT(env.isa, OMC_N_ISA);
    CHECK_INT(env.gemm, OMC_GEMM_OWN);
    CHECK(!env.verify && !env.profile && env.graphs);
  }
}

TEST(environment_variables_are_read) {
  omc_env env;
  char *const entries[] = {"OMC_DUMP=/",    "OMC_ISA=avx2", "OMC_GEMM=torch", "OMC_VERIFY=1",
                           "OMC_PROFILE=0", "OMC_GRAPHS=0", "OMC_SYNC=1",     NULL};
  REQUIRE_OK(omc_env_read(entries, &env));
  CHECK_TEXT(env.dump, "/");
  CHECK_INT(env.isa, OMC_ISA_AVX2);
  CHECK_INT(env.gemm, OMC_GEMM_TORCH);
  CHECK_INT(env.verify, 1);
  CHECK_INT(env.profile, 0);
  CHECK_INT(env.graphs, 0);
  CHECK_INT(env.sync, 1);
}

TEST(environment_variables_without_a_meaning_are_refused) {
  static const struct {
    const char *entry, *detail;
  } rows[] = {
      {"OMC_ISA=avx1024",
       "OMC_ISA is 'avx1024', expected one of base, avx2, avx512, avx512bf16, amx, "
       "amxfp16"},
      {"OMC_ISA=AVX2", "OMC_ISA is 'AVX2'"},
      {"OMC_ISA=avx", "OMC_ISA is 'avx'"},
      {"OMC_GEMM=mkl", "OMC_GEMM is 'mkl', expected one of own, torch"},
      {"OMC_VERIFY=true", "OMC_VERIFY is 'true', expected one of 0, 1"},
      {"OMC_PROFILE=2", "OMC_PROFILE is '2', expected one of 0, 1"},
      {"OMC_PROFILE= 1", "OMC_PROFILE is ' 1'"},
      {"OMC_GRAPHS=2", "OMC_GRAPHS is '2', expected one of 0, 1"},
      {"OMC_DUMP=/nowhere/at all", "OMC_DUMP is '/nowhere/at all', not a directory"},
      {"OMC_DUMP=/dev/null", "OMC_DUMP is '/dev/null', not a directory"},
      {"OMC_VERIFFY=1", "OMC_VERIFFY=1 is unknown, there are OMC_DUMP, OMC_ISA, OMC_GEMM"},
      {"OMC_ISA2=avx2", "OMC_ISA2=avx2 is unknown"},
      {"OMC_IS=avx2", "OMC_IS=avx2 is unknown"},
      {"OMC_=", "OMC_= is unknown"},
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    omc_env env;
    CHECK_STATUS(read_env(rows[i].entry, &env), EINVALID);
    CHECK_CONTAINS(omc_status_detail(), rows[i].detail);
  }
  char longest[OMC_ENV_PATH + 16] = "OMC_DUMP=";
  memset(longest + strlen(longest), '/', OMC_ENV_PATH);
  omc_env env;
  CHECK_STATUS(read_env(longest, &env), EINVALID);
  CHECK_CONTAINS(omc_status_detail(), "OMC_DUMP has 3900 bytes, at most 3899 are possible");
}

/* Beside any number of tensors, each of the extents is met by what shares a byte with it, and by
 * nothing else. */
TEST(base_extents) {
  static char memory[1000];
  enum { N = 50, SIZE = 10 };
  omc_extent all[N];
  for (uint32_t i = 0; i < N; i++) {
    const uint32_t place = i * 37 % N; /* in no order */
    all[i] = omc_extent_of(memory + 2 * SIZE * place, SIZE, place);
  }
  REQUIRE(omc_extents_sort(all, N) == NULL);
  for (size_t at = 0; at + 1 < sizeof memory; at++)
    for (size_t bytes = 1; bytes <= SIZE + 1 && at + bytes <= sizeof memory; bytes++) {
      const omc_extent given = omc_extent_of(memory + at, bytes, 0);
      const omc_extent *met = omc_extents_meet(all, N, &given);
      const size_t place = at / (2 * SIZE), in = at % (2 * SIZE);
      if (in < SIZE)
        CHECK(met && met->owner == place);
      else if (in + bytes > 2 * (size_t)SIZE)
        CHECK(met && met->owner == place + 1);
      else
        CHECK(met == NULL);
    }
  omc_extent two[] = {omc_extent_of(memory + 9, 2, 7), omc_extent_of(memory, 10, 3)};
  const omc_extent *second = omc_extents_sort(two, 2);
  CHECK(second && second->owner == 7 && second[-1].owner == 3);
  CHECK(omc_extents_sort(two, 1) == NULL && omc_extents_sort(two, 0) == NULL);
  CHECK(omc_extents_meet(two, 0, &two[1]) == NULL);
}

TEST(base_arena_grows_a_list) {
  omc_test_memory memory;
  omc_test_memory_init(&memory);
  omc_arena arena;
  omc_arena_init(&arena, &memory.allocator);
  uint32_t cap = 0, *list = NULL;
  for (uint32_t n = 0; n < 3000; n++) {
    const uint32_t before = cap;
    list = omc_arena_grow(&arena, list, n, &cap, n + 1, sizeof *list);
    REQUIRE(list && cap > n && (cap == before || cap >= 2 * before));
    list[n] = n;
  }
  for (uint32_t n = 0; n < 3000; n++) CHECK_INT(list[n], n);
  CHECK(omc_arena_grow(&arena, list, 3000, &cap, cap, sizeof *list) == list);
  const uint32_t before = cap;
  memory.calls = 0, memory.fail_at = 0;
  CHECK(!omc_arena_grow(&arena, list, 3000, &cap, UINT32_MAX, 8));
  CHECK_INT(cap, before);
  CHECK_INT(list[2999], 2999);
  omc_arena_deinit(&arena);
  CHECK_INT(memory.live_blocks, 0);
}
