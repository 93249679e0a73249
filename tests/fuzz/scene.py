"""What a printed program needs to run: tensors by number, custom functions, and a recorder of all one could observe."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ortmodule_c import DebugOptions, ORTModule

PEAK = 1.0  # smaller values are compared as if they were so large: sums of such terms cancel
TIGHT, LOOSE = 1e-10, 2e-5  # relative to the peak, where all is in float64 and where something is in float32
# What PyTorch says of an output that a user wants to change, where it lies in memory as ours need not.
CHANGE_REFUSED = (
    "Such functions do not allow the output views to be modified inplace",
    "more than one element of the written-to tensor refers to a single memory location",
)
# What it says of gradients after such a change, where it saved the output or counts its views; ours may have them, of
# the output as it was.
GRADIENT_REFUSED = (
    "has been modified by an inplace operation",
    "is a view and its base or another view of its base has been modified inplace",
)


@contextlib.contextmanager
def double() -> Iterator[None]:
    """Makes float64 what PyTorch gives where nothing is said."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Doubled(torch.autograd.Function):
    """2 x, whose own backward says 3."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, dy: Tensor) -> Tensor:
        return dy * 3


class Swapped(torch.autograd.Function):
    """(y + 1, x) of (x, y), with gradients of its own."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y + 1, x.clone()

    @staticmethod
    def backward(_ctx: Any, dy: Tensor, dx: Tensor) -> tuple[Tensor, Tensor]:
        return dx * 2, dy * 3


class Raised(torch.autograd.Function):
    """Adds 1 to its argument in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(_ctx: Any, dy: Tensor) -> Tensor:
        return dy * 2


def made(
    number: int, shape: Sequence[int], dtype: str = "float64", layout: str = "plain", grad: bool = False
) -> Tensor:
    """A tensor that depends on the arguments alone; layout "halves" has equal elements."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    if layout == "halves" or not getattr(torch, dtype).is_floating_point:
        x = (x * 2).round() / (2 if layout == "halves" else 1)
    x = x > 0 if dtype == "bool" else x.to(getattr(torch, dtype))
    if layout == "transposed" and x.dim() > 1:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    elif layout == "strided":
        x = torch.stack([x, x], -1)[..., 1]
    elif layout == "expanded" and x.dim() and x.shape[0]:
        x = x[:1].expand_as(x)
    return x.requires_grad_(grad)


class Recorder:
    """Runs a scenario on a module and notes what happened, in order.

    Parameters
    ----------
    spared
        The step from which on outputs are not changed, though the scenario says so.

    Attributes
    ----------
    seen
        (what, value) pairs: snapshots of tensors, or exceptions.
    step
        The number of the step, from 0.
    """

    def __init__(self, module: nn.Module, spared: float = math.inf) -> None:
        self.module = module
        self.spared = spared
        self.seen: list[tuple[str, Any]] = []
        self.step = 0
        self._leaves: list[Tensor] = []
        self._inputs: list[Tensor] = []
        self._outputs: list[Any] = []
        self._arguments: tuple[Any, ...] = ()

    def input(self, *args: Any, **kwargs: Any) -> Tensor:
        """A tensor for the module, watched from now to the end of the step."""
        x = made(*args, **kwargs)
        if x.requires_grad:
            self._leaves.append(x)
            x = x * 1 if "branch" in (*args, kwargs.get("layout")) else x
        self._inputs.append(x)
        return x

    def call(self, *args: Any) -> None:
        """Call the module; StopIteration if it raises, as nothing can be said of what comes after."""
        torch.manual_seed(0)
        try:
            out = self.module(*args)
        except Exception as error:
            self._raised("call", error)
            raise StopIteration from error
        self._arguments = args
        self._outputs, spec = pytree.tree_flatten(out)
        self.seen.append(("structure of outputs", str(spec)))
        self._note_outputs("output")
        self.note_state("after the call")

    def again(self) -> None:
        """Call the module once more with the same arguments; the backwards that follow are of the first call."""
        first = self._outputs
        self.call(*self._arguments)
        self._outputs = first

    def backward(self, *which: int, retain: bool = False) -> None:
        """Backward of a sum over some outputs, each element weighted differently."""
        try:
            terms = self._terms(which)
            if terms:
                sum(terms).backward(retain_graph=retain)  # type: ignore[union-attr]
        except Exception as error:
            self._raised(f"backward{which}", error)
            raise StopIteration from error
        self.note_gradients(f"after backward{which}")

    def grad(self, *which: int) -> None:
        """torch.autograd.grad of a sum over some outputs, for the inputs alone."""
        found: Sequence[Tensor | None] = ()
        try:
            terms = self._terms(which)
            if terms and self._leaves:
                found = torch.autograd.grad(sum(terms), self._leaves, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
        except Exception as error:
            self._raised(f"grad{which}", error)
            raise StopIteration from error
        for i, g in enumerate(found):
            self._note(f"grad{which} of input {i}", g)

    def _terms(self, which: Sequence[int]) -> list[Tensor]:
        """Scalars of those of some outputs that gradients can come back to."""
        chosen = [self._outputs[i] for i in which]
        return [weighted(y) for y in chosen if isinstance(y, Tensor) and y.requires_grad]

    def scribble(self, i: int) -> None:
        """Change an output in place: inputs, state and other outputs show what shares its memory."""
        y = self._outputs[i]
        if not isinstance(y, Tensor) or y.dtype == torch.bool:
            return
        try:
            if self.step < self.spared:
                with torch.no_grad():
                    y.add_(1)
        except Exception as error:
            self._raised(f"change of output {i}", error)
        self._note_outputs(f"after a change of output {i}: output")
        self.note_state(f"after a change of output {i}")

    def note_state(self, when: str) -> None:
        """Inputs, parameters and buffers as they are."""
        for i, x in enumerate(self._inputs):
            self._note(f"{when}: input {i}", x)
        for name, t in [*self.module.named_parameters(), *self.module.named_buffers()]:
            self._note(f"{when}: {name}", t)

    def note_gradients(self, when: str) -> None:
        """Gradients of inputs and parameters as they are."""
        for i, x in enumerate(self._leaves):
            self._note(f"{when}: gradient of leaf {i}", x.grad)
        for name, p in self.module.named_parameters():
            self._note(f"{when}: gradient of {name}", p.grad)

    def finish(self, update: bool = False, zero: bool = True) -> None:
        """End of a step: update by gradient descent, drop gradients, forget inputs."""
        with torch.no_grad():
            for p in self.module.parameters():
                if update and p.grad is not None:
                    p.sub_(p.grad.clamp(-1, 1), alpha=0.1)
        if zero:
            self.module.zero_grad()
        self._leaves, self._inputs, self._outputs = [], [], []
        self.step += 1

    def _note_outputs(self, what: str) -> None:
        for i, y in enumerate(self._outputs):
            self._note(f"{what} {i}", y)

    def _note(self, what: str, value: Any) -> None:
        if isinstance(value, Tensor):
            kind = (tuple(value.shape), str(value.dtype), value.requires_grad)
            self.seen.append((f"{what}: type, step {self.step}", kind))
            value = value.detach().clone()
        self.seen.append((f"{what}, step {self.step}", value))

    def _raised(self, what: str, error: Exception) -> None:
        self.seen.append((f"exception of {what}, step {self.step}", error))


def weighted(y: Tensor) -> Tensor:
    """A scalar that depends differently on every element."""
    return (y.double() * torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64).view(y.shape)).sum()


Scenario = Callable[[Recorder], None]


Seen = list[tuple[str, Any]]


def observe(module: nn.Module, scenario: Scenario, spared: float = math.inf) -> Seen:
    """All that is seen of a module in a scenario."""
    recorder = Recorder(module, spared)
    with contextlib.suppress(StopIteration):
        scenario(recorder)
    return recorder.seen


def difference(eager: Seen, ours: Seen, tolerance: float, unchanged: Callable[[int], Seen]) -> tuple[str, str] | None:
    """The first thing that was seen differently: what, and how.

    Parameters
    ----------
    unchanged
        What is seen in PyTorch if outputs are not changed from a step on.
    """
    for i, ((what, want), (also, got)) in enumerate(zip(eager, ours, strict=False)):
        if isinstance(want, Exception) and not isinstance(got, Exception):
            says, step = str(want), int(what.rsplit(" ", 1)[1])
            if what.startswith("exception of change") and any(text in says for text in CHANGE_REFUSED):
                return None
            if what.startswith("exception of call") or not any(text in says for text in GRADIENT_REFUSED):
                return f"{what} / {also}", f"eager: {_shown(want)}\nours: {_shown(got)}"
            return gradients_differ(unchanged(step), ours, i, tolerance)
        if what != also:
            return f"{what} / {also}", f"eager: {_shown(want)}\nours: {_shown(got)}"
        if different(want, got, tolerance):
            return what, f"eager: {_shown(want)}\nours: {_shown(got)}"
    return None


def gradients_differ(eager: Seen, ours: Seen, start: int, tolerance: float) -> tuple[str, str] | None:
    """How the gradients that ours begins to give at `start` differ from those of PyTorch."""
    act = ours[start][0].split(":")[0].split(" of ")[0]
    given = [*itertools.takewhile(lambda seen: seen[0].startswith(act), ours[start:])]
    before = sum(what == ours[start][0] for what, _ in ours[:start])
    places = [i for i, (what, _) in enumerate(eager) if what == ours[start][0]]
    if len(places) <= before:
        return ours[start][0], "eager: raises, also where no output is changed\nours: does not"
    for (what, want), (also, got) in zip(eager[places[before] :], given, strict=False):
        if what != also or different(want, got, tolerance):
            return f"{what} / {also}", f"eager, no output changed: {_shown(want)}\nours: {_shown(got)}"
    return None


def different(want: Any, got: Any, tolerance: float) -> bool:
    if isinstance(want, Tensor) and isinstance(got, Tensor):
        return not same_values(want, got, tolerance)
    return type(want) is not type(got) or (not isinstance(want, Exception) and want != got)


def _shown(value: Any) -> str:
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {str(value).splitlines()[:3]}"
    return str(value.tolist()) if isinstance(value, Tensor) else repr(value)


def same_values(want: Tensor, got: Tensor, tolerance: float) -> bool:
    """Equal, or for floating point as close as the largest value allows."""
    if want.shape != got.shape or want.dtype != got.dtype:
        return False
    if not want.is_floating_point():
        return torch.equal(want, got)
    finite = want[want.isfinite()]
    peak = max(PEAK, finite.abs().max().item() if finite.numel() else 0)
    return torch.allclose(got, want, rtol=tolerance, atol=tolerance * peak, equal_nan=True)


def compare(make: Callable[[], nn.Module], scenario: Scenario, tolerance: float) -> tuple[str, str, str]:
    """Runs a scenario in PyTorch and here: what differed, how, and where ours ran.

    The last is "native", "per op", or the cause for which all of it ran in PyTorch.
    """
    with warnings.catch_warnings(), double():
        warnings.simplefilter("ignore")
        module = make()
        ours = ORTModule(copy.deepcopy(module), DebugOptions(capture="export"))
        again = copy.deepcopy(module)
        want = observe(module, scenario)
        got = observe(ours, scenario)
        what, how = difference(want, got, tolerance, lambda step: observe(again, scenario, step)) or ("", "")
    records = ours.fallback_report()
    whole = [record.cause for record in records if record.name == type(module).__name__]
    ran = whole[0] if whole else "per op" if records else "native"
    return what, how, ran
