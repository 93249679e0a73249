"""Runs one sample in PyTorch and here, and tells what differs."""

from __future__ import annotations

import copy
import math
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ortmodule_c import DebugOptions, ORTModule
from samples import Case, Sample, copies

# Outcomes that are as they should be ...
NATIVE, PER_OP, WHOLE, REFUSED = "native", "per op", "whole", "refused"
# ... and that are not.
WRONG, RAISED, DIED = "WRONG", "RAISED", "DIED"
FAILURES = (WRONG, RAISED, DIED)

# Units in the last place of the largest element are nothing at all: PyTorch's own kernels are so far from float64. What
# is further away may be as many times further from the same computation in float64 as PyTorch's result is, or further
# from PyTorch's result than that moves when each number that goes in is moved by one unit, or in float64 than PyTorch's
# own error is, which is that of float32 in smaller units.
ULPS = {torch.float64: 16, torch.float32: 4, torch.bfloat16: 4, torch.float16: 4}
FACTOR = 2
# A sum of numbers around 1 may cancel: nothing wider than float64 could tell, and 16 bits do by the order of their
# roundings: there a unit of 1 is nothing.
LEAST = {torch.float64: 1.0, torch.bfloat16: 1.0, torch.float16: 1.0}


@dataclass
class Outcome:
    """How a sample fared.

    Attributes
    ----------
    kind
        One of the outcomes above.
    detail
        What differs or was raised, or why it does not run in C.
    """

    kind: str
    detail: str = ""


@dataclass
class _Step:
    """What one forward and backward gave."""

    error: Exception | None = None
    stage: str = ""
    spec: Any = None
    plain: list[Any] = field(default_factory=list)
    tensors: dict[str, Tensor | None] = field(default_factory=dict)


def check(case: Case) -> Outcome:
    """Run a sample both ways."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _check(case)


def _check(case: Case) -> Outcome:
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    eager = case.make()
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture="export"))  # ORTMODULE_CAPTURE wins
    outcome = _compare(case, eager, ours)
    if outcome.kind in FAILURES or not isinstance(eager, Sample):
        return outcome
    # Once more by the graph that is there now: nothing of the first values may be in it.
    other = replace(case, tensors=copies(case.tensors, lambda t: t * 0.5 if t.is_floating_point() else t))
    again = _compare(other, eager, ours)
    return Outcome(again.kind, f"second call: {again.detail}") if again.kind in FAILURES else outcome


def _compare(case: Case, eager: nn.Module, ours: ORTModule) -> Outcome:
    want = _step(eager, copies(case.tensors), 1)
    got = _step(ours, copies(case.tensors), 1)
    report = ours.fallback_report()
    whole = any(r.name == type(eager).__name__ or r.name.startswith("the graph") or ":" in r.name for r in report)
    kind = WHOLE if whole else PER_OP if report else NATIVE
    cause = "; ".join(f"{r.name}: {r.cause}" for r in report)
    if got.error is not None or want.error is not None:
        return _compare_errors(want, got)
    different = _difference(case, want, got, native=kind == NATIVE)
    return Outcome(WRONG, f"{different} [{kind}{': ' * bool(cause)}{cause}]") if different else Outcome(kind, cause)


def _step(module: nn.Module, tensors: Sequence[Tensor], seed: int) -> _Step:
    """Forward, and backward with gradients that are the same for the same shapes."""
    step = _Step()
    torch.manual_seed(seed)
    try:
        step.stage = "forward"
        leaves, step.spec = pytree.tree_flatten(module(*tensors))
        step.plain = [None if isinstance(v, Tensor) else v for v in leaves]
        outputs = [(f"output {i}", v) for i, v in enumerate(leaves) if isinstance(v, Tensor)]
        step.tensors = dict(outputs)
        step.stage = "backward"
        reached = [v for _, v in outputs if v.requires_grad]
        if reached:
            torch.autograd.backward(reached, [_cotangent(v) for v in reached])
    except Exception as error:
        step.error = error
        return step
    step.tensors |= {f"input {i}": t.detach() for i, t in enumerate(tensors)}
    step.tensors |= {f"gradient of input {i}": t.grad for i, t in enumerate(tensors) if t.requires_grad}
    step.tensors |= {f"gradient of {n}": p.grad for n, p in module.named_parameters()}
    step.tensors |= {f"buffer {n}": b for n, b in module.named_buffers()}
    return step


def _cotangent(t: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(t.numel())
    wide = torch.complex128 if t.is_complex() else torch.float64
    values = torch.randn(t.shape, dtype=wide, generator=generator)
    return values.bfloat16().to(t.dtype) if not t.is_complex() else values.to(t.dtype)


def _compare_errors(want: _Step, got: _Step) -> Outcome:
    if want.error is None:
        assert got.error is not None
        return Outcome(RAISED, f"{got.stage}: {_told(got.error)}")
    if want.stage == "backward" and isinstance(want.error, NotImplementedError):
        return Outcome(REFUSED)  # ours may well have the gradient that PyTorch lacks
    if got.error is None:
        return Outcome(WRONG, f"PyTorch raises in its {want.stage}: {_told(want.error)}")
    if type(got.error) is not type(want.error) or got.stage != want.stage:
        return Outcome(RAISED, f"{got.stage}: {_told(got.error)}, where PyTorch raises {_told(want.error)}")
    return Outcome(REFUSED)


def _told(error: Exception) -> str:
    at = next((f for f in reversed(traceback.extract_tb(error.__traceback__)) if "ortmodule_c" in f.filename), None)
    place = f" ({at.filename.rsplit('/', 1)[-1]}:{at.lineno})" if at is not None else ""
    return f"{type(error).__name__}: {str(error).strip()[:300]}{place}"


def _difference(case: Case, want: _Step, got: _Step, native: bool) -> str:
    """The first thing that differs, or nothing."""
    if got.spec != want.spec:
        return f"results nest as {got.spec}, not {want.spec}"
    if repr(got.plain) != repr(want.plain):
        return f"plain results are {got.plain}, not {want.plain}"
    if list(got.tensors) != list(want.tensors):
        return f"there are {list(got.tensors)}, not {list(want.tensors)}"
    pairs = [(name, got.tensors[name], want.tensors[name]) for name in want.tensors]
    for name, b, a in pairs:
        if _kind(a) != _kind(b):
            return f"{name} is {_kind(b)}, not {_kind(a)}"
    both = [(n, b, a) for n, b, a in pairs if a is not None and b is not None and (case.defined or "output" not in n)]
    if all(not _distance(b, a, None, []) for _, b, a in both) or (native and _random(case, want)):
        return ""
    exact, moved = _exact(case), [*_moved(case), *_rounded(case, want)]
    for name, b, a in both:
        told = _distance(b, a, exact.get(name), [m[name] for m in moved if m.get(name) is not None])
        if told:
            return f"{name} {told}"
    return ""


def _kind(t: Tensor | None) -> str:
    if t is None:
        return "None"
    grad = ", requires grad" if t.requires_grad else ""
    layout = "" if t.layout is torch.strided else f" {t.layout}"
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}{layout}{grad}"


def _random(case: Case, want: _Step) -> bool:
    """Whether PyTorch's result depends on the seed."""
    others = (_step(case.make(), copies(case.tensors), seed) for seed in range(10**9, 10**10, 10**9))
    return any(
        (a is None) != (b is None) or (a is not None and b is not None and not _same(a, b))
        for other in others
        for a, b in zip(want.tensors.values(), other.tensors.values(), strict=False)
    )


def _exact(case: Case) -> dict[str, Tensor | None]:
    """PyTorch's results in float64, none if it cannot run there."""
    step = _step(case.make().double(), copies(case.tensors, lambda t: t.double() if t.is_floating_point() else t), 1)
    return step.tensors if step.error is None else {}


def _moved(case: Case) -> list[dict[str, Tensor | None]]:
    """PyTorch's results for arguments and parameters that are a little different."""
    generator = torch.Generator().manual_seed(0)

    def moved(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        signs = torch.randint(-1, 2, t.shape, generator=generator).to(t.dtype)
        return t + t * signs * torch.finfo(t.dtype).eps

    def step() -> _Step:
        module = case.make()
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(moved(p))
        return _step(module, copies(case.tensors, moved), 1)

    steps = [step() for _ in range(4)]
    return [s.tensors for s in steps if s.error is None]


def _rounded(case: Case, want: _Step) -> list[dict[str, Tensor | None]]:
    """PyTorch's results in float64, with errors as it makes them in float32, in units of float64."""
    low = copies(case.tensors, lambda t: t.float() if t.is_floating_point() else t)
    high = copies(low, lambda t: t.double() if t.is_floating_point() else t)
    errors = _step(case.make().float(), low, 1), _step(case.make().float().double(), high, 1)
    if any(s.error is not None for s in errors):
        return []
    unit = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    found: dict[str, Tensor | None] = {}
    for name, t in want.tensors.items():
        a, b = (s.tensors.get(name) for s in errors)
        if t is not None and t.dtype is torch.float64 and a is not None and b is not None and a.shape == b.shape:
            found[name] = t.detach() + unit * (_numbers(a) - _numbers(b))
    return [found]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(_numbers(a).nan_to_num(nan=12345.0), _numbers(b).nan_to_num(nan=12345.0))


def _numbers(t: Tensor) -> Tensor:
    """Values in a dtype that holds them all."""
    t = t.detach()
    if t.is_quantized:
        t = t.dequantize()
    if t.layout is not torch.strided:
        t = t.to_dense()
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    return t.double() if t.is_floating_point() else t


def _distance(ours: Tensor, eager: Tensor, exact: Tensor | None, moved: list[Tensor]) -> str:
    """How far our values are out, or nothing if they are as good as PyTorch's."""
    a, b = _numbers(ours), _numbers(eager)
    if a.shape != b.shape:
        return f"has {list(a.shape)} elements, not {list(b.shape)}"
    if not a.is_floating_point():
        n = int((a != b).sum())
        return f"differs in {n} of {a.numel()} elements: {_at(a, b, a != b)}" if n else ""
    special = ~(b.isfinite() & a.isfinite())
    odd = special & ~((a == b) | (a.isnan() & b.isnan()))
    if odd.any():
        return f"is not finite alike: {_at(a, b, odd)}"
    real = ours.dtype.to_real() if ours.is_complex() else ours.dtype
    eps = torch.finfo(real).eps
    allowed = eps * max(ULPS[real] * _peak(b), LEAST.get(real, 0))
    far = (a - b).abs().masked_fill(special, 0)
    others = [_numbers(m) for m in moved if m.shape == eager.shape]
    if exact is not None and exact.shape == eager.shape:
        others.append(_numbers(exact))
        far = torch.minimum(far, (a - others[-1]).abs().masked_fill(special | ~others[-1].isfinite(), math.inf))
    allowed = max([allowed, *(FACTOR * _peak((b - o).masked_fill(special, 0)) for o in others)])
    out = far > allowed
    return f"is out by {float(far.max()):.2g}, allowed {allowed:.2g}: {_at(a, b, out)}" if out.any() else ""


def _peak(t: Tensor) -> float:
    finite = t.abs()[t.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _at(a: Tensor, b: Tensor, where: Tensor) -> str:
    index = tuple(where.nonzero()[0].tolist())
    return f"{a[index].item()} instead of {b[index].item()} at {list(index)}"
