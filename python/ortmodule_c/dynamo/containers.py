"""Lists, tuples, dicts and sets in what TorchDynamo traces: as Python has them.

By itself it takes a list in a module's tuple of constants for a constant, and one at two of its places for two; it
finds no open number and no tensor in a list that is asked for a constant; and of what a forward has changed it writes
back new items alone where it does not know that some were taken away or moved, and nothing of a list that was extended
by the operator's name.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch._dynamo import utils
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import GetItemSource
from torch._dynamo.variables import LazyVariableTracker, TupleVariable, lists
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.sets import SetVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable


def have_as_python(applies: Callable[[], bool]) -> None:
    """Exchange what Dynamo does with them where `applies` is true."""
    _follow_lists_in_tuples(applies)
    _find_what_is_open(applies)
    _write_back_whole(applies)


def _follow_lists_in_tuples(applies: Callable[[], bool]) -> None:
    wrap: Callable[[VariableBuilder, Any], VariableTracker] = VariableBuilder.wrap_listlike

    def wrapped(builder: VariableBuilder, value: Any) -> VariableTracker:
        if not applies() or type(value) is not tuple or not any(map(_is_or_holds_list, value)):
            return wrap(builder, value)
        builder.install_guards(GuardBuilder.SEQUENCE_LENGTH)
        places = [GetItemSource(builder.get_source(), i) for i in range(len(value))]
        items = [LazyVariableTracker.create(v, place, tx=builder.tx) for v, place in zip(value, places, strict=True)]
        return TupleVariable(items, source=builder.source)

    VariableBuilder.wrap_listlike = wrapped  # type: ignore[assignment, method-assign]


def _is_or_holds_list(value: Any) -> bool:
    """Whether a part of a tuple can be changed: a list, or a set."""
    return type(value) in (list, set) or (type(value) is tuple and any(map(_is_or_holds_list, value)))


def _find_what_is_open(applies: Callable[[], bool]) -> None:
    contains = utils.iter_contains

    def found(items: Iterable[VariableTracker], search: VariableTracker, tx: Any, *args: Any, **kwargs: Any) -> Any:
        items = [*items]
        if applies() and search.is_python_constant() and any(map(_is_or_holds_open, items)):
            what = "an open number or a tensor in a list that is asked for a constant"
            unimplemented(gb_type=what, context="", explanation="Python compares it", hints=[])
        return contains(items, search, tx, *args, **kwargs)

    utils.iter_contains = found
    lists.iter_contains = found


def _is_or_holds_open(item: VariableTracker) -> bool:
    item = item.realize()
    if isinstance(item, BaseListVariable):
        return any(map(_is_or_holds_open, item.items))
    return isinstance(item, (SymNodeVariable, TensorVariable))


def _write_back_whole(applies: Callable[[], bool]) -> None:
    mutation: Callable[[SideEffects, VariableTracker], None] = SideEffects.mutation
    call_method: Callable[..., VariableTracker] = BaseListVariable.call_method

    def changed(effects: SideEffects, what: VariableTracker) -> None:
        if applies() and isinstance(what, (ConstDictVariable, SetVariable)):
            what.should_reconstruct_all = True
        mutation(effects, what)

    def called(of: BaseListVariable, tx: Any, name: str, *args: Any) -> VariableTracker:
        if applies() and name == "__iadd__":
            tx.output.side_effects.mutation(of)
        return call_method(of, tx, name, *args)

    SideEffects.mutation = changed  # type: ignore[assignment, method-assign]
    BaseListVariable.call_method = called  # type: ignore[assignment, method-assign]
