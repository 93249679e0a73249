"""What a forward does not read of its arguments, as its code shows: texts and paths that come along in a batch."""

from __future__ import annotations

import collections
import dis
import functools
import inspect
import types
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .bytecode import loads_to_call, with_inner
from .flatten import fields_of

_SEES_ALL = frozenset({"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe", "stack"})
_SILENT = frozenset({"PRECALL", "CACHE"})
# What is read within a comprehension, before Python 3.12 a function of its own, lies in a cell.
_COMPREHENSIONS = frozenset({"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"})
_FIELD: type = type(vars(collections.namedtuple("_Pair", "field"))["field"])


@dataclass(frozen=True)
class Reads:
    """What a function reads of its arguments.

    Attributes
    ----------
    unread
        The parameters that it does not look at.
    items, fields
        Of those that it only takes items or attributes of, by what is written in its code, these keys and names.
    """

    unread: frozenset[str]
    items: dict[str, frozenset[str]]
    fields: dict[str, frozenset[str]]

    def of(self, parameter: str, value: Any) -> Any:
        """As much of an argument as is read."""
        if parameter in self.unread:
            return None
        keys = self.items.get(parameter)
        if keys is not None:
            if type(value) is not dict or keys.issuperset(value):
                return value
            return {k: v for k, v in value.items() if k in keys}
        names = self.fields.get(parameter)
        return value if names is None else _with_fields(value, names)


def _with_fields(value: Any, names: frozenset[str]) -> Any:
    """An object or named tuple with these attributes alone; itself if they are not all that may be asked of it."""
    cls: Any = type(value)
    if _is_named_tuple(cls):
        if not names.issubset(cls._fields):
            return value
        return tuple.__new__(cls, [v if k in names else None for k, v in zip(cls._fields, value, strict=True)])
    if isinstance(value, (Tensor, tuple, list, dict, set, frozenset)):
        return value
    own = fields_of(value)
    if own is None or names.issuperset(own) or not names.issubset(own) or not _is_asked_plainly(cls, names):
        return value
    less = cls.__new__(cls)
    less.__dict__.update({k: v for k, v in own.items() if k in names})
    return less


def _is_named_tuple(cls: Any) -> bool:
    """Whether its fields are items, as those of `collections.namedtuple` are, and nothing else answers for them."""
    names = vars(cls).get("_fields")
    if cls.__bases__ != (tuple,) or not isinstance(names, tuple) or "__getattribute__" in vars(cls):
        return False
    fields = [vars(cls).get(name) for name in names]
    return all(type(field) is _FIELD and field.__reduce__()[1][0] == i for i, field in enumerate(fields))


def _is_asked_plainly(cls: Any, names: frozenset[str]) -> bool:
    """Whether its objects come and go unseen, and nothing but their dictionary answers for these attributes."""
    if cls.__getattribute__ is not object.__getattribute__ or cls.__new__ is not object.__new__:
        return False
    if hasattr(cls, "__del__"):
        return False
    return not any(hasattr(type(vars(c)[name]), "__get__") for c in cls.__mro__ for name in names & vars(c).keys())


@functools.lru_cache(maxsize=1024)
def reads(code: types.CodeType) -> Reads | None:
    """What the code of a method reads of its arguments; None if it is all that there is."""
    if any(_SEES_ALL.intersection(inner.co_names) for inner in with_inner(code)):
        return None
    n = code.co_argcount + code.co_kwonlyargcount
    n += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    inner = [c for c in with_inner(code) if c is not code]
    whole, taken = set[str](), dict[str, set[tuple[str, str]]]()
    for c in inner:
        whole.update(() if c.co_name in _COMPREHENSIONS else c.co_freevars)  # by a function it may go anywhere
    for part_of in (code, *inner):
        instructions = list(dis.get_instructions(part_of))
        for at, instruction in enumerate(instructions):
            if instruction.opname != "LOAD_DEREF" and ("LOAD_FAST" not in instruction.opname or part_of is not code):
                continue
            after = [i for i in instructions[at + 1 : at + 6] if i.opname not in _SILENT]
            part = _item(instructions[max(at - 1, 0) : at], instruction, after) or _field(instruction, after)
            if part is None:
                whole.update(instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,))
            else:
                taken.setdefault(instruction.argval, set()).add(part)
    parameters = frozenset(code.co_varnames[1:n])  # but for `self`
    parts = {name: of for name, of in taken.items() if name in parameters - whole}

    def by(way: str) -> dict[str, frozenset[str]]:
        return {p: frozenset([name for _, name in of]) for p, of in parts.items() if {w for w, _ in of} == {way}}

    found = Reads(parameters - whole - taken.keys(), by("item"), by("field"))
    return found if found.unread or found.items or found.fields else None


def _item(before: list[dis.Instruction], load: dis.Instruction, after: list[dis.Instruction]) -> tuple[str, str] | None:
    """The key if what is loaded is asked for an item that is written there, by ``[]``, ``in`` or ``get``."""
    match [i.opname for i in after]:
        case ["CONTAINS_OP", *_] if before and not load.is_jump_target:
            key = before[-1]
        case ["LOAD_CONST", "BINARY_SUBSCR", *_]:
            key = after[0]
        case [_, "LOAD_CONST", "CALL", *_] | [_, "LOAD_CONST", "LOAD_CONST", "CALL", *_] if _is_get(after[0]):
            key = after[1]
        case _:
            return None
    return ("item", key.argval) if key.opname == "LOAD_CONST" and type(key.argval) is str else None


def _field(load: dis.Instruction, after: list[dis.Instruction]) -> tuple[str, str] | None:
    """The name if what is loaded is asked for an attribute that is not called."""
    if isinstance(load.argval, tuple) or not after or after[0].opname != "LOAD_ATTR" or loads_to_call(after[0]):
        return None
    return None if after[0].argval.startswith("__") else ("field", after[0].argval)


def _is_get(instruction: dis.Instruction) -> bool:
    """Whether it takes the method `get` to call it."""
    return instruction.argval == "get" and loads_to_call(instruction)
