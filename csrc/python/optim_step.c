/* optim_step(): a step of an optimizer over torch tensors. _C.pyi tells what it is given. */
#include "optim/optim.h"

#include "base/arena.h"
#include "python/binding.h"

typedef struct reading {
  const omc_module *m;
  const omc_provider *provider;
  omc_arena arena;
  PyObject *tensors, *groups; /* tuples, which keep the tensors while the GIL is released */
  omc_optim_tensor *read;
  omc_optim_numbers *numbers;
} reading;

/* ---- arrays ---- */

/* An array of n elements, or NULL for None; `dtype` is what it must store, and n what it must have,
 * where they are known. */
static int read_array(reading *r, PyObject *tensor, const char *what, int64_t *n, omc_dtype *dtype,
                      void **out) {
  omc_type type;
  *out = NULL;
  if (tensor == Py_None) return 0;
  if (omc_tensor_read(r->m, r->provider, tensor, out, &type) < 0)
    return omc_error_prefix("%s", what);
  const int64_t has = omc_shape_numel(&type.shape);
  if (*n >= 0 && has != *n) {
    PyErr_Format(PyExc_ValueError, "%s has %lld elements, not %lld", what, (long long)has,
                 (long long)*n);
    return -1;
  }
  if (*dtype != OMC_N_DTYPE && type.dtype != *dtype) {
    PyErr_Format(PyExc_TypeError, "%s is %s, not %s", what, omc_dtype_get(type.dtype)->text,
                 omc_dtype_get(*dtype)->text);
    return -1;
  }
  *n = has;
  *dtype = type.dtype;
  return 0;
}

/* One number in memory of the device, or NULL for None. */
static int read_there(reading *r, PyObject *tensor, const char *what, omc_dtype dtype, void **out) {
  int64_t one = 1;
  return read_array(r, tensor, what, &one, &dtype, out);
}

/* ---- groups ---- */

static int read_number(reading *r, omc_optim_numbers *out, PyObject *name, PyObject *value) {
  Py_ssize_t n;
  const char *text = PyUnicode_AsUTF8AndSize(name, &n);
  if (!text) return -1;
  double *number = omc_optim_number(out, text, (size_t)n);
  if (!number) {
    PyErr_Format(PyExc_ValueError, "no rule has a number named '%U'", name);
    return -1;
  }
  if (number == &out->lr && r->provider != omc_provider_host() &&
      PyObject_IsInstance(value, r->m->torch) > 0) {
    void *at;
    if (read_there(r, value, "lr", OMC_F64, &at) < 0) return -1;
    out->lr_at = at;
    return 0;
  }
  *number = PyFloat_AsDouble(value);
  return *number == -1 && PyErr_Occurred() ? omc_error_prefix("'%U'", name) : 0;
}

static int read_groups(reading *r) {
  const Py_ssize_t n = PyTuple_Size(r->groups);
  r->numbers = OMC_NEW_ARRAY(&r->arena, omc_optim_numbers, n + 1);
  if (!r->numbers) return PyErr_NoMemory(), -1;
  for (Py_ssize_t g = 0; g < n; g++) {
    PyObject *group = PyTuple_GetItem(r->groups, g), *name, *value;
    Py_ssize_t at = 0;
    if (!PyDict_Check(group)) {
      PyErr_Format(PyExc_TypeError, "expected a dict, got %R", (PyObject *)Py_TYPE(group));
      return -1;
    }
    while (PyDict_Next(group, &at, &name, &value))
      if (read_number(r, &r->numbers[g], name, value) < 0) return omc_error_prefix("group %zd", g);
  }
  return 0;
}

/* ---- tensors ---- */

static int read_states(reading *r, PyObject *states, omc_optim_tensor *t) {
  const Py_ssize_t n = PyTuple_Size(states);
  omc_dtype dtype = OMC_N_DTYPE;
  for (Py_ssize_t k = 0; k < n && k < OMC_OPTIM_STATES; k++)
    if (read_array(r, PyTuple_GetItem(states, k), "state", &t->n, &dtype, &t->state[k]) < 0)
      return -1;
  t->state_dtype = dtype == OMC_N_DTYPE ? t->dtype : dtype;
  if (n <= OMC_OPTIM_STATES &&
      (t->state_dtype == t->dtype || t->state_dtype == omc_dtype_acc(t->dtype)))
    return 0;
  PyErr_Format(PyExc_TypeError, "%zd states of %s beside a parameter of %s", n,
               omc_dtype_get(t->state_dtype)->text, omc_dtype_get(t->dtype)->text);
  return -1;
}

static int read_tensor(reading *r, PyObject *row, omc_optim_tensor *t) {
  PyObject *param, *grad, *master, *step, *states;
  Py_ssize_t group;
  int first;
  if (!PyArg_ParseTuple(row, "nOOOOpO!", &group, &param, &grad, &master, &step, &first,
                        &PyTuple_Type, &states))
    return -1;
  if (group < 0 || group >= PyTuple_Size(r->groups)) {
    PyErr_Format(PyExc_IndexError, "group %zd of %zd", group, PyTuple_Size(r->groups));
    return -1;
  }
  *t = (omc_optim_tensor){.n = -1, .first = first != 0, .numbers = &r->numbers[group]};
  t->dtype = OMC_N_DTYPE;
  if (read_array(r, grad, "grad", &t->n, &t->dtype, &t->grad) < 0 ||
      read_array(r, param, "param", &t->n, &t->dtype, &t->param) < 0)
    return -1;
  if (t->n < 0 || !omc_dtype_is_float(t->dtype)) {
    PyErr_Format(PyExc_TypeError, "expected tensors of floating point");
    return -1;
  }
  omc_dtype wide = omc_dtype_acc(t->dtype);
  void *steps;
  if (read_array(r, master, "master", &t->n, &wide, &t->master) < 0 ||
      read_there(r, step, "step", OMC_F32, &steps) < 0)
    return -1;
  t->step = steps;
  return read_states(r, states, t);
}

static int read_tensors(reading *r) {
  const Py_ssize_t n = PyTuple_Size(r->tensors);
  r->read = OMC_NEW_ARRAY(&r->arena, omc_optim_tensor, n + 1);
  if (!r->read) return PyErr_NoMemory(), -1;
  for (Py_ssize_t i = 0; i < n; i++)
    if (read_tensor(r, PyTuple_GetItem(r->tensors, i), &r->read[i]) < 0)
      return omc_error_prefix("tensor %zd", i);
  return 0;
}

/* ---- the step ---- */

static int read_numbers(reading *r, PyObject *scale, PyObject *found_inf, PyObject *norm,
                        omc_optim_step *step) {
  void *at[3];
  if (read_there(r, scale, "grad_scale", OMC_F32, &at[0]) < 0 ||
      read_there(r, found_inf, "found_inf", OMC_F32, &at[1]) < 0 ||
      read_there(r, norm, "norm", OMC_F64, &at[2]) < 0)
    return -1;
  step->grad_scale = at[0], step->found_inf = at[1], step->norm = at[2];
  return 0;
}

static omc_status take_step(const reading *r, const omc_optim_step *step) {
  void *queue;
  if (omc_current_queue(r->m, r->provider, &queue) < 0) OMC_FAIL(ECALLBACK, "the current queue");
  omc_status status = omc_optim_check(step);
  if (status == OMC_OK) status = omc_provider_told(r->provider);
  if (status != OMC_OK) return status;
  Py_BEGIN_ALLOW_THREADS
  status = r->provider->step(r->provider->ctx, step, queue);
  Py_END_ALLOW_THREADS
  return status;
}

PyObject *omc_take_step(PyObject *module, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"rule",      "tensors", "groups", "grad_scale", "found_inf", "max_norm",
                          "norm_type", "norm",    "seed",   "provider",   NULL};
  reading r = {.m = PyModule_GetState(module)};
  omc_optim_step step = {.norm_type = 2};
  const char *rule, *provider = omc_provider_host()->name;
  PyObject *tensors, *groups, *max_norm = Py_None, *seed = NULL, *result = NULL;
  PyObject *scale = Py_None, *found_inf = Py_None, *norm = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sOO|OOOdOOs", names, &rule, &tensors, &groups,
                                   &scale, &found_inf, &max_norm, &step.norm_type, &norm, &seed,
                                   &provider))
    return NULL;
  const omc_status found = omc_provider_find(provider, &r.provider);
  if (found != OMC_OK) return omc_raise(r.m, found);
  if (!omc_optim_rule_find(rule, &step.rule))
    return PyErr_Format(PyExc_ValueError, "no rule is named '%s'", rule);
  step.clips = max_norm != Py_None;
  if (step.clips) step.max_norm = PyFloat_AsDouble(max_norm);
  if (seed) step.seed = PyLong_AsUnsignedLongLongMask(seed);
  if (PyErr_Occurred()) return NULL;
  omc_arena_init(&r.arena, omc_default_allocator());
  r.tensors = PySequence_Tuple(tensors);
  r.groups = PySequence_Tuple(groups);
  if (r.tensors && r.groups && read_groups(&r) == 0 && read_tensors(&r) == 0 &&
      read_numbers(&r, scale, found_inf, norm, &step) == 0) {
    step.tensors = r.read;
    step.n = (uint32_t)PyTuple_Size(r.tensors);
    const omc_status status = take_step(&r, &step);
    if (status != OMC_OK)
      omc_raise(r.m, status);
    else
      result = Py_NewRef(Py_None);
  }
  omc_arena_deinit(&r.arena);
  Py_XDECREF(r.tensors);
  Py_XDECREF(r.groups);
  return result;
}
