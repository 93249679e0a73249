/* The text form of a graph: what Python hands over, what OMC_DUMP writes, what tests compare.
 *
 *   input  %ids : i64[?,128]
 *   input  %w : f32[768,3072] grad          # may be asked for its gradient
 *   const  %shape : i64[2] = [-1, 768]      # elements in row-major order
 *   const  %mask : bool[1024,1024] = @      # elements supplied beside the text, by name
 *   %3 = Softmax(%2) {axis=-1, scale=0.125, mode="tanh", perm=[0, 2, 1]} name="/h.0/attn"
 *   %4, _, %5 = LayerNormalization(%3, %w, _)
 *   return %4, %6 over %w                   # %w becomes %6 when forward is done
 *
 * One statement a line; `#` starts a comment; `_` stands for an input or output left out. Names
 * are letters, digits and any of "_.:/-", so a blank ends them. A float has a point, an exponent,
 * or is inf, -inf, nan. In a string \", \\ and \n are escapes. A list attribute has elements of one
 * kind.
 *
 * Printed graphs also carry types after the outputs (`%3 : f32[8,64] = ...`), `backward:` or
 * `forward:` on a line of its own where the phase changes (`backward 1:` for the second backward),
 * `grad %g0 of 0 : f32[]` after the inputs, and `return ... grads %a, _, %b` in joint graphs, the
 * gradients of one backward after those of the other. The parser reads what the printer writes. */
#ifndef OMC_GRAPH_TEXT_H
#define OMC_GRAPH_TEXT_H

#include "graph/graph.h"

/* Finds the elements of a constant given as `@`. Sets *data, borrowed for the graph's life, and
 * *bytes; returns a failure if there is none of that name. */
typedef omc_status (*omc_find_data)(void *ctx, const char *name, const void **data, size_t *bytes);

/* Parses n bytes of text, which may be any bytes, fewer than 4 GiB: numbers of values and nodes are
 * 32 bits wide. OMC_EPARSE names the line and what was expected, OMC_EUNSUPPORTED an attribute
 * that its op does not have; a failure of `find` is passed on.
 * `find` may be NULL. Elements written out are aligned to 64 bytes. The caller owns *out; nothing
 * of `text` is borrowed. */
omc_status omc_graph_parse(const omc_allocator *allocator, const char *text, size_t n,
                           omc_find_data find, void *find_ctx, omc_graph **out) OMC_MUST_USE;

/* Prints the graph. Constants above 16 elements are printed as `@`; values without a name as
 * numbers (%0, %1, ...) that no value is named by, see omc_number_values. *out is allocated from
 * `allocator` with *bytes including the terminating zero; free with omc_free(allocator, *out, 1,
 * *bytes). */
omc_status omc_graph_print(const omc_graph *g, const omc_allocator *allocator, char **out,
                           size_t *bytes) OMC_MUST_USE;

#endif
