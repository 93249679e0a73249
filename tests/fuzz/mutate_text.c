/* A fuzzer for the text form of graphs, for planning what it says and for the kernels that do it,
 * that needs no more than a compiler with sanitizers:
 *
 *   mutate_text SECONDS SEED FILE...
 *
 * Texts made from those of the files, and from the graphs of all kernels, by random edits are
 * parsed, printed, cloned, planned and, if they are small, run. The same seed makes the same texts;
 * one at which something breaks is written to stderr. `python setup.py fuzz` builds and runs it. */
#include <ctype.h>
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/element.h"
#include "kernel_graphs.h"
#include "ops/op.h"
#include "roundtrip.h"
#include "run/session.h"

enum { MOST_TEXTS = 4096, MOST_BYTES = 4096, MOST_EDITS = 3 };

typedef struct text {
  char bytes[MOST_BYTES];
  size_t n;
} text;

static struct {
  char *bytes;
  size_t n;
} corpus[MOST_TEXTS];
static size_t n_corpus, n_planned, n_run;
static text current;
static uint64_t state;

/* Where an edit is most likely to be read as something else. */
static const char *const tokens[] = {"%",
                                     "%x",
                                     "_",
                                     ",",
                                     ", ",
                                     "(",
                                     ")",
                                     "[",
                                     "]",
                                     "{",
                                     "}",
                                     "=",
                                     ":",
                                     " : ",
                                     " = ",
                                     "\n",
                                     "\r\n",
                                     "\t",
                                     "\"",
                                     "\\",
                                     "@",
                                     "?",
                                     "-",
                                     ".",
                                     "#",
                                     "0x1p",
                                     "\xff",
                                     "f32[]",
                                     "i64[1] = [0]",
                                     "bool[0]",
                                     " of ",
                                     "return ",
                                     " grad",
                                     "inf",
                                     "-nan",
                                     "1e308",
                                     "name=",
                                     "input ",
                                     "const ",
                                     "grad ",
                                     "Add(",
                                     "Reshape(",
                                     "backward "};
static const char *const numbers[] = {"0",
                                      "1",
                                      "2",
                                      "3",
                                      "-1",
                                      "-2",
                                      "7",
                                      "8",
                                      "9",
                                      "100",
                                      "65536",
                                      "2147483648",
                                      "4294967295",
                                      "4611686018427387904",
                                      "9223372036854775807",
                                      "-9223372036854775808",
                                      "18446744073709551616",
                                      "0.5",
                                      "1e308"};

static uint64_t draw(uint64_t below) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return below ? state % below : 0;
}

/* Puts n bytes in the place of `gone` at position `at`; cuts what is too long. */
static void splice(size_t at, size_t gone, const char *bytes, size_t n) {
  if (n > MOST_BYTES - at) n = MOST_BYTES - at;
  size_t tail = current.n - at - gone;
  if (tail > MOST_BYTES - at - n) tail = MOST_BYTES - at - n;
  memmove(current.bytes + at + n, current.bytes + at + gone, tail);
  memcpy(current.bytes + at, bytes, n);
  current.n = at + n + tail;
}

/* The end of the line that holds position `at`. */
static size_t line_end(const char *bytes, size_t n, size_t at) {
  while (at < n && bytes[at] != '\n') at++;
  return at < n ? at + 1 : n;
}

static size_t line_begin(const char *bytes, size_t at) {
  while (at > 0 && bytes[at - 1] != '\n') at--;
  return at;
}

/* The first run of bytes from `at` on that `belongs` takes; its length, 0 if there is none. */
static size_t find_run(const char *bytes, size_t n, size_t *at, int (*belongs)(int)) {
  while (*at < n && !belongs((unsigned char)bytes[*at])) ++*at;
  size_t end = *at;
  while (end < n && belongs((unsigned char)bytes[end])) end++;
  return end - *at;
}

static void edit_byte(size_t at) {
  const char byte = (char)draw(256);
  splice(at, at < current.n, &byte, 1);
}

static void edit_token(size_t at) {
  const char *token = tokens[draw(sizeof tokens / sizeof *tokens)];
  const size_t rest = current.n - at;
  splice(at, draw(rest < 4 ? rest + 1 : 4), token, strlen(token));
}

static void edit_number(size_t at) {
  const char *number = numbers[draw(sizeof numbers / sizeof *numbers)];
  const size_t n = find_run(current.bytes, current.n, &at, isdigit);
  if (n) splice(at, n, number, strlen(number));
}

/* A word, such as the name of an op, for one of another text. */
static void edit_word(size_t at) {
  const size_t from = draw(n_corpus);
  size_t middle = draw(corpus[from].n);
  const size_t n = find_run(current.bytes, current.n, &at, isalpha);
  const size_t more = find_run(corpus[from].bytes, corpus[from].n, &middle, isalpha);
  if (n) splice(at, n, corpus[from].bytes + middle, more);
}

static void erase_some(size_t at) {
  const size_t rest = current.n - at;
  splice(at, draw(rest < 8 ? rest + 1 : 8), "", 0);
}

static void erase_line(size_t at) {
  const size_t begin = line_begin(current.bytes, at);
  splice(begin, line_end(current.bytes, current.n, at) - begin, "", 0);
}

static void add_line(size_t at) {
  const size_t from = draw(n_corpus), middle = draw(corpus[from].n);
  const size_t begin = line_begin(corpus[from].bytes, middle);
  splice(line_begin(current.bytes, at), 0, corpus[from].bytes + begin,
         line_end(corpus[from].bytes, corpus[from].n, middle) - begin);
}

static void repeat_some(size_t at) {
  char piece[64];
  const size_t rest = current.n - at, n = rest < sizeof piece ? rest : draw(sizeof piece);
  memcpy(piece, current.bytes + at, n);
  splice(draw(current.n + 1), 0, piece, n);
}

/* Those that leave most texts well formed come more than once. */
static void (*const edits[])(size_t at) = {edit_byte,   edit_token, edit_number, edit_number,
                                           edit_number, edit_word,  edit_word,   erase_some,
                                           erase_line,  add_line,   repeat_some};

/* A sanitizer that complains ends in SIGABRT, where the text is shown. */
#define OPTIONS(sanitizer, options)                                                         \
  __attribute__((visibility("default"))) const char *__##sanitizer##_default_options(void); \
  const char *__##sanitizer##_default_options(void) { return options; }
OPTIONS(asan, "abort_on_error=1:allocator_may_return_null=1")
OPTIONS(ubsan, "abort_on_error=1")

static void show(int unused) {
  (void)unused;
  fprintf(stderr, "the text, %zu bytes:\n", current.n);
  fwrite(current.bytes, 1, current.n, stderr);
}

/* ---- running what has been planned ---- */

enum { MOST_TENSORS = 32, MOST_TENSOR = 1 << 16, MOST_ARENA = 1 << 22 /* bytes */ };
#define MOST_WORK 5e7 /* operations, and bytes that they read and write */

/* Tensors of a run, with nothing beside them that a kernel might read or write unseen. */
typedef struct tensors {
  void *data[MOST_TENSORS];
  uint32_t n;
} tensors;

static double draw_float(void) {
  static const double special[] = {INFINITY, -INFINITY, NAN, 0, 1e30};
  if (draw(40) == 0) return special[draw(sizeof special / sizeof *special)];
  return (double)draw(64) / 16 - 2;
}

/* Mostly an index of something. */
static int64_t draw_int(void) { return (int64_t)draw(4) - (draw(20) ? 0 : (int64_t)draw(1000)); }

static bool add_tensor(tensors *t, const omc_type *type) {
  size_t bytes;
  void *data;
  if (t->n == MOST_TENSORS || omc_type_bytes(type, &bytes) != OMC_OK || bytes > MOST_TENSOR)
    return false;
  if (posix_memalign(&data, 64, bytes + !bytes) != 0) return false;
  for (int64_t i = 0; i < omc_shape_numel(&type->shape); i++) {
    if (omc_dtype_is_float(type->dtype))
      omc_element_set_float(type->dtype, data, i, draw_float());
    else
      omc_element_set_int(type->dtype, data, i,
                          type->dtype == OMC_BOOL ? (int64_t)draw(2) : draw_int());
  }
  t->data[t->n++] = data;
  return true;
}

static bool is_small(const omc_plan *plan) {
  double work = 0;
  omc_cost cost;
  for (uint32_t s = 0; s < plan->n_steps; s++)
    if (omc_node_cost(plan->steps[s].node, &cost) == OMC_OK) work += cost.flops + cost.bytes;
  return work <= MOST_WORK && plan->arena_bytes <= MOST_ARENA;
}

static omc_status run_with(omc_plan *plan, void *const *in, void **out, void *const *grads,
                           void *const *results) {
  const omc_graph *g = plan->graph;
  omc_run *run;
  OMC_TRY(omc_run_forward(plan, in, out, plan->lends_any ? results : NULL, 7, NULL, &run));
  if (!run) return OMC_OK;
  for (uint32_t k = 0; k < g->n_outputs; k++)
    if (omc_over(g, k)) out[k] = in[omc_over(g, k)->index];
  omc_backward b = {.inputs = in, .outputs = out, .grads = grads, .results = results};
  omc_status status = omc_run_enter(run, &b);
  if (status == OMC_OK) status = omc_run_backward(run, &b);
  omc_run_destroy(run);
  return status;
}

static omc_status run(omc_plan *plan) {
  const omc_graph *g = plan->graph;
  tensors in = {.n = 0}, results = {.n = 0}, out = {.n = 0}, grads = {.n = 0};
  omc_status status = OMC_OK;
  bool fits = is_small(plan);
  for (uint32_t i = 0; fits && i < g->n_inputs; i++)
    fits = add_tensor(&in, &g->inputs[i]->type) && add_tensor(&results, &g->inputs[i]->type);
  for (uint32_t k = 0; fits && k < g->n_outputs; k++)
    fits = add_tensor(&out, &omc_in(g->result, k)->type) &&
           add_tensor(&grads, &omc_in(g->result, k)->type);
  n_run += fits;
  tensors own = out; /* where outputs are that are not written over inputs */
  if (fits) status = run_with(plan, in.data, own.data, grads.data, results.data);
  tensors *const all[] = {&in, &results, &out, &grads};
  for (size_t k = 0; k < sizeof all / sizeof *all; k++)
    for (uint32_t i = 0; i < all[k]->n; i++) free(all[k]->data[i]);
  return status;
}

/* The plan for the declared types, and every gradient that there can be. */
static const char *plan(const char *bytes, size_t n) {
  omc_type types[MOST_TENSORS];
  bool in_grads[MOST_TENSORS] = {false}, out_grads[MOST_TENSORS] = {false};
  omc_session *session;
  if (omc_session_create(bytes, n, NULL, NULL, NULL, omc_provider_host(), omc_default_allocator(),
                         1, &session) != OMC_OK)
    return NULL;
  const omc_graph *g = omc_session_template(session);
  omc_status status = OMC_OK;
  if (g->n_inputs <= MOST_TENSORS && g->n_outputs <= MOST_TENSORS) {
    for (uint32_t i = 0; i < g->n_inputs; i++) {
      types[i] = g->inputs[i]->type;
      in_grads[i] = g->inputs[i]->requires_grad;
      for (int32_t d = 0; d < types[i].shape.rank; d++)
        if (types[i].shape.dims[d] < 0) types[i].shape.dims[d] = 3;
    }
    omc_plan *made;
    for (int joint = 0; joint < 2 && status != OMC_EINTERNAL; joint++) {
      for (uint32_t k = 0; k < g->n_outputs; k++) out_grads[k] = joint;
      const omc_signature signature = {
          .inputs = types, .in_grads = in_grads, .out_grads = out_grads, .n_backwards = 1};
      status = omc_session_plan(session, &signature, &made);
      if (status != OMC_OK) continue;
      n_planned++;
      status = run(made);
      omc_plan_release(made);
    }
  }
  omc_session_destroy(session);
  return status == OMC_EINTERNAL ? omc_status_detail() : NULL;
}

static void add_text(const char *bytes, size_t n) {
  char *copy = n_corpus < MOST_TEXTS && n <= MOST_BYTES ? malloc(n) : NULL;
  if (!copy) return;
  memcpy(copy, bytes, n);
  corpus[n_corpus].bytes = copy;
  corpus[n_corpus++].n = n;
}

/* Graphs stand in golden files between lines like "before:". */
static void read_file(const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) return;
  char line[MOST_BYTES], graph[MOST_BYTES];
  size_t used = 0;
  bool more = true;
  while (more) {
    more = fgets(line, sizeof line, file) != NULL;
    const size_t n = more ? strlen(line) : 0;
    const bool heading = n > 1 && line[n - 2] == ':' && !strchr(line, ' ');
    if ((heading || !more) && used > 0) add_text(graph, used);
    if (heading) used = 0;
    if (heading || used + n > sizeof graph) continue;
    memcpy(graph + used, line, n);
    used += n;
  }
  fclose(file);
}

int main(int argc, char **argv) {
  if (argc < 4) return 2;
  const double seconds = atof(argv[1]);
  state = strtoull(argv[2], NULL, 10) * 0x9E3779B97F4A7C15u | 1;
  for (int i = 3; i < argc; i++) read_file(argv[i]);
  for (size_t i = 0; i < sizeof kernel_graphs / sizeof *kernel_graphs; i++)
    add_text(kernel_graphs[i], strlen(kernel_graphs[i]));
  if (n_corpus == 0) return 2;
  signal(SIGABRT, show);
  const time_t end = time(NULL) + (time_t)seconds;
  uint64_t texts = 0;
  for (; texts % 256 || time(NULL) < end; texts++) {
    const size_t from = draw(n_corpus);
    memcpy(current.bytes, corpus[from].bytes, corpus[from].n);
    current.n = corpus[from].n;
    for (uint64_t k = 1 + draw(MOST_EDITS); k > 0; k--)
      edits[draw(sizeof edits / sizeof *edits)](draw(current.n + 1));
    char *exact = malloc(current.n + !current.n); /* so that reading past its end is seen */
    if (!exact) return 2;
    memcpy(exact, current.bytes, current.n);
    const char *breach = omc_roundtrip(omc_default_allocator(), exact, current.n);
    if (!breach) breach = plan(exact, current.n);
    free(exact);
    if (!breach) continue;
    fprintf(stderr, "%s\n", breach);
    show(0);
    return 1;
  }
  printf("%llu texts made from %zu, %zu plans, %zu runs\n", (unsigned long long)texts, n_corpus,
         n_planned, n_run);
  for (size_t i = 0; i < n_corpus; i++) free(corpus[i].bytes);
  return 0;
}
