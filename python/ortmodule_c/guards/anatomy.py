"""What objects of Python are made of, and whose they are."""

import collections
import contextlib
import enum
import functools
import gc
import inspect
import logging
import math
import re
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from ..stack import LIBRARIES
from .frames import is_trusted, is_trusted_module
from .held import MISSING, Opened
from .policy import LOCKS

HEAP = 1 << 9  # of a class's flags: made by a `class` statement, or by C as if it were
IMMUTABLE = 1 << 8
_OF_MAKING = frozenset({"__new__", "__init__", "__init_subclass__", "__class__"})
_FIELD = type(vars(collections.namedtuple("_Named", "field"))["field"])
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
INERT = (
    *LOCKS,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    _FIELD,
    types.CodeType,
    types.GenericAlias,
    types.UnionType,
    re.Pattern,
    type(typing.Any),
    logging.Logger,
)


def dict_of(cls: Any) -> dict[str, Any]:
    """The dictionary of a class itself, not the proxy for it."""
    found: dict[str, Any] = gc.get_referents(vars(cls))[0]
    return found


def members(cls: Any) -> list[tuple[str, Any]]:
    """The slots of a class's instances."""
    members: dict[str, Any] = {}
    for c in cls.__mro__:
        if c.__flags__ & HEAP and "__slots__" in vars(c):
            for name, member in vars(c).items():
                if type(member) is types.MemberDescriptorType:
                    members.setdefault(name, member)
    return list(members.items())


def slots(owner: Any) -> dict[str, Any]:
    """What is in them; :data:`MISSING` if nothing is."""
    found: dict[str, Any] = {}
    for name, member in members(type(owner)):
        found[name] = MISSING
        with contextlib.suppress(AttributeError):
            found[name] = member.__get__(owner)
    return found


class Seen:
    """An object whose attributes are watched.

    Attributes
    ----------
    owner
        The object.
    state
        Its dictionary, which may be another's; None if it has none.
    before
        What was in it.
    slots
        What was in its slots.
    names
        Attributes that were read.
    answers
        The names that a lookup of the user's own was asked for, if all that was read of the object is by these.
    """

    __slots__ = ("answers", "before", "names", "owner", "slots", "state", "title")

    def __init__(self, owner: Any, title: str) -> None:
        self.owner, self.title = owner, title
        try:
            self.state: dict[str, Any] | None = object.__getattribute__(owner, "__dict__")
        except AttributeError:
            self.state = None
        self.before = dict(self.state or {})
        self.slots = slots(owner)
        self.names: set[str] = set()
        self.answers: set[str] | None = None

    def need_opened(self) -> None:
        """Raise if something stands for a number in it, as that may be read by other means than a lookup."""
        for name, value in self.before.items():
            if isinstance(value, Opened) and value.is_open(self.state, name):
                value.need()

    @property
    def now(self) -> dict[str, Any]:
        """What is in its dictionary."""
        return {} if self.state is None else self.state


def hooks_of(module: nn.Module) -> list[tuple[Any, ...]]:
    """What a call of a module calls before and after its forward, and how."""
    state = module.__dict__
    return [
        (hook, *[number in state.get(f"{name}_{how}", ()) for how in ("with_kwargs", "always_called")])
        for name in HOOKS
        for number, hook in (*state[name].items(), (None, None))
    ]


def functions_of(value: Any, inside: tuple[Any, ...] = ()) -> list[types.FunctionType]:
    """The functions of the user's that a value of a class's dictionary stands for, found `inside` others."""
    if isinstance(value, types.FunctionType):
        if not is_trusted(value.__code__.co_filename, value.__globals__):
            return [value]
        if any(value is function for function in inside):  # it calls itself
            return []
        return [f for cell in value.__closure__ or () for f in functions_of(of_cell(cell), (*inside, value))]
    return [f for part in parts(value) for f in functions_of(part, inside)]


def parts(value: Any) -> tuple[Any, ...]:
    """What a descriptor was made of."""
    if isinstance(value, property):
        return value.fget, value.fset, value.fdel
    if isinstance(value, functools.partialmethod):
        return (value.func,)
    return (value.__func__,) if isinstance(value, (staticmethod, classmethod)) else ()


def is_taken_for_its_base(cls: Any) -> bool:
    """Whether Dynamo sees a plain number or text, or the field of a tuple, where a class has functions of its own."""
    if issubclass(cls, tuple):
        names = inspect.getattr_static(cls, "_fields", ())
        return type(names) is not tuple or any(type(inspect.getattr_static(cls, n, None)) is not _FIELD for n in names)
    base = next((b for b in (int, float, complex, str, bytes) if issubclass(cls, b)), None)
    if base is None or issubclass(cls, enum.Enum):
        return False
    own = {n: v for c in cls.__mro__ if is_users_class(c) for n, v in vars(c).items() if n not in _OF_MAKING}
    functions = [n for n, v in own.items() if callable(v) or isinstance(v, property)]
    return any(hasattr(base, n) or n in ("__getattr__", "__call__") for n in functions)


def is_users_class(cls: Any) -> bool:
    """Whether it is no class of C and not found where it says it is from, in a library that is trusted."""
    if not cls.__flags__ & HEAP:
        return False
    found: Any = sys.modules.get(cls.__module__) if is_trusted_module(cls.__module__) else None
    for name in cls.__qualname__.split("."):
        if name == "<locals>":
            return found is None
        found = getattr(found, name, None)
    return found is not cls


def is_of_python(cls: Any, *bases: type) -> bool:
    """Whether its instances have nothing but attributes, and what they have as instances of the bases given."""
    return all(c in (object, *bases) or (c.__flags__ & HEAP and not c.__flags__ & IMMUTABLE) for c in cls.__mro__)


def _callers(frame: types.FrameType) -> Iterator[types.FrameType]:
    """The frame and those around it, as far as the forward."""
    at: types.FrameType | None = frame
    while at is not None and not at.f_code.co_filename.startswith(LIBRARIES[0]):
        yield at
        at = at.f_back


def is_importing(frame: types.FrameType) -> bool:
    """Whether it runs because a module of Python is imported."""
    codes = [at.f_code for at in _callers(frame)]
    return any(c.co_name == "<module>" and not c.co_filename.startswith("<") for c in codes)


def is_remembered(frame: types.FrameType) -> bool:
    """Whether it runs within a method that runs once for equal arguments, as one that warns only once does."""
    return any(map(_is_memo, _callers(frame)))


def _is_memo(frame: types.FrameType) -> bool:
    first = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
    return isinstance(getattr(type(first), frame.f_code.co_name, None), functools._lru_cache_wrapper)


def of_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def imported(name: str, package: str) -> Any:
    """The module of Python that code in a package may import by a name."""
    while name not in sys.modules and package:
        if f"{package}.{name}" in sys.modules:
            return sys.modules[f"{package}.{name}"]
        package = package.rpartition(".")[0]
    return sys.modules.get(name)


def with_packages(name: str) -> list[str]:
    """The module of Python of that name after the packages that it is in."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def has_negative_zero(value: Any) -> bool:
    """Whether it is a number with a zero that has a sign."""
    if isinstance(value, (complex, numpy.complexfloating)):
        return has_negative_zero(value.real) or has_negative_zero(value.imag)
    return isinstance(value, (float, numpy.floating)) and value == 0 and math.copysign(1, value) < 0


def type_in(state: dict[str, Any], name: str) -> Any:
    return type(state.get(name, MISSING))


def tensor_content(t: Tensor) -> Any:
    with torch.no_grad():
        return t.shape, t.dtype, bytes(t.detach().contiguous().view(-1).view(torch.uint8).tolist())


def content(value: Any) -> list[Any]:
    """What is in a set, or in what is like a dict, a tuple or a list, in order."""
    if type(value) in (set, frozenset):
        return list(value)
    if isinstance(value, dict):
        kind: Any = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        return list(kind.items(value))
    kind = next(k for k in (tuple, list, collections.deque, set, frozenset) if isinstance(value, k))
    return list(kind.__iter__(value))
