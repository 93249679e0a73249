/* optim_rows(): what optim_step() is given of parameters whose states are there and all of whose
 * tensors lie as the core takes them. _C.pyi tells how both are given. */
#include "python/binding.h"

typedef struct gathering {
  const omc_module *m;
  const omc_provider *provider;
  PyObject *state;  /* of the optimizer: by parameter, the dict of its states */
  Py_ssize_t place; /* in it, of the next parameter's if they have the same order */
  int counts, writes_grad;
  PyObject *rows, *written; /* lists; NULL with an exception set */
} gathering;

typedef struct group {
  Py_ssize_t index;
  PyObject *params, *names; /* a list; a tuple */
  int wide, master;         /* of parameters of 16 bits */
} group;

/* All below return 1, or 0 for what is to be looked at in Python, or -1 with an exception set. */

/* Whether a tensor is of the dtype, if it is known, has n elements, if n is not negative, and is
 * not read negated. */
static int reads(const gathering *g, PyObject *tensor, omc_dtype *dtype, int64_t *n) {
  PyObject *type = (PyObject *)Py_TYPE(tensor);
  omc_type found;
  void *data;
  if (type != g->m->torch && type != g->m->parameter) return 0;
  if (omc_tensor_read(g->m, g->provider, tensor, &data, &found) < 0) {
    PyErr_Clear();
    return 0;
  }
  const int64_t has = omc_shape_numel(&found.shape);
  if ((*n >= 0 && has != *n) || (*dtype != OMC_N_DTYPE && found.dtype != *dtype)) return 0;
  *n = has, *dtype = found.dtype;
  PyObject *negated = PyObject_CallMethod(tensor, "is_neg", NULL);
  const int is_negated = negated ? PyObject_IsTrue(negated) : -1;
  Py_XDECREF(negated);
  return is_negated < 0 ? -1 : !is_negated;
}

/* A parameter's states: a new reference, or NULL. */
static int find_states(gathering *g, PyObject *param, PyObject **out) {
  Py_ssize_t next = g->place;
  PyObject *key;
  if (PyDict_Next(g->state, &next, &key, out) && key == param)
    g->place = next;
  else
    *out = PyDict_GetItemWithError(g->state, param);
  Py_XINCREF(*out);
  return *out ? PyDict_Check(*out) : PyErr_Occurred() ? -1 : 0;
}

/* One of them, which a step writes, of the list of these. */
static int find_state(gathering *g, PyObject *states, PyObject *name, PyObject **out) {
  *out = PyDict_GetItemWithError(states, name);
  if (!*out) return PyErr_Occurred() ? -1 : 0;
  return PyList_Append(g->written, *out) < 0 ? -1 : 1;
}

/* One of the dtype and n elements. */
static int find_array(gathering *g, PyObject *states, PyObject *name, omc_dtype dtype, int64_t n,
                      PyObject **out) {
  const int found = find_state(g, states, name, out);
  return found == 1 ? reads(g, *out, &dtype, &n) : found;
}

/* What a row of n elements has besides its parameter and gradient. */
typedef struct parts {
  PyObject *master, *step; /* of the list of what is written */
  PyObject *named;         /* a tuple of its own, or NULL */
} parts;

static int gather_parts(gathering *g, const group *of, PyObject *states, omc_dtype dtype, int64_t n,
                        parts *out) {
  const omc_dtype acc = omc_dtype_acc(dtype);
  int found = 1;
  if (g->counts) found = find_state(g, states, g->m->names[OMC_NAME_STEP], &out->step);
  if (found == 1 && of->master && acc != dtype)
    found = find_array(g, states, g->m->names[OMC_NAME_MASTER], acc, n, &out->master);
  const Py_ssize_t n_named = PyTuple_Size(of->names);
  if (found == 1 && !(out->named = PyTuple_New(n_named))) found = -1;
  for (Py_ssize_t k = 0; found == 1 && k < n_named; k++) {
    PyObject *state;
    found = find_array(g, states, PyTuple_GetItem(of->names, k), of->wide ? acc : dtype, n, &state);
    if (found == 1 && PyTuple_SetItem(out->named, k, Py_NewRef(state)) < 0) found = -1;
  }
  return found;
}

/* All parameters of 16 bits with states, a step or a master have a dict of them. */
static bool has_states(const gathering *g, const group *of) {
  return g->counts || of->master || PyTuple_Size(of->names) > 0;
}

static int gather_row(gathering *g, const group *of, PyObject *param, PyObject *grad) {
  omc_dtype dtype = OMC_N_DTYPE;
  int64_t n = -1;
  int found = reads(g, param, &dtype, &n);
  if (found == 1) found = omc_dtype_is_float(dtype) ? reads(g, grad, &dtype, &n) : 0;
  if (found != 1) return found;
  PyObject *states = NULL;
  parts row = {Py_None, Py_None, NULL};
  if (has_states(g, of)) found = find_states(g, param, &states);
  if (found == 1) found = gather_parts(g, of, states, dtype, n, &row);
  if (found == 1)
    omc_append(&g->rows, Py_BuildValue("(nOOOOOO)", of->index, param, grad, row.master, row.step,
                                       Py_False, row.named));
  if (!g->rows || (found == 1 && (PyList_Append(g->written, param) < 0 ||
                                  (g->writes_grad && PyList_Append(g->written, grad) < 0))))
    found = -1;
  Py_XDECREF(row.named);
  Py_XDECREF(states);
  return found;
}

static int gather_param(gathering *g, const group *of, PyObject *param) {
  PyObject *type = (PyObject *)Py_TYPE(param);
  if (type != g->m->torch && type != g->m->parameter) return 0;
  PyObject *grad = PyObject_GetAttr(param, g->m->names[OMC_NAME_GRAD]);
  int found = grad ? 1 : -1;
  if (grad && grad != Py_None) found = gather_row(g, of, param, grad);
  Py_XDECREF(grad);
  return found;
}

static int gather_group(gathering *g, PyObject *given, Py_ssize_t index) {
  group of = {.index = index};
  if (!PyArg_ParseTuple(given, "OO!pp", &of.params, &PyTuple_Type, &of.names, &of.wide, &of.master))
    return -1;
  if (!PyList_Check(of.params)) return 0;
  int found = 1;
  for (Py_ssize_t i = 0; found == 1 && i < PyList_Size(of.params); i++) {
    PyObject *param = Py_NewRef(PyList_GetItem(of.params, i));
    found = gather_param(g, &of, param);
    Py_DECREF(param);
  }
  return found;
}

PyObject *omc_gather_rows(PyObject *module, PyObject *args) {
  gathering g = {.m = PyModule_GetState(module)};
  const char *provider;
  PyObject *groups, *result = NULL;
  if (!PyArg_ParseTuple(args, "OO!pps", &g.state, &PyList_Type, &groups, &g.counts, &g.writes_grad,
                        &provider))
    return NULL;
  if (!PyDict_Check(g.state)) Py_RETURN_NONE;
  if (omc_provider_find(provider, &g.provider) != OMC_OK) Py_RETURN_NONE;
  int found = (g.rows = PyList_New(0)) && (g.written = PyList_New(0)) ? 1 : -1;
  for (Py_ssize_t i = 0; found == 1 && i < PyList_Size(groups); i++)
    found = gather_group(&g, PyList_GetItem(groups, i), i);
  if (found == 1) result = Py_BuildValue("(OO)", g.rows, g.written);
  if (found == 0) result = Py_NewRef(Py_None);
  Py_XDECREF(g.rows);
  Py_XDECREF(g.written);
  return result;
}
