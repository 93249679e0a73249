#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/element.h"
#include "graph/names.h"
#include "graph/number.h"
#include "graph/text.h"

#define MOST_ELEMENTS 16 /* of a constant printed in place */

typedef struct printer {
  const omc_graph *graph;
  const omc_allocator *allocator;
  char *text;
  size_t used, cap;
  uint32_t *number; /* by value id, of those without a name */
  bool *printed;    /* by value id: a constant already printed */
  bool no_memory;
} printer;

/* Makes room for n bytes and a terminating zero. */
static bool reserve(printer *p, size_t n) {
  if (p->no_memory) return false;
  if (n < p->cap - p->used) return true;
  size_t cap;
  char *text = NULL;
  if (omc_add_size(2 * p->cap, n + 256, &cap)) text = omc_alloc(p->allocator, 1, cap);
  if (!text) {
    p->no_memory = true;
    return false;
  }
  if (p->used) memcpy(text, p->text, p->used);
  omc_free(p->allocator, p->text, 1, p->cap);
  p->text = text;
  p->cap = cap;
  return true;
}

static void put_bytes(printer *p, const char *bytes, size_t n) {
  if (!reserve(p, n)) return;
  memcpy(p->text + p->used, bytes, n);
  p->used += n;
}

static void put(printer *p, const char *text) { put_bytes(p, text, strlen(text)); }

/* For short pieces: numbers and the like. */
OMC_PRINTF(2, 3) static void putf(printer *p, const char *fmt, ...) {
  char text[64];
  va_list args;
  va_start(args, fmt);
  vsnprintf(text, sizeof text, fmt, args);
  va_end(args);
  put(p, text);
}

static void put_string(printer *p, const char *text) {
  put(p, "\"");
  for (; *text; text++) {
    if (*text == '\n')
      put(p, "\\n");
    else if (*text == '"' || *text == '\\')
      put_bytes(p, (const char[]){'\\', *text}, 2);
    else
      put_bytes(p, text, 1);
  }
  put(p, "\"");
}

static void put_float(printer *p, double x, omc_dtype dtype) {
  char text[OMC_NUMBER_TEXT];
  put(p, omc_number_text(x, dtype, text));
}

static void put_attr_value(printer *p, const omc_attr *a) {
  if (omc_attr_is_list(a)) put(p, "[");
  for (uint32_t i = 0; i < a->n; i++) {
    const omc_attr one = omc_attr_element(a, i);
    if (i) put(p, ", ");
    if (one.kind == OMC_ATTR_INT) putf(p, "%lld", (long long)one.v.i);
    if (one.kind == OMC_ATTR_FLOAT) put_float(p, one.v.f, OMC_F64);
    if (one.kind == OMC_ATTR_STRING) put_string(p, one.v.s);
  }
  if (omc_attr_is_list(a)) put(p, "]");
}

static void put_value(printer *p, const omc_value *v) {
  if (!v)
    put(p, "_");
  else if (v->name) {
    put(p, "%");
    put(p, v->name);
  } else
    putf(p, "%%%u", p->number[v->id]);
}

static void put_values(printer *p, const omc_node *node, uint32_t from, uint32_t to) {
  for (uint32_t i = from; i < to; i++) {
    if (i > from) put(p, ", ");
    put_value(p, omc_in(node, i));
  }
}

static void put_type(printer *p, const omc_value *v) {
  if (v->type.shape.rank < 0) return;
  char text[OMC_TYPE_TEXT];
  put(p, " : ");
  put(p, omc_type_text(&v->type, text, sizeof text));
}

static void put_inputs(printer *p) {
  const omc_graph *g = p->graph;
  for (uint32_t i = 0; i < g->n_inputs; i++) {
    put(p, "input ");
    put_value(p, g->inputs[i]);
    put_type(p, g->inputs[i]);
    put(p, g->inputs[i]->requires_grad ? " grad\n" : "\n");
  }
  for (uint32_t i = 0; i < g->cap_grads; i++) {
    if (!g->grads[i]) continue;
    put(p, "grad ");
    put_value(p, g->grads[i]);
    putf(p, " of %u", i);
    put_type(p, g->grads[i]);
    put(p, "\n");
  }
}

static void put_const(printer *p, const omc_value *v) {
  const omc_dtype dtype = v->type.dtype;
  const int64_t n = omc_shape_numel(&v->type.shape);
  put(p, "const ");
  put_value(p, v);
  put_type(p, v);
  if (n > MOST_ELEMENTS) {
    put(p, " = @\n");
    return;
  }
  put(p, " = [");
  for (int64_t i = 0; i < n; i++) {
    if (i) put(p, ", ");
    if (omc_dtype_is_float(dtype))
      put_float(p, omc_const_float(v, i), dtype);
    else
      putf(p, "%lld", (long long)omc_const_int(v, i));
  }
  put(p, "]\n");
}

static void put_consts_of(printer *p, const omc_node *node) {
  for (uint32_t i = 0; i < node->n_in; i++) {
    const omc_value *v = omc_in(node, i);
    if (!omc_is_const(v) || p->printed[v->id]) continue;
    p->printed[v->id] = true;
    put_const(p, v);
  }
}

static void put_outputs(printer *p, const omc_node *node) {
  for (uint32_t i = 0; i < node->n_out; i++) {
    if (i) put(p, ", ");
    put_value(p, node->out[i]);
    if (node->out[i]) put_type(p, node->out[i]);
  }
}

static void put_node(printer *p, const omc_node *node) {
  put_outputs(p, node);
  put(p, " = ");
  put(p, omc_op_name(node->op));
  put(p, "(");
  put_values(p, node, 0, node->n_in);
  put(p, ")");
  for (uint32_t i = 0; i < node->n_attr; i++) {
    put(p, i ? ", " : " {");
    put(p, node->attr[i].name);
    put(p, "=");
    put_attr_value(p, &node->attr[i]);
  }
  if (node->n_attr) put(p, "}");
  if (node->name) {
    put(p, " name=");
    put_string(p, node->name);
  }
  put(p, "\n");
}

static void put_result(printer *p) {
  const omc_graph *g = p->graph;
  put(p, g->n_outputs ? "return " : "return");
  for (uint32_t k = 0; k < g->n_outputs; k++) {
    if (k) put(p, ", ");
    put_value(p, omc_in(g->result, k));
    if (!omc_over(g, k)) continue;
    put(p, " over ");
    put_value(p, g->over[k]);
  }
  if (g->n_grads) {
    put(p, " grads ");
    put_values(p, g->result, g->n_outputs, g->result->n_in);
  }
  put(p, "\n");
}

static void put_phase(printer *p, omc_phase phase) {
  put(p, phase == OMC_FORWARD ? "forward" : "backward");
  if (phase > OMC_BACKWARD) putf(p, " %u", phase - OMC_BACKWARD);
  put(p, ":\n");
}

static void put_graph(printer *p) {
  const omc_graph *g = p->graph;
  put_inputs(p);
  for (const omc_node *n = g->first; n; n = n->next) put_consts_of(p, n);
  put_consts_of(p, g->result);
  omc_phase phase = OMC_FORWARD;
  for (const omc_node *n = g->first; n; n = n->next) {
    if (n->phase != phase) put_phase(p, n->phase);
    phase = n->phase;
    put_node(p, n);
  }
  put_result(p);
}

omc_status omc_graph_print(const omc_graph *g, const omc_allocator *allocator, char **out,
                           size_t *bytes) {
  printer p = {.graph = g, .allocator = allocator};
  const uint32_t n = g->n_values;
  omc_status status = OMC_OK;
  p.printed = omc_alloc_zero(allocator, n, sizeof(bool));
  p.number = omc_alloc(allocator, n, sizeof(uint32_t));
  p.no_memory = !p.printed || !p.number;
  if (!p.no_memory) status = omc_number_values(g, allocator, p.number);
  if (!p.no_memory && status == OMC_OK) {
    put_graph(&p);
    put_bytes(&p, "", 1);
  }
  omc_free(allocator, p.printed, n, sizeof(bool));
  omc_free(allocator, p.number, n, sizeof(uint32_t));
  *out = p.no_memory || status != OMC_OK ? NULL : omc_alloc(allocator, 1, p.used);
  if (*out) memcpy(*out, p.text, p.used);
  omc_free(allocator, p.text, 1, p.cap);
  OMC_TRY(status);
  if (!*out) OMC_FAIL(ENOMEM, "no memory to print the graph");
  *bytes = p.used;
  return OMC_OK;
}
