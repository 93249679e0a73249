/* The Python side of the core: the only folder that includes Python.h and DLPack. */
#ifndef OMC_PYTHON_BINDING_H
#define OMC_PYTHON_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

#include "python/dlpack.h"
#include "run/session.h"

/* What is read from the dictionary of a torch.nn.Module (or of our wrapper), of a tensor, of a
 * recurrent layer, and of the state of an optimizer. */
enum {
  OMC_NAME_FORWARD_HOOKS,
  OMC_NAME_FORWARD_PRE_HOOKS,
  OMC_NAME_BACKWARD_HOOKS,
  OMC_NAME_BACKWARD_PRE_HOOKS,
  OMC_NAME_PARAMETERS,
  OMC_NAME_BUFFERS,
  OMC_NAME_MODULES,
  OMC_N_REGISTRIES,
  OMC_NAME_TRAINING = OMC_N_REGISTRIES,
  OMC_NAME_WRAPPED,
  OMC_N_OF_MODULES,
  OMC_NAME_REQUIRES_GRAD = OMC_N_OF_MODULES,
  OMC_NAME_FLAT_WEIGHTS,
  OMC_NAME_FLAT_WEIGHTS_NAMES,
  OMC_NAME_FLAT_WEIGHT_REFS,
  OMC_NAME_GRAD,
  OMC_NAME_STEP,
  OMC_NAME_MASTER,
  OMC_N_NAMES
};

enum {
  OMC_TYPE_SESSION,
  OMC_TYPE_PLAN,
  OMC_TYPE_RUN,
  OMC_TYPE_BACKWARD,
  OMC_TYPE_FINGERPRINT,
  OMC_TYPE_HELD,
  OMC_N_TYPES
};

typedef struct omc_module {
  const DLPackExchangeAPI *exchange; /* torch's; lives for the process */
  PyObject *torch;                   /* torch.Tensor, kept so that the table stays valid */
  PyObject *parameter;               /* torch.nn.Parameter */
  PyObject *empty_strided, *device;  /* torch's */
  PyObject *empty_here, *here;   /* torch's: (dims, strides, dtype) -> a tensor on its current GPU;
                                    the number of that. NULL: it has no such functions */
  PyObject *dtypes[OMC_N_DTYPE]; /* torch.float32 and so on */
  PyObject *precision_of;        /* torch's: (device, kind of op) -> "ieee", "tf32"; or NULL */
  PyObject *names[OMC_N_NAMES];
  PyObject *types[OMC_N_TYPES];
  PyObject *consumed_error; /* RuntimeError raised where state is gone */
  PyObject *device_error;   /* the same, for what a device has failed to do */
} omc_module;

/* objects.c. What all types and functions of the module are written with. */

/* A zeroed object of a type of the module; NULL with an exception set. */
void *omc_object_new(PyObject *type);

/* The end of a dealloc: frees an object that holds nothing any more. */
void omc_object_free(PyObject *object);

/* Takes over `item`, a new reference, into the list, or under a name into the dict. Where there is
 * no item, or no room, *container becomes NULL with the exception set, and stays so. */
void omc_append(PyObject **list, PyObject *item);
void omc_enter(PyObject **dict, const char *name, PyObject *item);

/* errors.c. The class of the exception that belongs to a failure: a new reference; NULL with an
 * exception set. */
PyObject *omc_exception_of(const omc_module *m, omc_status status);

/* Raises the exception that belongs to a failure, with its detail; returns NULL. An
 * OMC_ECALLBACK failure has its exception set already. */
PyObject *omc_raise(const omc_module *m, omc_status status);

/* tensors.c. All need the GIL. */

/* Finds torch's exchange table; raises and returns -1 if this torch has none. */
int omc_exchange_find(omc_module *m);

/* Reads a torch tensor without owning it: data pointer and type. Raises and returns -1 unless it
 * is a dense row-major tensor on the provider's device, of a known dtype and rank. */
int omc_tensor_read(const omc_module *m, const omc_provider *provider, PyObject *tensor,
                    void **data, omc_type *type);

/* The queue that torch works in now on the provider's device, which is told what precision torch
 * wants of products; -1 with an exception set. */
int omc_current_queue(const omc_module *m, const omc_provider *provider, void **out);

/* Puts a prefix, made as by PyUnicode_FromFormat, before the message of the exception that is set;
 * returns -1. */
int omc_error_prefix(const char *format, ...);

/* A torch tensor over fresh pooled memory of the provider, made for `queue` and freed in it by the
 * last owner, from any thread and without the GIL; *data points to it. */
PyObject *omc_tensor_pooled(const omc_module *m, const omc_provider *provider, const omc_type *type,
                            void *queue, void **data);

/* A torch tensor for a result that `queue`, in which torch works now, is to write; *data points to
 * its elements. Where the provider leaves that to torch it is of torch's making, so that
 * `record_stream` and autograd's order of streams keep its memory; else it is pooled. What torch is
 * asked for is put into *kept, owned by its user, where it is there at the next call for the type;
 * NULL: nobody keeps it. */
PyObject *omc_tensor_new(const omc_module *m, const omc_provider *provider, const omc_type *type,
                         void *queue, PyObject **kept, void **data);

/* A torch tensor over memory that its user must not keep beyond the owner's life. */
PyObject *omc_tensor_view(const omc_module *m, const omc_provider *provider, void *data,
                          const omc_type *type);

/* "f32", (2, 3) of a type; and the reverse, -1 with an exception set if it is not such a pair. */
PyObject *omc_type_to_py(const omc_type *type);
int omc_type_from_py(PyObject *pair, omc_type *out);

/* callbacks.c. Callbacks into a Python object of callbacks; `ctx` is an omc_callbacks_ctx that must
 * outlive them. */
typedef struct omc_callbacks_ctx {
  const omc_module *module;
  const omc_provider *provider; /* of the tensors */
  PyObject *object;             /* owned; NULL: no callbacks */
} omc_callbacks_ctx;
omc_callbacks omc_make_callbacks(omc_callbacks_ctx *ctx);

/* given_constants.c. The constants given beside a text, tensors of the host's by name: a copy of
 * the caller's mapping, which may make a tensor at each look-up and change at any time. */
typedef struct omc_given_constants {
  const omc_module *module;
  PyObject *dict; /* owned; NULL: none were given */
} omc_given_constants;

/* Copies a mapping; -1 with an exception, and nothing to drop then. */
int omc_given_constants_init(omc_given_constants *c, const omc_module *m, PyObject *mapping);
void omc_given_constants_drop(omc_given_constants *c); /* so is one of zeros */

/* An omc_find_data, `ctx` being an omc_given_constants: what it finds stays until that is dropped.
 */
omc_status omc_given_constants_find(void *ctx, const char *name, const void **data, size_t *bytes);

/* session_object.c, plan_object.c, run_object.c, backward_object.c, transform.c, infer_op.c */
typedef struct omc_session_object {
  PyObject_HEAD omc_session *session;
  omc_callbacks_ctx callbacks;
  omc_given_constants constants; /* plans point into their memory */
  PyObject *last; /* the plan that was asked for last, while somebody has it; borrowed */
} omc_session_object;

/* What omc_plan_uses says of a backward. */
typedef struct omc_backward_uses {
  omc_uses *inputs;
  uint32_t *outputs, *grads;
} omc_backward_uses;

typedef struct omc_plan_object {
  PyObject_HEAD omc_plan *plan;
  omc_session_object *session; /* keeps template, constants and callbacks alive */
  PyObject *in_grads, *out_grads;
  PyObject *reads_inputs, *reads_outputs;
  PyObject **requests;     /* of outputs, then gradients of inputs: see omc_tensor_new */
  omc_backward_uses *uses; /* by backward; all NULL until they are asked for */
} omc_plan_object;

/* The object of a plan, the one there was if it is the session's last. */
PyObject *omc_plan_object_of(const omc_module *m, omc_session_object *session, omc_plan *plan,
                             PyObject *in_grads,                           /* a tuple */
                             PyObject *out_grads /* a tuple of tuples */); /* takes over plan */
extern PyType_Spec omc_session_spec;
PyObject *omc_run_object_new(const omc_module *m, PyObject *session, omc_run *run,
                             PyObject *lent); /* takes over run */
/* The tensors whose memory forward was lent, borrowed; and lets go of them. `object` is a run. */
PyObject *omc_run_object_lent(PyObject *object);
void omc_run_object_drop_lent(PyObject *object);
omc_run *omc_run_object_get(const omc_module *m,
                            PyObject *object); /* NULL with TypeError: no run */
extern PyType_Spec omc_plan_spec;
extern PyType_Spec omc_run_spec;
extern PyType_Spec omc_backward_spec;

/* Data pointers of n tensors, each of the type of its value; None (or a position beyond the
 * sequence's use, wanted[i] false) gives NULL. -1 with an exception naming the tensor. */
int omc_read_pointers(const omc_module *m, const omc_provider *provider, PyObject *tuple,
                      uint32_t n, omc_value *const *values, const bool *wanted, const char *what,
                      void **out);

/* Memory for the gradient of an input, of its type: what forward was lent for it, if `lent`, a list
 * by input, is there and it lends, else new memory. */
PyObject *omc_result_memory(const omc_module *m, const omc_plan_object *plan, uint32_t input,
                            PyObject *lent, void *queue, void **out);

/* Borrowed from the plan; NULL with MemoryError. */
const omc_backward_uses *omc_plan_object_uses(omc_plan_object *plan, uint32_t backward);

size_t omc_needed_bytes(const omc_plan *plan); /* of what Plan.needed gives */

/* Methods of Plan: _C.pyi tells what they do. */
PyObject *omc_plan_begin(PyObject *plan, PyObject *args, PyObject *kwargs);
PyObject *omc_plan_backward(PyObject *plan, PyObject *args, PyObject *kwargs);

PyObject *omc_transform(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *omc_infer_types(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *omc_describe(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *omc_list_rules(PyObject *module, PyObject *unused);
PyObject *omc_take_step(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *omc_gather_rows(PyObject *module, PyObject *args);

/* describe.c. A graph as its text, and as plain Python objects: _C.pyi tells which. */
PyObject *omc_graph_text(const omc_module *m, const omc_graph *g);
PyObject *omc_graph_description(const omc_module *m, const omc_graph *g);

/* fingerprint.c. scan(module, last fingerprint or None, a Held or None) -> (parameters, buffers,
 * fingerprint, number of leading dicts of the Held that were found unchanged on the way); each
 * tensor is listed once, and `fingerprint` is `last` itself where nothing else has changed. */
extern PyType_Spec omc_fingerprint_spec;
PyObject *omc_scan(PyObject *module, PyObject *args);

/* same.c. Numbers, strings, lists, tuples, dicts and instances of `by_value` classes are compared
 * by value and type, those of `by_repr` classes by how they are written, all else by identity. */
typedef struct omc_comparison {
  PyObject *by_value, *by_repr; /* frozensets of classes */
} omc_comparison;

/* Whether two values are interchangeable; -1 with an exception set. Both must be owned meanwhile,
 * as a comparison may run anything. */
int omc_same(const omc_comparison *how, PyObject *now, PyObject *was);

/* held.c. The type Held: _C.pyi tells how it is made. */
extern PyType_Spec omc_held_spec;

/* Compares dict number `at` of a Held: 1 if it is this one of this owner and unchanged, and then
 * what lies under each OMC_NAME_* of modules is in `found`, new references, or NULL where there is
 * nothing. Otherwise `found` is empty, and the result 0, or -1 with an exception set. */
int omc_held_visit(PyObject *held, Py_ssize_t at, PyObject *owner, PyObject *dict,
                   PyObject *found[OMC_N_OF_MODULES]);

/* Fills n bools from a sequence of truth values; -1 with ValueError naming `what` otherwise. */
int omc_bools_from_py(PyObject *sequence, const char *what, bool *out, uint32_t n);

#endif
