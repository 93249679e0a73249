"""Classes, functions and namespaces of the user's: held is what the code that runs names of them."""

import dataclasses
import enum
import functools
import types
from typing import Any

from torch import nn

from ..errors import NotExportable, NotRunnable
from .anatomy import HEAP, dict_of, functions_of, is_users_class, of_cell, parts
from .frames import is_trusted, is_trusted_module
from .held import BY_REPR, BY_VALUE, MISSING
from .places import Places

_DETAILS = frozenset(
    {"__getattribute__", "__doc__", "__module__", "__dict__", "__annotations__", "__weakref__", "__builtins__"}
)
# What a metaclass may do that is nothing to code which reads classes and calls them: make classes, and write to them.
_OF_MAKING = frozenset(
    {"__new__", "__init__", "__prepare__", "__setattr__", "__delattr__"}
    | {"__doc__", "__module__", "__annotations__", "__firstlineno__", "__static_attributes__"}
)
_PLAIN = (BY_VALUE - {types.MethodType}) | BY_REPR | {list, tuple, dict}
# What of a class is seen when it is used.
_OF_PYTHON = (
    *(types.FunctionType, types.NoneType, type, set, frozenset),
    type(vars(dataclasses.make_dataclass("_Made", ()))["__dataclass_params__"]),
)


class Namespaces(Places):
    """Places that names lead to.

    Parameters
    ----------
    module
        The module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.names: set[str] = set()  # that code which ran may look up
        self._asked: set[str] = set()
        self._classes: dict[Any, None] = {}
        self._namespaces: list[tuple[dict[str, Any], str, bool]] = []
        self._functions: dict[types.CodeType, list[types.FunctionType]] = {}
        self._owners: dict[types.CodeType, list[tuple[dict[str, Any], str, Any, str]]] = {}
        self._ran: set[types.CodeType] = set()

    def _class(self, cls: Any) -> None:
        if any(is_users_class(c) and vars(c).keys() - _OF_MAKING for c in type(cls).__mro__):
            kind = NotExportable if is_trusted_module(cls.__module__) else NotRunnable
            self.refuse(f"class {cls.__name__} has a metaclass of its own, {type(cls).__name__}", kind)
        if is_users_class(type(cls)) and type(cls) is not cls:  # a class may be its own metaclass
            self._hold(cls, "__class__", type(cls), f"the metaclass of class {cls.__name__}")
            self._class(type(cls))
        for c in cls.__mro__:
            if c in self._classes or not c.__flags__ & HEAP:
                continue
            self._classes[c] = None
            self._undo.of_class(c)
            state, title = dict_of(c), f"class {c.__name__}"
            if is_users_class(c) or issubclass(c, nn.Module):  # a trace exchanges methods of PyTorch's other classes
                self._keep(None, state, title)
            if is_users_class(c):
                self._hold_itself(c, "__bases__", c.__bases__, f"the bases of {title}")
                if issubclass(c, enum.Enum):
                    self._hold_itself(functools.partial(_members, c), None, _members(c), f"the members of {title}")
                for name, value in list(vars(c).items()):
                    for function in functions_of(value):
                        owner = (state, name, value, f"attribute {name} of {title}")
                        self._owners.setdefault(function.__code__, []).append(owner)
                        if self._register(function) and function.__code__ in self._ran:  # as that of another class
                            self._hold(*owner)
                            self._hold_function(function, False)
                self._add_names(state, title)

    def _whole_class(self, cls: Any) -> None:
        """Hold all that the user's classes have: plain things by value, whatever else by identity."""
        self._class(cls)
        for c in [c for c in cls.__mro__ if is_users_class(c)]:
            state = dict_of(c)
            for name in state.keys() - _DETAILS:
                value, what = state[name], f"attribute {name} of class {c.__name__}"
                if type(value) in _PLAIN:
                    self._hold(state, name, value, what)
                else:
                    self.sees_answers &= all(isinstance(v, _OF_PYTHON) for v in parts(value) or (value,))
                    self._hold_itself(state, name, value, what)

    def _add_names(self, state: dict[str, Any], title: str, absence_counts: bool = False) -> None:
        """Hold what code names of it; what is not there only if code asks for that, or its absence counts anyway."""
        self._namespaces.append((state, title, absence_counts))
        self._named(state, title, self.names, self.names if absence_counts else self._asked)

    def _named(self, state: dict[str, Any], title: str, names: set[str], asked: set[str]) -> None:
        for name in names & state.keys() - _DETAILS:
            self._hold(state, name, state[name], f"attribute {name} of {title}")
        if id(state) not in self._dicts:
            for name in asked - state.keys():
                self._hold(state, name, MISSING, f"attribute {name} of {title}")

    def _register(self, function: types.FunctionType) -> bool:
        """Whether a function was unknown; it is found by its code from now on."""
        known = self._functions.setdefault(function.__code__, [])
        if any(f is function for f in known):
            return False
        known.append(function)
        return True

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        self._register(function)
        trusted = is_trusted(code.co_filename, function.__globals__)
        if code in self._ran or trusted:
            self._hold_function(function, trusted)
        if not trusted:
            self._keep(function, function.__dict__, f"function {function.__name__}")
            self._add_names(function.__dict__, f"function {function.__name__}")

    def _hold_function(self, function: types.FunctionType, trusted: bool) -> None:
        name = function.__name__
        if trusted and is_trusted_module(function.__module__):
            return
        if not trusted:
            for part in ("__code__", "__defaults__", "__kwdefaults__"):
                self._hold(function, part, getattr(function, part), f"{part} of {name}")
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if trusted and isinstance(of_cell(cell), (list, dict, set)):
                self.refuse(f"{name} keeps what it does in variable {variable}")
            if variable != "__class__":
                self._hold(cell, "cell_contents", of_cell(cell), f"variable {variable} of {name}")


def _members(cls: Any) -> tuple[tuple[Any, ...], ...]:
    """What an enumeration finds its members by; those of flags that have no names are made when they are asked for."""
    names, by_name = (vars(cls).get(name, ()) for name in ("_member_names_", "_member_map_"))
    members = {id(m) for m in dict(by_name).values()}
    by_value = [*vars(cls).get("_value2member_map_", {}).items()]
    named = [(value, member) for value, member in by_value if id(member) in members]
    return tuple(names), tuple(dict(by_name).items()), tuple(named)
