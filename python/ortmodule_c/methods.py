"""What a method does with its `self`, read from its code."""

from __future__ import annotations

import dis
import functools
import itertools
import types

from .bytecode import loads_to_call, with_inner

_OF_A_VARIABLE = ("LOAD_FAST", "LOAD_DEREF")
_OF_AN_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
ITSELF = ""  # as a name of what is called


@functools.lru_cache(maxsize=1024)
def looks_into_self(code: types.CodeType) -> bool:
    """Whether a method asks for the type or the dictionary of `self`."""
    return any(_looks_into(inner, _first_argument(code)) for inner in with_inner(code))


@functools.lru_cache(maxsize=1024)
def called_on_self(code: types.CodeType) -> frozenset[str]:
    """The attributes that a method calls, as in ``self.net(x)``, and `ITSELF` if it calls ``self(x)``."""
    return frozenset().union(*[_called_on(inner, _first_argument(code)) for inner in with_inner(code)])


def _first_argument(code: types.CodeType) -> str:
    return code.co_varnames[0] if code.co_argcount else ""


def _looks_into(code: types.CodeType, this: str) -> bool:
    names = [i.argval[-1:] if isinstance(i.argval, tuple) else (i.argval,) for i in dis.get_instructions(code)]
    looks = {(("type",), (this,)), (("vars",), (this,)), ((this,), ("__dict__",))}
    return not looks.isdisjoint(itertools.pairwise(names))


def _called_on(code: types.CodeType, this: str) -> set[str]:
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
    return found
