/* Shape rules that many ops share, and helpers for writing one. */
#ifndef OMC_OPS_INFER_H
#define OMC_OPS_INFER_H

#include "graph/graph.h"

omc_status omc_infer_same(omc_node *node) OMC_MUST_USE;      /* every output: type of in[0] */
omc_status omc_infer_float(omc_node *node) OMC_MUST_USE;     /* as same; in[0] must be float */
omc_status omc_infer_broadcast(omc_node *node) OMC_MUST_USE; /* all inputs one dtype, broadcast */
omc_status omc_infer_compare(omc_node *node) OMC_MUST_USE;   /* as broadcast; output bool */

/* Sets output i (if present) to dtype and shape. */
void omc_set_type(omc_node *node, uint32_t i, omc_dtype dtype, const omc_shape *shape);

/* Fails naming the node unless input i is a constant (its elements shape the output). */
omc_status omc_need_const(const omc_node *node, uint32_t i) OMC_MUST_USE;

/* Fails naming the node unless input i has that dtype / is float / has that rank. */
omc_status omc_need_dtype(const omc_node *node, uint32_t i, omc_dtype dtype) OMC_MUST_USE;
omc_status omc_need_float(const omc_node *node, uint32_t i) OMC_MUST_USE;
omc_status omc_need_rank(const omc_node *node, uint32_t i, int32_t rank) OMC_MUST_USE;

#endif
