"""One row of the op tables, and the checks it expands into.

A :class:`Case` says how an op of the graph is called and which PyTorch function it equals. From
each row follow: forward on every instruction set of this machine, the gradient against PyTorch's
autograd, the gradient against finite differences in float64, the same result from other thread
counts, and guard bytes around nothing but what the op was given (sanitizer run of the C tests).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ortmodule_c import _C

# Absolute and relative tolerance per dtype, against PyTorch's own result in that dtype.
TOLERANCE = {
    torch.float32: (2e-5, 2e-5),
    torch.float64: (1e-10, 1e-9),
    torch.int64: (0, 0),
    torch.int32: (0, 0),
    torch.int16: (0, 0),
    torch.int8: (0, 0),
    torch.bool: (0, 0),
    torch.uint8: (0, 0),
}
DTYPE_TEXT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


@dataclass(frozen=True, eq=False)
class Case:
    """One call of one op.

    Parameters
    ----------
    op
        Name in ``ops.def``.
    inputs
        Tensors in the op's order; None for an optional input left out. A callable makes them
        from a generator.
    torch
        The function of PyTorch that gives the same outputs from the same inputs.
    attrs
        Attributes of the node.
    consts
        Positions of inputs that are constants of the graph (shapes, axes).
    outputs
        Number of outputs asked for.
    compare
        How many of the outputs `torch` gives, when the op has more.
    grads
        Positions of inputs whose gradient is compared; None: every float input not a constant.
    differentiable
        How many of the outputs carry a gradient, when not all that are compared do.
    derivative
        Whether the gradient is the derivative; false where PyTorch defines another.
    scale
        Factor on the tolerance, with its reason in a comment beside the row.
    """

    op: str
    inputs: Sequence[Tensor | None]
    torch: Callable[..., Tensor | Sequence[Tensor]]
    attrs: Mapping[str, object] = field(default_factory=dict)
    consts: Sequence[int] = ()
    outputs: int = 1
    compare: int | None = None
    grads: Sequence[int] | None = None
    differentiable: int | None = None
    derivative: bool = True
    scale: float = 1.0

    def __str__(self) -> str:
        shapes = "x".join("_" if t is None else "·".join(map(str, t.shape)) or "0d" for t in self.inputs)
        dtype = next((DTYPE_TEXT[t.dtype] for t in self.inputs if t is not None), "")
        attrs = ",".join(f"{k}={v}" for k, v in self.attrs.items())
        return f"{self.op}-{dtype}-{shapes}-{attrs}".replace(" ", "")


def attr_text(value: object) -> str:
    """An attribute in the text form of a graph."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(attr_text(v) for v in value) + "]"
    return repr(value)


def type_text(t: Tensor) -> str:
    return f"{DTYPE_TEXT[t.dtype]}[{','.join(map(str, t.shape))}]"


def graph_text(case: Case, dynamic: bool = False) -> str:
    """The graph of one node; with `dynamic`, every dim of an input is left open."""
    lines, names = [], []
    for i, t in enumerate(case.inputs):
        if t is None:
            names.append("_")
            continue
        names.append(f"%x{i}")
        if i in case.consts:
            lines.append(f"const %x{i} : {type_text(t)} = @")
        else:
            kind = f"{DTYPE_TEXT[t.dtype]}[{','.join('?' * t.dim())}]" if dynamic else type_text(t)
            lines.append(f"input %x{i} : {kind}" + (" grad" if t.dtype.is_floating_point else ""))
    outs = ", ".join(f"%y{k}" for k in range(case.outputs))
    attrs = ", ".join(f"{k}={attr_text(v)}" for k, v in case.attrs.items())
    lines.append(f"{outs} = {case.op}({', '.join(names)})" + (f" {{{attrs}}}" if attrs else ""))
    lines.append(f"return {outs}")
    return "\n".join(lines) + "\n"


def session(case: Case, dynamic: bool = False) -> _C.Session:
    constants = {f"%x{i}"[1:]: case.inputs[i].contiguous() for i in case.consts}
    return _C.Session(graph_text(case, dynamic), constants)


def free_inputs(case: Case) -> list[int]:
    return [i for i, t in enumerate(case.inputs) if t is not None and i not in case.consts]


def wanted(case: Case) -> list[int]:
    if case.grads is not None:
        return list(case.grads)
    return [i for i in free_inputs(case) if case.inputs[i].dtype.is_floating_point]


def run(case: Case, seed: int = 0, dynamic: bool = False) -> list[Tensor]:
    """Forward through the graph."""
    inputs = [case.inputs[i].contiguous() for i in free_inputs(case)]
    plan = session(case, dynamic).plan(inputs, [False] * len(inputs), [False] * case.outputs)
    return plan.forward(inputs, seed)[0]


def run_grad(case: Case, douts: Sequence[Tensor | None], seed: int = 0) -> dict[int, Tensor | None]:
    """Gradients of the wanted inputs for given gradients of the outputs."""
    free, want = free_inputs(case), wanted(case)
    inputs = [case.inputs[i].contiguous() for i in free]
    plan = session(case).plan(inputs, [i in want for i in free], [d is not None for d in douts])
    outputs, state = plan.forward(inputs, seed)
    grads = plan.backward(state, inputs, outputs, douts)
    return {i: g for i, g in zip(free, grads, strict=True) if i in want}


def expected(case: Case, inputs: Sequence[Tensor | None] | None = None) -> list[Tensor]:
    given = case.inputs if inputs is None else inputs
    out = case.torch(*given)
    return [out] if isinstance(out, Tensor) else list(out)


def expected_grad(case: Case, douts: Sequence[Tensor | None]) -> dict[int, Tensor | None]:
    want = wanted(case)
    inputs = [t.detach().clone().requires_grad_() if i in want else t for i, t in enumerate(case.inputs)]
    pairs = [(y, d) for y, d in zip(expected(case, inputs), douts, strict=False) if d is not None and y.requires_grad]
    if not pairs:
        return dict.fromkeys(want)
    grads = torch.autograd.grad(
        [y for y, _ in pairs], [inputs[i] for i in want], [d for _, d in pairs], allow_unused=True
    )
    return dict(zip(want, grads, strict=True))


def assert_close(got: Tensor, want: Tensor, what: str, scale: float = 1.0) -> None:
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)} for {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype} for {want.dtype}"
    atol, rtol = TOLERANCE[want.dtype]
    # Values of a sum of many terms are compared on the scale of the largest of them.
    finite = want[want.isfinite()] if want.dtype.is_floating_point else want
    peak = float(finite.abs().max()) if want.dtype.is_floating_point and finite.numel() else 1.0
    torch.testing.assert_close(
        got, want, atol=scale * atol * max(1.0, peak), rtol=scale * rtol, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )
