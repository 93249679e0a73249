/* The Run type: what one forward left for its backwards. It goes back to the pool with the object.
 */
#include "python/binding.h"

typedef struct run_object {
  PyObject_HEAD omc_run *run;
  PyObject *session; /* keeps template, constants and callbacks alive */
  PyObject *lent;    /* by input: the tensors whose memory forward was lent; NULL: none any more */
} run_object;

PyObject *omc_run_object_new(const omc_module *m, PyObject *session, omc_run *run, PyObject *lent) {
  run_object *self = omc_object_new(m->types[OMC_TYPE_RUN]);
  if (!self) {
    omc_run_destroy(run);
    return NULL;
  }
  self->run = run;
  self->session = Py_NewRef(session);
  self->lent = Py_NewRef(lent);
  return (PyObject *)self;
}

omc_run *omc_run_object_get(const omc_module *m, PyObject *object) {
  if (PyObject_TypeCheck(object, (PyTypeObject *)m->types[OMC_TYPE_RUN]))
    return ((run_object *)object)->run;
  PyErr_Format(PyExc_TypeError, "run: expected what forward gave, got %R",
               (PyObject *)Py_TYPE(object));
  return NULL;
}

PyObject *omc_run_object_lent(PyObject *object) { return ((run_object *)object)->lent; }

void omc_run_object_drop_lent(PyObject *object) { Py_CLEAR(((run_object *)object)->lent); }

static void run_dealloc(PyObject *object) {
  run_object *self = (run_object *)object;
  PyObject_GC_UnTrack(object);
  omc_run_destroy(self->run);
  Py_XDECREF(self->session);
  Py_XDECREF(self->lent);
  omc_object_free(object);
}

static int run_traverse(PyObject *object, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(((const run_object *)object)->session);
  Py_VISIT(((const run_object *)object)->lent);
  return 0;
}

static PyObject *run_pack(PyObject *object, PyObject *unused) {
  (void)unused;
  const omc_module *m = PyType_GetModuleState(Py_TYPE(object));
  omc_run *run = ((run_object *)object)->run;
  const omc_plan *plan = omc_run_plan(run);
  const omc_type type = {OMC_U8, {1, {(int64_t)plan->forward_bytes}}};
  void *bytes, *queue;
  if (omc_current_queue(m, plan->provider, &queue) < 0) return NULL;
  PyObject *tensor = omc_tensor_new(m, plan->provider, &type, queue, NULL, &bytes);
  if (!tensor) return NULL;
  const omc_status status = omc_run_pack(run, bytes, queue);
  if (status == OMC_OK) omc_run_object_drop_lent(object);
  if (status == OMC_OK) return tensor;
  Py_DECREF(tensor);
  return omc_raise(m, status);
}

static PyMethodDef run_methods[] = {
    {"pack", run_pack, METH_NOARGS,
     "pack() -> the bytes that backwards need, moved out of the run"},
    {NULL, NULL, 0, NULL}};

static PyType_Slot run_slots[] = {
    {Py_tp_dealloc, run_dealloc},
    {Py_tp_traverse, run_traverse},
    {Py_tp_methods, run_methods},
    {Py_tp_doc, "What a forward left for backward; made by Plan.forward."},
    {0, NULL}};

PyType_Spec omc_run_spec = {
    "ortmodule_c._C.Run", sizeof(run_object), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, run_slots};
