/* Values of Python that a graph was made for, compared with what is there now. */
#include "bind/bind.h"

typedef struct comparison {
  PyObject *by_value; /* frozenset of classes whose equal instances are interchangeable */
  PyObject *by_repr;  /* of classes whose instances are so if they are written alike */
  PyObject *missing;  /* stands for a value that is not there, and one that is not compared */
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
    PyObject *a = Py_XNewRef(item(now, i)), *b = Py_XNewRef(item(was, i));
    if (!a || !b) PyErr_Clear(); /* a comparison may run anything, and what is compared shrink */
    result = a && b ? same(c, a, b) : 0;
    Py_XDECREF(a);
    Py_XDECREF(b);
  }
  return result;
}

static int same_dict(const comparison *c, PyObject *now, PyObject *was) {
  PyObject *keys[2], *values[2];
  Py_ssize_t at[2] = {0, 0};
  int result = PyDict_Size(now) == PyDict_Size(was);
  while (result > 0 && PyDict_Next(was, &at[1], &keys[1], &values[1])) {
    if (!PyDict_Next(now, &at[0], &keys[0], &values[0])) return 0;
    for (int i = 0; i < 2; i++) {
      Py_INCREF(keys[i]);
      Py_INCREF(values[i]);
    }
    result = same(c, keys[0], keys[1]);
    if (result > 0) result = same(c, values[0], values[1]);
    for (int i = 0; i < 2; i++) {
      Py_DECREF(keys[i]);
      Py_DECREF(values[i]);
    }
  }
  return result;
}

static int same_number(PyObject *now, PyObject *was) {
  const double a[2] = {PyComplex_RealAsDouble(now), PyComplex_ImagAsDouble(now)};
  const double b[2] = {PyComplex_RealAsDouble(was), PyComplex_ImagAsDouble(was)};
  return same_bits(a, b, sizeof a);
}

static int same_text(PyObject *now, PyObject *was) {
  PyObject *a = PyObject_Repr(now), *b = a ? PyObject_Repr(was) : NULL;
  const int result = b ? PyObject_RichCompareBool(a, b, Py_EQ) : -1;
  Py_XDECREF(a);
  Py_XDECREF(b);
  return result;
}

static int same_of_a_class(const comparison *c, PyObject *now, PyObject *was) {
  if (PyFloat_CheckExact(now) || PyComplex_CheckExact(now)) return same_number(now, was);
  if (PyTuple_Check(now))
    return PyTuple_Size(now) == PyTuple_Size(was)
               ? same_sequence(c, now, was, PyTuple_GetItem, PyTuple_Size(was))
               : 0;
  if (PyList_CheckExact(now))
    return PyList_Size(now) == PyList_Size(was)
               ? same_sequence(c, now, was, PyList_GetItem, PyList_Size(was))
               : 0;
  if (PyDict_CheckExact(now)) return same_dict(c, now, was);
  const int by_repr = PySet_Contains(c->by_repr, (PyObject *)Py_TYPE(now));
  if (by_repr != 0) return by_repr < 0 ? -1 : same_text(now, was);
  const int by_value = PySet_Contains(c->by_value, (PyObject *)Py_TYPE(now));
  if (by_value <= 0) return by_value;
  if (PyObject_CheckBuffer(now)) return same_buffer(now, was);
  return PyObject_RichCompareBool(now, was, Py_EQ);
}

static int same(const comparison *c, PyObject *now, PyObject *was) {
  if (now == was) return 1;
  if (Py_TYPE(now) != Py_TYPE(was)) return 0;
  if (Py_EnterRecursiveCall(" while values are compared") != 0) {
    PyErr_Clear(); /* each contains itself */
    return 0;
  }
  const int result = same_of_a_class(c, now, was);
  Py_LeaveRecursiveCall();
  return result;
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

/* Whether an object still has the dictionary that it had; nobody's (None) is itself. */
static bool is_its(PyObject *owner, PyObject *dict) {
  if (owner == Py_None) return true;
  PyObject *now = PyObject_GenericGetDict(owner, NULL);
  if (!now) PyErr_Clear();
  Py_XDECREF(now);
  return now == dict;
}

/* Compared key by key in their order, without a lookup. `missing` stands for what nobody read. */
static int same_in_order(const comparison *c, PyObject *dict, PyObject *keys, PyObject *values) {
  PyObject *key, *value;
  Py_ssize_t next = 0, at = 0;
  int result = 1;
  while (result > 0 && PyDict_Next(dict, &next, &key, &value)) {
    if (at >= PyTuple_Size(keys) || key != PyTuple_GetItem(keys, at)) return 0;
    PyObject *was = PyTuple_GetItem(values, at++);
    if (value == was || was == c->missing) continue;
    Py_INCREF(value);
    result = same(c, value, was);
    Py_DECREF(value);
  }
  return result > 0 ? at == PyTuple_Size(keys) : result;
}

/* As above for a dictionary whose keys came in another order. */
static int same_by_lookup(const comparison *c, PyObject *dict, PyObject *keys, PyObject *values) {
  const Py_ssize_t n = PyTuple_Size(keys);
  int result = PyDict_Size(dict) == n;
  for (Py_ssize_t i = 0; result > 0 && i < n; i++) {
    PyObject *value = Py_XNewRef(PyDict_GetItemWithError(dict, PyTuple_GetItem(keys, i)));
    PyObject *was = PyTuple_GetItem(values, i);
    if (!value)
      result = PyErr_Occurred() ? -1 : 0;
    else if (was != c->missing)
      result = same(c, value, was);
    Py_XDECREF(value);
  }
  return result;
}

/* Of (owner, dict, keys, values). */
static int is_unchanged_whole(const comparison *c, PyObject *entry) {
  if (!PyTuple_Check(entry) || PyTuple_Size(entry) != 4 ||
      !PyDict_Check(PyTuple_GetItem(entry, 1)) || !PyTuple_Check(PyTuple_GetItem(entry, 2)) ||
      !PyTuple_Check(PyTuple_GetItem(entry, 3)) ||
      PyTuple_Size(PyTuple_GetItem(entry, 2)) != PyTuple_Size(PyTuple_GetItem(entry, 3))) {
    PyErr_Format(PyExc_TypeError, "expected (owner, dict, keys, values), got %R", entry);
    return -1;
  }
  PyObject *dict = PyTuple_GetItem(entry, 1);
  PyObject *keys = PyTuple_GetItem(entry, 2), *values = PyTuple_GetItem(entry, 3);
  if (!is_its(PyTuple_GetItem(entry, 0), dict)) return 0;
  const int result = same_in_order(c, dict, keys, values);
  return result == 0 ? same_by_lookup(c, dict, keys, values) : result;
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
  PyObject *dicts, *places;
  comparison c;
  if (!PyArg_ParseTuple(args, "O!O!O!O!O", &PyList_Type, &dicts, &PyList_Type, &places,
                        &PyFrozenSet_Type, &c.by_value, &PyFrozenSet_Type, &c.by_repr, &c.missing))
    return NULL;
  Py_ssize_t at = first_failing(&c, dicts, is_unchanged_whole);
  if (at == -1 && (at = first_failing(&c, places, is_unchanged)) >= 0) at += PyList_Size(dicts);
  return at == -2 ? NULL : PyLong_FromSsize_t(at);
}
