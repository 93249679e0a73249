#include "train/trainer.h"

#include <float.h>
#include <string.h>

#include "base/element.h"
#include "train/state.h"

/* ---- memory ---- */

omc_status omc_train_alloc(const omc_trainer *t, size_t bytes, void **out) {
  return t->provider->alloc(t->provider->ctx, bytes, NULL, out);
}

void omc_train_free(const omc_trainer *t, void *memory, size_t bytes) {
  if (memory) t->provider->free(t->provider->ctx, memory, bytes, NULL);
}

const char *omc_train_state(const omc_trainer *t, const omc_train_variable *v, int i) {
  return omc_optim_state(t->rule, &t->groups[v->group], i);
}

/* ---- opening and closing ---- */

omc_status omc_trainer_open(const char *path, omc_trainer **out) {
  *out = NULL;
  omc_trainer *const t = omc_alloc_zero(omc_default_allocator(), 1, sizeof *t);
  if (!t) OMC_FAIL(ENOMEM, "a trainer");
  t->provider = omc_provider_host();
  t->lr_factor = 1;
  omc_arena_init(&t->arena, omc_default_allocator());
  omc_arena whole;
  omc_arena_init(&whole, omc_default_allocator());
  omc_safetensors file;
  omc_status status = omc_safetensors_read(path, &whole, &file);
  if (status == OMC_OK) status = omc_train_load(t, &file);
  omc_arena_deinit(&whole);
  if (status == OMC_OK)
    *out = t;
  else
    omc_trainer_close(t);
  return status;
}

static void free_variable(const omc_trainer *t, omc_train_variable *v) {
  omc_train_free(t, v->data, v->bytes);
  omc_train_free(t, v->grad, v->bytes);
  omc_train_free(t, v->fresh, v->bytes);
  omc_train_free(t, v->step, sizeof *v->step);
  for (int i = 0; i < OMC_OPTIM_STATES; i++) omc_train_free(t, v->state[i], v->bytes);
}

void omc_trainer_close(omc_trainer *t) {
  if (!t) return;
  for (omc_mode mode = 0; mode < OMC_N_MODE; mode++) {
    omc_train_side *const s = &t->sides[mode];
    omc_session_destroy(s->session);
    for (uint32_t i = 0; s->out_data && s->out_bytes && i < s->n_out; i++)
      omc_train_free(t, s->out_data[i], s->out_bytes[i]);
  }
  for (uint32_t i = 0; i < t->n_variables; i++) free_variable(t, &t->variables[i]);
  omc_arena_deinit(&t->arena);
  omc_free(omc_default_allocator(), t, 1, sizeof *t);
}

/* ---- what it takes and gives ---- */

uint32_t omc_trainer_n_inputs(const omc_trainer *t, omc_mode mode) {
  return t->sides[mode].n_given;
}

uint32_t omc_trainer_n_outputs(const omc_trainer *t, omc_mode mode) {
  return t->sides[mode].n_results;
}

const char *omc_trainer_input(const omc_trainer *t, omc_mode mode, uint32_t i, omc_type *type) {
  const omc_train_side *const s = &t->sides[mode];
  if (type) *type = omc_session_template(s->session)->inputs[s->given[i]]->type;
  return s->in_names[i];
}

const char *omc_trainer_output(const omc_trainer *t, omc_mode mode, uint32_t i) {
  return t->sides[mode].out_names[i];
}

omc_status omc_trainer_tensor(const omc_trainer *t, const char *name, omc_tensor *out) {
  const omc_train_variable *const v = omc_train_find(t, OMC_OF_MODEL, name);
  if (!v) OMC_FAIL(EINVALID, "the model has no tensor '%s'", name);
  *out = (omc_tensor){v->data, &v->type};
  return OMC_OK;
}

omc_status omc_trainer_gradient(const omc_trainer *t, const char *name, omc_tensor *out) {
  const omc_train_variable *const v = omc_train_find(t, OMC_OF_MODEL, name);
  if (!v) OMC_FAIL(EINVALID, "the model has no tensor '%s'", name);
  if (!v->has_grad) OMC_FAIL(EINVALID, "'%s' has no gradient", name);
  *out = (omc_tensor){v->grad, &v->type};
  return OMC_OK;
}

static bool is_of_model(const omc_train_variable *v) {
  return strncmp(v->name, OMC_OF_MODEL, strlen(OMC_OF_MODEL)) == 0;
}

uint32_t omc_trainer_n_tensors(const omc_trainer *t) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < t->n_variables; i++) n += is_of_model(&t->variables[i]);
  return n;
}

const char *omc_trainer_tensor_name(const omc_trainer *t, uint32_t i) {
  const omc_train_variable *v = t->variables;
  for (; !is_of_model(v) || i; v++) i -= is_of_model(v);
  return v->name + strlen(OMC_OF_MODEL);
}

omc_status omc_trainer_scale_learning_rate(omc_trainer *t, double factor) {
  if (!(factor >= 0 && factor <= DBL_MAX))
    OMC_FAIL(EINVALID, "the factor of learning rates is %g, expected 0 or more", factor);
  t->lr_factor = factor;
  return OMC_OK;
}

void omc_trainer_seed(omc_trainer *t, uint64_t seed) { t->seed = seed, t->steps = 0; }

/* ---- running ---- */

/* Outputs are written, and read by a backward, where they were in the call before. */
static bool is_of_outputs(const omc_trainer *t, const void *data) {
  for (omc_mode mode = 0; mode < OMC_N_MODE; mode++) {
    const omc_train_side *const s = &t->sides[mode];
    for (uint32_t k = 0; k < s->n_out; k++) {
      const uintptr_t at = (uintptr_t)data, from = (uintptr_t)s->out_data[k];
      if (from && at >= from && at < from + s->out_bytes[k]) return true;
    }
  }
  return false;
}

/* Whether the open sizes of an input are in their ranges, and as in those before it. */
static omc_status check_sizes(const omc_train_side *s, uint32_t i, const omc_shape *shape) {
  for (int32_t d = 0; d < shape->rank; d++) {
    if (s->size_of[i][d] < 0) continue;
    omc_train_size *const size = &s->sizes[s->size_of[i][d]];
    const int64_t now = shape->dims[d];
    if (size->now < 0) size->now = now;
    if (now != size->now)
      OMC_FAIL(ESHAPE, "the size %d of the input '%s' of %s is %lld, where it was %lld before", d,
               s->in_names[i], s->name, (long long)now, (long long)size->now);
    if (now < size->least)
      OMC_FAIL(ESHAPE, "the size %d of the input '%s' of %s is %lld, expected %lld or more", d,
               s->in_names[i], s->name, (long long)now, (long long)size->least);
    if (now > size->most)
      OMC_FAIL(ESHAPE, "the size %d of the input '%s' of %s is %lld, expected %lld at most", d,
               s->in_names[i], s->name, (long long)now, (long long)size->most);
  }
  return OMC_OK;
}

static omc_status check_given(const omc_train_side *s, uint32_t i, const omc_tensor *given) {
  const omc_type *const type = given->type;
  const omc_type *const want = &omc_session_template(s->session)->inputs[s->given[i]]->type;
  char a[OMC_TYPE_TEXT], b[OMC_TYPE_TEXT];
  if (!type || type->dtype >= OMC_N_DTYPE || type->shape.rank < 0 ||
      type->shape.rank > OMC_MAX_RANK)
    OMC_FAIL(EINVALID, "the input '%s' of %s has no type", s->in_names[i], s->name);
  bool fits = type->shape.rank == want->shape.rank;
  for (int32_t d = 0; fits && d < type->shape.rank; d++) {
    const int64_t size = want->shape.dims[d];
    fits = type->shape.dims[d] >= 0 && (size < 0 || type->shape.dims[d] == size);
  }
  if (type->dtype != want->dtype || !fits)
    return omc_fail(fits ? OMC_EDTYPE : OMC_ESHAPE, "the input '%s' of %s is %s, expected %s",
                    s->in_names[i], s->name, omc_type_text(type, a, sizeof a),
                    omc_type_text(want, b, sizeof b));
  if (!given->data && omc_shape_numel(&type->shape) > 0)
    OMC_FAIL(EINVALID, "the input '%s' of %s has no data", s->in_names[i], s->name);
  if (is_of_outputs(s->trainer, given->data))
    OMC_FAIL(EINVALID, "the input '%s' of %s is an output, of which a copy may be given",
             s->in_names[i], s->name);
  return check_sizes(s, i, &type->shape);
}

/* Sets the arrays by graph input for a call. */
static omc_status take_inputs(omc_train_side *s, const omc_tensor *inputs) {
  for (uint32_t i = 0; i < s->n_sizes; i++) s->sizes[i].now = -1;
  for (uint32_t i = 0; i < s->n_given; i++) {
    OMC_TRY(check_given(s, i, &inputs[i]));
    s->types[s->given[i]] = *inputs[i].type;
    s->data[s->given[i]] = inputs[i].data;
  }
  for (uint32_t i = 0; i < s->n_in; i++)
    if (s->variables[i]) s->data[i] = s->variables[i]->data;
  return OMC_OK;
}

/* Memory for the outputs of a plan, but for those that are written over inputs. */
static omc_status take_outputs(const omc_trainer *t, omc_train_side *s, const omc_plan *plan) {
  const omc_graph *const g = plan->graph;
  for (uint32_t k = 0; k < s->n_out; k++) {
    const omc_value *const over = omc_over(g, k);
    size_t bytes;
    s->out_types[k] = omc_in(g->result, k)->type;
    OMC_TRY(omc_type_bytes(&s->out_types[k], &bytes));
    if (!over && (!s->out_data[k] || s->out_bytes[k] != bytes)) {
      omc_train_free(t, s->out_data[k], s->out_bytes[k]);
      s->out_data[k] = NULL;
      OMC_TRY(omc_train_alloc(t, bytes, &s->out_data[k]));
      s->out_bytes[k] = bytes;
    }
    s->out_at[k] = over ? s->data[over->index] : s->out_data[k];
    s->results[k] = (omc_tensor){s->out_at[k], &s->out_types[k]};
  }
  if (s->n_out && s->out_grads[0] &&
      (!omc_dtype_is_float(s->out_types[0].dtype) ||
       omc_shape_numel(&s->out_types[0].shape) != 1)) {
    char text[OMC_TYPE_TEXT];
    OMC_FAIL(EINVALID, "the loss is %s, expected one float",
             omc_type_text(&s->out_types[0], text, sizeof text));
  }
  return OMC_OK;
}

/* Memory for the gradients of a plan: those that are there already are added to. */
static omc_status take_gradients(const omc_trainer *t, omc_train_side *s, const omc_plan *plan) {
  const omc_graph *const g = plan->graph;
  for (uint32_t i = 0; i < s->n_in; i++) {
    s->targets[i] = s->lent[i] = NULL;
    omc_train_variable *const v = s->variables[i];
    if (!g->n_grads || !omc_in(g->result, s->n_out + i)) continue;
    void **const at = v->has_grad ? &v->fresh : &v->grad;
    if (!*at) OMC_TRY(omc_train_alloc(t, v->bytes, at));
    s->targets[i] = *at;
    if (plan->lends[i]) s->lent[i] = *at;
  }
  return OMC_OK;
}

/* grad += fresh, n elements of f32 or f64. */
static void add_elements(omc_dtype dtype, void *grad, const void *fresh, int64_t n) {
  if (dtype == OMC_F32)
    for (int64_t i = 0; i < n; i++) ((float *)grad)[i] += ((const float *)fresh)[i];
  else
    for (int64_t i = 0; i < n; i++) ((double *)grad)[i] += ((const double *)fresh)[i];
}

static void note_gradients(omc_train_side *s) {
  for (uint32_t i = 0; i < s->n_in; i++) {
    omc_train_variable *const v = s->variables[i];
    if (!s->targets[i]) continue;
    if (v->has_grad)
      add_elements(v->type.dtype, v->grad, v->fresh, omc_shape_numel(&v->type.shape));
    v->has_grad = true;
  }
}

static omc_status go_back(omc_train_side *s, omc_run *run) {
  double one;
  omc_element_set_float(s->out_types[0].dtype, &one, 0, 1);
  s->grads[0] = &one;
  omc_backward backward = {
      .inputs = s->data, .outputs = s->out_at, .grads = s->grads, .results = s->targets};
  OMC_TRY(omc_run_enter(run, &backward));
  OMC_TRY(omc_run_backward(run, &backward));
  note_gradients(s);
  return OMC_OK;
}

static omc_status run_plan(omc_trainer *t, omc_train_side *s, omc_plan *plan) {
  omc_run *run = NULL;
  OMC_TRY(take_outputs(t, s, plan));
  OMC_TRY(take_gradients(t, s, plan));
  if (s == &t->sides[OMC_TRAINING]) t->steps++;
  const uint64_t seed = t->seed + 0x9e3779b97f4a7c15u * t->steps;
  OMC_TRY(omc_run_forward(plan, s->data, s->out_at, plan->lends_any ? s->lent : NULL, seed, NULL,
                          &run));
  const omc_status status = run ? go_back(s, run) : OMC_OK;
  omc_run_destroy(run);
  return status;
}

static omc_status run_side(omc_trainer *t, omc_mode mode, const omc_tensor *inputs,
                           const omc_tensor **outputs) {
  omc_train_side *const s = &t->sides[mode];
  if (!s->session) OMC_FAIL(EINVALID, "the file has no graph of %s", s->name);
  OMC_TRY(take_inputs(s, inputs));
  const omc_signature signature = {.inputs = s->types,
                                   .in_grads = s->in_grads,
                                   .out_grads = s->out_grads,
                                   .n_backwards = mode == OMC_TRAINING};
  omc_plan *plan;
  OMC_TRY(omc_session_plan(s->session, &signature, &plan));
  const omc_status status = run_plan(t, s, plan);
  omc_plan_release(plan);
  if (outputs) *outputs = s->results;
  return status;
}

omc_status omc_trainer_step(omc_trainer *t, const omc_tensor *inputs, double *loss,
                            const omc_tensor **outputs) {
  OMC_TRY(run_side(t, OMC_TRAINING, inputs, outputs));
  const omc_train_side *const s = &t->sides[OMC_TRAINING];
  if (loss) *loss = omc_element_float(s->out_types[0].dtype, s->out_data[0], 0);
  return OMC_OK;
}

omc_status omc_trainer_evaluate(omc_trainer *t, const omc_tensor *inputs,
                                const omc_tensor **outputs) {
  return run_side(t, OMC_EVALUATION, inputs, outputs);
}

void omc_trainer_drop_gradients(omc_trainer *t) {
  for (uint32_t i = 0; i < t->n_variables; i++) t->variables[i].has_grad = false;
}

/* Memory for the states of a parameter that has none yet. */
static omc_status begin_states(omc_trainer *t, omc_train_variable *v) {
  for (int i = 0; i < OMC_OPTIM_STATES; i++) {
    if (!omc_train_state(t, v, i) || v->state[i]) continue;
    OMC_TRY(omc_train_alloc(t, v->bytes, &v->state[i]));
    memset(v->state[i], 0, v->bytes);
  }
  return OMC_OK;
}

static omc_status update(omc_trainer *t, omc_arena *arena) {
  omc_optim_numbers *const groups = OMC_NEW_ARRAY(arena, omc_optim_numbers, t->n_groups);
  omc_optim_tensor *const tensors = OMC_NEW_ARRAY(arena, omc_optim_tensor, t->n_variables);
  if (!groups || !tensors) OMC_FAIL(ENOMEM, "a step of %u tensors", t->n_variables);
  for (uint32_t i = 0; i < t->n_groups; i++) {
    groups[i] = t->groups[i];
    groups[i].lr *= t->lr_factor;
  }
  uint32_t n = 0;
  for (uint32_t i = 0; i < t->n_variables; i++) {
    omc_train_variable *const v = &t->variables[i];
    if (!v->has_grad) continue;
    OMC_TRY(begin_states(t, v));
    omc_optim_tensor *const to = &tensors[n++];
    *to = (omc_optim_tensor){.n = omc_shape_numel(&v->type.shape),
                             .dtype = v->type.dtype,
                             .state_dtype = v->type.dtype,
                             .param = v->data,
                             .grad = v->grad,
                             .step = v->step,
                             .first = *v->step == 0,
                             .numbers = &groups[v->group]};
    memcpy(to->state, v->state, sizeof v->state);
  }
  const omc_optim_step step = {.rule = t->rule,
                               .tensors = tensors,
                               .n = n,
                               .clips = t->clips,
                               .max_norm = t->max_norm,
                               .norm_type = 2};
  OMC_TRY(omc_optim_check(&step));
  OMC_TRY(t->provider->step(t->provider->ctx, &step, NULL));
  omc_trainer_drop_gradients(t);
  return OMC_OK;
}

omc_status omc_trainer_update(omc_trainer *t) {
  if (!t->n_groups) OMC_FAIL(EINVALID, "the file has no optimizer");
  omc_arena arena;
  omc_arena_init(&arena, omc_default_allocator());
  const omc_status status = update(t, &arena);
  omc_arena_deinit(&arena);
  return status;
}
