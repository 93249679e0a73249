/* What runs of a plan share: tables made once, and those of a phase at work. */
#ifndef OMC_RUN_EXEC_H
#define OMC_RUN_EXEC_H

#include "run/run.h"
#include "run/shared.h"

/* Operand `operand` lies `offset` bytes behind base pointer `base`. */
typedef struct omc_reloc {
  uint32_t operand, base;
  size_t offset;
} omc_reloc;

/* Where the operands of a plan are while one of its phases runs. */
typedef struct omc_work {
  struct omc_work *next; /* in exec->idle */
  omc_tensor *operands;  /* n_operands */
  void **bases;          /* n_bases: the arena, then the caller's tensors; see omc_exec_base */
  void **used;           /* n_bases: those of the phase */
} omc_work;

/* What is the same whenever a phase runs. */
typedef struct omc_track {
  uint32_t end_reloc;
  bool recurs; /* what it gives a device hangs on addresses and the seed alone */
  bool *uses;  /* n_bases: which it reads or writes */
  void *notes; /* of the provider's `give` */
} omc_track;

/* Attached to a plan, in its memory. Operands are the inputs and outputs of every step in turn,
 * then the source of every copy. */
typedef struct omc_exec {
  omc_plan *plan;
  omc_shared *shared;      /* a reference */
  omc_tensor *operands;    /* as every run starts: types, and the data of constants */
  uint32_t *first_operand; /* of each step; of the copies */
  omc_reloc *relocs;       /* phase by phase */
  omc_track *tracks;       /* by phase */
  uint32_t *end_reloc;     /* by step: of its operands */
  uint32_t *jobs; /* for the device, of the steps held together: by the first of them and, of a
                     stretch's that are fewer, n_steps further by the last */
  uint32_t n_operands, n_bases, n_relocs;
  omc_constants_taken constants; /* that the graph's values lie in */
  /* What follows is used under omc_exec_lock. */
  omc_step_time *times; /* by step; NULL unless profiled */
  omc_work *idle;       /* to be used again, */
  uint32_t n_idle;      /* not more than OMC_MAX_IDLE */
} omc_exec;

#define OMC_MAX_IDLE 8

struct omc_run {
  omc_exec *exec;
  void *arena; /* NULL: packed, or there is none; not looked at by others than backwards in `users`,
                  and whoever packs, which excludes them */
  void **lent; /* by input: borrowed memory for gradients, of those that lend; NULL: none do */
  void *home;  /* the queue of forward, for which what is lent was made */
  void *callback_state; /* what callbacks keep from forward to backward */
  uint64_t seed;
  /* Under omc_exec_lock. */
  void *queue;       /* of the last phase: the arena is freed in it */
  uint32_t users;    /* backwards under way */
  bool consumed;     /* what forward saved is gone */
  bool packed;       /* it is elsewhere, or somebody is about to copy it */
  bool lent_is_gone; /* a backward has written gradients there, or the run is packed */
};

/* Makes the tables for a new plan and attaches them. Unless it fails it takes over what was taken
 * for the plan. */
omc_status omc_exec_attach(omc_plan *plan, omc_shared *shared,
                           const omc_constants_taken *constants) OMC_MUST_USE;

/* One lock for the tables of all plans, held for a few instructions. */
void omc_exec_lock(void);
void omc_exec_unlock(void);

/* Number of the base pointer of the arena (index 0) or of the caller's tensor: inputs,
 * gradients of outputs, outputs, gradients of inputs. */
uint32_t omc_exec_base(const omc_plan *plan, omc_place place, uint32_t index);

/* Steps `begin` to before `end` of a phase; for UINT32_MAX to its end, with its copies. */
typedef struct omc_stretch {
  omc_phase phase;
  const bool *needed; /* of omc_plan_needed: the others are left out; NULL: none is */
  uint32_t begin, end;
} omc_stretch;

/* OMC_EINVALID if a base pointer of the caller that the stretch needs is NULL. */
omc_status omc_exec_check(const omc_exec *x, const omc_work *work,
                          const omc_stretch *stretch) OMC_MUST_USE;

/* Runs a stretch with the base pointers of `work`. */
omc_status omc_exec_run(omc_run *run, omc_work *work, const omc_stretch *stretch,
                        void *queue) OMC_MUST_USE;

/* Frees a list of idle work. */
void omc_work_free(const omc_exec *exec, omc_work *list);

#endif
