/* What a graph assumes of a module, looked at before every call: a walk over the dictionaries of
 * torch.nn.Module that collects its tensors and compares the rest with what the last walk found. */
#include "python/binding.h"

#include <structmember.h>

#include "base/hash.h"

/* One thing found: an object (a class or a name), a number, or both. */
typedef struct entry {
  PyObject *object; /* owned, or NULL */
  int64_t number;
} entry;

typedef struct fingerprint_object {
  PyObject_HEAD entry *entries;
  Py_ssize_t n;
  size_t capacity;
  Py_hash_t hash;
  PyObject *hooked, *opaque, *detached, *renewed; /* names of classes, or None */
} fingerprint_object;

/* ---- fingerprint ---- */

static fingerprint_object *fingerprint_new(const omc_module *m) {
  fingerprint_object *self = omc_object_new(m->types[OMC_TYPE_FINGERPRINT]);
  if (!self) return NULL;
  self->hooked = Py_NewRef(Py_None);
  self->opaque = Py_NewRef(Py_None);
  self->detached = Py_NewRef(Py_None);
  self->renewed = Py_NewRef(Py_None);
  return self;
}

static int fingerprint_traverse(PyObject *object, visitproc visit, void *arg) {
  const fingerprint_object *self = (const fingerprint_object *)object;
  Py_VISIT(Py_TYPE(object));
  for (Py_ssize_t i = 0; i < self->n; i++) Py_VISIT(self->entries[i].object);
  return 0;
}

static int fingerprint_clear(PyObject *object) {
  fingerprint_object *self = (fingerprint_object *)object;
  const Py_ssize_t n = self->n;
  self->n = 0;
  for (Py_ssize_t i = 0; i < n; i++) Py_XDECREF(self->entries[i].object);
  return 0;
}

static void fingerprint_dealloc(PyObject *object) {
  fingerprint_object *self = (fingerprint_object *)object;
  PyObject_GC_UnTrack(object);
  fingerprint_clear(object);
  PyMem_Free(self->entries);
  Py_XDECREF(self->hooked);
  Py_XDECREF(self->opaque);
  Py_XDECREF(self->detached);
  Py_XDECREF(self->renewed);
  omc_object_free(object);
}

/* The array with room for one element more than n; NULL with MemoryError, nothing being changed. */
static void *with_room(void *array, size_t n, size_t *capacity, size_t size) {
  if (n < *capacity) return array;
  const size_t larger = *capacity ? 2 * *capacity : 64;
  void *grown = PyMem_Realloc(array, larger * size);
  if (!grown) return PyErr_NoMemory();
  *capacity = larger;
  return grown;
}

static int fingerprint_append(fingerprint_object *self, entry f) {
  entry *entries = with_room(self->entries, (size_t)self->n, &self->capacity, sizeof *entries);
  if (!entries) return -1;
  self->entries = entries;
  Py_XINCREF(f.object);
  entries[self->n++] = f;
  return 0;
}

static bool same_object(PyObject *a, PyObject *b) {
  if (a == b || !a || !b) return a == b;
  return PyUnicode_CheckExact(a) && PyUnicode_CheckExact(b) && PyUnicode_Compare(a, b) == 0;
}

static bool same_entry(entry a, entry b) {
  return a.number == b.number && same_object(a.object, b.object);
}

/* Names by their text, all else by its address: a class may refuse to be hashed. */
static Py_hash_t hash_object(PyObject *object) {
  const bool name = object && PyUnicode_CheckExact(object);
  return name ? PyObject_Hash(object) : (Py_hash_t)((uintptr_t)object >> 4);
}

static void set_hash(fingerprint_object *self) {
  uint64_t hash = (uint64_t)self->n;
  for (Py_ssize_t i = 0; i < self->n; i++) {
    const entry f = self->entries[i];
    hash = omc_hash_mix(hash, (uint64_t)hash_object(f.object) ^ (uint64_t)f.number);
  }
  self->hash = (Py_hash_t)(hash >> 1);
}

static Py_hash_t fingerprint_hash(PyObject *object) { return ((fingerprint_object *)object)->hash; }

static PyObject *fingerprint_compare(PyObject *a, PyObject *b, int op) {
  if ((op != Py_EQ && op != Py_NE) || Py_TYPE(a) != Py_TYPE(b)) Py_RETURN_NOTIMPLEMENTED;
  const fingerprint_object *x = (const fingerprint_object *)a, *y = (const fingerprint_object *)b;
  bool same = x->hash == y->hash && x->n == y->n;
  for (Py_ssize_t i = 0; same && x != y && i < x->n; i++)
    same = same_entry(x->entries[i], y->entries[i]);
  return PyBool_FromLong(same == (op == Py_EQ));
}

#define MEMBER(field, what) \
  {#field, T_OBJECT_EX, offsetof(fingerprint_object, field), READONLY, what}
static PyMemberDef fingerprint_members[] = {
    MEMBER(hooked, "class of a submodule with hooks of backward, or None"),
    MEMBER(opaque, "class of a submodule that cannot be looked into, or None"),
    MEMBER(detached, "class of a recurrent layer whose weights are not its parameters"),
    MEMBER(renewed, "class of a recurrent layer that makes the list of its weights anew, for once"),
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot fingerprint_slots[] = {
    {Py_tp_dealloc, fingerprint_dealloc},
    {Py_tp_traverse, fingerprint_traverse},
    {Py_tp_clear, fingerprint_clear},
    {Py_tp_hash, fingerprint_hash},
    {Py_tp_richcompare, fingerprint_compare},
    {Py_tp_members, fingerprint_members},
    {Py_tp_doc, "What a walk over a module found, but for its tensors: compared by value."},
    {0, NULL}};

PyType_Spec omc_fingerprint_spec = {
    "ortmodule_c._C.Fingerprint", sizeof(fingerprint_object), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, fingerprint_slots};

/* ---- numbers given to objects in the order in which they are met ---- */

typedef struct numbering {
  struct {
    const PyObject *object;
    int64_t number;
  } *slots;
  size_t capacity, n; /* capacity is a power of two, at least twice n */
} numbering;

static size_t slot_of(const numbering *t, const PyObject *object) {
  size_t i = (((uintptr_t)object >> 4) * 0x9E3779B97F4A7C15u >> 20) & (t->capacity - 1);
  while (t->slots[i].object && t->slots[i].object != object) i = (i + 1) & (t->capacity - 1);
  return i;
}

static int grow(numbering *t) {
  numbering larger = {.capacity = t->capacity ? 4 * t->capacity : 256, .n = t->n};
  larger.slots = PyMem_Calloc(larger.capacity, sizeof *larger.slots);
  if (!larger.slots) return PyErr_NoMemory(), -1;
  for (size_t i = 0; i < t->capacity; i++)
    if (t->slots[i].object) larger.slots[slot_of(&larger, t->slots[i].object)] = t->slots[i];
  PyMem_Free(t->slots);
  *t = larger;
  return 0;
}

/* Its number; *is_new if it had none. -1 without memory. */
static int64_t number_of(numbering *t, const PyObject *object, bool *is_new) {
  if (2 * t->n >= t->capacity && grow(t) < 0) return -1;
  const size_t i = slot_of(t, object);
  *is_new = !t->slots[i].object;
  if (*is_new) {
    t->slots[i].object = object;
    t->slots[i].number = (int64_t)t->n++;
  }
  return t->slots[i].number;
}

/* ---- the walk ---- */

typedef struct walk {
  const omc_module *m;
  fingerprint_object *last; /* what was found last time, as long as all is the same; else NULL */
  Py_ssize_t at;            /* fingerprint that were the same */
  fingerprint_object *fingerprint; /* what is found, once something differs */
  PyObject *held;                  /* what modules had, as long as that is the same; else NULL */
  Py_ssize_t checked;              /* modules that had it */
  numbering modules, tensors, listed[2];
  PyObject *lists[2]; /* parameters, buffers */
  PyObject **pending; /* owned; the next module is the last */
  size_t n_pending, max_pending;
  PyObject *hooked, *opaque, *detached,
      *renewed; /* classes; borrowed from modules that are alive */
  bool called;  /* something has hooks that a forward calls */
} walk;

/* Stops comparing and starts to record. */
static int diverge(walk *w) {
  w->fingerprint = fingerprint_new(w->m);
  if (!w->fingerprint) return -1;
  for (Py_ssize_t i = 0; i < w->at; i++)
    if (fingerprint_append(w->fingerprint, w->last->entries[i]) < 0) return -1;
  w->last = NULL;
  return 0;
}

static int note(walk *w, PyObject *object, int64_t number) {
  const entry f = {object, number};
  if (w->last) {
    if (w->at < w->last->n && same_entry(w->last->entries[w->at], f)) {
      w->at++;
      return 0;
    }
    if (diverge(w) < 0) return -1;
  }
  return fingerprint_append(w->fingerprint, f);
}

/* Notes an attribute of a tensor that DLPack cannot describe. */
static int note_attribute(walk *w, PyObject *tensor, const char *name) {
  PyObject *value = PyObject_GetAttrString(tensor, name);
  PyObject *text = value ? PyObject_Str(value) : NULL;
  const int result = text ? note(w, text, 0) : -1;
  Py_XDECREF(value);
  Py_XDECREF(text);
  return result;
}

static int note_unusual(walk *w, PyObject *tensor) {
  static const char *const names[] = {"shape", "dtype", "device", "layout"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (note_attribute(w, tensor, names[i]) < 0) return -1;
  return 0;
}

static int note_tensor(walk *w, PyObject *tensor) {
  PyObject *type = (PyObject *)Py_TYPE(tensor);
  if (note(w, type, 0) < 0) return -1;
  DLTensor t;
  if ((type != w->m->torch && type != w->m->parameter) ||
      w->m->exchange->dltensor_from_py_object_no_sync(tensor, &t) != 0) {
    PyErr_Clear();
    return note_unusual(w, tensor);
  }
  const int64_t dtype = t.dtype.code | t.dtype.bits << 8 | (int64_t)t.dtype.lanes << 16;
  if (note(w, NULL, dtype << 32 | t.ndim) < 0) return -1;
  if (note(w, NULL, (int64_t)t.device.device_type << 32 | t.device.device_id) < 0) return -1;
  for (int32_t d = 0; d < t.ndim; d++)
    if (note(w, NULL, t.shape[d]) < 0) return -1;
  return 0;
}

/* A lazy parameter has no shape before its module's hook has run. */
static int skip_lazy(const walk *w) {
  if (!w->called) return -1;
  PyErr_Clear();
  return 0;
}

static int visit_tensor(walk *w, int registry, PyObject *name, PyObject *tensor) {
  if (tensor == Py_None) return note(w, name, -1);
  PyObject *value = PyObject_GetAttr(tensor, w->m->names[OMC_NAME_REQUIRES_GRAD]);
  const int requires_grad = value ? PyObject_IsTrue(value) : -1;
  Py_XDECREF(value);
  bool is_new = false, unlisted = false;
  const int64_t place = number_of(&w->tensors, tensor, &is_new);
  if (requires_grad < 0 || place < 0) return -1;
  if (note(w, name, place << 1 | requires_grad) < 0) return -1;
  if (is_new && note_tensor(w, tensor) < 0) return skip_lazy(w);
  if (number_of(&w->listed[registry], tensor, &unlisted) < 0) return -1;
  return unlisted ? PyList_Append(w->lists[registry], tensor) : 0;
}

static int visit_registry(walk *w, int registry, PyObject *named) {
  PyObject *name, *tensor;
  Py_ssize_t position = 0;
  while (PyDict_Next(named, &position, &name, &tensor)) {
    Py_INCREF(name);
    Py_INCREF(tensor);
    const int result = visit_tensor(w, registry, name, tensor);
    Py_DECREF(name);
    Py_DECREF(tensor);
    if (result < 0) return -1;
  }
  return 0;
}

static int push(walk *w, PyObject *module) {
  PyObject **pending = with_room(w->pending, w->n_pending, &w->max_pending, sizeof *pending);
  if (!pending) return -1;
  w->pending = pending;
  w->pending[w->n_pending++] = Py_NewRef(module);
  return 0;
}

/* Children are pushed last first, so that they are visited in their order. */
static int push_children(walk *w, PyObject *children) {
  PyObject *name, *child;
  Py_ssize_t position = 0;
  const size_t first = w->n_pending;
  while (PyDict_Next(children, &position, &name, &child)) {
    if (note(w, name, child == Py_None) < 0) return -1;
    if (child != Py_None && push(w, child) < 0) return -1;
  }
  for (size_t i = first, j = w->n_pending; i + 1 < j; i++, j--) {
    PyObject *other = w->pending[i];
    w->pending[i] = w->pending[j - 1];
    w->pending[j - 1] = other;
  }
  return 0;
}

/* Its mode, which is a property of some modules. */
static int is_training(const walk *w, PyObject *module, PyObject *found) {
  if (found) return PyObject_IsTrue(found);
  PyObject *value = PyObject_GetAttr(module, w->m->names[OMC_NAME_TRAINING]);
  const int training = value ? PyObject_IsTrue(value) : -1;
  Py_XDECREF(value);
  return training;
}

static bool has_any(PyObject *const *found, int first, int last) {
  bool any = false;
  for (int i = first; i <= last; i++) any |= PyDict_Size(found[i]) > 0;
  return any;
}

/* Notes a module with what lies in its dictionary. */
static int visit_registries(walk *w, PyObject *module, PyObject *const *found) {
  PyObject *type = (PyObject *)Py_TYPE(module);
  const bool called = has_any(found, OMC_NAME_FORWARD_HOOKS, OMC_NAME_FORWARD_PRE_HOOKS);
  const bool hooked = has_any(found, OMC_NAME_BACKWARD_HOOKS, OMC_NAME_BACKWARD_PRE_HOOKS);
  w->called |= called;
  if (hooked) w->hooked = type;
  const int training = is_training(w, module, found[OMC_NAME_TRAINING]);
  if (training < 0 || note(w, type, hooked << 2 | called << 1 | training) < 0) return -1;
  if (visit_registry(w, 0, found[OMC_NAME_PARAMETERS]) < 0) return -1;
  if (visit_registry(w, 1, found[OMC_NAME_BUFFERS]) < 0) return -1;
  return push_children(w, found[OMC_NAME_MODULES]);
}

/* Whether a list's weak reference, if there is one, is to something else than an object. */
static int refers_elsewhere(PyObject *refs, Py_ssize_t i, const PyObject *object) {
  PyObject *ref = i < PyList_Size(refs) ? PyList_GetItem(refs, i) : Py_None;
  if (ref == Py_None) return 0;
  PyObject *referent = PyObject_CallNoArgs(ref);
  Py_XDECREF(referent);
  return referent ? referent != object : -1;
}

/* How the list of weights that a recurrent layer computes with stands to its parameters. */
enum {
  OMC_LIST_OF_PARAMETERS,
  OMC_LIST_DETACHED = -2, /* it has other tensors, and the layer does not see that */
  OMC_LIST_RENEWED = -3   /* some are parametrized, and others are not those it was made of */
};

/* A layer makes it anew where a parameter is not the one that the list's reference is to; of those
 * that are parametrized that is always so, but not before the layer has come to them. */
static int compare_list(PyObject *parameters, PyObject *weights, PyObject *names, PyObject *refs,
                        int *out) {
  bool same = PyList_Size(weights) == PyList_Size(names), current = true, parametrized = false;
  for (Py_ssize_t i = 0; i < PyList_Size(names); i++) {
    PyObject *parameter = PyDict_GetItemWithError(parameters, PyList_GetItem(names, i));
    if (!parameter && PyErr_Occurred()) return -1;
    const int elsewhere = parameter ? refers_elsewhere(refs, i, parameter) : 0;
    if (elsewhere < 0) return -1;
    parametrized |= !parameter;
    same &= i < PyList_Size(weights) && PyList_GetItem(weights, i) == parameter;
    current &= !elsewhere;
  }
  if (parametrized)
    *out = current ? OMC_LIST_OF_PARAMETERS : OMC_LIST_RENEWED;
  else
    *out = same || !current ? OMC_LIST_OF_PARAMETERS : OMC_LIST_DETACHED;
  return 0;
}

static int visit_flat_weights(walk *w, PyObject *module, PyObject *state, PyObject *parameters) {
  PyObject *lists[3];
  for (int i = 0; i < 3; i++) {
    lists[i] = PyDict_GetItemWithError(state, w->m->names[OMC_NAME_FLAT_WEIGHTS + i]);
    if (!lists[i]) return PyErr_Occurred() ? -1 : 0;
    if (!PyList_Check(lists[i])) return 0;
  }
  if (!parameters || !PyDict_Check(parameters)) return 0;
  int found = OMC_LIST_OF_PARAMETERS;
  if (compare_list(parameters, lists[0], lists[1], lists[2], &found) < 0) return -1;
  if (found == OMC_LIST_OF_PARAMETERS) return 0;
  PyObject *type = (PyObject *)Py_TYPE(module);
  *(found == OMC_LIST_DETACHED ? &w->detached : &w->renewed) = type;
  return note(w, type, found);
}

/* A module that is a wrapper is the one in it. */
static int visit_found(walk *w, PyObject *module, PyObject *const *found) {
  if (found[OMC_NAME_WRAPPED]) return push(w, found[OMC_NAME_WRAPPED]);
  int n = 0;
  while (n < OMC_N_REGISTRIES && found[n] && PyDict_Check(found[n])) n++;
  if (n == OMC_N_REGISTRIES) return visit_registries(w, module, found);
  w->opaque = (PyObject *)Py_TYPE(module);
  return note(w, w->opaque, -1);
}

/* What lies under OMC_NAME_* of modules, owned, as a subclass of Tensor may run anything when it is
 * looked at; compared on the way where it is known. */
static int find(walk *w, PyObject *module, PyObject *state, PyObject **found) {
  const int known = w->held ? omc_held_visit(w->held, w->checked, module, state, found) : 0;
  w->checked += known > 0;
  if (known != 0) return known;
  w->held = NULL;
  for (int i = 0; i < OMC_N_OF_MODULES; i++) {
    found[i] = Py_XNewRef(PyDict_GetItemWithError(state, w->m->names[i]));
    if (PyErr_Occurred()) return -1;
  }
  return 0;
}

static int visit_module(walk *w, PyObject *module) {
  bool is_new = false;
  if (number_of(&w->modules, module, &is_new) < 0) return -1;
  PyObject *state = is_new ? PyObject_GenericGetDict(module, NULL) : NULL;
  if (!state) return is_new ? -1 : 0;
  PyObject *found[OMC_N_OF_MODULES] = {NULL};
  int result = find(w, module, state, found);
  if (result >= 0) result = visit_flat_weights(w, module, state, found[OMC_NAME_PARAMETERS]);
  if (result >= 0) result = visit_found(w, module, found);
  for (int i = 0; i < OMC_N_OF_MODULES; i++) Py_XDECREF(found[i]);
  Py_DECREF(state);
  return result;
}

/* The name of a class, instead of the None in *out; nothing for NULL. */
static int name_of(PyObject *type, PyObject **out) {
  if (!type) return 0;
  PyObject *name = PyObject_GetAttrString(type, "__name__");
  if (!name) return -1;
  Py_DECREF(*out);
  *out = name;
  return 0;
}

static int walk_all(walk *w, PyObject *module) {
  if (!w->last && !(w->fingerprint = fingerprint_new(w->m))) return -1;
  if (!(w->lists[0] = PyList_New(0)) || !(w->lists[1] = PyList_New(0))) return -1;
  if (push(w, module) < 0) return -1;
  while (w->n_pending > 0) {
    PyObject *next = w->pending[--w->n_pending];
    const int result = visit_module(w, next);
    Py_DECREF(next);
    if (result < 0) return -1;
  }
  if (w->last && w->at < w->last->n && diverge(w) < 0) return -1;
  if (w->last) return 0;
  set_hash(w->fingerprint);
  if (name_of(w->hooked, &w->fingerprint->hooked) < 0) return -1;
  if (name_of(w->opaque, &w->fingerprint->opaque) < 0) return -1;
  if (name_of(w->detached, &w->fingerprint->detached) < 0) return -1;
  return name_of(w->renewed, &w->fingerprint->renewed);
}

PyObject *omc_scan(PyObject *module, PyObject *args) {
  const omc_module *m = PyModule_GetState(module);
  PyObject *root, *last = Py_None, *held = Py_None, *result = NULL;
  if (!PyArg_ParseTuple(args, "O|OO", &root, &last, &held)) return NULL;
  walk w = {.m = m};
  if (Py_TYPE(held) == (PyTypeObject *)m->types[OMC_TYPE_HELD]) w.held = held;
  if (Py_TYPE(last) == (PyTypeObject *)m->types[OMC_TYPE_FINGERPRINT])
    w.last = (fingerprint_object *)last;
  if (walk_all(&w, root) == 0) {
    PyObject *fingerprint = w.last ? last : (PyObject *)w.fingerprint;
    result = Py_BuildValue("(OOOn)", w.lists[0], w.lists[1], fingerprint, w.checked);
  }
  while (w.n_pending > 0) Py_DECREF(w.pending[--w.n_pending]);
  PyMem_Free(w.pending);
  PyMem_Free(w.modules.slots);
  PyMem_Free(w.tensors.slots);
  PyMem_Free(w.listed[0].slots);
  PyMem_Free(w.listed[1].slots);
  Py_XDECREF(w.lists[0]);
  Py_XDECREF(w.lists[1]);
  Py_XDECREF((PyObject *)w.fingerprint);
  return result;
}
