/* The Python module `device`: tensors of the devices of the tests, to be linked into an extension
 * of which sessions may be opened on them: that of tests/c, and the provider for CUDA with the
 * stand-ins of tests/cuda. */
#include <dlfcn.h>

#include "device.h"
#include "python/binding.h"
#include "tests/cuda/emulated.h"

/* Linked with --wrap: what the product asks for by name may be such a device too. */
omc_status __real_omc_provider_find(const char *name, const omc_provider **out);
omc_status __wrap_omc_provider_find(const char *name, const omc_provider **out);
/* PyTorch for the CPU has no tensors of CUDA: they go by another name of DLPack's. */
static omc_status gpu_provider(const omc_provider **out) {
  static omc_provider gpu;
  const omc_provider *cuda;
  OMC_TRY(__real_omc_provider_find("cuda", &cuda));
  gpu = *cuda;
  gpu.name = "gpu";
  gpu.device = device_provider()->device;
  gpu.make_room = NULL; /* nor has it any to make */
  *out = &gpu;
  return OMC_OK;
}

omc_status __wrap_omc_provider_find(const char *name, const omc_provider **out) {
  if (strcmp(name, "device") == 0)
    *out = device_provider();
  else if (strcmp(name, "gpu") == 0)
    return gpu_provider(out);
  else
    return __real_omc_provider_find(name, out);
  return OMC_OK;
}

/* Where tests want it so, few elements have the kernels that are for 2^31 and more. */
int64_t __wrap_omc_cuda_narrow(void);
int64_t __wrap_omc_cuda_narrow(void) {
  return (int64_t)1 << emulated_number("EMULATED_NARROW_BITS", 31);
}

int __real_omc_current_queue(const omc_module *m, const omc_provider *provider, void **out);
int __wrap_omc_current_queue(const omc_module *m, const omc_provider *provider, void **out);
/* The emulated GPU's, in the place of PyTorch's. */
static void *current_stream;

int __wrap_omc_current_queue(const omc_module *m, const omc_provider *provider, void **out) {
  const int result = __real_omc_current_queue(m, provider, out);
  if (result == 0 && strcmp(provider->name, "gpu") == 0) *out = current_stream;
  return result;
}

static PyObject *use_stream(PyObject *module, PyObject *stream) {
  (void)module;
  current_stream = PyLong_AsVoidPtr(stream);
  return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
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
  out->fresh = omc_tensor_pooled(m, to, &type, NULL, &out->to);
  return out->fresh != NULL;
}

/* How the host's memory and a device's are copied to one another. */
typedef struct border {
  const omc_provider *provider;
  void (*write)(void *device, const void *host, size_t bytes);
  void (*read)(void *host, const void *device, size_t bytes);
} border;

static int border_of(const omc_module *m, const char *name, border *out) {
  const omc_status status = __wrap_omc_provider_find(name, &out->provider);
  if (status != OMC_OK) return omc_raise(m, status), -1;
  *(void **)&out->write = dlsym(RTLD_DEFAULT, "emulated_write");
  *(void **)&out->read = dlsym(RTLD_DEFAULT, "emulated_read");
  if (out->provider == device_provider()) out->write = device_write, out->read = device_read;
  return 0;
}

/* What is like the tensor of the host's that is named, on the device that is. */
static bool make_there(PyObject *module, PyObject *args, border *b, two *out) {
  PyObject *tensor;
  const char *name = "device";
  return PyArg_ParseTuple(args, "O|s", &tensor, &name) &&
         border_of(PyModule_GetState(module), name, b) == 0 &&
         make(PyModule_GetState(module), omc_provider_host(), b->provider, tensor, out);
}

static PyObject *put(PyObject *module, PyObject *args) {
  border b;
  two t;
  if (!make_there(module, args, &b, &t)) return NULL;
  if (t.bytes) b.write(t.to, t.from, t.bytes);
  return t.fresh;
}

static PyObject *fresh(PyObject *module, PyObject *args) {
  border b;
  two t;
  return make_there(module, args, &b, &t) ? t.fresh : NULL;
}

static PyObject *get(PyObject *module, PyObject *args) {
  const omc_module *m = PyModule_GetState(module);
  PyObject *tensor;
  const char *name = "device";
  border b;
  two t;
  omc_status status;
  if (!PyArg_ParseTuple(args, "O|s", &tensor, &name)) return NULL;
  if (border_of(m, name, &b) < 0) return NULL;
  const omc_provider *p = b.provider;
  void *queue = NULL;
  if (strncmp(name, "cuda", 4) == 0 && __wrap_omc_current_queue(m, p, &queue) < 0) return NULL;
  if (!make(m, p, omc_provider_host(), tensor, &t)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = p->sync(p->ctx, NULL);
  if (status == OMC_OK && queue) status = p->sync(p->ctx, queue);
  Py_END_ALLOW_THREADS
  if (status != OMC_OK) {
    Py_DECREF(t.fresh);
    return omc_raise(m, status);
  }
  if (t.bytes) b.read(t.to, t.from, t.bytes);
  return t.fresh;
}

static PyObject *rest(PyObject *module, PyObject *args) {
  const omc_module *m = PyModule_GetState(module);
  PyObject *tensor;
  long long first;
  border b;
  omc_type type;
  void *data;
  const char *name = "device";
  if (!PyArg_ParseTuple(args, "OL|s", &tensor, &first, &name)) return NULL;
  if (border_of(m, name, &b) < 0) return NULL;
  if (omc_tensor_read(m, b.provider, tensor, &data, &type) < 0) return NULL;
  type.shape.dims[0] -= first;
  return omc_tensor_view(m, b.provider,
                         (char *)data + first * (long long)omc_dtype_size(type.dtype), &type);
}

static PyObject *counted(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  const device_counts c = device_counted();
  return Py_BuildValue("{sKsKsKsK}", "kernels", c.kernels, "copies_within", c.copies_within,
                       "uploads", c.uploads, "from_and_to_host", c.from_and_to_host);
}

static PyObject *used_bytes(PyObject *module, PyObject *args) {
  const char *name = "device";
  border b;
  omc_status status = OMC_OK;
  if (!PyArg_ParseTuple(args, "|s", &name)) return NULL;
  if (border_of(PyModule_GetState(module), name, &b) < 0) return NULL;
  const omc_provider *p = b.provider;
  Py_BEGIN_ALLOW_THREADS
  if (p->sync_all) status = p->sync_all(p->ctx);
  Py_END_ALLOW_THREADS
  if (status != OMC_OK) return omc_raise(PyModule_GetState(module), status);
  return PyLong_FromSize_t(p->memory(p->ctx).used_bytes);
}

static PyObject *give_back(PyObject *module, PyObject *args) {
  unsigned long long address, bytes;
  const char *name;
  border b;
  if (!PyArg_ParseTuple(args, "KKs", &address, &bytes, &name)) return NULL;
  if (border_of(PyModule_GetState(module), name, &b) < 0) return NULL;
  b.provider->free(b.provider->ctx, (void *)(uintptr_t)address, (size_t)bytes, NULL);
  return Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"use_stream", use_stream, METH_O, "use_stream(address): the emulated GPU's is worked in"},
    {"fresh", fresh, METH_VARARGS,
     "fresh(tensor of the host, device='device') -> one like it there"},
    {"put", put, METH_VARARGS, "put(tensor of the host, device='device') -> a copy of it there"},
    {"get", get, METH_VARARGS,
     "get(tensor of a device, device='device') -> a copy of it, once the device is done, of "
     "'cuda:1' "
     "the queue too that is worked in"},
    {"rest", rest, METH_VARARGS,
     "rest(tensor of a device, first, device='device') -> its elements from there on, of one dim; "
     "it must live as long"},
    {"counted", counted, METH_NOARGS, "counted() -> what the device has been given so far"},
    {"used_bytes", used_bytes, METH_VARARGS,
     "used_bytes(device='device') -> memory in use, once all is done"},
    {"give_back", give_back, METH_VARARGS,
     "give_back(address, bytes, device): memory, as a provider's user does"},
    {NULL, NULL, 0, NULL}};

static int module_exec(PyObject *module) {
  omc_module *m = PyModule_GetState(module);
  m->device_error = PyExc_RuntimeError; /* which lives for the process */
  return omc_exchange_find(m);
}

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
