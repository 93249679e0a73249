"""Nests are taken apart and put together again, and their descriptions compare by value."""

import collections
import dataclasses
import enum
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule_c.flatten import flatten, leaf_paths, unflatten

Point = collections.namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    mask: Any = None


class Cache:
    def __init__(self, layers: list[torch.Tensor]) -> None:
        self.layers = layers
        self.length = 3


def rebuilt(value: Any) -> Any:
    leaves, spec = flatten(value)
    return unflatten(spec, iter(leaves))


T = torch.ones(2)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2.5,
        "s",
        torch.float32,
        Colour.RED,
        slice(1, None, 2),
        range(3),
        {1, 2},
        1j,
        ...,
        [],
        (),
        {},
        [1, [2, (3,)]],
        {"a": {"b": 1}},
        Point(1, 2),
        collections.OrderedDict(a=1),
    ],
    ids=str,
)
def test_plain_values_come_back(value: Any) -> None:
    out = rebuilt(value)
    assert out == value and type(out) is type(value)


@pytest.mark.parametrize(
    "wrap", [lambda t: t, lambda t: [t], lambda t: (1, t), lambda t: {"k": [t, None]}, lambda t: Point(t, 0)]
)
def test_tensors_are_the_leaves(wrap: Any) -> None:
    leaves, spec = flatten(wrap(T))
    assert leaves == [T]
    other = torch.zeros(2)
    assert flatten(unflatten(spec, iter([other])))[0] == [other]


def test_dataclass_and_unknown_class() -> None:
    assert rebuilt(Batch(T)).ids is T
    cache = rebuilt(Cache([T, T]))
    assert isinstance(cache, Cache) and cache.layers[1] is T and cache.length == 3


def test_model_output() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    out = rebuilt(outputs.CausalLMOutput(loss=None, logits=T))
    assert type(out) is outputs.CausalLMOutput and out.logits is T and out.loss is None


@pytest.mark.parametrize(
    ("a", "b"),
    [(1, True), (1, 1.0), (0.0, -0.0), ([1], (1,)), ({"a": 1}, {"b": 1}), (None, T), ("a", b"a"), (1.0, 2.0)],
    ids=str,
)
def test_different_nests_differ(a: Any, b: Any) -> None:
    assert flatten(a)[1] != flatten(b)[1]


def test_equal_nests_are_equal_and_hashable() -> None:
    nan = float("nan")
    a, b = flatten({"a": [T, 1.5, nan]})[1], flatten({"a": [torch.zeros(9), 1.5, float("nan")]})[1]
    assert a == b and hash(a) == hash(b)


def test_paths_name_every_leaf() -> None:
    _, spec = flatten(((T,), {"batch": [T, {"x": T}], "cache": Cache([T])}))
    assert leaf_paths(spec) == ["[0][0]", "[1]['batch'][0]", "[1]['batch'][1]['x']", "[1]['cache'].layers[0]"]


def test_what_cannot_be_described() -> None:
    with pytest.raises(TypeError, match="Generator"):
        flatten([torch.Generator()])
    with pytest.raises(TypeError, match="Linear"):
        flatten({"m": nn.Linear(1, 1)})
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="contains itself"):
        flatten(loop)
