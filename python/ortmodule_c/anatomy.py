"""What objects of Python are made of: slots, contents, functions; and what became of them."""

import array
import collections
import contextlib
import enum
import functools
import gc
import logging
import pickle
import random
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .frames import is_trusted, is_trusted_module
from .guards import BY_VALUE, MISSING
from .stack import LIBRARIES

HEAP = 1 << 9  # of a class's flags: made by a `class` statement, or by C as if it were
IMMUTABLE = 1 << 8
Memo: Any = functools._lru_cache_wrapper
INERT = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    type(vars(collections.namedtuple("_Named", "field"))["field"]),
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
    """

    __slots__ = ("before", "names", "owner", "slots", "state", "title")

    def __init__(self, owner: Any, title: str) -> None:
        self.owner, self.title = owner, title
        try:
            self.state: dict[str, Any] | None = object.__getattribute__(owner, "__dict__")
        except AttributeError:
            self.state = None
        self.before = dict(self.state or {})
        self.slots = slots(owner)
        self.names: set[str] = set()

    @property
    def now(self) -> dict[str, Any]:
        """What is in its dictionary."""
        return {} if self.state is None else self.state


def remembered(memo: Any) -> list[Any]:
    """The results that a memo has by now, and parts of it that never change."""
    parts = [part for part in gc.get_referents(memo) if part is not memo.__dict__]
    caches = [part for part in parts if isinstance(part, dict)]
    if memo.cache_parameters()["maxsize"] is None:
        return [value for cache in caches for value in cache.values()]
    links = [c for c in caches if all(type(v).__name__ == "_lru_list_elem" for v in c.values())]
    keys = {id(key) for cache in links for key in cache}
    return [part for part in parts if id(part) not in keys and all(part is not c for c in links)]


def is_constant(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_constant, value))
    return type(value) in BY_VALUE or isinstance(value, (*INERT, type, enum.Enum, types.FunctionType, types.ModuleType))


def parts(value: Any) -> tuple[Any, ...]:
    """What a descriptor or a memo was made of."""
    if isinstance(value, property):
        return value.fget, value.fset, value.fdel
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, (functools.cached_property, functools.partialmethod)):
        return (value.func,)
    return (value.__wrapped__,) if isinstance(value, Memo) else ()


def functions_of(value: Any, inside: tuple[Any, ...] = ()) -> list[types.FunctionType]:
    """The functions of the user's that a value of a class's dictionary stands for, found `inside` others."""
    if isinstance(value, types.FunctionType):
        if not is_trusted(value.__code__.co_filename, value.__globals__):
            return [value]
        if any(value is function for function in inside):  # it calls itself
            return []
        return [f for cell in value.__closure__ or () for f in functions_of(of_cell(cell), (*inside, value))]
    return [f for part in parts(value) for f in functions_of(part, inside)]


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


def is_of_python(cls: Any) -> bool:
    """Whether its instances have nothing but attributes: no class of C but `object` is among its bases."""
    return all(c is object or (c.__flags__ & HEAP and not c.__flags__ & IMMUTABLE) for c in cls.__mro__)


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
    return isinstance(getattr(type(first), frame.f_code.co_name, None), Memo)


def is_plain_slice(value: slice) -> bool:
    return all(type(v) in (int, type(None)) for v in (value.start, value.stop, value.step))


def of_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def type_in(state: dict[str, Any], name: str) -> Any:
    return type(state.get(name, MISSING))


# Contents, as lists and tuples


def tensor_content(t: Tensor) -> Any:
    with torch.no_grad():
        return t.shape, t.dtype, bytes(t.detach().contiguous().view(-1).view(torch.uint8).tolist())


def state_of_random(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    holder = getattr(value, "_bit_generator", None) or value.bit_generator

    def put(state: Any) -> None:
        holder.state = state

    return lambda: holder.state, put


def same_content(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(dict.get(now, k, MISSING) is v for k, v in before.items())
    if isinstance(now, (set, frozenset, array.array, bytearray)):
        return bool(now == before)
    return all(x is y for x, y in zip(now, before, strict=True))


def refill(value: Any, content: Any) -> None:
    if isinstance(value, (array.array, bytearray)):
        value[:] = content
        return
    put = value.update if isinstance(value, (dict, set)) else value.extend
    value.clear()
    put(content)


def same_items(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return len(now) == len(before) and all(n in now and now[n] is v for n, v in before.items())


def same_state(now: Any, before: Any) -> bool:
    return pickle.dumps(now) == pickle.dumps(before)


CONTENTS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (collections.OrderedDict, lambda v: list(collections.OrderedDict.items(v))),
    (dict, lambda v: list(dict.items(v))),
    (types.MappingProxyType, lambda v: list(v.items())),
    (list, list.copy),
    (tuple, lambda v: list(tuple.__iter__(v))),
    ((set, frozenset), list),
    ((collections.deque, bytearray, array.array), list),
)
