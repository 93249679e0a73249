#include "python/binding.h"

void *omc_object_new(PyObject *type) {
  allocfunc alloc = PyType_GetSlot((PyTypeObject *)type, Py_tp_alloc);
  return alloc((PyTypeObject *)type, 0);
}

void omc_object_free(PyObject *object) {
  PyTypeObject *type = Py_TYPE(object);
  freefunc release = PyType_GetSlot(type, Py_tp_free);
  release(object);
  Py_DECREF(type);
}

void omc_append(PyObject **list, PyObject *item) {
  if (*list && (!item || PyList_Append(*list, item) < 0)) Py_CLEAR(*list);
  Py_XDECREF(item);
}

void omc_enter(PyObject **dict, const char *name, PyObject *item) {
  if (*dict && (!item || PyDict_SetItemString(*dict, name, item) < 0)) Py_CLEAR(*dict);
  Py_XDECREF(item);
}
