/* Status to Python exception, by the third column of status.def. */
#include "python/binding.h"

static const char *const exceptions[OMC_N_STATUS] = {
#define OMC_STATUS(code, text, exception) exception,
#include "base/status.def"
#undef OMC_STATUS
};

PyObject *omc_raise(const omc_module *m, omc_status status) {
  if (PyErr_Occurred()) return NULL;
  const char *name = exceptions[status];
  const char *detail = omc_status_detail();
  const char *text = omc_status_text(status);
  if (status == OMC_ECONSUMED) {
    PyErr_Format(m->consumed_error, "%s: %s", text, detail);
    return NULL;
  }
  PyObject *builtins = PyImport_ImportModule("builtins");
  PyObject *type = builtins ? PyObject_GetAttrString(builtins, name ? name : "RuntimeError") : NULL;
  if (type) PyErr_Format(type, "%s: %s", text, detail);
  Py_XDECREF(type);
  Py_XDECREF(builtins);
  return NULL;
}
