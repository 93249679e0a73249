/* Passes over a bound graph. Each leaves the graph valid; none depends on another having run,
 * except that all need what omc_specialize produces: a typed graph. */
#ifndef OMC_PASSES_PASSES_H
#define OMC_PASSES_PASSES_H

#include "graph/graph.h"
#include "provider.h"

/* Template to bound graph: copies `from`, sets the type of input i to inputs[i] (OMC_ESHAPE or
 * OMC_EDTYPE names the input and both types if it contradicts the template), infers every node,
 * and folds it, with omc_provider_host(). `from` must outlive *out.
 * `callbacks` may be NULL if the template holds no TorchCall. */
omc_status omc_specialize(const omc_graph *from, const omc_type *inputs,
                          const omc_callbacks *callbacks, const omc_allocator *allocator,
                          omc_graph **out) OMC_MUST_USE;

/* The part of it that is one node's: holds it to its op's record and sets the types of its outputs
 * from those of its inputs. `allocator` is for what is needed meanwhile. */
omc_status omc_infer_node(omc_node *node, const omc_callbacks *callbacks,
                          const omc_allocator *allocator) OMC_MUST_USE;

/* Constants computed at plan time. Small ones stay with the plan. Larger ones are there for passes
 * to look at, such as a causal mask, and then become computations again, so that they take memory
 * in the arena of a run, while they are needed, and not in every plan.
 *
 * Replaces a typed node by constants if its inputs are constants or only their shapes matter.
 * Random ops and callbacks are left alone, and so is what is above 64 MiB, would bring the graph's
 * scratch arena above 256 MiB, or comes of a thousand large constants, each of the one before. The
 * node may be gone afterwards. */
omc_status omc_fold_node(omc_graph *g, omc_node *node) OMC_MUST_USE;
omc_status omc_fold(omc_graph *g) OMC_MUST_USE; /* all of them */

/* After the last pass that looks at constants: those above 4 KiB, or beyond 1 MiB in all, that
 * folding has made become the nodes again that compute them, unless a shape rule has read them;
 * *changed: some did. graph->scratch is empty afterwards. */
omc_status omc_settle(omc_graph *g, bool *changed) OMC_MUST_USE;

/* Rules that make forms canonical and remove identities. */
omc_status omc_canonicalize(omc_graph *g) OMC_MUST_USE;

/* Merges nodes of the same phase, op, inputs and attributes; never random ops or callbacks. */
omc_status omc_cse(omc_graph *g) OMC_MUST_USE;

/* Makes casts from 16 bits to float32 again where backwards read them in what will be fused.
 * Nothing may come after it that would merge them. */
omc_status omc_widen_again(omc_graph *g, const omc_provider *provider) OMC_MUST_USE;

/* Gradients read results of forward where the provider spares itself a computation so. */
omc_status omc_reuse_results(omc_graph *g, const omc_provider *provider) OMC_MUST_USE;

/* Convolutions of images of 16 bits take and give them with their channels last, as the GPU's do,
 * and so does what comes between them; see channels_last.c. Whoever else reads an image, the caller
 * first, has it as it was. */
omc_status omc_lay_channels_last(omc_graph *g) OMC_MUST_USE;

/* Applies the fusion rules, then gathers elementwise nodes of one phase, compute class and output
 * shape that share a value into FusedElementwise nodes, as far as the provider calls them fusible.
 */
omc_status omc_fuse(omc_graph *g, const omc_provider *provider) OMC_MUST_USE;

/* Where an output is written over an input that backwards or other outputs read, these read a copy
 * made at the start of forward. Nothing may come after it that would merge the copy with what it is
 * of. */
omc_status omc_save_overwritten(omc_graph *g) OMC_MUST_USE;

/* Casts of inputs become one node, where it costs no memory to speak of; see gather_casts.c.
 * Nothing may come after it that looks for casts. */
omc_status omc_gather_casts(omc_graph *g) OMC_MUST_USE;

/* Outputs that nobody reads and that their op spares then, such as what only a gradient would read,
 * become left out. */
void omc_trim(omc_graph *g);

#endif
