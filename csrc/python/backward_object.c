/* The Backward type: a backward that has begun, which gives gradients as they are asked for. Once
 * it has given them all, or goes, the run is as free as after any backward. */
#include "python/binding.h"

typedef struct backward_object {
  PyObject_HEAD omc_plan_object *plan;
  PyObject *run;       /* NULL: it has ended */
  PyObject *tuples[3]; /* inputs, outputs, gradients of outputs: what `pointers` point to */
  PyObject *packed, *needed;
  PyObject *results; /* by input: its gradient, from when it is first used until it is taken */
  void **pointers;
  const omc_backward_uses *uses; /* the plan's */
  omc_backward begun;
  bool at_work; /* it is taken from: nobody else may, nor end it */
} backward_object;

/* Number of the backward for just the gradients that are there: -1 with an exception set if the
 * plan has none such. */
static Py_ssize_t find_backward(const omc_plan_object *self, PyObject *grads) {
  const Py_ssize_t n = self->plan->graph->n_outputs;
  if (PyTuple_Size(grads) != n) {
    PyErr_Format(PyExc_ValueError, "gradient of output: expected %zd tensors, got %zd", n,
                 PyTuple_Size(grads));
    return -1;
  }
  for (Py_ssize_t b = 0; b < PyTuple_Size(self->out_grads); b++) {
    PyObject *mask = PyTuple_GetItem(self->out_grads, b);
    bool same = true;
    for (Py_ssize_t k = 0; same && k < n; k++) {
      const int given = PyObject_IsTrue(PyTuple_GetItem(mask, k));
      if (given < 0) return -1;
      same = given == (PyTuple_GetItem(grads, k) != Py_None);
    }
    if (same) return b;
  }
  PyErr_SetString(PyExc_ValueError, "the plan has no backward for just these gradients of outputs");
  return -1;
}

/* The memory of what Run.pack gave; NULL without an exception for None. */
static int read_packed(const omc_module *m, const omc_plan *plan, PyObject *object,
                       const void **out) {
  omc_type type;
  void *data;
  *out = NULL;
  if (object == Py_None) return 0;
  if (omc_tensor_read(m, plan->provider, object, &data, &type) < 0)
    return omc_error_prefix("packed");
  *out = data;
  if (type.dtype == OMC_U8 && type.shape.rank == 1 &&
      type.shape.dims[0] == (int64_t)plan->forward_bytes)
    return 0;
  char text[OMC_TYPE_TEXT];
  PyErr_Format(
      PyExc_ValueError,
      "packed is %s where this plan saves u8[%zu]: a hook of saved tensors has to give back "
      "what it was given",
      omc_type_text(&type, text, sizeof text), plan->forward_bytes);
  return -1;
}

/* What Plan.needed has made; NULL without an exception for None. */
static int read_needed(const omc_plan *plan, PyObject *object, const bool **out) {
  char *bytes;
  Py_ssize_t n;
  *out = NULL;
  if (object == Py_None) return 0;
  if (PyBytes_AsStringAndSize(object, &bytes, &n) < 0) return -1;
  if ((size_t)n != omc_needed_bytes(plan)) {
    PyErr_SetString(PyExc_ValueError, "needed: it is of another plan");
    return -1;
  }
  *out = (const bool *)(const void *)bytes;
  return 0;
}

/* Reads where that is which a backward is given and has still to use, at its step `step`. */
static int read_tensors(const omc_module *m, backward_object *self, uint32_t step) {
  const omc_plan *plan = self->plan->plan;
  const omc_provider *p = plan->provider;
  const omc_graph *g = plan->graph;
  const uint32_t n_in = g->n_inputs, n_out = g->n_outputs;
  const omc_part *part = &plan->parts[OMC_BACKWARD + self->begun.number];
  void **in = self->pointers, **out = in + n_in, **grad = out + n_out;
  omc_value **values = PyMem_Calloc(n_out + 1, sizeof *values);
  bool *used = PyMem_Calloc(n_in + 2 * (size_t)n_out + 1, sizeof *used);
  int result = -1;
  if (!values || !used) {
    PyErr_NoMemory();
    goto done;
  }
  bool *output_used = used + n_in, *grad_used = output_used + n_out;
  for (uint32_t i = 0; i < n_in; i++)
    used[i] = part->reads_input[i] && self->uses->inputs[i].read > step;
  for (uint32_t k = 0; k < n_out; k++) {
    values[k] = omc_in(g->result, k);
    output_used[k] = part->reads_output[k] && self->uses->outputs[k] > step;
    grad_used[k] = g->grads && g->grads[k] && g->grads[k]->uses && self->uses->grads[k] > step &&
                   PyTuple_GetItem(self->tuples[2], (Py_ssize_t)k) != Py_None;
  }
  if (omc_read_pointers(m, p, self->tuples[0], n_in, g->inputs, used, "input", in) == 0 &&
      omc_read_pointers(m, p, self->tuples[1], n_out, values, output_used, "output", out) == 0 &&
      (!g->grads || omc_read_pointers(m, p, self->tuples[2], n_out, g->grads, grad_used,
                                      "gradient of output", grad) == 0))
    result = 0;
done:
  PyMem_Free(values);
  PyMem_Free(used);
  return result;
}

/* Adds memory for the gradients that are used before step `end`, or for those that lend. */
static int provide(const omc_module *m, backward_object *self, PyObject *left, uint32_t end) {
  const omc_plan *plan = self->plan->plan;
  const omc_graph *g = plan->graph;
  const omc_backward *b = &self->begun;
  PyObject *lent = b->takes_lent ? omc_run_object_lent(left) : NULL;
  void **pointers = self->pointers + g->n_inputs + 2 * (size_t)g->n_outputs;
  for (uint32_t i = 0; i < g->n_inputs; i++) {
    const uint32_t first = self->uses->inputs[i].begin;
    if (pointers[i] || first == UINT32_MAX || !(first < end || plan->lends[i])) continue;
    PyObject *memory = omc_result_memory(m, self->plan, i, lent, b->queue, &pointers[i]);
    if (!memory || PyList_SetItem(self->results, i, memory) < 0) return -1;
  }
  return 0;
}

/* Begins the backward that has been read. */
static int enter(const omc_module *m, backward_object *self, PyObject *left) {
  omc_backward *b = &self->begun;
  const omc_graph *g = self->plan->plan->graph;
  const omc_status status = omc_run_enter(omc_run_object_get(m, left), b);
  if (status != OMC_OK) {
    omc_raise(m, status);
    return -1;
  }
  self->run = Py_NewRef(left);
  self->results = PyList_New(0);
  for (uint32_t i = 0; self->results && i < g->n_inputs; i++)
    omc_append(&self->results, Py_NewRef(Py_None));
  return self->results && provide(m, self, left, 0) == 0 ? 0 : -1;
}

/* Ends it, wherever it is. */
static omc_status leave(backward_object *self) {
  if (!self->run) return OMC_OK;
  const omc_module *m = PyType_GetModuleState(Py_TYPE((PyObject *)self));
  const omc_status status = omc_run_leave(omc_run_object_get(m, self->run), &self->begun);
  Py_CLEAR(self->run);
  for (int k = 0; k < 3; k++) Py_CLEAR(self->tuples[k]);
  Py_CLEAR(self->packed);
  return status;
}

static void backward_dealloc(PyObject *object) {
  backward_object *self = (backward_object *)object;
  PyObject_GC_UnTrack(object);
  const omc_status status = leave(self);
  (void)status; /* it has ended all the same, and nobody is there to be told */
  for (int k = 0; k < 3; k++) Py_XDECREF(self->tuples[k]);
  Py_XDECREF((PyObject *)self->plan);
  Py_XDECREF(self->packed);
  Py_XDECREF(self->needed);
  Py_XDECREF(self->results);
  PyMem_Free(self->pointers);
  omc_object_free(object);
}

static int backward_traverse(PyObject *object, visitproc visit, void *arg) {
  const backward_object *self = (const backward_object *)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->plan);
  Py_VISIT(self->run);
  for (int k = 0; k < 3; k++) Py_VISIT(self->tuples[k]);
  Py_VISIT(self->packed);
  Py_VISIT(self->results);
  return 0;
}

/* What `advance` does while the object is at work on the run `left`. Once a step has run, what was
 * lent is nobody else's. The caller's tensors may lie elsewhere than before. */
static int work(const omc_module *m, backward_object *self, PyObject *left, uint32_t end) {
  omc_run *run = omc_run_object_get(m, left);
  omc_status status;
  if ((self->begun.work && read_tensors(m, self, self->begun.step) < 0) ||
      provide(m, self, left, end) < 0)
    return -1;
  Py_BEGIN_ALLOW_THREADS
  status = omc_run_advance(run, &self->begun, end);
  Py_END_ALLOW_THREADS
  if (self->begun.work && self->begun.takes_lent) omc_run_object_drop_lent(left);
  if (status == OMC_OK) return 0;
  omc_raise(m, status);
  const omc_status ended = leave(self);
  (void)ended; /* the first failure is told */
  return -1;
}

/* Runs on to before step `end`; -1 with an exception. Tensors are made by code that may let go of
 * the GIL or come back here, and finds the backward at work. */
static int advance(const omc_module *m, backward_object *self, uint32_t end) {
  PyObject *left = Py_NewRef(self->run);
  self->at_work = true;
  const int result = work(m, self, left, end);
  self->at_work = false;
  Py_DECREF(left);
  return result;
}

static backward_object *begin(PyObject *plan_object, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"run", "inputs", "outputs", "grads", "keep", "packed", "needed", NULL};
  omc_plan_object *plan = (omc_plan_object *)plan_object;
  const omc_module *m = PyType_GetModuleState(Py_TYPE(plan_object));
  const omc_graph *g = plan->plan->graph;
  PyObject *left, *lists[3], *packed = Py_None, *needed = Py_None;
  int keep = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO|pOO", names, &left, &lists[0], &lists[1],
                                   &lists[2], &keep, &packed, &needed))
    return NULL;
  const omc_run *run = omc_run_object_get(m, left);
  if (!run) return NULL;
  if (omc_run_plan(run) != plan->plan) {
    PyErr_SetString(PyExc_ValueError, "run: it belongs to another plan");
    return NULL;
  }
  backward_object *self = omc_object_new(m->types[OMC_TYPE_BACKWARD]);
  if (!self) return NULL;
  omc_backward *b = &self->begun;
  self->plan = (omc_plan_object *)Py_NewRef(plan_object);
  self->packed = Py_NewRef(packed);
  self->needed = Py_NewRef(needed);
  b->keep = keep != 0;
  self->pointers =
      PyMem_Calloc(2 * ((size_t)g->n_inputs + g->n_outputs) + 1, sizeof *self->pointers);
  if (!self->pointers) PyErr_NoMemory();
  bool ok = self->pointers && read_packed(m, plan->plan, packed, &b->packed) == 0 &&
            read_needed(plan->plan, needed, &b->needed) == 0 &&
            omc_current_queue(m, plan->plan->provider, &b->queue) == 0;
  for (int k = 0; ok && k < 3; k++) ok = (self->tuples[k] = PySequence_Tuple(lists[k])) != NULL;
  const Py_ssize_t number = ok ? find_backward(plan, self->tuples[2]) : -1;
  if (number < 0) goto failed;
  void **out = self->pointers + g->n_inputs;
  b->number = (uint32_t)number;
  b->inputs = self->pointers, b->outputs = out, b->grads = out + g->n_outputs;
  b->results = out + 2 * (size_t)g->n_outputs;
  self->uses = omc_plan_object_uses(plan, b->number);
  if (self->uses && read_tensors(m, self, 0) == 0 && enter(m, self, left) == 0) return self;
failed:
  Py_DECREF(self);
  return NULL;
}

PyObject *omc_plan_begin(PyObject *plan, PyObject *args, PyObject *kwargs) {
  return (PyObject *)begin(plan, args, kwargs);
}

PyObject *omc_plan_backward(PyObject *plan, PyObject *args, PyObject *kwargs) {
  backward_object *self = begin(plan, args, kwargs);
  if (!self) return NULL;
  const omc_module *m = PyType_GetModuleState(Py_TYPE(plan));
  PyObject *results = NULL;
  if (advance(m, self, UINT32_MAX) == 0) {
    const omc_status status = leave(self);
    if (status == OMC_OK)
      results = Py_NewRef(self->results);
    else
      omc_raise(m, status);
  }
  Py_DECREF(self);
  return results;
}

static PyObject *backward_take(PyObject *object, PyObject *sequence) {
  backward_object *self = (backward_object *)object;
  const omc_module *m = PyType_GetModuleState(Py_TYPE(object));
  const uint32_t n = self->plan->plan->graph->n_inputs;
  PyObject *tuple = PySequence_Tuple(sequence), *taken = NULL;
  if (!tuple) return NULL;
  const Py_ssize_t n_taken = PyTuple_Size(tuple);
  uint32_t end = 0;
  if (!self->run || self->at_work) {
    PyErr_SetString(PyExc_ValueError, self->run ? "another thread takes gradients of this backward"
                                                : "this backward has ended");
    goto done;
  }
  for (Py_ssize_t k = 0; k < n_taken; k++) {
    const unsigned long i = PyLong_AsUnsignedLong(PyTuple_GetItem(tuple, k));
    if (PyErr_Occurred()) goto done;
    if (i >= n) {
      PyErr_Format(PyExc_ValueError, "inputs: there is no %lu among %u", i, n);
      goto done;
    }
    if (self->uses->inputs[i].end > end) end = self->uses->inputs[i].end;
  }
  if (advance(m, self, end) < 0) goto done;
  taken = PyList_New(0);
  for (Py_ssize_t k = 0; taken && k < n_taken; k++) {
    const Py_ssize_t i = PyLong_AsSsize_t(PyTuple_GetItem(tuple, k));
    omc_append(&taken, Py_XNewRef(PyList_GetItem(self->results, i)));
    if (taken && PyList_SetItem(self->results, i, Py_NewRef(Py_None)) < 0) Py_CLEAR(taken);
  }
done:
  Py_DECREF(tuple);
  return taken;
}

static PyObject *backward_end(PyObject *object, PyObject *unused) {
  (void)unused;
  backward_object *self = (backward_object *)object;
  const omc_module *m = PyType_GetModuleState(Py_TYPE(object));
  if (self->at_work) {
    PyErr_SetString(PyExc_ValueError, "another thread takes gradients of this backward");
    return NULL;
  }
  const omc_status status = leave(self);
  return status == OMC_OK ? Py_NewRef(Py_None) : omc_raise(m, status);
}

static PyMethodDef backward_methods[] = {
    {"take", backward_take, METH_O,
     "take(inputs) -> their gradients, once computed; each can be taken once"},
    {"end", backward_end, METH_NOARGS, "end(): compute no more"},
    {NULL, NULL, 0, NULL}};

static PyType_Slot backward_slots[] = {
    {Py_tp_dealloc, backward_dealloc},
    {Py_tp_traverse, backward_traverse},
    {Py_tp_methods, backward_methods},
    {Py_tp_doc, "A backward that has begun; made by Plan.begin."},
    {0, NULL}};

PyType_Spec omc_backward_spec = {
    "ortmodule_c._C.Backward", sizeof(backward_object), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, backward_slots};
