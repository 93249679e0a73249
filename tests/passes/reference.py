"""The graph text run node by node with plain PyTorch: what any chain of passes must still compute."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "i64": torch.int64,
    "i32": torch.int32,
    "bool": torch.bool,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
}
ONNX_DTYPES = {
    1: torch.float32,
    10: torch.float16,
    16: torch.bfloat16,
    11: torch.float64,
    7: torch.int64,
    6: torch.int32,
    9: torch.bool,
}
NODE = re.compile(r"^(?P<outs>.+?) = (?P<op>\w+)\((?P<ins>.*?)\)(?: \{(?P<attrs>.*)\})?(?: name=.*)?$")
TYPE = re.compile(r"(\w+)\[([\d,]*)\]")


def value_of(text: str) -> object:
    names = {"true": True, "false": False, "inf": float("inf"), "nan": float("nan")}
    return eval(text, {"__builtins__": {}}, names)


def attributes(text: str | None) -> dict[str, object]:
    pairs = re.findall(r'(\w+)=(\[.*?\]|".*?"|[^,]+)', text or "")
    return {name: value_of(v) for name, v in pairs}


def parse_type(text: str) -> tuple[torch.dtype, list[int]]:
    name, dims = TYPE.match(text).groups()
    return DTYPES[name], [int(d) for d in dims.split(",") if d]


def random_inputs(text: str, seed: int = 0) -> list[Tensor]:
    """Values for the inputs of a graph; integers are below 3 so that they may be indices."""
    g = torch.Generator().manual_seed(seed)
    inputs = []
    for kind in re.findall(r"^\s*input \S+ : (\S+)", text, re.M):
        dtype, dims = parse_type(kind)
        if dtype.is_floating_point:
            inputs.append(torch.randn(dims, generator=g, dtype=torch.float64).to(dtype))
        else:
            inputs.append(torch.randint(0, 2 if dtype == torch.bool else 3, dims, generator=g).to(dtype))
    return inputs


def axes_of(x: Tensor, axes: Tensor | None) -> list[int]:
    return list(range(x.dim())) if axes is None else axes.tolist()


def reduction(f: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    def reduce(x: Tensor, axes: Tensor | None = None, keepdims: int = 1, to: int | None = None) -> Tensor:
        dims = sorted((a % x.dim() for a in axes_of(x, axes)), reverse=True)
        for d in dims:
            x = f(x, d)
        for d in sorted(dims) if keepdims else ():
            x = x.unsqueeze(d)
        return x if to is None else x.to(ONNX_DTYPES[to])

    return reduce


def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    transA: int = 0,
    transB: int = 0,
    alpha: float = 1,
    to: int | None = None,
) -> Tensor:
    b = b.to(a.dtype)
    if to is not None:
        a, b = a.to(ONNX_DTYPES[to]), b.to(ONNX_DTYPES[to])
    y = alpha * ((a.mT if transA else a) @ (b.mT if transB else b))
    return y if bias is None else y + bias


def grouped_matmul(x: Tensor, w: Tensor, ends: Tensor, transB: int = 0) -> Tensor:
    out, start = [], 0
    for matrix, end in zip(w.mT if transB else w, ends.tolist(), strict=True):
        out.append(x[start:end] @ matrix)
        start = end
    return torch.cat([*out, x.new_zeros(len(x) - start, out[0].shape[1])])


def padded(x: Tensor, pads: Sequence[int], value: float = 0) -> Tensor:
    """`x` with so many elements before each axis but the first two, and after each."""
    space = x.dim() - 2
    sides = [n for axis in reversed(range(space)) for n in (pads[axis], pads[space + axis])] if pads else []
    return F.pad(x, sides, value=value)


def conv(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    pads: Sequence[int] = (),
    strides: Sequence[int] = (),
    dilations: Sequence[int] = (),
    group: int = 1,
) -> Tensor:
    space = x.dim() - 2
    convolve = (F.conv1d, F.conv2d, F.conv3d)[space - 1]
    return convolve(padded(x, pads), w, bias, strides or 1, 0, dilations or 1, group)


def max_pool(
    x: Tensor,
    kernel_shape: Sequence[int],
    pads: Sequence[int] = (),
    strides: Sequence[int] = (),
    dilations: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    space = x.dim() - 2
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[space - 1]
    return pool(padded(x, pads, -torch.inf), kernel_shape, strides or 1, 0, dilations or 1, return_indices=True)


def attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    mask: Tensor | None = None,
    scale: float = 1,
    is_causal: int = 0,
    head_axes: Sequence[int] = (1, 1, 1, 1),
    kv_heads: int = 0,
    **_: object,
) -> tuple[Tensor, Tensor]:
    if kv_heads:
        q, k, v = q.split([q.shape[2] - 2 * kv_heads, kv_heads, kv_heads], 2)
    q, k, v = (x.movedim(axis, 1) for x, axis in zip((q, k, v), head_axes, strict=False))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = scale * (q @ k.mT)
    keep = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if is_causal:
        keep = keep.tril()
    if mask is not None and mask.dtype == torch.bool:
        keep = keep & mask
    elif mask is not None:
        scores = scores + mask
    scores = scores.masked_fill(~keep, -torch.inf)
    return (scores.softmax(-1) @ v).movedim(1, head_axes[3]), scores.logsumexp(-1)


def cross_entropy(x: Tensor, target: Tensor, weight: Tensor | None = None, **attrs: object) -> Tensor:
    return F.cross_entropy(x, target, weight, **attrs)


def nll_loss(x: Tensor, target: Tensor, weight: Tensor | None = None, **attrs: object) -> Tensor:
    return F.nll_loss(x, target, weight, **attrs)


def linear_cross_entropy(
    x: Tensor, w: Tensor, target: Tensor, bias: Tensor | None = None, weight: Tensor | None = None, **attrs: object
) -> Tensor:
    return F.cross_entropy(F.linear(x, w, bias), target, weight, **attrs)


def layer_norm(
    x: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    axis: int = -1,
    epsilon: float = 1e-5,
    to: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(axis % x.dim(), x.dim()))
    mean, var = x.mean(dims, keepdim=True), x.var(dims, unbiased=False, keepdim=True)
    rstd = (var + epsilon).rsqrt()
    y = (x - mean) * rstd
    y = (y if gamma is None else y * gamma) + (0 if beta is None else beta)
    return y if to is None else y.to(ONNX_DTYPES[to]), mean, rstd


def rms_norm(
    x: Tensor, gamma: Tensor | None = None, axis: int = -1, epsilon: float = 1e-5, to: int | None = None
) -> tuple[Tensor, Tensor]:
    rstd = (x.square().mean(list(range(axis % x.dim(), x.dim())), keepdim=True) + epsilon).rsqrt()
    y = x * rstd if gamma is None else x * rstd * gamma
    return y if to is None else y.to(ONNX_DTYPES[to]), rstd


def norm_grad(dy: Tensor, x: Tensor, gamma: Tensor | None, *kept: Tensor, axis: int = -1, **_: object) -> Tensor:
    *mean, rstd = kept  # of a layer norm both
    dims = list(range(axis % x.dim(), x.dim()))
    g = dy.to(x.dtype) * (1 if gamma is None else gamma)
    xhat = (x - mean[0] if mean else x) * rstd
    return rstd * (g - (g.mean(dims, keepdim=True) if mean else 0) - xhat * (g * xhat).mean(dims, keepdim=True))


def of_channels(x: Tensor, of: Tensor | None, default: float) -> Tensor:
    of = torch.full((x.shape[1],), default, dtype=x.dtype) if of is None else of
    return of.reshape(-1, *[1] * (x.dim() - 2))


def batch_norm(
    x: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    mean: Tensor | None = None,
    var: Tensor | None = None,
    added: Tensor | None = None,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.1,
    relu: int = 0,
) -> list[Tensor | None]:
    mean, var = (None if t is None else t.clone() for t in (mean, var))
    y = F.batch_norm(x, mean, var, gamma, beta, True, momentum, epsilon)
    y = y if added is None else y + added
    dims = [0, *range(2, x.dim())]
    centre, rstd = x.mean(dims), (x.var(dims, unbiased=False) + epsilon).rsqrt()
    return [y.relu() if relu else y, centre, rstd, mean, var, of_channels(x, beta, 0).flatten()]


def batch_norm_grad(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    shift: Tensor | None = None,
    *,
    relu: int = 0,
    **_: object,
) -> list[Tensor]:
    xhat = (x - of_channels(x, mean, 0)) * of_channels(x, rstd, 1)
    scale = of_channels(x, gamma, 1)
    dy = torch.where(xhat * scale + of_channels(x, shift, 0) <= 0, 0, dy) if relu else dy
    dims = [0, *range(2, x.dim())]
    centred = dy - dy.mean(dims, keepdim=True) - xhat * (dy * xhat).mean(dims, keepdim=True)
    return [centred * scale * of_channels(x, rstd, 1), (dy * xhat).sum(dims), dy.sum(dims)]


def slice_(x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None) -> Tensor:
    for i, axis in enumerate(axes_of(x, axes)):
        step = 1 if steps is None else int(steps[i])
        index = range(x.shape[axis])[slice(int(starts[i]), int(ends[i]), step)]
        x = x.index_select(axis, torch.tensor(list(index), dtype=torch.int64))
    return x


def gather(x: Tensor, ids: Tensor, *, axis: int = 0, **_: object) -> Tensor:
    rows = x.index_select(axis, ids.flatten() % max(x.shape[axis], 1))
    return rows.reshape(*x.shape[:axis], *ids.shape, *x.shape[axis:][1:])


def slice_grad(dy: Tensor, *by: Tensor, shape: Sequence[int]) -> Tensor:
    y = torch.zeros(list(shape), dtype=dy.dtype)
    places = slice_(torch.arange(y.numel()).reshape(y.shape), *by)
    y.view(-1)[places.flatten()] = dy.flatten()
    return y


def pad(x: Tensor, pads: Tensor, value: Tensor | None = None) -> Tensor:
    n = x.dim()
    pairs = [int(pads[i + side * n]) for i in reversed(range(n)) for side in (0, 1)]
    return F.pad(x, pairs, value=0 if value is None else value.item())


def embedding_grad(dy: Tensor, ids: Tensor, base: Tensor | None = None, *, shape: list[int], **_: object) -> Tensor:
    y = torch.zeros(shape, dtype=dy.dtype) if base is None else base
    return y.index_add(0, ids.flatten(), dy.reshape(-1, dy.shape[-1]))


def gather_grad(
    dy: Tensor, ids: Tensor, base: Tensor | None = None, *, axis: int = 0, shape: Sequence[int] = (), **_: object
) -> Tensor:
    y = torch.zeros(list(shape), dtype=dy.dtype) if base is None else base
    rows = [ids.numel() if i == axis else n for i, n in enumerate(y.shape)]
    return y.index_add(axis, ids.flatten() % y.shape[axis], dy.reshape(rows))


def gather_elements_grad(
    dy: Tensor, ids: Tensor, base: Tensor | None = None, *, axis: int = 0, shape: Sequence[int] = (), **_: object
) -> Tensor:
    y = torch.zeros(list(shape), dtype=dy.dtype) if base is None else base
    return y.scatter_add(axis, ids, dy)


def squeeze(x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(axes.tolist()))


def unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    for axis in sorted(axes.tolist()):
        x = x.unsqueeze(axis)
    return x


def fused(
    *inputs: Tensor, ops: list[str], args: list[int], imm: list[float], outs: list[int], **_: object
) -> list[Tensor]:
    """Only ops without immediates: those of the texts that name the op."""
    assert not any(imm)
    values = list(inputs)
    for k, op in enumerate(ops):
        values.append(OPS[op](*(values[i] for i in args[3 * k : 3 * k + 3] if i >= 0)))
    return [values[i] for i in outs]


OPS: dict[str, Callable[..., Tensor | Sequence[Tensor]]] = {
    "Abs": torch.abs,
    "Add": torch.add,
    "And": torch.logical_and,
    "Attention": attention,
    "BatchNorm": batch_norm,
    "BatchNormGrad": batch_norm_grad,
    "Cast": lambda x, to: x.to(ONNX_DTYPES[to]),
    "Concat": lambda *x, axis: torch.cat(x, axis),
    "Detach": torch.detach,
    "Conv": conv,
    "Div": torch.div,
    "Dropout": lambda x, p, subsequence: F.dropout(x, p),
    "EmbeddingGrad": embedding_grad,
    "Equal": torch.eq,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Expand": lambda x, s: x.expand(torch.broadcast_shapes(x.shape, tuple(s.tolist()))),
    "Flatten": lambda x, axis=1: x.reshape(x.shape[:axis].numel(), -1),
    "FusedElementwise": fused,
    "CrossEntropy": cross_entropy,
    "FusedMatMul": matmul,
    "GroupedMatMul": grouped_matmul,
    "Gather": gather,
    "GatherElements": lambda x, i, axis=0, strict=0: x.gather(axis, i),
    "GatherElementsGrad": gather_elements_grad,
    "GatherGrad": gather_grad,
    "Greater": torch.gt,
    "Gelu": lambda x, approximate="none": F.gelu(x, approximate=approximate),
    "Identity": lambda x: x,
    "LayerNormalization": layer_norm,
    "LayerNormGrad": norm_grad,
    "LessOrEqual": torch.le,
    "Log": torch.log,
    "LogSoftmax": lambda x, axis=-1: x.log_softmax(axis),
    "LinearCrossEntropy": linear_cross_entropy,
    "MatMul": matmul,
    "Max": torch.maximum,
    "MaxPool": max_pool,
    "Min": torch.minimum,
    "Mul": torch.mul,
    "Neg": torch.neg,
    "NegativeLogLikelihoodLoss": nll_loss,
    "Not": torch.logical_not,
    "Pad": pad,
    "Pow": torch.pow,
    "Reciprocal": torch.reciprocal,
    "ReduceMax": reduction(torch.amax),
    "ReduceMean": reduction(torch.mean),
    "ReduceMin": reduction(torch.amin),
    "ReduceProd": reduction(torch.prod),
    "ReduceSum": reduction(torch.sum),
    "Relu": torch.relu,
    "ReluGrad": lambda dy, y: torch.where(y <= 0, 0, dy),
    "Reshape": lambda x, s, allowzero=0: x.reshape(s.tolist()),
    "RmsNorm": rms_norm,
    "RmsNormGrad": norm_grad,
    "Rsqrt": torch.rsqrt,
    "Sigmoid": torch.sigmoid,
    "Silu": F.silu,
    "Sin": torch.sin,
    "Slice": slice_,
    "SliceGrad": slice_grad,
    "Softplus": F.softplus,
    "Softmax": lambda x, axis=-1: x.softmax(axis),
    "Split": lambda x, s, axis=0: x.split(s.tolist(), axis),
    "Sqrt": torch.sqrt,
    "Squeeze": squeeze,
    "Sub": torch.sub,
    "WithGradientOf": lambda x, like: x,
    "Tanh": torch.tanh,
    "Tile": lambda x, r: x.tile(r.tolist()),
    "Transpose": lambda x, perm=None: x.permute(perm or tuple(reversed(range(x.dim())))),
    "Unsqueeze": unsqueeze,
    "Where": torch.where,
}


def run(text: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The forward outputs of a graph in its text form."""
    values: dict[str, Tensor | None] = {"_": None}
    given = iter(inputs)
    for line in (raw.strip() for raw in text.splitlines()):
        if line.startswith("input"):
            values[line.split()[1]] = next(given)
        elif line.startswith("const"):
            name, kind, elements = re.match(r"const (\S+) : (\S+) = (.*)", line).groups()
            dtype, dims = parse_type(kind)
            values[name] = torch.tensor(value_of(elements), dtype=dtype).reshape(dims)
        elif line.startswith("return"):
            return [values[name] for name in line.removeprefix("return ").split(", ")]
        elif line:
            node = NODE.match(line)
            ins = [values[name] for name in node["ins"].split(", ")]
            out = OPS[node["op"]](*ins, **attributes(node["attrs"]))
            names = [part.split(" : ")[0] for part in node["outs"].split(", ")]
            values |= zip(names, [out] if isinstance(out, Tensor) else out, strict=False)
    raise AssertionError("no return")
