"""Values that a forward makes a number of: what makes one, how it is read, how it changes in place."""

from __future__ import annotations

import array
import collections
import decimal
import enum
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class Colour(enum.Enum):
    RED = 2
    BLUE = 3


class Scaling:
    """Called."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, value: float) -> float:
        return value * self.by


def doubled(value: float) -> float:
    return 2 * value


def squared(value: float) -> float:
    return value * value


def closing(by: float) -> Callable[[float], float]:
    return lambda value: value * by


def times(value: float, by: float = 1.0) -> float:
    return value * by


class Which(torch.nn.Module):
    """Asked which one it is."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def is_it(self, other: Any) -> bool:
        return self is other


KEPT = [[1.0]]
ONE = Which()
Number = Callable[[int], Any]

# What makes one, different each time, and what the forward makes of it.
LEAVES: dict[str, tuple[Number, str]] = {
    "int": (lambda n: n, "{}"),
    "float": (lambda n: n + 0.5, "{}"),
    "zero": (lambda n: 0.0 if n % 2 else -0.0, "math.copysign(2.0, {})"),
    "bool": (lambda n: n % 2 == 0, "(3.0 if {} else 2.0)"),
    "str": (lambda n: "a" * n, "len({})"),
    "none": (lambda n: None if n % 2 else n, "({0} or 7)"),
    "complex": (lambda n: complex(n, 1), "{}.real"),
    "minus": (lambda n: complex(1, 0.0 if n % 2 else -0.0), "math.copysign(2.0, {}.imag)"),
    "enum": (lambda n: list(Colour)[n % 2], "{}.value"),
    "dtype": (lambda n: (torch.float16, torch.int32)[n % 2], "torch.full((), 2.7, dtype={}).float()"),
    "bytes": (lambda n: b"a" * n, "len({})"),
    "slice": (lambda n: slice(0, n % 3 + 1), "x[:, {}].sum()"),
    "range": (range, "sum({})"),
    "stop": (lambda n: range(0, n, n), "{}.stop"),
    "decimal": (lambda n: decimal.Decimal("1." + "0" * n), "len(str({}))"),
    "identity": (lambda n: [KEPT[0], [1.0] if n % 2 else KEPT[0]], "(2.0 if {0}[0] is {0}[1] else 3.0)"),
    "pair": (lambda n: [KEPT[0], [1.0] if n % 2 else KEPT[0]], "(2.0 if are_one(*{}) else 3.0)"),
    "which": (lambda n: [ONE, Which() if n % 2 else ONE], "(2.0 if {0}[0].is_it({0}[1]) else 3.0)"),
    "ofmodule": (lambda n: Which(float(n)), "{}.scale"),
    "numbers": (lambda n: {(1,)} if n % 2 else {(1.0,)}, "len(str(next(iter({}))))"),
    "set": (lambda n: {1, n}, "sum({})"),
    "frozen": (lambda n: frozenset({1, n}), "sum({})"),
    "tuple": (lambda n: (n, 1.0), "sum({})"),
    "int64": (np.int64, "int({})"),
    "float32": (np.float32, "float({})"),
    "numpyzero": (lambda n: np.float64(0.0 if n % 2 else -0.0), "math.copysign(2.0, {})"),
    "ndarray": (lambda n: np.array([1.0, n]), "float({}.sum())"),
    "fromnumpy": (lambda n: np.array([1.0, n], dtype=np.float32), "torch.from_numpy({}).sum()"),
    "array": (lambda n: array.array("d", [1.0, n]), "{}[1]"),
    "bytearray": (lambda n: bytearray([1, n]), "{}[1]"),
    "deque": (lambda n: collections.deque([1.0, n]), "{}[1]"),
    "list": (lambda n: [1.0, n], "sum({})"),
    "tensor": (lambda n: torch.tensor([float(n)]), "{}"),
    "item": (lambda n: torch.tensor(float(n)), "{}.item()"),
    "shape": (torch.ones, "{}.shape[0]"),
    "data": (lambda n: torch.tensor([float(n)]), "{}.data"),
    "function": (lambda n: (doubled, squared)[n % 2], "{}(3.0)"),
    "closure": (lambda n: closing(float(n)), "{}(3.0)"),
    "lambda": (lambda n: (lambda v: v + 1.0) if n % 2 else (lambda v: v + 2.0), "{}(3.0)"),
    "partial": (lambda n: functools.partial(times, by=float(n)), "{}(3.0)"),
    "callable": (lambda n: Scaling(float(n)), "{}(3.0)"),
    "method": (lambda n: Scaling(float(n)).__call__, "{}(3.0)"),
}


def _add_to_list(v: Any, n: int) -> None:
    v.append(float(n))


def _set_second(v: Any, n: int) -> None:
    v[1] = n


def _fill(v: Any, n: int) -> None:
    v.fill_(float(n))


def _fill_data(v: Any, n: int) -> None:
    v.data.fill_(float(n))


def _by(v: Any, n: int) -> None:
    getattr(v, "__self__", v).by = float(n)


# Changes in place.
IN_PLACE: dict[str, Callable[[Any, int], None]] = {
    "list": _add_to_list,
    "set": lambda v, n: v.add(n + 10),
    "deque": _set_second,
    "array": _set_second,
    "bytearray": _set_second,
    "ndarray": _set_second,
    "fromnumpy": _set_second,
    "tensor": _fill,
    "item": _fill,
    "data": _fill_data,
    "shape": lambda v, n: v.resize_(n),
    "callable": _by,
    "method": _by,
    "partial": lambda v, n: v.keywords.update(by=float(n)),
    "closure": lambda v, n: setattr(v.__closure__[0], "cell_contents", float(n)),
}
