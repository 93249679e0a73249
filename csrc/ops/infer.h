/* Shape rules that many ops share, and helpers for writing one. */
#ifndef OMC_OPS_INFER_H
#define OMC_OPS_INFER_H

#include "graph/graph.h"

omc_status omc_infer_same(omc_node *node) OMC_MUST_USE;      /* every output: type of in[0] */
omc_status omc_infer_broadcast(omc_node *node) OMC_MUST_USE; /* all inputs one dtype, broadcast */
omc_status omc_infer_float(omc_node *node) OMC_MUST_USE;     /* as broadcast; inputs float */
omc_status omc_infer_integers(omc_node *node) OMC_MUST_USE;  /* as broadcast; inputs integers */
omc_status omc_infer_logic(omc_node *node) OMC_MUST_USE;     /* as broadcast; inputs bool */
omc_status omc_infer_compare(omc_node *node) OMC_MUST_USE;   /* as broadcast; output bool */
omc_status omc_infer_test(omc_node *node) OMC_MUST_USE;      /* as compare; inputs float */
omc_status omc_infer_choice(omc_node *node) OMC_MUST_USE; /* in[0] bool, the others as broadcast */

/* The shape of input i, which must be there. */
static inline const omc_shape *omc_in_shape(const omc_node *node, uint32_t i) {
  return &omc_in(node, i)->type.shape;
}

/* Sets output i (if present) to dtype and shape; output 0 to the dtype of in[0] and shape. */
void omc_set_type(omc_node *node, uint32_t i, omc_dtype dtype, const omc_shape *shape);
void omc_set_shape(omc_node *node, const omc_shape *shape);

/* Fails naming the node unless input i is a constant (its elements shape the output). */
omc_status omc_need_const(const omc_node *node, uint32_t i) OMC_MUST_USE;

/* Reads input i, a constant list (or a single one) of at most `max` integers. */
omc_status omc_need_ints(const omc_node *node, uint32_t i, int32_t max, int64_t *out,
                         int32_t *n_out) OMC_MUST_USE;

/* As omc_axis; a failure names the node. */
omc_status omc_node_axis(const omc_node *node, int64_t axis, int32_t rank,
                         int32_t *out) OMC_MUST_USE;

/* Reads the attribute `shape`, or `axis` as 0..rank-1. */
omc_status omc_need_shape(const omc_node *node, omc_shape *out) OMC_MUST_USE;
omc_status omc_need_axis(const omc_node *node, int32_t rank, int32_t *out) OMC_MUST_USE;

/* The broadcast shape of all inputs that are there; a failure names the node. */
omc_status omc_broadcast_inputs(const omc_node *node, omc_shape *out) OMC_MUST_USE;

/* Fails naming the node unless input i has that dtype / is float / has that rank. */
omc_status omc_need_dtype(const omc_node *node, uint32_t i, omc_dtype dtype) OMC_MUST_USE;
omc_status omc_need_float(const omc_node *node, uint32_t i) OMC_MUST_USE;
omc_status omc_need_rank(const omc_node *node, uint32_t i, int32_t rank) OMC_MUST_USE;

/* Fails naming the node (EDTYPE, ESHAPE) unless input i, called `what`, is left out or of that
 * type.
 */
omc_status omc_need_type(const omc_node *node, uint32_t i, const char *what, omc_dtype dtype,
                         const omc_shape *shape) OMC_MUST_USE;

/* Fails naming the node unless in[0], the gradient of an output of that shape, has it. */
omc_status omc_need_gradient(const omc_node *node, const omc_shape *shape) OMC_MUST_USE;

#endif
