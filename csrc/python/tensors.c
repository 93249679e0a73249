/* torch tensors read and made through torch's DLPack exchange table. */
#include <stdarg.h>

#include "python/binding.h"

static const char *const torch_dtypes[OMC_N_DTYPE] = {
    [OMC_F32] = "float32", [OMC_F64] = "float64", [OMC_F16] = "float16", [OMC_BF16] = "bfloat16",
    [OMC_I64] = "int64",   [OMC_I32] = "int32",   [OMC_I16] = "int16",   [OMC_I8] = "int8",
    [OMC_U8] = "uint8",    [OMC_BOOL] = "bool"};

/* Walks from an object along names; NULL, with no exception, where one is missing. */
static PyObject *find_private(PyObject *from, const char *const *names) {
  PyObject *at = Py_NewRef(from);
  for (; at && *names; names++) {
    PyObject *next = PyObject_GetAttrString(at, *names);
    Py_DECREF(at);
    at = next;
  }
  if (!at) PyErr_Clear();
  return at;
}

/* What makes tensors of torch's own. The private names are those by which Inductor's code makes its
 * results on the current GPU, in half the time. */
static int find_makers(omc_module *m, PyObject *torch) {
  m->empty_here = find_private(
      torch, (const char *const[]){"_C", "_dynamo", "guards", "_empty_strided_cuda", NULL});
  m->here = find_private(torch, (const char *const[]){"_C", "_cuda_getDevice", NULL});
  m->empty_strided = PyObject_GetAttrString(torch, "empty_strided");
  m->device = PyObject_GetAttrString(torch, "device");
  bool all = m->empty_strided && m->device;
  for (int i = 0; all && i < OMC_N_DTYPE; i++)
    all = (m->dtypes[i] = PyObject_GetAttrString(torch, torch_dtypes[i])) != NULL;
  return all ? 0 : -1;
}

int omc_exchange_find(omc_module *m) {
  PyObject *torch = PyImport_ImportModule("torch");
  if (!torch) return -1;
  if (find_makers(m, torch) < 0) {
    Py_DECREF(torch);
    return -1;
  }
  PyObject *nn = PyObject_GetAttrString(torch, "nn");
  m->torch = PyObject_GetAttrString(torch, "Tensor");
  m->parameter = nn ? PyObject_GetAttrString(nn, "Parameter") : NULL;
  m->precision_of =
      find_private(torch, (const char *const[]){"_C", "_get_fp32_precision_getter", NULL});
  Py_DECREF(torch);
  Py_XDECREF(nn);
  if (!m->torch || !m->parameter) return -1;
  PyObject *capsule = PyObject_GetAttrString(m->torch, "__dlpack_c_exchange_api__");
  if (!capsule) {
    PyErr_SetString(
        PyExc_ImportError,
        "ortmodule_c needs torch >= 2.11: torch.Tensor has no __dlpack_c_exchange_api__");
    return -1;
  }
  const DLPackExchangeAPIHeader *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_DECREF(capsule);
  while (api && api->version.major != OMC_DL_MAJOR) api = api->prev_api;
  if (!api) {
    if (!PyErr_Occurred())
      PyErr_SetString(PyExc_ImportError, "this torch offers no DLPack exchange table of version 1");
    return -1;
  }
  m->exchange = (const DLPackExchangeAPI *)(const void *)api;
  return 0;
}

/* Strides of a dim of size 1, and of a tensor without elements, mean nothing. */
static bool is_dense(const DLTensor *t) {
  int64_t expected = 1;
  bool dense = true;
  for (int32_t d = t->ndim - 1; d >= 0; d--) {
    dense &= t->shape[d] == 1 || !t->strides || t->strides[d] == expected;
    expected *= t->shape[d];
  }
  return dense || expected == 0;
}

int omc_error_prefix(const char *format, ...) {
  va_list args;
  va_start(args, format);
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyObject *prefix = PyUnicode_FromFormatV(format, args);
  if (prefix) PyErr_Format(type, "%U: %S", prefix, value);
  va_end(args);
  Py_XDECREF(prefix);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
  return -1;
}

int omc_tensor_read(const omc_module *m, const omc_provider *provider, PyObject *tensor,
                    void **data, omc_type *type) {
  PyObject *class = (PyObject *)Py_TYPE(tensor); /* the metaclass of Tensor is slow to ask */
  const bool plain = class == m->parameter || class == m->torch;
  const int is_tensor = plain ? 1 : PyObject_IsInstance(tensor, m->torch);
  if (is_tensor <= 0) {
    if (is_tensor == 0)
      PyErr_Format(PyExc_TypeError, "expected a torch.Tensor, got %R", (PyObject *)Py_TYPE(tensor));
    return -1;
  }
  DLTensor t;
  if (m->exchange->dltensor_from_py_object_no_sync(tensor, &t) != 0) return -1;
  if (t.device.device_type != provider->device.type || t.device.device_id != provider->device.id) {
    PyObject *device = PyObject_GetAttrString(tensor, "device");
    if (device)
      PyErr_Format(PyExc_ValueError, "expected a tensor on %s, got one on %S", provider->name,
                   device);
    Py_XDECREF(device);
    return -1;
  }
  if (t.ndim > OMC_MAX_RANK) {
    PyErr_Format(PyExc_ValueError, "rank %d is above the largest supported, %d", (int)t.ndim,
                 OMC_MAX_RANK);
    return -1;
  }
  if (t.dtype.lanes != 1 || !omc_dtype_from_dlpack(t.dtype.code, t.dtype.bits, &type->dtype)) {
    PyErr_Format(PyExc_TypeError, "dtype with DLPack code %d of %d bits is not supported",
                 (int)t.dtype.code, (int)t.dtype.bits);
    return -1;
  }
  if (!is_dense(&t)) {
    PyErr_Format(PyExc_ValueError, "expected a contiguous tensor");
    return -1;
  }
  memset(&type->shape, 0, sizeof type->shape);
  type->shape.rank = t.ndim;
  for (int32_t d = 0; d < t.ndim; d++) type->shape.dims[d] = t.shape[d];
  if (!t.data && omc_shape_numel(&type->shape) > 0) {
    PyErr_Format(PyExc_ValueError, "the tensor has a shape but no memory");
    return -1;
  }
  *data = t.data ? (char *)t.data + t.byte_offset : NULL;
  return 0;
}

static int tell_precision(const omc_module *m, const omc_provider *provider) {
  if (!m->precision_of) {
    PyErr_SetString(PyExc_RuntimeError,
                    "this PyTorch does not tell its precision of float32: "
                    "torch._C has no _get_fp32_precision_getter");
    return -1;
  }
  PyObject *precision =
      PyObject_CallFunction(m->precision_of, "ss", provider->precision_of, "matmul");
  if (!precision) return -1;
  provider->allow_tf32(provider->ctx, PyUnicode_CompareWithASCIIString(precision, "tf32") == 0);
  Py_DECREF(precision);
  return 0;
}

int omc_current_queue(const omc_module *m, const omc_provider *provider, void **out) {
  *out = NULL;
  if (provider == omc_provider_host()) return 0;
  if (provider->allow_tf32 && tell_precision(m, provider) < 0) return -1;
  return m->exchange->current_work_stream(provider->device.type, provider->device.id, out);
}

/* What a tensor made here owns; `managed.manager_ctx` points back to it. */
typedef struct owner {
  DLManagedTensorVersioned managed;
  int64_t shape[OMC_MAX_RANK], strides[OMC_MAX_RANK];
  const omc_provider *provider;
  void *data, *queue;
  size_t bytes; /* 0: the memory is somebody else's */
} owner;

static void owner_delete(DLManagedTensorVersioned *self) {
  owner *o = self->manager_ctx;
  if (o->bytes) o->provider->free(o->provider->ctx, o->data, o->bytes, o->queue);
  omc_free(omc_default_allocator(), o, 1, sizeof *o);
}

/* A torch tensor over memory of the provider; `bytes` of it, if not 0, are freed when the last
 * owner drops the tensor, or right away if that fails. */
static PyObject *wrap(const omc_module *m, const omc_provider *provider, const omc_type *type,
                      void *data, size_t bytes, void *queue) {
  owner *o = omc_alloc_zero(omc_default_allocator(), 1, sizeof *o);
  if (!o) {
    if (bytes) provider->free(provider->ctx, data, bytes, queue);
    return PyErr_NoMemory();
  }
  const omc_dtype_info *dtype = omc_dtype_get(type->dtype);
  memcpy(o->shape, type->shape.dims, sizeof o->shape);
  omc_shape_strides(&type->shape, o->strides);
  o->provider = provider, o->data = data, o->bytes = bytes, o->queue = queue;
  o->managed = (DLManagedTensorVersioned){
      .version = {OMC_DL_MAJOR, 0},
      .manager_ctx = o,
      .deleter = owner_delete,
      .dl_tensor = {.data = data,
                    .device = {provider->device.type, provider->device.id},
                    .ndim = type->shape.rank,
                    .dtype = {dtype->dl_code, dtype->bits, 1},
                    .shape = o->shape,
                    .strides = o->strides}};
  void *out = NULL;
  if (m->exchange->managed_tensor_to_py_object_no_sync(&o->managed, &out) != 0) {
    owner_delete(&o->managed);
    return NULL;
  }
  return out;
}

PyObject *omc_tensor_pooled(const omc_module *m, const omc_provider *provider, const omc_type *type,
                            void *queue, void **data) {
  size_t bytes;
  omc_status status = omc_type_bytes(type, &bytes);
  if (status == OMC_OK && bytes == 0) bytes = 1;
  if (status == OMC_OK) status = provider->alloc(provider->ctx, bytes, queue, data);
  if (status != OMC_OK) return omc_raise(m, status);
  return wrap(m, provider, type, *data, bytes, queue);
}

/* A tuple; NULL with an exception set. */
static PyObject *tuple_of(const int64_t *numbers, int32_t n) {
  PyObject *tuple = PyTuple_New(n);
  for (int32_t d = 0; tuple && d < n; d++) {
    PyObject *number = PyLong_FromLongLong(numbers[d]);
    if (!number || PyTuple_SetItem(tuple, d, number) < 0) Py_CLEAR(tuple);
  }
  return tuple;
}

/* What torch is asked for a tensor of the type with: on the current GPU a tuple, else of any device
 * a tuple and a dict. */
static PyObject *request_for(const omc_module *m, const omc_provider *provider,
                             const omc_type *type) {
  int64_t strides[OMC_MAX_RANK];
  const int32_t rank = type->shape.rank;
  PyObject *request = NULL, *dtype = m->dtypes[type->dtype];
  omc_shape_strides(&type->shape, strides);
  PyObject *dims = tuple_of(type->shape.dims, rank), *steps = tuple_of(strides, rank);
  PyObject *device = PyObject_CallFunction(m->device, "s", provider->name);
  if (dims && steps && device)
    request = Py_BuildValue("(OOO)(OO){sOsO}", dims, steps, dtype, dims, steps, "dtype", dtype,
                            "device", device);
  Py_XDECREF(dims);
  Py_XDECREF(steps);
  Py_XDECREF(device);
  return request;
}

/* Whether the provider's is torch's current GPU; -1 with an exception set. */
static int is_here(const omc_module *m, const omc_provider *provider) {
  if (!m->empty_here || !m->here) return 0;
  PyObject *number = PyObject_CallNoArgs(m->here);
  const long here = number ? PyLong_AsLong(number) : -1;
  Py_XDECREF(number);
  return PyErr_Occurred() ? -1 : here == provider->device.id;
}

static PyObject *call_torch(const omc_module *m, const omc_provider *provider, PyObject *request) {
  const int here = is_here(m, provider);
  if (here < 0) return NULL;
  if (here) return PyObject_CallObject(m->empty_here, PyTuple_GetItem(request, 0));
  PyObject *named = PyDict_Copy(PyTuple_GetItem(request, 2)); /* who is called may write to it */
  if (!named) return NULL;
  PyObject *made = PyObject_Call(m->empty_strided, PyTuple_GetItem(request, 1), named);
  Py_DECREF(named);
  return made;
}

/* Whether what is raised is that the device has no memory, and the provider has given some back. */
static bool makes_room(const omc_module *m, const omc_provider *provider) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyObject *out_of_memory = omc_exception_of(m, OMC_EDEVICEMEM);
  bool made = out_of_memory && PyErr_GivenExceptionMatches(type, out_of_memory);
  Py_XDECREF(out_of_memory);
  if (made) {
    Py_BEGIN_ALLOW_THREADS
    made = provider->make_room(provider->ctx);
    Py_END_ALLOW_THREADS
  }
  if (made) {
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return true;
  }
  PyErr_Restore(type, value, traceback);
  return false;
}

/* A tensor of torch's for a request, which a mode of the user's may have changed. */
static PyObject *fulfil(const omc_module *m, const omc_provider *provider, const omc_type *type,
                        PyObject *request, void **data) {
  omc_type made;
  PyObject *tensor = call_torch(m, provider, request);
  if (!tensor && makes_room(m, provider)) tensor = call_torch(m, provider, request);
  if (!tensor || omc_tensor_read(m, provider, tensor, data, &made) < 0) {
    Py_CLEAR(tensor);
  } else if (!omc_type_equal(type, &made)) {
    char a[OMC_TYPE_TEXT], b[OMC_TYPE_TEXT];
    PyErr_Format(PyExc_RuntimeError, "torch.empty_strided gave %s for %s",
                 omc_type_text(&made, a, sizeof a), omc_type_text(type, b, sizeof b));
    Py_CLEAR(tensor);
  }
  return tensor;
}

PyObject *omc_tensor_new(const omc_module *m, const omc_provider *provider, const omc_type *type,
                         void *queue, PyObject **kept, void **data) {
  if (!provider->make_room) return omc_tensor_pooled(m, provider, type, queue, data);
  PyObject *request = kept ? Py_XNewRef(*kept) : NULL;
  if (!request && !(request = request_for(m, provider, type))) return NULL;
  if (kept && !*kept) *kept = Py_NewRef(request);
  PyObject *tensor = fulfil(m, provider, type, request, data);
  Py_DECREF(request);
  return tensor;
}

PyObject *omc_tensor_view(const omc_module *m, const omc_provider *provider, void *data,
                          const omc_type *type) {
  return wrap(m, provider, type, data, 0, NULL);
}

PyObject *omc_type_to_py(const omc_type *type) {
  PyObject *dims = tuple_of(type->shape.dims, type->shape.rank);
  return dims ? Py_BuildValue("(sN)", omc_dtype_get(type->dtype)->text, dims) : NULL;
}

int omc_type_from_py(PyObject *pair, omc_type *out) {
  const char *dtype;
  PyObject *dims;
  memset(out, 0, sizeof *out);
  if (!PyArg_ParseTuple(pair, "sO!", &dtype, &PyTuple_Type, &dims)) return -1;
  Py_ssize_t rank = PyTuple_Size(dims);
  if (!omc_dtype_from_text(dtype, strlen(dtype), &out->dtype) || rank > OMC_MAX_RANK) {
    PyErr_Format(PyExc_ValueError, "not a type: %R", pair);
    return -1;
  }
  out->shape.rank = (int32_t)rank;
  for (Py_ssize_t d = 0; d < rank; d++) {
    out->shape.dims[d] = PyLong_AsLongLong(PyTuple_GetItem(dims, d));
    if (out->shape.dims[d] < 0) {
      if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "negative dim in %R", pair);
      return -1;
    }
  }
  return 0;
}
