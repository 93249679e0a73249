/* Building nodes from C: used by gradient rules, rewrites and fusion.
 *
 * The builder latches its first failure: after it every call does nothing and returns NULL, and a
 * NULL input to any call is taken as the result of such a failure. So a rule is written as one
 * expression and ends with `return b->status`. New nodes are type-inferred at once. */
#ifndef OMC_OPS_BUILDER_H
#define OMC_OPS_BUILDER_H

#include "graph/graph.h"

typedef struct omc_builder {
  omc_graph *graph;
  omc_node *before;  /* new nodes go in front of this one; NULL: at the end */
  omc_phase phase;   /* of new nodes */
  const char *name;  /* source name given to new nodes */
  omc_status status; /* first failure */
} omc_builder;

/* A node with n_out outputs written to out[]. Inputs listed in `in` may be NULL only if bit i of
 * `optional` is set; an output that is one of these brought up to date is then NULL too. */
void omc_build(omc_builder *b, omc_op_id op, uint32_t n_in, omc_value *const *in, uint32_t optional,
               uint32_t n_attr, const omc_attr *attr, uint32_t n_out, omc_value **out);

/* One output, one to three inputs, no attributes. */
omc_value *omc_unary(omc_builder *b, omc_op_id op, omc_value *x);
omc_value *omc_binary(omc_builder *b, omc_op_id op, omc_value *x, omc_value *y);
omc_value *omc_ternary(omc_builder *b, omc_op_id op, omc_value *x, omc_value *y, omc_value *z);

/* One output, any inputs and attributes: omc_nary(b, OMC_OP_Gelu, 1, &x, 1, &attr). */
omc_value *omc_nary(omc_builder *b, omc_op_id op, uint32_t n_in, omc_value *const *in,
                    uint32_t n_attr, const omc_attr *attr);

/* As omc_nary, with those attributes of `like` that the op has, and `shape` unless it is NULL: a
 * gradient that cannot tell from its inputs the shape of what it is the gradient of. */
omc_value *omc_nary_like(omc_builder *b, omc_op_id op, uint32_t n_in, omc_value *const *in,
                         const omc_node *like, const omc_shape *shape);

/* The attributes of a node but one of that name, to `out`, which has room for all it has. Returns
 * how many there are. */
uint32_t omc_attrs_without(const omc_node *node, const char *name, omc_attr *out);

/* Sets an attribute that the node may have already. Types stay as they are. OMC_ENOMEM. */
omc_status omc_set_attr(omc_graph *g, omc_node *node, omc_attr attr) OMC_MUST_USE;

/* A FusedMatMul: alpha x y, each transposed first if it says so, plus the bias unless it is NULL.
 */
omc_value *omc_product(omc_builder *b, omc_value *x, bool trans_x, omc_value *y, bool trans_y,
                       double alpha, omc_value *bias);

/* Constants: a 0-d number of a dtype; one of `like`'s; a 1-d int64 list. */
omc_value *omc_number(omc_builder *b, omc_dtype dtype, double x);
omc_value *omc_scalar(omc_builder *b, const omc_value *like, double x);
omc_value *omc_ints(omc_builder *b, const int64_t *dims, int32_t n);

/* Zeros of a type: one, repeated. */
omc_value *omc_zeros(omc_builder *b, const omc_type *type);

/* x viewed with another shape of as many elements; x itself if the shape is the same. */
omc_value *omc_reshape(omc_builder *b, omc_value *x, const omc_shape *shape);

/* x with its axes permuted. */
omc_value *omc_transpose(omc_builder *b, omc_value *x, const int64_t *perm);

/* x repeated to `shape`; x itself if it has it. */
omc_value *omc_expand(omc_builder *b, omc_value *x, const omc_shape *shape);

/* Sum over `axes` (n of them), keeping reduced dims as 1 if keepdims. */
omc_value *omc_reduce_sum(omc_builder *b, omc_value *x, const int64_t *axes, int32_t n,
                          bool keepdims);

/* The gradient of broadcasting: x summed back to `shape`, which broadcasts to x's shape. */
omc_value *omc_sum_to(omc_builder *b, omc_value *x, const omc_shape *shape);

omc_value *omc_cast(omc_builder *b, omc_value *x, omc_dtype to); /* x itself if it has it */

#endif
