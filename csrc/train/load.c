#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graph/number.h"
#include "train/state.h"

#define OPTIMIZER "optimizer/" /* begins names of what an optimizer keeps in files */
enum { MOST_PLANS = 16, KEY_BYTES = 64 };

static const char *const mode_names[OMC_N_MODE] = {"training", "evaluation"};

#define NEW_ARRAY(trainer, type, n, out)                         \
  do {                                                           \
    (out) = OMC_NEW_ARRAY(&(trainer)->arena, type, (n));         \
    if (!(out)) OMC_FAIL(ENOMEM, "%lld " #type, (long long)(n)); \
  } while (0)

/* ---- lines of text ---- */

static uint32_t count_lines(const char *text) {
  uint32_t n = 0;
  for (; *text; text++) n += *text == '\n' || !text[1];
  return n;
}

/* The next line of *text, each of which but the last ends with '\n', without that; copied. */
static omc_status next_line(omc_trainer *t, const char **text, const char **out) {
  const size_t n = strcspn(*text, "\n");
  *out = omc_arena_text(&t->arena, *text, n);
  if (!*out) OMC_FAIL(ENOMEM, "a line of %lld bytes", (long long)n);
  *text += n + ((*text)[n] == '\n');
  return OMC_OK;
}

/* A text of the file, and its lines; none if there is no such text. */
static omc_status lines_of(omc_trainer *t, const char *beginning, const char *end,
                           const char ***lines, uint32_t *n) {
  char name[KEY_BYTES];
  (void)snprintf(name, sizeof name, "%s%s", beginning, end);
  const char *text = omc_safetensors_text(&t->file, name);
  *n = text ? count_lines(text) : 0;
  NEW_ARRAY(t, const char *, *n, *lines);
  for (uint32_t i = 0; i < *n; i++) OMC_TRY(next_line(t, &text, &(*lines)[i]));
  return OMC_OK;
}

/* Says which line, number i, of a text of the file a failure is about, if that is of its words. */
static omc_status in_line(const char *beginning, const char *end, uint32_t i, omc_status status) {
  if (status != OMC_EPARSE) return status;
  OMC_FAIL(EPARSE, "'%s%s', line %u: %s", beginning, end, i + 1, omc_status_detail());
}

/* ---- names ---- */

static int by_name(const void *a, const void *b) {
  return strcmp(((const omc_train_name *)a)->name, ((const omc_train_name *)b)->name);
}

/* A name that is put together of these, of which the last is NULL. */
typedef struct parts {
  const char *text[5];
} parts;

static int compare_parts(const void *key, const void *with) {
  const char *name = ((const omc_train_name *)with)->name;
  for (const char *const *part = ((const parts *)key)->text; *part; part++) {
    const size_t n = strlen(*part);
    const int order = strncmp(*part, name, n);
    if (order != 0) return order;
    name += n;
  }
  return *name ? -1 : 0;
}

/* The number of what is named so among n names in order; -1: there is none. */
static int64_t find_name(const omc_train_name *names, uint32_t n, const parts *name) {
  const omc_train_name *const at = n ? bsearch(name, names, n, sizeof *names, compare_parts) : NULL;
  return at ? (int64_t)at->index : -1;
}

static void sort_names(omc_train_name *names, uint32_t n) {
  if (n) qsort(names, n, sizeof *names, by_name);
}

/* What is read, and the names of its tensors. */
typedef struct source {
  const omc_safetensors *file;
  const omc_train_name *names;
} source;

static omc_status name_tensors(omc_trainer *t, const omc_safetensors *file,
                               const omc_train_name **out) {
  omc_train_name *names;
  NEW_ARRAY(t, omc_train_name, file->n_tensors, names);
  for (uint32_t i = 0; i < file->n_tensors; i++)
    names[i] = (omc_train_name){file->tensors[i].name, i};
  sort_names(names, file->n_tensors);
  *out = names;
  return OMC_OK;
}

/* ---- variables ---- */

static omc_status copy_in(omc_trainer *t, const omc_named_tensor *from, void **out) {
  OMC_TRY(omc_train_alloc(t, from->bytes, out));
  if (from->bytes) memcpy(*out, from->data, from->bytes);
  return OMC_OK;
}

static omc_status read_variables(omc_trainer *t, const omc_safetensors *file) {
  NEW_ARRAY(t, omc_train_variable, file->n_tensors, t->variables);
  for (uint32_t i = 0; i < file->n_tensors; i++) {
    const omc_named_tensor *const from = &file->tensors[i];
    if (strncmp(from->name, OPTIMIZER, strlen(OPTIMIZER)) == 0) continue;
    omc_train_variable *const v = &t->variables[t->n_variables];
    *v = (omc_train_variable){.type = from->type, .bytes = from->bytes, .group = OMC_NOBODYS};
    v->name = omc_arena_text(&t->arena, from->name, strlen(from->name));
    if (!v->name) OMC_FAIL(ENOMEM, "the name '%s'", from->name);
    OMC_TRY(copy_in(t, from, &v->data));
    t->n_variables++;
  }
  NEW_ARRAY(t, omc_train_name, t->n_variables, t->names);
  for (uint32_t i = 0; i < t->n_variables; i++)
    t->names[i] = (omc_train_name){t->variables[i].name, i};
  sort_names(t->names, t->n_variables);
  return OMC_OK;
}

omc_train_variable *omc_train_find(const omc_trainer *t, const char *beginning, const char *name) {
  const int64_t i = find_name(t->names, t->n_variables, &(parts){{beginning, name}});
  return i < 0 ? NULL : &t->variables[i];
}

/* ---- the optimizer ---- */

/* Numbers as "lr=0.001 beta1=0.9 ..."; those left out are 0. */
static omc_status read_numbers(const char *line, omc_optim_numbers *out) {
  *out = (omc_optim_numbers){0};
  for (const char *at = line; *at; at += *at == ' ') {
    const size_t n_name = strcspn(at, "= "), n_all = strcspn(at, " ");
    const size_t n_number = n_all > n_name ? n_all - n_name - 1 : 0;
    double *const number = omc_optim_number(out, at, n_name);
    if (!number || !omc_number_read(at + n_name + 1, n_number, number))
      OMC_FAIL(EPARSE, "the optimizer's group '%s': expected NAME=NUMBER", line);
    at += n_all;
  }
  return OMC_OK;
}

/* The tensor that a file has for a state of a parameter, or for "step"; NULL: none. */
static const omc_named_tensor *find_state(const source *from, const char *state,
                                          const omc_train_variable *v) {
  const parts name = {{OPTIMIZER, state, "/", v->name + strlen(OMC_OF_MODEL)}};
  const int64_t i = find_name(from->names, from->file->n_tensors, &name);
  return i < 0 ? NULL : &from->file->tensors[i];
}

static omc_status read_states(omc_trainer *t, const source *from, omc_train_variable *v) {
  const omc_type one = {OMC_F32, {0, {0}}};
  const omc_named_tensor *const step = find_state(from, "step", v);
  OMC_TRY(omc_train_alloc(t, sizeof *v->step, (void **)&v->step));
  *v->step = 0;
  if (!step) return OMC_OK;
  if (!omc_type_equal(&step->type, &one)) OMC_FAIL(EPARSE, "'%s' is no single f32", step->name);
  memcpy(v->step, step->data, sizeof *v->step);
  for (int i = 0; i < OMC_OPTIM_STATES; i++) {
    const char *const name = omc_train_state(t, v, i);
    if (!name) continue;
    const omc_named_tensor *const state = find_state(from, name, v);
    if (!state && i == 2) continue; /* amsgrad, asked for since */
    if (!state || !omc_type_equal(&state->type, &v->type))
      OMC_FAIL(EPARSE, "'%s' has a step, and no %s of its shape", v->name, name);
    OMC_TRY(copy_in(t, state, &v->state[i]));
  }
  return OMC_OK;
}

/* "GROUP NAME", of a parameter that is trained. */
static omc_status read_parameter(omc_trainer *t, const source *from, const char *line) {
  double group;
  const size_t n = strcspn(line, " ");
  if (!line[n] || !omc_number_read(line, n, &group) || !(group >= 0 && group < t->n_groups))
    OMC_FAIL(EPARSE, "the parameter '%s': expected the number of one of %u groups and a name", line,
             t->n_groups);
  omc_train_variable *const v = omc_train_find(t, OMC_OF_MODEL, line + n + 1);
  if (!v || (v->type.dtype != OMC_F32 && v->type.dtype != OMC_F64))
    OMC_FAIL(EPARSE, "the parameter '%s' is no tensor of f32 or f64 in the file", line + n + 1);
  if (v->group != OMC_NOBODYS) OMC_FAIL(EPARSE, "the parameter '%s' comes twice", line + n + 1);
  v->group = (int32_t)group;
  return read_states(t, from, v);
}

static omc_status read_optimizer(omc_trainer *t, const omc_safetensors *file) {
  const char *const rule = omc_safetensors_text(file, "optimizer");
  const char **lines;
  uint32_t n;
  if (!rule) return OMC_OK;
  if (!omc_optim_rule_find(rule, &t->rule) || t->rule == OMC_RULE_SCALE)
    OMC_FAIL(EUNSUPPORTED, "the optimizer '%s'", rule);
  const char *const max_norm = omc_safetensors_text(file, "optimizer.max_grad_norm");
  t->clips = max_norm != NULL;
  if (max_norm &&
      (!omc_number_read(max_norm, strlen(max_norm), &t->max_norm) || !(t->max_norm > 0)))
    OMC_FAIL(EPARSE, "the optimizer's max_grad_norm is '%s'", max_norm);
  OMC_TRY(lines_of(t, "optimizer", ".groups", &lines, &t->n_groups));
  NEW_ARRAY(t, omc_optim_numbers, t->n_groups, t->groups);
  for (uint32_t i = 0; i < t->n_groups; i++)
    OMC_TRY(in_line("optimizer", ".groups", i, read_numbers(lines[i], &t->groups[i])));
  source from = {file, NULL};
  OMC_TRY(name_tensors(t, file, &from.names));
  OMC_TRY(lines_of(t, "optimizer", ".parameters", &lines, &n));
  for (uint32_t i = 0; i < n; i++)
    OMC_TRY(in_line("optimizer", ".parameters", i, read_parameter(t, &from, lines[i])));
  return OMC_OK;
}

/* ---- a mode ---- */

static omc_status find_constant(void *ctx, const char *name, const void **data, size_t *bytes) {
  const omc_train_side *const s = ctx;
  char beginning[KEY_BYTES];
  (void)snprintf(beginning, sizeof beginning, "%s/", s->name);
  const omc_train_variable *const v = omc_train_find(s->trainer, beginning, name);
  if (!v) OMC_FAIL(EPARSE, "the file has no tensor '%s%s'", beginning, name);
  *data = v->data, *bytes = v->bytes;
  return OMC_OK;
}

/* The name of a variable, or ">" and the name of what the caller gives: graph input i. `met`, by
 * variable: it is an input already. */
static omc_status read_input(omc_trainer *t, omc_train_side *s, uint32_t i, const char *line,
                             bool *met) {
  s->types[i] = omc_session_template(s->session)->inputs[i]->type;
  if (line[0] == '>') {
    s->in_names[s->n_given] = line + 1;
    s->given[s->n_given++] = i;
    return OMC_OK;
  }
  omc_train_variable *const v = omc_train_find(t, "", line);
  if (!v) OMC_FAIL(EPARSE, "the file has no tensor '%s', which %s reads", line, s->name);
  if (met[v - t->variables]) OMC_FAIL(EPARSE, "the tensor '%s' is two inputs of %s", line, s->name);
  met[v - t->variables] = true;
  if (!omc_type_equal(&v->type, &s->types[i]))
    OMC_FAIL(EPARSE, "the tensor '%s' has another type than in the graph of %s", line, s->name);
  s->variables[i] = v;
  s->in_grads[i] = v->group != OMC_NOBODYS;
  return OMC_OK;
}

/* Graph inputs in order. */
static omc_status read_inputs(omc_trainer *t, omc_train_side *s) {
  const omc_graph *const g = omc_session_template(s->session);
  const char **lines;
  uint32_t n;
  bool *met;
  OMC_TRY(lines_of(t, s->name, ".inputs", &lines, &n));
  if (n != g->n_inputs)
    OMC_FAIL(EPARSE, "the graph of %s has %u inputs, and %u are named", s->name, g->n_inputs, n);
  s->n_in = n;
  NEW_ARRAY(t, uint32_t, n, s->given);
  NEW_ARRAY(t, const char *, n, s->in_names);
  NEW_ARRAY(t, omc_train_variable *, n, s->variables);
  NEW_ARRAY(t, omc_type, n, s->types);
  NEW_ARRAY(t, bool, n, s->in_grads);
  NEW_ARRAY(t, void *, n, s->data);
  NEW_ARRAY(t, void *, n, s->lent);
  NEW_ARRAY(t, void *, n, s->targets);
  NEW_ARRAY(t, bool, t->n_variables, met);
  for (uint32_t i = 0; i < n; i++)
    OMC_TRY(in_line(s->name, ".inputs", i, read_input(t, s, i, lines[i], met)));
  return OMC_OK;
}

/* "LEAST MOST", where `?` is no bound. */
static omc_status read_range(const char *line, omc_train_size *out) {
  const size_t n = strcspn(line, " ");
  const char *const most = line + n + (line[n] == ' ');
  double least = 0, greatest = (double)INT64_MAX;
  const bool is_open = strcmp(most, "?") == 0;
  if (!omc_number_read(line, n, &least) || !(least >= 0 && least < 0x1p62) ||
      (!is_open && (!omc_number_read(most, strlen(most), &greatest) || !(greatest >= least) ||
                    !(greatest < 0x1p62))))
    OMC_FAIL(EPARSE, "the range '%s': expected two numbers", line);
  *out = (omc_train_size){(int64_t)least, is_open ? INT64_MAX : (int64_t)greatest, -1};
  return OMC_OK;
}

/* The dims of a given input: `s` and the number of a range for those that are open. */
static omc_status read_dims(omc_train_side *s, uint32_t i, const char *line) {
  const omc_shape *const shape = &omc_session_template(s->session)->inputs[s->given[i]]->type.shape;
  const char *at = line;
  for (int32_t d = 0; d < shape->rank; d++) {
    const size_t n = strcspn(at, " ");
    double size = -1;
    const bool is_open = at[0] == 's',
               found = n > is_open && omc_number_read(at + is_open, n - is_open, &size);
    s->size_of[i][d] = is_open && size >= 0 && size < s->n_sizes ? (int32_t)size : -1;
    if (!found ||
        (is_open ? shape->dims[d] >= 0 || s->size_of[i][d] < 0 : size != (double)shape->dims[d]))
      OMC_FAIL(EPARSE, "the sizes '%s' of '%s' are not those of the graph", line, s->in_names[i]);
    at += n + (at[n] == ' ');
  }
  if (*at) OMC_FAIL(EPARSE, "the sizes '%s' of '%s' are too many", line, s->in_names[i]);
  return OMC_OK;
}

static omc_status read_sizes(omc_trainer *t, omc_train_side *s) {
  const char **lines;
  uint32_t n;
  OMC_TRY(lines_of(t, s->name, ".ranges", &lines, &s->n_sizes));
  NEW_ARRAY(t, omc_train_size, s->n_sizes, s->sizes);
  for (uint32_t i = 0; i < s->n_sizes; i++)
    OMC_TRY(in_line(s->name, ".ranges", i, read_range(lines[i], &s->sizes[i])));
  OMC_TRY(lines_of(t, s->name, ".sizes", &lines, &n));
  if (n != s->n_given)
    OMC_FAIL(EPARSE, "%s takes %u tensors, and there are sizes of %u", s->name, s->n_given, n);
  s->size_of = omc_arena_alloc(&t->arena, n, sizeof *s->size_of);
  if (!s->size_of) OMC_FAIL(ENOMEM, "sizes of %u tensors", n);
  for (uint32_t i = 0; i < n; i++)
    OMC_TRY(in_line(s->name, ".sizes", i, read_dims(s, i, lines[i])));
  return OMC_OK;
}

/* That outputs are written over nothing that the caller gives. */
static omc_status check_over(const omc_train_side *s) {
  const omc_graph *const g = omc_session_template(s->session);
  for (uint32_t k = 0; k < g->n_outputs; k++) {
    const omc_value *const over = omc_over(g, k);
    if (!over || s->variables[over->index]) continue;
    uint32_t i = 0;
    while (s->given[i] != over->index) i++;
    OMC_FAIL(EPARSE, "%s writes over its input '%s'", s->name, s->in_names[i]);
  }
  return OMC_OK;
}

static omc_status read_outputs(omc_trainer *t, omc_train_side *s, omc_mode mode) {
  const omc_graph *const g = omc_session_template(s->session);
  s->n_out = g->n_outputs;
  OMC_TRY(lines_of(t, s->name, ".outputs", &s->out_names, &s->n_results));
  if (s->n_results > s->n_out || (mode == OMC_TRAINING && s->n_results == 0))
    OMC_FAIL(EPARSE, "the graph of %s has %u outputs, and %u are named", s->name, s->n_out,
             s->n_results);
  if (mode == OMC_TRAINING && omc_over(g, 0)) OMC_FAIL(EPARSE, "the loss is written over an input");
  NEW_ARRAY(t, void *, s->n_out, s->out_data);
  NEW_ARRAY(t, void *, s->n_out, s->out_at);
  NEW_ARRAY(t, size_t, s->n_out, s->out_bytes);
  NEW_ARRAY(t, omc_type, s->n_out, s->out_types);
  NEW_ARRAY(t, omc_tensor, s->n_out, s->results);
  NEW_ARRAY(t, bool, s->n_out, s->out_grads);
  NEW_ARRAY(t, void *, s->n_out, s->grads);
  if (mode == OMC_TRAINING) s->out_grads[0] = true;
  return OMC_OK;
}

static omc_status read_side(omc_trainer *t, omc_mode mode) {
  omc_train_side *const s = &t->sides[mode];
  s->trainer = t, s->name = mode_names[mode];
  const char *const text = omc_safetensors_text(&t->file, s->name);
  if (!text) return OMC_OK;
  const omc_status status =
      omc_session_create(text, strlen(text), find_constant, s, NULL, t->provider,
                         omc_default_allocator(), MOST_PLANS, &s->session);
  if (status != OMC_OK) return omc_fail(status, "'%s', %s", s->name, omc_status_detail());
  OMC_TRY(read_inputs(t, s));
  OMC_TRY(read_sizes(t, s));
  OMC_TRY(check_over(s));
  return read_outputs(t, s, mode);
}

/* ---- the whole ---- */

/* Texts outlive the file's tensors, which are copied. */
static omc_status keep_texts(omc_trainer *t, const omc_safetensors *file) {
  omc_named_text *texts;
  NEW_ARRAY(t, omc_named_text, file->n_texts, texts);
  for (uint32_t i = 0; i < file->n_texts; i++) {
    const omc_named_text *const from = &file->texts[i];
    texts[i].name = omc_arena_text(&t->arena, from->name, strlen(from->name));
    texts[i].text = omc_arena_text(&t->arena, from->text, strlen(from->text));
    if (!texts[i].name || !texts[i].text) OMC_FAIL(ENOMEM, "the text '%s'", from->name);
  }
  t->file = (omc_safetensors){.texts = texts, .n_texts = file->n_texts};
  return OMC_OK;
}

omc_status omc_train_load(omc_trainer *t, const omc_safetensors *file) {
  const char *const version = omc_safetensors_text(file, "ortmodule_c");
  if (!version || strcmp(version, "1") != 0)
    OMC_FAIL(EINVALID, "a file of version '%s' of ortmodule_c.artifacts, expected '1'",
             version ? version : "none");
  OMC_TRY(keep_texts(t, file));
  OMC_TRY(read_variables(t, file));
  OMC_TRY(read_optimizer(t, file));
  for (omc_mode mode = 0; mode < OMC_N_MODE; mode++) OMC_TRY(read_side(t, mode));
  return OMC_OK;
}

static omc_status add_state(omc_arena *arena, const omc_train_variable *v, const char *state,
                            const omc_type *type, const void *data, omc_safetensors *file,
                            omc_named_tensor *tensors) {
  const char *const name = v->name + strlen(OMC_OF_MODEL);
  const size_t n = strlen(OPTIMIZER) + strlen(state) + strlen(name) + 2;
  char *const full = omc_arena_alloc(arena, n, 1);
  if (!full) OMC_FAIL(ENOMEM, "the name of a state of '%s'", v->name);
  (void)snprintf(full, n, OPTIMIZER "%s/%s", state, name);
  omc_named_tensor *const to = &tensors[file->n_tensors++];
  *to = (omc_named_tensor){.name = full, .type = *type, .data = data};
  return omc_type_bytes(type, &to->bytes);
}

static omc_status save(const omc_trainer *t, const char *path, omc_arena *arena) {
  const size_t most = (size_t)t->n_variables * (2 + OMC_OPTIM_STATES);
  omc_named_tensor *const tensors = OMC_NEW_ARRAY(arena, omc_named_tensor, most);
  if (!tensors) OMC_FAIL(ENOMEM, "names of %lld tensors", (long long)most);
  omc_safetensors file = t->file;
  file.tensors = tensors, file.n_tensors = 0;
  for (uint32_t i = 0; i < t->n_variables; i++) {
    const omc_train_variable *const v = &t->variables[i];
    tensors[file.n_tensors++] = (omc_named_tensor){v->name, v->type, v->data, v->bytes};
    if (!v->step || *v->step == 0) continue;
    const omc_type one = {OMC_F32, {0, {0}}};
    OMC_TRY(add_state(arena, v, "step", &one, v->step, &file, tensors));
    for (int s = 0; s < OMC_OPTIM_STATES; s++)
      if (v->state[s])
        OMC_TRY(
            add_state(arena, v, omc_train_state(t, v, s), &v->type, v->state[s], &file, tensors));
  }
  return omc_safetensors_write(path, &file);
}

omc_status omc_trainer_save(const omc_trainer *t, const char *path) {
  omc_arena arena;
  omc_arena_init(&arena, omc_default_allocator());
  const omc_status status = save(t, path, &arena);
  omc_arena_deinit(&arena);
  return status;
}
