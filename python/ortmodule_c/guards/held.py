"""What a graph assumed of the module and of the moment, compared at every call.

:func:`scan` walks the module once per call and gives its tensors and a hashable key. What is too
varied for a key (plain attributes of submodules and of their configuration objects) is held by
:class:`Attributes` and compared with what is there now.
"""

import copy
import datetime
import decimal
import enum
import fractions
import functools
import gc
import itertools
import pathlib
import sys
import types
import uuid
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils import parametrize

from .. import _C

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
INTERNAL = frozenset(nn.Module().__dict__)  # what PyTorch keeps in every module
_CONTAINERS = (list, dict, set, deque)
_COPIED = (list, tuple, dict)  # where they are held
MISSING = object()
_DEVICE_TYPES = ("cpu", "cuda")
_OTHER_DEVICE_TYPES = tuple([d for d in torch._C._autocast_supported_devices() if d not in _DEVICE_TYPES])
# What Python puts into a class when somebody copies an instance, or asks for annotations that there are none of.
_MADE_LATER = frozenset({"__slotnames__", "__annotations__", "__annotations_cache__"})
# Classes whose instances never change and are told apart by their values alone: by `==`, or by how they are written.
BY_VALUE: frozenset[type] = frozenset(
    {
        *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo, types.MethodType),
        # Not views, not anything, and not those whose bytes count units of their own.
        *{*numpy.sctypeDict.values()} - {numpy.void, numpy.object_, numpy.datetime64, numpy.timedelta64},
    }
)
BY_REPR: frozenset[type] = frozenset(
    {
        *(range, slice, datetime.date, datetime.datetime, datetime.timedelta, decimal.Decimal, fractions.Fraction),
        *(pathlib.PosixPath, pathlib.PurePosixPath, uuid.UUID, numpy.datetime64, numpy.timedelta64),
    }
)


class Scan(NamedTuple):
    """A module's tensors, each once and in order, and what else was found of every submodule."""

    parameters: list[Tensor]
    buffers: list[Tensor]
    fingerprint: _C.Fingerprint
    checked: int  # what :meth:`Held.hold` need not compare again

    @property
    def refusal(self) -> str:
        """Why no graph can stand for the module, or nothing."""
        if _has_any_global_hook():
            return "there are hooks on all modules, which a graph does not call"
        if self.fingerprint.opaque is not None:
            return f"its {self.fingerprint.opaque} is not a plain module of Python"
        if self.fingerprint.detached is not None:
            return f"its {self.fingerprint.detached} computes with weights that are not its parameters"
        if parametrize._cache_enabled:
            return "torch.nn.utils.parametrize.cached() is on"
        if self.fingerprint.hooked is not None:
            return f"its {self.fingerprint.hooked} has hooks of its backward, which a graph does not call"
        return ""


def scan(module: nn.Module, last: _C.Fingerprint | None = None, held: "Held | None" = None) -> Scan:
    """Walk the module; tied tensors appear once, and the fingerprint tells which names share one.

    Cheapest where all is as it was when `last` was found, and as it is `held`.
    """
    return Scan(*_C.scan(module, last, None if held is None else held.exactly))


def ambient() -> tuple[Hashable, ...]:
    """State of PyTorch outside the module that changes what a module computes."""
    modes = _modes()
    return (
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        bool(_has_any_global_hook()),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch._C._get_mkldnn_enabled(),
        bool(parametrize._cache_enabled),
        torch.distributed.is_available() and torch.distributed.is_initialized(),
        modes and tuple([(type(mode), str(getattr(mode, "device", ""))) for mode in modes]),
        *map(torch.is_autocast_enabled, _DEVICE_TYPES),
        *map(torch.get_autocast_dtype, _DEVICE_TYPES),
    )


def autocast_elsewhere() -> tuple[Hashable, ...]:
    """What :func:`ambient` leaves out, as few ask for it: autocast on devices that no graph is for."""
    return (*map(torch.is_autocast_enabled, _OTHER_DEVICE_TYPES), *map(torch.get_autocast_dtype, _OTHER_DEVICE_TYPES))


def autocast_dtypes() -> list[torch.dtype]:
    """What autocast casts to where it is on, of each type of device."""
    return [*map(torch.get_autocast_dtype, (*_DEVICE_TYPES, *_OTHER_DEVICE_TYPES))]


def _modes() -> tuple[Any, ...]:
    """What is called instead of PyTorch's functions and operators."""
    functions, operators = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    if not functions and not operators:
        return ()
    found = [torch._C._get_function_stack_at(i) for i in range(functions)]
    return (*found, *[torch._C._get_dispatch_stack_at(i) for i in range(operators)])


def mode_refusal() -> str:
    """Why a graph cannot stand for what is computed under the modes that are on, or nothing."""
    from torch.utils._device import DeviceContext  # not imported with PyTorch

    for mode in _modes():
        if not isinstance(mode, DeviceContext) or mode.device.type != "cpu":
            return f"as long as mode {type(mode).__name__} is on, which a graph does not call"
    return "as long as anomaly detection is on, which tells of each op" if torch.is_anomaly_enabled() else ""


def tensor_key(tensors: list[Tensor]) -> tuple[Hashable, ...]:
    """What a graph assumes of the user's tensors, but for their sizes."""
    return tuple([(type(t), t.dtype, t.dim(), t.device, t.requires_grad, t.layout, t.is_nested) for t in tensors])


def layout(t: Tensor) -> tuple[int, ...]:
    """How a tensor lies in memory; nothing where that follows from its shape."""
    strides, dense = t.stride(), 1
    for size, stride in zip(reversed(t.shape), reversed(strides), strict=True):
        if stride != dense:
            return strides
        dense *= max(size, 1)
    return ()


def looseness(t: Tensor) -> tuple[int, ...]:
    """Which neighbouring dims an op of PyTorch may take for one, and if the last is dense; nothing if all are."""
    if t.is_contiguous():
        return ()
    dims = [(size, stride) for size, stride in zip(t.shape, t.stride(), strict=True) if size != 1]
    merged = [outer == size * inner for (_, outer), (size, inner) in itertools.pairwise(dims)]
    return (*merged, dims[-1][1] == 1)


@dataclass(frozen=True)
class Write:
    """An attribute that a forward sets.

    Attributes
    ----------
    module, name
        Whose attribute.
    before, after
        Its values; `before` is :data:`MISSING` where there was none.
    """

    module: Any
    name: str
    before: Any
    after: Any

    @property
    def plain(self) -> bool:
        """Whether what it overwrites is a plain value."""
        return _is_plain(self.before)

    @property
    def counts(self) -> bool:
        """Whether a plain value became another one, so that the next forward may do something else."""
        return _is_plain(self.before) and (_is_plain(self.after) or isinstance(self.after, torch.SymInt))

    @property
    def remade(self) -> bool:
        """Whether it lists the parameters of a recurrent layer, for which others stand while it is traced."""
        return isinstance(self.module, nn.RNNBase) and self.name in ("_flat_weights", "_flat_weight_refs")

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
            Write(m, n, state.get(n, MISSING), m.__dict__.get(n, MISSING))
            for m, state, _ in self._states
            for n in {**state, **m.__dict__}
            if n not in INTERNAL and not _same_value(m.__dict__.get(n, MISSING), state.get(n, MISSING))
        ]

    def changed(self) -> Iterator[tuple[str, bool]]:
        """Attributes whose elements were changed in place since, parameters and buffers among them.

        And those of PyTorch's own that were set, such as `training`. With each whether PyTorch's own has other names
        now: the module is another one then.
        """
        for m, state, contents in self._states:
            of = type(m).__name__
            for n in INTERNAL:
                if m.__dict__.get(n, MISSING) is not state.get(n, MISSING):
                    yield f"attribute {n} of {of}", False
            for n, content in contents.items():
                now = _content(state[n])
                if not _same_elements(now, content):
                    yield f"attribute {n} of {of}", n in INTERNAL and list(now) != list(content)

    def restore(self, but: Collection[tuple[int, str]] = ()) -> None:
        """Put everything back but attributes with the id of their module."""
        for m, state, contents in self._states:
            for n, content in contents.items():
                if not _same_elements(_content(state[n]), content):
                    state[n].clear()
                    (state[n].update if isinstance(state[n], (dict, set)) else state[n].extend)(content)
            for n in [n for n in m.__dict__ if n not in state and (id(m), n) not in but]:
                del m.__dict__[n]
            m.__dict__.update({n: v for n, v in state.items() if (id(m), n) not in but})


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
    return isinstance(value, _PLAIN) and not (isinstance(value, Opened) and value.symbol is not None)


def by_identity(values: Iterable[Any]) -> dict[int, Any]:
    """Those of the values that are told from others by identity alone, by id."""
    return {id(v): v for v in values if not (isinstance(v, (tuple, set, frozenset, type)) or type(v) in _TOLD_APART)}


def is_any_forgotten(values: dict[int, Any], ours: "Counter[int]") -> bool:
    """Whether nobody refers to one of these any more, but for `ours` and the dict."""
    return any(sys.getrefcount(values[i]) - 2 <= ours[i] for i in values)  # those of the dict and of the call


@dataclass(frozen=True)
class Attribute:
    """Where a number lies: in a dictionary of attributes, that of the object `title`."""

    state: dict[str, Any]
    name: str
    title: str

    @property
    def place(self) -> tuple[int, str]:
        """What tells it from others."""
        return id(self.state), self.name

    @property
    def now(self) -> Any:
        """What lies there."""
        return self.state.get(self.name)

    def is_number(self) -> bool:
        """Whether that is a number."""
        return type(self.now) in (int, float)

    def __str__(self) -> str:
        return f"attribute {self.name} of {self.title}"


class Opened:
    """A number in an attribute for which something else stands: the thread that traces reads that, all others this.

    Other threads may put it elsewhere, and keep it: there it is a number and nothing more.

    Attributes
    ----------
    symbol
        What stands for it; None once the trace is over.
    place
        Of the attribute.
    """

    symbol: Any
    place: tuple[int, str]

    @classmethod
    def of(cls, attribute: Attribute, symbol: Any) -> Any:
        """The number that lies there."""
        made = _OPENED[type(attribute.now)](attribute.now)
        made.symbol, made.place = symbol, attribute.place
        return made

    def is_open(self, state: Any, name: Any) -> bool:
        """Whether something stands for it at this place."""
        return self.symbol is not None and self.place == (id(state), name)

    def need(self) -> None:
        """Raise, as it is read by other means than a lookup that gives what stands for it."""
        hash(self.symbol)

    def __reduce__(self) -> Any:
        number: Any = self
        return type(+number), (+number,)


class _OpenedReal(Opened, float):
    pass


class _OpenedWhole(Opened, int):
    pass


_OPENED: dict[type, Any] = {float: _OpenedReal, int: _OpenedWhole}
BY_VALUE |= frozenset(_OPENED.values())
_COMPARED = (BY_VALUE, BY_REPR, MISSING)
_TOLD_APART = BY_VALUE | BY_REPR | frozenset(_COPIED)  # by more than identity


class Library:
    """A module of Python's library, of PyTorch's or of NumPy's, of which nothing new may be what a forward asked for.

    Parameters
    ----------
    state
        Its dictionary.
    asked
        All names that the forward may have looked up.
    """

    def __init__(self, state: dict[str, Any], asked: frozenset[str]) -> None:
        self._state, self._asked = state, asked
        self._known, self._size = frozenset(state), len(state)

    def is_as_it_was(self) -> bool:
        """Whether no such name has come or gone; others may, as modules of it are imported."""
        if len(self._state) == self._size:
            return True
        now = frozenset(self._state)
        if not self._asked.isdisjoint(now ^ self._known):
            return False
        self._known, self._size = now, len(now)
        return True


class Held:
    """What was read while a module was captured, and has to be as it was.

    Parameters
    ----------
    dicts
        Whose (or None), a dictionary, its keys, their values (:data:`MISSING` if they may change), what to call them.
    places
        A holder, a key, the value there and what to call it: see `_C.Held`.
    answers
        Objects whose attributes the user's own code looks up, and all names by which it did: where what these stand
        for is as it was, its dictionary may be another.
    libraries
        Modules of others that it met.
    """

    def __init__(
        self,
        dicts: Sequence[tuple[Any, dict[str, Any], tuple[Any, ...], tuple[Any, ...], str]],
        places: Sequence[tuple[Any, Any, Any, str]],
        answers: Sequence[tuple[Any, frozenset[str]]] = (),
        libraries: Sequence[Library] = (),
    ) -> None:
        # In the order in which a scan meets them.
        self._dicts = sorted(dicts, key=lambda d: not isinstance(d[0], nn.Module))
        self._places = list(places)
        self._answers = answers
        self._libraries = libraries
        self.exactly = self._exactly()

    def _exactly(self) -> _C.Held:
        return _C.Held(tuple([d[:4] for d in self._dicts]), tuple([p[:3] for p in self._places]), *_COMPARED)

    def changed(self) -> str | None:
        """What is not as it was."""
        at = self.exactly.first_changed(0)
        if at < 0:
            return None
        if at >= len(self._dicts):
            return self._places[at - len(self._dicts)][-1]
        _, state, keys, values, name = self._dicts[at]
        for key, value in zip(keys, values, strict=True):
            place = (state, key, state.get(key, MISSING) if value is MISSING else value)
            if key not in state or _C.Held((), (place,), *_COMPARED).first_changed(0) == 0:
                return f"attribute {key} of {name}"
        return f"the set of attributes of {name}"

    def changed_numbers(self) -> "list[Attribute] | None":
        """The attributes that are other numbers than they were, if nothing else is not as it was.

        That of a class is something else: Python remembers what a lookup of it gave, so no symbol can stand in for it.
        """
        found = []
        for entry in self._dicts:
            if _C.Held((entry[:4],), (), *_COMPARED).first_changed(0) < 0:
                continue
            owner, state, keys, values, name = entry
            for key, value in zip(keys, values, strict=True):
                if value is not MISSING and not _holds(state, key, value):
                    if owner is None or type(value) not in (int, float) or type(state.get(key)) is not type(value):
                        return None
                    found.append(Attribute(state, key, name))
        places = tuple([p[:3] for p in self._places]) if found else ()
        return found if _C.Held((), places, *_COMPARED).first_changed(0) < 0 else None

    def dictionaries(self) -> set[int]:
        """Ids of those of attributes."""
        return {id(state) for _, state, *_ in self._dicts}

    def hold(self, checked: int = 0) -> bool:
        """Whether everything still is what it was, but for what a scan has `checked`."""
        at, last = self.exactly.first_changed(checked), -1
        while last < at < len(self._dicts) and self._takes(at):
            at, last = self.exactly.first_changed(at), at
        return at < 0 and all(library.is_as_it_was() for library in self._libraries)

    def _takes(self, at: int) -> bool:
        """Hold a dictionary as it is now, if that changes nothing of what was asked for."""
        owner, state, keys, values, name = self._dicts[at]
        if owner is not None and object.__getattribute__(owner, "__dict__") is not state:
            return False
        was = dict(zip(keys, values, strict=True))
        may_change = self._answers_as_it_did(owner, state, was)
        held = {}
        for key, value in state.items():
            if key in was and (was[key] is MISSING or _holds(state, key, was[key])):
                held[key] = was[key]
            elif key in _MADE_LATER and key not in was:
                held[key] = MISSING
            elif may_change and _is_plain(value):
                held[key] = copy.deepcopy(value)
            else:
                return False
            if held[key] is not MISSING and not _holds(state, key, held[key]):
                return False
        if not (may_change or was.keys() <= held.keys()):
            return False
        self._dicts[at] = (owner, state, tuple(held), tuple(held.values()), name)
        for i, (holder, key, _, what) in enumerate(self._places):
            if isinstance(holder, functools.partial) and holder.func is tuple and holder.args[0] is state:
                self._places[i] = (holder, key, tuple(state), what)
        self.exactly = self._exactly()
        return True

    def _answers_as_it_did(self, owner: Any, state: dict[str, Any], was: dict[str, Any]) -> bool:
        """Whether all that was asked of an object whose class looks up by itself is as it was."""
        names = next((names for of, names in self._answers if of is owner), None)
        if names is None:
            return False
        return all((n in was) == (n in state) for n in names) and all(
            was[n] is MISSING or _holds(state, n, was[n]) for n in names & was.keys()
        )

    def still(self) -> "Held":
        """What of it holds now: of a dictionary the names that there are, and what is as it was."""
        if self.hold():
            return self
        dicts = []
        for owner, state, keys, values, name in self._dicts:
            now = owner.__dict__ if owner is not None else state
            held = {k: v for k, v in zip(keys, values, strict=True) if v is not MISSING and k in now}
            kept = [held[k] if k in held and _holds(now, k, held[k]) else MISSING for k in now]
            dicts.append((owner, now, tuple(now), tuple(kept), name))
        return Held(dicts, [p for p in self._places if _holds(*p[:3])])

    def references(self) -> "Counter[int]":
        """How often it refers to each object, by id."""
        counts, _ = self._look()
        return counts

    def is_forgotten(self, ours: "Counter[int]") -> bool:
        """Whether it waits for an object that nobody refers to any more, but for `ours`."""
        _, values = self._look()
        suspects = by_identity(values.values())
        del values
        return is_any_forgotten(suspects, ours)

    def _look(self) -> "tuple[Counter[int], dict[int, Any]]":
        """How often it refers to each object, by id; and the values that it holds, and those in copies of its own."""
        holders = (self.exactly, *self._dicts, *[d[3] for d in self._dicts], *self._places)
        holders += (*self._answers,)
        counts = Counter(map(id, itertools.chain.from_iterable(map(gc.get_referents, holders))))
        values: dict[int, Any] = {}
        pending = {id(v): v for v in itertools.chain(*[d[3] for d in self._dicts], [p[2] for p in self._places])}
        while pending:
            i, value = pending.popitem()
            if type(value) in _COPIED and sys.getrefcount(value) - 2 <= counts[i]:  # `value` and the call's
                counts.update(map(id, gc.get_referents(value)))
                pending.update({id(v): v for v in gc.get_referents(value) if id(v) not in values})
            values[i] = value
        return counts, values


def _holds(holder: Any, key: Any, value: Any) -> bool:
    return _C.Held((), ((holder, key, value),), *_COMPARED).first_changed(0) < 0
