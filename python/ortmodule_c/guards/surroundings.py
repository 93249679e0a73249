"""What code that TorchDynamo has traced may have read of Python: held, as its own guards compare less.

Dynamo takes -0.0 for 0.0 and True for 1, and misses attributes of functions and of lists, which objects are one, and
much of what is absent, inherited or patched. It runs no code that could be watched: held is what the code names.
"""

import abc
import collections
import contextlib
import contextvars
import dataclasses
import dis
import enum
import functools
import inspect
import random
import sys
import threading
import types
import weakref
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

from ..errors import NotExportable, NotRunnable
from .anatomy import (
    Seen,
    dict_of,
    functions_of,
    has_negative_zero,
    is_taken_for_its_base,
    is_users_class,
    of_cell,
    with_packages,
)
from .frames import is_trusted_module
from .held import INTERNAL, MISSING, Held
from .looks import Looks
from .undo import Nothing
from .watch import Watch

# What Dynamo has Python call, and traces no code of: of classes, and of members of enumerations.
_CALLED_OF_CLASSES = frozenset({"__class_getitem__", "__subclasshook__", "__hash__", "__eq__", "__ne__"})
_CALLED_OF_MEMBERS = frozenset(
    {"_missing_", "__bool__", "__len__", "__index__", "__int__", "__float__", "__str__", "__format__"}
    | {"__lt__", "__le__", "__gt__", "__ge__"}
)
_HASHED, _COMPARED = (dict, set, frozenset), (list, tuple, collections.deque)
_OF_TYPING = {"__orig_class__"}  # what `typing` writes into what is made by its aliases of classes
_OF_WRAPPERS = {*functools.WRAPPER_ASSIGNMENTS, "__wrapped__"}
_CONTAINS = dis.opmap["CONTAINS_OP"]
_MOST_CALLED = 1000  # functions, of which Dynamo traces none; what leads to more leads to all of a library
_FINDING = frozenset({"index", "count", "remove"})  # methods that compare what is in a list
_ORDER = frozenset({"vars", "dir", "__dict__"})  # give attributes in their order


class Surroundings(Watch):
    """All that names in the code lead to from a module, and from its arguments, on.

    Parameters
    ----------
    module
        What was traced.
    arguments
        What of its arguments is told apart by identity.
    traced
        The code that was: no other is looked at.

    Attributes
    ----------
    missed
        What of it Dynamo sees otherwise than eager, or nothing.
    """

    missed = ""
    bases = (
        *Watch.bases,
        *(list, set, frozenset, collections.deque, collections.defaultdict, types.SimpleNamespace),
    )
    undo = Nothing

    def __init__(self, module: nn.Module, arguments: Sequence[Any], traced: Collection[types.CodeType]) -> None:
        super().__init__(module)
        self._traced = set(traced)
        self._by_order, self._compares = _asks_for_order(traced), _asks_for_equals(traced)
        self._met: dict[types.CodeType, types.FunctionType] = {}
        self._to_enter: dict[types.CodeType, types.FunctionType] = {}
        self._called_by_python: set[types.CodeType] = set()
        self._is_called = self._calls_in_turn = False  # what is being entered
        self._later: dict[bool, tuple[set[str], set[str]]] = {}  # names to look up, by whether they are called in turn
        for m in module.modules():
            self._object(m, type(m).__name__)
            self._hold_forward(type(m))
            for function in functions_of(m.forward) or functions_of(getattr(m.forward, "__func__", None)):
                self._function(function)
                self._to_enter.setdefault(function.__code__, function)  # may have run between graphs
        for value in arguments:
            self._freeze(value, "an argument")
        self._enter_all()

    def follow(self, traced: Collection[types.CodeType]) -> bool:
        """Look at more code that was traced, where all is as it was; or tell that all has to be looked at once more."""
        if (_asks_for_order(traced) and not self._by_order) or (_asks_for_equals(traced) and not self._compares):
            return False
        self._traced.update(traced)
        self._to_enter.update({code: self._met[code] for code in traced if code in self._met})
        self._enter_all()
        return True

    def _hold_forward(self, cls: type) -> None:
        """That of PyTorch's layers, which Dynamo takes for what it was; the user's are followed."""
        owner = next(c for c in cls.__mro__ if "forward" in vars(c))
        if not is_users_class(owner):
            state = dict_of(owner)
            self._hold_itself(state, "forward", state["forward"], f"the forward of class {owner.__name__}")

    def _enter_all(self) -> None:
        for code in self._traced & self._of_pytorch.keys():  # which only PyTorch may have called
            self.refuse(f"{code.co_qualname} is in the place of {self._of_pytorch[code]}", NotRunnable)
        while self._to_enter or self._later:
            if not self._to_enter:  # of all code together: there is much of both
                self._calls_in_turn, (new, asked) = self._later.popitem()
                super()._look_up(new, asked)
                continue
            code, function = self._to_enter.popitem()
            self._is_called = code in self._called_by_python
            self._calls_in_turn = self._is_called and not _is_generated(code)
            if len(self._called_by_python) > _MOST_CALLED:
                self.refuse(f"of what Python calls, more than {_MOST_CALLED} functions are called in turn", NotRunnable)
                break
            if code not in self._ran:
                closed = dict(zip(code.co_freevars, map(of_cell, function.__closure__ or ()), strict=True))
                self._enter(code, function.__globals__, closed)

    def as_they_are(self) -> Held:
        """What they are now."""
        return Held(*self._held((), set(), ()), libraries=self.libraries())

    def refuse(self, cause: str, kind: type[NotExportable] = NotExportable) -> Any:
        """Leave to Dynamo what cannot be held, unless it would be wrong there."""
        if kind is NotRunnable:
            self.missed = self.missed or cause

    def _freeze(self, value: Any, what: str) -> Any:
        if isinstance(value, random.Random) and value is not getattr(random, "_inst", None):
            self.refuse(f"{what} is a generator of random numbers", NotRunnable)
        if isinstance(value, collections.deque) and value.maxlen is not None:
            self.refuse(f"{what} is a deque of bounded length", NotRunnable)
        if is_taken_for_its_base(type(value)):
            self.refuse(f"{what} is a {type(value).__qualname__}, which does not compute as its base does", NotRunnable)
        kind: Any = next((k for k in (*_HASHED, *_COMPARED) if isinstance(value, k)), None)
        looked_at = kind.__iter__(value) if kind in _HASHED or (kind and self._compares) else ()
        if any(map(_has_own_equality, looked_at)):
            self.refuse(f"{what} holds what is equal by a function of its own", NotRunnable)
        if has_negative_zero(value):
            self.refuse(f"{what} is or holds -0.0", NotRunnable)
        if (
            isinstance(value, dict)
            and type(value).__setattr__ is object.__setattr__
            and getattr(value, "__dict__", {}).keys() - _OF_TYPING
        ):
            self.refuse(f"{what} is a {type(value).__qualname__} with attributes beside its items", NotRunnable)
        if isinstance(value, functools.partial) and vars(value).keys() - _OF_WRAPPERS:
            self.refuse(f"{what} is a partial function with attributes", NotRunnable)
        return super()._freeze(value, what)

    def _refuse_kind(self, value: Any, what: str) -> None:
        if isinstance(value, contextvars.ContextVar):
            self._hold_content(value, _now_in, what)
        elif isinstance(value, threading.local):  # of each thread another; modules in it are guarded by nobody
            state = _of_this_thread(value)
            self._hold_itself(functools.partial(_which_thread, value), None, id(state), f"the thread that has {what}")
            self._add_names(state, what, absence_counts=True)
            self._class(type(value))
            self._hold(value, "__class__", type(value), what)
        elif isinstance(value, weakref.ReferenceType):  # what it leads to is guarded by nobody
            self.refuse(what, NotRunnable)

    def _enter(self, code: types.CodeType, scope: dict[str, Any], closed: dict[str, Any]) -> None:
        frame: Any = types.SimpleNamespace(f_code=code, f_globals=scope, f_locals=closed, f_back=None)
        self._entered(code, frame)
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                self._enter(inner, scope, {})

    def _import(self, name: str, scope: dict[str, Any]) -> None:
        """Dynamo writes modules down among the globals, and reads them there from then on."""
        for full in with_packages(name):
            written = scope.get(f"__import_{full.replace('.', '_dot_')}", MISSING)
            if written is not MISSING and written is not sys.modules.get(full):
                self.refuse(f"module {full} has been exchanged", NotRunnable)
        super()._import(name, scope)

    def _look_up(self, new: set[str], asked: set[str]) -> None:
        known = self._later.setdefault(self._calls_in_turn, (set(), set()))
        known[0].update(new)
        known[1].update(asked)

    def _check(self, look: Looks, code: types.CodeType, frame: types.FrameType) -> None:
        if not self._is_called:
            super()._check(look, code, frame)

    def _check_identity(self, look: Looks, code: types.CodeType) -> None:
        """What is asked by `is` Dynamo answers and guards."""
        if look.takes_identity:
            self._refuse_identity(code.co_qualname, NotRunnable)

    def _function(self, function: types.FunctionType) -> None:
        super()._function(function)
        for users in functions_of(function):
            if self._calls_in_turn:
                self._called_by_python.add(users.__code__)
            self._met.setdefault(users.__code__, users)
            if users.__code__ in self._traced or users.__code__ in self._called_by_python:
                self._to_enter.setdefault(users.__code__, users)

    def _put_lookup(self, _cls: Any) -> bool:
        return True

    def _object(self, value: Any, title: str) -> Seen:
        known = id(value) in self._seen
        seen = super()._object(value, title)
        if not known:
            for name, of_slot in seen.slots.items():
                self._hold(value, name, of_slot, f"attribute {name} of {title}")
            if is_trusted_module(type(value).__module__) and not isinstance(value, nn.Module):
                self._whole(seen)  # by code that is not looked at
            elif seen.state is not None:
                self._add_names(seen.state, title)
                if self._by_order:
                    self._hold_content(seen.state, tuple, f"order of attributes of {title}")
        return seen

    def _class(self, cls: Any) -> None:
        known = set(self._classes)
        super()._class(cls)
        if isinstance(cls, abc.ABCMeta):
            self._registered()
        for c in self._classes.keys() - known:
            called = _CALLED_OF_CLASSES | (_CALLED_OF_MEMBERS if issubclass(c, enum.Enum) else frozenset())
            for name, value in list(vars(c).items()):
                for function in functions_of(value):
                    if name in called:
                        self._called_by_python.add(function.__code__)
                    self._function(function)

    def _hold(self, holder: Any, key: Any, value: Any, what: str, of_object: bool = False) -> None:
        if isinstance(value, Tensor) or (key in INTERNAL and type(holder) is dict):  # which Dynamo follows
            return
        if value is sys.modules:
            return
        with contextlib.suppress(AttributeError):  # of what is broken
            super()._hold(holder, key, value, what, of_object)


def _asks_for_order(codes: Collection[types.CodeType]) -> bool:
    return any(not _ORDER.isdisjoint(code.co_names) for code in codes)


def _asks_for_equals(codes: Collection[types.CodeType]) -> bool:
    return any(_CONTAINS in code.co_code[::2] or not _FINDING.isdisjoint(code.co_names) for code in codes)


def _has_own_equality(value: Any, within: frozenset[int] = frozenset()) -> bool:
    """Whether somebody has written what makes it equal; Dynamo knows that of data classes of what has none."""
    cls: Any = type(value)
    owner = next(c for c in cls.__mro__ if "__eq__" in vars(c))
    code = getattr(cls.__eq__, "__code__", None)
    if owner in (tuple, list):
        parts = list(owner.__iter__(value))
    elif dataclasses.is_dataclass(cls) and code is not None and _is_generated(code):
        state = getattr(value, "__dict__", {})
        parts = [
            state[f.name] if f.name in state else _of_class(value, f.name)
            for f in dataclasses.fields(value)
            if f.compare
        ]
    else:
        return is_users_class(owner) and callable(cls.__eq__)
    inner = within | {id(value)}
    return any(_has_own_equality(part, inner) for part in parts if id(part) not in inner)


def _of_class(value: Any, name: str) -> Any:
    """An attribute that is not in the object's dict: that of a slot, if set, or what the class has in its place."""
    found = inspect.getattr_static(type(value), name, None)
    with contextlib.suppress(AttributeError):
        return found.__get__(value) if isinstance(found, types.MemberDescriptorType) else found
    return None


def _is_generated(code: types.CodeType) -> bool:
    """Whether a data class made it, which calls nothing by name; what equalities it comes to is for who holds them."""
    return code.co_filename == "<string>" and code.co_qualname.startswith("__create_fn__")


def _of_this_thread(value: threading.local) -> dict[str, Any]:
    state: dict[str, Any] = value.__dict__
    return state


def _which_thread(value: threading.local) -> int:
    return id(_of_this_thread(value))


def _now_in(variable: contextvars.ContextVar[Any]) -> list[Any]:
    return [variable.get(MISSING)]
