/* Every kernel, on every instruction set of this machine, between guards.
 *
 * A plan is run by hand: each value and each workspace has a buffer of exactly its size, with
 * guard bytes that the address sanitizer also watches, aligned no better than the contract says.
 * Two such runs, with other bytes in fresh memory and other numbers of threads, must agree to the
 * bit with each other, with what a session computes in its one shared arena, and with what one on
 * another device does. */
#include "harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "autodiff/autodiff.h"
#include "base/element.h"
#include "cpu/kernel.h"
#include "device.h"
#include "graph/text.h"
#include "kernel_graphs.h"
#include "passes/passes.h"
#include "run/session.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define WATCH(at, n) __asan_poison_memory_region((at), (n))
#define UNWATCH(at, n) __asan_unpoison_memory_region((at), (n))
#else
#define WATCH(at, n) ((void)(at), (void)(n))
#define UNWATCH(at, n) ((void)(at), (void)(n))
#endif

enum { GUARD = 128, GUARD_BYTE = 0xA5, MAX_TENSORS = 16 };

/* `bytes` bytes at `data`, the guard before and after. */
typedef struct buffer {
  char *block, *data;
  size_t bytes, shift;
  char *copy; /* what `data` must stay; NULL: may change */
} buffer;

/* `shift` bytes off an address that is a multiple of 64; every byte is `fill`. */
static bool make(buffer *b, size_t bytes, size_t shift, int fill) {
  void *block = NULL;
  if (!CHECK(posix_memalign(&block, 64, GUARD + shift + bytes + GUARD) == 0)) return false;
  *b = (buffer){block, (char *)block + GUARD + shift, bytes, shift, NULL};
  memset(b->block, GUARD_BYTE, GUARD + shift);
  memset(b->data, fill, bytes);
  memset(b->data + bytes, GUARD_BYTE, GUARD);
  WATCH(b->block, GUARD + shift);
  WATCH(b->data + bytes, GUARD);
  return true;
}

static bool keep(buffer *b) {
  b->copy = malloc(b->bytes + 1);
  if (!CHECK(b->copy != NULL)) return false;
  memcpy(b->copy, b->data, b->bytes);
  return true;
}

static bool intact(const buffer *b) {
  bool ok = !b->copy || memcmp(b->copy, b->data, b->bytes) == 0;
  UNWATCH(b->block, GUARD + b->shift);
  UNWATCH(b->data + b->bytes, GUARD);
  for (const char *p = b->block; p < b->data; p++) ok &= (unsigned char)*p == GUARD_BYTE;
  for (size_t i = 0; i < GUARD; i++) ok &= (unsigned char)b->data[b->bytes + i] == GUARD_BYTE;
  WATCH(b->block, GUARD + b->shift);
  WATCH(b->data + b->bytes, GUARD);
  return ok;
}

static void drop(buffer *b) {
  if (!b->block) return;
  UNWATCH(b->block, GUARD + b->shift);
  UNWATCH(b->data + b->bytes, GUARD);
  free(b->block);
  free(b->copy);
  *b = (buffer){0};
}

static size_t bytes_of(const omc_type *type) {
  size_t bytes = 0;
  CHECK_OK(omc_type_bytes(type, &bytes));
  return bytes;
}

/* Elements the caller gives: small integers but 0, any bool, floats of both signs away from zero.
 */
static void fill_tensor(const omc_type *type, void *data, uint32_t salt) {
  const int64_t n = omc_shape_numel(&type->shape);
  uint32_t x = 12345 + salt;
  for (int64_t i = 0; i < n; i++) {
    x = x * 1664525u + 1013904223u;
    const double f = (double)(x >> 16) / 65536 + 0.125;
    if (type->dtype == OMC_BOOL)
      ((unsigned char *)data)[i] = (unsigned char)(x >> 31);
    else if (omc_dtype_is_float(type->dtype))
      omc_element_set_float(type->dtype, data, i, x & 1u << 15 ? f : -f);
    else
      omc_element_set_int(type->dtype, data, i, 1 + i % 2);
  }
}

/* ---- by hand: a buffer for every value ---- */

typedef struct by_hand {
  const omc_plan *plan;
  buffer *buffers; /* of each value; those of views are empty */
  int fill, threads;
} by_hand;

/* The value whose memory a view of it shares. */
static const omc_value *origin(const omc_value *v) {
  while (v->role == OMC_ROLE_NODE && omc_op_get(v->producer->op)->flags & OMC_OP_VIEW)
    v = omc_in(v->producer, 0);
  return v;
}

static buffer *buffer_of(by_hand *h, const omc_value *v) {
  v = origin(v);
  buffer *b = &h->buffers[v->id];
  if (b->block) return b;
  /* A caller's tensor may begin at any element, memory of the plan does at an aligned address. */
  const bool given = v->role == OMC_ROLE_INPUT || v->role == OMC_ROLE_GRAD;
  const size_t bytes = bytes_of(&v->type);
  if (!make(b, bytes, given ? omc_dtype_size(v->type.dtype) : 0, h->fill)) return NULL;
  if (v->role == OMC_ROLE_CONST && bytes) memcpy(b->data, v->data, bytes);
  if (given) fill_tensor(&v->type, b->data, v->role == OMC_ROLE_GRAD ? 99 + v->index : v->index);
  if (v->role != OMC_ROLE_NODE && !keep(b)) return NULL;
  return b;
}

static bool operand(by_hand *h, const omc_value *v, omc_tensor *out) {
  *out = (omc_tensor){NULL, NULL};
  if (!v) return true;
  const buffer *b = buffer_of(h, v);
  if (!b) return false;
  *out = (omc_tensor){b->data, &v->type};
  return true;
}

static bool run_step(by_hand *h, const omc_step *step) {
  const omc_node *node = step->node;
  omc_tensor in[MAX_TENSORS], out[MAX_TENSORS];
  buffer workspace;
  if (!CHECK(node->n_in <= MAX_TENSORS && node->n_out <= MAX_TENSORS)) return false;
  for (uint32_t i = 0; i < node->n_in; i++)
    if (!operand(h, omc_in(node, i), &in[i])) return false;
  for (uint32_t k = 0; k < node->n_out; k++)
    if (!operand(h, omc_out(node, k), &out[k])) return false;
  if (!make(&workspace, step->workspace_bytes, 0, h->fill)) return false;
  const omc_kernel_args args = {.in = in,
                                .out = out,
                                .n_in = node->n_in,
                                .n_out = node->n_out,
                                .params = step->params,
                                .workspace = workspace.data,
                                .threads = h->threads,
                                .seed = 7,
                                .node = omc_node_name(node)};
  bool ok = CHECK_OK(step->kernel(&args)) && intact(&workspace);
  for (uint32_t i = 0; i < node->n_in; i++)
    if (omc_in(node, i)) ok &= intact(buffer_of(h, omc_in(node, i)));
  for (uint32_t k = 0; k < node->n_out; k++)
    if (omc_out(node, k)) ok &= intact(buffer_of(h, omc_out(node, k)));
  drop(&workspace);
  return CHECK_TEXT(ok ? "guards hold" : omc_op_name(node->op), "guards hold");
}

static bool run_by_hand(by_hand *h) {
  h->buffers = calloc(h->plan->graph->n_values, sizeof *h->buffers);
  if (!CHECK(h->buffers != NULL)) return false;
  for (uint32_t s = 0; s < h->plan->n_steps; s++)
    if (!run_step(h, &h->plan->steps[s])) return false;
  return true;
}

static void end_by_hand(by_hand *h) {
  for (uint32_t i = 0; h->buffers && i < h->plan->graph->n_values; i++) drop(&h->buffers[i]);
  free(h->buffers);
}

/* Two values are the same to the last bit. */
static bool same(by_hand *a, by_hand *b) {
  const omc_plan *plan = a->plan;
  for (uint32_t s = 0; s < plan->n_steps; s++)
    for (uint32_t k = 0; k < plan->steps[s].n_out; k++) {
      const omc_value *v = omc_out(plan->steps[s].node, k);
      if (!v) continue;
      const bool equal =
          memcmp(buffer_of(a, v)->data, buffer_of(b, v)->data, bytes_of(&v->type)) == 0;
      if (!CHECK_TEXT(equal ? "same bits" : omc_op_name(plan->steps[s].node->op), "same bits"))
        return false;
    }
  return true;
}

/* ---- by the session, in one arena ---- */

static buffer arena; /* of the one run */

static omc_status guarded_alloc(void *ctx, size_t bytes, void *queue, void **out) {
  (void)ctx, (void)queue;
  if (arena.block || !make(&arena, bytes, 0, 0x3C)) return omc_fail(OMC_ENOMEM, "second arena");
  *out = arena.data;
  return OMC_OK;
}

static void guarded_free(void *ctx, void *ptr, size_t bytes, void *queue) {
  (void)ctx, (void)queue;
  CHECK(ptr == arena.data && bytes == arena.bytes && intact(&arena));
  drop(&arena);
}

typedef struct caller {
  buffer in[MAX_TENSORS], out[MAX_TENSORS], grad_out[MAX_TENSORS], grad_in[MAX_TENSORS];
  void *pin[MAX_TENSORS], *pout[MAX_TENSORS], *pdout[MAX_TENSORS], *pdin[MAX_TENSORS];
} caller;

static bool give(buffer *b, void **p, const omc_value *v, bool result, uint32_t salt) {
  *p = NULL;
  if (!v) return true;
  if (!make(b, bytes_of(&v->type), result ? 0 : omc_dtype_size(v->type.dtype), 0xFF)) return false;
  *p = b->data;
  if (result) return true;
  fill_tensor(&v->type, b->data, salt);
  return keep(b);
}

static const omc_value *result_of(const omc_graph *g, uint32_t k) { return g->result->in[k].value; }

/* Gives every tensor a place on the device, or (`back`) copies it from there and gives that up. */
static bool move_tensors(caller *c, bool back) {
  const omc_provider *p = device_provider();
  buffer *tensors[] = {c->in, c->out, c->grad_out, c->grad_in};
  void **places[] = {c->pin, c->pout, c->pdout, c->pdin};
  for (size_t a = 0; a < sizeof tensors / sizeof *tensors; a++)
    for (int i = 0; i < MAX_TENSORS; i++) {
      const buffer *b = &tensors[a][i];
      if (!b->block) continue;
      if (back) {
        device_read(b->data, places[a][i], b->bytes);
        p->free(p->ctx, places[a][i], b->bytes, NULL);
      } else {
        if (!CHECK_OK(p->alloc(p->ctx, b->bytes, NULL, &places[a][i]))) return false;
        device_write(places[a][i], b->data, b->bytes);
      }
    }
  return true;
}

static bool run_session(omc_plan *plan, caller *c) {
  const omc_graph *g = plan->graph;
  omc_run *run = NULL;
  bool ok = CHECK(g->n_inputs <= MAX_TENSORS && g->n_outputs <= MAX_TENSORS);
  for (uint32_t i = 0; ok && i < g->n_inputs; i++)
    ok = give(&c->in[i], &c->pin[i], g->inputs[i], false, i) &&
         give(&c->grad_in[i], &c->pdin[i], g->n_grads ? result_of(g, g->n_outputs + i) : NULL, true,
              0);
  for (uint32_t k = 0; ok && k < g->n_outputs; k++)
    ok = give(&c->out[k], &c->pout[k], result_of(g, k), true, 0) &&
         give(&c->grad_out[k], &c->pdout[k], g->grads ? g->grads[k] : NULL, false, 99 + k);
  const omc_provider *p = plan->provider;
  const bool moved = p == device_provider();
  if (moved) ok = ok && move_tensors(c, false);
  ok = ok && CHECK_OK(omc_run_forward(plan, c->pin, c->pout, c->pdin, 7, NULL, &run));
  omc_backward b = {.inputs = c->pin, .outputs = c->pout, .grads = c->pdout, .results = c->pdin};
  if (ok && run) ok = CHECK_OK(omc_run_enter(run, &b)) && CHECK_OK(omc_run_backward(run, &b));
  omc_run_destroy(run);
  ok = CHECK_OK(p->sync(p->ctx, NULL)) && ok;
  return moved ? move_tensors(c, true) && ok : ok;
}

static bool end_caller(caller *c) {
  bool ok = true;
  buffer *all[] = {c->in, c->out, c->grad_out, c->grad_in};
  for (size_t a = 0; a < sizeof all / sizeof *all; a++)
    for (int i = 0; i < MAX_TENSORS; i++) {
      if (!all[a][i].block) continue;
      ok &= intact(&all[a][i]);
      drop(&all[a][i]);
    }
  return ok;
}

static void compare_session(omc_plan *plan, by_hand *h) {
  const omc_graph *g = plan->graph;
  caller c;
  memset(&c, 0, sizeof c);
  if (run_session(plan, &c)) {
    for (uint32_t k = 0; k < g->n_outputs + g->n_grads; k++) {
      const omc_value *v = result_of(g, k);
      if (!v) continue;
      const buffer *found = k < g->n_outputs ? &c.out[k] : &c.grad_in[k - g->n_outputs];
      CHECK(memcmp(found->data, buffer_of(h, v)->data, found->bytes) == 0);
    }
  }
  CHECK(end_caller(&c));
}

/* ---- the graphs ---- */

static bool ran[OMC_N_OPS];

/* Runs a plan by hand twice, and if it has a session in that and on another device. */
static void check_plan(omc_session *s, omc_plan *plan, omc_plan *elsewhere) {
  by_hand a = {plan, NULL, 0xFF, plan->threads}, b = {plan, NULL, 0x3F, 1};
  if (run_by_hand(&a) && run_by_hand(&b) && same(&a, &b) && s) {
    compare_session(plan, &a);
    compare_session(elsewhere, &a);
  }
  for (uint32_t i = 0; i < plan->n_steps; i++) ran[plan->steps[i].node->op] = true;
  end_by_hand(&a);
  end_by_hand(&b);
}

typedef struct wishes {
  omc_type types[MAX_TENSORS];
  bool in_grads[MAX_TENSORS], out_grads[MAX_TENSORS];
} wishes;

/* Every float input marked `grad` wants, and every float output gives, a gradient. */
static omc_status specialize(const char *text, wishes *sig, omc_graph **template,
                             omc_graph **bound) {
  OMC_TRY(omc_graph_parse(omc_default_allocator(), text, strlen(text), NULL, NULL, template));
  const omc_graph *t = *template;
  if (t->n_inputs > MAX_TENSORS || t->n_outputs > MAX_TENSORS)
    OMC_FAIL(EINVALID, "more than %d tensors", MAX_TENSORS);
  for (uint32_t i = 0; i < t->n_inputs; i++) {
    sig->types[i] = t->inputs[i]->type;
    sig->in_grads[i] = t->inputs[i]->requires_grad && omc_dtype_is_float(sig->types[i].dtype);
  }
  OMC_TRY(omc_specialize(t, sig->types, NULL, omc_default_allocator(), bound));
  for (uint32_t k = 0; k < t->n_outputs; k++)
    sig->out_grads[k] = omc_dtype_is_float(result_of(*bound, k)->type.dtype);
  return OMC_OK;
}

/* The kernels of the text's own nodes and of their gradients: nothing is rewritten or fused. */
static void check_raw(const char *text, wishes *sig, omc_graph *bound) {
  omc_plan *plan = NULL;
  omc_status status = omc_differentiate(bound, 1, sig->out_grads, sig->in_grads);
  if (status == OMC_OK)
    status = omc_plan_create(bound, omc_provider_host(), false, omc_default_allocator(), &plan);
  else
    omc_graph_destroy(bound);
  if (!CHECK_OK(status)) {
    CHECK_TEXT(text, "");
    return;
  }
  check_plan(NULL, plan, NULL);
  omc_plan_release(plan);
}

/* The same as a session makes and runs it. */
static void check_session(const char *text, const wishes *sig, bool retain_graph) {
  omc_provider provider = *omc_provider_host();
  provider.alloc = guarded_alloc;
  provider.free = guarded_free;
  omc_session *s = NULL, *other = NULL;
  omc_plan *plan = NULL, *elsewhere = NULL;
  REQUIRE_OK(omc_session_create(text, strlen(text), NULL, NULL, NULL, &provider,
                                omc_default_allocator(), 1, &s));
  CHECK_OK(omc_session_create(text, strlen(text), NULL, NULL, NULL, device_provider(),
                              omc_default_allocator(), 1, &other));
  const omc_signature signature = {sig->types, sig->in_grads, sig->out_grads,
                                   1,          retain_graph,  false};
  if (CHECK_OK(omc_session_plan(s, &signature, &plan)) && other &&
      CHECK_OK(omc_session_plan(other, &signature, &elsewhere)))
    check_plan(s, plan, elsewhere);
  omc_plan_release(plan);
  omc_plan_release(elsewhere);
  omc_session_destroy(s);
  omc_session_destroy(other);
}

/* False if the graph does not specialize: the op takes other dtypes. */
static bool check_text(const char *text) {
  wishes sig;
  omc_graph *template = NULL, *bound = NULL;
  const omc_status status = specialize(text, &sig, &template, &bound);
  if (status == OMC_OK) {
    check_raw(text, &sig, bound);
    check_session(text, &sig, false);
    check_session(text, &sig, true);
  }
  omc_graph_destroy(template);
  return status == OMC_OK;
}

/* `text` with every f32 replaced by another name. */
static const char *in_dtype(const char *text, const char *dtype, char *out, size_t size) {
  size_t used = 0;
  for (const char *at; (at = strstr(text, "f32")) != NULL; text = at + 3)
    used += (size_t)snprintf(out + used, size - used, "%.*s%s", (int)(at - text), text, dtype);
  snprintf(out + used, size - used, "%s", text);
  return out;
}

static void check_graphs(const char *dtype) {
  char text[2048];
  for (size_t i = 0; i < sizeof kernel_graphs / sizeof *kernel_graphs; i++) {
    const char *own = in_dtype(kernel_graphs[i], dtype, text, sizeof text);
    if (!CHECK(check_text(own))) printf("  %s\n  %s\n", omc_status_detail(), own);
  }
}

/* Every elementwise op of one to three like inputs, one of them a row. */
static void check_elementwise(const char *dtype, const char *grad) {
  static const char *const shapes[][2] = {
      {"[3,37]", "[37]"}, {"[]", "[]"}, {"[0,3]", "[3]"}, {"[2,3,700]", "[2,1,700]"}};
  char text[512];
  for (int op = 0; op < OMC_N_OPS; op++) {
    const omc_op *record = omc_op_get((omc_op_id)op);
    if (!record->imm || record->max_in > 3) continue;
    if (record->flags & OMC_OP_DIVIDES && !strcmp(dtype, "bool")) continue; /* false is 0 */
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
      const char *wide = shapes[i][0], *row = shapes[i][record->max_in > 1];
      snprintf(text, sizeof text,
               "input %%a : %s%s %s\ninput %%b : %s%s %s\ninput %%c : %s%s %s\n"
               "%%y = %s(%s)\nreturn %%y\n",
               dtype, wide, grad, dtype, row, grad, dtype, wide, grad, omc_op_name((omc_op_id)op),
               record->max_in == 1   ? "%a"
               : record->max_in == 2 ? "%a, %b"
                                     : "%a, %b, %c");
      check_text(text);
    }
  }
}

static void check_isa(omc_isa isa) {
  omc_cpu_set_isa(isa);
  if (omc_cpu_isa() != isa) return;
  check_graphs("f32");
  check_graphs("bf16");
  check_graphs("f16");
  check_elementwise("f32", "grad");
  check_elementwise("f16", "");
}

TEST(kernels_stay_inside_their_tensors) {
  omc_cpu_set_isa(OMC_N_ISA);
  for (int isa = 0; isa < OMC_N_ISA; isa++) check_isa((omc_isa)isa);
  omc_cpu_set_isa(OMC_N_ISA);
  check_graphs("f64");
  check_elementwise("f64", "grad");
  static const char *const others[] = {"i64", "i32", "bool"};
  for (size_t i = 0; i < sizeof others / sizeof *others; i++) check_elementwise(others[i], "");

  for (int op = 0; op < OMC_N_OPS; op++) {
    const omc_op *record = omc_op_get((omc_op_id)op);
    const bool planned = !(record->flags & (OMC_OP_CALLBACK | OMC_OP_SHAPE_ONLY | OMC_OP_VIEW));
    const bool folded = op == OMC_OP_Range || op == OMC_OP_ConstantOfShape; /* always */
    if (planned && !folded && !ran[op]) CHECK_TEXT(omc_op_name((omc_op_id)op), "run by some graph");
  }
}
