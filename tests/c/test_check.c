#include "harness.h"

#include <string.h>

#include "graph/text.h"
#include "plan/plan.h"

/* %a and %b are live together, %c takes over %b, %v is a view of %a, %d reads both. */
static const char *text =
    "input %x : f32[31,31] grad\n"
    "grad %g of 0 : f32[961]\n"
    "const %flat : i64[1] = [961]\n"
    "%a = Exp(%x)\n"
    "%b = Sin(%a)\n"
    "%c = Neg(%b)\n"
    "%v = Reshape(%a, %flat)\n"
    "%w = Reshape(%c, %flat)\n"
    "%d = Mul(%v, %w)\n"
    "%y = Sin(%d)\n"
    "backward:\n"
    "%e = Mul(%v, %g)\n"
    "%f = MatMul(%a, %a)\n"
    "%square = Reshape(%e, %shape)\n"
    "%h = MatMul(%square, %f)\n"
    "%gx = MatMul(%x, %h)\n"
    "return %y grads %gx\n";

static omc_status make_of(const char *from, omc_plan **out) {
  const omc_allocator *a = omc_default_allocator();
  char whole[2048] = "const %shape : i64[2] = [31, 31]\n";
  omc_graph *g = NULL;
  strcat(whole, from);
  OMC_TRY(omc_graph_parse(a, whole, strlen(whole), NULL, NULL, &g));
  for (omc_node *node = g->first; node; node = node->next)
    CHECK_OK(omc_op_get(node->op)->infer(node));
  return omc_plan_create(g, omc_provider_host(), false, a, out);
}

static omc_plan *make(void) {
  omc_plan *plan = NULL;
  CHECK_OK(make_of(text, &plan));
  return plan;
}

static uint32_t id_of(const omc_plan *plan, const char *name) {
  for (const omc_node *node = plan->graph->first; node; node = node->next)
    if (!strcmp(node->out[0]->name, name)) return node->out[0]->id;
  CHECK_TEXT(name, "name of a value");
  return 0;
}

static omc_slot *slot(omc_plan *plan, const char *name) { return &plan->slots[id_of(plan, name)]; }

static void reject(omc_plan *plan, const char *why) {
  CHECK_STATUS(omc_plan_check(plan), EINTERNAL);
  CHECK_CONTAINS(omc_status_detail(), why);
}

/* Spoils a fresh plan and expects the checker to say `why_`. */
#define CORRUPT(name_, why_, ...)   \
  TEST(check_rejects_##name_) {     \
    omc_plan *plan = make();        \
    REQUIRE(plan);                  \
    CHECK_OK(omc_plan_check(plan)); \
    __VA_ARGS__                     \
    reject(plan, why_);             \
    omc_plan_release(plan);         \
  }

CORRUPT(overlap, "written over a value that is live", {
  slot(plan, "b")->offset = slot(plan, "a")->offset;
  slot(plan, "c")->offset = slot(plan, "a")->offset;
  slot(plan, "w")->offset = slot(plan, "a")->offset;
})
CORRUPT(partial_overlap, "written over a value that is live",
        { slot(plan, "f")->offset = slot(plan, "e")->offset + 64; })
CORRUPT(wrong_alias, "alias of what is no input", { slot(plan, "d")->alias = id_of(plan, "y"); })
CORRUPT(alias_elsewhere, "alias of what is no input in the same memory", {
  slot(plan, "c")->offset = (plan->arena_bytes - slot(plan, "c")->bytes) / 64 * 64;
  slot(plan, "w")->offset = slot(plan, "c")->offset;
  if (slot(plan, "c")->offset == slot(plan, "b")->offset) {
    slot(plan, "c")->offset = 0;
    slot(plan, "w")->offset = 0;
  }
})
CORRUPT(op_not_in_place, "op does not work in place", {
  slot(plan, "h")->alias = id_of(plan, "f");
  slot(plan, "h")->offset = slot(plan, "f")->offset;
})
CORRUPT(view_elsewhere, "view that is not in its input's memory",
        { slot(plan, "v")->offset += 64; })
CORRUPT(view_without_alias, "view that is not in its input's memory",
        { slot(plan, "v")->alias = id_of(plan, "v"); })
CORRUPT(out_of_arena, "outside the arena", { slot(plan, "f")->offset = plan->arena_bytes; })
CORRUPT(end_out_of_arena, "outside the arena", { plan->arena_bytes -= 64; })
CORRUPT(offset_overflow, "outside the arena", { slot(plan, "f")->offset = SIZE_MAX - 63; })
CORRUPT(misaligned, "not aligned", { slot(plan, "f")->offset += 4; })
CORRUPT(wrong_size, "slot of the wrong size", { slot(plan, "f")->bytes -= 4; })
CORRUPT(freed_early, "read outside its declared life", {
  slot(plan, "a")->end = 2;
  slot(plan, "v")->end = 2;
})
CORRUPT(born_late, "written outside its declared life", { slot(plan, "a")->begin++; })
CORRUPT(input_not_saved, "not asked for", { plan->parts[OMC_BACKWARD].reads_input[0] = false; })
CORRUPT(result_not_given, "result not given", {
  slot(plan, "gx")->place = OMC_AT_ARENA;
  slot(plan, "gx")->offset = omc_round_up(plan->arena_bytes, 64);
  plan->arena_bytes += 8192;
})
CORRUPT(backward_output, "not for it", { slot(plan, "gx")->place = OMC_AT_OUTPUT; })
CORRUPT(output_of_wrong_index, "not for it", { slot(plan, "y")->index = 1; })
CORRUPT(given_value_moved, "given value in another place",
        { plan->slots[plan->graph->inputs[0]->id].place = OMC_AT_ARENA; })
CORRUPT(consumed_silently, "may run backward again", { plan->consumes = false; })
CORRUPT(read_before_written, "read before written", {
  const omc_step first = plan->steps[0];
  omc_node *a = plan->graph->first;
  omc_node *b = a->next;
  /* The graph itself in the wrong order, and the steps with it. */
  b->prev = NULL, a->next = b->next, a->next->prev = a, b->next = a, a->prev = b;
  plan->graph->first = b;
  plan->steps[0] = plan->steps[1];
  plan->steps[1] = first;
})
CORRUPT(steps_in_another_order, "not the graph's next node", {
  const omc_step first = plan->steps[0];
  plan->steps[0] = plan->steps[1];
  plan->steps[1] = first;
})
CORRUPT(step_left_out, "not the graph's next node",
        { plan->parts[OMC_BACKWARD].step = plan->n_forward = --plan->parts[OMC_FORWARD].end_step; })
CORRUPT(workspace_on_input, "written over a value that is live", {
  plan->steps[1].workspace_bytes = 64;
  plan->steps[1].workspace_offset = slot(plan, "a")->offset;
})
CORRUPT(workspace_on_output, "output in scratch memory", {
  plan->steps[0].workspace_bytes = 64;
  plan->steps[0].workspace_offset = slot(plan, "a")->offset;
})
CORRUPT(workspace_outside, "outside the arena",
        { plan->steps[0].workspace_bytes = plan->arena_bytes + 64; })

/* ---- outputs that are written over inputs ---- */

/* %new is written over %old by its own step, the last of forward that reads %old. */
static const char *over_text =
    "input %x : f32[32,32] grad\n"
    "input %old : f32[32,32]\n"
    "input %ids : i64[2]\n"
    "grad %g of 0 : f32[32,32]\n"
    "%rows = Gather(%old, %ids)\n"
    "%y = Exp(%x)\n"
    "%new = Add(%old, %x)\n"
    "%z = Mul(%new, %y)\n"
    "backward:\n"
    "%gx = Mul(%g, %x)\n"
    "return %y, %new over %old, %rows, %z grads %gx, _, _\n";

#define CORRUPT_OVER(name_, why_, ...)     \
  TEST(check_rejects_##name_) {            \
    omc_plan *plan = NULL;                 \
    REQUIRE_OK(make_of(over_text, &plan)); \
    __VA_ARGS__                            \
    reject(plan, why_);                    \
    omc_plan_release(plan);                \
  }

CORRUPT_OVER(an_input_written_over_by_another_value, "is not to become this", {
  slot(plan, "z")->place = OMC_AT_INPUT;
  slot(plan, "z")->index = 1;
})
CORRUPT_OVER(an_input_written_over_that_is_to_stay, "is not to become this",
             { slot(plan, "new")->index = 0; })
CORRUPT_OVER(a_result_apart_from_its_input, "has its place in an input", {
  slot(plan, "new")->place = OMC_AT_OUTPUT;
  slot(plan, "new")->index = 1;
})
CORRUPT_OVER(an_input_not_written_over, "result not given", {
  slot(plan, "new")->place = OMC_AT_ARENA;
  slot(plan, "new")->index = 0;
  slot(plan, "new")->offset = omc_round_up(plan->arena_bytes, 64);
  plan->arena_bytes = slot(plan, "new")->offset + slot(plan, "new")->bytes;
})

CORRUPT_OVER(an_input_written_over_before_a_failure, "may fail yet", {
  const omc_step gather = plan->steps[0];
  omc_node *rows = plan->graph->first, *y = rows->next, *new = y->next;
  /* The graph itself in another order, and the steps with it. */
  plan->graph->first = y, y->prev = NULL;
  rows->next = new->next, new->next->prev = rows;
  new->next = rows, rows->prev = new;
  plan->steps[0] = plan->steps[1], plan->steps[1] = plan->steps[2], plan->steps[2] = gather;
  slot(plan, "y")->begin = 0;
  slot(plan, "new")->begin = 1;
})

/* What the planner has no way to do right the checker refuses. */
static void refused(const char *from, const char *why) {
  omc_plan *plan = NULL;
  CHECK_STATUS(make_of(from, &plan), EINTERNAL);
  CHECK_CONTAINS(omc_status_detail(), why);
}

TEST(check_rejects_an_input_read_by_backward_once_it_is_written_over) {
  refused(
      "input %x : f32[4] grad\n"
      "input %old : f32[4]\n"
      "grad %g of 0 : f32[4]\n"
      "%y = Mul(%x, %old)\n"
      "%new = Exp(%old)\n"
      "backward:\n"
      "%gx = Mul(%g, %old)\n"
      "return %y, %new over %old grads %gx, _\n",
      "read after something was written over it");
}

TEST(check_rejects_inputs_that_become_each_other) {
  refused(
      "input %a : f32[4]\n"
      "input %b : f32[4]\n"
      "return %b over %a, %a over %b\n",
      "read after something was written over it");
}
