"""Does a forward itself ask for gradients that are differentiated again?

No graph of ours gives such. Dynamo breaks a graph where gradients are asked for, and what they are asked of has run by
then, so that it has to be known beforehand: from the code that the forward names.
"""

import itertools
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from ..bytecode import with_inner
from ..guards.anatomy import functions_of
from ..guards.frames import is_trusted, is_trusted_module

_WORD = "create_graph"


def asks_to_differentiate_gradients(module: nn.Module) -> str:
    """Where a forward in the module, or code that it names, mentions that it does; or nothing."""
    places: list[Any] = [*{id(type(m)): type(m) for m in module.modules()}.values()]
    todo: list[Any] = []
    for m in module.modules():
        todo += [m.forward, *[v for v in vars(m).values() if isinstance(v, FunctionType)]]
    seen: set[CodeType] = set()
    while todo:
        value = todo.pop()
        for function in functions_of(value.__func__ if isinstance(value, MethodType) else value):
            if function.__code__ in seen or is_trusted(function.__code__.co_filename, function.__globals__):
                continue
            seen.add(function.__code__)
            todo += [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
            for code in with_inner(function.__code__):
                if _WORD in itertools.chain.from_iterable(c if isinstance(c, tuple) else (c,) for c in code.co_consts):
                    return (
                        f"its forward may ask for gradients with {_WORD}, at {code.co_filename}:{code.co_firstlineno}"
                    )
                todo += _named(code, function.__globals__, places)
    return ""


def _named(code: CodeType, scope: dict[str, Any], classes: list[Any]) -> Iterator[Any]:
    """What the names in the code may stand for that has code itself."""
    for name in code.co_names:
        value = scope.get(name)
        if isinstance(value, ModuleType) and not is_trusted_module(value.__name__):
            yield from [vars(value).get(n) for n in code.co_names]
        elif not isinstance(value, type):
            yield value
        for cls in [*classes]:
            found = next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)
            if isinstance(found, type) and found not in classes:
                classes.append(found)
            yield found


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
