/* Values of Python that a graph was made for, compared with what is there now. */
#include "bind/bind.h"

typedef struct comparison {
  PyObject *by_value; /* frozenset of classes whose equal instances are interchangeable */
  PyObject *missing;  /* stands for a value that is not there */
} comparison;

static int same(const comparison *c, PyObject *now, PyObject *was);

static int same_bits(const void *a, const void *b, size_t n) { return memcmp(a, b, n) == 0; }

/* Numbers of NumPy differ as -0.0 and 0.0 do, and one that is NaN is the same as itself. */
static int same_buffer(PyObject *now, PyObject *was) {
  Py_buffer a, b;
  if (PyObject_GetBuffer(now, &a, PyBUF_SIMPLE) < 0) return -1;
  if (PyObject_GetBuffer(was, &b, PyBUF_SIMPLE) < 0) {
    PyBuffer_Release(&a);
    return -1;
  }
  const int result = a.len == b.len && same_bits(a.buf, b.buf, (size_t)a.len);
  PyBuffer_Release(&a);
  PyBuffer_Release(&b);
  return result;
}

static int same_sequence(const comparison *c, PyObject *now, PyObject *was,
                         PyObject *(*item)(PyObject *, Py_ssize_t), Py_ssize_t n) {
  int result = 1;
  for (Py_ssize_t i = 0; result > 0 && i < n; i++) {
    PyObject *element = Py_XNewRef(item(now, i)); /* a comparison may run anything */
    result = element ? same(c, element, item(was, i)) : -1;
    Py_XDECREF(element);
  }
  return result;
}

static int same_dict(const comparison *c, PyObject *now, PyObject *was) {
  PyObject *keys[2], *values[2];
  Py_ssize_t at[2] = {0, 0};
  int result = PyDict_Size(now) == PyDict_Size(was);
  while (result > 0 && PyDict_Next(was, &at[1], &keys[1], &values[1])) {
    if (!PyDict_Next(now, &at[0], &keys[0], &values[0])) return 0;
    PyObject *key = Py_NewRef(keys[0]), *value = Py_NewRef(values[0]);
    result = same(c, key, keys[1]);
    if (result > 0) result = same(c, value, values[1]);
    Py_DECREF(key);
    Py_DECREF(value);
  }
  return result;
}

static int same_number(PyObject *now, PyObject *was) {
  const double a[2] = {PyComplex_RealAsDouble(now), PyComplex_ImagAsDouble(now)};
  const double b[2] = {PyComplex_RealAsDouble(was), PyComplex_ImagAsDouble(was)};
  return same_bits(a, b, sizeof a);
}

static int same(const comparison *c, PyObject *now, PyObject *was) {
  if (now == was) return 1;
  if (Py_TYPE(now) != Py_TYPE(was)) return 0;
  if (PyFloat_CheckExact(now) || PyComplex_CheckExact(now)) return same_number(now, was);
  if (PyTuple_Check(now))
    return PyTuple_Size(now) == PyTuple_Size(was) &&
           same_sequence(c, now, was, PyTuple_GetItem, PyTuple_Size(was));
  if (PyList_CheckExact(now))
    return PyList_Size(now) == PyList_Size(was) &&
           same_sequence(c, now, was, PyList_GetItem, PyList_Size(was));
  if (PyDict_CheckExact(now)) return same_dict(c, now, was);
  if (PyAnySet_CheckExact(now)) return PyObject_RichCompareBool(now, was, Py_EQ);
  const int by_value = PySet_Contains(c->by_value, (PyObject *)Py_TYPE(now));
  if (by_value <= 0) return by_value;
  if (PyObject_CheckBuffer(now)) return same_buffer(now, was);
  return PyObject_RichCompareBool(now, was, Py_EQ);
}

/* What lies at a place, a new reference: an item of a dict, what a call gives, or an attribute. */
static PyObject *value_at(const comparison *c, PyObject *holder, PyObject *key) {
  PyObject *found;
  if (PyDict_CheckExact(holder))
    found = Py_XNewRef(PyDict_GetItemWithError(holder, key));
  else if (key == Py_None)
    found = PyObject_CallNoArgs(holder);
  else
    found = PyObject_GetAttr(holder, key);
  if (found) return found;
  /* An attribute is missing, or a cell empty. */
  if (PyErr_ExceptionMatches(PyExc_AttributeError) || PyErr_ExceptionMatches(PyExc_ValueError))
    PyErr_Clear();
  return PyErr_Occurred() ? NULL : Py_NewRef(c->missing);
}

static int is_unchanged(const comparison *c, PyObject *place) {
  if (!PyTuple_Check(place) || PyTuple_Size(place) != 3) {
    PyErr_Format(PyExc_TypeError, "expected (holder, key, value), got %R", place);
    return -1;
  }
  PyObject *now = value_at(c, PyTuple_GetItem(place, 0), PyTuple_GetItem(place, 1));
  const int result = now ? same(c, now, PyTuple_GetItem(place, 2)) : -1;
  Py_XDECREF(now);
  return result;
}

/* A key that is added becomes the last one, at a position behind all others. So keys are what they
 * were if there are as many, and the last is the same at the same position. Positions may also move
 * by themselves, as when a key goes and comes back: then the keys are looked up. */
PyObject *omc_keys_of(PyObject *module, PyObject *dict) {
  (void)module;
  if (!PyDict_Check(dict)) return PyErr_Format(PyExc_TypeError, "expected a dict, got %R", dict);
  PyObject *key;
  Py_ssize_t next = 0, position = 0;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &next, &key, NULL); at = next) position = at;
  PyObject *keys = PyDict_Keys(dict);
  return keys ? Py_BuildValue("OnN", dict, position, keys) : NULL;
}

static int has_keys(const comparison *c, PyObject *entry) {
  (void)c;
  if (!PyTuple_Check(entry) || PyTuple_Size(entry) != 3) {
    PyErr_Format(PyExc_TypeError, "expected what keys_of gives, got %R", entry);
    return -1;
  }
  PyObject *dict = PyTuple_GetItem(entry, 0), *keys = PyTuple_GetItem(entry, 2), *key = NULL;
  const Py_ssize_t size = PyList_Size(keys);
  Py_ssize_t position = PyLong_AsSsize_t(PyTuple_GetItem(entry, 1));
  if (PyErr_Occurred()) return -1;
  if (PyDict_Size(dict) != size) return 0;
  if (size == 0) return 1;
  if (PyDict_Next(dict, &position, &key, NULL) && key == PyList_GetItem(keys, size - 1) &&
      !PyDict_Next(dict, &position, &key, NULL))
    return 1;
  int found = 1;
  for (Py_ssize_t i = 0; found > 0 && i < size; i++)
    found = PyDict_Contains(dict, PyList_GetItem(keys, i));
  return found;
}

/* The first entry that does not pass, -1 if all do, -2 with an exception set. */
static Py_ssize_t first_failing(const comparison *c, PyObject *entries,
                                int (*passes)(const comparison *, PyObject *)) {
  for (Py_ssize_t i = 0; i < PyList_Size(entries); i++) {
    PyObject *entry = Py_NewRef(PyList_GetItem(entries, i));
    const int result = passes(c, entry);
    Py_DECREF(entry);
    if (result <= 0) return result < 0 ? -2 : i;
  }
  return -1;
}

PyObject *omc_first_changed(PyObject *module, PyObject *args) {
  (void)module;
  PyObject *places, *keys;
  comparison c;
  if (!PyArg_ParseTuple(args, "O!O!O!O", &PyList_Type, &places, &PyList_Type, &keys,
                        &PyFrozenSet_Type, &c.by_value, &c.missing))
    return NULL;
  Py_ssize_t at = first_failing(&c, places, is_unchanged);
  if (at == -1 && (at = first_failing(&c, keys, has_keys)) >= 0) at += PyList_Size(places);
  return at == -2 ? NULL : PyLong_FromSsize_t(at);
}
