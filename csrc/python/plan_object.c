/* The Plan type: runs forward and backward for one signature. */
#include "python/binding.h"

typedef struct plan_object {
  PyObject_HEAD omc_plan *plan;
  omc_session_object *session; /* keeps template, constants and callbacks alive */
  PyObject *in_grads, *out_grads;
  PyObject *reads_inputs, *reads_outputs;
  PyObject **requests; /* of outputs, then gradients of inputs: see omc_tensor_new */
} plan_object;

static uint32_t n_requests(const omc_graph *g) { return g->n_outputs + g->n_inputs; }

/* Positions of the true entries, as a tuple. */
static PyObject *positions(const bool *flags, uint32_t n) {
  PyObject *list = PyList_New(0);
  for (uint32_t i = 0; list && i < n; i++)
    if (flags[i]) omc_append(&list, PyLong_FromUnsignedLong(i));
  PyObject *tuple = list ? PyList_AsTuple(list) : NULL;
  Py_XDECREF(list);
  return tuple;
}

/* For each backward the inputs, or else the outputs, that it reads: a tuple of tuples. */
static PyObject *reads(const omc_plan *plan, bool inputs) {
  const omc_graph *g = plan->graph;
  const uint32_t n = omc_n_backwards(g);
  PyObject *all = PyTuple_New((Py_ssize_t)n);
  for (uint32_t b = 0; all && b < n; b++) {
    const omc_part *part = &plan->parts[OMC_BACKWARD + b];
    PyObject *one = inputs ? positions(part->reads_input, g->n_inputs)
                           : positions(part->reads_output, g->n_outputs);
    if (!one || PyTuple_SetItem(all, (Py_ssize_t)b, one) < 0) Py_CLEAR(all);
  }
  return all;
}

PyObject *omc_plan_object_of(const omc_module *m, omc_session_object *session, omc_plan *plan,
                             PyObject *in_grads, PyObject *out_grads) {
  plan_object *self = (plan_object *)session->last;
  if (self && self->plan == plan) {
    omc_plan_release(plan);
    return Py_NewRef((PyObject *)self);
  }
  self = omc_object_new(m->types[OMC_TYPE_PLAN]);
  if (!self) {
    omc_plan_release(plan);
    return NULL;
  }
  self->plan = plan;
  self->session = (omc_session_object *)Py_NewRef((PyObject *)session);
  self->in_grads = Py_NewRef(in_grads);
  self->out_grads = Py_NewRef(out_grads);
  self->reads_inputs = reads(plan, true);
  self->reads_outputs = reads(plan, false);
  self->requests = PyMem_Calloc(n_requests(plan->graph) + 1, sizeof *self->requests);
  if (!self->requests) PyErr_NoMemory();
  if (!self->reads_inputs || !self->reads_outputs || !self->requests) {
    Py_DECREF(self);
    return NULL;
  }
  session->last = (PyObject *)self;
  return (PyObject *)self;
}

static void plan_dealloc(PyObject *object) {
  plan_object *self = (plan_object *)object;
  PyObject_GC_UnTrack(object);
  if (self->session && self->session->last == object) self->session->last = NULL;
  for (uint32_t k = 0; self->requests && k < n_requests(self->plan->graph); k++)
    Py_XDECREF(self->requests[k]);
  PyMem_Free(self->requests);
  omc_plan_release(self->plan);
  Py_XDECREF((PyObject *)self->session);
  Py_XDECREF(self->in_grads);
  Py_XDECREF(self->out_grads);
  Py_XDECREF(self->reads_inputs);
  Py_XDECREF(self->reads_outputs);
  omc_object_free(object);
}

/* A cycle through a plan leads through its session, which breaks it. */
static int plan_traverse(PyObject *object, visitproc visit, void *arg) {
  const plan_object *self = (const plan_object *)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->session);
  return 0;
}

/* Data pointers of n tensors, each of the type of its value; None (or a position beyond the
 * sequence's use, wanted[i] false) gives NULL. -1 with an exception naming the tensor. */
static int read_pointers(const omc_module *m, const omc_provider *provider, PyObject *tuple,
                         uint32_t n, omc_value *const *values, const bool *wanted, const char *what,
                         void **out) {
  if (PyTuple_Size(tuple) != (Py_ssize_t)n) {
    PyErr_Format(PyExc_ValueError, "%s: expected %u tensors, got %zd", what, n,
                 PyTuple_Size(tuple));
    return -1;
  }
  for (uint32_t i = 0; i < n; i++) {
    out[i] = NULL;
    if (wanted && !wanted[i]) continue;
    const omc_value *v = values[i];
    const char *name = v->name ? v->name : "unnamed";
    omc_type type;
    char a[OMC_TYPE_TEXT], b[OMC_TYPE_TEXT];
    if (omc_tensor_read(m, provider, PyTuple_GetItem(tuple, (Py_ssize_t)i), &out[i], &type) < 0)
      return omc_error_prefix("%s %u (%s)", what, i, name);
    if (!omc_type_equal(&type, &v->type)) {
      PyErr_Format(PyExc_ValueError, "%s %u (%s) is %s where this plan was made for %s", what, i,
                   name, omc_type_text(&type, a, sizeof a), omc_type_text(&v->type, b, sizeof b));
      return -1;
    }
  }
  return 0;
}

static omc_value *result_value(const omc_graph *g, uint32_t k) { return g->result->in[k].value; }

/* Memory for the gradient of input i: the tensor that was lent, if it was, else a new one. */
static PyObject *result_memory(const omc_module *m, const plan_object *self, uint32_t i,
                               const omc_type *type, PyObject *lent, void *queue, void **out) {
  omc_type same;
  if (!lent || !self->plan->lends[i])
    return omc_tensor_new(m, self->plan->provider, type, queue,
                          &self->requests[self->plan->graph->n_outputs + i], out);
  PyObject *tensor = PyList_GetItem(lent, i);
  if (!tensor || omc_tensor_read(m, self->plan->provider, tensor, out, &same) < 0) return NULL;
  return Py_NewRef(tensor);
}

/* A list of memory for the gradients of a backward, in the order of the inputs: of those that are
 * `wanted` (NULL: all), else None. What was lent to forward (NULL: nothing) is taken over. */
static PyObject *new_results(const omc_module *m, const plan_object *self, uint32_t backward,
                             const bool *wanted, PyObject *lent, void *queue, void **pointers) {
  const omc_graph *g = self->plan->graph;
  PyObject *list = PyList_New(0);
  for (uint32_t i = 0; list && i < g->n_inputs; i++) {
    const uint32_t r = g->n_outputs + backward * g->n_inputs + i;
    const omc_value *v = r < g->result->n_in && (!wanted || wanted[i]) ? result_value(g, r) : NULL;
    omc_append(&list, v ? result_memory(m, self, i, &v->type, lent, queue, &pointers[i])
                        : Py_NewRef(Py_None));
  }
  return list;
}

static PyObject *plan_forward(PyObject *object, PyObject *args) {
  plan_object *self = (plan_object *)object;
  const omc_module *m = PyType_GetModuleState(Py_TYPE(object));
  const omc_graph *g = self->plan->graph;
  PyObject *sequence, *inputs = NULL, *outputs = NULL, *lent = NULL, *result = NULL;
  unsigned long long seed;
  if (!PyArg_ParseTuple(args, "OK", &sequence, &seed)) return NULL;
  void **in = PyMem_Calloc(2 * (size_t)g->n_inputs + g->n_outputs + 1, sizeof *in);
  if (!in) return PyErr_NoMemory();
  void **out = in + g->n_inputs, **lent_at = out + g->n_outputs, *queue;
  const omc_provider *p = self->plan->provider;
  inputs = PySequence_Tuple(sequence);
  if (!inputs || omc_current_queue(m, p, &queue) < 0 ||
      read_pointers(m, p, inputs, g->n_inputs, g->inputs, NULL, "input", in) < 0)
    goto done;
  outputs = PyList_New(0);
  for (uint32_t k = 0; outputs && k < g->n_outputs; k++) {
    const omc_value *over = omc_over(g, k);
    omc_append(&outputs, over ? Py_NewRef(PyTuple_GetItem(inputs, over->index))
                              : omc_tensor_new(m, p, &result_value(g, k)->type, queue,
                                               &self->requests[k], &out[k]));
  }
  if (!outputs || !(lent = new_results(m, self, 0, self->plan->lends, NULL, queue, lent_at)))
    goto done;
  omc_run *run = NULL;
  omc_status status;
  Py_BEGIN_ALLOW_THREADS
  status = omc_run_forward(self->plan, in, out, lent_at, seed, queue, &run);
  Py_END_ALLOW_THREADS
  if (status != OMC_OK) {
    omc_raise(m, status);
    goto done;
  }
  PyObject *left =
      run ? omc_run_object_new(m, (PyObject *)self->session, run, lent) : Py_NewRef(Py_None);
  if (left) result = Py_BuildValue("(ON)", outputs, left);
done:
  PyMem_Free(in);
  Py_XDECREF(inputs);
  Py_XDECREF(outputs);
  Py_XDECREF(lent);
  return result;
}

/* Number of the backward for just the gradients that are there: -1 with an exception set if the
 * plan has none such. */
static Py_ssize_t find_backward(const plan_object *self, PyObject *grads) {
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
static int read_packed(const omc_module *m, const omc_plan *plan, PyObject *object, void **out) {
  omc_type type;
  *out = NULL;
  if (object == Py_None) return 0;
  if (omc_tensor_read(m, plan->provider, object, out, &type) < 0) return omc_error_prefix("packed");
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

/* Reads what backward is given into the pointers of *b. */
static int read_backward(const omc_module *m, const plan_object *self, PyObject *const *tuples,
                         omc_backward *b, void **pointers) {
  const omc_plan *plan = self->plan;
  const omc_graph *g = plan->graph;
  const uint32_t n_in = g->n_inputs, n_out = g->n_outputs;
  void **in = pointers, **out = in + n_in, **grad_out = out + n_out, **grad_in = grad_out + n_out;
  const Py_ssize_t number = find_backward(self, tuples[2]);
  if (number < 0) return -1;
  const omc_part *part = &plan->parts[OMC_BACKWARD + number];
  b->number = (uint32_t)number;
  b->inputs = in, b->outputs = out, b->grads = grad_out, b->results = grad_in;

  omc_value **values = PyMem_Calloc(n_out + 1, sizeof *values);
  bool *given = PyMem_Calloc(n_out + 1, sizeof *given);
  int result = -1;
  if (!values || !given) {
    PyErr_NoMemory();
    goto done;
  }
  for (uint32_t k = 0; k < n_out; k++) {
    values[k] = result_value(g, k);
    given[k] = g->grads && g->grads[k] && g->grads[k]->uses &&
               PyTuple_GetItem(tuples[2], (Py_ssize_t)k) != Py_None;
  }
  if (read_pointers(m, plan->provider, tuples[0], n_in, g->inputs, part->reads_input, "input", in) <
          0 ||
      read_pointers(m, plan->provider, tuples[1], n_out, values, part->reads_output, "output",
                    out) < 0 ||
      (g->grads && read_pointers(m, plan->provider, tuples[2], n_out, g->grads, given,
                                 "gradient of output", grad_out) < 0))
    goto done;
  result = 0;
done:
  PyMem_Free(values);
  PyMem_Free(given);
  return result;
}

/* The gradients of a backward that has been read. */
static PyObject *run_backward(const omc_module *m, const plan_object *self, PyObject *left,
                              omc_backward *b, void **grad_in) {
  omc_run *run = omc_run_object_get(m, left);
  omc_status status = omc_run_enter(run, b);
  if (status != OMC_OK) return omc_raise(m, status);
  PyObject *lent = b->takes_lent ? omc_run_object_lent(left) : NULL;
  PyObject *results = new_results(m, self, b->number, NULL, lent, b->queue, grad_in);
  if (!results) {
    omc_run_leave(run, b);
    return NULL;
  }
  Py_BEGIN_ALLOW_THREADS
  status = omc_run_backward(run, b);
  Py_END_ALLOW_THREADS
  if (status != OMC_OK) {
    Py_DECREF(results);
    return omc_raise(m, status);
  }
  if (lent) omc_run_object_drop_lent(left);
  return results;
}

/* Bools of the positions in a sequence; -1 with an exception. */
static int read_positions(PyObject *sequence, uint32_t n, bool *out) {
  PyObject *tuple = PySequence_Tuple(sequence);
  if (!tuple) return -1;
  int result = 0;
  for (Py_ssize_t k = 0; result == 0 && k < PyTuple_Size(tuple); k++) {
    const unsigned long i = PyLong_AsUnsignedLong(PyTuple_GetItem(tuple, k));
    if (i < n)
      out[i] = true;
    else if (!PyErr_Occurred())
      PyErr_Format(PyExc_ValueError, "inputs: there is no %lu among %u", i, n);
    if (PyErr_Occurred()) result = -1;
  }
  Py_DECREF(tuple);
  return result;
}

static size_t needed_bytes(const omc_plan *plan) {
  return ((size_t)plan->n_steps + plan->n_copies) * sizeof(bool);
}

static PyObject *plan_needed(PyObject *object, PyObject *args) {
  const omc_plan *plan = ((plan_object *)object)->plan;
  const omc_module *m = PyType_GetModuleState(Py_TYPE(object));
  const omc_graph *g = plan->graph;
  unsigned long number;
  PyObject *sequence, *result = NULL;
  if (!PyArg_ParseTuple(args, "kO", &number, &sequence)) return NULL;
  if (number >= omc_n_backwards(g)) {
    PyErr_Format(PyExc_ValueError, "backward %lu of a plan with %u", number, omc_n_backwards(g));
    return NULL;
  }
  const size_t n = needed_bytes(plan);
  bool *needed = PyMem_Calloc(n + 2 * (size_t)g->n_inputs + g->n_outputs + 1, sizeof *needed);
  if (!needed) return PyErr_NoMemory();
  bool *wanted = needed + n, *inputs = wanted + g->n_inputs, *outputs = inputs + g->n_inputs;
  if (read_positions(sequence, g->n_inputs, wanted) == 0) {
    const omc_status status =
        omc_plan_needed(plan, (uint32_t)number, wanted, needed, inputs, outputs);
    result = status == OMC_OK
                 ? Py_BuildValue("(y#NN)", (const char *)needed, (Py_ssize_t)n,
                                 positions(inputs, g->n_inputs), positions(outputs, g->n_outputs))
                 : omc_raise(m, status);
  }
  PyMem_Free(needed);
  return result;
}

/* What Plan.needed has made; NULL without an exception for None. */
static int read_needed(const omc_plan *plan, PyObject *object, const bool **out) {
  char *bytes;
  Py_ssize_t n;
  *out = NULL;
  if (object == Py_None) return 0;
  if (PyBytes_AsStringAndSize(object, &bytes, &n) < 0) return -1;
  if ((size_t)n != needed_bytes(plan)) {
    PyErr_SetString(PyExc_ValueError, "needed: it is of another plan");
    return -1;
  }
  *out = (const bool *)(const void *)bytes;
  return 0;
}

static PyObject *plan_backward(PyObject *object, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"run", "inputs", "outputs", "grads", "keep", "packed", "needed", NULL};
  plan_object *self = (plan_object *)object;
  const omc_module *m = PyType_GetModuleState(Py_TYPE(object));
  const omc_graph *g = self->plan->graph;
  PyObject *left, *lists[3], *packed = Py_None, *some = Py_None, *tuples[3] = {NULL};
  PyObject *results = NULL;
  const bool *needed;
  int keep = 0;
  void *bytes, *queue;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO|pOO", names, &left, &lists[0], &lists[1],
                                   &lists[2], &keep, &packed, &some))
    return NULL;
  omc_run *run = omc_run_object_get(m, left);
  if (!run) return NULL;
  if (omc_run_plan(run) != self->plan) {
    PyErr_SetString(PyExc_ValueError, "run: it belongs to another plan");
    return NULL;
  }
  if (read_packed(m, self->plan, packed, &bytes) < 0 ||
      read_needed(self->plan, some, &needed) < 0 ||
      omc_current_queue(m, self->plan->provider, &queue) < 0)
    return NULL;
  void **pointers = PyMem_Calloc(2 * ((size_t)g->n_inputs + g->n_outputs) + 1, sizeof *pointers);
  if (!pointers) return PyErr_NoMemory();
  bool ok = true;
  for (int i = 0; ok && i < 3; i++) ok = (tuples[i] = PySequence_Tuple(lists[i])) != NULL;
  omc_backward backward = {.keep = keep != 0, .queue = queue, .packed = bytes, .needed = needed};
  if (ok && read_backward(m, self, tuples, &backward, pointers) == 0)
    results = run_backward(m, self, left, &backward, pointers + g->n_inputs + 2 * g->n_outputs);
  PyMem_Free(pointers);
  for (int i = 0; i < 3; i++) Py_XDECREF(tuples[i]);
  return results;
}

#define PLAN_SHOW(name, show)                                                                  \
  static PyObject *plan_##name(PyObject *object, PyObject *unused) {                           \
    (void)unused;                                                                              \
    return show(PyType_GetModuleState(Py_TYPE(object)), ((plan_object *)object)->plan->graph); \
  }
PLAN_SHOW(text, omc_graph_text)
PLAN_SHOW(describe, omc_graph_description)

static PyObject *plan_profile(PyObject *object, PyObject *unused) {
  (void)unused;
  const omc_plan *plan = ((plan_object *)object)->plan;
  const omc_step_time *times = omc_plan_profile(plan);
  PyObject *list = PyList_New(0);
  for (uint32_t s = 0; list && times && s < plan->n_steps; s++) {
    const omc_step *step = &plan->steps[s];
    omc_cost cost;
    const bool known = omc_node_cost(step->node, &cost) == OMC_OK;
    omc_append(&list,
               Py_BuildValue("(sssKddd)", s < plan->n_forward ? "forward" : "backward",
                             omc_op_name(step->node->op), step->node->name ? step->node->name : "",
                             (unsigned long long)times[s].runs, times[s].seconds,
                             known ? cost.flops : 0.0, known ? cost.bytes : 0.0));
  }
  return list;
}

static PyObject *plan_empty_like(PyObject *object, PyObject *tensor) {
  const omc_module *m = PyType_GetModuleState(Py_TYPE(object));
  const omc_provider *p = ((plan_object *)object)->plan->provider;
  omc_type type;
  void *data, *queue;
  if (omc_tensor_read(m, p, tensor, &data, &type) < 0 || omc_current_queue(m, p, &queue) < 0)
    return NULL;
  return omc_tensor_new(m, p, &type, queue, NULL, &data);
}

#define PLAN_GET(name, self, expr)                         \
  static PyObject *get_##name(PyObject *object, void *u) { \
    (void)u;                                               \
    const plan_object *self = (const plan_object *)object; \
    return expr;                                           \
  }
PLAN_GET(reads_inputs, self, Py_NewRef(self->reads_inputs))
PLAN_GET(reads_outputs, self, Py_NewRef(self->reads_outputs))
PLAN_GET(in_grads, self, Py_NewRef(self->in_grads))
PLAN_GET(out_grads, self, Py_NewRef(self->out_grads))
PLAN_GET(random, self, PyBool_FromLong(self->plan->random))
PLAN_GET(arena_bytes, self, PyLong_FromSize_t(self->plan->arena_bytes))
PLAN_GET(lent_bytes, self, PyLong_FromSize_t(self->plan->lent_bytes))
PLAN_GET(live_bytes, self, PyLong_FromSize_t(self->plan->live_bytes))
PLAN_GET(bound_bytes, self, PyLong_FromSize_t(self->plan->bound_bytes))
PLAN_GET(forward_bytes, self, PyLong_FromSize_t(self->plan->forward_bytes))
PLAN_GET(n_steps, self, PyLong_FromUnsignedLong(self->plan->n_steps))
PLAN_GET(n_forward, self, PyLong_FromUnsignedLong(self->plan->n_forward))

static PyGetSetDef plan_getset[] = {
    {"reads_inputs", get_reads_inputs, NULL, "inputs that each backward reads", NULL},
    {"reads_outputs", get_reads_outputs, NULL, "outputs that each backward reads", NULL},
    {"in_grads", get_in_grads, NULL, "inputs whose gradient is computed", NULL},
    {"out_grads", get_out_grads, NULL, "outputs whose gradient is given, by backward", NULL},
    {"random", get_random, NULL, "whether forward needs a seed", NULL},
    {"arena_bytes", get_arena_bytes, NULL, "bytes of the arena of one run", NULL},
    {"lent_bytes", get_lent_bytes, NULL, "bytes of gradients whose memory forward uses", NULL},
    {"live_bytes", get_live_bytes, NULL, "most bytes live at any step, in the arena and lent",
     NULL},
    {"bound_bytes", get_bound_bytes, NULL, "most bytes live in the arena at any step", NULL},
    {"forward_bytes", get_forward_bytes, NULL, "bytes of a run that backwards read", NULL},
    {"n_steps", get_n_steps, NULL, "steps of forward and backward", NULL},
    {"n_forward", get_n_forward, NULL, "steps of forward", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyMethodDef plan_methods[] = {
    {"forward", plan_forward, METH_VARARGS,
     "forward(inputs, seed) -> (outputs, Run or None); an output that is written over an input is "
     "it"},
    {"backward", (PyCFunction)(void (*)(void))plan_backward, METH_VARARGS | METH_KEYWORDS,
     "backward(run, inputs, outputs, grads, keep=False, packed=None, needed=None) -> gradients of "
     "the inputs; where not all is needed, the others are memory that nothing was written to"},
    {"needed", plan_needed, METH_VARARGS,
     "needed(backward, inputs) -> (for backward(), the inputs it then reads, the outputs)"},
    {"empty_like", plan_empty_like, METH_O,
     "empty_like(tensor) -> a tensor of its type in the provider's pooled memory"},
    {"text", plan_text, METH_NOARGS, "text() -> the planned graph"},
    {"describe", plan_describe, METH_NOARGS, "describe() -> the planned graph, as describe()"},
    {"profile", plan_profile, METH_NOARGS,
     "profile() -> [(phase, op, source name, runs, seconds, flops, bytes)]"},
    {NULL, NULL, 0, NULL}};

static PyType_Slot plan_slots[] = {
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_traverse, plan_traverse},
    {Py_tp_methods, plan_methods},
    {Py_tp_getset, plan_getset},
    {Py_tp_doc, "Everything decided for one signature; made by Session.plan."},
    {0, NULL}};

PyType_Spec omc_plan_spec = {
    "ortmodule_c._C.Plan", sizeof(plan_object), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, plan_slots};
