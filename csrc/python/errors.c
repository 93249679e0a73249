/* Status to Python exception, by the third column of status.def. */
#include "python/binding.h"

#define TORCH "torch."

static const char *const exceptions[OMC_N_STATUS] = {
#define OMC_STATUS(code, text, exception) exception,
#include "base/status.def"
#undef OMC_STATUS
};

PyObject *omc_exception_of(const omc_module *m, omc_status status) {
  const char *name = exceptions[status] ? exceptions[status] : "RuntimeError";
  if (status == OMC_ECONSUMED) return Py_NewRef(m->consumed_error);
  if (status == OMC_EDEVICE) return Py_NewRef(m->device_error);
  const bool torchs = strncmp(name, TORCH, sizeof TORCH - 1) == 0;
  PyObject *module = PyImport_ImportModule(torchs ? "torch" : "builtins");
  PyObject *type =
      module ? PyObject_GetAttrString(module, torchs ? name + sizeof TORCH - 1 : name) : NULL;
  Py_XDECREF(module);
  return type;
}

PyObject *omc_raise(const omc_module *m, omc_status status) {
  if (PyErr_Occurred()) return NULL;
  PyObject *type = omc_exception_of(m, status);
  if (type) PyErr_Format(type, "%s: %s", omc_status_text(status), omc_status_detail());
  Py_XDECREF(type);
  return NULL;
}
