/* A graph as its text and as plain Python objects, of which files are written. */
#include "graph/names.h"
#include "graph/schema.h"
#include "graph/text.h"
#include "python/binding.h"

PyObject *omc_graph_text(const omc_module *m, const omc_graph *g) {
  char *text;
  size_t bytes;
  const omc_status status = omc_graph_print(g, omc_default_allocator(), &text, &bytes);
  if (status != OMC_OK) return omc_raise(m, status);
  PyObject *result = PyUnicode_FromStringAndSize(text, (Py_ssize_t)bytes - 1);
  omc_free(omc_default_allocator(), text, 1, bytes);
  return result;
}

typedef struct describer {
  const omc_graph *graph;
  uint32_t *number; /* by value id, of those without a name */
  bool *met;        /* by value id: a constant that is in the list already */
} describer;

/* Each gives a new reference, or NULL with an exception set. */

static PyObject *string_or_none(const char *text) {
  return text ? PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace")
              : Py_NewRef(Py_None);
}

static PyObject *name_of(const describer *d, const omc_value *v) {
  if (!v) return Py_NewRef(Py_None);
  return v->name ? PyUnicode_FromString(v->name) : PyUnicode_FromFormat("%u", d->number[v->id]);
}

static PyObject *type_of(const omc_value *v) {
  return v->type.shape.rank < 0 ? Py_NewRef(Py_None) : omc_type_to_py(&v->type);
}

static PyObject *names_of(const describer *d, const omc_use *uses, uint32_t n) {
  PyObject *list = PyList_New(0);
  for (uint32_t i = 0; list && i < n; i++) omc_append(&list, name_of(d, uses[i].value));
  return list;
}

static PyObject *inputs_of(const describer *d) {
  PyObject *list = PyList_New(0);
  for (uint32_t i = 0; list && i < d->graph->n_inputs; i++) {
    const omc_value *v = d->graph->inputs[i];
    omc_append(&list, Py_BuildValue("(NNN)", name_of(d, v), type_of(v),
                                    PyBool_FromLong(v->requires_grad)));
  }
  return list;
}

static PyObject *grads_of(const describer *d) {
  PyObject *list = PyList_New(0);
  for (uint32_t i = 0; list && i < d->graph->cap_grads; i++) {
    const omc_value *v = d->graph->grads[i];
    if (v) omc_append(&list, Py_BuildValue("(NNI)", name_of(d, v), type_of(v), i));
  }
  return list;
}

static void append_constants(const describer *d, const omc_node *node, PyObject **list) {
  for (uint32_t i = 0; *list && i < node->n_in; i++) {
    const omc_value *v = omc_in(node, i);
    size_t bytes;
    if (!omc_is_const(v) || d->met[v->id]) continue;
    d->met[v->id] = true;
    if (omc_type_bytes(&v->type, &bytes) != OMC_OK) bytes = 0;
    omc_append(list, Py_BuildValue("(NNN)", name_of(d, v), type_of(v),
                                   PyBytes_FromStringAndSize(v->data, (Py_ssize_t)bytes)));
  }
}

static PyObject *constants_of(const describer *d) {
  PyObject *list = PyList_New(0);
  for (const omc_node *n = d->graph->first; list && n; n = n->next) append_constants(d, n, &list);
  append_constants(d, d->graph->result, &list);
  return list;
}

static PyObject *element_of(const omc_attr *a, uint32_t i) {
  const omc_attr one = omc_attr_element(a, i);
  if (one.kind == OMC_ATTR_STRING) return string_or_none(one.v.s);
  return one.kind == OMC_ATTR_INT ? PyLong_FromLongLong(one.v.i) : PyFloat_FromDouble(one.v.f);
}

static PyObject *attribute_of(const omc_attr *a) {
  const char *kind = omc_attr_kind_name(a->kind);
  if (!omc_attr_is_list(a)) return Py_BuildValue("(ssN)", a->name, kind, element_of(a, 0));
  PyObject *list = PyList_New(0);
  for (uint32_t i = 0; list && i < a->n; i++) omc_append(&list, element_of(a, i));
  return Py_BuildValue("(ssN)", a->name, kind, list);
}

static PyObject *outputs_of(const describer *d, const omc_node *node) {
  PyObject *list = PyList_New(0);
  for (uint32_t i = 0; list && i < node->n_out; i++) {
    const omc_value *v = node->out[i];
    omc_append(&list, v ? Py_BuildValue("(NN)", name_of(d, v), type_of(v)) : Py_NewRef(Py_None));
  }
  return list;
}

static PyObject *node_of(const describer *d, const omc_node *node) {
  PyObject *attributes = PyList_New(0);
  for (uint32_t i = 0; attributes && i < node->n_attr; i++)
    omc_append(&attributes, attribute_of(&node->attr[i]));
  return Py_BuildValue("(sNINNN)", omc_op_name(node->op), string_or_none(node->name), node->phase,
                       names_of(d, node->in, node->n_in), outputs_of(d, node), attributes);
}

static PyObject *nodes_of(const describer *d) {
  PyObject *list = PyList_New(0);
  for (const omc_node *n = d->graph->first; list && n; n = n->next)
    omc_append(&list, node_of(d, n));
  return list;
}

/* For each output the input that it is written over. */
static PyObject *over_of(const describer *d) {
  PyObject *list = PyList_New(0);
  for (uint32_t k = 0; list && k < d->graph->n_outputs; k++)
    omc_append(&list, name_of(d, omc_over(d->graph, k)));
  return list;
}

PyObject *omc_graph_description(const omc_module *m, const omc_graph *g) {
  const omc_allocator *allocator = omc_default_allocator();
  const uint32_t n = g->n_values;
  describer d = {g, omc_alloc(allocator, n, sizeof *d.number),
                 omc_alloc_zero(allocator, n, sizeof *d.met)};
  omc_status status = d.number && d.met ? OMC_OK : omc_fail(OMC_ENOMEM, "%u values", n);
  if (status == OMC_OK) status = omc_number_values(g, allocator, d.number);
  PyObject *result = NULL;
  if (status == OMC_OK)
    result =
        Py_BuildValue("(NNNNNNN)", inputs_of(&d), grads_of(&d), constants_of(&d), nodes_of(&d),
                      names_of(&d, g->result->in, g->n_outputs), over_of(&d),
                      names_of(&d, g->result->in + g->n_outputs, g->result->n_in - g->n_outputs));
  else
    omc_raise(m, status);
  omc_free(allocator, d.number, n, sizeof *d.number);
  omc_free(allocator, d.met, n, sizeof *d.met);
  return result;
}
