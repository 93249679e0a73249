"""What a method does with its `self`, read from its code."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import types

_OF_A_VARIABLE = ("LOAD_FAST", "LOAD_DEREF")
_OF_AN_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
ITSELF = ""  # as a name of what is called


def code_of(function: types.FunctionType) -> types.CodeType:
    """The code that the user wrote, below decorators."""
    code: types.CodeType = getattr(inspect.unwrap(function), "__code__", function.__code__)
    return code


def looks_into_self(code: types.CodeType) -> bool:
    """Whether a method asks for the type or the dictionary of `self`."""
    return _looks_into(code, _first_argument(code))


def called_on_self(code: types.CodeType) -> frozenset[str]:
    """The attributes that a method calls, as in ``self.net(x)``, and `ITSELF` if it calls ``self(x)``."""
    return _called_on(code, _first_argument(code))


def loads_to_call(instruction: dis.Instruction) -> bool:
    """Whether an attribute is loaded to be called: before 3.12 by an instruction of its own, since then by a bit."""
    return instruction.opname == "LOAD_METHOD" or "NULL" in instruction.argrepr


def _first_argument(code: types.CodeType) -> str:
    return code.co_varnames[0] if code.co_argcount else ""


@functools.lru_cache(maxsize=1024)
def _looks_into(code: types.CodeType, this: str) -> bool:
    names = [i.argval[-1:] if isinstance(i.argval, tuple) else (i.argval,) for i in dis.get_instructions(code)]
    looks = {(("type",), (this,)), (("vars",), (this,)), ((this,), ("__dict__",))}
    return not looks.isdisjoint(itertools.pairwise(names)) or any(_looks_into(c, this) for c in _inner(code))


@functools.lru_cache(maxsize=1024)
def _called_on(code: types.CodeType, this: str) -> frozenset[str]:
    found: set[str] = set()
    instructions = list(dis.get_instructions(code))
    for before, now, after in zip(instructions, instructions[1:], instructions[2:], strict=False):
        if not any(load in now.opname for load in _OF_A_VARIABLE):
            continue
        if this != (now.argval[-1] if isinstance(now.argval, tuple) else now.argval):
            continue
        if after.opname in _OF_AN_ATTRIBUTE:
            if loads_to_call(after):
                found.add(after.argval)
        elif "PUSH_NULL" in (before.opname, after.opname):  # behind what is called from 3.13 on
            found.add(ITSELF)
    return frozenset(found).union(*(_called_on(c, this) for c in _inner(code)))


def _inner(code: types.CodeType) -> list[types.CodeType]:
    return [c for c in code.co_consts if isinstance(c, types.CodeType)]
