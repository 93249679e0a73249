/* The Plan type: runs forward and backward for one signature. */
#include "python/binding.h"

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
  omc_plan_object *self = (omc_plan_object *)session->last;
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
  self->uses = PyMem_Calloc((size_t)omc_n_backwards(plan->graph) + 1, sizeof *self->uses);
  if (!self->requests || !self->uses) PyErr_NoMemory();
  if (!self->reads_inputs || !self->reads_outputs || !self->requests || !self->uses) {
    Py_DECREF(self);
    return NULL;
  }
  session->last = (PyObject *)self;
  return (PyObject *)self;
}

static void free_uses(omc_backward_uses *uses) {
  PyMem_Free(uses->inputs);
  PyMem_Free(uses->outputs);
  PyMem_Free(uses->grads);
  *uses = (omc_backward_uses){NULL, NULL, NULL};
}

const omc_backward_uses *omc_plan_object_uses(omc_plan_object *self, uint32_t backward) {
  const omc_graph *g = self->plan->graph;
  omc_backward_uses *uses = &self->uses[backward];
  if (uses->inputs) return uses;
  uses->inputs = PyMem_Calloc((size_t)g->n_inputs + 1, sizeof *uses->inputs);
  uses->outputs = PyMem_Calloc((size_t)g->n_outputs + 1, sizeof *uses->outputs);
  uses->grads = PyMem_Calloc((size_t)g->n_outputs + 1, sizeof *uses->grads);
  if (!uses->inputs || !uses->outputs || !uses->grads) {
    free_uses(uses);
    PyErr_NoMemory();
    return NULL;
  }
  omc_plan_uses(self->plan, backward, uses->inputs, uses->outputs, uses->grads);
  return uses;
}

static void plan_dealloc(PyObject *object) {
  omc_plan_object *self = (omc_plan_object *)object;
  PyObject_GC_UnTrack(object);
  if (self->session && self->session->last == object) self->session->last = NULL;
  for (uint32_t k = 0; self->requests && k < n_requests(self->plan->graph); k++)
    Py_XDECREF(self->requests[k]);
  PyMem_Free(self->requests);
  for (uint32_t b = 0; self->uses && b < omc_n_backwards(self->plan->graph); b++)
    free_uses(&self->uses[b]);
  PyMem_Free(self->uses);
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
  const omc_plan_object *self = (const omc_plan_object *)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->session);
  return 0;
}

int omc_read_pointers(const omc_module *m, const omc_provider *provider, PyObject *tuple,
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

PyObject *omc_result_memory(const omc_module *m, const omc_plan_object *self, uint32_t input,
                            PyObject *lent, void *queue, void **out) {
  const omc_graph *g = self->plan->graph;
  omc_type same;
  if (!lent || !self->plan->lends[input])
    return omc_tensor_new(m, self->plan->provider, &g->inputs[input]->type, queue,
                          &self->requests[g->n_outputs + input], out);
  PyObject *tensor = PyList_GetItem(lent, input);
  if (!tensor || omc_tensor_read(m, self->plan->provider, tensor, out, &same) < 0) return NULL;
  return Py_NewRef(tensor);
}

/* Memory that forward is lent: a list by input. */
static PyObject *new_lent(const omc_module *m, const omc_plan_object *self, void *queue,
                          void **pointers) {
  PyObject *list = PyList_New(0);
  for (uint32_t i = 0; list && i < self->plan->graph->n_inputs; i++)
    omc_append(&list, self->plan->lends[i]
                          ? omc_result_memory(m, self, i, NULL, queue, &pointers[i])
                          : Py_NewRef(Py_None));
  return list;
}

static PyObject *plan_forward(PyObject *object, PyObject *args) {
  omc_plan_object *self = (omc_plan_object *)object;
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
      omc_read_pointers(m, p, inputs, g->n_inputs, g->inputs, NULL, "input", in) < 0)
    goto done;
  outputs = PyList_New(0);
  for (uint32_t k = 0; outputs && k < g->n_outputs; k++) {
    const omc_value *over = omc_over(g, k);
    omc_append(&outputs, over ? Py_NewRef(PyTuple_GetItem(inputs, over->index))
                              : omc_tensor_new(m, p, &omc_in(g->result, k)->type, queue,
                                               &self->requests[k], &out[k]));
  }
  if (!outputs || !(lent = new_lent(m, self, queue, lent_at))) goto done;
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

size_t omc_needed_bytes(const omc_plan *plan) {
  return ((size_t)plan->n_steps + plan->n_copies) * sizeof(bool);
}

/* The number of a backward that the plan has; -1 with an exception. */
static int check_number(const omc_plan *plan, unsigned long number) {
  if (number < omc_n_backwards(plan->graph)) return 0;
  PyErr_Format(PyExc_ValueError, "backward %lu of a plan with %u", number,
               omc_n_backwards(plan->graph));
  return -1;
}

static PyObject *plan_needed(PyObject *object, PyObject *args) {
  const omc_plan *plan = ((omc_plan_object *)object)->plan;
  const omc_module *m = PyType_GetModuleState(Py_TYPE(object));
  const omc_graph *g = plan->graph;
  unsigned long number;
  PyObject *sequence, *result = NULL;
  if (!PyArg_ParseTuple(args, "kO", &number, &sequence) || check_number(plan, number) < 0)
    return NULL;
  const size_t n = omc_needed_bytes(plan);
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

static PyObject *numbers(const uint32_t *values, uint32_t n) {
  PyObject *list = PyList_New(0);
  for (uint32_t i = 0; list && i < n; i++) omc_append(&list, PyLong_FromUnsignedLong(values[i]));
  return list;
}

static PyObject *plan_uses(PyObject *object, PyObject *args) {
  omc_plan_object *self = (omc_plan_object *)object;
  const omc_graph *g = self->plan->graph;
  unsigned long number;
  if (!PyArg_ParseTuple(args, "k", &number) || check_number(self->plan, number) < 0) return NULL;
  const omc_backward_uses *uses = omc_plan_object_uses(self, (uint32_t)number);
  if (!uses) return NULL;
  PyObject *reads = PyList_New(0), *ends = PyList_New(0);
  for (uint32_t i = 0; i < g->n_inputs; i++) {
    if (reads) omc_append(&reads, PyLong_FromUnsignedLong(uses->inputs[i].read));
    if (ends) omc_append(&ends, PyLong_FromUnsignedLong(uses->inputs[i].end));
  }
  return Py_BuildValue("(NNNN)", reads, ends, numbers(uses->outputs, g->n_outputs),
                       numbers(uses->grads, g->n_outputs));
}

#define PLAN_SHOW(name, show)                                                                      \
  static PyObject *plan_##name(PyObject *object, PyObject *unused) {                               \
    (void)unused;                                                                                  \
    return show(PyType_GetModuleState(Py_TYPE(object)), ((omc_plan_object *)object)->plan->graph); \
  }
PLAN_SHOW(text, omc_graph_text)
PLAN_SHOW(describe, omc_graph_description)

static PyObject *plan_profile(PyObject *object, PyObject *unused) {
  (void)unused;
  const omc_plan *plan = ((omc_plan_object *)object)->plan;
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
  const omc_provider *p = ((omc_plan_object *)object)->plan->provider;
  omc_type type;
  void *data, *queue;
  if (omc_tensor_read(m, p, tensor, &data, &type) < 0 || omc_current_queue(m, p, &queue) < 0)
    return NULL;
  return omc_tensor_new(m, p, &type, queue, NULL, &data);
}

#define PLAN_GET(name, self, expr)                                 \
  static PyObject *get_##name(PyObject *object, void *u) {         \
    (void)u;                                                       \
    const omc_plan_object *self = (const omc_plan_object *)object; \
    return expr;                                                   \
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
    {"begin", (PyCFunction)(void (*)(void))omc_plan_begin, METH_VARARGS | METH_KEYWORDS,
     "begin(run, inputs, outputs, grads, keep=False, packed=None, needed=None) -> Backward"},
    {"backward", (PyCFunction)(void (*)(void))omc_plan_backward, METH_VARARGS | METH_KEYWORDS,
     "backward(run, inputs, outputs, grads, keep=False, packed=None, needed=None) -> gradients of "
     "the inputs; where not all is needed, the others are memory that nothing was written to"},
    {"needed", plan_needed, METH_VARARGS,
     "needed(backward, inputs) -> (for backward(), the inputs it then reads, the outputs)"},
    {"uses", plan_uses, METH_VARARGS,
     "uses(backward) -> the steps before which it has used for the last time: each input, each "
     "input or its gradient, each output, the gradient of each"},
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
    "ortmodule_c._C.Plan", sizeof(omc_plan_object), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, plan_slots};
