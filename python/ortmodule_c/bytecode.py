"""What code objects are made of."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Iterator


def code_of(function: types.FunctionType) -> types.CodeType:
    """The code that the user wrote, below decorators."""
    code: types.CodeType = getattr(inspect.unwrap(function), "__code__", function.__code__)
    return code


def with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object, and those of the functions and classes that are written in it, and in these."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from with_inner(constant)


def loads_to_call(instruction: dis.Instruction) -> bool:
    """Whether an attribute is loaded to be called: before 3.12 by an instruction of its own, since then by a bit."""
    return instruction.opname == "LOAD_METHOD" or "NULL" in instruction.argrepr
