#include <inttypes.h>

#include "plan/plan.h"

static void print_value(const omc_plan *plan, const omc_value *v, FILE *file) {
  static const char *const places[] = {[OMC_AT_NONE] = "none",     [OMC_AT_INPUT] = "input",
                                       [OMC_AT_GRAD] = "grad",     [OMC_AT_CONST] = "const",
                                       [OMC_AT_OUTPUT] = "output", [OMC_AT_RESULT] = "result",
                                       [OMC_AT_ARENA] = "arena",   [OMC_AT_LENT] = "lent"};
  if (!v) {
    fputs(" _", file);
    return;
  }
  const omc_slot *slot = &plan->slots[v->id];
  char type[OMC_TYPE_TEXT];
  fprintf(file, " %" PRIu32 ":%s@%s", v->id, omc_type_text(&v->type, type, sizeof type),
          places[slot->place]);
  if (slot->place != OMC_AT_ARENA && slot->place != OMC_AT_CONST)
    fprintf(file, "%" PRIu32, slot->index);
  if (slot->place == OMC_AT_ARENA || slot->place == OMC_AT_LENT)
    fprintf(file, "+%zu", slot->offset);
  if (slot->alias != v->id) fprintf(file, "(=%" PRIu32 ")", slot->alias);
}

static void print_step(const omc_plan *plan, uint32_t s, FILE *file) {
  const omc_step *step = &plan->steps[s];
  char text[OMC_NODE_TEXT];
  fprintf(file, "%" PRIu32 " %s:", s, omc_node_text(step->node, text, sizeof text));
  for (uint32_t i = 0; i < step->n_in; i++) print_value(plan, omc_in(step->node, i), file);
  fputs(" ->", file);
  for (uint32_t k = 0; k < step->n_out; k++) print_value(plan, omc_out(step->node, k), file);
  if (step->workspace_bytes)
    fprintf(file, " scratch %zu@arena+%zu", step->workspace_bytes, step->workspace_offset);
  omc_cost cost;
  if (omc_node_cost(step->node, &cost) == OMC_OK)
    fprintf(file, " flops %.0f moves %.0f", cost.flops, cost.bytes);
  fputc('\n', file);
}

static void print_copies(const omc_plan *plan, uint32_t begin, uint32_t end, FILE *file) {
  for (uint32_t c = begin; c < end; c++) {
    fprintf(file, "copy to result %" PRIu32 ":", plan->copies[c].to);
    print_value(plan, omc_in(plan->graph->result, plan->copies[c].to), file);
    fputc('\n', file);
  }
}

void omc_plan_print(const omc_plan *plan, FILE *file) {
  fprintf(file, "arena %zu bytes, bound %zu, lent by gradients %zu, saved for backward %zu\n",
          plan->arena_bytes, plan->bound_bytes, plan->lent_bytes, plan->forward_bytes);
  for (omc_phase p = 0; p < plan->n_phases; p++) {
    const omc_part *part = &plan->parts[p];
    if (p == OMC_BACKWARD) fputs("backward:\n", file);
    if (p > OMC_BACKWARD) fprintf(file, "backward %u:\n", p - OMC_BACKWARD);
    for (uint32_t s = part->step; s < part->end_step; s++) print_step(plan, s, file);
    print_copies(plan, part->copy, part->end_copy, file);
  }
}
