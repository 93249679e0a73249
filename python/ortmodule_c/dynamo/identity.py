"""What a forward's own code asks by `is`: answered as Python does, and guarded.

TorchDynamo by itself compiles nothing anew when a module, a parameter or a list that was compared becomes another one.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch._dynamo import symbolic_convert
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import ConstantSource, Source
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.sets import SetVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from ..guards.frames import is_trusted

_SEVERAL = (int, float, complex, str, bytes)  # constants that may be equal and not one
# What it makes of a tuple that is equal to another, places forgotten.
_WITHOUT_PLACE = (BaseListVariable, ConstDictVariable, SetVariable, ConstantVariable)
_HANDLERS = symbolic_convert.compare_op_handlers


def answer_as_python(applies: Callable[[], bool]) -> None:
    """Exchange what Dynamo does where something is compared by identity, for frames of which `applies` is true."""
    for name, wanted in (("is", True), ("is not", False)):
        _HANDLERS[name] = _answering(_HANDLERS[name], wanted, applies)


def _answering(compare: Callable[..., Any], wanted: bool, applies: Callable[[], bool]) -> Callable[..., Any]:
    def compared(tx: Any, sides: list[VariableTracker], kwargs: dict[str, Any]) -> VariableTracker:
        sides = [side.realize() for side in sides]
        if applies() and not is_trusted(tx.f_code.co_filename, tx.f_globals):
            answer = _are_one(tx, *sides)
            if answer is not None:
                return ConstantVariable.create(answer == wanted)
        result: VariableTracker = compare(tx, sides, kwargs)
        return result

    return compared


def _are_one(tx: Any, left: VariableTracker, right: VariableTracker) -> bool | None:
    """Whether two things that were there before are one; None where Dynamo knows."""
    if _is_single(left) or _is_single(right):
        return None
    sources = [side.source for side in (left, right) if side.source is not None]
    if any(isinstance(side, SymNodeVariable) for side in (left, right)):
        _ask_python("an open number")
    if any(side.source is None and isinstance(side, _WITHOUT_PLACE) for side in (left, right)):
        _ask_python("what may be part of a constant")
    if len(sources) != 2 or any(isinstance(source, ConstantSource) for source in sources):
        return None
    values = [_value(tx, source) for source in sources]
    if all(isinstance(v, torch.Tensor) and not isinstance(v, nn.Parameter) for v in values):  # others at each call
        return None
    if left is right:  # of which it keeps but one place
        _ask_python("what lies at two places")
    if any(v is not _value(tx, source) for v, source in zip(values, sources, strict=True)):
        return False  # made whenever it is asked for, as a method is
    for source in sources:
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))
    return values[0] is values[1]


def _is_single(side: VariableTracker) -> bool:
    """Whether it is None, a dtype or the like, of which there is one each."""
    return isinstance(side, ConstantVariable) and (type(side.value) is bool or not isinstance(side.value, _SEVERAL))


def _value(tx: Any, source: Source) -> Any:
    """What lies at a place now."""
    try:
        return tx.output.resolve_source_value(source)
    except Exception:
        _ask_python("what lies at no place")


def _ask_python(what: str) -> NoReturn:
    unimplemented(gb_type=f"identity of {what}", context="", explanation="it is asked in Python", hints=[])
