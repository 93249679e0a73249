/* What a trainer is, for the files of this folder. */
#ifndef OMC_TRAIN_STATE_H
#define OMC_TRAIN_STATE_H

#include "optim/optim.h"
#include "provider.h"
#include "run/session.h"
#include "train/safetensors.h"
#include "train/trainer.h"

#define OMC_OF_MODEL "model/" /* begins names of parameters and buffers in files */

enum { OMC_NOBODYS = -1 };

/* A parameter, buffer or constant; what follows `group` is a parameter's that is trained, of f32 or
 * f64: gradients and states are of its type. */
typedef struct omc_train_variable {
  const char *name; /* in the file */
  omc_type type;
  void *data;
  size_t bytes;
  int32_t group; /* of the optimizer; OMC_NOBODYS: it is not trained */
  void *grad;    /* NULL: there never was one */
  void *fresh;   /* a gradient that is added to that */
  bool has_grad;
  void *state[OMC_OPTIM_STATES]; /* NULL: none so far */
  float *step;
} omc_train_variable;

/* One of several names in their order, and the number of what it names. */
typedef struct omc_train_name {
  const char *name;
  uint32_t index;
} omc_train_name;

/* From what to what an open size may be, and what it is in the present call; -1: not known yet. */
typedef struct omc_train_size {
  int64_t least, most, now;
} omc_train_size;

/* One of the modes: its graph, and the arrays that a call of it needs, by graph input or output. */
typedef struct omc_train_side {
  const omc_trainer *trainer;
  const char *name;
  omc_session *session; /* NULL: the file lacks this mode */
  uint32_t n_in, n_out; /* of the graph */
  uint32_t n_given, n_results;
  uint32_t *given;       /* n_given: graph inputs that the caller gives */
  const char **in_names; /* of those, and of the results */
  const char **out_names;
  uint32_t n_sizes; /* that are open */
  omc_train_size *sizes;
  int32_t (*size_of)[OMC_MAX_RANK]; /* of given inputs: which of them a dim is; -1: it is known */
  omc_train_variable **variables;   /* NULL: given */
  omc_type *types;
  void **data, **lent, **targets;
  void **out_data, **out_at, **grads; /* memory of outputs, where each is, its gradient */
  size_t *out_bytes;                  /* of out_data */
  bool *in_grads, *out_grads;
  omc_tensor *results;
  omc_type *out_types;
} omc_train_side;

struct omc_trainer {
  const omc_provider *provider;
  omc_arena arena;
  omc_safetensors file; /* texts alone */
  omc_train_variable *variables;
  uint32_t n_variables;
  omc_train_name *names; /* of the variables */
  omc_train_side sides[OMC_N_MODE];
  omc_optim_rule rule;
  omc_optim_numbers *groups;
  uint32_t n_groups;
  bool clips; /* gradients, to max_norm */
  double max_norm, lr_factor;
  uint64_t seed, steps;
};

/* The variable whose name begins and goes on so; NULL: there is none. */
omc_train_variable *omc_train_find(const omc_trainer *t, const char *beginning, const char *name);

/* Pooled memory of the trainer's provider. */
omc_status omc_train_alloc(const omc_trainer *t, size_t bytes, void **out) OMC_MUST_USE;
void omc_train_free(const omc_trainer *t, void *memory, size_t bytes); /* NULL is accepted */

/* The name of state i that the optimizer keeps of a parameter that is trained; NULL: none. */
const char *omc_train_state(const omc_trainer *t, const omc_train_variable *v, int i);

/* Makes of a file a trainer that is zero but for its provider and arena; whatever comes of it, it
 * is to be closed. Nothing of `file` is borrowed. */
omc_status omc_train_load(omc_trainer *t, const omc_safetensors *file) OMC_MUST_USE;

#endif
