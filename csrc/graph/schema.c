#include "graph/schema.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define ATTR(name_, kind_, ...) {.name = #name_, .kind = OMC_ATTR_##kind_, __VA_ARGS__}
#define INT(name, ...) ATTR(name, INT, .otherwise.i = __VA_ARGS__)
#define INTS(name, ...) ATTR(name, INTS, .otherwise.i = __VA_ARGS__)
#define FLOAT(name, ...) ATTR(name, FLOAT, .otherwise.f = __VA_ARGS__)
#define FLOATS(name, ...) ATTR(name, FLOATS, .otherwise.f = __VA_ARGS__)
#define STRING(name, ...) ATTR(name, STRING, .otherwise.s = __VA_ARGS__)
#define STRINGS(name, ...) ATTR(name, STRINGS, .otherwise.s = __VA_ARGS__)
#define BOOL(name, ...) ATTR(name, INT, .otherwise.i = __VA_ARGS__, WITHIN(0, 1))
#define DTYPE(name, ...) ATTR(name, INT, .otherwise.i = __VA_ARGS__, .is_dtype = true)
#define DTYPES(name, ...) ATTR(name, INTS, .otherwise.i = __VA_ARGS__, .is_dtype = true)

#define REQUIRED 0, .required = true
#define ABSENT 0, .absent = true
#define WITHIN(low_, high_) .ranged = true, .low = (low_), .high = (high_)
#define AT_LEAST(low) WITHIN(low, INFINITY)
#define ONE_OF(...) \
  .choices = (const char *const[]) { __VA_ARGS__, NULL }

/* Each list begins with an entry of no name: without it some would be empty. */
#define OMC_OP(op, family, domain, ...) \
  static const omc_attr_schema of_##op[] = {{.kind = OMC_ATTR_INT}, __VA_ARGS__};
#include "ops.def"
#undef OMC_OP

static const struct {
  const omc_attr_schema *list;
  uint32_t n;
} schemas[OMC_N_OPS] = {
#define OMC_OP(op, family, domain, ...) {of_##op + 1, sizeof of_##op / sizeof *of_##op - 1},
#include "ops.def"
#undef OMC_OP
};

const omc_attr_schema *omc_schema_of(omc_op_id op, uint32_t *n) {
  *n = op < OMC_N_OPS ? schemas[op].n : 0;
  return op < OMC_N_OPS ? schemas[op].list : NULL;
}

const omc_attr_schema *omc_schema_find(omc_op_id op, const char *name) {
  uint32_t n;
  const omc_attr_schema *list = omc_schema_of(op, &n);
  for (uint32_t i = 0; i < n; i++)
    if (!strcmp(list[i].name, name)) return &list[i];
  return NULL;
}

/* ---- checks ---- */

enum { VALUE_TEXT = 80, CHOICES_TEXT = 200 };

static const char *const kinds[] = {[OMC_ATTR_INT] = "int",       [OMC_ATTR_FLOAT] = "float",
                                    [OMC_ATTR_STRING] = "string", [OMC_ATTR_INTS] = "ints",
                                    [OMC_ATTR_FLOATS] = "floats", [OMC_ATTR_STRINGS] = "strings"};

const char *omc_attr_kind_name(omc_attr_kind kind) { return kinds[kind]; }

static const char *element_text(const omc_attr *a, uint32_t i, char *buf) {
  const omc_attr one = omc_attr_element(a, i);
  if (one.kind == OMC_ATTR_INT) snprintf(buf, VALUE_TEXT, "%lld", (long long)one.v.i);
  if (one.kind == OMC_ATTR_FLOAT) snprintf(buf, VALUE_TEXT, "%g", one.v.f);
  if (one.kind == OMC_ATTR_STRING) snprintf(buf, VALUE_TEXT, "\"%.60s\"", one.v.s);
  return buf;
}

/* The whole, or how a list begins. */
static const char *value_text(const omc_attr *a, char *buf) {
  char first[VALUE_TEXT];
  if (!omc_attr_is_list(a)) return element_text(a, 0, buf);
  if (a->n == 0)
    snprintf(buf, VALUE_TEXT, "[]");
  else
    snprintf(buf, VALUE_TEXT, "[%.70s%s]", element_text(a, 0, first), a->n > 1 ? ", ..." : "");
  return buf;
}

static omc_status check_range(const omc_node *node, const omc_attr *a, uint32_t i,
                              const omc_attr_schema *schema) {
  char text[VALUE_TEXT];
  const omc_attr one = omc_attr_element(a, i);
  const double value = one.kind == OMC_ATTR_INT ? (double)one.v.i : one.v.f;
  if (value >= schema->low && value <= schema->high) return OMC_OK;
  if (isinf(schema->high))
    OMC_NODE_FAIL(node, EINVALID, "attribute '%s' is %s, not at least %.10g", a->name,
                  element_text(a, i, text), schema->low);
  OMC_NODE_FAIL(node, EINVALID, "attribute '%s' is %s, not from %.10g to %.10g", a->name,
                element_text(a, i, text), schema->low, schema->high);
}

static omc_status check_choice(const omc_node *node, const omc_attr *a, uint32_t i,
                               const omc_attr_schema *schema) {
  char text[VALUE_TEXT], all[CHOICES_TEXT] = "";
  const char *value = omc_attr_element(a, i).v.s;
  for (const char *const *choice = schema->choices; *choice; choice++) {
    if (!strcmp(*choice, value)) return OMC_OK;
    const size_t used = strlen(all);
    snprintf(all + used, sizeof all - used, "%s\"%s\"", used ? " or " : "", *choice);
  }
  OMC_NODE_FAIL(node, EUNSUPPORTED, "attribute '%s' is %s, not %s", a->name,
                element_text(a, i, text), all);
}

static omc_status check_value(const omc_node *node, const omc_attr *a, uint32_t i,
                              const omc_attr_schema *schema) {
  omc_dtype dtype;
  if (schema->ranged) OMC_TRY(check_range(node, a, i, schema));
  if (schema->choices) OMC_TRY(check_choice(node, a, i, schema));
  if (schema->is_dtype && !omc_dtype_from_onnx(omc_attr_element(a, i).v.i, &dtype))
    OMC_NODE_FAIL(node, EUNSUPPORTED, "attribute '%s' is %lld, not the ONNX code of a dtype",
                  a->name, (long long)omc_attr_element(a, i).v.i);
  return OMC_OK;
}

static omc_status check_attr(const omc_node *node, const omc_attr *a) {
  char text[VALUE_TEXT];
  const omc_attr_schema *schema = omc_schema_find(node->op, a->name);
  if (!schema)
    OMC_NODE_FAIL(node, EUNSUPPORTED, "it has no attribute '%s', which is %s", a->name,
                  value_text(a, text));
  const bool widens = a->kind == OMC_ATTR_INT && schema->kind == OMC_ATTR_FLOAT;
  const bool empty = a->kind == OMC_ATTR_INTS && a->n == 0 && schema->kind >= OMC_ATTR_INTS;
  if (a->kind != schema->kind && !widens && !empty)
    OMC_NODE_FAIL(node, EINVALID, "attribute '%s' is %s, of kind %s, not %s", a->name,
                  value_text(a, text), kinds[a->kind], kinds[schema->kind]);
  for (uint32_t i = 0; i < a->n; i++) OMC_TRY(check_value(node, a, i, schema));
  return OMC_OK;
}

omc_status omc_schema_check(const omc_node *node) {
  uint32_t n;
  const omc_attr_schema *list = omc_schema_of(node->op, &n);
  for (uint32_t i = 0; i < node->n_attr; i++) OMC_TRY(check_attr(node, &node->attr[i]));
  for (uint32_t i = 0; i < n; i++)
    if (list[i].required && !omc_node_attr(node, list[i].name))
      OMC_NODE_FAIL(node, EINVALID, "attribute '%s' is missing", list[i].name);
  return OMC_OK;
}
