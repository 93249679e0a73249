"""What a graph assumed of the module and of the moment, compared at every call.

:func:`survey` walks the module once per call and gives its tensors and a hashable key. What is too
varied for a key (plain attributes of submodules and of their configuration objects) is held by
:class:`Attributes` and compared with what is there now.
"""

import copy
import enum
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from . import _C

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_INTERNAL = frozenset(nn.Module().__dict__)  # what PyTorch keeps in every module
_CONTAINERS = (list, dict, set, deque)
_MISSING = object()
_DEVICE_TYPES = ("cpu", "cuda")
_DEPTH = 2  # attributes of attributes: a module's config, and what that nests


class Survey(NamedTuple):
    """A module's tensors, each once and in order, and what else was found of every submodule."""

    parameters: list[Tensor]
    buffers: list[Tensor]
    facts: _C.Facts

    @property
    def refusal(self) -> str:
        """Why no graph can stand for the module, or nothing."""
        if _has_any_global_hook():
            return "there are hooks on all modules, which a graph does not call"
        if self.facts.opaque is not None:
            return f"a {self.facts.opaque} inside it is not a plain module of Python"
        if self.facts.hooked is not None:
            return f"a {self.facts.hooked} inside it has hooks, which a graph does not call"
        return ""


def survey(module: nn.Module, last: _C.Facts | None = None) -> Survey:
    """Walk the module; tied tensors appear once, and the facts tell which names share one.

    Cheapest where all is as it was when `last` was found.
    """
    return Survey(*_C.survey(module, last))


def ambient() -> tuple[Hashable, ...]:
    """State of PyTorch outside the module that changes what a module computes."""
    return (
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        bool(_has_any_global_hook()),
        *[(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICE_TYPES],
    )


def tensor_key(tensors: list[Tensor]) -> tuple[Hashable, ...]:
    """What a graph assumes of the user's tensors, but for their sizes."""
    return tuple([(t.dtype, t.dim(), t.device, t.requires_grad) for t in tensors])


@dataclass(frozen=True)
class Write:
    """An attribute that a forward sets.

    Attributes
    ----------
    module, name
        Whose attribute.
    before, after
        Its values; `before` is :data:`_MISSING` where there was none.
    """

    module: nn.Module
    name: str
    before: Any
    after: Any

    @property
    def counts(self) -> bool:
        """Whether a plain value became another one, so that the next forward may do something else."""
        return _is_plain(self.before) and (_is_plain(self.after) or isinstance(self.after, torch.SymInt))

    def __str__(self) -> str:
        return f"attribute {self.name} of {type(self.module).__name__}"


class Snapshot:
    """The attributes of every submodule as they were, to see and to undo what a forward does to them."""

    def __init__(self, module: nn.Module) -> None:
        self._states: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
        for m in module.modules():
            contents = {n: _content(v) for n, v in m.__dict__.items() if isinstance(v, _CONTAINERS)}
            self._states.append((m, dict(m.__dict__), contents))

    def writes(self) -> list[Write]:
        """Attributes that were set to something else since."""
        return [
            Write(m, n, state.get(n, _MISSING), m.__dict__.get(n, _MISSING))
            for m, state, _ in self._states
            for n in {**state, **m.__dict__}
            if n not in _INTERNAL and not _same_value(m.__dict__.get(n, _MISSING), state.get(n, _MISSING))
        ]

    def changed_containers(self) -> Iterator[str]:
        """Attributes whose elements were changed in place since, parameters and buffers among them."""
        for m, state, contents in self._states:
            for n, content in contents.items():
                now = _content(state[n])
                # While parameters are swapped for others their registries differ in values only.
                same = list(now) == list(content) if n in _INTERNAL else _same_elements(now, content)
                if not same:
                    yield f"attribute {n} of {type(m).__name__}"

    def restore(self) -> None:
        """Put everything back."""
        for m, state, contents in self._states:
            for n, content in contents.items():
                if not _same_elements(_content(state[n]), content):
                    state[n].clear()
                    (state[n].update if isinstance(state[n], (dict, set)) else state[n].extend)(content)
            for n in [n for n in m.__dict__ if n not in state]:
                del m.__dict__[n]
            m.__dict__.update(state)


def _content(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _same_elements(a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return all(k in b and b[k] is v for k, v in a.items())
    return all(x is y for x, y in zip(a, b, strict=True))


def _same_value(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and _is_plain(a) and bool(a == b))


def _is_plain(value: Any) -> bool:
    """Whether it consists of plain values only."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_plain(v) for v in value)
    if isinstance(value, dict):
        return all(_is_plain(v) for v in value.values())
    return isinstance(value, _PLAIN)


def held_objects(module: nn.Module) -> list[Any]:
    """The submodules, and the configuration objects that are their attributes or attributes of those."""
    found: dict[int, Any] = {id(m): m for m in module.modules()}
    layer = list(found.values())
    for _ in range(_DEPTH):
        values = {id(v): v for o in layer for v in o.__dict__.values() if _has_attributes(v) and id(v) not in found}
        found.update(values)
        layer = list(values.values())
    return list(found.values())


def _has_attributes(value: Any) -> bool:
    if isinstance(value, (*_PLAIN, Tensor, nn.Module, list, tuple, dict, set, frozenset)) or callable(value):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


class Attributes:
    """What the attributes of submodules, and of the configuration objects they hold, have to be.

    Parameters
    ----------
    objects
        The :func:`held_objects` of the module that was captured.
    read
        Whether the forward read an attribute of an object: only those count.
    writes
        What the forward sets. Of what it overwrites only the type is held, unless that is plain.
    constants
        Tensors the graph holds copies of: they may be neither replaced nor changed.
    """

    def __init__(
        self,
        objects: Sequence[Any],
        read: Callable[[Any, str], bool],
        writes: Sequence[Write],
        constants: Sequence[Tensor],
    ) -> None:
        self._plain: list[tuple[dict[str, Any], str, Any]] = []
        self._nested: list[tuple[dict[str, Any], str, Any]] = []
        self._same: list[tuple[Any, Any, Any]] = []
        self._types = [(w.module.__dict__, w.name, type(w.before)) for w in writes if not _is_plain(w.before)]
        self._versions = [(t, t._version) for t in constants if not t.is_inference()]
        self._constants = {id(t) for t in constants}
        self._names = [(o.__dict__, list(o.__dict__)) for o in objects]
        overwritten = {(id(w.module), w.name) for w in writes if not _is_plain(w.before)}
        for o in objects:
            for name, value in o.__dict__.items():
                internal = isinstance(o, nn.Module) and name in _INTERNAL
                if isinstance(name, str) and not internal and (id(o), name) not in overwritten and read(o, name):
                    self._add(o.__dict__, name, value)

    def _add(self, state: dict[str, Any], name: str, value: Any) -> None:
        if isinstance(value, _PLAIN):
            self._plain.append((state, name, value))
        elif isinstance(value, Tensor):
            if id(value) in self._constants:
                self._same.append((state, name, value))
        elif isinstance(value, (list, tuple, dict, set, frozenset)):
            self._add_container(state, name, value)
        elif not isinstance(value, nn.Module) and (callable(value) or _has_attributes(value)):
            self._same.append((state, name, value))

    def _add_container(self, state: dict[str, Any], name: str, value: Any) -> None:
        if _is_plain(value):
            self._nested.append((state, name, copy.deepcopy(value)))
            return
        items = value.items() if isinstance(value, dict) else enumerate(value)
        held = [(value, k, v) for k, v in items if id(v) in self._constants]
        if held:
            self._same += [(state, name, value), *held]

    def changed(self) -> str | None:
        """The name of a plain attribute that is not what it was."""
        values = [*self._plain, *self._nested]
        return next((n for state, n, v in values if not _same_value(state.get(n, _MISSING), v)), None)

    def hold(self) -> bool:
        """Whether everything still is what it was."""
        missing = _MISSING
        return (
            _C.unchanged(self._plain, self._names)
            and all(_same_value(state.get(name, missing), value) for state, name, value in self._nested)
            and all(_item(holder, name) is value for holder, name, value in self._same)
            and all(type(state.get(name, missing)) is cls for state, name, cls in self._types)
            and all(t._version == version for t, version in self._versions)
        )


def _item(holder: Any, key: Any) -> Any:
    try:
        return holder[key]
    except LookupError:
        return _MISSING
