"""What a printed program needs to run: tensors by number, custom functions, and a recorder of all one could observe."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ortmodule_c import DebugOptions, ORTModule

PEAK = 1.0  # smaller values are compared as if they were so large: sums of such terms cancel
TIGHT, LOOSE = 1e-10, 2e-5  # relative to the peak, where all is in float64 and where something is in float32
# Where eager refuses what its results share memory with, ours need not.
EAGER_ONLY = (
    "has been modified by an inplace operation",
    "Such functions do not allow the output views to be modified inplace",
    "more than one element of the written-to tensor refers to a single memory location",
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

    Attributes
    ----------
    seen
        (what, value) pairs: snapshots of tensors, or names of exceptions.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.seen: list[tuple[str, Any]] = []
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

    def _note_outputs(self, what: str) -> None:
        for i, y in enumerate(self._outputs):
            self._note(f"{what} {i}", y)

    def _note(self, what: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self.seen.append((f"{what}: type", (tuple(value.shape), str(value.dtype), value.requires_grad)))
            value = value.detach().clone()
        self.seen.append((what, value))

    def _raised(self, what: str, error: Exception) -> None:
        self.seen.append((f"exception of {what}", error))


def weighted(y: Tensor) -> Tensor:
    """A scalar that depends differently on every element."""
    return (y.double() * torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64).view(y.shape)).sum()


Scenario = Callable[[Recorder], None]


def observe(module: nn.Module, scenario: Scenario) -> list[tuple[str, Any]]:
    """All that is seen of a module in a scenario."""
    recorder = Recorder(module)
    with contextlib.suppress(StopIteration):
        scenario(recorder)
    return recorder.seen


def difference(eager: list[tuple[str, Any]], ours: list[tuple[str, Any]], tolerance: float) -> tuple[str, str] | None:
    """The first thing that was seen differently: what, and how."""
    for (what, want), (also, got) in zip(eager, ours, strict=False):
        if isinstance(want, Exception) and any(text in str(want) for text in EAGER_ONLY):
            return None
        if isinstance(want, Exception) or isinstance(got, Exception):
            if what != also or type(want) is not type(got):
                return f"{what} / {also}", f"eager: {_shown(want)}\nours: {_shown(got)}"
            return None
        if what != also:
            return f"{what} / {also}", "not the same things happened"
        if isinstance(want, Tensor) and isinstance(got, Tensor):
            if not same_values(want, got, tolerance):
                return what, f"eager: {want.tolist()}\nours: {got.tolist()}"
        elif type(want) is not type(got) or want != got:
            return what, f"eager: {_shown(want)}\nours: {_shown(got)}"
    return None


def _shown(value: Any) -> str:
    return f"{type(value).__name__}: {str(value).splitlines()[:3]}" if isinstance(value, Exception) else repr(value)


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
        want = observe(module, scenario)
        got = observe(ours, scenario)
    records = ours.fallback_report()
    whole = [record.cause for record in records if record.name == type(module).__name__]
    ran = whole[0] if whole else "per op" if records else "native"
    what, how = difference(want, got, tolerance) or ("", "")
    return what, how, ran
