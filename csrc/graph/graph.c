#include "graph/graph.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/element.h"
#include "graph/edit.h"
#include "graph/names.h"
#include "graph/schema.h"

static omc_status no_memory(void) { OMC_FAIL(ENOMEM, "no memory for the graph"); }

static omc_node *new_node(omc_arena *arena, uint32_t n_in, uint32_t n_out) {
  omc_node *node = OMC_NEW(arena, omc_node);
  if (!node) return NULL;
  node->n_in = n_in;
  node->n_out = n_out;
  node->in = OMC_NEW_ARRAY(arena, omc_use, n_in);
  node->out = OMC_NEW_ARRAY(arena, omc_value *, n_out);
  if (!node->in || !node->out) return NULL;
  for (uint32_t i = 0; i < n_in; i++) node->in[i] = (omc_use){NULL, node, i, NULL, NULL};
  return node;
}

static omc_node *new_result(omc_arena *arena, uint32_t n_in) {
  omc_node *result = new_node(arena, n_in, 0);
  if (result) result->op = OMC_N_OPS;
  return result;
}

omc_status omc_graph_create(const omc_allocator *allocator, omc_graph **out) {
  omc_graph *g = omc_alloc_zero(allocator, 1, sizeof *g);
  if (!g) return no_memory();
  omc_arena_init(&g->arena, allocator);
  omc_arena_init(&g->scratch, allocator);
  g->result = new_result(&g->arena, 0);
  if (!g->result) {
    omc_graph_destroy(g);
    return no_memory();
  }
  *out = g;
  return OMC_OK;
}

void omc_graph_destroy(omc_graph *g) {
  if (!g) return;
  const omc_allocator *allocator = g->arena.allocator;
  omc_arena_deinit(&g->arena);
  omc_arena_deinit(&g->scratch);
  omc_free(allocator, g, 1, sizeof *g);
}

static omc_status copy_text(omc_arena *arena, const char *text, const char **out) {
  *out = text ? omc_arena_text(arena, text, strlen(text)) : NULL;
  return text && !*out ? no_memory() : OMC_OK;
}

static omc_status new_value(omc_graph *g, omc_role role, uint32_t index, const char *name,
                            omc_value **out) {
  if (name && !omc_name_valid(name, strlen(name)))
    OMC_FAIL(EINVALID, "'%s' is no name of a value", name);
  omc_value *v = OMC_NEW(&g->arena, omc_value);
  if (!v) return no_memory();
  OMC_TRY(copy_text(&g->arena, name, &v->name));
  v->type.shape.rank = -1;
  v->role = role;
  v->index = index;
  v->id = g->n_values++;
  *out = v;
  return OMC_OK;
}

/* Makes room for `need` pointers in a list that has room for *cap, `n` of them in use. */
static omc_status reserve(omc_arena *arena, omc_value ***list, uint32_t n, uint32_t *cap,
                          uint32_t need) {
  omc_value **grown = omc_arena_grow(arena, *list, n, cap, need, sizeof *grown);
  if (!grown && need) return no_memory();
  *list = grown;
  return OMC_OK;
}

omc_status omc_graph_add_input(omc_graph *g, const char *name, const omc_type *type,
                               bool requires_grad, omc_value **out) {
  OMC_TRY(reserve(&g->arena, &g->inputs, g->n_inputs, &g->cap_inputs, g->n_inputs + 1));
  omc_value *v = NULL;
  OMC_TRY(new_value(g, OMC_ROLE_INPUT, g->n_inputs, name, &v));
  v->type = *type;
  v->requires_grad = requires_grad;
  g->inputs[g->n_inputs++] = v;
  *out = v;
  return OMC_OK;
}

omc_status omc_graph_add_const(omc_graph *g, const char *name, const omc_type *type,
                               const void *data, omc_value **out) {
  omc_value *v = NULL;
  OMC_TRY(new_value(g, OMC_ROLE_CONST, 0, name, &v));
  v->type = *type;
  v->data = data;
  *out = v;
  return OMC_OK;
}

omc_status omc_graph_add_grad(omc_graph *g, uint32_t index, omc_value **out) {
  const bool has_result = g->n_outputs > 0;
  if (has_result && index >= g->n_outputs)
    OMC_FAIL(EINVALID, "gradient of output %u of a graph with %u outputs", index, g->n_outputs);
  if (index < g->cap_grads && g->grads[index])
    OMC_FAIL(EINVALID, "output %u has a gradient already", index);
  OMC_TRY(reserve(&g->arena, &g->grads, g->cap_grads, &g->cap_grads,
                  has_result ? g->n_outputs : index + 1));
  omc_value *v = NULL;
  OMC_TRY(new_value(g, OMC_ROLE_GRAD, index, NULL, &v));
  if (has_result) v->type = omc_in(g->result, index)->type;
  g->grads[index] = v;
  *out = v;
  return OMC_OK;
}

static omc_status copy_list(omc_arena *arena, const void *list, uint32_t n, size_t size,
                            void **out) {
  *out = omc_arena_alloc(arena, n, size);
  if (!*out) return no_memory();
  if (n) memcpy(*out, list, n * size);
  return OMC_OK;
}

static omc_status copy_attr(omc_arena *arena, const omc_attr *from, omc_attr *to) {
  *to = *from;
  OMC_TRY(copy_text(arena, from->name, &to->name));
  void *list;
  switch (from->kind) {
    case OMC_ATTR_INT:
    case OMC_ATTR_FLOAT:
      break;
    case OMC_ATTR_STRING:
      OMC_TRY(copy_text(arena, from->v.s, &to->v.s));
      break;
    case OMC_ATTR_INTS:
      OMC_TRY(copy_list(arena, from->v.is, from->n, sizeof *from->v.is, &list));
      to->v.is = list;
      break;
    case OMC_ATTR_FLOATS:
      OMC_TRY(copy_list(arena, from->v.fs, from->n, sizeof *from->v.fs, &list));
      to->v.fs = list;
      break;
    case OMC_ATTR_STRINGS: {
      const char **texts = OMC_NEW_ARRAY(arena, const char *, from->n);
      if (!texts) return no_memory();
      for (uint32_t i = 0; i < from->n; i++) OMC_TRY(copy_text(arena, from->v.ss[i], &texts[i]));
      to->v.ss = texts;
      break;
    }
  }
  return OMC_OK;
}

/* A node as the spec says, but for its inputs and outputs, of which it has as many. */
static omc_status make_node(omc_arena *arena, const omc_node_spec *spec, omc_node **out) {
  omc_node *node = new_node(arena, spec->n_in, spec->n_out);
  omc_attr *attrs = OMC_NEW_ARRAY(arena, omc_attr, spec->n_attr);
  if (!node || !attrs) return no_memory();
  node->op = spec->op;
  node->phase = spec->phase;
  OMC_TRY(copy_text(arena, spec->name, &node->name));
  for (uint32_t i = 0; i < spec->n_attr; i++) OMC_TRY(copy_attr(arena, &spec->attr[i], &attrs[i]));
  node->attr = attrs;
  node->n_attr = spec->n_attr;
  *out = node;
  return OMC_OK;
}

/* Links into the list only when nothing can fail any more: a failure leaves no half a node. */
omc_status omc_graph_add_node(omc_graph *g, const omc_node_spec *spec, omc_node **out) {
  omc_node *node;
  OMC_TRY(make_node(&g->arena, spec, &node));
  OMC_TRY(omc_schema_check(node));
  for (uint32_t i = 0; i < spec->n_out; i++) {
    OMC_TRY(new_value(g, OMC_ROLE_NODE, i, NULL, &node->out[i]));
    node->out[i]->producer = node;
  }
  for (uint32_t i = 0; i < spec->n_in; i++) omc_set_input(node, i, spec->in[i]);
  omc_link_node(g, node, spec->before);
  *out = node;
  return OMC_OK;
}

omc_status omc_graph_name_value(omc_graph *g, omc_value *v, const char *name) {
  if (!omc_name_valid(name, strlen(name))) OMC_FAIL(EINVALID, "'%s' is no name of a value", name);
  return copy_text(&g->arena, name, &v->name);
}

omc_status omc_graph_set_result(omc_graph *g, omc_value *const *values, uint32_t n_outputs,
                                uint32_t n_grads) {
  if (n_grads && (!g->n_inputs || n_grads % g->n_inputs))
    OMC_FAIL(EINVALID, "%u gradients for %u inputs", n_grads, g->n_inputs);
  for (uint32_t i = 0; i < n_outputs; i++)
    if (!values[i]) OMC_FAIL(EINVALID, "output %u of the graph is left out", i);
  for (uint32_t i = n_outputs; i < g->cap_grads; i++)
    if (g->grads[i])
      OMC_FAIL(EINVALID, "gradient of output %u of a graph with %u outputs", i, n_outputs);
  if (g->grads) OMC_TRY(reserve(&g->arena, &g->grads, g->cap_grads, &g->cap_grads, n_outputs));
  omc_node *result = new_result(&g->arena, n_outputs + n_grads);
  if (!result) return no_memory();
  for (uint32_t i = 0; i < g->result->n_in; i++) omc_set_input(g->result, i, NULL);
  for (uint32_t i = 0; i < result->n_in; i++) omc_set_input(result, i, values[i]);
  g->result = result;
  if (n_outputs != g->n_outputs) g->over = NULL;
  g->n_outputs = n_outputs;
  g->n_grads = n_grads;
  return OMC_OK;
}

omc_status omc_graph_write_over(omc_graph *g, uint32_t output, omc_value *input) {
  if (output >= g->n_outputs)
    OMC_FAIL(EINVALID, "output %u of a graph with %u outputs", output, g->n_outputs);
  if (!input || input->role != OMC_ROLE_INPUT)
    OMC_FAIL(EINVALID, "output %u is written over what is no input", output);
  for (uint32_t k = 0; k < g->n_outputs; k++)
    if (k != output && omc_over(g, k) == input)
      OMC_FAIL(EINVALID, "outputs %u and %u are written over one input", k, output);
  if (!g->over) g->over = OMC_NEW_ARRAY(&g->arena, omc_value *, g->n_outputs);
  if (!g->over) return no_memory();
  g->over[output] = input;
  return OMC_OK;
}

/* OMC_OK if both are of one type; else with output k's in a, and the other's in b. */
static omc_status compare_types(const omc_graph *g, uint32_t k, const omc_value *other,
                                char a[OMC_TYPE_TEXT], char b[OMC_TYPE_TEXT]) {
  const omc_type *of = &omc_in(g->result, k)->type;
  if (!other || omc_type_equal(&other->type, of)) return OMC_OK;
  omc_type_text(of, a, OMC_TYPE_TEXT);
  omc_type_text(&other->type, b, OMC_TYPE_TEXT);
  return other->type.dtype == of->dtype ? OMC_ESHAPE : OMC_EDTYPE;
}

omc_status omc_graph_check_over(const omc_graph *g) {
  char a[OMC_TYPE_TEXT], b[OMC_TYPE_TEXT];
  for (uint32_t k = 0; k < g->n_outputs; k++) {
    const omc_value *over = omc_over(g, k);
    const omc_status status = compare_types(g, k, over, a, b);
    if (status != OMC_OK)
      return omc_fail(status, "output %u, %s, is written over input %u '%s', %s", k, a, over->index,
                      over->name ? over->name : "", b);
  }
  return OMC_OK;
}

omc_status omc_graph_check_grads(const omc_graph *g) {
  char a[OMC_TYPE_TEXT], b[OMC_TYPE_TEXT];
  for (uint32_t k = 0; k < g->n_outputs && k < g->cap_grads; k++) {
    const omc_status status = compare_types(g, k, g->grads[k], a, b);
    if (status != OMC_OK) return omc_fail(status, "output %u is %s, its gradient %s", k, a, b);
  }
  return OMC_OK;
}

/* Copies a value under the next id and enters it in `map`, pointers by the ids that are copied. */
static omc_status clone_value(omc_graph *g, const omc_value *from, omc_value **map) {
  omc_value *v = OMC_NEW(&g->arena, omc_value);
  if (!v) return no_memory();
  *v = *from;
  v->id = g->n_values++;
  v->uses = NULL;
  v->producer = NULL;
  OMC_TRY(copy_text(&g->arena, from->name, &v->name));
  map[from->id] = v;
  return OMC_OK;
}

static omc_status clone_inputs(omc_graph *g, const omc_node *from, omc_node *to, omc_value **map) {
  for (uint32_t i = 0; i < from->n_in; i++) {
    const omc_value *v = omc_in(from, i);
    if (!v) continue;
    if (!map[v->id]) OMC_TRY(clone_value(g, v, map));
    omc_set_input(to, i, map[v->id]);
  }
  return OMC_OK;
}

static omc_status clone_node(omc_graph *g, const omc_node *from, omc_value **map) {
  const omc_node_spec spec = {from->op,     from->phase, from->name, from->n_in, from->n_out,
                              from->n_attr, NULL,        from->attr, NULL};
  omc_node *node;
  OMC_TRY(make_node(&g->arena, &spec, &node));
  OMC_TRY(clone_inputs(g, from, node, map));
  for (uint32_t i = 0; i < from->n_out; i++) {
    if (!from->out[i]) continue;
    OMC_TRY(clone_value(g, from->out[i], map));
    node->out[i] = map[from->out[i]->id];
    node->out[i]->producer = node;
  }
  omc_link_node(g, node, NULL);
  return OMC_OK;
}

/* Copies a list of inputs or gradients, `n` long, entries NULL or not yet in `map`. */
static omc_status clone_list(omc_graph *g, omc_value *const *from, uint32_t n, omc_value **map,
                             omc_value ***list, uint32_t *cap) {
  OMC_TRY(reserve(&g->arena, list, 0, cap, n));
  for (uint32_t i = 0; i < n; i++) {
    if (!from[i]) continue;
    OMC_TRY(clone_value(g, from[i], map));
    (*list)[i] = map[from[i]->id];
  }
  return OMC_OK;
}

static omc_status clone_into(const omc_graph *from, omc_graph *g, omc_value **map) {
  g->n_inputs = from->n_inputs;
  OMC_TRY(clone_list(g, from->inputs, from->n_inputs, map, &g->inputs, &g->cap_inputs));
  OMC_TRY(clone_list(g, from->grads, from->cap_grads, map, &g->grads, &g->cap_grads));
  for (const omc_node *n = from->first; n; n = n->next) OMC_TRY(clone_node(g, n, map));
  g->result = new_result(&g->arena, from->result->n_in);
  if (!g->result) return no_memory();
  g->n_outputs = from->n_outputs;
  g->n_grads = from->n_grads;
  OMC_TRY(clone_inputs(g, from->result, g->result, map));
  for (uint32_t k = 0; k < from->n_outputs; k++)
    if (omc_over(from, k)) OMC_TRY(omc_graph_write_over(g, k, map[omc_over(from, k)->id]));
  return OMC_OK;
}

omc_status omc_graph_clone(const omc_graph *from, const omc_allocator *allocator, omc_graph **out) {
  omc_graph *g = NULL;
  omc_value **map = omc_alloc_zero(allocator, from->n_values, sizeof *map);
  if (!map) return no_memory();
  omc_status status = omc_graph_create(allocator, &g);
  if (status == OMC_OK) status = clone_into(from, g, map);
  omc_free(allocator, map, from->n_values, sizeof *map);
  if (status == OMC_OK)
    *out = g;
  else
    omc_graph_destroy(g);
  return status;
}

/* Keeps the constants that lie in the arena of `from`. */
static omc_status keep_constants(const omc_graph *g, const omc_graph *from, omc_keep_elements keep,
                                 void *ctx) {
  for (omc_node *n = g->first;; n = n->next) {
    const omc_node *reader = n ? n : g->result;
    for (uint32_t i = 0; i < reader->n_in; i++) {
      omc_value *v = omc_in(reader, i);
      size_t bytes;
      if (!omc_is_const(v) || !omc_arena_holds(&from->arena, v->data)) continue;
      OMC_TRY(omc_type_bytes(&v->type, &bytes));
      OMC_TRY(keep(ctx, v->data, bytes, &v->data));
    }
    if (!n) return OMC_OK;
  }
}

omc_status omc_graph_compact(omc_graph **graph, omc_keep_elements keep, void *ctx) {
  omc_graph *from = *graph, *g;
  OMC_TRY(omc_graph_clone(from, from->arena.allocator, &g));
  const omc_status status = keep_constants(g, from, keep, ctx);
  if (status != OMC_OK) {
    omc_graph_destroy(g);
    return status;
  }
  omc_graph_destroy(from);
  *graph = g;
  return OMC_OK;
}

const omc_attr *omc_node_attr(const omc_node *n, const char *name) {
  for (uint32_t i = 0; i < n->n_attr; i++)
    if (!strcmp(n->attr[i].name, name)) return &n->attr[i];
  return NULL;
}

static const omc_attr_schema *schema_of(const omc_node *n, const char *name, omc_attr_kind kind) {
  static const omc_attr_schema zero = {.name = ""};
  const omc_attr_schema *schema = omc_schema_find(n->op, name);
  assert(schema && schema->kind == kind);
  (void)kind;
  return schema ? schema : &zero;
}

/* As schema_of, of a scalar; *out is the attribute given, NULL where the default stands. */
static const omc_attr_schema *read_attr(const omc_node *n, const char *name, omc_attr_kind kind,
                                        const omc_attr **out) {
  const omc_attr_schema *schema = schema_of(n, name, kind);
  *out = omc_node_attr(n, name);
  assert(*out || !(schema->absent || schema->required));
  return schema;
}

int64_t omc_node_int(const omc_node *n, const char *name) {
  const omc_attr *a;
  const omc_attr_schema *schema = read_attr(n, name, OMC_ATTR_INT, &a);
  return a ? a->v.i : schema->otherwise.i;
}

omc_dtype omc_node_to_dtype(const omc_node *n, const char *name) {
  omc_dtype dtype = OMC_F32;
  const bool found = omc_dtype_from_onnx(omc_node_int(n, name), &dtype);
  assert(found);
  (void)found;
  return dtype;
}

double omc_node_float(const omc_node *n, const char *name) {
  const omc_attr *a;
  const omc_attr_schema *schema = read_attr(n, name, OMC_ATTR_FLOAT, &a);
  if (!a) return schema->otherwise.f;
  return a->kind == OMC_ATTR_INT ? (double)a->v.i : a->v.f;
}

const char *omc_node_string(const omc_node *n, const char *name) {
  const omc_attr *a;
  const omc_attr_schema *schema = read_attr(n, name, OMC_ATTR_STRING, &a);
  return a ? a->v.s : schema->otherwise.s;
}

const int64_t *omc_node_ints(const omc_node *n, const char *name, uint32_t *n_out) {
  schema_of(n, name, OMC_ATTR_INTS);
  const omc_attr *a = omc_node_attr(n, name);
  *n_out = a ? a->n : 0;
  return a ? a->v.is : NULL;
}

omc_status omc_node_list(const omc_node *node, const char *name, uint32_t n, int64_t *out) {
  uint32_t given;
  const int64_t *list = omc_node_ints(node, name, &given);
  if (given != 0 && given != n)
    OMC_NODE_FAIL(node, ESHAPE, "attribute '%s' has %u values, not %u", name, given, n);
  const int64_t otherwise = schema_of(node, name, OMC_ATTR_INTS)->otherwise.i;
  for (uint32_t i = 0; i < n; i++) out[i] = given ? list[i] : otherwise;
  return OMC_OK;
}

omc_attr omc_attr_element(const omc_attr *a, uint32_t i) {
  if (!omc_attr_is_list(a)) return *a;
  omc_attr one = {.name = a->name, .kind = (omc_attr_kind)(a->kind - OMC_ATTR_INTS), .n = 1};
  if (one.kind == OMC_ATTR_INT) one.v.i = a->v.is[i];
  if (one.kind == OMC_ATTR_FLOAT) one.v.f = a->v.fs[i];
  if (one.kind == OMC_ATTR_STRING) one.v.s = a->v.ss[i];
  return one;
}

omc_status omc_attr_list(omc_arena *arena, const omc_attr *items, uint32_t n, omc_attr *list) {
  const omc_attr_kind kind = n ? items[0].kind : OMC_ATTR_INT;
  void *memory = omc_arena_alloc(arena, n, sizeof items->v);
  int64_t *const is = memory;
  double *const fs = memory;
  const char **const ss = memory;
  if (!memory) return no_memory();
  for (uint32_t i = 0; i < n; i++) {
    if (items[i].kind != kind) OMC_FAIL(EDTYPE, "a list that mixes kinds");
    if (kind == OMC_ATTR_INT) is[i] = items[i].v.i;
    if (kind == OMC_ATTR_FLOAT) fs[i] = items[i].v.f;
    if (kind == OMC_ATTR_STRING) ss[i] = items[i].v.s;
  }
  const omc_attr lists[] = {[OMC_ATTR_INT] = {list->name, OMC_ATTR_INTS, n, {.is = is}},
                            [OMC_ATTR_FLOAT] = {list->name, OMC_ATTR_FLOATS, n, {.fs = fs}},
                            [OMC_ATTR_STRING] = {list->name, OMC_ATTR_STRINGS, n, {.ss = ss}}};
  *list = lists[kind];
  return OMC_OK;
}

int64_t omc_const_int(const omc_value *v, int64_t i) {
  return omc_element_int(v->type.dtype, v->data, i);
}

double omc_const_float(const omc_value *v, int64_t i) {
  return omc_element_float(v->type.dtype, v->data, i);
}

const char *omc_node_name(const omc_node *n) { return n->name ? n->name : omc_op_name(n->op); }

const char *omc_node_text(const omc_node *n, char *buf, size_t size) {
  if (n->name)
    snprintf(buf, size, "%s '%s'", omc_op_name(n->op), n->name);
  else
    snprintf(buf, size, "%s", omc_op_name(n->op));
  return buf;
}

omc_status omc_node_fail(const omc_node *n, omc_status code, const char *fmt, ...) {
  char node[OMC_NODE_TEXT], text[1024];
  va_list args;
  va_start(args, fmt);
  vsnprintf(text, sizeof text, fmt, args);
  va_end(args);
  return omc_fail(code, "%s: %s", omc_node_text(n, node, sizeof node), text);
}
