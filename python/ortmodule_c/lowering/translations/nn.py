"""Layers: linear algebra, normalisation, dropout, attention, embedding."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...capture.numbers import is_number
from ...errors import Unsupported
from ..builder import Builder
from ..draft import ONNX_TYPES, Size, Val, same_size, static
from .reduce import moments, norm_over, reduce
from .registry import (
    HALVES,
    aten,
    axis_of,
    computed_in,
    need_float,
    result_dtype,
    result_shape,
    translates,
    translates_named,
)

# Linear algebra


def _product(b: Builder, x: Val, y: Val, bias: Val | None = None, transposed: bool = False) -> Val:
    """x y + bias; of y transposed. A bias other than one number for each column is added apart."""
    if x.dtype != y.dtype:
        raise Unsupported(f"a product of {x.dtype} and {y.dtype}")
    fits = _fits(bias, y, transposed)
    if fits or transposed:
        out = b.emit("FusedMatMul", x, y, bias if fits else None, transB=1 if transposed else None)
    else:
        out = b.emit("MatMul", x, y)
    return out if fits or bias is None else b.emit("Add", out, _bias(bias, out, out.dtype))


def _fits(bias: Val | None, y: Val, transposed: bool = False) -> bool:
    """Whether a bias is one number for each column of what is multiplied by y."""
    return bias is not None and y.rank == 2 and bias.rank == 1 and same_size(bias.dims[0], y.dims[not transposed])


def _wide_product(b: Builder, x: Val, y: Val) -> Val:
    """x y in the dtype that PyTorch computes in, which more is done to before it is rounded."""
    if x.dtype not in HALVES or y.dtype != x.dtype:
        return b.emit("MatMul", x, y)
    return b.emit("FusedMatMul", x, y, to=int(ONNX_TYPES[computed_in(x.dtype)]))


def _bias(bias: Val, product: Val, dtype: torch.dtype) -> Val:
    """What is added to a product, that will be of `dtype`, and, as PyTorch has it, may not make it wider."""
    if _widens(bias, product.example) or bias.dtype != dtype:
        sizes, wanted = list(bias.example), list(product.example)
        raise Unsupported(f"a bias of {bias.dtype} and {sizes} for {dtype} and {wanted}")
    return bias


def _widens(x: Val, sizes: Sequence[int]) -> bool:
    """Whether `x` cannot be added in place to what has these sizes."""
    return x.rank > len(sizes) or any(
        n not in (1, m) for n, m in zip(reversed(x.example), reversed(sizes), strict=False)
    )


@translates(
    aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.vdot.default
)
def matmul(b: Builder, x: Val, y: Val) -> Val:
    return _product(b, x, y)


@translates(aten.linear.default)
def linear(b: Builder, x: Val, weight: Val, bias: Val | None = None) -> Val:
    if weight.rank != 2:
        raise Unsupported("linear with a weight that is no matrix")
    return _product(b, x, weight, bias, transposed=True)


@translates(aten._grouped_mm.default)
@translates_named("transformers::grouped_mm_fallback")
def grouped_mm(
    b: Builder, x: Val, y: Val, offs: Val | None = None, bias: Val | None = None, out_dtype: Any = None
) -> Val:
    """Rows, in groups that end at `offs`, of which each is multiplied by a matrix of its own."""
    if offs is None or bias is not None or (x.rank, y.rank) != (2, 3) or result_dtype(b) != x.dtype:
        raise Unsupported("products of groups other than of rows by matrices")
    return b.emit("GroupedMatMul", x, y, b.cast(offs, torch.int64))


def _is(number: Any, value: float) -> bool:
    return (isinstance(number, (int, float)) or is_number(number)) and bool(number == value)


def scaled(b: Builder, x: Val, factor: Any) -> Val:
    """`x` times a number that is not rounded to 16 bits, in the dtype that PyTorch computes in."""
    wide = b.cast(x, computed_in(x.dtype))
    return wide if _is(factor, 1) else b.emit("Mul", wide, b.scalar(factor, wide.dtype))


@translates(aten.addmm.default, aten.baddbmm.default, aten.addmv.default)
def addmm(b: Builder, bias: Val, x: Val, y: Val, *, beta: Any = 1, alpha: Any = 1) -> Val:
    if _is(alpha, 1) and _is(beta, 1) and (_fits(bias, y) or x.dtype not in HALVES):
        return _product(b, x, y, bias)
    return _added(b, bias, _wide_product(b, x, y), beta, alpha, x.dtype)


def _added(b: Builder, bias: Val, product: Val, beta: Any, alpha: Any, dtype: torch.dtype) -> Val:
    """`beta * bias + alpha * product`, in which the elements of a bias that counts for nothing are not read."""
    if _is(alpha, 0):
        raise Unsupported("a product that counts for nothing, which PyTorch reads for some shapes")
    bias, out = _bias(bias, product, dtype), scaled(b, product, alpha)
    out = out if _is(beta, 0) else b.emit("Add", out, scaled(b, bias, beta))
    return b.cast(out, dtype)


# Embedding and dropout


@translates(aten.embedding.default)
def embedding(
    b: Builder, weight: Val, ids: Val, padding_idx: int = -1, scale_grad_by_freq: bool = False, _sparse: bool = False
) -> Val:
    return b.emit(
        "Embedding",
        weight,
        b.cast(ids, torch.int64),
        padding_idx=padding_idx,
        scale_grad_by_freq=int(scale_grad_by_freq),
    )


@translates(aten.embedding_bag.padding_idx)
def embedding_bag(
    b: Builder,
    weight: Val,
    ids: Val,
    offsets: Val,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Val | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Val, None, None, None]:
    if sparse or scale_grad_by_freq or mode > 1:
        raise Unsupported("the largest of a bag" if mode > 1 else "sparse or scaled gradients of bags")
    ids, offsets = b.cast(ids, torch.int64), b.cast(offsets, torch.int64)
    n = ids.dims[0]
    padding = -1 if padding_idx is None else padding_idx
    rows = embedding(b, weight, ids, padding)
    if per_sample_weights is not None:
        rows = b.emit("Mul", rows, b.reshape(per_sample_weights, (n, 1)))
    ones = b.expand(b.const(1, weight.dtype), (n, 1))
    if padding >= 0:
        counts = b.reshape(b.emit("Not", b.emit("Equal", ids, b.const(padding, torch.int64))), (n, 1))
        rows = b.emit("Where", counts, rows, b.const(0, weight.dtype))
        ones = b.cast(counts, weight.dtype)
    bags = b.emit("SegmentSum", rows, offsets, closed=int(include_last_offset))
    if mode == 1:
        sizes = b.emit("SegmentSum", ones, offsets, closed=int(include_last_offset))
        bags = b.emit("Div", bags, b.emit("Max", sizes, b.const(1, weight.dtype)))
    return bags, None, None, None


@translates(aten.dropout.default)
def dropout(b: Builder, x: Val, p: float, train: bool) -> Val:
    if not train or p == 0:
        return x
    if p == 1:  # nothing is drawn
        return b.emit("Mul", x, b.const(0, x.dtype))
    return b.emit("Dropout", x, p=float(p), subsequence=b.subsequence())


def _feature_dims(x: Val) -> list[Size]:
    """Of what is drawn once for each feature of each sample."""
    if x.rank < 2:
        raise Unsupported("dropout of features of a tensor that has no two dims")
    return [*x.dims[:2], *[1] * (x.rank - 2)]


def _kept(b: Builder, dims: Sequence[Size], dtype: torch.dtype, p: float) -> Val:
    """1 / (1 - p) where dropout keeps something, and 0 elsewhere."""
    return b.emit("Dropout", b.expand(b.const(1, dtype), dims), p=float(p), subsequence=b.subsequence())


@translates(aten.feature_dropout.default)
def feature_dropout(b: Builder, x: Val, p: float, train: bool) -> Val:
    if not train or p in (0, 1):
        return dropout(b, x, p, train)
    return b.emit("Mul", x, _kept(b, _feature_dims(x), x.dtype, p))


# Of SELU: the value that a large negative number has.
_ALPHA = 1.7580993408473766


@translates(aten.alpha_dropout.default, aten.feature_alpha_dropout.default)
def alpha_dropout(b: Builder, x: Val, p: float, train: bool) -> Val:
    if not train or p in (0, 1):
        return dropout(b, x, p, train)
    dims = _feature_dims(x) if "feature" in b.aten_name else x.dims
    scale = (1 - p + _ALPHA**2 * p * (1 - p)) ** -0.5
    dropped = b.emit("Equal", _kept(b, dims, x.dtype, p), b.const(0, x.dtype))
    kept = b.emit("Where", dropped, b.const(0, x.dtype), b.const(scale, x.dtype))
    shift = b.emit("Where", dropped, b.const(_ALPHA * scale * (p - 1), x.dtype), b.const(_ALPHA * scale * p, x.dtype))
    return b.emit("Add", b.emit("Mul", x, kept), shift)


@translates(aten.native_dropout.default)
def native_dropout(b: Builder, x: Val, p: float, train: bool | None) -> tuple[Val, None]:
    return dropout(b, x, p, train is not False), None


# Softmax and attention


@translates(aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default)
def softmax(b: Builder, x: Val, dim: int, *_dtype: Any, **_kwargs: Any) -> Val:
    dtype = need_float(result_dtype(b))
    x, axis = b.cast(x, dtype), axis_of(x, dim)
    out = b.emit("LogSoftmax" if "log" in b.aten_name else "Softmax", x if x.rank else b.unsqueeze(x, 0), axis=axis)
    return out if x.rank else b.squeeze(out, 0)


def _common(*sizes: Size) -> Size:
    """What sizes are broadcast to."""
    wide = [size for size in sizes if not same_size(size, 1)]
    if not all(same_size(size, wide[0]) for size in wide):
        raise Unsupported(f"attention over dims of {sizes}")
    return wide[0] if wide else 1


def _heads(b: Builder, x: Val, batch: Sequence[Size], heads: Size) -> Val:
    """`x` as [batch, heads, ...], with all dims before the heads in one and ones for those it lacks."""
    x = b.expand(x, (*batch, *([heads] if x.rank > 2 else []), *x.dims[-2:]))
    return b.reshape(x, (math.prod(batch), heads, *x.dims[-2:]))


@translates(aten.scaled_dot_product_attention.default)
def attention(
    b: Builder,
    query: Val,
    key: Val,
    value: Val,
    attn_mask: Val | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Val:
    """Batch and heads are broadcast; heads of keys and values that are fewer each serve a group of the queries'."""
    rank = query.rank
    if rank < 2 or key.rank != rank or value.rank != rank:
        raise Unsupported("attention on tensors of several ranks")
    if static(query.dims[-1]) == 0:
        raise Unsupported("attention of heads without elements")
    scale = 1 / math.sqrt(static(query.dims[-1])) if scale is None else scale
    batch = [_common(*dims) for dims in zip(*(t.dims[:-3] for t in (query, key, value)), strict=True)]
    heads, *fewer = (t.dims[-3] if rank > 2 else 1 for t in (query, key, value))
    shared = _common(*fewer)
    if attn_mask is not None:
        rows, keys = query.example, key.example
        others = (*keys[:-3], rows[-3]) if enable_gqa else keys[:-2]
        if _widens(attn_mask, (*torch.broadcast_shapes(rows[:-2], others), rows[-2], keys[-2])):
            raise Unsupported(f"attention with a mask of {list(attn_mask.example)}, wider than its scores")
        if attn_mask.dtype != torch.bool:
            attn_mask = b.cast(attn_mask, query.dtype)
        if rank > 4 and attn_mask.rank > 3:
            if all(same_size(size, 1) for size in attn_mask.dims[:-3]):
                attn_mask = b.reshape(attn_mask, attn_mask.dims[-3:])
            else:
                attn_mask = _heads(b, attn_mask, batch, attn_mask.dims[-3])
    out = b.emit(
        "Attention",
        _heads(b, query, batch, heads if enable_gqa else _common(heads, shared)),
        _heads(b, key, batch, shared),
        _heads(b, value, batch, shared),
        attn_mask,
        scale=float(scale),
        is_causal=int(is_causal),
        p=float(dropout_p) if dropout_p > 0 else None,
        subsequence=b.subsequence() if dropout_p > 0 else None,
    )
    return out if rank == 4 else b.reshape(out, result_shape(b))


# Normalisation


@translates(aten.layer_norm.default)
def layer_norm(
    b: Builder,
    x: Val,
    normalized_shape: list[int],
    weight: Val | None = None,
    bias: Val | None = None,
    eps: float = 1e-5,
    _cudnn: bool = True,
) -> Val:
    return b.emit(
        "LayerNormalization",
        x,
        weight,
        bias,
        axis=x.rank - len(normalized_shape),
        epsilon=float(eps),
    )


@translates(aten.native_layer_norm.default)
def native_layer_norm(
    b: Builder, x: Val, normalized_shape: list[int], weight: Val | None, bias: Val | None, eps: float
) -> Any:
    axis = x.rank - len(normalized_shape)
    out = b.emit_all("LayerNormalization", x, weight, bias, axis=axis, epsilon=float(eps))
    return tuple(b.cast(v, result_dtype(b, i)) for i, v in enumerate(out))


@translates(aten.rms_norm.default)
def rms_norm(
    b: Builder, x: Val, normalized_shape: list[int], weight: Val | None = None, eps: float | None = None
) -> Val:
    dtype, wide = result_dtype(b), computed_in(x.dtype)
    eps = torch.finfo(wide).eps if eps is None else float(eps)
    x = x if x.dtype == dtype else b.cast(x, wide)
    if weight is not None and weight.dtype not in (x.dtype, wide):
        weight = b.cast(weight, wide)
    return b.cast(b.emit("RmsNorm", x, weight, axis=x.rank - len(normalized_shape), epsilon=eps), dtype)


@translates(aten._weight_norm.default)
def weight_norm(b: Builder, v: Val, g: Val, dim: int = 0) -> Val:
    axes = [a for a in range(v.rank) if dim < 0 or a != dim]
    wide = computed_in(result_dtype(b))
    v, g = b.cast(v, wide), b.cast(g, wide)
    return b.cast(b.emit("Mul", v, b.emit("Div", g, norm_over(b, v, 2, axes, dim >= 0))), result_dtype(b))


def _per_channel(b: Builder, x: Val, v: Val) -> Val:
    """[C] as [C, 1, ...], to broadcast with [N, C, ...]."""
    return b.reshape(v, (x.dims[1], *[1] * (x.rank - 2))) if x.rank > 2 else v


def _affine(b: Builder, x: Val, out: Val, weight: Val | None, bias: Val | None) -> Val:
    """`out`, what x is computed to, times `weight` plus `bias`, in x's dtype."""
    if weight is not None:
        out = b.emit("Mul", out, _per_channel(b, x, b.cast(weight, out.dtype)))
    if bias is not None:
        out = b.emit("Add", out, _per_channel(b, x, b.cast(bias, out.dtype)))
    return b.cast(out, x.dtype)


@translates(aten.batch_norm.default)
def batch_norm(
    b: Builder,
    x: Val,
    weight: Val | None,
    bias: Val | None,
    mean: Val | None,
    var: Val | None,
    training: bool,
    momentum: float,
    eps: float,
    _cudnn: bool = False,
) -> Val:
    if not training:
        assert mean is not None and var is not None
        dtype, wide = x.dtype, computed_in(x.dtype)
        x, mean, var = b.cast(x, wide), b.cast(mean, wide), b.cast(var, wide)
        factor = b.emit("Rsqrt", b.emit("Add", var, b.const(eps, wide)))
        factor = factor if weight is None else b.emit("Mul", factor, b.cast(weight, wide))
        shift = b.emit("Mul", mean, factor)
        shift = b.emit("Neg", shift) if bias is None else b.emit("Sub", b.cast(bias, wide), shift)
        scaled = b.emit("Mul", x, _per_channel(b, x, factor))
        out = b.emit("Add", scaled, _per_channel(b, x, shift))  # as PyTorch computes it; the factor's gradient is not
        if factor.grad:
            like = b.emit("Mul", b.emit("Sub", x, _per_channel(b, x, mean)), _per_channel(b, x, factor))
            like = like if bias is None else b.emit("Add", like, _per_channel(b, x, b.cast(bias, wide)))
            out = b.with_gradient_of(out, like)
        return b.cast(out, dtype)
    out, _, _, *updated = _batch_norm(b, x, weight, bias, mean, var, momentum, eps)
    for stat, new in zip((mean, var), updated, strict=False):
        if stat is not None:
            b.overwrite(stat, new)
    return out


def _batch_norm(
    b: Builder,
    x: Val,
    weight: Val | None,
    bias: Val | None,
    mean: Val | None,
    var: Val | None,
    momentum: float,
    eps: float,
) -> Any:
    return b.emit_all(
        "BatchNorm",
        x,
        weight,
        bias,
        mean,
        var,
        outputs=3 if mean is None else 5,
        epsilon=float(eps),
        momentum=float(momentum),
    )


@translates(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    b: Builder,
    x: Val,
    weight: Val | None,
    bias: Val | None,
    mean: Val,
    var: Val,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not training:
        out = batch_norm(b, x, weight, bias, mean, var, False, momentum, eps)
        return out, None, None, mean, var
    if x.dtype in HALVES and (weight is None or weight.dtype == x.dtype):
        raise Unsupported("batch norm whose statistics PyTorch keeps in 16 bits")  # its tracer takes them for wider
    return _batch_norm(b, x, weight, bias, mean, var, momentum, eps)


@translates(aten._native_batch_norm_legit_no_training.default)
def batch_norm_inference(
    b: Builder, x: Val, weight: Val | None, bias: Val | None, mean: Val, var: Val, momentum: float, eps: float
) -> tuple[Val, None, None]:
    return batch_norm(b, x, weight, bias, mean, var, False, momentum, eps), None, None


@translates(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_statistics(
    b: Builder, x: Val, weight: Val | None, bias: Val | None, training: bool, momentum: float, eps: float
) -> Any:
    if not training:
        raise Unsupported("batch norm in inference without statistics")
    return _batch_norm(b, x, weight, bias, None, None, momentum, eps)[0], None, None


def _norm_groups(b: Builder, x: Val, groups: Size, weight: Val | None, bias: Val | None, eps: float) -> Val:
    """Each of so many groups of channels of each sample normalised, as it is computed."""
    wide = computed_in(x.dtype)
    of = {v.dtype for v in (weight, bias) if v is not None}
    if of and of not in ({x.dtype}, {wide}):
        raise Unsupported(f"a norm of {x.dtype} with parameters of {' and '.join(sorted(map(str, of)))}")
    if (weight is None and bias is None) or not isinstance(groups, int):
        flat = b.reshape(b.cast(x, wide), (x.dims[0], groups, math.prod(x.dims[1:]) // groups))
        out = b.emit("LayerNormalization", flat, axis=2, epsilon=float(eps))
        return _affine(b, x, b.reshape(out, x.dims), weight, bias)
    return b.emit("GroupNorm", x, weight, bias, num_groups=groups, epsilon=float(eps))


@translates(aten.group_norm.default)
def group_norm(
    b: Builder,
    x: Val,
    num_groups: int,
    weight: Val | None = None,
    bias: Val | None = None,
    eps: float = 1e-5,
    _cudnn: bool = True,
) -> Val:
    return _norm_groups(b, x, num_groups, weight, bias, eps)


@translates(aten.instance_norm.default)
def instance_norm(
    b: Builder,
    x: Val,
    weight: Val | None,
    bias: Val | None,
    mean: Val | None,
    var: Val | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    _cudnn: bool = False,
) -> Val:
    if not use_input_stats:
        return batch_norm(b, x, weight, bias, mean, var, False, momentum, eps)
    if mean is not None and var is not None:
        axes = list(range(2, x.rank))
        wide = computed_in(mean.dtype)
        average, variance, _ = moments(b, b.cast(b.detached(x), wide), axes, 1)
        for stat, now in ((mean, average), (var, variance)):
            kept = b.emit("Mul", b.cast(stat, wide), b.const(1 - momentum, wide))
            part = b.emit("Mul", b.reshape(now, x.dims[:2]), b.const(momentum, wide))
            of_each = b.cast(b.cast(b.emit("Add", kept, part), stat.dtype), wide)  # rounded as in PyTorch
            b.overwrite(stat, b.cast(reduce(b, "ReduceMean", of_each, [0], False), stat.dtype))
    return _norm_groups(b, x, x.dims[1], weight, bias, eps)


@translates(aten.glu.default)
def glu(b: Builder, x: Val, dim: int = -1) -> Val:
    axis = axis_of(x, dim)
    half = x.dims[axis] // 2
    left, right = b.emit_all("Split", x, b.ints([half, half]), outputs=2, axis=axis)
    wide = computed_in(x.dtype)
    gate = b.emit("Sigmoid", b.cast(b.detached(right), wide))
    out = b.cast(b.emit("Mul", b.cast(b.detached(left), wide), gate), x.dtype)
    if not x.grad:
        return out
    kept = b.cast(gate, x.dtype)  # by PyTorch, for the gradient
    gate = b.cast(kept, wide)
    slope = b.emit("Mul", b.emit("Mul", b.emit("Sub", b.const(1.0, wide), gate), gate), b.cast(b.detached(left), wide))
    gated = b.cast(b.emit("Mul", b.cast(right, wide), slope), x.dtype)
    return b.with_gradient_of(out, b.emit("Add", b.emit("Mul", left, kept), gated))


@translates(aten.addbmm.default)
def addbmm(b: Builder, bias: Val, x: Val, y: Val, *, beta: Any = 1, alpha: Any = 1) -> Val:
    return _added(b, bias, reduce(b, "ReduceSum", _wide_product(b, x, y), [0], False), beta, alpha, x.dtype)


@translates(aten.addr.default)
def addr(b: Builder, bias: Val, x: Val, y: Val, *, beta: Any = 1, alpha: Any = 1) -> Val:
    outer = b.emit("Mul", b.unsqueeze(x, 1), b.unsqueeze(y, 0))
    if {bias.dtype, x.dtype, y.dtype} != {result_dtype(b)}:
        raise Unsupported("an outer product added to another dtype")
    return _added(b, bias, outer, beta, alpha, outer.dtype)


@translates(aten.linalg_cross.default)
def cross(b: Builder, x: Val, y: Val, *, dim: int = -1) -> Val:
    """Of vectors of three elements along a dim."""
    shape, dtype = result_shape(b), result_dtype(b)
    if x.dtype != y.dtype or dtype == torch.bool:
        raise Unsupported(f"a cross product of {x.dtype} and {y.dtype}")
    axis = dim + len(shape) if dim < 0 else dim

    def parts(v: Val) -> list[Val]:
        return b.emit_all("Split", b.expand(b.cast(v, dtype), shape), b.ints([1, 1, 1]), outputs=3, axis=axis)

    xs, ys = parts(x), parts(y)
    pairs = ((1, 2), (2, 0), (0, 1))
    out = [b.emit("Sub", b.emit("Mul", xs[i], ys[j]), b.emit("Mul", xs[j], ys[i])) for i, j in pairs]
    return b.emit("Concat", *out, axis=axis)
