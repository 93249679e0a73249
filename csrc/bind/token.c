/* Tokens: tensors whose death frees a run. */
#include "base/lock.h"
#include "bind/bind.h"

struct omc_token {
  int64_t id; /* the tensor's only element */
  omc_run *run;
  int owners; /* the tensor, while it lives, and every call that holds the token */
  omc_token *prev, *next;
};

OMC_PROCESS_LOCK(live_lock)

static struct {
  int64_t last_id;
  omc_token *first;
} live;

void omc_token_release(omc_token *t) {
  live_lock_acquire();
  const bool last = --t->owners == 0;
  live_lock_release();
  if (!last) return;
  omc_run_destroy(t->run);
  omc_free(omc_default_allocator(), t, 1, sizeof *t);
}

static void tensor_freed(void *ctx, void *data, size_t bytes) {
  (void)data, (void)bytes;
  omc_token *t = ctx;
  live_lock_acquire();
  if (t->prev)
    t->prev->next = t->next;
  else
    live.first = t->next;
  if (t->next) t->next->prev = t->prev;
  live_lock_release();
  omc_token_release(t);
}

PyObject *omc_token_new(const omc_module *m, omc_run *run) {
  omc_token *t = omc_alloc_zero(omc_default_allocator(), 1, sizeof *t);
  if (!t) {
    omc_run_destroy(run);
    return PyErr_NoMemory();
  }
  t->run = run;
  t->owners = 1;
  live_lock_acquire();
  t->id = ++live.last_id;
  t->next = live.first;
  if (t->next) t->next->prev = t;
  live.first = t;
  live_lock_release();
  const omc_type type = {.dtype = OMC_I64};
  return omc_tensor_wrap(m, &t->id, sizeof t->id, &type, tensor_freed, t);
}

omc_token *omc_token_hold(const omc_module *m, PyObject *object) {
  void *data;
  omc_type type;
  if (omc_tensor_read(m, object, &data, &type) < 0) {
    omc_error_prefix("token");
    return NULL;
  }
  if (type.dtype != OMC_I64 || type.shape.rank != 0) {
    PyErr_SetString(PyExc_TypeError, "token: expected the token of a forward");
    return NULL;
  }
  int64_t id = *(const int64_t *)data;
  live_lock_acquire();
  omc_token *t = live.first;
  while (t && t->id != id) t = t->next;
  if (t) t->owners++;
  live_lock_release();
  if (!t)
    PyErr_Format(m->consumed_error, "the state of forward number %lld has been freed",
                 (long long)id);
  return t;
}

omc_run *omc_token_run(const omc_token *token) { return token->run; }
