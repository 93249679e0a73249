#include <string.h>

#include "base/element.h"
#include "graph/names.h"
#include "graph/number.h"
#include "graph/text.h"

typedef struct parser {
  const char *at, *end;
  const char *line_start;
  uint32_t line;
  omc_graph *graph;
  omc_names names;
  omc_arena scratch; /* names, strings and lists while they are read */
  omc_find_data find;
  void *find_ctx;
  omc_phase phase;
} parser;

/* A name, number or word of the text, borrowed. */
typedef struct span {
  const char *text;
  size_t n;
} span;

/* For "%.*s": at most 64 bytes of a span. */
#define SPAN(s) (int)((s).n < 64 ? (s).n : 64), (s).text

#define PARSE_FAIL(p, fmt, ...) OMC_FAIL(EPARSE, "line %u: " fmt, (p)->line, __VA_ARGS__)

static omc_status no_memory(void) { OMC_FAIL(ENOMEM, "no memory to parse the graph"); }

/* Says what was expected and what stands there, as far as it is plain ASCII. */
static omc_status expected(const parser *p, const char *what) {
  span rest = {p->at, 0};
  while (rest.n < (size_t)(p->end - p->at) && rest.n < 24 && p->at[rest.n] >= ' ' &&
         p->at[rest.n] <= '~')
    rest.n++;
  if (rest.n == 0) PARSE_FAIL(p, "expected %s", what);
  PARSE_FAIL(p, "expected %s, not '%.*s'", what, SPAN(rest));
}

/* Puts the line in front of the detail of a failure below the parser, memory's excepted. What is
 * not supported is no mistake of the text's. */
static omc_status at_line(const parser *p, omc_status status) {
  if (status == OMC_OK || status == OMC_ENOMEM) return status;
  const omc_status code = status == OMC_EUNSUPPORTED ? status : OMC_EPARSE;
  return omc_fail(code, "line %u: %s", p->line, omc_status_detail());
}

/* ---- tokens: each skips the blanks before it ---- */

static void skip_blanks(parser *p) {
  while (p->at < p->end && (*p->at == ' ' || *p->at == '\t' || *p->at == '\r')) p->at++;
  if (p->at < p->end && *p->at == '#')
    while (p->at < p->end && *p->at != '\n') p->at++;
}

static bool accept(parser *p, char c) {
  skip_blanks(p);
  if (p->at == p->end || *p->at != c) return false;
  p->at++;
  return true;
}

static omc_status expect(parser *p, char c, const char *what) {
  return accept(p, c) ? OMC_OK : expected(p, what);
}

static bool is_word_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

/* Letters, digits and underscores; empty if there are none. Does not move on. */
static span peek_word(parser *p) {
  skip_blanks(p);
  span word = {p->at, 0};
  while (p->at + word.n < p->end && is_word_char(p->at[word.n])) word.n++;
  return word;
}

static bool span_is(span s, const char *text) {
  return s.n == strlen(text) && !memcmp(s.text, text, s.n);
}

static bool accept_word(parser *p, const char *text) {
  const span word = peek_word(p);
  if (!span_is(word, text)) return false;
  p->at += word.n;
  return true;
}

static omc_status parse_word(parser *p, const char *what, span *out) {
  *out = peek_word(p);
  if (out->n == 0) return expected(p, what);
  p->at += out->n;
  return OMC_OK;
}

static omc_status parse_name(parser *p, span *out) {
  OMC_TRY(expect(p, '%', "'%' and a name"));
  *out = (span){p->at, 0};
  while (p->at < p->end && omc_name_char(*p->at)) p->at++;
  out->n = (size_t)(p->at - out->text);
  return out->n ? OMC_OK : expected(p, "a name after '%'");
}

/* A name already defined, or NULL for `_`. */
static omc_status parse_operand(parser *p, omc_value **out) {
  *out = NULL;
  if (accept_word(p, "_")) return OMC_OK;
  span name;
  OMC_TRY(parse_name(p, &name));
  *out = omc_names_find(&p->names, name.text, name.n);
  if (!*out) PARSE_FAIL(p, "%%%.*s is not defined", SPAN(name));
  return OMC_OK;
}

static omc_status parse_type(parser *p, omc_type *out) {
  size_t used;
  skip_blanks(p);
  OMC_TRY(at_line(p, omc_type_parse(p->at, (size_t)(p->end - p->at), out, &used)));
  p->at += used;
  return OMC_OK;
}

static bool is_number_char(char c) { return is_word_char(c) || c == '+' || c == '-' || c == '.'; }

typedef struct number {
  bool is_int;
  int64_t i; /* if it is one */
  double f;
} number;

static omc_status parse_number(parser *p, number *out) {
  skip_blanks(p);
  span s = {p->at, 0};
  while (p->at + s.n < p->end && is_number_char(p->at[s.n])) s.n++;
  const size_t sign = s.n && *s.text == '-';
  bool fits = true;
  size_t k = sign;
  for (out->i = 0; k < s.n && s.text[k] >= '0' && s.text[k] <= '9'; k++) {
    const int digit = s.text[k] - '0';
    fits = fits && !__builtin_mul_overflow(out->i, 10, &out->i) &&
           !__builtin_add_overflow(out->i, sign ? -digit : digit, &out->i);
  }
  out->is_int = k == s.n && s.n > sign;
  if (out->is_int && !fits) PARSE_FAIL(p, "%.*s does not fit in 64 bits", SPAN(s));
  if (out->is_int)
    out->f = (double)out->i;
  else if (!omc_number_read(s.text, s.n, &out->f))
    return expected(p, "a number");
  p->at += s.n;
  return OMC_OK;
}

/* A quoted string, its escapes undone, copied into the scratch arena. */
static omc_status parse_string(parser *p, const char **out) {
  OMC_TRY(expect(p, '"', "'\"'"));
  const char *close = p->at;
  while (close < p->end && *close != '"' && *close != '\n' && *close != '\0')
    close += *close == '\\' && close + 1 < p->end ? 2 : 1;
  if (close >= p->end || *close != '"') return expected(p, "a string that ends on its line");
  char *text = omc_arena_text(&p->scratch, p->at, (size_t)(close - p->at));
  if (!text) return no_memory();
  char *to = text;
  for (; p->at < close; p->at++) {
    if (*p->at != '\\') {
      *to++ = *p->at;
      continue;
    }
    p->at++;
    if (*p->at != 'n' && *p->at != '"' && *p->at != '\\')
      return expected(p, "n, '\"' or '\\' after '\\'");
    *to++ = *p->at == 'n' ? '\n' : *p->at;
  }
  *to = '\0';
  p->at = close + 1;
  *out = text;
  return OMC_OK;
}

/* ---- lists that grow in the scratch arena ---- */

static omc_status append(parser *p, void **list, uint32_t *n, uint32_t *cap, size_t size,
                         const void *item) {
  void *grown = omc_arena_grow(&p->scratch, *list, *n, cap, *n + 1, size);
  if (!grown) return no_memory();
  *list = grown;
  memcpy((char *)grown + *n * size, item, size);
  ++*n;
  return OMC_OK;
}

#define LIST(type)   \
  struct {           \
    type *items;     \
    uint32_t n, cap; \
  }
#define APPEND(p, list, item) \
  append((p), (void **)&(list)->items, &(list)->n, &(list)->cap, sizeof *(list)->items, (item))

typedef LIST(omc_value *) value_list;
typedef LIST(omc_attr) attr_list;

/* ---- statements ---- */

static omc_status define(parser *p, omc_value *v, span name) {
  const char *text = omc_arena_text(&p->scratch, name.text, name.n);
  if (!text) return no_memory();
  if (omc_names_find(&p->names, name.text, name.n))
    PARSE_FAIL(p, "%%%.*s is defined twice", SPAN(name));
  OMC_TRY(omc_graph_name_value(p->graph, v, text));
  return omc_names_add(&p->names, v);
}

static omc_status parse_input(parser *p) {
  span name;
  omc_type type;
  omc_value *v;
  OMC_TRY(parse_name(p, &name));
  OMC_TRY(expect(p, ':', "':' and a type"));
  OMC_TRY(parse_type(p, &type));
  const bool grad = accept_word(p, "grad");
  OMC_TRY(omc_graph_add_input(p->graph, NULL, &type, grad, &v));
  return define(p, v, name);
}

/* There are no more outputs than bytes of text, which bounds the list of gradients. */
static omc_status parse_grad(parser *p) {
  span name;
  number index;
  omc_value *v;
  OMC_TRY(parse_name(p, &name));
  if (!accept_word(p, "of")) return expected(p, "'of' and the number of an output");
  OMC_TRY(parse_number(p, &index));
  if (!index.is_int || index.i < 0 || index.i >= p->end - p->line_start || index.i >= UINT32_MAX)
    return expected(p, "the number of an output");
  OMC_TRY(expect(p, ':', "':' and a type"));
  omc_type type;
  OMC_TRY(parse_type(p, &type));
  OMC_TRY(at_line(p, omc_graph_add_grad(p->graph, (uint32_t)index.i, &v)));
  v->type = type;
  return define(p, v, name);
}

/* The elements between '[' and ']', exactly as many as the type has. */
static omc_status parse_elements(parser *p, const omc_type *type, size_t bytes, void *data) {
  const size_t n = bytes / omc_dtype_size(type->dtype);
  const bool is_float = omc_dtype_is_float(type->dtype);
  for (size_t k = 0; k < n; k++) {
    number x;
    if (k) OMC_TRY(expect(p, ',', "',' and another element"));
    OMC_TRY(parse_number(p, &x));
    if (is_float)
      omc_element_set_float(type->dtype, data, (int64_t)k, x.f);
    else
      omc_element_set_int(type->dtype, data, (int64_t)k, x.i);
    if (!is_float && (!x.is_int || omc_element_int(type->dtype, data, (int64_t)k) != x.i))
      PARSE_FAIL(p, "element %zu is no %s", k, omc_dtype_get(type->dtype)->text);
  }
  return expect(p, ']', "']' after the last element");
}

/* Elements written out: every one takes at least a byte of text, which bounds what is allocated. */
static omc_status parse_inline(parser *p, span name, const omc_type *type, size_t bytes,
                               const void **out) {
  if (bytes / omc_dtype_size(type->dtype) > (size_t)(p->end - p->at))
    PARSE_FAIL(p, "%%%.*s has fewer elements than its type says", SPAN(name));
  void *data = omc_arena_elements(&p->graph->arena, 1, bytes);
  if (!data) return no_memory();
  *out = data;
  return parse_elements(p, type, bytes, data);
}

static omc_status find_data(parser *p, span name, size_t bytes, const void **out) {
  const char *text = omc_arena_text(&p->scratch, name.text, name.n);
  size_t found = 0;
  if (!text) return no_memory();
  if (!p->find) PARSE_FAIL(p, "no elements are given for %%%.*s", SPAN(name));
  OMC_TRY(p->find(p->find_ctx, text, out, &found));
  if (found != bytes) PARSE_FAIL(p, "%%%.*s has %zu bytes, its type %zu", SPAN(name), found, bytes);
  return OMC_OK;
}

static omc_status parse_const(parser *p) {
  span name;
  omc_type type;
  size_t bytes;
  const void *data = NULL;
  omc_value *v;
  OMC_TRY(parse_name(p, &name));
  OMC_TRY(expect(p, ':', "':' and a type"));
  OMC_TRY(parse_type(p, &type));
  OMC_TRY(at_line(p, omc_type_bytes(&type, &bytes)));
  OMC_TRY(expect(p, '=', "'=' and elements"));
  if (accept(p, '['))
    OMC_TRY(parse_inline(p, name, &type, bytes, &data));
  else if (accept(p, '@'))
    OMC_TRY(find_data(p, name, bytes, &data));
  else
    return expected(p, "'[' or '@'");
  OMC_TRY(omc_graph_add_const(p->graph, NULL, &type, data, &v));
  return define(p, v, name);
}

static omc_status parse_scalar_attr(parser *p, omc_attr *a) {
  skip_blanks(p);
  if (p->at < p->end && *p->at == '"') {
    a->kind = OMC_ATTR_STRING;
    return parse_string(p, &a->v.s);
  }
  number x;
  OMC_TRY(parse_number(p, &x));
  a->kind = x.is_int ? OMC_ATTR_INT : OMC_ATTR_FLOAT;
  if (x.is_int)
    a->v.i = x.i;
  else
    a->v.f = x.f;
  return OMC_OK;
}

static omc_status parse_list_attr(parser *p, omc_attr *a) {
  attr_list items = {0};
  while (!accept(p, ']')) {
    omc_attr item = {.n = 1};
    if (items.n) OMC_TRY(expect(p, ',', "',' or ']'"));
    OMC_TRY(parse_scalar_attr(p, &item));
    OMC_TRY(APPEND(p, &items, &item));
  }
  return at_line(p, omc_attr_list(&p->scratch, items.items, items.n, a));
}

static omc_status parse_attrs(parser *p, attr_list *attrs) {
  if (!accept(p, '{')) return OMC_OK;
  do {
    span name;
    omc_attr a = {.n = 1};
    OMC_TRY(parse_word(p, "the name of an attribute", &name));
    for (uint32_t i = 0; i < attrs->n; i++)
      if (span_is(name, attrs->items[i].name))
        PARSE_FAIL(p, "attribute %.*s is given twice", SPAN(name));
    a.name = omc_arena_text(&p->scratch, name.text, name.n);
    if (!a.name) return no_memory();
    OMC_TRY(expect(p, '=', "'=' after the name of an attribute"));
    OMC_TRY(accept(p, '[') ? parse_list_attr(p, &a) : parse_scalar_attr(p, &a));
    OMC_TRY(APPEND(p, attrs, &a));
  } while (accept(p, ','));
  return expect(p, '}', "',' or '}' after an attribute");
}

/* An output before its node exists: a name of no bytes if left out, a rank of -1 if untyped. */
typedef struct output {
  span name;
  omc_type type;
} output;
typedef LIST(output) output_list;

static omc_status parse_outputs(parser *p, output_list *outs) {
  do {
    output out = {{NULL, 0}, {OMC_F32, {-1, {0}}}};
    if (!accept_word(p, "_")) {
      OMC_TRY(parse_name(p, &out.name));
      if (accept(p, ':')) OMC_TRY(parse_type(p, &out.type));
    }
    OMC_TRY(APPEND(p, outs, &out));
  } while (accept(p, ','));
  return expect(p, '=', "',' or '=' after an output");
}

static omc_status parse_operands(parser *p, value_list *list) {
  do {
    omc_value *v;
    OMC_TRY(parse_operand(p, &v));
    OMC_TRY(APPEND(p, list, &v));
  } while (accept(p, ','));
  return OMC_OK;
}

/* `over` gets for each of them the value after that word, or NULL. */
static omc_status parse_results(parser *p, value_list *list, value_list *over) {
  do {
    omc_value *v, *input = NULL;
    OMC_TRY(parse_operand(p, &v));
    if (accept_word(p, "over")) OMC_TRY(parse_operand(p, &input));
    OMC_TRY(APPEND(p, list, &v));
    OMC_TRY(APPEND(p, over, &input));
  } while (accept(p, ','));
  return OMC_OK;
}

/* Nothing of the forward phase may use a value of a backward, nor one backward of another. */
static omc_status check_phase(const parser *p, const omc_value *v, omc_phase user) {
  if (!v || omc_may_read(user, v)) return OMC_OK;
  PARSE_FAIL(p, "%%%s belongs to %s and is used in %s", v->name,
             user == OMC_FORWARD ? "backward" : "another backward",
             user == OMC_FORWARD ? "forward" : "this one");
}

static omc_status parse_node(parser *p) {
  output_list outs = {0};
  value_list in = {0};
  attr_list attrs = {0};
  omc_node_spec spec = {.phase = p->phase};
  span op;
  OMC_TRY(parse_outputs(p, &outs));
  OMC_TRY(parse_word(p, "the name of an op", &op));
  if (!omc_op_from_name(op.text, op.n, &spec.op)) PARSE_FAIL(p, "no op is named %.*s", SPAN(op));
  OMC_TRY(expect(p, '(', "'(' after the name of an op"));
  if (!accept(p, ')')) {
    OMC_TRY(parse_operands(p, &in));
    OMC_TRY(expect(p, ')', "',' or ')' after an input"));
  }
  for (uint32_t i = 0; i < in.n; i++) OMC_TRY(check_phase(p, in.items[i], p->phase));
  OMC_TRY(parse_attrs(p, &attrs));
  if (accept_word(p, "name")) {
    OMC_TRY(expect(p, '=', "'=' after name"));
    OMC_TRY(parse_string(p, &spec.name));
  }
  spec.in = in.items;
  spec.attr = attrs.items;
  spec.n_in = in.n;
  spec.n_attr = attrs.n;
  spec.n_out = outs.n;
  omc_node *node;
  OMC_TRY(at_line(p, omc_graph_add_node(p->graph, &spec, &node)));
  for (uint32_t i = 0; i < outs.n; i++) {
    node->out[i]->type = outs.items[i].type;
    if (outs.items[i].name.n)
      OMC_TRY(define(p, node->out[i], outs.items[i].name));
    else
      node->out[i] = NULL;
  }
  return OMC_OK;
}

static bool at_end_of_line(parser *p) {
  skip_blanks(p);
  return p->at == p->end || *p->at == '\n';
}

static omc_status parse_return(parser *p) {
  value_list values = {0}, over = {0};
  uint32_t n_outputs;
  skip_blanks(p);
  if (!at_end_of_line(p) && !span_is(peek_word(p), "grads"))
    OMC_TRY(parse_results(p, &values, &over));
  n_outputs = values.n;
  if (accept_word(p, "grads")) OMC_TRY(parse_operands(p, &values));
  OMC_TRY(
      at_line(p, omc_graph_set_result(p->graph, values.items, n_outputs, values.n - n_outputs)));
  for (uint32_t k = 0; k < over.n; k++)
    if (over.items[k]) OMC_TRY(at_line(p, omc_graph_write_over(p->graph, k, over.items[k])));
  for (uint32_t i = 0; i < values.n; i++)
    OMC_TRY(check_phase(p, values.items[i], omc_result_phase(p->graph, i)));
  return OMC_OK;
}

static omc_status parse_phase(parser *p) {
  p->phase = accept_word(p, "backward") ? OMC_BACKWARD : OMC_FORWARD;
  if (p->phase == OMC_FORWARD && !accept_word(p, "forward")) return expected(p, "a statement");
  if (accept(p, ':')) return OMC_OK;
  number nth;
  if (p->phase == OMC_FORWARD || at_end_of_line(p)) return expected(p, "':'");
  OMC_TRY(parse_number(p, &nth));
  if (!nth.is_int || nth.i < 1 || nth.i > UINT16_MAX)
    return expected(p, "the number of a backward");
  p->phase += (omc_phase)nth.i;
  return expect(p, ':', "':'");
}

static omc_status parse_statement(parser *p, bool *returned) {
  static const struct {
    const char *word;
    omc_status (*parse)(parser *p);
  } forms[] = {{"input", parse_input}, {"grad", parse_grad}, {"const", parse_const}};
  skip_blanks(p);
  if (*p->at == '%' || span_is(peek_word(p), "_")) return parse_node(p);
  for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
    if (accept_word(p, forms[i].word)) return forms[i].parse(p);
  if (!accept_word(p, "return")) return parse_phase(p);
  *returned = true;
  return parse_return(p);
}

static omc_status parse_lines(parser *p) {
  bool returned = false;
  for (;; p->line++) {
    p->line_start = p->at;
    if (!at_end_of_line(p)) {
      if (returned) return expected(p, "nothing after return");
      OMC_TRY(parse_statement(p, &returned));
      if (!at_end_of_line(p)) return expected(p, "the end of the line");
    }
    if (p->at == p->end) break;
    p->at++;
  }
  if (!returned) return expected(p, "return");
  return OMC_OK;
}

omc_status omc_graph_parse(const omc_allocator *allocator, const char *text, size_t n,
                           omc_find_data find, void *find_ctx, omc_graph **out) {
  if (n > UINT32_MAX) OMC_FAIL(EPARSE, "a graph of %zu bytes, above %u", n, UINT32_MAX);
  parser p = {.at = text, .end = text + n, .line = 1, .find = find, .find_ctx = find_ctx};
  OMC_TRY(omc_graph_create(allocator, &p.graph));
  omc_names_init(&p.names, allocator);
  omc_arena_init(&p.scratch, allocator);
  const omc_status status = parse_lines(&p);
  omc_arena_deinit(&p.scratch);
  omc_names_deinit(&p.names);
  if (status == OMC_OK)
    *out = p.graph;
  else
    omc_graph_destroy(p.graph);
  return status;
}
