/* The module ortmodule_c._C: types, functions, state. */
#include <signal.h>

#include "base/env.h"
#include "graph/schema.h"
#include "ops/op.h"
#include "python/binding.h"

/* What a table row says of the op, for tests and documentation. */
static const struct {
  const char *name, *family;
} op_rows[OMC_N_OPS] = {
#define OMC_OP(name, family, domain, ...) {#name, #family},
#include "ops.def"
#undef OMC_OP
};

static PyObject *list_ops(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  PyObject *dict = PyDict_New();
  for (int i = 0; dict && i < OMC_N_OPS; i++) {
    const omc_op *op = omc_op_get((omc_op_id)i);
    PyObject *row =
        Py_BuildValue("(sNN)", op_rows[i].family, PyBool_FromLong(omc_op_is_onnx((omc_op_id)i)),
                      PyBool_FromLong(op->grad != NULL));
    if (!row || PyDict_SetItemString(dict, op_rows[i].name, row) < 0) Py_CLEAR(dict);
    Py_XDECREF(row);
  }
  return dict;
}

static PyObject *default_of(const omc_attr_schema *schema) {
  if (schema->required || schema->absent) return Py_NewRef(Py_None);
  switch (schema->kind) {
    case OMC_ATTR_INT:
    case OMC_ATTR_INTS:
      return PyLong_FromLongLong(schema->otherwise.i);
    case OMC_ATTR_FLOAT:
    case OMC_ATTR_FLOATS:
      return PyFloat_FromDouble(schema->otherwise.f);
    default:
      return PyUnicode_FromString(schema->otherwise.s);
  }
}

static PyObject *list_attributes(PyObject *module, PyObject *args) {
  (void)module;
  const char *name;
  omc_op_id op;
  if (!PyArg_ParseTuple(args, "s", &name)) return NULL;
  if (!omc_op_from_name(name, strlen(name), &op))
    return PyErr_Format(PyExc_ValueError, "no op is named '%s'", name);
  uint32_t n;
  const omc_attr_schema *list = omc_schema_of(op, &n);
  PyObject *dict = PyDict_New();
  for (uint32_t i = 0; dict && i < n; i++) {
    PyObject *otherwise = default_of(&list[i]);
    PyObject *row = otherwise ? Py_BuildValue("(sNN)", omc_attr_kind_name(list[i].kind), otherwise,
                                              PyBool_FromLong(list[i].required))
                              : NULL;
    if (!row || PyDict_SetItemString(dict, list[i].name, row) < 0) Py_CLEAR(dict);
    Py_XDECREF(row);
  }
  return dict;
}

static PyObject *list_isas(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  const omc_provider *p = omc_provider_host();
  PyObject *list = PyList_New(0);
  const char *variant;
  for (uint32_t i = 0; list && (variant = p->variant(p->ctx, i)); i++) {
    PyObject *name = PyUnicode_FromString(variant);
    if (!name || PyList_Append(list, name) < 0) Py_CLEAR(list);
    Py_XDECREF(name);
  }
  return list;
}

static PyObject *set_isa(PyObject *module, PyObject *args) {
  (void)module;
  const omc_provider *p = omc_provider_host();
  const char *name;
  if (!PyArg_ParseTuple(args, "z", &name)) return NULL;
  if (!p->set_variant(p->ctx, name))
    return PyErr_Format(PyExc_ValueError, "no instruction set is named '%s'", name);
  Py_RETURN_NONE;
}

static PyObject *pool_stats(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  const omc_provider *p = omc_provider_host();
  const omc_memory_stats s = p->memory(p->ctx);
  return Py_BuildValue("{snsnsn}", "used_bytes", (Py_ssize_t)s.used_bytes, "peak_bytes",
                       (Py_ssize_t)s.peak_bytes, "cached_bytes", (Py_ssize_t)s.cached_bytes);
}

static PyObject *pool_trim(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  const omc_provider *p = omc_provider_host();
  p->trim(p->ctx);
  Py_RETURN_NONE;
}

static PyObject *restarts(PyObject *module, PyObject *args) {
  (void)module;
  int number;
  struct sigaction action;
  if (!PyArg_ParseTuple(args, "i", &number)) return NULL;
  if (sigaction(number, NULL, &action) != 0) return PyErr_SetFromErrno(PyExc_OSError);
  return PyBool_FromLong((action.sa_flags & SA_RESTART) != 0);
}

static const char *const names[OMC_N_NAMES] = {
    [OMC_NAME_FORWARD_HOOKS] = "_forward_hooks",
    [OMC_NAME_FORWARD_PRE_HOOKS] = "_forward_pre_hooks",
    [OMC_NAME_BACKWARD_HOOKS] = "_backward_hooks",
    [OMC_NAME_BACKWARD_PRE_HOOKS] = "_backward_pre_hooks",
    [OMC_NAME_TRAINING] = "training",
    [OMC_NAME_PARAMETERS] = "_parameters",
    [OMC_NAME_BUFFERS] = "_buffers",
    [OMC_NAME_MODULES] = "_modules",
    [OMC_NAME_REQUIRES_GRAD] = "requires_grad",
    [OMC_NAME_WRAPPED] = "_ort_module",
};

static PyMethodDef methods[] = {
    {"transform", (PyCFunction)(void (*)(void))omc_transform, METH_VARARGS | METH_KEYWORDS,
     "transform(text, stage, types=None, out_grads=None, in_grads=None, constants=None) -> text "
     "after the stage"},
    {"infer", (PyCFunction)(void (*)(void))omc_infer_types, METH_VARARGS | METH_KEYWORDS,
     "infer(op, types, attributes=None, constants=None, outputs=None, provider='cpu') -> types of "
     "the outputs"},
    {"describe", (PyCFunction)(void (*)(void))omc_describe, METH_VARARGS | METH_KEYWORDS,
     "describe(...) -> what transform(...) prints, as plain objects"},
    {"ops", list_ops, METH_NOARGS, "ops() -> {name: (family, is ONNX's own, has a gradient rule)}"},
    {"attributes", list_attributes, METH_VARARGS,
     "attributes(op) -> {name: (kind, default or None, whether it is required)}"},
    {"rules", omc_list_rules, METH_NOARGS, "rules() -> {name: what the rule claims}"},
    {"scan", omc_scan, METH_VARARGS,
     "scan(module, last=None, held=None) -> (parameters, buffers, fingerprint, checked)"},
    {"isas", list_isas, METH_NOARGS, "isas() -> instruction sets that kernels may use"},
    {"set_isa", set_isa, METH_VARARGS, "set_isa(name or None): bound the instruction set"},
    {"pool_stats", pool_stats, METH_NOARGS, "pool_stats() -> bytes used, peak and cached"},
    {"pool_trim", pool_trim, METH_NOARGS, "pool_trim(): give cached memory back to the system"},
    {"restarts", restarts, METH_VARARGS,
     "restarts(signal) -> whether calls of the system that it interrupts go on"},
    {NULL, NULL, 0, NULL}};

static int module_exec(PyObject *module) {
  omc_module *m = PyModule_GetState(module);
  const omc_status status = omc_env_load();
  if (status != OMC_OK) omc_raise(m, status);
  if (status != OMC_OK || omc_exchange_find(m) < 0) return -1;
  m->session_type = PyType_FromModuleAndSpec(module, &omc_session_spec, NULL);
  m->plan_type = PyType_FromModuleAndSpec(module, &omc_plan_spec, NULL);
  m->run_type = PyType_FromModuleAndSpec(module, &omc_run_spec, NULL);
  m->fingerprint_type = PyType_FromModuleAndSpec(module, &omc_fingerprint_spec, NULL);
  m->held_type = PyType_FromModuleAndSpec(module, &omc_held_spec, NULL);
  m->consumed_error = PyErr_NewExceptionWithDoc(
      "ortmodule_c._C.ConsumedError",
      "The state that backward needs has been freed or overwritten.", PyExc_RuntimeError, NULL);
  if (!m->session_type || !m->plan_type || !m->run_type || !m->fingerprint_type || !m->held_type ||
      !m->consumed_error)
    return -1;
  for (int i = 0; i < OMC_N_NAMES; i++)
    if (!(m->names[i] = PyUnicode_InternFromString(names[i]))) return -1;
  if (PyModule_AddObjectRef(module, "Session", m->session_type) < 0 ||
      PyModule_AddObjectRef(module, "Plan", m->plan_type) < 0 ||
      PyModule_AddObjectRef(module, "Run", m->run_type) < 0 ||
      PyModule_AddObjectRef(module, "Fingerprint", m->fingerprint_type) < 0 ||
      PyModule_AddObjectRef(module, "Held", m->held_type) < 0 ||
      PyModule_AddObjectRef(module, "ConsumedError", m->consumed_error) < 0 ||
      PyModule_AddStringConstant(module, "__version__", OMC_VERSION) < 0)
    return -1;
  return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
  omc_module *m = PyModule_GetState(module);
  Py_VISIT(m->torch);
  Py_VISIT(m->parameter);
  Py_VISIT(m->session_type);
  Py_VISIT(m->plan_type);
  Py_VISIT(m->run_type);
  Py_VISIT(m->fingerprint_type);
  Py_VISIT(m->held_type);
  Py_VISIT(m->consumed_error);
  return 0;
}

static int module_clear(PyObject *module) {
  omc_module *m = PyModule_GetState(module);
  Py_CLEAR(m->torch);
  Py_CLEAR(m->parameter);
  for (int i = 0; i < OMC_N_NAMES; i++) Py_CLEAR(m->names[i]);
  Py_CLEAR(m->session_type);
  Py_CLEAR(m->plan_type);
  Py_CLEAR(m->run_type);
  Py_CLEAR(m->fingerprint_type);
  Py_CLEAR(m->held_type);
  Py_CLEAR(m->consumed_error);
  return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "ortmodule_c._C", "The C core of ortmodule_c.",
    sizeof(omc_module),    methods,          slots,
    module_traverse,       module_clear,     NULL};

PyMODINIT_FUNC PyInit__C(void);
PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&definition); }
