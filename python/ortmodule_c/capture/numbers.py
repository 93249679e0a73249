"""Numbers of Python's that a graph takes as inputs: symbols while it is traced, computed and compared at each call.

A number that is given to the forward stands in the trace as a :class:`Real` or a :class:`Whole`, which notes what
Python computes of it as a :class:`Term`. What an op of PyTorch is given becomes an input of the graph. At each call the
terms are computed again, by Python, of the numbers of that call: so none is rounded otherwise than in eager, and what
overflows, divides by zero or is no number does so as there. What the forward asks of a number, as a branch does, has to
come out as in the trace. Whoever needs the number itself, as text or as a size, gets it, and then it is not open.
"""

import functools
import itertools
import math
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..errors import NeedsStatic
from ..flatten import StandIn
from ..guards.frames import is_run_for_user

_DTYPES = {float: torch.float64, int: torch.int64}  # no digit is lost
_INT64 = range(-(2**63), 2**63)
_serial = itertools.count()

# What Python computes of numbers, by the names that it and PyTorch's symbols have for it.
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")},
    **{name: getattr(operator, name) for name in ("lshift", "rshift", "and_", "or_", "xor")},
}
_COMPARE = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_UNARY: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("neg", "pos", "abs")},
    **{"trunc": math.trunc, "floor": math.floor, "ceil": math.ceil, "round": round},
}
_OF_NODES: dict[str, Callable[..., Any]] = {
    **{name: f for name, f in (_BINARY | _COMPARE).items() if name not in ("and_", "or_", "xor")},
    **{name: operator.truediv for name in ("float_truediv", "int_truediv")},
    **{name: operator.pow for name in ("float_pow", "pow_by_natural")},
    **{"int_floordiv": operator.floordiv, "sym_min": min, "sym_max": max, "sym_and": operator.and_},
    **{"sym_or": operator.or_, "bitwise_and": operator.and_, "bitwise_or": operator.or_, "bitwise_xor": operator.xor},
    **{"and_": operator.and_, "or_": operator.or_},
    **{name: f for name, f in _UNARY.items() if name != "round"},
    **{"sym_float": float, "sym_int": int, "sym_not": operator.not_, "is_integer": lambda v: float(v).is_integer()},
}


class Term:
    """A given number, or what Python computes of such.

    Parameters
    ----------
    function
        What computes it; for a given number, its position.
    operands
        Terms and plain numbers.
    value
        It in the call that is traced.
    """

    __slots__ = ("function", "operands", "value")

    def __init__(self, function: Callable[..., Any] | int, operands: tuple[Any, ...], value: Any) -> None:
        self.function = function
        self.operands = operands
        self.value = value

    def of(self, given: Sequence[Any], known: dict["Term", Any]) -> Any:
        """It in another call. Raises what Python raises."""
        if self not in known:
            if isinstance(self.function, int):
                known[self] = given[self.function]
            else:
                known[self] = self.function(*[v.of(given, known) if isinstance(v, Term) else v for v in self.operands])
        return known[self]

    def given(self) -> set[int]:
        """Positions of the numbers that it is computed of."""
        if isinstance(self.function, int):
            return {self.function}
        return set().union(*[v.given() for v in self.operands if isinstance(v, Term)])


class Numbers:
    """The numbers of one call that is traced, and what the trace assumes of them.

    Parameters
    ----------
    given
        The numbers; None where one is not open.
    names
        What to call them.

    Attributes
    ----------
    symbols
        What stands for them in the trace.
    needed
        Positions of those whose values the trace needed after all.
    """

    def __init__(self, given: Sequence[Any], names: Sequence[str]) -> None:
        self._thread = threading.get_ident()
        self._names = names
        self._kinds = tuple([None if v is None else type(v) for v in given])
        self._env = ShapeEnv()
        self._asked: dict[Term, None] = {}
        self.needed: set[int] = set()
        self.symbols = [None if v is None else self.symbol(Term(i, (), v)) for i, v in enumerate(given)]

    def symbol(self, term: Term) -> Any:
        """What stands for a term in Python."""
        kind = None if self.elsewhere(term) else _KINDS.get(type(term.value))
        return term.value if kind is None else kind(Number(self, term, self._env))

    def elsewhere(self, term: Term) -> bool:
        """Whether it is another thread than the one that traces which is here: it gets numbers, which are then known.

        What it sets of them in the module is not the forward's doing, though it cannot be told from that.
        """
        if threading.get_ident() == self._thread:
            return False
        self.needed |= term.given()
        return True

    def compute(self, function: Callable[..., Any], operands: Sequence[Any]) -> Term:
        """What Python computes of terms and plain numbers."""
        value = function(*[v.value if isinstance(v, Term) else v for v in operands])
        term = Term(function, tuple(operands), value)
        if type(value) not in (float, int, bool):
            self.need(term)
        return term

    def ask(self, term: Term) -> Any:
        """Its value, which has to be the same in all calls."""
        if self.elsewhere(term):
            return term.value
        if type(term.value) is not bool:
            self.need(term)
        self._asked[term] = None
        return term.value

    def need(self, term: Term) -> None:
        """Raise, as these numbers cannot be open."""
        self.needed |= term.given()
        raise NeedsStatic(f"the value of {self.text(term)} has to be known")

    def text(self, term: Term) -> str:
        """What a term is computed of."""
        return " and ".join(self._names[i] for i in sorted(term.given()))

    def refuse(self, cause: str) -> None:
        """Raise, as none of them can be open."""
        self.needed |= {i for i, kind in enumerate(self._kinds) if kind is not None}
        raise NeedsStatic(f"a number cannot be open: {cause}")

    def check(self) -> None:
        """Raise what the forward may have caught."""
        if self.needed:
            raise NeedsStatic(f"the value of {self._names[min(self.needed)]} has to be known")

    def inputs(self, terms: Sequence[Term], device: torch.device) -> "Inputs":
        """What a graph on a device is given that was made of this trace, where it reads these terms."""
        self.check()
        for term in terms:
            if type(term.value) is int and term.value not in _INT64:
                self.need(term)
        return Inputs(tuple(terms), tuple(self._asked), self._kinds, device)


class Inputs:
    """Inputs of a graph that are computed of numbers of Python's.

    Parameters
    ----------
    terms
        The inputs.
    asked
        What has to come out as it did in the trace.
    kinds
        Of the numbers; None for one that is not open.
    device
        Where the graph computes.
    """

    def __init__(
        self,
        terms: tuple[Term, ...],
        asked: tuple[Term, ...],
        kinds: tuple[type | None, ...],
        device: torch.device | None = None,
    ) -> None:
        self._device = device or torch.device("cpu")
        self._terms = terms
        self._asked = asked
        self._kinds = kinds

    def read(self) -> set[int]:
        """Positions of the numbers that they are computed of, and of those that were asked something."""
        return set().union(*[term.given() for term in (*self._terms, *self._asked)])

    def of(self, given: Sequence[Any]) -> list[Tensor] | None:
        """The inputs for these numbers, scalars of 64 bits; None if the graph is not for them."""
        known: dict[Term, Any] = {}
        if any(kind is not None and type(v) is not kind for v, kind in zip(given, self._kinds, strict=True)):
            return None
        try:
            if any(term.of(given, known) is not term.value for term in self._asked):
                return None
            values = [term.of(given, known) for term in self._terms]
        except (ArithmeticError, ValueError):
            return None
        for term, value in zip(self._terms, values, strict=True):
            if type(value) is not type(term.value) or (type(value) is int and value not in _INT64):
                return None
        return [torch.tensor(v, dtype=_DTYPES[type(v)], device=self._device) for v in values]


class Number(SymNode):
    """What PyTorch sees of a term."""

    def __init__(self, numbers: Numbers, term: Term, env: ShapeEnv) -> None:
        kind = type(term.value)
        super().__init__(sympy.Symbol(f"number_{next(_serial)}"), env, kind, term.value)
        self.numbers = numbers
        self.term = term

    @property
    def constant(self) -> Any:
        """A tracer writes it into the graph as it does a constant."""
        return self.mark() if sys._getframe(1).f_globals.get("__name__") == _TRACER else None

    @constant.setter
    def constant(self, _value: Any) -> None:
        pass

    def mark(self) -> Any:
        """What a graph has for it among the arguments of a node, or its own results."""
        value = self.term.value
        if type(value) is bool:
            return self.ask()
        mark = _MARKS[type(value)](value)
        mark.symbol = self.numbers.symbol(self.term)
        return mark

    def ask(self, *_args: Any) -> Any:
        """Its value, which has to be the same in all calls."""
        return self.numbers.ask(self.term)

    def str(self) -> str:
        """It in messages."""
        return self.numbers.text(self.term)

    def maybe_as_int(self) -> None:
        """Not known."""

    maybe_as_float = maybe_as_bool = maybe_as_int


_TRACER = "torch.fx.experimental.proxy_tensor"


def operand(value: Any) -> Any:
    """A term or a plain number for what is computed with; NotImplemented for what numbers leave to the other."""
    if isinstance(value, StandIn):
        return value.node.term  # type: ignore[attr-defined]
    node = value if isinstance(value, SymNode) else getattr(value, "node", None)
    if isinstance(node, Number):
        return node.term
    if type(value) in (int, float, bool):
        return value
    if isinstance(node, SymNode) and node.constant is not None:
        return node.constant
    return NotImplemented if isinstance(value, (Tensor, str, type(None))) else _OTHER


_OTHER = object()  # a size that is open, or a number with an arithmetic of its own


def _of_node(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Number, *others: Any) -> Any:
        operands = [operand(v) for v in others]
        if _OTHER in operands:
            self.numbers.need(self.term)
        return Number(self.numbers, self.numbers.compute(function, [self.term, *operands]), self.numbers._env)

    return method


for _name, _function in _OF_NODES.items():
    setattr(Number, _name, _of_node(_function))
for _name in ("int", "float", "bool", "size_oblivious", "or_false", "or_true"):
    setattr(Number, f"guard_{_name}", Number.ask)
for _name in ("evaluate", "expect_true", "statically_known_true", "bool_", "int_"):
    setattr(Number, _name, Number.ask)


def _of_user(function: Callable[..., Any], reflected: bool = False) -> Callable[..., Any]:
    """An operation of Python's on symbols; a comparison is asked at once."""

    def method(self: Any, *others: Any) -> Any:
        numbers, term = self.node.numbers, self.node.term
        operands = [operand(v) for v in others]
        if NotImplemented in operands:
            return NotImplemented
        if _OTHER in operands:
            numbers.need(term)
        result = numbers.compute(function, [*operands, term] if reflected else [term, *operands])
        return numbers.ask(result) if type(result.value) is bool else numbers.symbol(result)

    return method


def _one_of(choose: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Of two numbers of which one is the larger; the tracer does not tell which of them comes first."""
    method, differ = _of_user(choose), _of_user(lambda a, b: a < b or a > b)

    def chosen(self: Any, other: Any) -> Any:
        if differ(self, other) is False:
            self.node.numbers.need(self.node.term)
        return method(self, other)

    return chosen


def _needed(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        numbers, term = self.node.numbers, self.node.term
        return function(term.value, *others) if numbers.elsewhere(term) else numbers.need(term)

    return method


def _written(function: Callable[..., str]) -> Callable[..., str]:
    """A text of a number, which the user's code gets of the number itself, and PyTorch's for its messages."""

    def method(self: Any, *how: str) -> str:
        numbers, term = self.node.numbers, self.node.term
        if numbers.elsewhere(term):
            return function(term.value, *how)
        return str(numbers.need(term) if is_run_for_user(sys._getframe(1)) else numbers.text(term))

    return method


_NEEDED: dict[str, Callable[..., Any]] = {
    **{"float": float, "int": int, "index": operator.index, "complex": complex, "divmod": divmod, "hash": hash},
    **{"rdivmod": lambda v, other: divmod(other, v), "invert": operator.invert},
}


_OPERATORS: dict[str, Any] = {
    **{f"__{name.rstrip('_')}__": _of_user(f) for name, f in (_BINARY | _COMPARE).items()},
    **{f"__r{name.rstrip('_')}__": _of_user(f, True) for name, f in _BINARY.items()},
    **{f"__{name}__": _of_user(f) for name, f in _UNARY.items()},
    **{f"__{name}__": _needed(f) for name, f in _NEEDED.items()},
    **{f"__{f.__name__}__": _written(f) for f in (format, repr, str)},
    "__array_ufunc__": None,  # NumPy's numbers leave the operation to it
    "__bool__": _of_user(bool),
    "__sym_max__": _one_of(max),
    "__sym_min__": _one_of(min),
    "is_integer": _of_user(lambda v: v.is_integer()),
}
Real = type("Real", (StandIn, torch.SymFloat), {"__doc__": "Stands for a float.", "kind": "real", **_OPERATORS})
Whole = type("Whole", (StandIn, torch.SymInt), {"__doc__": "Stands for an int.", "kind": "size", **_OPERATORS})
_KINDS = {float: Real, int: Whole, bool: torch.SymBool}


class _RealMark(float):
    """A number in the graph of a trace, where a symbol stands for it."""

    symbol: Any

    def __deepcopy__(self, _memo: Any) -> Any:
        return self


class _WholeMark(int):
    symbol: Any

    def __deepcopy__(self, _memo: Any) -> Any:
        return self


_MARKS: dict[type, Any] = {float: _RealMark, int: _WholeMark}


def marked(value: Any) -> Any:
    """A result as the graph of a trace has it."""
    return value.node.mark() if is_number(value) else value


def unmarked(value: Any) -> Any:
    """The symbol for an argument in the graph of a trace that is one."""
    return value.symbol if isinstance(value, (_RealMark, _WholeMark)) else value


def symbol(number: int) -> Any:
    """What stands for a number, while a graph that has it as a node is run by PyTorch to be traced again."""
    return _as_nodes[number]


_as_nodes: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def to_nodes(module: fx.GraphModule) -> None:
    """Give a graph, and those in it, a node for each number among the arguments: run again, it keeps the symbols."""
    for inner in [m for m in module.modules() if isinstance(m, fx.GraphModule)]:
        for node in list(inner.graph.nodes):
            with inner.graph.inserting_before(node):
                node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), _to_node(inner.graph))
        inner.recompile()


def _to_node(graph: fx.Graph) -> Callable[[Any], Any]:
    def node(value: Any) -> Any:
        stands = unmarked(value)
        if stands is value:
            return value
        number = next(_serial)
        _as_nodes[number] = stands
        made = graph.call_function(symbol, (number,))
        made.meta["val"] = stands
        return made

    return node


def is_number(value: Any) -> bool:
    """Whether a symbol stands for a number, or what is computed of such, and not for a size."""
    return isinstance(getattr(value, "node", None), Number)


def term_within(number: Any, dtype: torch.dtype) -> Term:
    """What stands for a number that an op of this dtype is given, where PyTorch takes it for what it is.

    Whether it is within the dtype's range has to be the same in all calls.
    """
    numbers, term = number.node.numbers, number.node.term
    if type(term.value) is float and not dtype.is_floating_point:
        numbers.need(term)
    if dtype not in _DTYPES.values() and not is_within(number, dtype):
        numbers.need(term)
    return term


def is_within(value: Any, dtype: torch.dtype) -> bool:
    """Whether a number, open or not, is within a dtype's range: if it is open, the same has to hold in all calls."""
    if is_number(value):
        numbers = value.node.numbers
        return bool(numbers.ask(numbers.compute(_within(dtype), [value.node.term])))
    return _within(dtype)(value)


@functools.cache
def _within(dtype: torch.dtype) -> Callable[[Any], bool]:
    if dtype == torch.bool:
        return lambda v: v in (0, 1)
    info: Any = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return lambda v: info.min <= v <= info.max or not math.isfinite(v)


def tensor_of_number(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """What ``torch.tensor`` makes of an open number, which by itself it would take for a constant; None of all else."""
    if function not in (torch.tensor, torch.as_tensor) or len(args) != 1 or not kwargs.keys() <= {"dtype", "device"}:
        return None
    (value,) = args
    if not is_number(value):
        return None
    dtype = kwargs.get("dtype")
    default = torch.int64 if isinstance(value, torch.SymInt) else torch.get_default_dtype()
    return torch.scalar_tensor(value, dtype=default if dtype is None else dtype, device=kwargs.get("device"))
