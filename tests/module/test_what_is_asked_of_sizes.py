"""Whatever a forward asks of a size that is open, the answer is that for the number."""

import copy
import functools
import json
import math
import numbers
import operator
import pickle
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from wrapped import Function, assert_same_steps, n_graphs

_kind = type


@functools.singledispatch
def _dispatched(_size: object) -> int:
    return 3


@_dispatched.register
def _(_size: int) -> int:
    return 2


@functools.lru_cache
def _half(size: int) -> int:
    return size // 2


def _matched(n: int) -> int:
    match n:
        case 7:
            return 5
        case int():
            return 2
        case _:
            return 3


def _looked_up(n: int) -> float:
    try:
        return {12: 2.0, 7: 3.0}[n]
    except Exception:
        return 9.0


def _written_or_not(n: int) -> int:
    try:
        return len(json.dumps(n))
    except TypeError:
        return 77


def _by_another_name(n: int) -> int:
    kind = type
    return 2 if kind(n) is int else 3


# Each makes a number of a size. A symbol instead of it gives another number, wherever it can.
ASKED_OF_A_SIZE: dict[str, Callable[[int], float]] = {
    "isinstance": lambda n: 2 if isinstance(n, int) else 3,
    "isinstance of several": lambda n: 2 if isinstance(n, (str, int)) else 3,
    "isinstance of an abstract class": lambda n: 2 if isinstance(n, numbers.Integral) else 3,
    "isinstance of a quotient": lambda n: 2 if isinstance(n / 2, float) else 3,
    "isinstance of a comparison": lambda n: 2 if isinstance(n > 8, bool) else 3,
    "isinstance of a symbol": lambda n: 2 if isinstance(n, torch.SymInt) else 3,
    "issubclass": lambda n: 2 if issubclass(n.__class__, int) else 3,
    "class": lambda n: 2 if n.__class__ is int else 3,
    "type": lambda n: 2 if type(n) is int else 3,
    "name of the type": lambda n: len(type(n).__name__),
    "type by another name": _by_another_name,
    "type by a global name": lambda n: len(_kind(n).__name__),
    "type as a default": lambda n, kind=type: len(kind(n).__name__),
    "type in map": lambda n: 2 if set(map(type, [n])) == {int} else 3,
    "f-string": lambda n: len(f"{n}"),
    "f-string with a format": lambda n: len(f"{n:,d}"),
    "format": lambda n: len("{}".format(n)),  # noqa: UP032
    "percent": lambda n: len("%s" % n),  # noqa: UP031
    "str": lambda n: len(str(n)),
    "repr": lambda n: len(repr([n])),
    "f-string of a quotient": lambda n: len(f"{n / 4}"),
    "json": lambda n: len(json.dumps(n)),
    "json or not": _written_or_not,
    "pickle": lambda n: len(pickle.dumps(n)),
    "copy": lambda n: 2 if isinstance(copy.copy(n), int) else 3,
    "is true": lambda n: 2 if (n > 8) is True else 3,
    "is true and so on": lambda n: 2 if ((n > 3) & True) is True else 3,
    "is a number": lambda n: 2 if n is 7 else 3,  # type: ignore[comparison-overlap]  # noqa: F632
    "id": lambda n: 2 if id(n) == id(7) else 3,
    "is an integer": lambda n: 2 if (n / 4).is_integer() is True else 3,
    "match": _matched,
    "dispatch": _dispatched,
    "dict": lambda n: {12: 2.0, 7: 3.0}.get(n, 5.0),
    "dict or not": _looked_up,
    "set": lambda n: 2 if n in {12, 7} else 3,
    "tuple": lambda n: 2 if n in (None, 7) else 3,
    "memo": _half,
    "text": lambda n: 2 if n == "7" else 3,  # type: ignore[comparison-overlap]
    "bit_length": lambda n: n.bit_length(),
    "hasattr": lambda n: 2 if hasattr(n, "numerator") else 3,
    "hasattr of a symbol": lambda n: 2 if hasattr(n, "node") else 3,
    "numerator": lambda n: n.numerator + n.real,
    "bytes": lambda n: sum(n.to_bytes(2, "little")),
    "inverted": lambda n: ~n,
    "divmod": lambda n: divmod(n, 5)[1],
    "sqrt": math.sqrt,
    "log": math.log,
    "rounded": lambda n: round(n / 4),
    "range": lambda n: sum(range(n)),
    "index": lambda n: [1.0, 2.0][operator.index(n) % 2],
    "bool as an index": lambda n: [2.0, 3.0][n > 8],
    "bool as a number": lambda n: (n > 8) + 1,
    "bytes of the object": sys.getsizeof,
    "array of as many": lambda n: np.zeros(n).size,
    "array of it": lambda n: 2 if np.array([n]).dtype == np.int64 else 3,
    "array times it": lambda n: 2 if (np.ones(2, np.float32) * n).dtype == np.float32 else 3,
    "it times array": lambda n: 2 if (n * np.ones(2, np.float32)).dtype == np.float32 else 3,
    "number of NumPy's": lambda n: np.int64(n).itemsize * float(np.int64(n)),
}


@pytest.mark.filterwarnings("ignore:ortmodule_c", "ignore:.*is.* with .*literal:SyntaxWarning")
@pytest.mark.parametrize("asked", ASKED_OF_A_SIZE)
def test_whatever_a_forward_asks_of_a_size_it_is_the_number_that_it_is_in_eager(asked: str) -> None:
    ask = ASKED_OF_A_SIZE[asked]
    module = Function(lambda m, x: m.a(x) * ask(x.shape[0]), a=nn.Linear(6, 4))
    assert_same_steps(module, *[(torch.randn(n, 6),) for n in (12, 7, 100, 8)])


@pytest.mark.parametrize("asked", ["isinstance", "isinstance of an abstract class", "class", "dispatch"])
def test_a_size_stays_open_that_is_asked_if_it_is_a_number(asked: str) -> None:
    ask = ASKED_OF_A_SIZE[asked]
    module = Function(lambda m, x: m.a(x) * ask(x.shape[0]), a=nn.Linear(6, 4))
    assert n_graphs(assert_same_steps(module, *[(torch.randn(n, 6),) for n in (12, 7, 100, 8)])) == 1


def test_the_shape_as_text_is_that_of_numbers() -> None:
    module = Function(lambda m, x: m.a(x) * len(str(x.shape)), a=nn.Linear(6, 4))
    assert_same_steps(module, *[(torch.randn(n, 3, 6),) for n in (12, 7, 100, 8)])
