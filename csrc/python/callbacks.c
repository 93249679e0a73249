/* Calls of a Python object, for ops that run in PyTorch. What forward returns for backward is kept
 * in a dict per run, by the number that tells the object which op it is. */
#include "python/binding.h"

/* The exception of a callback stays set: the executor passes OMC_ECALLBACK on and omc_raise leaves
 * it. */
static omc_status raised(const char *what, int64_t index) {
  return omc_fail(OMC_ECALLBACK, "%s of PyTorch op number %lld", what, (long long)index);
}

static PyObject *views(const omc_callbacks_ctx *h, const omc_tensor *tensors, uint32_t n) {
  PyObject *list = PyList_New(0);
  for (uint32_t i = 0; list && i < n; i++)
    omc_append(&list, tensors[i].type ? omc_tensor_view(h->module, h->provider, tensors[i].data,
                                                        tensors[i].type)
                                      : Py_NewRef(Py_None));
  return list;
}

/* Copies a list of tensors into slots; None leaves zeros. */
static int copy_out(const omc_callbacks_ctx *h, PyObject *list, const omc_tensor *out, uint32_t n,
                    const char *what) {
  if (!PyList_Check(list) || PyList_Size(list) != (Py_ssize_t)n) {
    PyErr_Format(PyExc_TypeError, "%s: expected a list of %u tensors, got %R", what, n, list);
    return -1;
  }
  const omc_module *m = h->module;
  const omc_provider *p = h->provider;
  void *queue;
  if (omc_current_queue(m, p, &queue) < 0) return -1;
  for (uint32_t i = 0; i < n; i++) {
    if (!out[i].type) continue;
    size_t bytes;
    omc_status status = omc_type_bytes(out[i].type, &bytes);
    PyObject *item = PyList_GetItem(list, (Py_ssize_t)i);
    if (status != OMC_OK) return omc_raise(m, status), -1;
    if (item == Py_None) {
      if (bytes) status = p->zero(p->ctx, out[i].data, bytes, queue);
      if (status != OMC_OK) return omc_raise(m, status), -1;
      continue;
    }
    void *data;
    omc_type type;
    if (omc_tensor_read(m, p, item, &data, &type) < 0) return omc_error_prefix("%s", what);
    if (!omc_type_equal(&type, out[i].type)) {
      char a[OMC_TYPE_TEXT], b[OMC_TYPE_TEXT];
      PyErr_Format(PyExc_ValueError, "%s: result %u is %s where the graph has %s", what, i,
                   omc_type_text(&type, a, sizeof a), omc_type_text(out[i].type, b, sizeof b));
      return -1;
    }
    if (bytes) status = p->copy(p->ctx, out[i].data, data, bytes, queue);
    if (status != OMC_OK) return omc_raise(m, status), -1;
  }
  return 0;
}

static omc_status call_infer(void *ctx, int64_t index, const omc_type *in, uint32_t n_in,
                             omc_type *out, uint32_t n_out) {
  omc_callbacks_ctx *h = ctx;
  PyGILState_STATE gil = PyGILState_Ensure();
  PyObject *types = PyList_New(0), *result = NULL;
  for (uint32_t i = 0; types && i < n_in; i++) omc_append(&types, omc_type_to_py(&in[i]));
  if (types) result = PyObject_CallMethod(h->object, "infer", "LO", (long long)index, types);
  bool ok = result && PyList_Check(result) && PyList_Size(result) == (Py_ssize_t)n_out;
  if (result && !ok)
    PyErr_Format(PyExc_TypeError, "callbacks.infer: expected a list of %u types, got %R", n_out,
                 result);
  for (uint32_t i = 0; ok && i < n_out; i++)
    ok = omc_type_from_py(PyList_GetItem(result, (Py_ssize_t)i), &out[i]) == 0;
  Py_XDECREF(types);
  Py_XDECREF(result);
  PyGILState_Release(gil);
  return ok ? OMC_OK : raised("shape inference", index);
}

static omc_status call_forward(void *ctx, void **run, int64_t index, const omc_tensor *in,
                               uint32_t n_in, const omc_tensor *out, uint32_t n_out) {
  omc_callbacks_ctx *h = ctx;
  PyGILState_STATE gil = PyGILState_Ensure();
  PyObject *inputs = views(h, in, n_in), *pair = NULL, *key = PyLong_FromLongLong(index);
  bool ok = inputs && key;
  if (ok) pair = PyObject_CallMethod(h->object, "forward", "LO", (long long)index, inputs);
  ok = pair && PyTuple_Check(pair) && PyTuple_Size(pair) == 2;
  if (pair && !ok) PyErr_SetString(PyExc_TypeError, "callbacks.forward: expected (outputs, state)");
  ok = ok && copy_out(h, PyTuple_GetItem(pair, 0), out, n_out, "callbacks.forward") == 0;
  if (ok && run) {
    if (!*run) *run = PyDict_New();
    ok = *run && PyDict_SetItem(*run, key, PyTuple_GetItem(pair, 1)) == 0;
  }
  Py_XDECREF(inputs);
  Py_XDECREF(pair);
  Py_XDECREF(key);
  PyGILState_Release(gil);
  return ok ? OMC_OK : raised("forward", index);
}

static omc_status call_backward(void *ctx, void **run, int64_t index, const omc_tensor *grad_out,
                                uint32_t n_grad_out, const omc_tensor *grad_in,
                                uint32_t n_grad_in) {
  omc_callbacks_ctx *h = ctx;
  PyGILState_STATE gil = PyGILState_Ensure();
  PyObject *key = PyLong_FromLongLong(index), *grads = views(h, grad_out, n_grad_out),
           *result = NULL;
  PyObject *state = key && run && *run ? PyDict_GetItemWithError(*run, key) : NULL;
  if (!state && !PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "no forward state");
  if (state && grads)
    result = PyObject_CallMethod(h->object, "backward", "LOO", (long long)index, state, grads);
  bool ok = result && copy_out(h, result, grad_in, n_grad_in, "callbacks.backward") == 0;
  Py_XDECREF(key);
  Py_XDECREF(grads);
  Py_XDECREF(result);
  PyGILState_Release(gil);
  return ok ? OMC_OK : raised("backward", index);
}

static void call_drop(void *ctx, void *run) {
  (void)ctx;
  if (!run || !Py_IsInitialized()) return;
  PyGILState_STATE gil = PyGILState_Ensure();
  Py_DECREF((PyObject *)run);
  PyGILState_Release(gil);
}

omc_callbacks omc_make_callbacks(omc_callbacks_ctx *ctx) {
  return (omc_callbacks){ctx, call_infer, call_forward, call_backward, call_drop};
}
