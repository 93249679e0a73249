"""What is held of Python: places and what was there, by value or identity."""

import collections
import decimal
import enum
import functools
import operator
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import NotExportable
from ..flatten import StandIn
from ..symbolic import SYMBOLIC
from .anatomy import Seen, content, dict_of, is_of_python, parts, tensor_content, type_in
from .held import BY_REPR, BY_VALUE, MISSING, Held, Library, Opened, Write, layout
from .looks import picked
from .undo import Undo

_LARGEST = 10_000  # items of containers
_LARGEST_TENSOR = 1 << 16  # bytes
_BUILTINS = vars(__import__("builtins"))
# What of PyTorch others exchange, though the user's code does not name it.
_EXCHANGED = (
    (vars(F), "torch.nn.functional"),
    (dict_of(nn.Module), "torch.nn.Module"),
    (dict_of(Tensor), "torch.Tensor"),
)


class Places:
    """Places of Python and copies of what lies there, found from a module on.

    Parameters
    ----------
    module
        The module.
    """

    undo: type[Undo] = Undo

    def __init__(self, module: nn.Module) -> None:
        self.asks_layout = False
        self.asks_looseness = False  # of arguments
        self.not_copied: set[int] = set()  # by memory, as it lies as it was asked to
        self.asked: dict[int, Tensor] = {}  # to require grad, as views of them do, by memory
        self.sees_answers = True  # nothing goes past the lookups of users
        self.tensors: dict[int, Tensor] = {}  # met at places that are held
        self._looked_at: set[int] = set()
        self._own = {id(m) for m in module.modules()}
        self._places: dict[tuple[int, Any], tuple[Any, Any, Any, Any, str]] = {}
        # What the user's code names of others' modules. PyTorch replaces some of it while it traces.
        self._named_only: dict[tuple[int, str], tuple[dict[str, Any], str, str]] = {}
        self._seen: dict[int, Seen] = {}
        self._frozen: dict[int, tuple[Any, Any]] = {}
        self._undo = self.undo()
        self._size = 0
        self._dicts: dict[int, tuple[Any, dict[str, Any], dict[str, Any], str]] = {}
        self._exchanged = [(None, state, tuple(state), tuple(state.values()), what) for state, what in _EXCHANGED]
        self._children = [
            (None, m._modules, tuple(m._modules), tuple(m._modules.values()), f"submodules of {type(m).__name__}")
            for m in module.modules()
        ]

    def refuse(self, cause: str, kind: type[NotExportable] = NotExportable) -> Any:
        """What to do about what cannot be held."""
        raise kind(cause)

    def _hold(self, holder: Any, key: Any, value: Any, what: str, of_object: bool = False) -> None:
        place = id(holder), key
        if isinstance(value, Opened) and value.is_open(holder, key):
            value.need()
        if place not in self._places and not isinstance(value, StandIn):
            if not of_object:
                self._undo.item(holder, key, value, what)
            self._places[place] = (holder, key, value, value, what)
            if value is not MISSING:
                self._places[place] = (holder, key, self._freeze(value, what), value, what)

    def _hold_itself(self, holder: Any, key: Any, value: Any, what: str) -> None:
        """Hold by identity alone what does not lead to other things, or leads to what is held anyway."""
        self._places.setdefault((id(holder), key), (holder, key, value, value, what))

    def _hold_content(self, value: Any, content: Callable[[Any], Any], what: str) -> None:
        now = content(value)
        holder = functools.partial(content, value)
        self._places[id(holder), None] = (holder, None, self._freeze(now, what), now, what)

    def _freeze(self, value: Any, what: str) -> Any:
        """A copy that does not change with the value, whose parts that are held by identity are themselves."""
        known = self._frozen.get(id(value))
        if known is None:
            self._frozen[id(value)] = value, value
            hold = _OF_KIND.get(type(value))
            frozen = self._follow(value, what) if hold is None else hold(self, value, what)
            known = self._frozen[id(value)] = value, value if frozen is None else frozen
        return known[1]

    def _follow(self, value: Any, what: str) -> Any:
        """Hold what leads to other things."""
        raise NotImplementedError

    def _as_it_is(self, _value: Any, _what: str) -> None:
        """What never changes, or what nobody is taken to change."""

    def _slice(self, value: Any, what: str) -> None:
        if any(type(v) not in (int, type(None)) for v in (value.start, value.stop, value.step)):
            self.refuse(f"{what} is a slice of other things than numbers")

    def _decimal(self, _value: Any, _what: str) -> None:
        self._hold_content(decimal.getcontext, _arithmetic, "the context of decimal")

    def _method(self, value: Any, what: str) -> None:
        if not isinstance(value.__func__, (types.FunctionType, types.BuiltinFunctionType)):
            self.refuse(f"{what} is a method of no function")  # whose own idea of what is equal would count
        self._hold(value, "__self__", value.__self__, what)
        self._freeze(value.__func__, what)

    def _items(self, value: Any, what: str) -> Any:
        """Of a list, tuple, dict or set."""
        if value is _BUILTINS:  # Dynamo, where an op of PyTorch calls it, puts them among the user's globals
            return value
        self._size += len(value)
        if self._size > _LARGEST:
            self.refuse(f"{what} holds more than {_LARGEST} things to compare")
            return value
        cls = type(value)
        if cls in (list, dict):
            self._undo.container(value, what)
        if cls is dict:
            return {self._freeze(k, what): self._freeze(v, what) for k, v in list(value.items())}
        copy = [self._freeze(v, what) for v in list(value)]
        if cls is tuple and all(map(operator.is_, copy, value)):  # which then cannot change
            return value
        return cls(copy)

    def _content(self, value: Any, what: str) -> None:
        """Of a set, whose order counts, and of what is like a dict or a tuple."""
        if isinstance(value, (dict, set)):
            self._undo.container(value, what)
        self._hold_content(value, content, what)
        self._hold(value, "__class__", type(value), what)

    def hold_value(self, t: Tensor) -> None:
        """Something was made of a tensor's elements, or its form, that is no tensor."""
        what = f"a tensor of shape {tuple(t.shape)}"
        if t.nbytes > _LARGEST_TENSOR:
            self.refuse(f"the forward looks at the values of {what}")
        elif id(t) not in self._looked_at:
            self._looked_at.add(id(t))
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                self._hold_content(t, tensor_content, what)

    def _tensor(self, value: Tensor, _what: str) -> None:
        self.tensors[id(value)] = value

    def _partial(self, value: Any, what: str) -> None:
        for name in ("func", "args", "keywords"):
            self._hold(value, name, getattr(value, name), what)
        self._hold_content(value, vars, what)

    def _mapping(self, value: types.MappingProxyType[Any, Any], what: str) -> None:
        """What only shows a dictionary; others may write into that."""
        self._hold_content(value, dict, what)

    def _descriptor(self, value: Any, what: str) -> None:
        for part in parts(value):
            self._freeze(part, what)

    def _keep(self, owner: Any, state: dict[str, Any], title: str) -> None:
        """Hold the keys of a dictionary."""
        if id(state) not in self._dicts:
            self._dicts[id(state)] = (owner, state, dict(state), title)
            self._undo.namespace(state, title)

    def check_results(self, result: Any, arguments: Any) -> None:
        """Refuse results that are, or hold, an object that was there before, as eager gives the object itself.

        So too functions that were not: they may hold what the trace has in the place of sizes, numbers and tensors.
        """
        there = {id(value) for value, _ in self._frozen.values()} | set(self._seen)
        pending, met = [arguments], set()
        while pending:
            value = pending.pop()
            if id(value) not in there and (_is_nest(value) or _holds_others(value)):
                there.add(id(value))
                pending += _inside(value) if _is_nest(value) else ()
        pending = [result]
        while pending:
            value = pending.pop()
            if id(value) not in there and (_holds_others(value) or _holds_others(type(value))):
                self.refuse("the forward gives a function that it makes, which may hold what it computed")
            if _is_nest(value):
                mutable = not isinstance(value, tuple)
                if mutable and (id(value) in there or id(value) in met):
                    self.refuse(f"the forward returns a {type(value).__name__} that was there before, or twice")
                met.add(id(value))
                pending += _inside(value)

    def writes(self) -> list[Write]:
        """Attributes of objects other than the module and its submodules that were set meanwhile."""
        return [
            Write(seen.owner, name, seen.before.get(name, MISSING), seen.now.get(name, MISSING))
            for seen in self._seen.values()
            if id(seen.owner) not in self._own
            for name in {**seen.before, **seen.now}
            if seen.now.get(name, MISSING) is not seen.before.get(name, MISSING)
        ]

    def held(
        self, writes: Sequence[Write], outside: Sequence[Tensor], registries: Sequence[Mapping[str, Tensor | None]]
    ) -> Held:
        """What has to be as it was.

        Parameters
        ----------
        outside
            Tensors that become inputs of the graph: they may get other values.
        registries
            Those of parameters and of buffers: others may come to lie there.
        writes
            What the forward sets. Of what it overwrites only the type is held, unless that is plain.
        """
        places: list[tuple[Any, Any, Any, str]] = []
        for w in writes:
            if not w.plain and not isinstance(w.before, (Opened, StandIn)):
                places.append((functools.partial(type_in, w.module.__dict__, w.name), None, type(w.before), str(w)))
        for registry, name in [(r, name) for r in registries for name in r] if self.asks_layout else ():
            lies = functools.partial(_lies_at, registry, name)
            places.append((lies, None, lies(), f"strides of {name}"))
        for t in outside:
            for name in ("shape", "dtype", "device", "requires_grad"):
                places.append((t, name, getattr(t, name), f"{name} of a tensor of shape {tuple(t.shape)}"))
        held = self._held(writes, {(id(w.module.__dict__), w.name) for w in writes if not w.plain}, places)
        return Held([*self._exchanged, *held[0]], held[1], self._answers(), self.libraries())

    def libraries(self) -> Sequence[Library]:
        """Modules of others that were met, as they are now."""
        return ()

    def _answers(self) -> list[tuple[Any, frozenset[str]]]:
        """Objects whose dictionaries may change, but for some names."""
        asked = [(s.owner, self._looked_up(s)) for s in self._seen.values() if self.sees_answers and s.answers]
        return [(owner, names) for owner, names in asked if names is not None]

    def _looked_up(self, seen: Seen) -> frozenset[str] | None:
        """The names by which its class may have looked, if these can be told."""
        if seen.answers is None:
            return None
        classes = [vars(c) for c in type(seen.owner).__mro__]
        names = set(seen.answers)
        for function in [c["__getattribute__"] for c in classes[:-1] if "__getattribute__" in c]:
            found = picked(function.__code__) if isinstance(function, types.FunctionType) else None
            if found is None or {"super", "object"} & function.__globals__.keys():
                return None
            names |= found.names | found.absent
            if any(seen.before.get(name) is not None for name in found.absent) or not _has_dict(classes):
                return None
            for table in found.tables:
                of_class: Any = next((c[table] for c in classes if table in c), {})
                value = seen.before.get(table, of_class)
                if type(of_class) is not dict or type(value) is not dict or table not in {*seen.before}.union(*classes):
                    return None
                if any(type(v) is not str for v in (*value, *value.values())):
                    return None
                names.update(value.values())
        return frozenset(names)

    def _held(
        self, writes: Sequence[Write], but: set[tuple[int, str]], more: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """All places `but` some, and `more`; dictionaries have what is written into them too."""
        added: dict[int, dict[str, None]] = {}
        for w in writes:
            if w.before is MISSING:
                added.setdefault(id(w.module.__dict__), {})[w.name] = None
        dicts: list[Any] = list(self._children)
        whole = [(s.owner, s.state, s.before, s.title) for s in self._seen.values() if s.state is not None]
        whole += self._dicts.values()
        inside = set()
        for owner, state, before, title in whole:
            at = id(state)
            inside.add(at)
            values = []
            keys = (*before, *[n for n in added.get(at, ()) if n not in before])
            for key in keys:
                known = self._places.get((at, key))
                values.append(MISSING if known is None or (at, key) in but else known[2])
            dicts.append((owner, state, keys, tuple(values), title))
        places = [
            (h, k, frozen, what)
            for (h, k, frozen, _, what) in self._places.values()
            if id(h) not in inside and (id(h), k) not in but
        ]
        places += [(state, name, state.get(name, MISSING), what) for state, name, what in self._named_only.values()]
        return dicts, [*places, *more]


def _lies_at(registry: Mapping[str, Tensor | None], name: str) -> tuple[int, ...] | None:
    t = registry.get(name)
    return None if t is None else layout(t)


def _arithmetic(context: Callable[[], decimal.Context]) -> Any:
    now = context()
    return now.prec, now.rounding, now.Emin, now.Emax, now.clamp


def _has_dict(classes: Sequence[Any]) -> bool:
    """Whether nothing in dictionaries of classes stands for that of their objects, but the dictionary itself."""
    return all(isinstance(c.get("__dict__"), (types.GetSetDescriptorType, types.NoneType)) for c in classes)


def _is_nest(value: Any) -> bool:
    return isinstance(value, (list, tuple, dict, set)) or (
        is_of_python(type(value)) and not isinstance(value, (type, types.FunctionType, enum.Enum, *SYMBOLIC))
    )


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple, set)) else list(getattr(value, "__dict__", {}).values())


_Hold = Callable[[Places, Any, str], Any]
# How a kind of object is held: as it is, by a copy that is given back, or by what it is made of.
_OF_KIND: dict[Any, _Hold] = {
    **dict.fromkeys(BY_VALUE | BY_REPR, Places._as_it_is),
    **dict.fromkeys((list, tuple, dict), Places._items),
    **dict.fromkeys((set, frozenset, torch.Size, collections.OrderedDict), Places._content),
    slice: Places._slice,
    decimal.Decimal: Places._decimal,
    types.MethodType: Places._method,
    functools.partial: Places._partial,
    types.MappingProxyType: Places._mapping,
}


def _holds_others(value: Any) -> bool:
    """Whether it is called and may have something of its own, such as a closure, attributes or bound arguments."""
    if isinstance(value, types.FunctionType):
        own = value.__closure__ or value.__defaults__ or value.__kwdefaults__ or value.__dict__
        return bool(own) and not _is_found_by_name(value)
    if isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
        return not isinstance(value.__self__, (types.ModuleType, type, type(None)))
    if isinstance(value, type):
        return not _is_found_by_name(value) and any(map(_is_traced, vars(value).values()))
    return callable(value)


def _is_found_by_name(value: Any) -> bool:
    """Whether a function or class was there before, where its name says."""
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def _is_traced(value: Any) -> bool:
    """Whether it is, or a function has, what stands for a tensor or a number in the trace."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        return any(map(_is_traced, (value.fget, value.fset, value.fdel)))
    if isinstance(value, types.FunctionType):
        cells = [c.cell_contents for c in value.__closure__ or () if c != types.CellType()]
        own = (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return any(isinstance(v, (Tensor, *SYMBOLIC)) for v in own)
    return isinstance(value, (Tensor, *SYMBOLIC))
