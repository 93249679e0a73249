/* What a graph was made for besides tensors: dictionaries and other places of Python, and what was
 * there. Laid out in arrays, since it is compared before every call. */
#include "python/binding.h"

typedef struct item {
  PyObject *key, *value; /* no value: only the key is held */
} item;

typedef struct whole {
  PyObject *owner, *dict; /* no owner: nobody can exchange it */
  item *items;
  Py_ssize_t n;
} whole;

typedef struct place {
  PyObject *holder, *key, *value; /* no key: the value is what a call of the holder gives */
  const PyGetSetDef *computed;    /* by what its class computes the attribute in C, or NULL */
} place;

typedef struct held_object {
  PyObject_HEAD omc_comparison how;
  PyObject *missing; /* in the place of a value: there is none */
  item *items;       /* of all dicts */
  uint8_t *names;    /* of each, the OMC_NAME_* that its key is, or OMC_N_OF_MODULES */
  whole *dicts;
  place *places;
  Py_ssize_t n_items, n_dicts, n_places;
} held_object;

/* ---- the comparison ---- */

/* What lies at a place, a new reference; `missing` where an attribute is missing, or a cell empty.
 */
static PyObject *value_at(const held_object *self, const place *p) {
  PyObject *found;
  if (p->computed)
    found = p->computed->get(p->holder, p->computed->closure);
  else if (PyDict_CheckExact(p->holder))
    found = Py_XNewRef(PyDict_GetItemWithError(p->holder, p->key));
  else if (!p->key)
    found = PyObject_CallNoArgs(p->holder);
  else
    found = PyObject_GetAttr(p->holder, p->key);
  if (found) return found;
  if (PyErr_ExceptionMatches(PyExc_AttributeError) || PyErr_ExceptionMatches(PyExc_ValueError))
    PyErr_Clear();
  return PyErr_Occurred() ? NULL : Py_NewRef(self->missing);
}

static int is_unchanged(const held_object *self, const place *p) {
  PyObject *now = value_at(self, p);
  const int result = !now ? -1 : now == p->value ? 1 : omc_same(&self->how, now, p->value);
  Py_XDECREF(now);
  return result;
}

static int is_same_value(const held_object *self, PyObject *now, PyObject *was) {
  if (!was || now == was) return 1;
  Py_INCREF(now);
  const int result = omc_same(&self->how, now, was);
  Py_DECREF(now);
  return result;
}

/* Whether an object still has the dictionary that it had. */
static bool is_its(PyObject *owner, PyObject *dict) {
  PyObject *now = PyObject_GenericGetDict(owner, NULL);
  if (!now) PyErr_Clear();
  Py_XDECREF(now);
  return now == dict;
}

/* Compared key by key in their order, without a lookup. Where `found` is not NULL it gets what lies
 * under OMC_NAME_*, new references. */
static int same_in_order(const held_object *self, const whole *w, PyObject **found) {
  PyObject *key, *value;
  Py_ssize_t next = 0;
  const item *at = w->items, *end = w->items + w->n;
  const uint8_t *name = self->names + (w->items - self->items);
  int result = 1;
  while (result > 0 && PyDict_Next(w->dict, &next, &key, &value)) {
    if (at == end || key != at->key) return 0;
    if (found && *name < OMC_N_OF_MODULES) found[*name] = Py_NewRef(value);
    result = is_same_value(self, value, at->value);
    at++, name++;
  }
  return result > 0 ? at == end : result;
}

/* As above for a dictionary whose keys came in another order. */
static int same_by_lookup(const held_object *self, const whole *w) {
  int result = 1;
  for (const item *i = w->items; result > 0 && i < w->items + w->n; i++) {
    PyObject *value = PyDict_GetItemWithError(w->dict, i->key);
    if (!value) return PyErr_Occurred() ? -1 : 0;
    result = is_same_value(self, value, i->value);
  }
  return result > 0 ? PyDict_Size(w->dict) == w->n : result;
}

static int is_unchanged_whole(const held_object *self, const whole *w) {
  if (PyDict_Size(w->dict) != w->n || (w->owner && !is_its(w->owner, w->dict))) return 0;
  if (w->n == 0) return 1;
  const int result = same_in_order(self, w, NULL);
  return result == 0 ? same_by_lookup(self, w) : result;
}

int omc_held_visit(PyObject *held, Py_ssize_t at, PyObject *owner, PyObject *dict,
                   PyObject *found[OMC_N_OF_MODULES]) {
  const held_object *self = (const held_object *)held;
  memset(found, 0, OMC_N_OF_MODULES * sizeof *found);
  if (at >= self->n_dicts) return 0;
  const whole *w = &self->dicts[at];
  if (w->owner != owner || w->dict != dict || PyDict_Size(dict) != w->n) return 0;
  const int result = same_in_order(self, w, found);
  for (int i = 0; result <= 0 && i < OMC_N_OF_MODULES; i++) Py_CLEAR(found[i]);
  return result;
}

static PyObject *first_changed(PyObject *object, PyObject *start) {
  const held_object *self = (const held_object *)object;
  Py_ssize_t at = PyLong_AsSsize_t(start);
  if (at < 0) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "start is %zd", at);
  for (; at < self->n_dicts; at++) {
    const int result = is_unchanged_whole(self, &self->dicts[at]);
    if (result <= 0) return result < 0 ? NULL : PyLong_FromSsize_t(at);
  }
  for (Py_ssize_t i = 0; i < self->n_places; i++) {
    const int result = is_unchanged(self, &self->places[i]);
    if (result <= 0) return result < 0 ? NULL : PyLong_FromSsize_t(self->n_dicts + i);
  }
  return PyLong_FromLong(-1);
}

/* ---- the object ---- */

static int held_traverse(PyObject *object, visitproc visit, void *arg) {
  const held_object *self = (const held_object *)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->how.by_value);
  Py_VISIT(self->how.by_repr);
  Py_VISIT(self->missing);
  for (Py_ssize_t i = 0; i < self->n_items; i++) {
    Py_VISIT(self->items[i].key);
    Py_VISIT(self->items[i].value);
  }
  for (Py_ssize_t i = 0; i < self->n_dicts; i++) {
    Py_VISIT(self->dicts[i].owner);
    Py_VISIT(self->dicts[i].dict);
  }
  for (Py_ssize_t i = 0; i < self->n_places; i++) {
    Py_VISIT(self->places[i].holder);
    Py_VISIT(self->places[i].key);
    Py_VISIT(self->places[i].value);
  }
  return 0;
}

/* Counts go down before references: what a reference keeps may ask for the object again. */
static int held_clear(PyObject *object) {
  held_object *self = (held_object *)object;
  while (self->n_places > 0) {
    const place *p = &self->places[--self->n_places];
    Py_XDECREF(p->holder);
    Py_XDECREF(p->key);
    Py_XDECREF(p->value);
  }
  while (self->n_dicts > 0) {
    const whole *w = &self->dicts[--self->n_dicts];
    Py_XDECREF(w->owner);
    Py_XDECREF(w->dict);
  }
  while (self->n_items > 0) {
    const item *i = &self->items[--self->n_items];
    Py_XDECREF(i->key);
    Py_XDECREF(i->value);
  }
  return 0;
}

static void held_dealloc(PyObject *object) {
  held_object *self = (held_object *)object;
  PyObject_GC_UnTrack(object);
  held_clear(object);
  Py_XDECREF(self->how.by_value);
  Py_XDECREF(self->how.by_repr);
  Py_XDECREF(self->missing);
  PyMem_Free(self->items);
  PyMem_Free(self->names);
  PyMem_Free(self->dicts);
  PyMem_Free(self->places);
  omc_object_free(object);
}

/* A new reference, or NULL for what stands for nothing. */
static PyObject *unless(PyObject *nothing, PyObject *object) {
  return object == nothing ? NULL : Py_NewRef(object);
}

static const PyGetSetDef *getset(PyTypeObject *type, PyObject *name) {
  const PyGetSetDef *def = PyType_GetSlot(type, Py_tp_getset);
  while (def && def->name && PyUnicode_CompareWithASCIIString(name, def->name) != 0) def++;
  return def && def->name && def->get ? def : NULL;
}

/* The descriptor by which `getattr` would read an attribute of this holder whatever happens:
 * nothing of an instance precedes it, and its class is one of C that nobody can change. NULL where
 * that is not known. The class of an object is what it is, not what it says. */
static const PyGetSetDef *computed_by(PyObject *holder, PyObject *key, PyObject *value) {
  PyTypeObject *type = Py_TYPE(holder);
  if (!key || !PyUnicode_Check(key)) return NULL;
  if (value == (PyObject *)type && PyUnicode_CompareWithASCIIString(key, "__class__") == 0)
    return getset(&PyBaseObject_Type, key);
  getattrofunc lookup = PyType_GetSlot(type, Py_tp_getattro);
  if (lookup != PyObject_GenericGetAttr && type != &PyType_Type) return NULL;
  return PyType_GetFlags(type) & Py_TPFLAGS_IMMUTABLETYPE ? getset(type, key) : NULL;
}

static int add_dict(held_object *self, PyObject *entry) {
  PyObject *owner, *dict, *keys, *values;
  if (!PyArg_ParseTuple(entry, "OO!O!O!:Held", &owner, &PyDict_Type, &dict, &PyTuple_Type, &keys,
                        &PyTuple_Type, &values))
    return -1;
  const Py_ssize_t n = PyTuple_Size(keys);
  if (PyTuple_Size(values) != n) {
    PyErr_Format(PyExc_ValueError, "%zd keys and %zd values", n, PyTuple_Size(values));
    return -1;
  }
  item *grown = PyMem_Realloc(self->items, (size_t)(self->n_items + n + 1) * sizeof *grown);
  if (!grown) return PyErr_NoMemory(), -1;
  self->items = grown;
  for (Py_ssize_t i = 0; i < n; i++)
    self->items[self->n_items++] = (item){Py_NewRef(PyTuple_GetItem(keys, i)),
                                          unless(self->missing, PyTuple_GetItem(values, i))};
  self->dicts[self->n_dicts++] = (whole){unless(Py_None, owner), Py_NewRef(dict), NULL, n};
  return 0;
}

static int add_place(held_object *self, PyObject *entry) {
  PyObject *holder, *key, *value;
  if (!PyArg_ParseTuple(entry, "OOO:Held", &holder, &key, &value)) return -1;
  place p = {Py_NewRef(holder), unless(Py_None, key), Py_NewRef(value), NULL};
  if (PyDict_CheckExact(holder) && !p.key) p.key = Py_NewRef(Py_None);
  if (!PyDict_CheckExact(holder)) p.computed = computed_by(holder, p.key, value);
  self->places[self->n_places++] = p;
  return 0;
}

static int is_named(PyObject *key, PyObject *name) {
  if (key == name) return 1;
  return PyUnicode_Check(key) &&
         PyUnicode_Compare(key, name) == 0; /* one that was unpickled is not interned */
}

static int note_names(held_object *self, const omc_module *m) {
  self->names = PyMem_Malloc((size_t)self->n_items + 1);
  if (!self->names) return PyErr_NoMemory(), -1;
  for (Py_ssize_t i = 0; i < self->n_items; i++) {
    uint8_t name = 0;
    while (name < OMC_N_OF_MODULES && !is_named(self->items[i].key, m->names[name])) name++;
    self->names[i] = name;
  }
  return 0;
}

static int fill(held_object *self, const omc_module *m, PyObject *dicts, PyObject *places) {
  const Py_ssize_t n_dicts = PyTuple_Size(dicts), n_places = PyTuple_Size(places);
  self->dicts = PyMem_Calloc((size_t)n_dicts + 1, sizeof *self->dicts);
  self->places = PyMem_Calloc((size_t)n_places + 1, sizeof *self->places);
  if (!self->dicts || !self->places) return PyErr_NoMemory(), -1;
  for (Py_ssize_t i = 0; i < n_dicts; i++)
    if (add_dict(self, PyTuple_GetItem(dicts, i)) < 0) return -1;
  for (Py_ssize_t i = 0; i < n_places; i++)
    if (add_place(self, PyTuple_GetItem(places, i)) < 0) return -1;
  item *items = self->items;
  for (Py_ssize_t i = 0; i < n_dicts; items += self->dicts[i++].n) self->dicts[i].items = items;
  return note_names(self, m);
}

static PyObject *held_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  PyObject *dicts, *places, *by_value, *by_repr, *missing;
  if (kwargs && PyDict_Size(kwargs) > 0)
    return PyErr_SetString(PyExc_TypeError, "Held takes no keywords"), NULL;
  if (!PyArg_ParseTuple(args, "O!O!O!O!O:Held", &PyTuple_Type, &dicts, &PyTuple_Type, &places,
                        &PyFrozenSet_Type, &by_value, &PyFrozenSet_Type, &by_repr, &missing))
    return NULL;
  held_object *self = omc_object_new((PyObject *)type);
  if (!self) return NULL;
  self->how = (omc_comparison){Py_NewRef(by_value), Py_NewRef(by_repr)};
  self->missing = Py_NewRef(missing);
  if (fill(self, PyType_GetModuleState(type), dicts, places) < 0) Py_CLEAR(self);
  return (PyObject *)self;
}

static PyMethodDef held_methods[] = {
    {"first_changed", first_changed, METH_O,
     "first_changed(start) -> the first dict, then place, that is not what it was, or -1"},
    {NULL, NULL, 0, NULL}};

static PyType_Slot held_slots[] = {
    {Py_tp_new, held_new},
    {Py_tp_dealloc, held_dealloc},
    {Py_tp_traverse, held_traverse},
    {Py_tp_clear, held_clear},
    {Py_tp_methods, held_methods},
    {Py_tp_doc,
     "Held([(owner, dict, keys, values)], [(holder, key, value)], by_value, by_repr, missing)"},
    {0, NULL}};

PyType_Spec omc_held_spec = {"ortmodule_c._C.Held", sizeof(held_object), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, held_slots};
