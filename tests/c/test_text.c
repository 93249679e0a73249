#include "harness.h"

#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graph/number.h"
#include "graph/text.h"
#include "graph/verify.h"
#include "roundtrip.h"

static const char joint[] =
    "input %ids : i64[?,128]\n"
    "input %w : f32[768,3072] grad\n"
    "grad %g0 of 0 : f32[]\n"
    "const %shape : i64[2] = [-1, 768]\n"
    "const %mask : bool[10,20] = @\n"
    "const %none : f16[0,3] = []\n"
    "const %half : bf16[3] = [0.1, -inf, nan]\n"
    "%2 = Where(%mask, %half, %none)\n"
    "%3 : f32[8,64] = Softmax(%2) {axis=-1} name=\"/h.0/\\\"attn\\\"\\\\\\n\"\n"
    "%4, _, %5 : f64[] = LayerNormalization(%3, %w, _, %shape, %ids) {epsilon=0.125}\n"
    "backward:\n"
    "%6 = FusedElementwise(%g0, %3) {ops=[\"a\\\"\\\\\\n\", \"\"], args=[0, -2, 1], imm=[1e-05, "
    "2.5], "
    "outs=[], dtypes=[1], class=\"f32\"}\n"
    "forward:\n"
    "%7 = Relu(%5)\n"
    "backward:\n"
    "%8 = Relu(%6)\n"
    "return %4, %7 grads _, %8\n";

static const char *const valid[] = {
    joint,
    "input %x : f32[]\nreturn %x\n",
    "return\n",
    "const %a : u8[2] = [0, 255]\nreturn %a, %a\n",
    "input %x : f32[2]\ninput %z : f32[2]\n%y = Relu(%x)\nreturn %y, %y over %x, %x over %z\n",
    "input %x : f64[2]\ngrad %g of 0 : f64[2]\n%y, _ = Split(%x) {axis=0}\nreturn %y grads %g\n",
};

#define N_VALID (sizeof valid / sizeof *valid)

static omc_status parse(const omc_allocator *allocator, const char *text, size_t zeros,
                        omc_graph **out) {
  return omc_graph_parse(allocator, text, strlen(text), omc_find_zeros, &zeros, out);
}

/* Everything that must hold for any text holds for this one. */
static void check_roundtrip(const omc_allocator *allocator, const char *text, size_t n) {
  const char *breach = omc_roundtrip(allocator, text, n);
  CHECK_TEXT(breach ? breach : "", "");
}

static void check_prints(const char *text, size_t zeros, const char *expected) {
  omc_graph *g;
  char *printed;
  size_t bytes;
  REQUIRE_OK(parse(omc_default_allocator(), text, zeros, &g));
  CHECK_OK(omc_graph_verify(g, false));
  if (CHECK_OK(omc_graph_print(g, omc_default_allocator(), &printed, &bytes))) {
    CHECK_TEXT(printed, expected);
    CHECK_INT(bytes, strlen(expected) + 1);
    omc_free(omc_default_allocator(), printed, 1, bytes);
  }
  omc_graph_destroy(g);
}

/* Constants are printed where first used, so this one is written in that order. */
TEST(text_prints_as_it_was_written) {
  check_prints(
      "  input\t%x :f32[ 2 , ? ]grad # comment \"\n"
      "\n"
      "# const\r\n"
      "const %k : f32[3] = [1,2.50,-1e3]\n"
      "%z=Add(%x,%k)\n"
      "%y=Elu(%x){alpha=1,scale=-.5}name=\"n\"\n"
      "return %y",
      0,
      "input %x : f32[2,?] grad\n"
      "const %k : f32[3] = [1.0, 2.5, -1000.0]\n"
      "%z = Add(%x, %k)\n"
      "%y = Elu(%x) {alpha=1, scale=-0.5} name=\"n\"\n"
      "return %y\n");
}

TEST(joint_graph_prints_as_it_was_written) {
  char expected[sizeof joint];
  strcpy(expected, joint);
  /* Uses come in the order mask, half, none, shape. */
  const char *a = strstr(joint, "const"), *b = strstr(joint, "%2 =");
  static const char consts[] =
      "const %mask : bool[10,20] = @\n"
      "const %half : bf16[3] = [0.1, -inf, nan]\n"
      "const %none : f16[0,3] = []\n"
      "const %shape : i64[2] = [-1, 768]\n";
  REQUIRE((size_t)(b - a) == strlen(consts));
  memcpy(expected + (a - joint), consts, strlen(consts));
  check_prints(joint, 200, expected);
}

TEST(backwards_print_as_they_were_written) {
  static const char text[] =
      "input %x : f32[2] grad\n"
      "grad %g of 0 : f32[2]\n"
      "grad %h of 1 : f32[2]\n"
      "%y = Tanh(%x)\n"
      "backward:\n"
      "%dx = Mul(%g, %y)\n"
      "backward 1:\n"
      "%ex = Mul(%h, %y)\n"
      "backward 2:\n"
      "%fx = Add(%h, %g)\n"
      "return %y, %x grads %dx, %ex, %fx\n";
  check_prints(text, 0, text);
}

TEST(inline_constants_are_aligned_and_typed) {
  omc_graph *g;
  REQUIRE_OK(parse(omc_default_allocator(),
                   "const %a : u8[3] = [1, 2, 255]\nconst %b : f16[2] = [1, 0.5]\n"
                   "const %c : i64[1] = [-9223372036854775808]\nconst %d : bool[2] = [0, 1]\n"
                   "return %a, %b, %c, %d\n",
                   0, &g));
  for (uint32_t i = 0; i < 4; i++) CHECK_INT((uintptr_t)omc_in(g->result, i)->data % 64, 0);
  CHECK_INT(omc_const_int(omc_in(g->result, 0), 2), 255);
  CHECK_FLOAT(omc_const_float(omc_in(g->result, 1), 1), 0.5);
  CHECK_INT(omc_const_int(omc_in(g->result, 2), 0), INT64_MIN);
  CHECK_INT(omc_const_int(omc_in(g->result, 3), 1), 1);
  omc_graph_destroy(g);
}

TEST(malformed_texts_name_the_line_and_what_was_expected) {
  static const struct {
    const char *text, *detail;
  } rows[] = {
      {"", "line 1: expected return"},
      {"input %x : f32[]\n", "line 2: expected return"},
      {"input x : f32[]", "line 1: expected '%' and a name, not 'x : f32[]'"},
      {"input % : f32[]", "a name after '%'"},
      {"input %x f32[]", "expected ':'"},
      {"input %x : f31[]", "expected a dtype such as f32, not 'f31'"},
      {"input %x : f32[] grads", "expected the end of the line, not 'grads'"},
      {"input %x : f32[]\ninput %x : f32[]", "line 2: %x is defined twice"},
      {"return %x", "%x is not defined"},
      {"return _", "output 0 of the graph is left out"},
      {"input %x : f32[]\n%y = Relu(%x)\nreturn %y over %y",
       "output 0 is written over what is no input"},
      {"input %x : f32[]\n%y = Relu(%x)\nreturn %y over %x, %y over %x",
       "outputs 0 and 1 are written over one input"},
      {"input %x : f32[]\nreturn %x over", "expected '%' and a name"},
      {"input %x : f32[]\nreturn %x grads %x over %x", "the end of the line"},
      {"return\nreturn", "line 2: expected nothing after return"},
      {"input %x : f32[]\ninput %y : f32[]\nreturn %x grads %x", "1 gradients for 2 inputs"},
      {"%y = Nope(_)", "no op is named Nope"},
      {"%y = Relu", "expected '('"},
      {"%y = Relu(_", "expected ',' or ')'"},
      {"%y = Relu(_) {a}", "expected '=' after the name of an attribute"},
      {"%y = Relu(_) {a=}", "expected a number"},
      {"%y = Relu(_) {a=1, a=2}", "attribute a is given twice"},
      {"%y = Relu(_) {a=[1, 2.0]}", "a list that mixes kinds"},
      {"%y = Relu(_) {a=99999999999999999999}", "does not fit in 64 bits"},
      {"%y = Relu(_) {a=0x10}", "expected a number"},
      {"%y = Relu(_) {a=-}", "expected a number"},
      {"%y = Relu(_) {a=\"b}", "a string that ends on its line"},
      {"%y = Relu(_) {a=\"\\q\"}", "'\\' after '\\'"},
      {"%y = Relu(%y)", "%y is not defined"},
      {"%y, %y = Relu(_)", "%y is defined twice"},
      {"const %c : f32[2] = [1.0]", "expected ',' and another element"},
      {"const %c : f32[2] = [1.0, 2.0, 3.0]", "expected ']'"},
      {"const %c : f32[?] = [1.0]", "f32[?] has an unknown dim"},
      {"const %c : f32[99999999999] = [1.0]", "fewer elements than its type says"},
      {"const %c : f32[4294967296,4294967296] = @", "more bytes than memory can hold"},
      {"const %c : u8[1] = [256]", "element 0 is no u8"},
      {"const %c : i64[1] = [1.0]", "element 0 is no i64"},
      {"const %c : bool[1] = [2]", "element 0 is no bool"},
      {"const %c : f32[3] = @", "%c has 8 bytes, its type 12"},
      {"grad %g of -1 : f32[]", "the number of an output"},
      {"grad %g of 4000000000 : f32[]", "the number of an output"},
      {"grad %g of 0 : f32[]\ngrad %h of 0 : f32[]", "line 2: output 0 has a gradient already"},
      {"grad %g of 1 : f32[]\nreturn", "gradient of output 1 of a graph with 0 outputs"},
      {"grad %g of 0 : f32[]\nreturn %g", "%g belongs to backward"},
      {"grad %g of 0 : f32[]\n%y = Relu(%g)", "line 2: %g belongs to backward"},
      {"sideways:", "expected a statement, not 'sideways:'"},
      {"backward", "expected ':'"},
      {"backward 0:", "the number of a backward"},
      {"grad %g of 0 : f32[]\nbackward:\n%y = Relu(%g)\nbackward 1:\n%z = Relu(%y)",
       "line 5: %y belongs to another backward"},
      {"input %x : f32[]\nbackward 1:\n%y = Relu(%x)\nreturn %x grads %y, _",
       "%y belongs to another backward"},
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    omc_graph *g;
    if (CHECK_STATUS(parse(omc_default_allocator(), rows[i].text, 8, &g), EPARSE))
      CHECK_CONTAINS(omc_status_detail(), rows[i].detail);
    else
      CHECK_TEXT(rows[i].text, "refused");
  }
}

TEST(attributes_that_the_op_does_not_have_are_refused) {
  static const struct {
    const char *node;
    omc_status status;
    const char *detail;
  } rows[] = {
      {"Softmax(%x) {axs=1}", OMC_EUNSUPPORTED,
       "Softmax 'h': it has no attribute 'axs', which is 1"},
      {"Relu(%x) {a=\"b\"}", OMC_EUNSUPPORTED, "it has no attribute 'a', which is \"b\""},
      {"Relu(%x) {a=[1.5, 2.5]}", OMC_EUNSUPPORTED, "it has no attribute 'a', which is [1.5, ...]"},
      {"Relu(%x) {a=[]}", OMC_EUNSUPPORTED, "it has no attribute 'a', which is []"},
      {"Softmax(%x) {axis=1.5}", OMC_EPARSE, "attribute 'axis' is 1.5, of kind float, not int"},
      {"Softmax(%x) {axis=\"1\"}", OMC_EPARSE,
       "attribute 'axis' is \"1\", of kind string, not int"},
      {"Softmax(%x) {axis=[1]}", OMC_EPARSE, "attribute 'axis' is [1], of kind ints, not int"},
      {"Softmax(%x) {axis=[]}", OMC_EPARSE, "attribute 'axis' is [], of kind ints, not int"},
      {"Elu(%x) {alpha=\"1\"}", OMC_EPARSE,
       "attribute 'alpha' is \"1\", of kind string, not float"},
      {"Gelu(%x) {approximate=1}", OMC_EPARSE, "'approximate' is 1, of kind int, not string"},
      {"Transpose(%x) {perm=1}", OMC_EPARSE, "attribute 'perm' is 1, of kind int, not ints"},
      {"Transpose(%x) {perm=[\"a\"]}", OMC_EPARSE, "'perm' is [\"a\"], of kind strings, not ints"},
      {"Gelu(%x) {approximate=\"erf\"}", OMC_EUNSUPPORTED,
       "attribute 'approximate' is \"erf\", not \"none\" or \"tanh\""},
      {"ReduceSum(%x) {keepdims=2}", OMC_EPARSE, "attribute 'keepdims' is 2, not from 0 to 1"},
      {"Dropout(%x) {p=-0.5}", OMC_EPARSE, "attribute 'p' is -0.5, not from 0 to 1"},
      {"Dropout(%x) {p=2}", OMC_EPARSE, "attribute 'p' is 2, not from 0 to 1"},
      {"Dropout(%x) {p=nan}", OMC_EPARSE, "attribute 'p' is nan, not from 0 to 1"},
      {"Conv(%x, %x) {strides=[1, 0]}", OMC_EPARSE,
       "attribute 'strides' is 0, not from 1 to 2147483647"},
      {"SliceGrad(%x) {shape=[2, -1]}", OMC_EPARSE, "attribute 'shape' is -1, not at least 0"},
      {"Cast(%x) {to=99}", OMC_EUNSUPPORTED, "'to' is 99, not the ONNX code of a dtype"},
      {"Cast(%x)", OMC_EPARSE, "attribute 'to' is missing"},
      {"MaxPool(%x) {strides=[1]}", OMC_EPARSE, "attribute 'kernel_shape' is missing"},
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    char text[256];
    omc_graph *g;
    snprintf(text, sizeof text, "input %%x : f32[2]\n%%y = %s name=\"h\"\nreturn %%y\n",
             rows[i].node);
    CHECK_INT(parse(omc_default_allocator(), text, 8, &g), rows[i].status);
    CHECK_CONTAINS(omc_status_detail(), "line 2: ");
    CHECK_CONTAINS(omc_status_detail(), "'h'");
    CHECK_CONTAINS(omc_status_detail(), rows[i].detail);
  }
}

TEST(missing_elements_are_reported) {
  const char *text = "const %c : f32[2] = @\nreturn %c\n";
  omc_graph *g;
  CHECK_STATUS(parse(omc_default_allocator(), text, 5000, &g), EINVALID);
  CHECK_TEXT(omc_status_detail(), "no elements of c");
  CHECK_STATUS(omc_graph_parse(omc_default_allocator(), text, strlen(text), NULL, NULL, &g),
               EPARSE);
  CHECK_CONTAINS(omc_status_detail(), "no elements are given for %c");
}

TEST(texts_too_long_for_32_bit_numbers_are_refused) {
  omc_graph *g;
  const size_t n = (size_t)UINT32_MAX + 1;
  CHECK_STATUS(omc_graph_parse(omc_default_allocator(), "return", n, NULL, NULL, &g), EPARSE);
  CHECK_CONTAINS(omc_status_detail(), "4294967296 bytes");
}

static void check_number(double x, omc_dtype dtype, const char *expected) {
  char text[OMC_NUMBER_TEXT];
  double back = -1;
  CHECK_TEXT(omc_number_text(x, dtype, text), expected);
  CHECK(omc_number_read(text, strlen(text), &back));
  if (dtype == OMC_F64) CHECK_FLOAT(back, x);
}

TEST(numbers_are_short_and_look_like_floats) {
  check_number(1, OMC_F64, "1.0");
  check_number(-0.0, OMC_F64, "-0.0");
  check_number(0.1, OMC_F64, "0.1");
  check_number(0.1f, OMC_F32, "0.1");
  check_number(0.1f, OMC_F64, "0.10000000149011612");
  check_number(10, OMC_F64, "10.0");
  check_number(-1000, OMC_F64, "-1000.0");
  check_number(0.0009765625, OMC_F64, "0.0009765625");
  check_number(1e15, OMC_F64, "1000000000000000.0");
  check_number(999999999999999.9, OMC_F64, "999999999999999.9");
  check_number(16777216, OMC_F32, "16777216.0");
  check_number(1e22, OMC_F64, "1e+22");
  check_number(123456, OMC_F64, "123456.0");
  check_number(5e-324, OMC_F64, "5e-324");
  check_number(1.7976931348623157e308, OMC_F64, "1.7976931348623157e+308");
  check_number(1.0 / 3, OMC_F64, "0.3333333333333333");
  check_number(INFINITY, OMC_F64, "inf");
  check_number(-INFINITY, OMC_F32, "-inf");
  check_number(NAN, OMC_F32, "nan");
}

TEST(numbers_that_are_none_are_refused) {
  static const char *const rows[] = {"",    "-",   ".",   "e5",   "1e",  "1.2.3", "0x10",
                                     "1,5", "INF", "NaN", "1.0f", "--1", " 1",    "infinity"};
  double x;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
    if (!CHECK(!omc_number_read(rows[i], strlen(rows[i]), &x))) CHECK_TEXT(rows[i], "refused");
}

/* Runs where the machine has a locale with a decimal comma; elsewhere the point stays. */
TEST(numbers_do_not_depend_on_the_locale) {
  static const char *const locales[] = {"de_DE.UTF-8", "de_DE", "fr_FR.UTF-8", "ps_AF.UTF-8"};
  for (size_t i = 0; i < sizeof locales / sizeof *locales; i++) {
    setlocale(LC_NUMERIC, locales[i]);
    check_number(0.5, OMC_F64, "0.5");
    check_number(-1.25e300, OMC_F64, "-1.25e+300");
    check_number(3, OMC_F64, "3.0");
  }
  setlocale(LC_NUMERIC, "C");
}

TEST(valid_texts_keep_their_properties) {
  for (size_t i = 0; i < N_VALID; i++) {
    omc_graph *g;
    check_roundtrip(omc_default_allocator(), valid[i], strlen(valid[i]));
    REQUIRE_OK(parse(omc_default_allocator(), valid[i], 200, &g));
    omc_graph_destroy(g);
  }
}

/* Fails allocation n of parsing, verifying, printing and cloning, for every n. */
TEST(running_out_of_memory_is_a_status_and_leaks_nothing) {
  for (size_t i = 0; i < N_VALID; i++)
    for (size_t n = 0;; n++) {
      omc_test_memory memory;
      omc_test_memory_init(&memory);
      memory.fail_at = n;
      check_roundtrip(&memory.allocator, valid[i], strlen(valid[i]));
      CHECK_INT(memory.live_blocks, 0);
      REQUIRE(memory.live_bytes == 0 && n < 1000);
      if (memory.calls <= n) break;
    }
}

TEST(every_step_reports_running_out_of_memory) {
  omc_graph *g, *clone;
  char *text;
  size_t bytes;
  omc_test_memory memory;
  omc_test_memory_init(&memory);
  memory.fail_at = 0;
  CHECK_STATUS(parse(&memory.allocator, joint, 200, &g), ENOMEM);
  memory.fail_at = SIZE_MAX;
  REQUIRE_OK(parse(&memory.allocator, joint, 200, &g));
  memory.fail_at = memory.calls;
  CHECK_STATUS(omc_graph_print(g, &memory.allocator, &text, &bytes), ENOMEM);
  CHECK_STATUS(omc_graph_clone(g, &memory.allocator, &clone), ENOMEM);
  CHECK_STATUS(omc_graph_verify(g, false), ENOMEM);
  omc_graph_destroy(g);
  CHECK_INT(memory.live_bytes, 0);
}

static uint64_t random_state = 88172645463325252u;

static size_t below(size_t n) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (size_t)(random_state % n);
}

/* Replaces `cut` bytes at `at` by a piece; the text stays below `room` bytes. */
static size_t splice(char *text, size_t n, size_t room, size_t at, size_t cut, const char *piece,
                     size_t bytes) {
  if (cut > n - at) cut = n - at;
  if (n - cut + bytes >= room) return n;
  memmove(text + at + bytes, text + at + cut, n - at - cut);
  memcpy(text + at, piece, bytes);
  return n - cut + bytes;
}

static size_t mutate(char *text, size_t n, size_t room) {
  static const char *const pieces[] = {"%",
                                       "_",
                                       "[",
                                       "]",
                                       "{",
                                       "}",
                                       "\"",
                                       "\\",
                                       "\n",
                                       "#",
                                       "@",
                                       "=",
                                       ",",
                                       "?",
                                       "-",
                                       "0",
                                       "9999999999999999999",
                                       "1e400",
                                       "nan",
                                       "%x",
                                       "%3",
                                       "grad ",
                                       "const ",
                                       "backward:\n",
                                       "return ",
                                       " grads "};
  char piece[64];
  const size_t at = below(n + 1);
  switch (below(4)) {
    case 0: { /* another token */
      const char *other = pieces[below(sizeof pieces / sizeof *pieces)];
      return splice(text, n, room, at, below(3), other, strlen(other));
    }
    case 1: /* any byte */
      piece[0] = (char)below(256);
      return splice(text, n, room, at, 1, piece, 1);
    case 2: /* a stretch left out */
      return splice(text, n, room, at, below(20), "", 0);
    default: { /* a stretch from elsewhere */
      size_t from = below(n + 1), bytes = below(sizeof piece);
      if (bytes > n - from) bytes = n - from;
      memcpy(piece, text + from, bytes);
      return splice(text, n, room, at, 0, piece, bytes);
    }
  }
}

/* An exact copy on the heap, so that a read past the end is seen by the sanitizer. */
static void check_bytes(const char *text, size_t n) {
  omc_test_memory memory;
  omc_test_memory_init(&memory);
  char *copy = malloc(n ? n : 1);
  REQUIRE(copy);
  memcpy(copy, text, n);
  const char *breach = omc_roundtrip(&memory.allocator, copy, n);
  free(copy);
  if (!CHECK_TEXT(breach ? breach : "", "")) CHECK_TEXT(text, "kept");
  CHECK_INT(memory.live_bytes, 0);
}

TEST(every_prefix_of_a_text_is_survived) {
  for (size_t i = 0; i < N_VALID; i++)
    for (size_t n = 0; n < strlen(valid[i]); n++) check_bytes(valid[i], n);
}

TEST(mutated_texts_are_survived) {
  char text[2048];
  for (int round = 0; round < 20000; round++) {
    const char *from = valid[below(N_VALID)];
    size_t n = strlen(from);
    memcpy(text, from, n);
    for (size_t k = 1 + below(2); k; k--) n = mutate(text, n, sizeof text);
    text[n] = '\0';
    check_bytes(text, n);
  }
}
