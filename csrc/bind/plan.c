/* The Plan type: runs forward and backward for one signature. */
#include "bind/bind.h"

typedef struct plan_object {
  PyObject_HEAD omc_plan *plan;
  PyObject *session; /* keeps template, constants and host alive */
  PyObject *in_grads, *out_grads;
  PyObject *saves_inputs, *saves_outputs;
} plan_object;

/* Positions of the true entries, as a tuple. */
static PyObject *positions(const bool *flags, uint32_t n) {
  PyObject *list = PyList_New(0);
  for (uint32_t i = 0; list && i < n; i++) {
    if (!flags || !flags[i]) continue;
    PyObject *index = PyLong_FromUnsignedLong(i);
    if (!index || PyList_Append(list, index) < 0) Py_CLEAR(list);
    Py_XDECREF(index);
  }
  PyObject *tuple = list ? PyList_AsTuple(list) : NULL;
  Py_XDECREF(list);
  return tuple;
}

PyObject *omc_plan_object_new(const omc_module *m, PyObject *session, omc_plan *plan,
                              PyObject *in_grads, PyObject *out_grads) {
  PyTypeObject *type = (PyTypeObject *)m->plan_type;
  allocfunc alloc = PyType_GetSlot(type, Py_tp_alloc);
  plan_object *self = (plan_object *)alloc(type, 0);
  if (!self) {
    omc_plan_release(plan);
    return NULL;
  }
  self->plan = plan;
  self->session = Py_NewRef(session);
  self->in_grads = Py_NewRef(in_grads);
  self->out_grads = Py_NewRef(out_grads);
  self->saves_inputs = positions(plan->saves_input, plan->graph->n_inputs);
  self->saves_outputs = positions(plan->saves_output, plan->graph->n_outputs);
  if (!self->saves_inputs || !self->saves_outputs) {
    Py_DECREF(self);
    return NULL;
  }
  return (PyObject *)self;
}

static void plan_dealloc(PyObject *object) {
  plan_object *self = (plan_object *)object;
  PyTypeObject *type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  omc_plan_release(self->plan);
  Py_XDECREF(self->session);
  Py_XDECREF(self->in_grads);
  Py_XDECREF(self->out_grads);
  Py_XDECREF(self->saves_inputs);
  Py_XDECREF(self->saves_outputs);
  freefunc release = PyType_GetSlot(type, Py_tp_free);
  release(object);
  Py_DECREF(type);
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
static int read_pointers(const omc_module *m, PyObject *tuple, uint32_t n, omc_value *const *values,
                         const bool *wanted, const char *what, void **out) {
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
    if (omc_tensor_read(m, PyTuple_GetItem(tuple, (Py_ssize_t)i), &out[i], &type) < 0)
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

static PyObject *plan_forward(PyObject *object, PyObject *args) {
  plan_object *self = (plan_object *)object;
  const omc_module *m = PyType_GetModuleState(Py_TYPE(object));
  const omc_graph *g = self->plan->graph;
  PyObject *sequence, *inputs = NULL, *outputs = NULL, *result = NULL;
  unsigned long long seed;
  if (!PyArg_ParseTuple(args, "OK", &sequence, &seed)) return NULL;
  void **in = PyMem_Calloc((size_t)g->n_inputs + g->n_outputs + 1, sizeof *in);
  if (!in) return PyErr_NoMemory();
  void **out = in + g->n_inputs;
  inputs = PySequence_Tuple(sequence);
  if (!inputs || read_pointers(m, inputs, g->n_inputs, g->inputs, NULL, "input", in) < 0) goto done;
  outputs = PyList_New((Py_ssize_t)g->n_outputs);
  for (uint32_t k = 0; outputs && k < g->n_outputs; k++) {
    PyObject *t = omc_tensor_new(m, self->plan->provider, &result_value(g, k)->type, &out[k]);
    if (!t || PyList_SetItem(outputs, (Py_ssize_t)k, t) < 0) goto done;
  }
  if (!outputs) goto done;
  omc_run *run = NULL;
  omc_status status;
  Py_BEGIN_ALLOW_THREADS
  status = omc_run_forward(self->plan, in, out, seed, &run);
  Py_END_ALLOW_THREADS
  if (status != OMC_OK) {
    omc_raise(m, status);
    goto done;
  }
  PyObject *token = run ? omc_token_new(m, run) : Py_NewRef(Py_None);
  if (token) result = Py_BuildValue("(ON)", outputs, token);
done:
  PyMem_Free(in);
  Py_XDECREF(inputs);
  Py_XDECREF(outputs);
  return result;
}

static PyObject *plan_backward(PyObject *object, PyObject *args) {
  plan_object *self = (plan_object *)object;
  const omc_module *m = PyType_GetModuleState(Py_TYPE(object));
  const omc_plan *plan = self->plan;
  const omc_graph *g = plan->graph;
  PyObject *owner, *a, *b, *c, *inputs = NULL, *outputs = NULL, *grads = NULL, *results = NULL,
                               *result = NULL;
  if (!PyArg_ParseTuple(args, "OOOO", &owner, &a, &b, &c)) return NULL;
  omc_token *token = omc_token_hold(m, owner);
  if (!token) return NULL;
  omc_run *run = omc_token_run(token);
  if (omc_run_plan(run) != plan) {
    PyErr_SetString(PyExc_ValueError, "token: it belongs to another plan");
    omc_token_release(token);
    return NULL;
  }
  const size_t n_in = g->n_inputs, n_out = g->n_outputs;
  void **in = PyMem_Calloc(2 * (n_in + n_out) + 1, sizeof *in);
  bool *given = PyMem_Calloc(n_out + 1, sizeof *given);
  if (!in || !given) {
    PyErr_NoMemory();
    goto done;
  }
  void **out = in + n_in, **dout = out + n_out, **din = dout + n_out;
  if (!(inputs = PySequence_Tuple(a)) || !(outputs = PySequence_Tuple(b)) ||
      !(grads = PySequence_Tuple(c)))
    goto done;
  for (size_t k = 0; k < n_out; k++) given[k] = g->grads && g->grads[k] && g->grads[k]->uses;
  omc_value **forward_results = PyMem_Calloc(n_out + 1, sizeof *forward_results);
  if (!forward_results) {
    PyErr_NoMemory();
    goto done;
  }
  for (uint32_t k = 0; k < n_out; k++) forward_results[k] = result_value(g, k);
  int failed =
      read_pointers(m, inputs, g->n_inputs, g->inputs, plan->saves_input, "input", in) < 0 ||
      read_pointers(m, outputs, g->n_outputs, forward_results, plan->saves_output, "output", out) <
          0 ||
      (g->grads &&
       read_pointers(m, grads, g->n_outputs, g->grads, given, "gradient of output", dout) < 0);
  PyMem_Free(forward_results);
  if (failed) goto done;
  results = PyList_New((Py_ssize_t)n_in);
  for (uint32_t i = 0; results && i < n_in; i++) {
    const omc_value *v = i < g->n_grads ? result_value(g, g->n_outputs + i) : NULL;
    PyObject *t = v ? omc_tensor_new(m, plan->provider, &v->type, &din[i]) : Py_NewRef(Py_None);
    if (!t || PyList_SetItem(results, (Py_ssize_t)i, t) < 0) goto done;
  }
  if (!results) goto done;
  omc_status status;
  Py_BEGIN_ALLOW_THREADS
  status = omc_run_backward(run, in, out, dout, din);
  Py_END_ALLOW_THREADS
  result = status == OMC_OK ? Py_NewRef(results) : omc_raise(m, status);
done:
  PyMem_Free(in);
  PyMem_Free(given);
  Py_XDECREF(inputs);
  Py_XDECREF(outputs);
  Py_XDECREF(grads);
  Py_XDECREF(results);
  omc_token_release(token);
  return result;
}

static PyObject *plan_text(PyObject *object, PyObject *unused) {
  (void)unused;
  plan_object *self = (plan_object *)object;
  char *text;
  size_t bytes;
  omc_status status = omc_graph_print(self->plan->graph, omc_default_allocator(), &text, &bytes);
  if (status != OMC_OK) return omc_raise(PyType_GetModuleState(Py_TYPE(object)), status);
  PyObject *result = PyUnicode_FromStringAndSize(text, (Py_ssize_t)bytes - 1);
  omc_free(omc_default_allocator(), text, 1, bytes);
  return result;
}

static PyObject *plan_profile(PyObject *object, PyObject *unused) {
  (void)unused;
  const omc_plan *plan = ((plan_object *)object)->plan;
  const double *seconds = omc_plan_profile(plan);
  PyObject *list = PyList_New(0);
  for (uint32_t s = 0; list && seconds && s < plan->n_steps; s++) {
    const omc_step *step = &plan->steps[s];
    PyObject *row =
        Py_BuildValue("(sssd)", s < plan->n_forward ? "forward" : "backward", step->op->name,
                      step->node->name ? step->node->name : "", seconds[s]);
    if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
    Py_XDECREF(row);
  }
  return list;
}

#define PLAN_GET(name, expr)                               \
  static PyObject *get_##name(PyObject *object, void *u) { \
    (void)u;                                               \
    const plan_object *self = (const plan_object *)object; \
    return expr;                                           \
  }
PLAN_GET(saves_inputs, Py_NewRef(self->saves_inputs))
PLAN_GET(saves_outputs, Py_NewRef(self->saves_outputs))
PLAN_GET(in_grads, Py_NewRef(self->in_grads))
PLAN_GET(out_grads, Py_NewRef(self->out_grads))
PLAN_GET(random, PyBool_FromLong(self->plan->random))
PLAN_GET(arena_bytes, PyLong_FromSize_t(self->plan->arena_bytes))
PLAN_GET(bound_bytes, PyLong_FromSize_t(self->plan->bound_bytes))
PLAN_GET(forward_bytes, PyLong_FromSize_t(self->plan->forward_bytes))
PLAN_GET(n_steps, PyLong_FromUnsignedLong(self->plan->n_steps))
PLAN_GET(n_forward, PyLong_FromUnsignedLong(self->plan->n_forward))

static PyGetSetDef plan_getset[] = {
    {"saves_inputs", get_saves_inputs, NULL, "inputs that backward reads", NULL},
    {"saves_outputs", get_saves_outputs, NULL, "outputs that backward reads", NULL},
    {"in_grads", get_in_grads, NULL, "inputs whose gradient is computed", NULL},
    {"out_grads", get_out_grads, NULL, "outputs whose gradient is given", NULL},
    {"random", get_random, NULL, "whether forward needs a seed", NULL},
    {"arena_bytes", get_arena_bytes, NULL, "bytes of the arena of one run", NULL},
    {"bound_bytes", get_bound_bytes, NULL, "most bytes live at any step", NULL},
    {"forward_bytes", get_forward_bytes, NULL, "arena bytes that backward reads", NULL},
    {"n_steps", get_n_steps, NULL, "steps of forward and backward", NULL},
    {"n_forward", get_n_forward, NULL, "steps of forward", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyMethodDef plan_methods[] = {
    {"forward", plan_forward, METH_VARARGS, "forward(inputs, seed) -> (outputs, token or None)"},
    {"backward", plan_backward, METH_VARARGS,
     "backward(token, inputs, outputs, grads) -> gradients of the inputs"},
    {"text", plan_text, METH_NOARGS, "text() -> the planned graph"},
    {"profile", plan_profile, METH_NOARGS, "profile() -> [(phase, op, source name, seconds)]"},
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
