"""Runs one sample in PyTorch and here, and tells what differs."""

from __future__ import annotations

import copy
import math
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ortmodule_c import DebugOptions, ORTModule
from ortmodule_c.errors import Mistake
from samples import Case, Sample, copies

# Outcomes that are as they should be ...
NATIVE, PER_OP, WHOLE, REFUSED = "native", "per op", "whole", "refused"
# ... and that are not.
WRONG, RAISED, DIED = "WRONG", "RAISED", "DIED"
FAILURES = (WRONG, RAISED, DIED)

# Units in the last place of the largest element are nothing at all: PyTorch's own kernels are so far from float64. What
# is further away may be as many times further from the same computation in float64 as PyTorch's result is, or further
# from PyTorch's result than that moves when each number that goes in, and each that one of its ops makes on the way, is
# moved by one unit: so far are two computations apart that both round well.
ULPS = {torch.float64: 16, torch.float32: 4, torch.bfloat16: 4, torch.float16: 4}
FACTOR = 2
# A sum of numbers around 1 may cancel: nothing wider than float64 could tell, and 16 bits do by the order of their
# roundings: there a unit of 1 is nothing.
LEAST = {torch.float64: 1.0, torch.bfloat16: 1.0, torch.float16: 1.0}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


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
class Step:
    """What one forward and backward gave."""

    error: Exception | Mistake | None = None
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
    want = step(eager, copies(case.tensors), 1)
    got = step(ours, copies(case.tensors), 1)
    report = ours.fallback_report()
    whole = any(r.name == type(eager).__name__ or r.name.startswith("the graph") or ":" in r.name for r in report)
    kind = WHOLE if whole else PER_OP if report else NATIVE
    cause = "; ".join(f"{r.name}: {r.cause}" for r in report)
    if got.error is not None or want.error is not None:
        return _compare_errors(want, got)
    different = difference(case, want, got, native=kind == NATIVE)
    if different:
        in_order = step(case.make(), copies(case.tensors), 1, _InOrder())
        different = in_order.error is None and difference(case, in_order, got, native=kind == NATIVE)
    return Outcome(WRONG, f"{different} [{kind}{': ' * bool(cause)}{cause}]") if different else Outcome(kind, cause)


def step(
    module: nn.Module, tensors: Sequence[Tensor], seed: int, within: AbstractContextManager[Any] | None = None
) -> Step:
    """Forward, and backward with gradients that are the same for the same shapes, both within a context."""
    taken = Step()
    torch.manual_seed(seed)
    try:
        taken.stage = "forward"
        with within or nullcontext():
            leaves, taken.spec = pytree.tree_flatten(module(*tensors))
        taken.plain = [None if isinstance(v, Tensor) else v for v in leaves]
        outputs = [(f"output {i}", v) for i, v in enumerate(leaves) if isinstance(v, Tensor)]
        taken.tensors = dict(outputs)
        taken.stage = "backward"
        reached = [v for _, v in outputs if v.requires_grad]
        if reached:
            cotangents = [_cotangent(v) for v in reached]
            with within or nullcontext():
                torch.autograd.backward(reached, cotangents)
    except (Exception, Mistake) as error:
        taken.error = error
        return taken
    taken.tensors |= {f"input {i}": t.detach() for i, t in enumerate(tensors)}
    taken.tensors |= {f"gradient of input {i}": t.grad for i, t in enumerate(tensors) if t.requires_grad}
    taken.tensors |= {f"gradient of {n}": p.grad for n, p in module.named_parameters()}
    taken.tensors |= {f"buffer {n}": b for n, b in module.named_buffers()}
    return taken


def _cotangent(t: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(t.numel())
    wide = torch.complex128 if t.is_complex() else torch.float64
    values = torch.randn(t.shape, dtype=wide, generator=generator)
    return values.bfloat16().to(t.dtype) if not t.is_complex() else values.to(t.dtype)


def _compare_errors(want: Step, got: Step) -> Outcome:
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


class _InOrder(TorchDispatchMode):
    """Sorts and chooses equal elements in the order they have, where PyTorch does as it likes."""

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if func not in (aten.sort.default, aten.sort.stable, aten.topk.default) or args[0].dim() == 0:
            return out
        said = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
        said |= dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | (kwargs or {})
        dim, largest = said["dim"], said["largest" if func is aten.topk.default else "descending"]
        parts = aten.sort.stable(args[0], stable=True, dim=dim, descending=largest)
        return tuple(part.narrow(dim, 0, said.get("k", part.shape[dim])).contiguous() for part in parts)


def _told(error: BaseException) -> str:
    at = next((f for f in reversed(traceback.extract_tb(error.__traceback__)) if "ortmodule_c" in f.filename), None)
    place = f" ({at.filename.rsplit('/', 1)[-1]}:{at.lineno})" if at is not None else ""
    return f"{type(error).__name__}: {str(error).strip()[:300]}{place}"


def difference(case: Case, want: Step, got: Step, native: bool) -> str:
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
    exact, moved = _exact(case), _moved(case)
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


def _random(case: Case, want: Step) -> bool:
    """Whether PyTorch's result depends on the seed."""
    others = (step(case.make(), copies(case.tensors), seed) for seed in range(10**9, 10**10, 10**9))
    return any(
        (a is None) != (b is None) or (a is not None and b is not None and not _same(a, b))
        for other in others
        for a, b in zip(want.tensors.values(), other.tensors.values(), strict=False)
    )


def _exact(case: Case) -> dict[str, Tensor | None]:
    """PyTorch's results in float64, none if it cannot run there."""
    exact = step(case.make().double(), copies(case.tensors, lambda t: t.double() if t.is_floating_point() else t), 1)
    return exact.tensors if exact.error is None else {}


def _moved(case: Case) -> list[dict[str, Tensor | None]]:
    """PyTorch's results where every number, given or made on the way, is a little different."""

    def once(units: _Units) -> Step:
        module = case.make()
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(units.moved(p))
        return step(module, copies(case.tensors, units.moved), 1, units)

    steps = [once(_Units(seed)) for seed in range(8)]
    return [s.tensors for s in steps if s.error is None]


class _Units(TorchDispatchMode):
    """Moves each element of each result of an op, forward and backward, by one unit in its last place or not at all.

    Equal elements are moved alike, so that what is chosen among them does not change.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def moved(self, t: Tensor) -> Tensor:
        if not t.is_floating_point() or t.layout is not torch.strided:
            return t
        mixed = (t.view(_BITS[t.element_size()]).long() + self._seed) * 0x9E3779B97F4A7C1
        signs = ((mixed >> 32) % 3 - 1).to(t.dtype)
        return torch.where(t.isfinite(), t + t * signs * torch.finfo(t.dtype).eps, t)

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = op(*args, **kwargs or {})
        if any(r.alias_info is not None for r in op._schema.returns):
            return result
        return pytree.tree_map_only(Tensor, self.moved, result)


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
