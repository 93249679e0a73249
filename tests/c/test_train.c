/* Training without Python: files, and what is trained from them. */
#include "harness.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "train/safetensors.h"
#include "train/trainer.h"

/* ---- files ---- */

static omc_status parse(const char *header, size_t elements, omc_arena *arena,
                        omc_safetensors *out) {
  static _Alignas(8) char bytes[1024];
  const uint64_t n = strlen(header);
  memcpy(bytes, &n, sizeof n);
  memcpy(bytes + 8, header, n);
  for (size_t i = 0; i < elements; i++) bytes[8 + n + i] = (char)i;
  return omc_safetensors_parse(bytes, 8 + n + elements, arena, out);
}

TEST(safetensors_are_read) {
  omc_arena arena;
  omc_safetensors file;
  omc_arena_init(&arena, omc_default_allocator());
  CHECK_OK(
      parse(" { \"__metadata__\" : {\"a\\n\\u00e9\\ud83d\\ude00\":\"\\\"b\\\\\"},"
            "\"w\":{\"shape\":[2,1],\"data_offsets\":[1,3],\"dtype\":\"I8\"},"
            "\"e\":{\"dtype\":\"F64\",\"shape\":[0,3],\"data_offsets\":[1,1]},"
            "\"b\":{\"dtype\":\"BOOL\",\"shape\":[],\"data_offsets\":[0,1]}}  ",
            3, &arena, &file));
  CHECK_TEXT(omc_safetensors_text(&file, "a\n\xc3\xa9\xf0\x9f\x98\x80"), "\"b\\");
  CHECK(omc_safetensors_text(&file, "a") == NULL);
  CHECK_INT(file.n_tensors, 3);
  CHECK_TEXT(file.tensors[0].name, "w");
  CHECK_INT(file.tensors[0].type.dtype, OMC_I8);
  CHECK_INT(file.tensors[0].type.shape.rank, 2);
  CHECK_INT(file.tensors[0].bytes, 2);
  CHECK_INT(((const char *)file.tensors[0].data)[1], 2);
  CHECK_INT(file.tensors[1].bytes, 0);
  CHECK_OK(parse("{}", 0, &arena, &file));
  CHECK_INT(file.n_tensors, 0);
  omc_arena_deinit(&arena);
}

TEST(safetensors_that_are_damaged_are_refused) {
#define BYTES(n, from, to) \
  "{\"dtype\":\"U8\",\"shape\":[" #n "],\"data_offsets\":[" #from "," #to "]}"
  static const struct {
    const char *header;
    omc_status status;
    const char *detail;
  } rows[] = {
      {"", OMC_EPARSE, "byte 0 of the header: expected '{'"},
      {"{", OMC_EPARSE, "byte 1"},
      {"{}x", OMC_EPARSE, "byte 2 of the header: expected its end"},
      {"{\"a", OMC_EPARSE, "a string that ends"},
      {"{\"a\\", OMC_EPARSE, "a string that ends"},
      {"{\"\\x\":{}}", OMC_EPARSE, "an escape of JSON"},
      {"{\"\\ud800\":{}}", OMC_EPARSE, "an escape of JSON"},
      {"{\"\\u0000\":{}}", OMC_EPARSE, "an escape of JSON"},
      {"{\"a\":{}}", OMC_EPARSE, "expected '\"'"},
      {"{\"a\":{\"dtype\":\"F32\"}}", OMC_EPARSE, "'a' lacks"},
      {"{\"a\":{\"other\":\"F32\"}}", OMC_EPARSE, "\"dtype\", \"shape\" or"},
      {"{\"a\":{\"dtype\":\"F8_E4M3\"}}", OMC_EUNSUPPORTED, "'a' is of dtype 'F8_E4M3'"},
      {"{\"a\":{\"shape\":[1,2,3,4,5,6,7,8,9]}}", OMC_EUNSUPPORTED, "more than 8 numbers"},
      {"{\"a\":{\"shape\":[-1]}}", OMC_EPARSE, "a whole number"},
      {"{\"a\":{\"shape\":[9223372036854775808]}}", OMC_EPARSE, "a number of 63 bits"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,3]}}", OMC_EPARSE,
       "'a', of 4 bytes, is from byte 0 to 3 of 4"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", OMC_EPARSE, "of 4"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", OMC_EPARSE, "of 4"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,0]}}",
       OMC_ESHAPE, ""},
      {"{\"a\":" BYTES(2, 0, 2) ",\"b\":" BYTES(2, 2, 4) ",\"a\":" BYTES(0, 4, 4) "}", OMC_EPARSE,
       "there are two tensors 'a'"},
      {"{\"b\":" BYTES(3, 1, 4) ",\"a\":" BYTES(2, 0, 2) "}", OMC_EPARSE,
       "'b' begins at byte 1, expected 2"},
      {"{\"a\":" BYTES(3, 1, 4) "}", OMC_EPARSE, "'a' begins at byte 1, expected 0"},
      {"{\"a\":" BYTES(3, 0, 3) "}", OMC_EPARSE, "3 bytes are those of tensors, of 4"},
  };
#undef BYTES
  omc_safetensors file;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    omc_arena arena;
    omc_arena_init(&arena, omc_default_allocator());
    CHECK_INT(parse(rows[i].header, 4, &arena, &file), rows[i].status);
    CHECK_CONTAINS(omc_status_detail(), rows[i].detail);
    omc_arena_deinit(&arena);
  }
  omc_arena arena;
  omc_arena_init(&arena, omc_default_allocator());
  const uint64_t lengths[] = {1, UINT64_MAX, UINT64_MAX - 7};
  for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
    CHECK_STATUS(omc_safetensors_parse(&lengths[i], 8, &arena, &file), EPARSE);
  CHECK_STATUS(omc_safetensors_parse(lengths, 7, &arena, &file), EPARSE);
  CHECK_STATUS(omc_safetensors_read("/nowhere/at all", &arena, &file), EINVALID);
  CHECK_CONTAINS(omc_status_detail(), "'/nowhere/at all' cannot be opened: No such file");
  CHECK_STATUS(omc_safetensors_read("/", &arena, &file), EINVALID);
  CHECK_TEXT(omc_status_detail(), "'/' is no file");
  CHECK_STATUS(omc_safetensors_read("/dev/null", &arena, &file), EINVALID);
  omc_arena_deinit(&arena);
}

/* ---- a model of one weight and one running number, y = w x, loss = sum(y), seen counts ---- */

static const omc_type of_w = {OMC_F32, {1, {3}}}, of_seen = {OMC_I64, {0, {0}}};
static const float w0[3] = {1, 2, 3};
static const int64_t seen0 = 7;

static const char *const training =
    "input %x : f32[?,3]\n"
    "input %w : f32[3] grad\n"
    "input %seen : i64[]\n"
    "const %c : i64[] = [1]\n"
    "const %all : i64[2] = [0, 1]\n"
    "%y = Mul(%x, %w)\n"
    "%loss = ReduceSum(%y, %all) {keepdims=0}\n"
    "%more = Add(%seen, %c)\n"
    "return %loss, %y, %more over %seen\n";
static const char *const evaluation =
    "input %x : f32[?,3]\n"
    "input %w : f32[3]\n"
    "const %two : f32[3] = @\n"
    "%y = Mul(%x, %w)\n"
    "%z = Mul(%y, %two)\n"
    "return %z\n";

enum { N_TEXTS = 15 };

static void describe(omc_named_text *texts) {
  const omc_named_text all[N_TEXTS] = {
      {"ortmodule_c", "1"},
      {"training", training},
      {"training.inputs", ">x\nmodel/w\nmodel/seen\n"},
      {"training.outputs", "loss\ny\n"},
      {"evaluation", evaluation},
      {"evaluation.inputs", ">x\nmodel/w\n"},
      {"evaluation.outputs", "z\n"},
      {"optimizer", "sgd"},
      {"optimizer.groups", "lr=0.5 momentum=0.5\n"},
      {"optimizer.parameters", "0 w\n"},
      {"optimizer.max_grad_norm", "1e9"},
      {"training.sizes", "s0 3\n"},
      {"training.ranges", "1 5\n"},
      {"evaluation.sizes", "s0 3\n"},
      {"evaluation.ranges", "0 ?\n"},
  };
  memcpy(texts, all, sizeof all);
}

/* A new name for a file, which the caller removes. */
static const char *new_path(void) {
  static char path[64];
  (void)snprintf(path, sizeof path, "/tmp/omc_train_%ld", (long)getpid());
  return path;
}

static const char *write_model(const omc_named_text *texts) {
  static const float two[3] = {2, 2, 2};
  const omc_named_tensor tensors[] = {{"model/w", of_w, w0, sizeof w0},
                                      {"model/seen", of_seen, &seen0, sizeof seen0},
                                      {"evaluation/two", of_w, two, sizeof two}};
  const omc_safetensors file = {tensors, texts, 3, N_TEXTS};
  const char *const path = new_path();
  CHECK_OK(omc_safetensors_write(path, &file));
  return path;
}

/* With one of its texts exchanged; NULL: none. */
static omc_trainer *open_changed(const omc_named_text *changed) {
  omc_named_text texts[N_TEXTS];
  omc_trainer *trainer = NULL;
  describe(texts);
  for (int i = 0; changed && i < N_TEXTS; i++)
    if (strcmp(texts[i].name, changed->name) == 0) texts[i] = *changed;
  const char *const path = write_model(texts);
  CHECK_OK(omc_trainer_open(path, &trainer));
  (void)remove(path);
  return trainer;
}

static omc_trainer *open_model(void) { return open_changed(NULL); }

static float number_of(const omc_trainer *trainer, const char *name, int i) {
  omc_tensor t = {NULL, NULL};
  CHECK_OK(omc_trainer_tensor(trainer, name, &t));
  return t.data ? ((const float *)t.data)[i] : NAN;
}

static int64_t seen_by(const omc_trainer *trainer) {
  omc_tensor t;
  CHECK_OK(omc_trainer_tensor(trainer, "seen", &t));
  return *(const int64_t *)t.data;
}

/* A step of `rows` rows of ones. */
static double step(omc_trainer *trainer, int64_t rows) {
  float ones[12];
  for (int i = 0; i < 12; i++) ones[i] = 1;
  const omc_type type = {OMC_F32, {2, {rows, 3}}};
  const omc_tensor x = {ones, &type};
  double loss = NAN;
  CHECK_OK(omc_trainer_step(trainer, &x, &loss, NULL));
  return loss;
}

TEST(train_a_file_is_trained) {
  omc_trainer *const trainer = open_model();
  omc_type type;
  CHECK_INT(omc_trainer_n_inputs(trainer, OMC_TRAINING), 1);
  CHECK_INT(omc_trainer_n_outputs(trainer, OMC_TRAINING), 2);
  CHECK_TEXT(omc_trainer_input(trainer, OMC_TRAINING, 0, &type), "x");
  CHECK_TEXT(omc_trainer_output(trainer, OMC_TRAINING, 1), "y");
  CHECK_INT(type.shape.dims[0], -1);
  CHECK_FLOAT(step(trainer, 2), 12);
  CHECK_FLOAT(step(trainer, 4), 24); /* gradients are added up: 2 + 4 */
  CHECK_INT(seen_by(trainer), 9);
  CHECK_OK(omc_trainer_update(trainer));
  CHECK_FLOAT(number_of(trainer, "w", 0), 1 - 0.5 * 6);
  CHECK_FLOAT(step(trainer, 1), 6 - 9);
  CHECK_OK(omc_trainer_update(trainer)); /* momentum: 0.5 * 6 + 1 */
  CHECK_FLOAT(number_of(trainer, "w", 0), -2 - 0.5 * 4);
  CHECK_STATUS(omc_trainer_scale_learning_rate(trainer, NAN), EINVALID);
  CHECK_OK(omc_trainer_scale_learning_rate(trainer, 0));
  (void)step(trainer, 1);
  CHECK_OK(omc_trainer_update(trainer));
  CHECK_FLOAT(number_of(trainer, "w", 0), -4);
  omc_trainer_close(trainer);
}

TEST(train_evaluation_sees_what_was_trained) {
  omc_trainer *const trainer = open_model();
  (void)step(trainer, 1);
  CHECK_OK(omc_trainer_update(trainer));
  CHECK_FLOAT(number_of(trainer, "w", 2), 2.5);
  const float x[3] = {1, 1, 1};
  const omc_type type = {OMC_F32, {2, {1, 3}}};
  const omc_tensor input = {(void *)(uintptr_t)x, &type}, *outputs = NULL;
  CHECK_OK(omc_trainer_evaluate(trainer, &input, &outputs));
  CHECK(outputs && outputs[0].type->shape.dims[1] == 3);
  CHECK_FLOAT(((const float *)outputs[0].data)[2], 2 * number_of(trainer, "w", 2));
  CHECK_INT(seen_by(trainer), 8);
  const omc_tensor again = {outputs[0].data, &type};
  CHECK_STATUS(omc_trainer_step(trainer, &again, NULL, NULL), EINVALID);
  CHECK_CONTAINS(omc_status_detail(), "is an output, of which a copy may be given");
  omc_trainer_close(trainer);
}

TEST(train_gradients_are_clipped) {
  const omc_named_text changed = {"optimizer.max_grad_norm", "0.5"};
  omc_trainer *const trainer = open_changed(&changed);
  (void)step(trainer, 1);
  CHECK_OK(omc_trainer_update(trainer));
  CHECK(fabs((double)number_of(trainer, "w", 0) - (1 - 0.25 / sqrt(3))) < 1e-6);
  omc_trainer_close(trainer);
}

TEST(train_gradients_may_be_read_and_written) {
  omc_trainer *const trainer = open_model();
  omc_tensor grad;
  CHECK_STATUS(omc_trainer_gradient(trainer, "w", &grad), EINVALID);
  CHECK_CONTAINS(omc_status_detail(), "'w' has no gradient");
  CHECK_STATUS(omc_trainer_gradient(trainer, "v", &grad), EINVALID);
  CHECK_CONTAINS(omc_status_detail(), "the model has no tensor 'v'");
  (void)step(trainer, 2);
  (void)step(trainer, 3);
  CHECK_OK(omc_trainer_gradient(trainer, "w", &grad));
  CHECK_INT(grad.type->shape.dims[0], 3);
  CHECK_FLOAT(((const float *)grad.data)[2], 5);
  ((float *)grad.data)[2] = 0;
  CHECK_OK(omc_trainer_update(trainer));
  CHECK_FLOAT(number_of(trainer, "w", 2), 3);
  CHECK(number_of(trainer, "w", 1) < 2);
  CHECK_STATUS(omc_trainer_gradient(trainer, "w", &grad), EINVALID);
  CHECK_STATUS(omc_trainer_gradient(trainer, "seen", &grad), EINVALID);
  omc_trainer_close(trainer);
}

TEST(train_tensors_are_listed) {
  omc_trainer *const trainer = open_model();
  CHECK_INT(omc_trainer_n_tensors(trainer), 2);
  CHECK_TEXT(omc_trainer_tensor_name(trainer, 0), "w");
  CHECK_TEXT(omc_trainer_tensor_name(trainer, 1), "seen");
  omc_trainer_close(trainer);
}

/* Names of which some begin as others do, in no order. */
TEST(train_each_of_many_tensors_is_found_by_its_name) {
  enum { N = 300 };
  static char names[N][24];
  static float values[N];
  static omc_named_tensor tensors[N];
  const omc_type one = {OMC_F32, {1, {1}}};
  const omc_named_text text = {"ortmodule_c", "1"};
  for (int i = 0; i < N; i++) {
    const int k = i * 7 % N;
    values[i] = (float)k;
    (void)snprintf(names[i], sizeof names[i], "model/%.*s%d", k % 4, "www", k);
    tensors[i] = (omc_named_tensor){names[i], one, &values[i], sizeof values[i]};
  }
  const omc_safetensors file = {tensors, &text, N, 1};
  const char *const path = new_path();
  omc_trainer *trainer = NULL;
  REQUIRE_OK(omc_safetensors_write(path, &file));
  CHECK_OK(omc_trainer_open(path, &trainer));
  (void)remove(path);
  CHECK_INT(omc_trainer_n_tensors(trainer), N);
  for (int i = 0; i < N; i++) CHECK_FLOAT(number_of(trainer, names[i] + 6, 0), values[i]);
  omc_tensor t;
  for (int i = 0; i < 4; i++)
    CHECK_STATUS(omc_trainer_tensor(trainer, (const char *const[]){"w", "", "z", "w1x"}[i], &t),
                 EINVALID);
  omc_trainer_close(trainer);
}

TEST(train_what_a_file_lacks_is_said) {
  static const struct {
    int text; /* that is not there */
    const char *detail;
  } rows[] = {{1, "the file has no graph of training"},
              {4, "the file has no graph of evaluation"},
              {7, "the file has no optimizer"}};
  const float x[3] = {1, 1, 1};
  const omc_type type = {OMC_F32, {2, {1, 3}}};
  const omc_tensor input = {(void *)(uintptr_t)x, &type};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    omc_named_text texts[N_TEXTS];
    omc_trainer *trainer = NULL;
    describe(texts);
    texts[rows[i].text].name = "nothing";
    const char *const path = write_model(texts);
    REQUIRE_OK(omc_trainer_open(path, &trainer));
    (void)remove(path);
    CHECK_INT(omc_trainer_step(trainer, &input, NULL, NULL), i == 0 ? OMC_EINVALID : OMC_OK);
    if (i == 1) CHECK_STATUS(omc_trainer_evaluate(trainer, &input, NULL), EINVALID);
    if (i == 2) CHECK_STATUS(omc_trainer_update(trainer), EINVALID);
    CHECK_CONTAINS(omc_status_detail(), rows[i].detail);
    omc_trainer_close(trainer);
  }
}

TEST(train_the_loss_is_one_float) {
  const omc_named_text changed = {
      "training",
      "input %x : f32[?,3]\ninput %w : f32[3] grad\ninput %seen : i64[]\n"
      "%y = Mul(%x, %w)\n%s = Add(%seen, %seen)\nreturn %y, %y, %s over %seen\n"};
  omc_trainer *const trainer = open_changed(&changed);
  const float x[6] = {1, 1, 1, 1, 1, 1};
  const omc_type type = {OMC_F32, {2, {2, 3}}};
  const omc_tensor input = {(void *)(uintptr_t)x, &type};
  CHECK_STATUS(omc_trainer_step(trainer, &input, NULL, NULL), EINVALID);
  CHECK_CONTAINS(omc_status_detail(), "the loss is f32[2,3], expected one float");
  omc_trainer_close(trainer);
}

TEST(train_goes_on_from_what_was_saved) {
  omc_trainer *trainer = open_model();
  (void)step(trainer, 2);
  CHECK_OK(omc_trainer_update(trainer));
  const char *const path = new_path();
  CHECK_OK(omc_trainer_save(trainer, path));
  omc_trainer *again = NULL;
  CHECK_OK(omc_trainer_open(path, &again));
  for (int i = 0; i < 2; i++) {
    CHECK_FLOAT(step(again, 3), step(trainer, 3));
    CHECK_OK(omc_trainer_update(trainer));
    CHECK_OK(omc_trainer_update(again));
  }
  CHECK_FLOAT(number_of(again, "w", 1), number_of(trainer, "w", 1));
  CHECK_INT(seen_by(again), seen_by(trainer));
  CHECK_STATUS(omc_trainer_save(trainer, "/nowhere/file"), EINVALID);
  CHECK_STATUS(omc_trainer_save(trainer, "/tmp"), EINVALID);
  omc_trainer_close(again);
  omc_trainer_close(trainer);
  (void)remove(path);
}

TEST(train_inputs_that_do_not_fit_are_named) {
  omc_trainer *const trainer = open_model();
  float x[8] = {0};
  const omc_type wide = {OMC_F32, {2, {2, 4}}}, whole = {OMC_I64, {2, {1, 3}}};
  const omc_type rows = {OMC_F32, {2, {1, 3}}};
  const omc_type odd = {OMC_N_DTYPE, {2, {1, 3}}}, deep = {OMC_F32, {9, {1}}};
  const omc_tensor bad[] = {{x, &wide}, {x, &whole}, {NULL, &rows},
                            {x, NULL},  {x, &odd},   {x, &deep}};
  const omc_status want[] = {OMC_ESHAPE,   OMC_EDTYPE,   OMC_EINVALID,
                             OMC_EINVALID, OMC_EINVALID, OMC_EINVALID};
  for (int i = 0; i < 6; i++) {
    CHECK_INT(omc_trainer_step(trainer, &bad[i], NULL, NULL), want[i]);
    CHECK_CONTAINS(omc_status_detail(), "the input 'x' of training");
  }
  const omc_type none = {OMC_F32, {2, {0, 3}}}, many = {OMC_F32, {2, {6, 3}}};
  for (int i = 0; i < 2; i++) {
    const omc_tensor out_of_range = {x, i ? &many : &none};
    CHECK_STATUS(omc_trainer_step(trainer, &out_of_range, NULL, NULL), ESHAPE);
    CHECK_CONTAINS(omc_status_detail(), "the size 0 of the input 'x' of training is");
    CHECK_CONTAINS(omc_status_detail(), i ? "6, expected 5 at most" : "0, expected 1 or more");
  }
  CHECK_FLOAT(step(trainer, 1), 6);
  omc_trainer_drop_gradients(trainer);
  CHECK_OK(omc_trainer_update(trainer));
  CHECK_FLOAT(number_of(trainer, "w", 0), 1);
  omc_tensor t;
  CHECK_STATUS(omc_trainer_tensor(trainer, "v", &t), EINVALID);
  omc_trainer_close(trainer);
  omc_trainer_close(NULL);
}

TEST(train_files_that_do_not_fit_together_are_refused) {
  static const struct {
    int text;
    const char *instead;
    omc_status status;
    const char *detail;
  } rows[] = {
      {0, "2", OMC_EINVALID, "of version '2'"},
      {1, "input %x", OMC_EPARSE, "'training', line 1: expected ':' and a type"},
      {2, ">x\nmodel/w\n", OMC_EPARSE, "has 3 inputs, and 2 are named"},
      {2, ">x\nmodel/v\nmodel/seen\n", OMC_EPARSE,
       "'training.inputs', line 2: the file has no tensor 'model/v'"},
      {2, ">x\nmodel/w\nmodel/w\n", OMC_EPARSE, "'model/w' is two inputs of training"},
      {1,
       "input %x : f32[?,3]\ninput %w : f32[3]\ninput %seen : i64[]\n%l = Exp(%w)\n"
       "return %l over %w, %x\n",
       OMC_EPARSE, "the loss is written over an input"},
      {3, "", OMC_EPARSE, "has 3 outputs, and 0 are named"},
      {3, "a\nb\nc\nd\n", OMC_EPARSE, "has 3 outputs, and 4 are named"},
      {4, "input %x : f32[?,3]\nconst %c : f32[3] = @\nreturn %c\n", OMC_EPARSE,
       "no tensor 'evaluation/c'"},
      {7, "adagrad", OMC_EUNSUPPORTED, "the optimizer 'adagrad'"},
      {8, "lr=0.5 speed=1\n", OMC_EPARSE, "'optimizer.groups', line 1: "},
      {8, "lr\n", OMC_EPARSE, "expected NAME=NUMBER"},
      {9, "1 w\n", OMC_EPARSE, "one of 1 groups"},
      {9, "0 v\n", OMC_EPARSE, "'v' is no tensor of f32 or f64"},
      {9, "0 seen\n", OMC_EPARSE, "'seen' is no tensor of f32 or f64"},
      {9, "0 w\n0 w\n", OMC_EPARSE,
       "'optimizer.parameters', line 2: the parameter 'w' comes twice"},
      {10, "0", OMC_EPARSE, "max_grad_norm is '0'"},
      {1, "input %x : f32[?,3]\ninput %w : f32[2]\ninput %seen : i64[]\nreturn %x\n", OMC_EPARSE,
       "'model/w' has another type than in the graph of training"},
      {1,
       "input %x : f32[?,3]\ninput %w : f32[3]\ninput %seen : i64[]\n%y = Mul(%x, %w)\n"
       "%l = Exp(%w)\nreturn %l, %w, %y over %x\n",
       OMC_EPARSE, "training writes over its input 'x'"},
      {11, "", OMC_EPARSE, "takes 1 tensors, and there are sizes of 0"},
      {11, "s0\n", OMC_EPARSE, "'training.sizes', line 1: the sizes 's0'"},
      {11, "s1 3\n", OMC_EPARSE, "are not those of the graph"},
      {11, "4 3\n", OMC_EPARSE, "are not those of the graph"},
      {11, "s0 3 3\n", OMC_EPARSE, "are too many"},
      {12, "5 1\n", OMC_EPARSE, "'training.ranges', line 1: the range '5 1'"},
      {12, "1\n", OMC_EPARSE, "the range '1'"},
      {12, "-1 ?\n", OMC_EPARSE, "the range '-1 ?'"},
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    omc_named_text texts[N_TEXTS];
    omc_trainer *trainer = NULL;
    describe(texts);
    texts[rows[i].text].text = rows[i].instead;
    const char *const path = write_model(texts);
    CHECK_INT(omc_trainer_open(path, &trainer), rows[i].status);
    CHECK_CONTAINS(omc_status_detail(), rows[i].detail);
    CHECK(trainer == NULL);
    (void)remove(path);
  }
}

/* What is given for it is one number. */
TEST(train_the_gradient_of_the_loss_is_of_its_type) {
  char text[512];
  (void)snprintf(text, sizeof text, "grad %%g of 0 : f32[4096]\n%s", training);
  omc_trainer *const trainer = open_changed(&(omc_named_text){"training", text});
  const float x[3] = {1, 1, 1};
  const omc_type type = {OMC_F32, {2, {1, 3}}};
  const omc_tensor input = {(void *)(uintptr_t)x, &type};
  REQUIRE(trainer);
  CHECK_STATUS(omc_trainer_step(trainer, &input, NULL, NULL), ESHAPE);
  CHECK_CONTAINS(omc_status_detail(), "output 0 is f32[], its gradient f32[4096]");
  omc_trainer_close(trainer);
}

/* Of a file in which one byte is another, at most the numbers are others. */
TEST(train_no_byte_of_a_file_does_harm) {
  omc_named_text texts[N_TEXTS];
  describe(texts);
  const char *const path = write_model(texts);
  static char bytes[8192];
  FILE *file = fopen(path, "rb");
  const size_t n = file ? fread(bytes, 1, sizeof bytes, file) : 0;
  if (file) (void)fclose(file);
  REQUIRE(n > 0 && n < sizeof bytes);
  uint32_t random = 1;
  for (int i = 0; i < 600; i++) {
    random = random * 1664525u + 1013904223u;
    const size_t at = random % n;
    const char was = bytes[at];
    bytes[at] = (char)(was ^ (1 << (random >> 28 & 7)));
    file = fopen(path, "wb");
    CHECK(file && fwrite(bytes, 1, n, file) == n);
    if (file) (void)fclose(file);
    omc_trainer *trainer = NULL;
    const float x[3] = {1, 1, 1};
    const omc_type type = {OMC_F32, {2, {1, 3}}};
    const omc_tensor inputs[] = {{(void *)(uintptr_t)x, &type}, {(void *)(uintptr_t)x, &type}};
    if (omc_trainer_open(path, &trainer) == OMC_OK && omc_trainer_n_inputs(trainer, 0) <= 2 &&
        omc_trainer_step(trainer, inputs, NULL, NULL) == OMC_OK)
      (void)!omc_trainer_update(trainer);
    omc_trainer_close(trainer);
    bytes[at] = was;
  }
  (void)remove(path);
}
