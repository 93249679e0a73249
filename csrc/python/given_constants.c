/* The constants that are given beside the text of a graph. */
#include "python/binding.h"

int omc_given_constants_init(omc_given_constants *c, const omc_module *m, PyObject *mapping) {
  *c = (omc_given_constants){m, NULL};
  PyObject *dict = PyDict_New();
  if (!dict || PyDict_Update(dict, mapping) < 0) {
    Py_XDECREF(dict);
    return -1;
  }
  c->dict = dict;
  return 0;
}

void omc_given_constants_drop(omc_given_constants *c) { Py_CLEAR(c->dict); }

omc_status omc_given_constants_find(void *ctx, const char *name, const void **data, size_t *bytes) {
  const omc_given_constants *c = ctx;
  PyObject *tensor = c->dict ? PyDict_GetItemString(c->dict, name) : NULL;
  if (!tensor) OMC_FAIL(EINVALID, "no constant named '%s' was given", name);
  omc_type type;
  void *elements;
  if (omc_tensor_read(c->module, omc_provider_host(), tensor, &elements, &type) < 0) {
    omc_error_prefix("%s", name);
    OMC_FAIL(ECALLBACK, "constant '%s'", name);
  }
  *data = elements;
  return omc_type_bytes(&type, bytes);
}
