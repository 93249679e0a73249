/* The Python module `device`: tensors of the device of tests/c, to be linked into an extension of
 * which sessions may be opened on it. */
#include "device.h"
#include "python/binding.h"

/* Linked with --wrap: what the product asks for by name may be the device too. */
const omc_provider *__real_omc_provider_find(const char *name);
const omc_provider *__wrap_omc_provider_find(const char *name);
const omc_provider *__wrap_omc_provider_find(const char *name) {
  const omc_provider *device = device_provider();
  return strcmp(name, device->name) == 0 ? device : __real_omc_provider_find(name);
}

/* What is read of a tensor of one provider, and a fresh one of the other with its type. */
typedef struct two {
  void *from, *to;
  size_t bytes;
  PyObject *fresh;
} two;

static bool make(const omc_module *m, const omc_provider *from, const omc_provider *to,
                 PyObject *tensor, two *out) {
  omc_type type;
  if (omc_tensor_read(m, from, tensor, &out->from, &type) < 0) return false;
  const omc_status status = omc_type_bytes(&type, &out->bytes);
  if (status != OMC_OK) return omc_raise(m, status) != NULL;
  out->fresh = omc_tensor_new(m, to, &type, NULL, &out->to);
  return out->fresh != NULL;
}

static PyObject *put(PyObject *module, PyObject *tensor) {
  two t;
  if (!make(PyModule_GetState(module), omc_provider_host(), device_provider(), tensor, &t))
    return NULL;
  device_write(t.to, t.from, t.bytes);
  return t.fresh;
}

static PyObject *get(PyObject *module, PyObject *tensor) {
  const omc_module *m = PyModule_GetState(module);
  const omc_provider *p = device_provider();
  two t;
  omc_status status;
  if (!make(m, p, omc_provider_host(), tensor, &t)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = p->sync(p->ctx, NULL);
  Py_END_ALLOW_THREADS
  if (status != OMC_OK) {
    Py_DECREF(t.fresh);
    return omc_raise(m, status);
  }
  device_read(t.to, t.from, t.bytes);
  return t.fresh;
}

static PyObject *counted(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  const device_counts c = device_counted();
  return Py_BuildValue("{sKsKsKsK}", "kernels", c.kernels, "copies_within", c.copies_within,
                       "uploads", c.uploads, "from_and_to_host", c.from_and_to_host);
}

static PyObject *used_bytes(PyObject *module, PyObject *unused) {
  (void)unused;
  const omc_provider *p = device_provider();
  omc_status status;
  Py_BEGIN_ALLOW_THREADS
  status = p->sync_all(p->ctx);
  Py_END_ALLOW_THREADS
  if (status != OMC_OK) return omc_raise(PyModule_GetState(module), status);
  return PyLong_FromSize_t(p->memory(p->ctx).used_bytes);
}

static PyMethodDef methods[] = {
    {"put", put, METH_O, "put(tensor of the host) -> a copy of it on the device"},
    {"get", get, METH_O, "get(tensor of the device) -> a copy of it, once the device is done"},
    {"counted", counted, METH_NOARGS, "counted() -> what the device has been given so far"},
    {"used_bytes", used_bytes, METH_NOARGS, "used_bytes() -> memory in use, once all is done"},
    {NULL, NULL, 0, NULL}};

static int module_exec(PyObject *module) { return omc_exchange_find(PyModule_GetState(module)); }

static PyModuleDef_Slot slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                        "device",
                                        "Tensors of the device of tests/c.",
                                        sizeof(omc_module),
                                        methods,
                                        slots,
                                        NULL,
                                        NULL,
                                        NULL};

PyMODINIT_FUNC PyInit_device(void);
PyMODINIT_FUNC PyInit_device(void) { return PyModuleDef_Init(&definition); }
