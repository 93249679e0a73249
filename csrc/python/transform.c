/* transform() and describe(): a graph given as text after one stage of the pipeline, for tests and
 * for files. */
#include "autodiff/autodiff.h"
#include "graph/verify.h"
#include "passes/passes.h"
#include "passes/rewrite.h"
#include "python/binding.h"

typedef struct request {
  const omc_module *m;
  omc_graph *graph;                       /* replaced by specialize */
  omc_graph *template;                    /* what a bound graph borrows from */
  PyObject *types, *in_grads, *out_grads; /* borrowed, Py_None: not given */
  const omc_callbacks *callbacks;         /* NULL: no TorchCall can be typed */
} request;

static omc_status specialize_stage(request *r) {
  uint32_t n = r->graph->n_inputs;
  omc_type *types = omc_alloc_zero(omc_default_allocator(), n + 1, sizeof *types);
  PyObject *list = r->types == Py_None ? PyTuple_New(0) : PySequence_Tuple(r->types);
  omc_status status = OMC_OK;
  if (!types || !list) status = omc_fail(OMC_ENOMEM, "types of %u inputs", n);
  for (uint32_t i = 0; status == OMC_OK && i < n; i++) {
    types[i] = r->graph->inputs[i]->type;
    if ((Py_ssize_t)i >= PyTuple_Size(list)) continue;
    Py_ssize_t bytes;
    size_t used;
    const char *text = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(list, (Py_ssize_t)i), &bytes);
    status = text ? omc_type_parse(text, (size_t)bytes, &types[i], &used)
                  : omc_fail(OMC_ECALLBACK, "types");
  }
  omc_graph *bound = NULL;
  if (status == OMC_OK)
    status = omc_specialize(r->graph, types, r->callbacks, omc_default_allocator(), &bound);
  if (status == OMC_OK) {
    r->template = r->graph;
    r->graph = bound;
  }
  Py_XDECREF(list);
  omc_free(omc_default_allocator(), types, n + 1, sizeof *types);
  return status;
}

/* Without masks: every float output gives, and every input marked `grad` wants, a gradient. */
static omc_status differentiate_stage(request *r) {
  omc_graph *g = r->graph;
  size_t n = (size_t)g->n_outputs + g->n_inputs;
  bool *mask = omc_alloc_zero(omc_default_allocator(), n + 1, sizeof *mask), *in = NULL;
  if (!mask) OMC_FAIL(ENOMEM, "%zu gradient flags", n);
  in = mask + g->n_outputs;
  for (uint32_t k = 0; k < g->n_outputs; k++)
    mask[k] = omc_dtype_is_float(omc_in(g->result, k)->type.dtype);
  for (uint32_t i = 0; i < g->n_inputs; i++) in[i] = g->inputs[i]->requires_grad;
  omc_status status = OMC_OK;
  if (r->out_grads != Py_None &&
      omc_bools_from_py(r->out_grads, "out_grads", mask, g->n_outputs) < 0)
    status = omc_fail(OMC_ECALLBACK, "out_grads");
  if (status == OMC_OK && r->in_grads != Py_None &&
      omc_bools_from_py(r->in_grads, "in_grads", in, g->n_inputs) < 0)
    status = omc_fail(OMC_ECALLBACK, "in_grads");
  if (status == OMC_OK) status = omc_differentiate(g, 1, mask, in);
  omc_free(omc_default_allocator(), mask, n + 1, sizeof *mask);
  return status;
}

static omc_status parse_stage(request *r) {
  (void)r;
  return OMC_OK;
}
static omc_status fold_stage(request *r) { return omc_fold(r->graph); }
static omc_status canonicalize_stage(request *r) { return omc_canonicalize(r->graph); }
static omc_status cse_stage(request *r) { return omc_cse(r->graph); }
static omc_status settle_stage(request *r) {
  bool changed;
  return omc_settle(r->graph, &changed);
}
static omc_status save_stage(request *r) { return omc_save_overwritten(r->graph); }
static omc_status trim_stage(request *r) {
  omc_trim(r->graph);
  return OMC_OK;
}
static omc_status channels_last_stage(request *r) { return omc_lay_channels_last(r->graph); }
static omc_status gather_casts_stage(request *r) { return omc_gather_casts(r->graph); }
static omc_status widen_stage(request *r) { return omc_widen_again(r->graph, omc_provider_host()); }
/* In as little memory as there can be. */
static omc_status recompute_stage(request *r) {
  static const omc_budget none = {0, SIZE_MAX};
  return omc_recompute(r->graph, omc_provider_host(), false, &none, omc_default_allocator());
}
static omc_status fuse_stage(request *r) { return omc_fuse(r->graph, omc_provider_host()); }

static const struct {
  const char *name;
  omc_status (*run)(request *r);
  bool binds; /* the stage needs a typed graph */
} stages[] = {{"parse", parse_stage, false},
              {"specialize", specialize_stage, false},
              {"fold", fold_stage, true},
              {"canonicalize", canonicalize_stage, true},
              {"cse", cse_stage, true},
              {"differentiate", differentiate_stage, true},
              {"settle", settle_stage, true},
              {"fuse", fuse_stage, true},
              {"trim", trim_stage, true},
              {"save", save_stage, true},
              {"widen", widen_stage, true},
              {"channels_last", channels_last_stage, true},
              {"gather_casts", gather_casts_stage, true},
              {"recompute", recompute_stage, true}};

static omc_status run_stage(request *r, const char *stage) {
  if (strncmp(stage, "rule:", 5) == 0) {
    const omc_rule *rule = omc_rule_find(stage + 5);
    if (!rule) OMC_FAIL(EINVALID, "no rewrite rule is named '%s'", stage + 5);
    const omc_rules one = {rule, 1};
    uint32_t changes;
    OMC_TRY(specialize_stage(r));
    OMC_TRY(omc_apply_rules(r->graph, &one, &changes));
    return omc_graph_verify(r->graph, true);
  }
  for (size_t i = 0; i < sizeof stages / sizeof *stages; i++) {
    if (strcmp(stages[i].name, stage) != 0) continue;
    if (stages[i].binds) OMC_TRY(specialize_stage(r));
    OMC_TRY(stages[i].run(r));
    return omc_graph_verify(r->graph, stages[i].binds);
  }
  OMC_FAIL(EINVALID, "no stage is named '%s'", stage);
}

/* Parses the text, applies the stage, and gives what `show` makes of the graph. */
static PyObject *after_stage(PyObject *module, PyObject *args, PyObject *kwargs,
                             PyObject *(*show)(const omc_module *m, const omc_graph *g)) {
  static char *names[] = {"text",     "stage",     "types",     "out_grads",
                          "in_grads", "constants", "callbacks", NULL};
  request r = {PyModule_GetState(module), NULL, NULL, Py_None, Py_None, Py_None, NULL};
  const char *text, *stage;
  Py_ssize_t n;
  PyObject *constants = Py_None, *called = Py_None, *result = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s#s|OOOOO", names, &text, &n, &stage, &r.types,
                                   &r.out_grads, &r.in_grads, &constants, &called))
    return NULL;
  omc_callbacks_ctx ctx = {r.m, omc_provider_host(), called};
  const omc_callbacks callbacks = omc_make_callbacks(&ctx);
  if (called != Py_None) r.callbacks = &callbacks;
  omc_given_constants given = {NULL, NULL};
  if (constants != Py_None && omc_given_constants_init(&given, r.m, constants) < 0) return NULL;
  omc_status status =
      omc_graph_parse(omc_default_allocator(), text, (size_t)n,
                      given.dict ? omc_given_constants_find : NULL, &given, &r.graph);
  if (status == OMC_OK) status = run_stage(&r, stage);
  result = status == OMC_OK ? show(r.m, r.graph) : omc_raise(r.m, status);
  omc_graph_destroy(r.graph);
  omc_graph_destroy(r.template);
  omc_given_constants_drop(&given);
  return result;
}

PyObject *omc_transform(PyObject *module, PyObject *args, PyObject *kwargs) {
  return after_stage(module, args, kwargs, omc_graph_text);
}

PyObject *omc_describe(PyObject *module, PyObject *args, PyObject *kwargs) {
  return after_stage(module, args, kwargs, omc_graph_description);
}

PyObject *omc_list_rules(PyObject *module, PyObject *unused) {
  static const char *const claims[OMC_N_CLAIMS] = {"exact",       "finite",    "sums",
                                                   "finite sums", "unrounded", "layer"};
  (void)module, (void)unused;
  PyObject *dict = PyDict_New();
  for (size_t i = 0; i < OMC_N_RULE_SETS; i++)
    for (uint32_t r = 0; dict && r < omc_rule_sets[i]->n; r++) {
      const omc_rule *rule = &omc_rule_sets[i]->rules[r];
      omc_enter(&dict, rule->name, PyUnicode_FromString(claims[rule->claim]));
    }
  return dict;
}
