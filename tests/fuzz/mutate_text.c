/* A fuzzer for the text form of graphs, and for planning what it says, that needs no more than a
 * compiler with sanitizers:
 *
 *   mutate_text SECONDS SEED FILE...
 *
 * Texts made from those of the files by random edits are parsed, printed, cloned and planned. The
 * same seed makes the same texts; one at which something breaks is written to stderr. `python
 * setup.py fuzz` builds and runs it. */
#include <ctype.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

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
static size_t n_corpus, n_planned;
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

/* The plan for the declared types, and every gradient that there can be. */
static const char *plan(const char *bytes, size_t n) {
  enum { MOST = 32 };
  omc_type types[MOST];
  bool in_grads[MOST] = {false}, out_grads[MOST] = {false};
  omc_session *session;
  if (omc_session_create(bytes, n, NULL, NULL, NULL, omc_provider_host(), omc_default_allocator(),
                         1, &session) != OMC_OK)
    return NULL;
  const omc_graph *g = omc_session_template(session);
  omc_status status = OMC_OK;
  if (g->n_inputs <= MOST && g->n_outputs <= MOST) {
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
      omc_plan_release(made);
      n_planned++;
    }
  }
  omc_session_destroy(session);
  return status == OMC_EINTERNAL ? omc_status_detail() : NULL;
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
    if ((heading || !more) && used > 0 && n_corpus < MOST_TEXTS) {
      char *copy = malloc(used);
      if (!copy) break;
      memcpy(copy, graph, used);
      corpus[n_corpus].bytes = copy;
      corpus[n_corpus++].n = used;
    }
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
  printf("%llu texts made from %zu, %zu plans\n", (unsigned long long)texts, n_corpus, n_planned);
  for (size_t i = 0; i < n_corpus; i++) free(corpus[i].bytes);
  return 0;
}
