/* The module ortmodule_c._C: types, functions, state. */
#include <signal.h>

#include "base/env.h"
#include "graph/schema.h"
#include "ops/op.h"
#include "python/binding.h"

static const char *const families[OMC_N_OPS] = {
#define OMC_OP(name, family, domain, ...) #family,
#include "ops.def"
#undef OMC_OP
};

/* What a table row says of the op, for tests and documentation. */
static PyObject *list_ops(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  PyObject *dict = PyDict_New();
  for (omc_op_id op = 0; dict && op < OMC_N_OPS; op++)
    omc_enter(&dict, omc_op_name(op),
              Py_BuildValue("(sNN)", families[op], PyBool_FromLong(omc_op_is_onnx(op)),
                            PyBool_FromLong(omc_op_get(op)->grad != NULL)));
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
  for (uint32_t i = 0; dict && i < n; i++)
    omc_enter(&dict, list[i].name,
              Py_BuildValue("(sNN)", omc_attr_kind_name(list[i].kind), default_of(&list[i]),
                            PyBool_FromLong(list[i].required)));
  return dict;
}

static PyObject *list_isas(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  const omc_provider *p = omc_provider_host();
  PyObject *list = PyList_New(0);
  const char *variant;
  for (uint32_t i = 0; list && (variant = p->variant(p->ctx, i)); i++)
    omc_append(&list, PyUnicode_FromString(variant));
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

static PyObject *told(PyObject *module, PyObject *args) {
  const char *name;
  const omc_provider *p;
  if (!PyArg_ParseTuple(args, "s", &name)) return NULL;
  omc_status status = omc_provider_find(name, &p);
  if (status == OMC_OK) status = omc_provider_told(p);
  if (status != OMC_OK) return omc_raise(PyModule_GetState(module), status);
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
    [OMC_NAME_FLAT_WEIGHTS] = "_flat_weights",
    [OMC_NAME_FLAT_WEIGHTS_NAMES] = "_flat_weights_names",
    [OMC_NAME_FLAT_WEIGHT_REFS] = "_flat_weight_refs",
    [OMC_NAME_GRAD] = "grad",
    [OMC_NAME_STEP] = "step",
    [OMC_NAME_MASTER] = "master",
};

static PyType_Spec *const specs[OMC_N_TYPES] = {
    [OMC_TYPE_SESSION] = &omc_session_spec, [OMC_TYPE_PLAN] = &omc_plan_spec,
    [OMC_TYPE_RUN] = &omc_run_spec,         [OMC_TYPE_BACKWARD] = &omc_backward_spec,
    [OMC_TYPE_HELD] = &omc_held_spec,       [OMC_TYPE_FINGERPRINT] = &omc_fingerprint_spec,
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
    {"optim_step", (PyCFunction)(void (*)(void))omc_take_step, METH_VARARGS | METH_KEYWORDS,
     "optim_step(rule, tensors, groups, ...) -> norm of the gradients, if it was asked for"},
    {"optim_rows", omc_gather_rows, METH_VARARGS,
     "optim_rows(state, groups, counts, writes_grad, provider) -> (tensors of optim_step, tensors "
     "that it writes) or None"},
    {"told", told, METH_VARARGS,
     "told(provider): raise what it is known to have failed of what it was given"},
    {"restarts", restarts, METH_VARARGS,
     "restarts(signal) -> whether calls of the system that it interrupts go on"},
    {NULL, NULL, 0, NULL}};

static int module_exec(PyObject *module) {
  omc_module *m = PyModule_GetState(module);
  const omc_status status = omc_env_load();
  if (status != OMC_OK) omc_raise(m, status);
  if (status != OMC_OK || omc_exchange_find(m) < 0) return -1;
  for (int i = 0; i < OMC_N_TYPES; i++) {
    m->types[i] = PyType_FromModuleAndSpec(module, specs[i], NULL);
    if (!m->types[i] || PyModule_AddType(module, (PyTypeObject *)m->types[i]) < 0) return -1;
  }
  for (int i = 0; i < OMC_N_NAMES; i++)
    if (!(m->names[i] = PyUnicode_InternFromString(names[i]))) return -1;
  m->consumed_error = PyErr_NewExceptionWithDoc(
      "ortmodule_c._C.ConsumedError",
      "The state that backward needs has been freed or overwritten.", PyExc_RuntimeError, NULL);
  m->device_error = PyErr_NewExceptionWithDoc(
      "ortmodule_c._C.DeviceError",
      "A device failed, or a kernel found what it was given to be wrong; told when it is known.",
      PyExc_RuntimeError, NULL);
  if (!m->consumed_error || PyModule_AddType(module, (PyTypeObject *)m->consumed_error) < 0 ||
      !m->device_error || PyModule_AddType(module, (PyTypeObject *)m->device_error) < 0)
    return -1;
  return PyModule_AddStringConstant(module, "__version__", OMC_VERSION);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
  omc_module *m = PyModule_GetState(module);
  Py_VISIT(m->torch);
  Py_VISIT(m->parameter);
  Py_VISIT(m->empty_strided);
  Py_VISIT(m->device);
  Py_VISIT(m->empty_here);
  Py_VISIT(m->here);
  Py_VISIT(m->precision_of);
  for (int i = 0; i < OMC_N_TYPES; i++) Py_VISIT(m->types[i]);
  Py_VISIT(m->consumed_error);
  Py_VISIT(m->device_error);
  return 0;
}

static int module_clear(PyObject *module) {
  omc_module *m = PyModule_GetState(module);
  Py_CLEAR(m->torch);
  Py_CLEAR(m->parameter);
  Py_CLEAR(m->empty_strided);
  Py_CLEAR(m->device);
  Py_CLEAR(m->empty_here);
  Py_CLEAR(m->here);
  for (int i = 0; i < OMC_N_DTYPE; i++) Py_CLEAR(m->dtypes[i]);
  Py_CLEAR(m->precision_of);
  for (int i = 0; i < OMC_N_NAMES; i++) Py_CLEAR(m->names[i]);
  for (int i = 0; i < OMC_N_TYPES; i++) Py_CLEAR(m->types[i]);
  Py_CLEAR(m->consumed_error);
  Py_CLEAR(m->device_error);
  return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "ortmodule_c._C", "The C core of ortmodule_c.",
    sizeof(omc_module),    methods,          slots,
    module_traverse,       module_clear,     NULL};

PyMODINIT_FUNC PyInit__C(void);
PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&definition); }
