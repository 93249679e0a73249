/* Whether two values of Python are interchangeable for a graph that was made for one of them. */
#include "python/binding.h"

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

static int same_sequence(const omc_comparison *c, PyObject *now, PyObject *was,
                         PyObject *(*item)(PyObject *, Py_ssize_t), Py_ssize_t n) {
  int result = 1;
  for (Py_ssize_t i = 0; result > 0 && i < n; i++) {
    PyObject *a = item(now, i), *b = item(was, i);
    if (a && a == b) continue;
    Py_XINCREF(a);
    Py_XINCREF(b);
    if (!a || !b) PyErr_Clear(); /* a comparison may run anything, and what is compared shrink */
    result = a && b ? omc_same(c, a, b) : 0;
    Py_XDECREF(a);
    Py_XDECREF(b);
  }
  return result;
}

static int same_dict(const omc_comparison *c, PyObject *now, PyObject *was) {
  PyObject *keys[2], *values[2];
  Py_ssize_t at[2] = {0, 0};
  int result = PyDict_Size(now) == PyDict_Size(was);
  while (result > 0 && PyDict_Next(was, &at[1], &keys[1], &values[1])) {
    if (!PyDict_Next(now, &at[0], &keys[0], &values[0])) return 0;
    if (keys[0] == keys[1] && values[0] == values[1]) continue;
    for (int i = 0; i < 2; i++) {
      Py_INCREF(keys[i]);
      Py_INCREF(values[i]);
    }
    result = omc_same(c, keys[0], keys[1]);
    if (result > 0) result = omc_same(c, values[0], values[1]);
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

static int same_of_a_class(const omc_comparison *c, PyObject *now, PyObject *was) {
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

int omc_same(const omc_comparison *c, PyObject *now, PyObject *was) {
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
