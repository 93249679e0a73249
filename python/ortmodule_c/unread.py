"""What a forward does not read of its arguments, as its code shows: texts and paths that come along in a batch."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .methods import loads_to_call

_SEES_ALL = frozenset({"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe", "stack"})
_SILENT = frozenset({"PRECALL", "CACHE"})


@dataclass(frozen=True)
class Reads:
    """What a function reads of its arguments.

    Attributes
    ----------
    unread
        The parameters that it does not look at.
    items
        Of those that it only takes items of, by keys that are written in its code, these keys.
    """

    unread: frozenset[str]
    items: dict[str, frozenset[str]]

    def of(self, parameter: str, value: Any) -> Any:
        """As much of an argument as is read."""
        if parameter in self.unread:
            return None
        keys = self.items.get(parameter)
        if keys is None or type(value) is not dict or keys.issuperset(value):
            return value
        return {k: v for k, v in value.items() if k in keys}


@functools.lru_cache(maxsize=1024)
def reads(code: types.CodeType) -> Reads | None:
    """What the code of a method reads of its arguments; None if it is all that there is."""
    if any(_SEES_ALL.intersection(inner.co_names) for inner in _with_inner(code)):
        return None
    n = code.co_argcount + code.co_kwonlyargcount
    n += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    whole, items = {*code.co_cellvars}, dict[str, set[str]]()
    instructions = list(dis.get_instructions(code))
    for at, instruction in enumerate(instructions):
        if "LOAD_FAST" not in instruction.opname:
            continue
        after = [i for i in instructions[at + 1 : at + 6] if i.opname not in _SILENT]
        key = _item(instructions[max(at - 1, 0) : at], instruction, after)
        if key is None:
            whole.update(instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,))
        else:
            items.setdefault(instruction.argval, set()).add(key)
    parameters = frozenset(code.co_varnames[1:n])  # but for `self`
    found = Reads(
        parameters - whole - items.keys(),
        {name: frozenset(keys) for name, keys in items.items() if name in parameters - whole},
    )
    return found if found.unread or found.items else None


def _item(before: list[dis.Instruction], load: dis.Instruction, after: list[dis.Instruction]) -> str | None:
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
    return key.argval if key.opname == "LOAD_CONST" and type(key.argval) is str else None


def _is_get(instruction: dis.Instruction) -> bool:
    """Whether it takes the method `get` to call it."""
    return instruction.argval == "get" and loads_to_call(instruction)


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)
