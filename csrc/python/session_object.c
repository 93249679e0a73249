/* The Session type: a template and the plans made of it. */
#include "python/binding.h"

int omc_bools_from_py(PyObject *sequence, const char *what, bool *out, uint32_t n) {
  PyObject *items = PySequence_Tuple(sequence);
  if (!items) return -1;
  Py_ssize_t given = PyTuple_Size(items);
  int failed = given != (Py_ssize_t)n;
  if (failed) PyErr_Format(PyExc_ValueError, "%s: expected %u entries, got %zd", what, n, given);
  for (uint32_t i = 0; !failed && i < n; i++) {
    int truth = PyObject_IsTrue(PyTuple_GetItem(items, (Py_ssize_t)i));
    failed = truth < 0;
    out[i] = truth > 0;
  }
  Py_DECREF(items);
  return failed ? -1 : 0;
}

static int session_init(PyObject *object, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"text",     "constants",    "callbacks",    "max_plans",
                          "provider", "memory_share", "memory_bytes", NULL};
  omc_session_object *self = (omc_session_object *)object;
  const char *text, *name = omc_provider_host()->name;
  Py_ssize_t n;
  PyObject *constants, *called = Py_None, *bytes = Py_None;
  unsigned max_plans = 16;
  omc_budget budget = {1, SIZE_MAX};
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s#O|OIsdO", names, &text, &n, &constants, &called,
                                   &max_plans, &name, &budget.share, &bytes))
    return -1;
  if (bytes != Py_None && (budget.bytes = PyLong_AsSize_t(bytes)) == SIZE_MAX && PyErr_Occurred())
    return -1;
  const omc_module *m = PyType_GetModuleState(Py_TYPE(object));
  const omc_provider *provider;
  const omc_status found = omc_provider_find(name, &provider);
  if (found != OMC_OK) {
    omc_raise(m, found);
    return -1;
  }
  omc_given_constants given;
  if (omc_given_constants_init(&given, m, constants) < 0) return -1;
  if (self->session) { /* looked at once no code of the mapping's is to come */
    omc_given_constants_drop(&given);
    PyErr_SetString(PyExc_RuntimeError, "a Session is initialised once");
    return -1;
  }
  omc_given_constants_drop(&self->constants); /* of an attempt that failed */
  self->constants = given;
  Py_CLEAR(self->callbacks.object);
  self->callbacks.module = m;
  self->callbacks.provider = provider;
  if (called != Py_None) self->callbacks.object = Py_NewRef(called);
  omc_callbacks callbacks = omc_make_callbacks(&self->callbacks);
  omc_status status =
      omc_session_create(text, (size_t)n, omc_given_constants_find, &self->constants,
                         self->callbacks.object ? &callbacks : NULL, provider,
                         omc_default_allocator(), max_plans, &self->session);
  if (status == OMC_OK) status = omc_session_set_budget(self->session, &budget);
  if (status == OMC_OK) return 0;
  omc_raise(m, status);
  omc_session_destroy(self->session);
  self->session = NULL;
  return -1;
}

static int session_traverse(PyObject *object, visitproc visit, void *arg) {
  const omc_session_object *self = (const omc_session_object *)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->callbacks.object);
  Py_VISIT(self->constants.dict);
  return 0;
}

/* The constants stay: plans point into their memory. */
static int session_clear(PyObject *object) {
  Py_CLEAR(((omc_session_object *)object)->callbacks.object);
  return 0;
}

static void session_dealloc(PyObject *object) {
  omc_session_object *self = (omc_session_object *)object;
  PyObject_GC_UnTrack(object);
  omc_session_destroy(self->session);
  Py_XDECREF(self->callbacks.object);
  omc_given_constants_drop(&self->constants);
  omc_object_free(object);
}

/* Types of the given tensors, each named by its graph input in messages. */
static omc_type *read_types(const omc_module *m, const omc_provider *provider,
                            const omc_graph *template, PyObject *inputs) {
  uint32_t n = template->n_inputs;
  if (PyTuple_Size(inputs) != (Py_ssize_t)n) {
    PyErr_Format(PyExc_ValueError, "inputs: expected %u tensors, got %zd", n, PyTuple_Size(inputs));
    return NULL;
  }
  omc_type *types = PyMem_Calloc(n ? n : 1, sizeof *types);
  if (!types) return (omc_type *)PyErr_NoMemory();
  void *data;
  for (uint32_t i = 0; i < n; i++)
    if (omc_tensor_read(m, provider, PyTuple_GetItem(inputs, (Py_ssize_t)i), &data, &types[i]) <
        0) {
      omc_error_prefix("%s", template->inputs[i]->name);
      PyMem_Free(types);
      return NULL;
    }
  return types;
}

/* Fills a signature's flags, in memory that the caller frees: NULL with an exception set. */
static bool *read_flags(const omc_graph *template, PyObject *in_grads, PyObject *out_grads) {
  const uint32_t n_in = template->n_inputs, n_out = template->n_outputs;
  const Py_ssize_t n = PyTuple_Size(out_grads);
  bool *flags = PyMem_Calloc(n_in + (size_t)n * n_out + 1, sizeof *flags);
  if (!flags) return (bool *)PyErr_NoMemory();
  bool ok = omc_bools_from_py(in_grads, "in_grads", flags, n_in) == 0;
  for (Py_ssize_t b = 0; ok && b < n; b++)
    ok = omc_bools_from_py(PyTuple_GetItem(out_grads, b), "out_grads",
                           flags + n_in + (size_t)b * n_out, n_out) == 0;
  if (ok) return flags;
  PyMem_Free(flags);
  return NULL;
}

/* The arguments from the third on, each as a tuple. */
static PyObject *read_masks(PyObject *args) {
  PyObject *rest = PyTuple_GetSlice(args, 2, PyTuple_Size(args));
  PyObject *masks = rest ? PyTuple_New(PyTuple_Size(rest)) : NULL;
  for (Py_ssize_t b = 0; masks && b < PyTuple_Size(rest); b++) {
    PyObject *mask = PySequence_Tuple(PyTuple_GetItem(rest, b));
    if (!mask || PyTuple_SetItem(masks, b, mask) < 0) Py_CLEAR(masks);
  }
  Py_XDECREF(rest);
  return masks;
}

static PyObject *session_plan(PyObject *object, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"retain_graph", "plain", NULL};
  omc_session_object *self = (omc_session_object *)object;
  const omc_module *m = PyType_GetModuleState(Py_TYPE(object));
  int retain_graph = 0, plain = 0;
  if (PyTuple_Size(args) < 2) {
    PyErr_SetString(PyExc_TypeError, "plan() needs the inputs and which gradients are wanted");
    return NULL;
  }
  PyObject *none = PyTuple_New(0);
  const bool parsed = none && (!kwargs || PyArg_ParseTupleAndKeywords(none, kwargs, "|pp", names,
                                                                      &retain_graph, &plain));
  Py_XDECREF(none);
  if (!parsed) return NULL;
  if (!self->session) {
    PyErr_SetString(PyExc_RuntimeError, "this Session was not initialised");
    return NULL;
  }
  const omc_graph *template = omc_session_template(self->session);
  omc_type *types = NULL;
  bool *flags = NULL;
  PyObject *result = NULL, *tuple = PySequence_Tuple(PyTuple_GetItem(args, 0)),
           *in_tuple = PySequence_Tuple(PyTuple_GetItem(args, 1)), *out_tuples = read_masks(args);
  if (tuple && in_tuple && out_tuples) flags = read_flags(template, in_tuple, out_tuples);
  if (flags) types = read_types(m, self->callbacks.provider, template, tuple);
  if (!types) goto done;
  const omc_signature signature = {types,
                                   flags,
                                   flags + template->n_inputs,
                                   (uint32_t)PyTuple_Size(out_tuples),
                                   retain_graph != 0,
                                   plain != 0};
  omc_plan *plan = NULL;
  omc_status status;
  Py_BEGIN_ALLOW_THREADS
  status = omc_session_plan(self->session, &signature, &plan);
  Py_END_ALLOW_THREADS
  result = status == OMC_OK ? omc_plan_object_of(m, self, plan, in_tuple, out_tuples)
                            : omc_raise(m, status);
done:
  PyMem_Free(types);
  PyMem_Free(flags);
  Py_XDECREF(tuple);
  Py_XDECREF(in_tuple);
  Py_XDECREF(out_tuples);
  return result;
}

static PyObject *session_stats(PyObject *object, PyObject *unused) {
  (void)unused;
  omc_session_object *self = (omc_session_object *)object;
  if (!self->session) return PyDict_New();
  omc_session_stats s;
  /* A thread that builds a plan may hold the session's lock while it waits to call Python. */
  Py_BEGIN_ALLOW_THREADS
  s = omc_session_get_stats(self->session);
  Py_END_ALLOW_THREADS
  return Py_BuildValue("{sKsKsKsdsdsdsdsdsKsKsIsI}", "plans_built", s.plans_built, "plan_hits",
                       s.plan_hits, "plans_evicted", s.plans_evicted, "specialize_seconds",
                       s.specialize_seconds, "canonicalize_seconds", s.canonicalize_seconds,
                       "differentiate_seconds", s.differentiate_seconds, "fuse_seconds",
                       s.fuse_seconds, "plan_seconds", s.plan_seconds, "constant_bytes",
                       s.constant_bytes, "replays", s.replays, "plans_cached", s.plans_cached,
                       "runs_live", s.runs_live);
}

static PyObject *session_count(PyObject *object, void *which) {
  omc_session_object *self = (omc_session_object *)object;
  const omc_graph *g = self->session ? omc_session_template(self->session) : NULL;
  uint32_t count = !g ? 0 : which ? g->n_outputs : g->n_inputs;
  return PyLong_FromUnsignedLong(count);
}

static PyMethodDef session_methods[] = {
    {"plan", (PyCFunction)(void (*)(void))session_plan, METH_VARARGS | METH_KEYWORDS,
     "plan(inputs, in_grads, *out_grads, retain_graph=False, plain=False) -> Plan for these "
     "inputs"},
    {"stats", session_stats, METH_NOARGS, "stats() -> counts and seconds of planning"},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef session_getset[] = {
    {"n_inputs", session_count, NULL, "number of graph inputs", NULL},
    {"n_outputs", session_count, NULL, "number of forward outputs", ""},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot session_slots[] = {{Py_tp_init, session_init},
                                      {Py_tp_dealloc, session_dealloc},
                                      {Py_tp_traverse, session_traverse},
                                      {Py_tp_clear, session_clear},
                                      {Py_tp_methods, session_methods},
                                      {Py_tp_getset, session_getset},
                                      {Py_tp_doc, "One template graph and its plans."},
                                      {0, NULL}};

PyType_Spec omc_session_spec = {"ortmodule_c._C.Session", sizeof(omc_session_object), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, session_slots};
