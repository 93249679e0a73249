/* infer(): what one node would give, or why it could not run, by the path that sessions take. */
#include "ops/op.h"
#include "passes/passes.h"
#include "python/binding.h"

enum { MOST_OUTPUTS = UINT16_MAX };

typedef struct question {
  const omc_module *m;
  const omc_provider *provider;
  omc_graph *graph;     /* of that node alone */
  omc_arena scratch;    /* lists while they are read, parameters */
  omc_node_spec spec;   /* points into scratch and into Python's strings */
  PyObject *types;      /* a tuple */
  PyObject *constants;  /* a dict of index to tensor: a copy, so that it keeps their memory */
  PyObject *attributes; /* list of (name, value) */
} question;

/* ---- from Python ---- */

/* A string without zeros, borrowed from the object. */
static int read_string(PyObject *text, const char **out) {
  Py_ssize_t bytes;
  *out = PyUnicode_AsUTF8AndSize(text, &bytes);
  if (*out && strlen(*out) == (size_t)bytes) return 0;
  if (*out) PyErr_SetString(PyExc_ValueError, "a string with a zero in it");
  return -1;
}

/* A number or a string. Nothing else is asked to become one: a size that is open would be fixed. */
static int read_scalar(PyObject *value, omc_attr *a) {
  a->n = 1;
  if (PyUnicode_Check(value)) {
    a->kind = OMC_ATTR_STRING;
    return read_string(value, &a->v.s);
  }
  a->kind = PyLong_Check(value) ? OMC_ATTR_INT : OMC_ATTR_FLOAT;
  if (PyLong_Check(value))
    a->v.i = PyLong_AsLongLong(value);
  else if (PyFloat_Check(value))
    a->v.f = PyFloat_AsDouble(value);
  else
    PyErr_Format(PyExc_TypeError, "expected a number or a string, or a list of them, got %R",
                 (PyObject *)Py_TYPE(value));
  return PyErr_Occurred() ? -1 : 0;
}

static int read_list(question *q, PyObject *list, omc_attr *a) {
  const Py_ssize_t n = PyList_Check(list) ? PyList_Size(list) : PyTuple_Size(list);
  omc_attr *items = OMC_NEW_ARRAY(&q->scratch, omc_attr, n);
  if (!items) return PyErr_NoMemory(), -1;
  for (Py_ssize_t i = 0; i < n; i++) {
    PyObject *object = PyList_Check(list) ? PyList_GetItem(list, i) : PyTuple_GetItem(list, i);
    if (!object || read_scalar(object, &items[i]) < 0) return -1;
  }
  const omc_status status = omc_attr_list(&q->scratch, items, (uint32_t)n, a);
  return status == OMC_OK ? 0 : (omc_raise(q->m, status), -1);
}

static int read_attributes(question *q) {
  const Py_ssize_t n = PyList_Size(q->attributes);
  omc_attr *attrs = OMC_NEW_ARRAY(&q->scratch, omc_attr, (size_t)n + 1);
  if (!attrs) return PyErr_NoMemory(), -1;
  q->spec.attr = attrs;
  for (Py_ssize_t i = 0; i < n; i++) {
    PyObject *name, *value;
    if (!PyArg_ParseTuple(PyList_GetItem(q->attributes, i), "UO", &name, &value)) return -1;
    const bool is_list = PyList_Check(value) || PyTuple_Check(value);
    if ((is_list ? read_list(q, value, &attrs[i]) : read_scalar(value, &attrs[i])) < 0)
      return omc_error_prefix("attribute '%U'", name);
    if (read_string(name, &attrs[i].name) < 0) return -1;
    q->spec.n_attr++;
  }
  return 0;
}

static omc_status add_constant(question *q, PyObject *tensor, const omc_type *type,
                               omc_value **out) {
  void *data;
  omc_type given;
  if (omc_tensor_read(q->m, omc_provider_host(), tensor, &data, &given) < 0)
    OMC_FAIL(ECALLBACK, "a constant");
  if (omc_type_equal(&given, type)) return omc_graph_add_const(q->graph, NULL, type, data, out);
  char a[OMC_TYPE_TEXT], b[OMC_TYPE_TEXT];
  OMC_FAIL(EINVALID, "the constant is %s, its type %s", omc_type_text(&given, a, sizeof a),
           omc_type_text(type, b, sizeof b));
}

/* Input i: a type, or None where it is left out; its elements are known if there is a constant. */
static int read_input(question *q, Py_ssize_t i, omc_value **out) {
  PyObject *pair = PyTuple_GetItem(q->types, i);
  *out = NULL;
  if (pair == Py_None) return 0;
  omc_type type;
  if (!PyTuple_Check(pair)) {
    PyErr_Format(PyExc_TypeError, "expected a type such as ('f32', (2, 3)), got %R", pair);
    return -1;
  }
  if (omc_type_from_py(pair, &type) < 0) return -1;
  PyObject *index = PyLong_FromSsize_t(i);
  PyObject *tensor = index ? PyDict_GetItemWithError(q->constants, index) : NULL;
  Py_XDECREF(index);
  if (!tensor && PyErr_Occurred()) return -1;
  const omc_status status = tensor ? add_constant(q, tensor, &type, out)
                                   : omc_graph_add_input(q->graph, NULL, &type, false, out);
  if (status != OMC_OK) omc_raise(q->m, status);
  return status == OMC_OK ? 0 : -1;
}

static int read_inputs(question *q) {
  const Py_ssize_t n = PyTuple_Size(q->types);
  omc_value **in = OMC_NEW_ARRAY(&q->scratch, omc_value *, (size_t)n + 1);
  if (!in) return PyErr_NoMemory(), -1;
  q->spec.in = in;
  q->spec.n_in = (uint32_t)n;
  for (Py_ssize_t i = 0; i < n; i++)
    if (read_input(q, i, &in[i]) < 0) return omc_error_prefix("input %zd", i);
  return 0;
}

static int read_outputs(question *q, PyObject *outputs) {
  const omc_op *op = omc_op_get(q->spec.op);
  q->spec.n_out = op->n_out == OMC_VARIADIC ? 1 : op->n_out;
  if (outputs == Py_None) return 0;
  const long n = PyLong_AsLong(outputs);
  if (n == -1 && PyErr_Occurred()) return -1;
  if (n < 1 || n > MOST_OUTPUTS) {
    PyErr_Format(PyExc_ValueError, "%ld outputs, not 1 to %d", n, MOST_OUTPUTS);
    return -1;
  }
  q->spec.n_out = (uint32_t)n;
  return 0;
}

/* ---- the answer ---- */

/* As a session does: views need no kernel, what reads shapes alone is the host's work, and what may
 * be of a program is compiled with that. */
static omc_status ask(question *q, omc_node **out) {
  omc_call call;
  OMC_TRY(omc_graph_add_node(q->graph, &q->spec, out));
  OMC_TRY(omc_infer_node(*out, NULL, omc_default_allocator()));
  const uint32_t flags = omc_op_get(q->spec.op)->flags;
  if (flags & OMC_OP_VIEW) return OMC_OK;
  const omc_provider *p = flags & OMC_OP_SHAPE_ONLY ? omc_provider_host() : q->provider;
  if (omc_op_get(q->spec.op)->imm && p->fusible(p->ctx, *out)) return OMC_OK;
  return p->prepare(p->ctx, *out, p->threads(p->ctx), &q->scratch, &call);
}

static PyObject *answer(question *q) {
  omc_node *node;
  const omc_status status = ask(q, &node);
  if (status != OMC_OK) return omc_raise(q->m, status);
  PyObject *list = PyList_New(0);
  for (uint32_t k = 0; list && k < node->n_out; k++)
    omc_append(&list, omc_type_to_py(&node->out[k]->type));
  return list;
}

PyObject *omc_infer_types(PyObject *module, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"op", "types", "attributes", "constants", "outputs", "provider", NULL};
  question q = {.m = PyModule_GetState(module)};
  const char *op, *provider = omc_provider_host()->name;
  PyObject *types, *attributes = Py_None, *constants = Py_None, *outputs = Py_None, *result = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sO|OOOs", names, &op, &types, &attributes,
                                   &constants, &outputs, &provider))
    return NULL;
  const omc_status found = omc_provider_find(provider, &q.provider);
  if (found != OMC_OK) return omc_raise(q.m, found);
  if (!omc_op_from_name(op, strlen(op), &q.spec.op))
    return PyErr_Format(PyExc_NotImplementedError, "no op is named '%s'", op);
  omc_arena_init(&q.scratch, omc_default_allocator());
  q.types = PySequence_Tuple(types);
  q.attributes = attributes == Py_None ? PyList_New(0) : PyMapping_Items(attributes);
  q.constants = PyDict_New();
  const omc_status status = omc_graph_create(omc_default_allocator(), &q.graph);
  if (status != OMC_OK) omc_raise(q.m, status);
  if (status == OMC_OK && q.types && q.attributes && q.constants &&
      (constants == Py_None || PyDict_Update(q.constants, constants) == 0) &&
      read_inputs(&q) == 0 && read_attributes(&q) == 0 && read_outputs(&q, outputs) == 0)
    result = answer(&q);
  omc_graph_destroy(q.graph);
  omc_arena_deinit(&q.scratch);
  Py_XDECREF(q.types);
  Py_XDECREF(q.attributes);
  Py_XDECREF(q.constants);
  return result;
}
