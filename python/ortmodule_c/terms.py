"""On what terms a module is run: in what precision, and which of its outputs are wanted."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from .budget import UNBOUNDED, Budget, MemoryBudget
from .capture import autocast_region
from .errors import NotRunnable

Precision = Literal["fp32", "bf16", "fp16"]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Terms:
    """How a module is called, and what of its result is given to the caller.

    They hold wherever it runs: traced, in graphs of TorchDynamo, or in PyTorch.

    Attributes
    ----------
    precision
        What it computes in, whatever surrounds it; None leaves that to the caller.
    outputs
        Names or indices of the outputs that a training step wants; None stands for all.
    budget
        The memory that a step may take for what it computes.
    """

    precision: Precision | None = None
    outputs: tuple[Hashable, ...] | None = None
    budget: Budget = UNBOUNDED

    @classmethod
    def of(
        cls, precision: Precision | None, outputs: Iterable[Hashable] | None, memory_budget: MemoryBudget | None = None
    ) -> "Terms":
        """The terms that a user asks for; ValueError or TypeError for what there is not."""
        if precision is not None and precision not in get_args(Precision):
            expected = ", ".join([f'"{p}"' for p in get_args(Precision)])
            raise ValueError(f"precision is {precision!r}, expected one of {expected} or None")
        budget = Budget.of(memory_budget)
        if outputs is None:
            return cls(precision, None, budget)
        if isinstance(outputs, (str, bytes)) or not isinstance(outputs, Iterable):
            raise TypeError(f"outputs is a {type(outputs).__name__}, expected a list of names or indices")
        names = tuple(outputs)
        if not names:
            raise ValueError("outputs is empty, expected at least one name or index")
        for name in names:
            if not isinstance(name, Hashable):
                raise TypeError(f"outputs has a {type(name).__name__}, expected names or indices")
        return cls(precision, names, budget)

    def over(self, others: "Terms") -> "Terms":
        """These, and those of others where nothing is asked for."""
        return Terms(
            self.precision or others.precision,
            self.outputs or others.outputs,
            others.budget if self.budget == UNBOUNDED else self.budget,
        )

    def region(self, module: nn.Module) -> AbstractContextManager[Any]:
        """The region of autocast that `module` runs in, if it has one of its own.

        That of the device of its tensors. Without any it runs where its arguments are, and the region is of all
        devices.
        """
        if self.precision is None:
            return nullcontext()
        first = next(itertools.chain(module.parameters(), module.buffers()), None)
        in_use = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
        devices = in_use if first is None else (first.device.type,)
        to = _AUTOCAST.get(self.precision)
        region = tuple([(d, to or torch.get_autocast_dtype(d), to is not None) for d in devices])
        return autocast_region.within(region, caches=True)

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a module in PyTorch."""
        with self.region(module):
            return self.result(module, module(*args, **kwargs))

    def result(self, module: nn.Module, returned: Any) -> Any:
        """What the caller is given of what the forward has returned.

        Raises
        ------
        NotRunnable
            If it has no such outputs.
        """
        if self.outputs is not None and module.training:
            returned = _selected(returned, self.outputs)
        return _mapped(_widened, returned) if self.precision in _AUTOCAST else returned


def _widened(t: Tensor) -> Tensor:
    return t.float() if t.dtype in _AUTOCAST.values() else t


def _selected(returned: Any, names: tuple[Hashable, ...]) -> Any:
    """The same container with nothing but what is named."""
    parts = _parts(returned)
    cls = type(returned).__name__
    if parts is None:
        raise NotRunnable(f"outputs names {_listed(names)}, but the forward returned a {cls}, which has no parts")
    missing = [n for n in names if n not in parts]
    if missing:
        there = _listed([n for n, v in parts.items() if v is not None])
        raise NotRunnable(f"outputs names {_listed(missing)}, but the forward returned a {cls} with {there}")
    if all(parts[n] is None for n in names):
        raise NotRunnable(f"outputs names {_listed(names)}, but the forward returned a {cls} where that is None")
    return _rebuilt(returned, {n: v if n in names else None for n, v in parts.items()})


def _listed(names: Iterable[Hashable]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A nest with a function of each tensor in its place; the nest itself where they are the same tensors."""
    if isinstance(value, Tensor):
        return function(value)
    parts = _parts(value)
    if parts is None:
        return value
    mapped = {n: _mapped(function, v) for n, v in parts.items()}
    return value if all(mapped[n] is v for n, v in parts.items()) else _rebuilt(value, mapped)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _parts(value: Any) -> dict[Hashable, Any] | None:
    """What a container holds, by key, field or position; None for what is none."""
    if _is_dataclass(value):  # Hugging Face's ModelOutput is a dict too, which misses the fields that are None
        return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, tuple)):
        return dict(zip(getattr(value, "_fields", itertools.count()), value))  # noqa: B905
    return None


def _rebuilt(value: Any, parts: dict[Hashable, Any]) -> Any:
    """A container like it that holds these."""
    cls = type(value)
    if _is_dataclass(value):
        if isinstance(value, dict):
            return cls(**{str(name): part for name, part in parts.items()})
        twin = copy.copy(value)
        for name, part in parts.items():
            object.__setattr__(twin, str(name), part)
        return twin
    if isinstance(value, dict):
        twin = copy.copy(value)
        twin.update(parts)
        return twin
    items = list(parts.values())
    return cls._make(items) if hasattr(cls, "_make") else cls(items)
